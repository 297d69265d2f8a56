"""`headwater land` without Spark: how it ends, what it prints, and what it takes options for."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest

import headwater.spark
from headwater.cli import land as land_module
from headwater.cli.land import METRICS, LandingCollector, LandingMetrics, View, _run, land, status_line
from headwater.cli.options import parse_time
from headwater.cli.output import ending_signals_raised
from headwater.client.offsets import Offsets
from headwater.errors import LakeOutOfStep
from headwater.lake.column_rules import ColumnRules
from headwater.lake.lake import LakeSettings
from headwater.lake.set_aside import SetAside
from headwater.lake.typed_columns import ColumnMode, TypedColumns
from headwater.landing.loop import LandedBatch, LandingStatus
from support.cases import case_apart

LAKE: Any = object()
STATUS = LandingStatus(
    is_active=True, doing="waiting", batch=3, rows=1200, rollbacks=2, documents=900, tables=2, lag_seqnos=17,
    lag_s=2.5, documents_age_s=300.0, last_batch_s=0.5, last_merge_s=None, failures=0,
)  # fmt: skip


ASIDE = SetAside(name="a.b", reason="its log is damaged", hint="Bring it back", since_s=1.0, retry_s=31.0, failures=1)


def batch(rows: int = 1) -> LandedBatch:
    return LandedBatch(
        batch_id=3,
        rows=rows,
        rollbacks={1: 5},
        merges=1,
        tables=("a.b",),
        rows_by_table={"a.b": rows},
        system_events=1024,
        read_again=frozenset(),
        offsets=Offsets("uuid"),
        took_s=0.5,
        status=STATUS,
    )


@dataclass
class Query:
    """Lands its batches as soon as it is looked at, and ends."""

    batches: list[LandedBatch]
    failure: Exception | None = None
    on_batch: Callable[[LandedBatch], None] | None = None
    on_look: Callable[[], None] = lambda: None
    is_stopped: bool = False
    landing_status: LandingStatus = STATUS

    @property
    def isActive(self) -> bool:  # noqa: N802  (Spark's names)
        self.on_look()
        assert self.on_batch is not None
        was_active = bool(self.batches)
        while self.batches:
            self.on_batch(self.batches.pop(0))
        return was_active

    def awaitTermination(self) -> bool:  # noqa: N802
        if self.failure is not None:
            raise self.failure
        return True

    def stop(self) -> None:
        self.is_stopped = True


@dataclass
class Landing:
    query: Query

    def start(
        self, spark: object, *, every: str | None, on_batch: Callable[[LandedBatch], None], lake: object
    ) -> Query:
        assert lake is LAKE, "it is prepared once"
        self.query.on_batch = on_batch
        return self.query


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(land_module, "POLL_S", 0)


def run(query: Query, *, as_json: bool = False) -> int:
    landing: Any = Landing(query)
    with ending_signals_raised():
        return _run(landing, LAKE, None, View(as_json=as_json, quiet=True), None)


def test_a_landing_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Query([batch(1)])) == 0
    said = capsys.readouterr().err
    assert said.startswith("1 change and 1,024 system events landed in ")
    assert said.endswith(" 1 rollback; 900 documents in 2 tables\n")


def test_a_landing_that_fails() -> None:
    with pytest.raises(LakeOutOfStep, match="out of step"):
        run(Query([batch()], LakeOutOfStep("out of step", hint="Do that")))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interruption(number: int, exit_code: int, capsys: pytest.CaptureFixture[str]) -> None:
    query = Query([batch()], on_look=lambda: os.kill(os.getpid(), number))
    code = run(query)
    assert (code, query.is_stopped) == (exit_code, True)
    assert capsys.readouterr().err == "Stopped. The same command resumes from here.\n"


def test_a_line_of_json_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    run(Query([batch(7), batch(8)]), as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "batch": 3, "rows": 7, "changes": 7, "system_events": 1024, "seconds": 0.5, "rollbacks": 1, "merges": 1,
        "collections": {"a.b": 7}, "lag": 17, "lag_seconds": 2.5, "documents_age_seconds": 300.0, "documents": 900,
        "total_rows": 1200, "total_rollbacks": 2, "set_aside": {},
    }  # fmt: skip
    assert second["rows"] == 8
    aside = replace(batch(), status=replace(STATUS, tables_set_aside=1, set_aside=(ASIDE,)))
    run(Query([aside]), as_json=True)
    assert json.loads(capsys.readouterr().out)["set_aside"] == {"a.b": "its log is damaged"}


def test_a_table_that_is_set_aside_is_said_once_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    in_catalog = {"tables_unregistered": 2, "catalog_failure": "a is not up to date in the catalog: it is full. Wait"}
    query = Query([batch()], landing_status=replace(STATUS, tables_set_aside=1, set_aside=(ASIDE,), **in_catalog))
    landing: Any = Landing(query)
    view = View(as_json=False, quiet=False)
    _run(landing, LAKE, None, view, None)
    view.refresh()
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("a.b is set aside: its log is damaged. Bring it back.") == 1
    assert said.count("A is not up to date in the catalog: it is full. Wait.") == 1
    line = str(status_line(query.landing_status))
    assert line.endswith("2 rollbacks  1 table set aside  2 tables not in the catalog")


def test_the_line_says_what_is_known() -> None:
    assert str(status_line(STATUS)) == (
        "waiting  batch 3  900 documents  lag 17 seqnos, 2.5 s  documents 5 min behind  2 rollbacks"
    )
    unknown = replace(STATUS, lag_seqnos=None, lag_s=None, documents_age_s=None, rollbacks=None)
    assert str(status_line(unknown)) == (
        "waiting  batch 3  900 documents  lag unknown, unknown time  documents unknown time behind"
    )
    full = replace(STATUS, doing="waiting for room", failure="the disk of /lake is full. Make room")
    assert str(status_line(full)) == "waiting for room  batch 3  the disk of /lake is full. Make room"


# --- options ------------------------------------------------------------------------------------------------------


def test_times() -> None:
    for text, read in (("500ms", 0.5), ("5s", 5.0), ("1h", 3600.0), ("1d", 86400.0)):
        assert parse_time(text) == read
    for text in ("5", "s", "5 s", "-1s", "1w", ""):
        with pytest.raises(click.BadParameter, match="write 500ms, 5s, 1m or 1h"):
            parse_time(text)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[LakeSettings]:
    """The settings of the lakes that landings were prepared with. None goes further."""
    found: list[LakeSettings] = []

    def prepare(landing: Any) -> None:
        found.append(landing.lake)
        raise LakeOutOfStep("it goes no further", hint="this is a test")

    monkeypatch.setattr(land_module.Landing, "prepare", prepare)
    return found


@case_apart((), {}, True)
@case_apart(("--no-columns", "--columns", "a.b=n INT"), {"a.b": TypedColumns.from_ddl("n INT")}, False)
@case_apart(("--columns", "infer", "--columns", "a.b=none"), {"*": ColumnMode.INFER, "a.b": ColumnMode.NONE}, True)
def test_columns(
    prepared: list[LakeSettings], arguments: tuple[str, ...], columns: dict[str, Any], infer: bool
) -> None:
    CliRunner().invoke(land, ["couchbase://localhost/b", "--into", "lake", *arguments])
    assert (prepared[0].columns, prepared[0].infer) == (columns, infer)


@pytest.mark.parametrize("at", ["0.0.0.0:8080", "[::]:8080", "lake.example.org:8080"])
def test_a_page_for_others_needs_a_token(prepared: list[LakeSettings], at: str) -> None:
    command = ["couchbase://localhost/b", "--into", "lake", "--ui", at]
    refused = CliRunner().invoke(land, command)
    assert (refused.exit_code, prepared) == (1, [])
    assert "Set HEADWATER_UI_TOKEN" in " ".join(refused.output.split())
    short = CliRunner(env={"HEADWATER_UI_TOKEN": "short"}).invoke(land, command)
    assert "the token has 5 characters" in " ".join(short.output.split())
    CliRunner(env={"HEADWATER_UI_TOKEN": "x" * 16}).invoke(land, command)
    assert len(prepared) == 1


def test_the_form_of_documents(prepared: list[LakeSettings]) -> None:
    for given in ((), ("--document", "variant"), ("--document", "string")):
        CliRunner().invoke(land, ["couchbase://localhost/b", "--into", "lake", *given])
    assert [settings.document for settings in prepared] == [None, "variant", "string"]


def test_columns_that_documents_are_clustered_by(prepared: list[LakeSettings]) -> None:
    given = ["couchbase://localhost/b", "--into", "lake", "--cluster-by", "city, since"]
    CliRunner().invoke(land, [*given, "--cluster-by", "shop.orders=at", "--on-mismatch", "shop.orders=column"])
    assert prepared[0].cluster_by == {"*": ("city", "since"), "shop.orders": ("at",)}
    assert prepared[0].rules == {"shop.orders": ColumnRules(on_mismatch="column")}
    rules = ("--exclude-columns", "a*", "--exclude-columns", "shop.orders=b,c", "--exclude-columns", "d")
    CliRunner().invoke(land, [*given, *rules, "--rename-columns", "custId AS customer, x_* as y_*"])
    renames = [["custId", "customer"], ["x_*", "y_*"]]
    assert prepared.pop().rules == {
        "*": ColumnRules(exclude=["a*", "d"], rename=renames),
        "shop.orders": ColumnRules(exclude=["b", "c"]),
    }
    refused = CliRunner().invoke(land, [*given, "--columns", "city STRING"])
    assert refused.exit_code == 1
    assert "can't be clustered by 'since': there is no such column" in " ".join(refused.output.split())
    assert len(prepared) == 1


@case_apart("n INT", {"*": TypedColumns.from_ddl("n INT")})
@case_apart({"a.b": "infer", "*": "none"}, {"a.b": ColumnMode.INFER, "*": ColumnMode.NONE})
def test_columns_from_python(monkeypatch: pytest.MonkeyPatch, columns: Any, read: dict[str, Any]) -> None:
    monkeypatch.setattr(land_module.Landing, "start", lambda landing, runner, **_: landing)
    texts = {"columns": columns, "cluster_by": {"a.b": "seqno"}}
    asked = {"a.b": "reject"} if "a.b" in read else {}
    landing: Any = headwater.spark.land(
        cast("Any", None), "couchbase://localhost/b", "lake", **texts, on_mismatch=asked
    )
    rules = {table: ColumnRules(on_mismatch=what) for table, what in asked.items()}
    assert landing.lake == LakeSettings(columns=read, cluster_by={"a.b": ("seqno",)}, rules=rules)


def test_a_port_for_metrics_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(land_module.Landing, "prepare", lambda landing: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        told = CliRunner().invoke(
            land,
            ["couchbase://127.0.0.1/b", "--into", "lake", "--metrics-port", port, "--user", "u", "--password", "p"],
        )
    assert told.exit_code == 1
    assert told.stderr.startswith(f"Error: port {port} can't be used for metrics: ")


# A landing's numbers, as Prometheus gets them.


SCRAPED_STATUS = replace(
    STATUS, tables_unregistered=1, batch=11, rollbacks=3, documents_age_s=4.5, last_batch_s=0.3, last_merge_s=1.1
)


def lines(status: LandingStatus | None) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(LandingCollector(LandingMetrics("travel", lambda: status)))
    shown = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in (line.split(" ") for line in shown)}


def test_the_numbers_are_those_of_the_status() -> None:
    assert lines(SCRAPED_STATUS) == {
        "headwater_land_rows_total": 1200, "headwater_land_batches_total": 12, "headwater_land_rollbacks_total": 3,
        "headwater_land_active": 1, "headwater_land_tables": 2, "headwater_land_documents": 900,
        "headwater_land_lag_seqnos": 17, "headwater_land_lag_seconds": 2.5,
        "headwater_land_documents_age_seconds": 4.5, "headwater_land_last_batch_seconds": 0.3,
        "headwater_land_last_merge_seconds": 1.1, "headwater_land_failures": 0, "headwater_land_tables_set_aside": 0,
        "headwater_land_tables_unregistered": 1, "headwater_land_merges_slow": 0,
    }  # fmt: skip
    assert len(METRICS) == len(fields(LandingStatus)) - 4, "all of it but the words"


def test_what_is_not_known_is_left_out() -> None:
    shown = lines(
        replace(SCRAPED_STATUS, rows=None, lag_seqnos=None, lag_s=None, documents_age_s=None, last_merge_s=None)
    )
    assert not {name for name in shown if "lag" in name or "age" in name or "last_merge" in name or "rows" in name}
    assert lines(None) == {}
