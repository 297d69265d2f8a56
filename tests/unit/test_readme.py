"""The README and the docs keep their promises: examples run and print what they say, tables miss nothing."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import headwater.cli  # noqa: F401  (so that every error is there to be seen)
from headwater import errors
from headwater.protocol.opcodes import Opcode

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#]+)(?:#[^)]*)?\)")
EXAMPLES = [(page, match) for page in PAGES for match in PYTHON_BLOCK.finditer(page.read_text())]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    ("page", "example"),
    EXAMPLES,
    ids=[f"{name(page)}:{page.read_text()[: match.start()].count(chr(10)) + 1}" for page, match in EXAMPLES],
)
def test_example_prints_what_the_page_says(page: Path, example: re.Match[str]) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example["code"], name(page), "exec"), {"__name__": "__main__"})
    if example["printed"] is not None:
        assert printed.getvalue() == example["printed"]


def test_the_readme_has_an_example() -> None:
    assert any(page.name == "README.md" and match["printed"] for page, match in EXAMPLES)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [m["target"] for m in LINK.finditer(page.read_text()) if not (page.parent / m["target"]).exists()]
    # `make bench` writes this page, and a fresh clone may not have it.
    assert [target for target in broken if not target.endswith("performance.md")] == []


def test_supported_dcp_lists_every_opcode() -> None:
    text = (ROOT / "docs" / "supported-dcp.md").read_text()
    listed = {int(number, 16) for number in re.findall(r"^\| 0x([0-9a-f]{2}) ", text, re.M)}
    assert {opcode for opcode in Opcode if opcode.name.startswith("DCP_")} <= listed


def family(root: type[Exception]) -> set[type[Exception]]:
    below = (family(cls) for cls in root.__subclasses__() if cls.__module__.startswith("headwater."))
    return {root}.union(*below)


def test_the_error_reference_lists_every_error_with_its_status() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", text, re.M))
    assert {cls.__name__ for cls in family(errors.HeadwaterError)} == rows.keys()
    for status, cls in errors.STATUS_ERRORS.items():
        assert rows[cls.__name__] == f"0x{status:02x}"
