"""What the documentation says of the code is what the code says: the places that are made from it are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from handbook import sizing
from handbook.command_sections import all_commands
from handbook.drawings import consumer_diagram, producer_diagram
from handbook.error_tree import message_sections, operators_messages
from handbook.pages import MADE, ROOT, filled, pages, places

from headwater.landing.source_options import SOURCE_OPTIONS
from headwater.protocol.states import CONSUMER_STREAM, PRODUCER_STREAM

WITH_PLACES = [page for page in pages() if places(page.read_text())]


@pytest.mark.parametrize("page", WITH_PLACES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run `make docs`, and look at what has changed"


def test_everything_that_is_made_has_a_place() -> None:
    found = {name for page in WITH_PLACES for name in places(page.read_text())}
    assert found == MADE.keys()


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
    text, more = ((ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in ("cli", "management"))
    assert [path for path, _ in all_commands() if f"# {path}\n" not in text + more] == []
    listed = re.findall(r"^\| \[`(headwater [\w-]+)`\]", text[: text.index("\n## ")], re.M)
    assert listed == [path for path, _ in all_commands() if path.count(" ") == 1], "the table on top"


def test_every_option_of_the_source_means_something() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+\.) \|$", MADE["source options"](), re.M)
    assert tuple(name for name, _, _ in rows) == tuple(one.in_spark for one in SOURCE_OPTIONS.values())
    defaults = {name: default for name, default, _ in rows}
    assert [defaults[name] for name in ("url", "bufferBytes", "xattrs", "value", "tlsCa", "minPartitions")] == [
        "needed", "`16777216`", "`false`", "`binary`", "the system's", "`1`"
    ]  # fmt: skip


def test_metrics_are_told_with_their_labels() -> None:
    assert "| `headwater_client_stream_ends_total` | counter | `reason` | " in MADE["client metrics"]()
    assert "| `headwater_node_dcp_connection_window_bytes` | gauge | `bucket`, `connection` |" in MADE["node metrics"]()
    assert "| `headwater_land_rows_total` | counter |  | Rows landed in changes" in MADE["landing metrics"]()


@pytest.mark.parametrize(
    ("drawn", "table"), [(consumer_diagram(), CONSUMER_STREAM), (producer_diagram(), PRODUCER_STREAM)]
)
def test_a_diagram_has_every_state_and_every_way(drawn: str, table: dict) -> None:
    ways = {(state.name.lower(), target.name.lower()) for state, row in table.items() for target in row.values()}
    arrows = {tuple(found) for found in re.findall(r"^    (\w+) --> (\w+):", drawn, re.M)}
    assert arrows == ways


def test_a_message_that_is_gone_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handbook.error_tree._OPERATORS_FIRST", ("nobody says this",))
    with pytest.raises(LookupError, match="nobody says this"):
        operators_messages()


def test_messages_are_found_in_the_source() -> None:
    table = message_sections()
    sections = re.findall(r"^### (.+)$", table, re.M)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [title for title in sections if f"[{title.lower()}](#" not in page.lower()] == [], "the table on top"
    assert "| the URL names no bucket | Write couchbase://host/bucket" in table
    assert table.count("\n") > 150


# --- sizing -------------------------------------------------------------------------------------------------------


MEASURED = sizing.Figures(node_bytes=200, node_writes_s=100_000, node_opens_s=1_000_000, core_lands_s=50_000)


def test_the_model_adds_up() -> None:
    size = sizing.size_of(sizing.Load(documents=10**9, copies=2), MEASURED)
    assert size.memory_bytes == 2 * 10**9 * 200
    assert size.nodes == 9, "400 GB, 48 a node"
    assert size.disk_bytes == 2 * 10**9 * 275 * 1.5
    assert (size.landing_cores, size.executors) == (6, 2), "20,000 seconds of one core, in an hour"
    assert size.load_s == pytest.approx(10**9 / (9 / 2 * 100_000))
    assert size.restart_s == pytest.approx(2 * 10**9 / 9 / 1_000_000)
    smallest = sizing.size_of(sizing.Load(documents=1), MEASURED)
    assert (smallest.nodes, smallest.landing_cores, smallest.executors) == (2, 1, 1)


def test_figures_are_read_from_what_was_measured_and_never_better() -> None:
    page = """
- Machine: Linux, 4 cores, 24 GiB
| 1 M | 495 k/s | 180 MB | 100 MB |
| 4 M | 358 k/s | 777 MB | 191 MB |
| 4 M, after kill -9 | ready in 2.3 s | 253 MB | 63 MB |
| 1 M | 5.7 s | 176 k/s | 7.4 s |
| 4 M | 26.5 s | 151 k/s | 28.2 s |
"""
    assert sizing.Figures.read(page) == sizing.Figures(
        node_bytes=200, node_writes_s=350_000, node_opens_s=1_700_000, core_lands_s=37_000
    )
    with pytest.raises(LookupError, match="make bench"):
        sizing.Figures.read(page.replace("26.5 s", "a while"))


def test_nodes_share_the_cores_with_what_works_beside_them() -> None:
    page = """
- Machine: Linux, 2 cores, 24 GiB
| 1 | 400 k/s | 4000 k/s | 300 k/s | 2.00 s/M | 0.20 s/M | 1.00 s/M |
| 2 | 500 k/s | 8000 k/s | 320 k/s | 2.50 s/M | 0.20 s/M | 1.10 s/M |
"""
    load = sizing.work_costs(page)["load"]
    assert load == sizing.WorkCosts(node_s=2.5, others_s=1.5), "two cores for two seconds"
    assert load.rate(nodes=2, cores=2) == 500_000, "as measured"
    assert load.rate(nodes=8, cores=2) == 500_000, "the cores are the bound"
    assert load.rate(nodes=8, cores=64) == 8 * 400_000, "the nodes are"


def test_the_measured_page_has_the_figures() -> None:
    assert sizing.figures().core_lands_s > 0
