"""What a copy acknowledges when its stream goes on: prepares of snapshots that are whole, and no others."""

from __future__ import annotations

import pytest

from headwater.node.consumer.stream import SyncWriteReceiver
from headwater.protocol.frames import DurabilityLevel
from headwater.protocol.messages.dcp_changes import Prepare, SeqnoAcknowledged
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId
from headwater.store.bucket import Bucket
from headwater.store.receiving import begin_snapshot
from support.store_harness import new_bucket

VB = VBucketId(1)


@pytest.fixture
def bucket() -> Bucket:
    return new_bucket(state=VBucketState.REPLICA)


def receive(bucket: Bucket, receiver: SyncWriteReceiver, seqno: int, *, end: int) -> None:
    begin_snapshot(bucket, VB, start=Seqno(0), end=Seqno(end), has_history=False)
    prepare = Prepare(
        vbucket=VB, seqno=Seqno(seqno), rev_seqno=1, cas=Cas(seqno), durability=DurabilityLevel.MAJORITY,
        collection_id=CollectionId(0), key=b"%d" % seqno, value=b"{}",
    )  # fmt: skip
    receiver.receive(prepare, end_seqno=Seqno(end))
    bucket.commit_now()


def acknowledged(seqno: int) -> bytes:
    return SeqnoAcknowledged(opaque=7, vbucket=VB, prepared_seqno=Seqno(seqno)).encode()


def resumed(bucket: Bucket) -> SyncWriteReceiver:
    receiver = SyncWriteReceiver(bucket, VB, 7)
    receiver.on_accepted()
    return receiver


def test_a_prepare_of_a_whole_snapshot_is_acknowledged_again(bucket: Bucket) -> None:
    receive(bucket, SyncWriteReceiver(bucket, VB, 6), 4, end=4)
    receiver = resumed(bucket)
    assert receiver.is_waiting
    bucket.set_vbucket_state(0, VBucketState.DEAD)
    bucket.commit_now()
    assert receiver.on_durable() == acknowledged(4)


def test_one_inside_of_a_snapshot_waits_for_its_end(bucket: Bucket) -> None:
    """A failover would not take this copy, so that a write which it made a majority for would be lost."""
    receive(bucket, SyncWriteReceiver(bucket, VB, 6), 4, end=9)
    receiver = resumed(bucket)
    assert not receiver.is_waiting
    receive(bucket, receiver, 9, end=9)
    receiver.on_snapshot_complete()
    bucket.set_vbucket_state(0, VBucketState.DEAD)
    bucket.commit_now()
    assert receiver.on_durable() == acknowledged(9)


def test_also_where_no_other_prepare_comes(bucket: Bucket) -> None:
    receive(bucket, SyncWriteReceiver(bucket, VB, 6), 4, end=9)
    receiver = resumed(bucket)
    receiver.on_snapshot_complete()
    assert receiver.is_waiting
