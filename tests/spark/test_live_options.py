"""What landings can be told, all of it at once, on a cluster that is written to without a pause and loses a node.

Several pipelines of one process land the same bucket: some documents only, documents as variants, records of the system
too. Each has tables of its own, in a directory or in an object store, and registers them in a catalog. A checker that
shares no code with the landing looks at all of them meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from headwater.lake.location import Location
from headwater.lake.verify import compare
from headwater.testing import HeadwaterCluster
from headwater.testing.nursery import Nursery
from support.landings import check_tables
from support.live_bucket import LiveChecker, LiveWriter
from support.object_store import S3Server
from support.spark_cluster import VBUCKETS, ClusterBucket
from support.unity_server import UnityServer

LOST = 1
EQUAL_S_MAX = 300.0
TRANSACTION = b"_txn:client-record"
PIPELINES: dict[str, dict[str, str]] = {
    "orders": {"where": "\"kind.name = 'order' AND n > 100\"", "history": "true"},
    "variants": {"document": "'variant'", "merge-on-read": "true", "change-feed": "true"},
    "everything": {"system": "true", "merge-on-read": "true", "history": "true"},
}


def wants(pipeline: str, key: bytes, version: int) -> bool:
    is_order = version > 100 and version % 3 == 0
    return pipeline == "everything" or (key != TRANSACTION and (pipeline != "orders" or is_order))


class ClusterWriter(LiveWriter):
    """Every third document is an order. A record of transactions is written between them."""

    def __init__(self, bucket: ClusterBucket) -> None:
        super().__init__(bucket, hot=0, cold=60, own=ClusterBucket(bucket.cluster))
        self.cold.append(TRANSACTION)
        self.asks_for_failover = False

    def _write(self) -> None:
        if self.asks_for_failover:
            self.asks_for_failover = False
            self._lose_a_node()
        elif self._dice.random() < 0.1:
            self._remove(self._dice.choice(self.cold))
        else:
            self._put(self._dice.choice(self.cold))

    def document(self, number: int) -> bytes:
        return b'{"kind":{"name":"%s"},"n":%d}' % (b"user" if number % 3 else b"order", number)

    def _lose_a_node(self) -> None:
        """kill -9, with writes that no other node has; the replicas take over, and the node comes back."""
        assert isinstance(self._bucket, ClusterBucket)
        cluster, on_lost = self._bucket.cluster, self._bucket.vbuckets_on(LOST)
        others = [node for number, node in enumerate(cluster.nodes) if number != LOST]
        for node in others:
            node.hold_replicas()
        mine = [key for key in self.cold if self._bucket.vbucket_of(key) in on_lost]
        for key in mine * 3:
            self._put(key)
        time.sleep(1)  # So that they are landed.
        self.diary.forget(mine)
        cluster.failover(cluster.nodes[LOST])
        for node in others:
            node.release_replicas()
        self._bucket.close()
        self._look_up(mine)
        cluster.bring_back(cluster.nodes[LOST])
        self._bucket.close()
        self.failovers += 1


@dataclass
class Lakes:
    """Where the pipelines land."""

    root: str
    catalog: str
    registered: Callable[[], set[str]]
    """The names of the tables that the catalog has."""
    storage_options: dict[str, str] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> Location:
        return Location.of(f"{self.root}/{name}", self.storage_options)

    def write_file(self, path: Path, url: str) -> None:
        common = {
            "url": f"'{url}'",
            "runner": "'local'",
            "every": "'100ms'",
            "fresh": "'1s'",
            "catalog": f"'{self.catalog}'",
        }
        # A secret may not stand in the file; `environment` has it.
        options = (self.storage_options or {}) | {"aws_secret_access_key": "${AWS_SECRET_ACCESS_KEY}"}
        stored = "".join(f"{name} = '{value}'\n" for name, value in options.items())
        path.write_text(
            "".join(
                f"[pipelines.{name}]\ninto = '{self.root}/{name}'\nschema = '{name}'\n"
                + "".join(f"{option} = {value}\n" for option, value in (common | own).items())
                + (f"[pipelines.{name}.storage-option]\n{stored}" if self.storage_options else "")
                for name, own in PIPELINES.items()
            )
        )


@pytest.fixture(params=["directory", "S3"])
def lakes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lakes]:
    if request.param == "S3":
        with S3Server() as store:
            root = store.make_bucket("lakes")
            names = lambda: {f"{one}.{table}" for one in PIPELINES for table in store.glue_tables(one)}  # noqa: E731
            yield Lakes(root, "glue://", names, store.options, store.environment)
    else:
        with UnityServer() as unity:
            names = lambda: {name.removeprefix("main.") for name in unity.tables}  # noqa: E731
            yield Lakes(str(tmp_path / "lakes"), unity.catalog, names)


@pytest.fixture
def bucket(tmp_path: Path, nursery: Nursery) -> Iterator[ClusterBucket]:
    with HeadwaterCluster(nursery, tmp_path, nodes=3, vbuckets=VBUCKETS) as cluster:
        bucket = ClusterBucket(cluster)
        yield bucket
        bucket.close()


@pytest.mark.soak
def test_all_options_on_a_live_cluster(lakes: Lakes, bucket: ClusterBucket, tmp_path: Path) -> None:
    file, log = tmp_path / "headwater.toml", tmp_path / "land.log"
    lakes.write_file(file, bucket.url)
    command = [sys.executable, "-m", "headwater", "land", "--all", "--config", str(file), "--json"]
    login = {"HEADWATER_USER": bucket.cluster.user, "HEADWATER_PASSWORD": bucket.cluster.password}
    environment = {**os.environ, **login, **lakes.environment}
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        stack.callback(process.kill)
        with ClusterWriter(bucket) as writer:
            checkers = {
                name: LiveChecker(
                    lakes.of(name).uri, writer, storage_options=lakes.storage_options, wants=partial(wants, name)
                )
                for name in PIPELINES
            }

            def look(until: Callable[[], bool]) -> None:
                give_up_s = time.monotonic() + EQUAL_S_MAX
                while not until():
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < give_up_s, log.read_text()
                    for checker in checkers.values():
                        checker.look()

            look(lambda: all(len(checker.ages_s) > 5 for checker in checkers.values()))
            writer.asks_for_failover = True
            look(lambda: writer.failovers == 1)
            looked = {name: len(checker.ages_s) for name, checker in checkers.items()}
            look(lambda: all(len(checker.ages_s) > looked[name] + 5 for name, checker in checkers.items()))
        for name, checker in checkers.items():
            give_up_s = time.monotonic() + EQUAL_S_MAX
            while not (verdict := compare(bucket.settings, lakes.of(name))).is_equal or verdict.pending:
                assert time.monotonic() < give_up_s, (name, verdict)
                time.sleep(0.2)
            print(f"{name}: {checker.looks} looks, {checker.compared} compared, {writer.written} writes")
    for name, checker in checkers.items():
        checker.check_end(bucket)
        changes = check_tables(bucket, lakes.of(name))
        has_records = any(row["key"] == TRANSACTION.decode() for row in changes)
        assert has_records == (name == "everything")
        assert any(row["op"] == "rollback" for row in changes)
        assert any(row["op"] == "unmatched" for row in changes) == (name == "orders")
    expected = {f"{name}.{table}" for name in PIPELINES for table in ("changes", "documents__default__default")}
    assert lakes.registered() >= expected
