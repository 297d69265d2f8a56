"""The example notebook runs from top to bottom, in a real kernel whose environment is not activated."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from headwater.testing.node import HeadwaterNode
from headwater.testing.nursery import Nursery
from support.forked_program import run_program

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELL_S_MAX = 300


def outputs(nursery: Nursery, folder: Path, *, spark: bool) -> list[str]:
    """What each cell of code shows, as the text or the HTML of its last value, with what it has printed before."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if spark or "spark" not in cell.metadata.get("tags", [])]
    notebook.cells = cells
    for name in ("node", "work"):
        (folder / name).mkdir()
    with HeadwaterNode(nursery, folder / "node", vbuckets=16) as node:
        login = ("--user", node.user, "--password", node.password)
        shop = (str(ROOT / "examples" / "shop"), "--create-collections")
        loaded = run_program("-m", "headwater", "load", node.url, *shop, *login)
        assert loaded.returncode == 0, loaded.stderr
        kernel = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "VIRTUAL_ENV"))},
            "PATH": "/usr/bin:/bin",
            "HEADWATER_URL": node.url,
            "HEADWATER_USER": node.user,
            "HEADWATER_PASSWORD": node.password,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of Jupyter's own libraries
            where = {"metadata": {"path": str(folder / "work")}}
            NotebookClient(notebook, timeout=CELL_S_MAX, resources=where).execute(env=kernel)
    return ["\n".join(map(_text, cell.outputs)) for cell in cells if cell.cell_type == "code"]


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    data = output.data
    return str(data.get("text/html", data["text/plain"]))


def test_the_client_in_a_notebook(nursery: Nursery, tmp_path: Path) -> None:
    client, changes, batch, by_collection, names, count, closed = outputs(nursery, tmp_path, spark=False)
    assert "shop.customers" in client
    assert " o1 {'customer': 'c1'" in changes
    assert "Changes of shop.orders" in changes
    assert "<table>" in batch
    assert "Ada" in batch
    assert "orders" in by_collection
    assert "Ada" in names
    assert int(count) > 6
    assert closed == ""


@pytest.mark.soak
def test_all_of_the_notebook(nursery: Nursery, tmp_path: Path) -> None:
    """With Spark, whose workers must run the kernel's Python: it is not on the path."""
    *_, orders, table, verified, _, _ = outputs(nursery, tmp_path, spark=True)
    assert "| o1|" in orders
    assert "o2" in table
    assert "Equal: 6 documents in 3 collections." in verified
