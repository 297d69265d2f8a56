"""`headwater land` without Spark: how it goes on when a query ends, what it prints, and what it takes options for."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JNetworkError
from pyspark.errors import AnalysisException

from headwater.cli import land as land_module
from headwater.cli.land import EXIT_INTERRUPTED, _run, _View, land
from headwater.client.offsets import Offsets
from headwater.errors import HostUnreachable, LakeOutOfStep, QueryFailed
from headwater.spark.landing import LandedBatch
from headwater.spark.landing_metrics import LandingMetrics


def batch(rows: int = 1, *, must_read_again: bool = False) -> LandedBatch:
    return LandedBatch(
        batch_id=3,
        rows=rows,
        rollbacks={1: 5} if must_read_again else {},
        merges=1,
        tables=("a.b",),
        rows_by_table={"a.b": rows},
        must_read_again=must_read_again,
        offsets=Offsets("uuid"),
        took_s=0.5,
    )


@dataclass
class Query:
    """Lands its batches as soon as it is looked at, and ends."""

    batches: list[LandedBatch]
    failure: Exception | None = None
    start_failure: Exception | None = None
    dies: bool = False
    on_batch: Callable[[LandedBatch], None] | None = None
    on_look: Callable[[], None] = lambda: None
    is_stopped: bool = False
    lastProgress: Any = None  # noqa: N815  (Spark's names)

    @property
    def isActive(self) -> bool:  # noqa: N802
        if self.dies:
            raise Py4JNetworkError("Answer from Java side is empty")
        self.on_look()
        assert self.on_batch is not None
        was_active = bool(self.batches)
        while self.batches:
            self.on_batch(self.batches.pop(0))
        return was_active

    def exception(self) -> Exception | None:
        return self.failure

    def stop(self) -> None:
        self.is_stopped = True


@dataclass
class Landing:
    queries: list[Query]
    started: list[Query] = field(default_factory=list)

    def start(self, spark: object, *, every: str | None, on_batch: Callable[[LandedBatch], None]) -> Query:
        query = self.queries.pop(0)
        if query.start_failure is not None:
            raise query.start_failure
        query.on_batch = on_batch
        self.started.append(query)
        return query


@pytest.fixture(autouse=True)
def _same_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(land_module, "POLL_S", 0)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def run(*queries: Query, as_json: bool = False) -> tuple[int, Landing]:
    landing: Any = Landing(list(queries))
    view = _View(LandingMetrics("b"), as_json=as_json, quiet=True)
    return _run(landing, None, view, None), landing


def test_a_query_that_ends() -> None:
    code, landing = run(Query([batch()]))
    assert (code, len(landing.started)) == (0, 1)


def test_a_query_that_fails() -> None:
    text = "[STREAM_FAILED] …\nheadwater.errors.LakeOutOfStep: out of step. Do that\n"
    with pytest.raises(LakeOutOfStep, match=r"out of step\. Do that"):
        run(Query([batch()], RuntimeError(text)))


def test_a_rollback_that_ends_the_query_with_an_error() -> None:
    """The next one reads what is missing."""
    text = "headwater.errors.LakeOutOfStep: this query can't go on"
    code, landing = run(Query([batch(must_read_again=True)], RuntimeError(text)), Query([batch()]))
    assert (code, len(landing.started)) == (0, 2)


def test_a_rollback_in_the_last_batch_of_a_query() -> None:
    """It ends with no error, but something is missing."""
    code, landing = run(Query([batch(must_read_again=True)]), Query([batch()]))
    assert (code, len(landing.started)) == (0, 2)


def test_a_rollback_excuses_one_failure_only() -> None:
    text = "headwater.errors.LakeOutOfStep: this query can't go on"
    failing = Query([], RuntimeError(text))
    with pytest.raises(LakeOutOfStep):
        run(Query([batch(must_read_again=True)]), failing)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    query = Query([batch()], on_look=lambda: os.kill(os.getpid(), number))
    code, _ = run(query)
    assert (code, query.is_stopped) == (EXIT_INTERRUPTED, True)
    assert capsys.readouterr().err == "Stopped. The same command goes on from here.\n"


def test_a_query_that_can_t_be_started() -> None:
    text = "[PYTHON_DATA_SOURCE_ERROR] …\nheadwater.errors.HostUnreachable: nobody there. Check that"
    with pytest.raises(HostUnreachable, match="nobody there"):
        run(Query([], start_failure=AnalysisException(text)))


def test_spark_that_dies() -> None:
    with pytest.raises(QueryFailed, match=r"Spark has ended .* Start again"):
        run(Query([], dies=True))


def test_a_line_of_json_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    run(Query([batch(7), batch(8, must_read_again=False)]), as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "batch": 3,
        "rows": 7,
        "seconds": 0.5,
        "rollbacks": 0,
        "merges": 1,
        "collections": {"a.b": 7},
        "lag": None,
    }
    assert second["rows"] == 8


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "read"), [("500ms", "500 milliseconds"), ("5s", "5 seconds"), ("1h", "1 hours")])
def test_times(text: str, read: str) -> None:
    assert land_module._parse_time(click.Context(land), land.params[0], text) == read


@pytest.mark.parametrize("text", ["5", "s", "5 s", "-1s", "1d", ""])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 500ms, 5s, 1m or 1h"):
        land_module._parse_time(click.Context(land), land.params[0], text)


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


# --- the log ------------------------------------------------------------------------------------------------------


def test_a_batch_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=land_module.__name__):
        run(Query([batch()]))
    [record] = caplog.records
    landed = batch()
    assert record.getMessage().startswith(f"batch {landed.batch_id} landed: ")
    told = vars(record)
    assert (told["event"], told["batch"], told["changes"]) == ("batch_landed", landed.batch_id, landed.rows)
    assert told["duration_s"] == round(landed.took_s, 3)


@pytest.mark.parametrize("count", [1, 2])
def test_the_end_is_told_in_the_right_number(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    view = _View(LandingMetrics("b"), as_json=False, quiet=True)
    for _ in range(count):
        view.on_batch(batch())
    view.finish()
    said = capsys.readouterr().err
    assert ("1 batch," if count == 1 else "2 batches,") in said
