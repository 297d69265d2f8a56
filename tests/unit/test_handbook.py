"""What the documentation says of the code is what the code says: the places that are made from it are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from handbook import sizing
from handbook.command_sections import all_commands
from handbook.error_tree import message_table
from handbook.pages import MADE, ROOT, filled, pages, places
from handbook.state_diagrams import consumer_diagram, producer_diagram

from headwater.protocol.stream_state import CONSUMER_STREAM, PRODUCER_STREAM

WITH_PLACES = [page for page in pages() if places(page.read_text())]


@pytest.mark.parametrize("page", WITH_PLACES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run `make docs`, and look at what has changed"


def test_everything_that_is_made_has_a_place() -> None:
    found = {name for page in WITH_PLACES for name in places(page.read_text())}
    assert found | {"source options"} == MADE.keys()


def test_a_place_that_nobody_fills_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled("<!-- made: nonsense -->\n<!-- /made -->")


def test_the_rest_of_a_page_is_left_alone() -> None:
    text = "before\n<!-- made: stream ends -->\nstale\n<!-- /made -->\nbehind\n"
    new = filled(text)
    assert new.startswith("before\n<!-- made: stream ends -->\n\n| reason")
    assert new.endswith("<!-- /made -->\nbehind\n")
    assert "stale" not in new
    assert filled(new) == new


def test_every_command_has_a_section() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert [path for path, _ in all_commands() if f"# {path}\n" not in text] == []


def test_every_option_of_the_source_is_told() -> None:
    text = (ROOT / "docs" / "reference" / "spark-source.md").read_text()
    told = set(re.findall(r"`(\w+)`", text))
    assert set(re.findall(r"`(\w+)`", MADE["source options"]())) - told <= {"seenCollections"}


@pytest.mark.parametrize(
    ("drawn", "table"), [(consumer_diagram(), CONSUMER_STREAM), (producer_diagram(), PRODUCER_STREAM)]
)
def test_a_diagram_has_every_state_and_every_way(drawn: str, table: dict) -> None:  # type: ignore[type-arg]
    ways = {(state.name.lower(), target.name.lower()) for state, row in table.items() for target in row.values()}
    arrows = {tuple(found) for found in re.findall(r"^    (\w+) --> (\w+):", drawn, re.M)}
    assert arrows == ways


def test_messages_are_found_in_the_source() -> None:
    table = message_table()
    assert "| the URL names no bucket | Write couchbase://host/bucket" in table
    assert table.count("\n") > 150


# --- sizing -------------------------------------------------------------------------------------------------------


def test_the_model_adds_up() -> None:
    size = sizing.size_of(sizing.Load(documents=10**9, copies=2))
    assert size.memory_bytes == 2 * 10**9 * sizing.NODE_BYTES_PER_DOCUMENT
    assert size.nodes == -(-size.memory_bytes // sizing.NODE_MEMORY_BYTES)
    assert size.landing_cores * 3600 >= sizing.landing_cpu_s(10**9)
    smallest = sizing.size_of(sizing.Load(documents=1))
    assert (smallest.nodes, smallest.landing_cores, smallest.executors) == (2, 1, 1)


def figure(pattern: str) -> float:
    """A number of the page that the last measurement has written."""
    page = ROOT / "docs" / "internals" / "performance.md"
    if not page.exists():
        pytest.skip("nothing has been measured here yet")
    found = re.search(pattern, page.read_text())
    assert found is not None, pattern
    return float(found[1])


@pytest.mark.parametrize(
    ("pattern", "unit", "constant"),
    [
        (r"\| 4 M \| \d+ k/s \| \d+ MB \| (\d+) MB \|", 1, sizing.NODE_BYTES_PER_DOCUMENT),
        (r"\| 4 M \| (\d+) k/s", 1000, sizing.WRITES_PER_NODE_S),
        (r"\| Arrow batches, blocking \|.*\| ([\d.]+) s \|", 1, sizing.DRAIN_CPU_S_PER_MILLION),
    ],
)
def test_the_model_fits_what_was_measured(pattern: str, unit: float, constant: float) -> None:
    assert constant == pytest.approx(figure(pattern) * unit, rel=1.0)
