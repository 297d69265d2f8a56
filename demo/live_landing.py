"""The landing while it runs, and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from demo.commands import PASSWORD, USER, CommandFailed
from headwater.spark.landing import LandedBatch, Landing
from headwater.spark.query_errors import told_error

EVERY = "2 seconds"
POLL_S = 0.2
WAIT_S_MAX = 300.0


class LiveLanding:
    """A landing that goes on until it is stopped."""

    def __init__(self, spark: SparkSession, url: str, into: Path) -> None:
        self.batches: list[LandedBatch] = []
        self._spark = spark
        self._landing = Landing(
            source={"url": url, "user": USER, "password": PASSWORD, "minPartitions": "4", "name": "demo"},
            into=str(into),
        )
        self._query: StreamingQuery = self._landing.start(spark, every=EVERY, on_batch=self._on_batch)

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
        return {vbucket for batch in self.batches for vbucket in batch.rollbacks}

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
            raise CommandFailed("the landing has ended") if failure is None else told_error(failure)

    def catch_up(self) -> None:
        """Land what there is, bring the documents up to it, and end."""
        self._query.processAllAvailable()
        self._query.stop()
        self._landing.merge_all(self._spark)

    def stop(self) -> None:
        self._query.stop()


@contextmanager
def running_landing(spark: SparkSession, url: str, into: Path) -> Iterator[LiveLanding]:
    landing = LiveLanding(spark, url, into)
    try:
        yield landing
    finally:
        landing.stop()
