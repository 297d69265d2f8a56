"""Several pipelines in one process, each with a landing that does what the test says."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from headwater.cli import land_several as module
from headwater.cli.land import LandingCollector, View
from headwater.cli.land_several import Pipeline, Runners, _follow, _Named
from headwater.cli.output import ending_signals_raised
from headwater.client.settings import ClientSettings
from headwater.errors import HostUnreachable, LakeOutOfStep, LakeUnreachable, QueryFailed
from headwater.landing.loop import LandingStatus

STATUS = LandingStatus(
    is_active=True, doing="waiting", batch=3, rows=1200, rollbacks=2, documents=900, tables=2, lag_seqnos=17,
    lag_s=2.5, documents_age_s=300.0, last_batch_s=0.5, last_merge_s=None, failures=0,
)  # fmt: skip
SETTINGS = ClientSettings.make("couchbase://127.0.0.1/travel", user="u", password="p")
AWAY = HostUnreachable("the server is away", hint="Start it")
WRONG = LakeOutOfStep("the tables are wrong", hint="Look at them")


@dataclass
class Landing:
    """Fails as often as it has failures, and then ends by itself, or runs until it is stopped."""

    into: str
    failures: list[Exception] = field(default_factory=list)
    runs_on: bool = False
    hangs: bool = False
    landing_status: LandingStatus = STATUS
    storage_options: dict[str, str] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def prepare(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def start(self, *_: object, **__: object) -> Landing:
        return self

    def awaitTermination(self) -> None:  # noqa: N802  (Spark's names)
        if self.runs_on:
            self.stopped.wait()

    def stop(self) -> None:
        if self.hangs:
            threading.Event().wait()
        self.stopped.set()


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


Run = Callable[..., int]


@pytest.fixture
def run() -> Run:
    """Run landings by their names to their end. Those that run on are stopped by a signal."""

    def run(every_s: float | None = 1.0, number: int | None = None, **landings: Any) -> int:
        console, runners = Console(stderr=True, highlight=False), Future[Runners]()
        runners.set_result(lambda name: None)  # type: ignore[arg-type, return-value]
        pipelines = [
            Pipeline(
                name, "couchbase://127.0.0.1/travel", landing, SETTINGS,
                View(as_json=False, quiet=False, pipeline=name, console=console), every_s=every_s,
            )
            for name, landing in landings.items()
        ]  # fmt: skip
        run.pipelines = pipelines  # type: ignore[attr-defined]
        for one in pipelines:
            one.start(runners)
        with ending_signals_raised():
            if number is not None:
                threading.Timer(0.2, lambda: os.kill(os.getpid(), number)).start()
            return _follow(pipelines, None)

    return run


def test_one_that_fails_does_not_stop_the_others(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bad=Landing("a", [WRONG]), good=Landing("b")) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "Error: bad: the tables are wrong. Look at them"
    assert said[1].startswith("good: 0 changes landed")
    assert len(said) == 2
    bad, _ = run.pipelines  # type: ignore[attr-defined]
    assert str(bad.line()) == "bad  stopped: the tables are wrong. Look at them"
    note = bad.note()
    assert (note.is_running, note.failure, note.bucket) == (False, str(WRONG), "travel")
    assert run(good=Landing("b")) == 0


def test_one_whose_failure_may_pass_is_started_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(away=Landing("a", [AWAY, LakeUnreachable("the store is away"), QueryFailed("a task has died")])) == 0
    assert "Error: away: the server is away. Start it" in capsys.readouterr().err
    # Not with --once, nor where it can't pass, nor after an error of ours.
    assert run(None, away=Landing("a", [AWAY])) == 1
    assert run(wrong=Landing("a", [AWAY, WRONG, AWAY])) == 1
    assert run(broken=Landing("a", [ZeroDivisionError("ours")])) == 1
    assert "ZeroDivisionError: ours" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all(run: Run, number: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    landings = {name: Landing(name, runs_on=True) for name in ("one", "other")}
    failing = Landing("again", [AWAY] * 1000)
    assert run(number=number, failing=failing, **landings) == code
    assert all(one.stopped.is_set() for one in landings.values())
    assert capsys.readouterr().err.splitlines()[-1] == "Stopped. The same command resumes from here."
    left = len(failing.failures)
    time.sleep(0.1)
    assert len(failing.failures) >= left - 1, "it is not started again"


def test_one_that_does_not_stop_is_left(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "STOP_S_MAX", 0.1)
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)

    monkeypatch.setattr(os, "_exit", end)
    run(number=signal.SIGTERM, hanging=Landing("a", runs_on=True, hangs=True), good=Landing("b", runs_on=True))
    assert ended == [143]
    assert "Not stopped within 0 s: hanging\n" in capsys.readouterr().err


def test_numbers_of_two_pipelines_of_one_bucket_and_of_one_that_never_started(run: Run) -> None:
    run(shop=Landing("a"), twin=Landing("b"), bad=Landing("c", [WRONG]))
    registry = CollectorRegistry()
    registry.register(LandingCollector(*(one.metrics for one in run.pipelines)))  # type: ignore[attr-defined]
    lines = generate_latest(registry).decode().splitlines()
    rows = [line for line in lines if line.startswith("headwater_land_rows_total{")]
    of = 'headwater_land_rows_total{bucket="travel",pipeline='
    assert rows == [f'{of}"shop"}} 1200.0', f'{of}"twin"}} 1200.0']
    assert 'headwater_land_active{bucket="travel",pipeline="bad"} 0.0' in lines


def test_log_messages_name_their_pipeline(run: Run) -> None:
    run(good=Landing("a"))
    names = _Named(run.pipelines)  # type: ignore[attr-defined]
    record, other = (logging.LogRecord("x", logging.INFO, "", 0, "batch %d", (3,), None) for _ in range(2))
    record.threadName = "headwater land a: lag"
    for _ in range(2):  # as two handlers do
        assert names.filter(record)
        assert names.filter(other)
    assert (record.getMessage(), record.__dict__["pipeline"]) == ("good: batch 3", "good")
    assert (other.getMessage(), hasattr(other, "pipeline")) == ("batch 3", False)
