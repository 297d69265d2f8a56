"""The scenes of the demo, one after another."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from demo.cluster import Cluster, started_cluster
from demo.commands import CommandFailed, headwater, load, verify
from demo.connector import ConnectorTable, running_connector
from demo.live_landing import LandedOrders, LiveLanding, running_landing, start_spark
from demo.screen import Screen, Step
from demo.shop import COLLECTION, SCOPE, json_lines, key_of
from demo.story import LOST, PAID, PLACES, WRITTEN, Story
from demo.writer_process import WriterProcess, running_writer
from headwater.spark import query_error

LOOK_EVERY_S = 0.25
WAIT_S_MAX = 300.0
SHOWN_ROWS = 5
SHOWN_COLUMNS = ("key", "status", "customer", "city", "total")


@dataclass(frozen=True, slots=True)
class Played:
    """What is left in the end."""

    story: Story
    serve_again: str
    """The command that starts the bucket again."""


@dataclass(frozen=True, slots=True)
class Demo:
    screen: Screen
    folder: Path
    documents: int
    seed: int

    @property
    def lake(self) -> Path:
        return self.folder / "lake"

    def play(self, running: ExitStack) -> Played | None:
        """None where the tables are not the bucket in the end. To close `running` ends all that goes on."""
        try:
            return self._play(running)
        except PySparkException as error:
            raise query_error(error) from error

    def _play(self, running: ExitStack) -> Played | None:
        cluster = running.enter_context(started_cluster(self.folder))
        with self.screen.step("Starting two nodes and Spark, and loading orders") as step:
            spark = self._start(running, cluster)
            step.done = f"Two nodes, each with a copy of the other's half of {self.documents:,} orders; and Spark"
        with self.screen.step("Landing the bucket in a table, while an application writes") as step:
            scene = self._begin(running, spark, cluster)
            scene.watch(step, WRITTEN, status="open")
            step.done = f"The orders have landed, while an application writes. Follow one of them: {scene.story.key}"
        with self.screen.step("Holding back the replicas, and paying the order") as step:
            cluster.hold_replicas()
            scene.writer.set_status("paid")
            scene.watch(step, PAID, status="paid")
            step.done = "The replicas are held back, then the order is paid: one node has that, and the tables"
        with self.screen.step("Killing that node") as step:
            died_s = time.monotonic()
            cluster.kill_first()
            cluster.fail_over()
            scene.watch(step, LOST, status="open", connector_status="paid")
            right_s = time.monotonic() - died_s
            step.done = f"kill -9, failover: it was never paid. Headwater's table was right again in {right_s:.1f} s"
        with self.screen.step("Ending the application, and landing the rest") as step:
            scene.catch_up()
            step.done = "The application has ended, and the rest has landed"
        return self._compare(cluster, scene)

    def _start(self, running: ExitStack, cluster: Cluster) -> SparkSession:
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(self._load, cluster)
            # In this thread: it sets handlers of signals.
            spark = start_spark(running, self.folder)
            loading.result()
        return spark

    def _load(self, cluster: Cluster) -> None:
        cluster.form()
        for name in (SCOPE, COLLECTION):
            headwater("collections", "create", cluster.url, name)
        load(cluster.url, json_lines(self.documents, self.seed), collection=COLLECTION, key="order::{id}")

    def _begin(self, running: ExitStack, spark: SparkSession, cluster: Cluster) -> Scene:
        key = cluster.on_first(map(key_of, range(1, self.documents)))
        writing = running_writer(cluster.url, key, orders=self.documents, seed=self.seed, folder=self.folder)
        scene = Scene(
            story=Story(key),
            landing=running.enter_context(running_landing(spark, cluster.url, self.lake)),
            landed=LandedOrders(self.lake),
            connector=running.enter_context(running_connector(cluster.url)),
            writer=running.enter_context(writing),
        )
        scene.writer.set_status("open")
        return scene

    def _compare(self, cluster: Cluster, scene: Scene) -> Played | None:
        with self.screen.step("Comparing the table with the bucket, document by document") as step:
            found = verify(cluster.url, self.lake)
            step.done = f"headwater verify: {found['sentence']}"
        hold, taken_back = scene.landed.count_changes()
        if scene.landing.changes != hold + taken_back:
            raise CommandFailed(f"{scene.landing.changes:,} changes were landed, and the table has others")
        versions = scene.landed.rows("key", "cas").to_pydict()
        wrong = scene.connector.differing(dict(zip(versions["key"], versions["cas"], strict=True)))
        screen, story = self.screen, scene.story
        screen.print()
        screen.quote(story.to_text())
        screen.print(
            f"\n[bold]{scene.landing.changes:,}[/] changes landed = [bold]{hold:,}[/] that hold + "
            f"[bold]{taken_back:,}[/] that the failover took back.\n"
            f"Wrong rows now: [bold]{found['differing']:,}[/] in Headwater's table, [bold]{wrong:,}[/] in that of the "
            f"connector. The demo took {screen.elapsed_s:.0f} s.\n"
        )
        self._show_table(scene)
        return Played(story, cluster.second_again()) if found["equal"] else None

    def _show_table(self, scene: Scene) -> None:
        rows = scene.landed.rows("id", *SHOWN_COLUMNS).sort_by("id").drop("id").to_pylist()
        at = next(at for at, row in enumerate(rows) if row["key"] == scene.story.key)
        shown = rows[max(0, at - SHOWN_ROWS // 2) :][:SHOWN_ROWS]
        self.screen.table(SHOWN_COLUMNS, [tuple(row.values()) for row in shown], marked=scene.story.key)


@dataclass(frozen=True, slots=True)
class Scene:
    """Those who take part, and what is seen of the order that is followed."""

    story: Story
    writer: WriterProcess
    landing: LiveLanding
    landed: LandedOrders
    connector: ConnectorTable

    def watch(self, step: Step, moment: str, *, status: str, connector_status: str | None = None) -> None:
        """Wait until the order is in all places as it is to be there, and note it."""
        wanted = (status, status, connector_status or status)
        deadline_s = time.monotonic() + WAIT_S_MAX
        while self._look(step) != wanted:
            self.landing.check()
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"{self.story.key} did not become {', '.join(wanted)} in {WAIT_S_MAX:.0f} s")
            time.sleep(LOOK_EVERY_S)
        self.story.rows.append((moment, *wanted))

    def _look(self, step: Step) -> tuple[str | None, ...]:
        key = self.story.key
        seen = (self.writer.status(), self.landed.status(key), self.connector.status(key))
        changes = ("", f"{self.landing.changes:,}", f"{self.connector.changes:,}")
        places = {place: (one or "…", count) for place, one, count in zip(PLACES, seen, changes, strict=True)}
        step.show(places, key, "changes read")
        return seen

    def catch_up(self) -> None:
        """End the application; then all that it has written is in both tables."""
        self.writer.stop()
        self.landing.catch_up()
        deadline_s = time.monotonic() + WAIT_S_MAX
        while not self.connector.is_caught_up:
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"the connector's table did not catch up in {WAIT_S_MAX:.0f} s")
            time.sleep(LOOK_EVERY_S)
