"""Diagrams keep to the few forms of Mermaid that are known to be drawn.

Mermaid's own parser is a large package of another language, and is not asked here. What can break a diagram that code
draws is a label with a sign that means something to Mermaid, or a line of no known form, and both are seen.
"""

from __future__ import annotations

import re

import pytest

from support.cases import case
from support.doc_blocks import PAGES, Block, blocks_of

_LABEL = r"[\w ,'()-]+"
_STATE = r"\[\*\]|[a-z_]+"
_NODE = r"\w+(?:\[[\w ,()<>:-]+\]|\[\([\w ,:<>]+\)\])?"
FORMS: dict[str, tuple[str, ...]] = {
    "stateDiagram-v2": (rf"(?:{_STATE}) --> (?:{_STATE})(?:: {_LABEL})?",),
    "gitGraph": (r"commit id: \"[\w']+\"(?: type: (?:REVERSE|HIGHLIGHT))?", r"(?:branch|checkout) \w+"),
    "sequenceDiagram": (rf"participant \w+ as {_LABEL}", r"\w+->>\w+: [\w ,:'-]+", rf"Note over \w+: {_LABEL}"),
    "flowchart LR": (
        rf"{_NODE} (?:--|-\.) \"{_LABEL}\" (?:-->|\.->) {_NODE}",
        rf"{_NODE} --> {_NODE}",
        r"subgraph \w+ \[[\w ,-]+\]",
        "end",
    ),
}
"""By the first line, what each of the others may be."""

DIAGRAMS = [block for page in PAGES for block in blocks_of(page) if block.language == "mermaid"]


def odd_lines(code: str) -> list[str]:
    kind, *lines = code.strip().splitlines()
    return [line for line in lines if not any(re.fullmatch(form, line.strip()) for form in FORMS[kind])]


@pytest.mark.parametrize("block", DIAGRAMS, ids=lambda block: block.place)
def test_a_diagram_is_of_a_known_form(block: Block) -> None:
    assert odd_lines(block.code) == []


def test_there_are_all_kinds() -> None:
    assert {block.code.splitlines()[0] for block in DIAGRAMS} == FORMS.keys()


@case("stateDiagram-v2", "open --> closed: a; b")
@case("stateDiagram-v2", "open --> closed: a: b")
@case("stateDiagram-v2", "open -> closed")
@case("gitGraph", "commit id: 5")
@case("sequenceDiagram", "A->>B: one; two")
def test_what_mermaid_would_not_draw_is_seen(kind: str, line: str) -> None:
    assert odd_lines(f"{kind}\n    {line}") == [f"    {line}"]
