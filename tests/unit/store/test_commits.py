"""Commits: what is collected in any order comes out grouped by vbucket."""

from __future__ import annotations

import numpy as np

from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId
from headwater.store.commits import PendingCommit
from support.store_harness import changes_of, get, new_bucket, put


def frame(seqno: int, vbucket: int = 0, value: bytes = b"v") -> bytes:
    return Mutation(
        seqno=Seqno(seqno),
        vbucket=VBucketId(vbucket),
        rev_seqno=1,
        collection_id=CollectionId(0),
        key=b"k",
        value=value,
    ).encode()


def test_a_sealed_commit_does_not_change_when_the_next_is_filled() -> None:
    pending = PendingCommit(1, 4)
    pending.append(0, frame(1))
    sealed = pending.seal()
    pending.restart(2)
    assert (pending.is_empty, pending.number) == (True, 2)
    pending.append(0, frame(2, value=b"w"))
    assert sealed.run(0).tobytes() == frame(1)
    assert pending.seal().run(0).tobytes() == frame(2, value=b"w")


def test_the_memory_grows_and_keeps_what_it_has() -> None:
    pending = PendingCommit(1, 2)
    frames = [frame(seqno, value=bytes([seqno % 256]) * 700) for seqno in range(1, 6001)]
    for one in frames:
        pending.append(0, one)
    assert pending.seal().run(0).tobytes() == b"".join(frames)


def test_room_that_is_reserved_is_there() -> None:
    pending = PendingCommit(1, 2)
    pending.append(1, frame(1, 1))
    pending.reserve(5_000_000, 100_000)
    assert len(pending.frames) >= pending.used_bytes + 5_000_000
    assert min(len(pending.vbuckets), len(pending.starts)) >= 100_001
    assert pending.seal().run(1).tobytes() == frame(1, 1)


def test_a_large_commit_goes_the_whole_way() -> None:
    """Over many vbuckets, with values of all sizes, through the journal."""
    bucket = new_bucket(vbuckets=64)
    source = np.random.default_rng(5)
    values = [source.bytes(int(size)) for size in source.integers(0, 3000, 2000)]
    for number, value in enumerate(values):
        put(bucket, number % 64, b"%d" % number, value)
    bucket.commit_now()
    for number, value in enumerate(values):
        document = get(bucket, number % 64, b"%d" % number)
        assert document.value == value
    assert sum(len(changes_of(bucket, vbucket)) for vbucket in range(64)) == 2000
