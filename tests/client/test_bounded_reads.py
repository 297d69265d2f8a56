"""Reads that have an end come to it, whatever happens on the way, and then hold what the node held."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Iterator

import pytest

from support.fault_proxy import FaultSchedule, ProxiedBucket, ProxiedNode
from support.followed_client import FollowedClient
from support.oracle import differences, offsets_of_json, streamed_documents
from support.random_writes import RandomWrites

SEEDS = range(1000, 1030)
SEEDS_OF_EVERY_RUN = range(1000, 1010)
GROUP = 10
OPERATIONS = 30


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedNode]:
    buckets = [f"group-{first}" for first in SEEDS[::GROUP]]
    folder = tmp_path_factory.mktemp("bounded") / "data"
    with ProxiedNode(folder, "--durability", "memory", buckets=buckets) as node:
        yield node


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[] if first in SEEDS_OF_EVERY_RUN else [pytest.mark.soak]) for first in SEEDS[::GROUP]],
)
def test_reads_to_now(node: ProxiedNode, first: int) -> None:
    bucket = ProxiedBucket(node, f"group-{first}")
    failures = []
    for seed in range(first, first + GROUP):
        schedule = FaultSchedule(seed)
        try:
            read_to_now(bucket, schedule)
        except Exception:
            failures.append(f"seed {seed} fails with\n{schedule.describe()}\n{traceback.format_exc()}")
    assert not failures, "\n".join(failures)


def read_to_now(bucket: ProxiedBucket, schedule: FaultSchedule) -> None:
    """A read while the bucket is written to, which has to end, and more of them until it has all that was written."""
    dice = random.Random(schedule.seed)
    consumer = FollowedClient(bucket.url, end="now", snapshots=dice.choice(["complete", "as-they-come"]))
    bucket.proxy.use(schedule)
    with RandomWrites(bucket, schedule.seed, operations=OPERATIONS) as writes:
        asyncio.run(consumer.read_to_end())
    # What is answered is durable soon, and streamed then.
    while not writes.fences.are_in(consumer.state):
        asyncio.run(consumer.read_to_end())
    wrong = differences(consumer.state.documents(), streamed_documents(bucket))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("snapshots", ["complete", "as-they-come"])
def test_a_read_to_given_seqnos(node: ProxiedNode, snapshots: str) -> None:
    """Each vbucket is read up to its seqno, or to the end of the snapshot that has it, and others not at all."""
    bucket = ProxiedBucket(node, f"group-{SEEDS[0]}")
    bucket.proxy.use(FaultSchedule(SEEDS[0]))
    with RandomWrites(bucket, SEEDS[0], operations=OPERATIONS, with_rollbacks=False) as writes:
        writes.finish()
    with bucket.connect_directly() as connection:
        high = bucket.high_seqnos(connection)
    ends = {vbucket: seqno for vbucket, seqno in high.items() if vbucket % 2 == 0}
    consumer = FollowedClient(bucket.url, end=ends, snapshots=snapshots)
    asyncio.run(consumer.read_to_end())
    assert {row["vbucket"] for row in consumer.rows} == ends.keys()
    assert consumer.saved is not None
    reached = {vbucket: offset[1] for vbucket, offset in offsets_of_json(consumer.saved).items()}
    assert reached.keys() == ends.keys()
    assert all(reached[vbucket] >= end for vbucket, end in ends.items())
