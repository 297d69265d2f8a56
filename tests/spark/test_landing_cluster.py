"""A cluster of three nodes is landed, and one of them is lost with changes that no other node has got.

Documents A are on every copy of a vbucket. The replicas are held, so documents B are on the active copy alone: they are
landed, and then their node is killed with kill -9 and failed over. The copies that take over go on with documents C.
Some keys are written in A and again in B before they are landed, so that the tables never saw the version of A.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.errors import KeyNotFound
from headwater.spark.executors import SparkRunner
from headwater.testing import HeadwaterCluster
from headwater.testing.nursery import Nursery
from support.landings import DEFAULT, LandedBucket, SourceBucket, key_of
from support.live_bucket import Working
from support.spark_cluster import VBUCKETS, ClusterBucket

HOTELS = "inventory.hotel"
ROOMS = "inventory.room"
COLLECTIONS = (DEFAULT, HOTELS, ROOMS)
LOST = 1
OTHERS = (0, 2)
A, B, C = b'{"wrote":"A"}', b'{"wrote":"B"}', b'{"wrote":"C"}'
EVERY = "1 second"
REACHED_S_MAX = 120.0


@pytest.fixture
def bucket(tmp_path: Path, nursery: Nursery) -> Iterator[ClusterBucket]:
    """Instead of the shared one of a single node."""
    with HeadwaterCluster(nursery, tmp_path, nodes=3, vbuckets=VBUCKETS) as cluster:
        bucket = ClusterBucket(cluster)
        bucket.create_scope("inventory")
        bucket.create_collection(HOTELS)
        bucket.create_collection(ROOMS)
        yield bucket
        bucket.close()
    assert not [node.log for node in cluster.nodes if "Traceback" in node.log]


def hold_others(cluster: HeadwaterCluster) -> None:
    for node in OTHERS:
        cluster.nodes[node].hold_replicas()


def lose(cluster: HeadwaterCluster) -> None:
    """kill -9, and the replicas take over with what they have."""
    cluster.failover(cluster.nodes[LOST])
    for node in OTHERS:
        cluster.nodes[node].release_replicas()


def keys_of(bucket: SourceBucket, prefix: str, count: int, vbuckets: list[int]) -> list[bytes]:
    return [key for vbucket in vbuckets for key in bucket.keys(prefix, count, vbucket=vbucket)]


def test_a_lost_node_takes_its_changes_back(spark: SparkSession, bucket: ClusterBucket, tmp_path: Path) -> None:
    cluster = bucket.cluster
    landed = LandedBucket(bucket, spark, tmp_path / "lake")
    kept = keys_of(bucket, "kept", 2, list(range(VBUCKETS)))
    for collection in COLLECTIONS:
        bucket.put(kept, A, into=collection)
    landed.land()
    landed.check_equal()

    on_lost = bucket.vbuckets_on(LOST)
    elsewhere = [vbucket for vbucket in range(VBUCKETS) if vbucket not in on_lost]
    traps = keys_of(bucket, "trap", 1, on_lost)
    updated, deleted = (bucket.keys("kept", 2, vbucket=on_lost[0])[at] for at in (0, 1))
    for collection in COLLECTIONS:
        bucket.put(traps, A, into=collection)
    cluster.wait_until_replicated()
    hold_others(cluster)
    lost_only = keys_of(bucket, "lost", 1, on_lost)
    for collection in COLLECTIONS:
        bucket.put([*traps, *lost_only, updated], B, into=collection)
        bucket.delete([deleted], of=collection)
    bucket.put(keys_of(bucket, "elsewhere", 1, elsewhere), B)
    landed.land()
    landed.check_equal()
    assert landed.documents(HOTELS).keys() == {*kept, *traps, *lost_only} - {deleted}
    versions = [row for row in landed.rows("changes") if row["key"] is not None and key_of(row) in traps]
    assert len(versions) == len(traps) * len(COLLECTIONS), "the trap is set: the versions of A were never seen"

    lose(cluster)
    assert not landed.compare().is_equal, "the tables are not the bucket until it is landed"
    written_again = [lost_only[0], traps[0], *keys_of(bucket, "later", 1, on_lost)]
    for collection in COLLECTIONS:
        bucket.put(written_again, C, into=collection)
    landed.land()
    landed.check_equal()
    assert landed.rolled_back.keys() == set(on_lost)
    expected = {**dict.fromkeys([*kept, *traps], A), **dict.fromkeys(written_again, C)}
    assert landed.documents(HOTELS) == expected
    assert landed.documents(ROOMS) == expected
    assert landed.documents(DEFAULT) == {**expected, **dict.fromkeys(keys_of(bucket, "elsewhere", 1, elsewhere), B)}
    check_dead_branch(landed, on_lost)

    cluster.bring_back(cluster.nodes[LOST])
    assert bucket.vbuckets_on(LOST)
    landed.land()
    landed.check_equal()
    bucket.put(keys_of(bucket, "home", 1, bucket.vbuckets_on(LOST)), C, into=ROOMS)
    bucket.delete(kept, of=HOTELS)
    landed.land()
    landed.check_equal()
    assert landed.rolled_back == {}, "vbuckets that move take nothing back"
    assert landed.documents(HOTELS).keys() == expected.keys() - set(kept)


def check_dead_branch(landed: LandedBucket, vbuckets: list[int]) -> None:
    """`changes` has all of B that was lost, marked, and a rollback for each vbucket."""
    changes = landed.rows("changes")
    rollbacks = {row["vbucket"]: row for row in changes if row["op"] == "rollback"}
    assert rollbacks.keys() == set(vbuckets)
    for vbucket, rollback in rollbacks.items():
        of_vbucket = [row for row in changes if row["vbucket"] == vbucket and row["op"] != "rollback"]
        dead = [row for row in of_vbucket if row["void"]]
        assert dead
        assert max(row["seqno"] for row in dead) == json.loads(rollback["value"])["from_seqno"]
        assert all(rollback["seqno"] < row["seqno"] and row["batch"] < rollback["batch"] for row in dead)
        wrote_b = [row for row in of_vbucket if row["value"] is not None and B.decode() in str(row["value"])]
        assert wrote_b
        assert all(row["void"] for row in wrote_b)
    assert {key_of(row) for row in changes if row["op"] == "deletion"} == {
        key_of(row) for row in changes if row["op"] == "deletion" and row["void"]
    }


# --- while it runs ------------------------------------------------------------------------------------------------


class Writer(Working):
    """Writes and deletes without end, wherever the vbuckets are."""

    def __init__(self, bucket: ClusterBucket) -> None:
        super().__init__("writer", bucket, ClusterBucket(bucket.cluster))
        self._bucket.ids = bucket.ids

    def _work(self) -> None:
        keys = keys_of(self._bucket, "key", 4, list(range(VBUCKETS)))
        for number in itertools.count():
            if self._is_over.wait(0.003):
                return
            key, collection = keys[number * 7 % len(keys)], COLLECTIONS[number % len(COLLECTIONS)]
            if number % 5:
                self._bucket.put([key], b'{"n":%d}' % number, into=collection)
            else:
                with contextlib.suppress(KeyNotFound):
                    self._bucket.delete([key], of=collection)


@pytest.mark.soak
def test_a_landing_runs_through_a_failover_and_a_rebalance(
    spark: SparkSession, bucket: ClusterBucket, tmp_path: Path
) -> None:
    cluster = bucket.cluster
    landed = LandedBucket(bucket, spark, tmp_path / "lake")
    query = landed.landing.start(SparkRunner(spark), every=EVERY, on_batch=landed.batches.append)

    def wait_for_batches(more: int) -> None:
        give_up_s = time.monotonic() + REACHED_S_MAX
        wanted = landed_batches() + more
        while landed_batches() < wanted:
            assert query.isActive, query.exception()
            assert time.monotonic() < give_up_s, "the landing does not go on"
            time.sleep(0.05)

    def landed_batches() -> int:
        return sum(batch.rows > 0 for batch in landed.batches)

    try:
        with Writer(bucket):
            wait_for_batches(1)
            hold_others(cluster)
            wait_for_batches(2)
            on_lost = bucket.vbuckets_on(LOST)
            lose(cluster)
            wait_for_batches(1)
            cluster.bring_back(cluster.nodes[LOST])
            wait_for_batches(1)
        query.processAllAvailable()
        assert query.isActive, query.exception()
    finally:
        query.stop()
    landed.check_equal()
    # A vbucket that moved while it was read may have been read again, to be sure.
    assert landed.rolled_back.keys() >= set(on_lost)
