"""The offsets behind a part of a batch."""

from __future__ import annotations

import pytest
from change_batches import batch_of, document, rollback

from headwater.cli.tailing.tailer import offsets_behind
from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset


def place(seqno: int, start: int, end: int, vbuuid: int = 5) -> StreamOffset:
    return StreamOffset(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_start=Seqno(start), snapshot_end=Seqno(end))


def offsets(places: dict[int, StreamOffset]) -> Offsets:
    return Offsets("a bucket", {VBucketId(vbucket): place for vbucket, place in places.items()})


def change(vbucket: int, seqno: int, start: int, end: int) -> dict[str, object]:
    return document(vbucket=vbucket, vbuuid=5, seqno=seqno, snapshot_start=start, snapshot_end=end)


BEFORE = offsets({1: place(4, 4, 4), 2: place(0, 0, 0, 0), 3: place(7, 7, 7)})
AFTER = offsets({1: place(9, 6, 9), 2: place(3, 0, 3), 3: place(20, 20, 20), 4: place(2, 0, 2)})
BATCH = batch_of(
    change(1, 5, 4, 5),
    change(1, 8, 6, 9),
    change(2, 1, 0, 3),
    change(1, 9, 6, 9),
    change(2, 3, 0, 3),
    change(4, 1, 0, 2),
)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0, {1: place(4, 4, 4), 2: place(0, 0, 0, 0)}),
        (1, {1: place(5, 4, 5), 2: place(0, 0, 0, 0)}),
        (2, {1: place(8, 6, 9), 2: place(0, 0, 0, 0)}),
        (3, {1: place(8, 6, 9), 2: place(1, 0, 3)}),
        (4, {1: place(9, 6, 9), 2: place(1, 0, 3)}),
        (5, {1: place(9, 6, 9), 2: place(3, 0, 3)}),
    ],
)
def test_where_a_part_ends(rows: int, expected: dict[int, StreamOffset]) -> None:
    """Vbucket 3 has no rows and is further on all the same; of vbucket 4 nothing was known before."""
    found = offsets_behind(rows, BATCH, before=BEFORE, after=AFTER)
    assert found == offsets({**expected, 3: place(20, 20, 20)})


def test_all_of_a_batch() -> None:
    assert offsets_behind(6, BATCH, before=BEFORE, after=AFTER) == AFTER


def test_behind_a_rollback() -> None:
    batch = batch_of(rollback(vbucket=1, seqno=3), change(1, 5, 4, 5))
    found = offsets_behind(1, batch, before=BEFORE, after=AFTER)
    assert found[VBucketId(1)] == place(3, 3, 3, vbuuid=6)
