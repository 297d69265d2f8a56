"""Every link of the README and the docs that stays inside the project leads to a page, and to a heading of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

from support.cases import each
from support.doc_blocks import PAGES, ROOT

WRITTEN = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]

_CODE = re.compile(r"^```.*?^```[ \t]*$|`[^`\n]*`", re.M | re.S)
_HEADING = re.compile(r"^#{1,6} (?P<text>.+?)[ \t]*$", re.M)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_OUTSIDE = re.compile(r"^(?:https?|mailto):")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```[ \t]*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.finditer(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"])
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def fault(page: Path, target: str) -> str | None:
    """What is wrong with a link, or None."""
    path, _, anchor = unquote(target).partition("#")
    there = (page.parent / path).resolve() if path else page
    if not there.is_relative_to(ROOT):
        return "leads out of the project"
    if not there.exists():
        return "leads to nothing"
    if anchor and there.suffix == ".md" and anchor not in anchors(there):
        return "leads to a heading that is not there"
    return None


def links(page: Path) -> list[str]:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    return [match["target"] for match in _LINK.finditer(text) if not _OUTSIDE.match(match["target"])]


@each("page", WRITTEN)
def test_links_lead_somewhere(page: Path) -> None:
    assert {target: wrong for target in links(page) if (wrong := fault(page, target))} == {}


def test_every_page_can_be_found_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    assert [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in linked and page != index] == []


def test_a_bad_link_is_seen(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    assert fault(page, "docs/nothing.md") == "leads to nothing"
    assert fault(page, "docs/start.md#nothing") == "leads to a heading that is not there"
    assert fault(page, "../elsewhere") == "leads out of the project"
    assert fault(page, "docs/start.md#set-up") is None
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` & c\n\n## [Twice](x)\n\n```text\n# no heading\n```\n\n## Twice\n\nsee `[x](y)`, [z](#twice-1)\n"
    )
    assert anchors(page) == {"a-b--c", "twice", "twice-1"}
    assert links(page) == ["x", "#twice-1"]
