"""The landing while it runs, and what is in its tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from demo.commands import PASSWORD, USER, CommandFailed, interrupted_later
from demo.shop import COLLECTION
from headwater.spark import LandedBatch, land, query_error, start_session

EVERY = "1 second"
DOCUMENT_OPS = ["mutation", "deletion", "expiration"]
SPARK_MEMORY = "1g"


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
            groups=2,
            name="demo",
        )

    def _on_batch(self, batch: LandedBatch) -> None:
        if batch.rows:
            self.batches.append(batch)

    @property
    def changes(self) -> int:
        """Of documents, that were landed."""
        return sum(sum(batch.rows_by_table.values()) for batch in self.batches)

    def check(self) -> None:
        """It goes on, or what has failed it is raised."""
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
    with interrupted_later(), _stderr_to(folder / "spark.log"):
        spark = start_session(memory=SPARK_MEMORY, log_folder=folder / "spark")
        running.callback(spark.stop)
    return spark


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


# --- what is in the tables ----------------------------------------------------------------------------------------


class LandedOrders:
    """The table of orders, as any engine reads it."""

    def __init__(self, lake: Path) -> None:
        self._path = lake / "documents" / COLLECTION
        self._changes = lake / "changes"
        self._version: int | None = None
        self._status: str | None = None

    def status(self, key: str) -> str | None:
        """Of one order. It is read again where there is a new version of the table."""
        if not DeltaTable.is_deltatable(str(self._path)):
            return None
        table = DeltaTable(self._path)
        if all(field.name != "status" for field in table.schema().fields):
            return None  # the columns come with the first documents
        if table.version() != self._version:
            found = table.to_pyarrow_table(columns=["status"], filters=[("key", "=", key)]).column("status")
            self._version, self._status = table.version(), found[0].as_py() if len(found) else None
        return self._status

    def rows(self, *columns: str) -> pa.Table:
        return DeltaTable(self._path).to_pyarrow_table(columns=list(columns))

    def count_changes(self) -> tuple[int, int]:
        """How many changes of documents hold, and how many were taken back by a rollback."""
        changes = DeltaTable(self._changes).to_pyarrow_table(columns=["op", "void"])
        void = changes.filter(pc.is_in(changes.column("op"), pa.array(DOCUMENT_OPS))).column("void")
        taken_back = pc.sum(void).as_py() or 0
        return len(void) - taken_back, taken_back
