"""The landing while it runs, its figures, and what a failover took back of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from demo.commands import PASSWORD, USER, CommandFailed
from headwater import ClientSettings, Offsets, Surveyor
from headwater.spark import LandedBatch, land, query_error, start_session

EVERY = "2 seconds"
SPARK_MEMORY = "1g"
POLL_S = 0.1
WAIT_S_MAX = 300.0


class LiveLanding:
    """A landing that goes on until it is stopped."""

    def __init__(self, spark: SparkSession, url: str, into: Path) -> None:
        self.batches: list[LandedBatch] = []
        """Those with changes in them."""
        self._query = land(
            spark,
            url,
            str(into),
            every=EVERY,
            on_batch=self._on_batch,
            user=USER,
            password=PASSWORD,
            min_partitions=4,
            name="demo",
        )

    def _on_batch(self, batch: LandedBatch) -> None:
        if batch.rows:
            self.batches.append(batch)

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)

    @property
    def rows_per_s(self) -> float:
        """Of the quickest batch."""
        return max(batch.rows / batch.took_s for batch in self.batches)

    @property
    def rolled_back(self) -> set[int]:
        """The vbuckets of which changes were taken back."""
        return {vbucket for batch in self.batches for vbucket in batch.rollbacks}

    @property
    def offsets(self) -> Offsets:
        """How far the tables are."""
        return self.batches[-1].offsets

    def wait_until(self, is_reached: Callable[[], bool], on_wait: Callable[[], None]) -> None:
        """Wait, and raise what has failed the query."""
        deadline_s = time.monotonic() + WAIT_S_MAX
        while not is_reached():
            self._check()
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"the landing did not get there in {WAIT_S_MAX:.0f} s")
            on_wait()
            time.sleep(POLL_S)

    def _check(self) -> None:
        if not self._query.isActive:
            failure = self._query.exception()
            raise CommandFailed("the landing has ended") if failure is None else query_error(failure)

    def catch_up(self) -> None:
        """Land what the bucket has, bring the documents up to it, and end."""
        self._query.processAllAvailable()
        self._query.stop()

    def stop(self) -> None:
        self._query.stop()


@contextmanager
def running_landing(spark: SparkSession, url: str, into: Path) -> Iterator[LiveLanding]:
    landing = LiveLanding(spark, url, into)
    try:
        yield landing
    finally:
        landing.stop()


def start_spark(running: ExitStack, folder: Path) -> SparkSession:
    with _interrupted_later(), _stderr_to(folder / "spark.log"):
        spark = start_session(memory=SPARK_MEMORY, log_folder=folder / "spark")
        running.callback(spark.stop)
    return spark


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C counts when the block is over, because a Java process can't be ended that is half started.

    The handlers are then as they were: Spark puts in one of its own, which cancels jobs with a long lament.
    """
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda came_number, _: came.append(came_number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile write their standard error to a file. Java and its workers say a lot."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# --- what a failover took back, and what the tables have made of it ----------------------------------------------


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Changes that are in the tables, and no longer in the bucket."""

    vbuckets: frozenset[int]
    changes: int


def taken_back(url: str, landed: Offsets) -> TakenBack:
    """Compare how far the tables are with where the branches of the bucket's history begin."""
    with Surveyor(ClientSettings.make(url, user=USER, password=PASSWORD)) as surveyor:
        branches = {vbucket: status.failover_log.newest for vbucket, status in surveyor.survey().items()}
    lost = {
        int(vbucket): offset.seqno - branches[vbucket].seqno
        for vbucket, offset in landed.offsets.items()
        if offset.vbuuid != branches[vbucket].vbuuid and offset.seqno > branches[vbucket].seqno
    }
    return TakenBack(frozenset(lost), sum(lost.values()))


def void_changes(lake: Path) -> int:
    """How many changes the tables hold that a rollback took back."""
    changes = DeltaTable(lake / "changes").to_pyarrow_table(columns=["void"])
    return int(pc.sum(changes.column("void")).as_py() or 0)
