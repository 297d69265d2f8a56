"""The scenes of the demo, one after another."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from demo.cluster import Cluster, started_cluster
from demo.commands import headwater, load, verify
from demo.live_landing import LiveLanding, running_landing, start_spark, taken_back, void_changes
from demo.screen import Screen, Step
from demo.shop import SCOPE, counts, json_lines
from demo.writer_process import WriterProcess, running_writer
from headwater.spark import query_error

LIVE_BATCHES = 2
"""So many batches of live changes are landed before the failover, and so many with the replicas held."""


@dataclass(frozen=True, slots=True)
class Demo:
    screen: Screen
    folder: Path
    documents: int
    seed: int

    @property
    def lake(self) -> Path:
        return self.folder / "lake"

    def play(self, running: ExitStack) -> str | None:
        """Returns how to start the bucket again, or None where the tables are not the bucket in the end.

        To close `running` ends all that goes on.
        """
        try:
            return self._play(running)
        except PySparkException as error:
            raise query_error(error) from error

    def _play(self, running: ExitStack) -> str | None:
        cluster = running.enter_context(started_cluster(self.folder))
        with self.screen.step("Starting Spark and two nodes") as step:
            spark = start_spark(running, self.folder)
            cluster.form()
            step.done = f"Spark {spark.version} is up, and two nodes with a replica of each other: {cluster.url}"
        self._load(cluster)
        writer = self._write(running, cluster)
        landing = self._land(running, spark, cluster, writer)
        converged_s = self._lose_a_node(cluster, landing, writer)
        self._catch_up(landing, writer)
        return cluster.second_again() if self._compare(cluster, landing, converged_s) else None

    def _load(self, cluster: Cluster) -> None:
        with self.screen.step("Loading documents") as step:
            headwater("collections", "create", cluster.url, SCOPE)
            began_s, loaded, total = time.monotonic(), 0, self.documents
            for name, count in counts(total).items():
                collection = f"{SCOPE}.{name}"
                headwater("collections", "create", cluster.url, collection)
                lines = step.counted(json_lines(name, count, self.seed), start=loaded, total=total, text=collection)
                loaded += load(cluster.url, lines, collection=collection, key=f"{name}::{{id}}")["documents"]
            rate = loaded / (time.monotonic() - began_s)
            step.done = f"{loaded:,} documents made and loaded in {len(counts(total))} collections, {rate:,.0f}/s"

    def _write(self, running: ExitStack, cluster: Cluster) -> WriterProcess:
        with self.screen.step("Starting an application") as step:
            writing = running_writer(cluster.url, documents=self.documents, seed=self.seed, folder=self.folder)
            step.done = "An application updates, adds and deletes documents from now on, with the Couchbase SDK"
            return running.enter_context(writing)

    def _land(self, running: ExitStack, spark: SparkSession, cluster: Cluster, writer: WriterProcess) -> LiveLanding:
        with self.screen.step("Landing it in Delta tables") as step:
            landing = running.enter_context(running_landing(spark, cluster.url, self.lake))
            landing.wait_until(lambda: bool(landing.batches), lambda: step.show(f"{writer.written:,} changes written"))
            first = landing.batches[0]
            step.done = f"The first batch is landed: {first.rows:,} changes, {first.rows / first.took_s:,.0f}/s"
        with self.screen.step("Landing what is written meanwhile") as step:
            _wait_for_batches(LIVE_BATCHES, step, landing, writer)
            step.done = f"{landing.rows:,} changes landed in {len(landing.batches)} batches, while writes went on"
        return landing

    def _lose_a_node(self, cluster: Cluster, landing: LiveLanding, writer: WriterProcess) -> float:
        """Returns how long it took from the end of the node to tables without its lost changes."""
        with self.screen.step("Holding the replicas") as step:
            held = cluster.hold_replicas()
            _wait_for_batches(LIVE_BATCHES, step, landing, writer)
            step.done = (
                f"The second node takes in no changes for its {held} replicas any more: "
                f"{cluster.behind():,} changes are on the first node alone, and are landed from there"
            )
        with self.screen.step("Killing the first node") as step:
            landed, died_s = landing.offsets, time.monotonic()
            cluster.kill_first()
            promoted = cluster.fail_over()
            lost = taken_back(cluster.url, landed)
            step.done = (
                f"kill -9, and failover: {promoted} vbuckets, as the parts of a bucket are called, are active on the "
                f"second node, and {lost.changes:,} changes in the tables are of a history that did not happen"
            )
        with self.screen.step("Landing the rollback") as step:

            def show() -> None:
                step.show("vbuckets", completed=len(landing.rolled_back & lost.vbuckets), total=len(lost.vbuckets))

            landing.wait_until(lambda: lost.vbuckets <= landing.rolled_back, show)
            converged_s = time.monotonic() - died_s
            step.done = (
                f"The tables went back: {len(landing.rolled_back)} rollbacks undone, {void_changes(self.lake):,} "
                "changes marked void, and what holds instead read again"
            )
        with self.screen.step("Landing what is written after the failover") as step:
            _wait_for_batches(LIVE_BATCHES, step, landing, writer)
            step.done = f"The application went on with the other node: {writer.written:,} changes written so far"
        return converged_s

    def _catch_up(self, landing: LiveLanding, writer: WriterProcess) -> None:
        with self.screen.step("Stopping the application") as step:
            step.done = f"The application has ended: {writer.stop()}"
        with self.screen.step("Landing the rest") as step:
            landing.catch_up()
            step.done = f"Caught up: {landing.rows:,} changes in {len(landing.batches)} batches"

    def _compare(self, cluster: Cluster, landing: LiveLanding, converged_s: float) -> bool:
        with self.screen.step("Comparing the tables with the bucket") as step:
            found = verify(cluster.url, self.lake)
            step.done = f"headwater verify, which reads both sides and compares every document. {found['sentence']}"
        self.screen.print()
        self.screen.figures(
            [
                ("documents in the end", f"{found['landed']:,}"),
                ("changes landed", f"{landing.rows:,}"),
                ("the quickest batch", f"{landing.rows_per_s:,.0f} changes/s"),
                ("rollbacks undone", f"{len(landing.rolled_back):,}"),
                ("from kill -9 to right tables", f"{converged_s:.1f} s"),
                ("tables and bucket are", "equal" if found["equal"] else "NOT EQUAL"),
                ("time", f"{self.screen.elapsed_s:.0f} s"),
            ]
        )
        return bool(found["equal"])


def _wait_for_batches(more: int, step: Step, landing: LiveLanding, writer: WriterProcess) -> None:
    """Until so many more batches have been landed."""
    first = len(landing.batches)

    def show() -> None:
        writer.check()
        text = f"{landing.rows:,} changes landed; {writer.written:,} written meanwhile"
        step.show(text, completed=len(landing.batches) - first, total=more)

    landing.wait_until(lambda: len(landing.batches) >= first + more, show)
