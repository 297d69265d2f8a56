"""The scenes of the demo, one after another."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from demo.commands import compare, headwater, running_node, stderr_to
from demo.drill import drill_rollbacks, void_changes
from demo.live_landing import LiveLanding, running_landing
from demo.shop import COLLECTIONS, SCOPE
from demo.telling import Step, Teller
from demo.writer_process import WriterProcess, running_writer
from headwater.spark.query_errors import told_error
from headwater.spark.session import start_session

SPARK_MEMORY = "1g"
LIVE_BATCHES = 2
"""So many batches of live changes are landed before the drill."""


@dataclass(frozen=True, slots=True)
class Demo:
    teller: Teller
    folder: Path
    documents: int
    """Of each collection, to begin with."""
    drills: int
    seed: int

    @property
    def lake(self) -> Path:
        return self.folder / "lake"

    def play(self, running: ExitStack) -> bool:
        """Returns whether the tables are the bucket in the end. Whoever closes `running` ends all that goes on."""
        try:
            return self._play(running)
        except PySparkException as error:
            raise told_error(error) from error

    def _play(self, running: ExitStack) -> bool:
        with self.teller.step("Starting Spark") as step:
            spark = self._start_spark(running)
            step.done = f"Spark {spark.version} is up"
        with self.teller.step("Starting a node") as step:
            node = running.enter_context(running_node(self.folder / "node"))
            step.done = f"A node serves {node.url}"
        self._load(node.url)
        with self.teller.step("Starting an application") as step:
            log = self.folder / "writer.log"
            writer = running.enter_context(running_writer(node.url, documents=self.documents, seed=self.seed, log=log))
            step.done = "An application updates, adds and deletes documents from now on, with the Couchbase SDK"
        landing = self._land(running, spark, node.url, writer)
        self._drill(node.url, landing, writer)
        self._catch_up(landing, writer)
        return self._compare(node.url, landing)

    def _load(self, url: str) -> None:
        with self.teller.step("Loading documents") as step:
            headwater("collections", "create", url, SCOPE)
            rates = []
            for number, name in enumerate(COLLECTIONS):
                step.show(f"{SCOPE}.{name}")
                headwater("collections", "create", url, f"{SCOPE}.{name}")
                where = ["--collection", f"{SCOPE}.{name}", "--key", f"{name}::{{#}}"]
                what = ["--generate", str(self.documents), "--seed", str(self.seed + number)]
                rates.append(json.loads(headwater("load", url, *what, *where, "--json"))["documents_per_s"])
            total = self.documents * len(COLLECTIONS)
            step.done = f"{total:,} documents loaded in {len(COLLECTIONS)} collections, {max(rates):,.0f}/s"

    def _start_spark(self, running: ExitStack) -> SparkSession:
        with stderr_to(self.folder / "spark.log"):
            spark = start_session(memory=SPARK_MEMORY, log_folder=self.folder / "spark")
        running.callback(spark.stop)
        # Spark has put in a handler of its own, which cancels jobs with a long lament.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return spark

    def _land(self, running: ExitStack, spark: SparkSession, url: str, writer: WriterProcess) -> LiveLanding:
        with self.teller.step("Landing it in Delta tables") as step:
            landing = running.enter_context(running_landing(spark, url, self.lake))
            enough = self.documents * len(COLLECTIONS)
            landing.wait_until(lambda: landing.rows >= enough, lambda: _show(step, landing, writer))
            first = landing.batches[0]
            step.done = f"{first.rows:,} changes landed as the first batch, {first.rows / first.took_s:,.0f}/s"
        with self.teller.step("Landing what is written meanwhile") as step:
            batches = len(landing.batches) + LIVE_BATCHES
            landing.wait_until(lambda: len(landing.batches) >= batches, lambda: _show(step, landing, writer))
            step.done = f"{landing.rows:,} changes landed in {len(landing.batches)} batches, while writes went on"
        return landing

    def _drill(self, url: str, landing: LiveLanding, writer: WriterProcess) -> None:
        with self.teller.step("Failing over to copies that lag behind") as step:
            drilled = drill_rollbacks(url, self.lake, count=self.drills)
            step.done = (
                f"Failover drill: {len(drilled.vbuckets)} vbuckets lost their newest {drilled.changes:,} changes, "
                f"{drilled.landed:,} of which had been landed"
            )
        with self.teller.step("Landing the rollback") as step:
            landing.wait_until(lambda: drilled.vbuckets <= landing.rolled_back, lambda: _show(step, landing, writer))
            step.done = (
                f"The tables went back with them: {len(landing.rolled_back)} rollbacks undone, "
                f"{void_changes(self.lake):,} changes marked void, and what is left of them read again"
            )

    def _catch_up(self, landing: LiveLanding, writer: WriterProcess) -> None:
        with self.teller.step("Stopping the application") as step:
            step.done = f"The application has ended: {writer.stop()}"
        with self.teller.step("Landing the rest") as step:
            landing.catch_up()
            step.done = f"Caught up: {landing.rows:,} changes in {len(landing.batches)} batches"

    def _compare(self, url: str, landing: LiveLanding) -> bool:
        with self.teller.step("Comparing the tables with the bucket") as step:
            found = compare(url, self.lake)
            counts = ", ".join(f"{count:,} {verdict}" for verdict, count in found["vbuckets"].items() if count)
            step.done = f"headwater verify: vbuckets {counts}"
        self.teller.tell()
        self.teller.figures(
            [
                ("documents", f"{found['documents']:,}"),
                ("changes landed", f"{landing.rows:,}"),
                ("at best", f"{landing.rows_per_s:,.0f} changes/s"),
                ("rollbacks undone", f"{len(landing.rolled_back):,}"),
                ("the tables and the bucket are", "equal" if found["equal"] else "NOT EQUAL"),
                ("time", f"{self.teller.elapsed_s:.0f} s"),
            ]
        )
        return bool(found["equal"])


def _show(step: Step, landing: LiveLanding, writer: WriterProcess) -> None:
    writer.check()
    step.show(
        f"{landing.rows:,} changes in {len(landing.batches)} batches, {len(landing.rolled_back)} rollbacks; "
        f"meanwhile {writer.written:,} changes were written"
    )
