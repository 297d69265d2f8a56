"""Many durable writes at a time: each acknowledgement and each received change costs what it decides, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "store"))

from store_harness import new_bucket

from headwater.node.durability import SyncWrites
from headwater.protocol.frames import DurabilityLevel
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.prepares import decide_by_changes, put_prepare
from work_counter import calls_of

VB = VBucketId(0)
FEW, MANY = 100, 400
LINEAR_MAX = 1.2
"""How much more one of many may cost than one of few. Quadratic work would make it about four times as much."""


def prepared(count: int) -> Bucket:
    bucket = new_bucket()
    for number in range(count):
        put_prepare(
            bucket, VB, collection_id=DEFAULT_COLLECTION, key=b"%d" % number, value=b"1",
            datatype=Datatype.JSON, level=DurabilityLevel.MAJORITY,
        )  # fmt: skip
    bucket.commit_now()
    return bucket


def work_of_acknowledging(count: int) -> float:
    """What it costs to acknowledge one write, where there are so many, one after the other."""
    bucket = prepared(count)
    facts = bucket.vbuckets.facts[VB]
    assert facts is not None
    bucket.set_vbucket_facts(VB, replace(facts, topology=(["a", "b"],)))
    bucket.commit_now()
    sync_writes = SyncWrites(bucket=bucket)
    writes = [sync_writes.begin(prepare, deadline_s=30) for prepare in bucket.prepares.of(VB)]

    def work() -> None:
        for number in range(1, count + 1):
            sync_writes.acknowledge(VB, "b", Seqno(number))

    effort = calls_of(work) / count
    assert {write.outcome.status for write in writes if write.outcome} == {Status.SUCCESS}
    assert bucket.prepares.of(VB) == []
    return effort


def work_of_receiving(count: int) -> float:
    """What it costs to receive the change of one document, where so many have a prepare, each in a run of its own."""
    bucket = prepared(count)
    runs = []
    for number in range(count):
        start = bucket.pending.used_bytes
        change = Mutation(
            vbucket=VB, seqno=Seqno(count + number + 1), rev_seqno=1, collection_id=DEFAULT_COLLECTION,
            key=b"%d" % number, value=b"9",
        )  # fmt: skip
        bucket.enter_change(VB, change, supersedes=False)
        runs.append((start, bucket.pending.used_bytes))

    def work() -> None:
        for start, end in runs:
            decide_by_changes(bucket, VB, bucket.pending.frames[start:end])

    effort = calls_of(work) / count
    assert bucket.prepares.of(VB) == []
    return effort


@pytest.mark.parametrize("effort", [work_of_acknowledging, work_of_receiving])
def test_one_of_many_costs_as_much_as_one_of_few(effort: Callable[[int], float]) -> None:
    effort(2)  # what is done once only, such as compiling
    assert effort(MANY) < LINEAR_MAX * effort(FEW)
