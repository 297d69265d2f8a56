"""The README and the docs keep their promises: links lead somewhere, tables miss nothing. tests/docs runs the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from handbook.error_tree import statuses_of

import headwater.cli  # noqa: F401  (so that every error is there to be seen)
from headwater import errors
from headwater.protocol.features import Opcode

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#]+)(?:#[^)]*)?\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [m["target"] for m in LINK.finditer(page.read_text()) if not (page.parent / m["target"]).exists()]
    # `make bench` and the tests in a browser write these, and a fresh clone may not have them.
    assert [target for target in broken if not target.endswith(("performance.md", "dashboard.png"))] == []


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
    for cls in errors.STATUS_ERRORS.values():
        assert rows[cls.__name__] == statuses_of(cls)
