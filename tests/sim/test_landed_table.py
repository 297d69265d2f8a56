"""The table that simulated landings land into: what a commit adds, voids and remembers."""

from __future__ import annotations

from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.sim.checkers import Row
from headwater.sim.landing_judge import BOUNDARIES_MAX, LandedTable, ReadBatch

VBUCKET = VBucketId(3)


def change(seqno: int, *, snapshot_start: int, op: str = "mutation") -> Row:
    return {
        "vbucket": VBUCKET,
        "seqno": seqno,
        "snapshot_start": snapshot_start,
        "op": op,
        "collection_id": 0,
        "key": b"k%d" % seqno,
        "cas": seqno,
        "value": b"{}",
    }


def land(table: LandedTable, *rows: Row, reached: int) -> None:
    place = StreamOffset.whole(Vbuuid(1), Seqno(reached))
    table.commit(ReadBatch(rows=list(rows), reached={VBUCKET: place}, boundaries={VBUCKET: place.seqno}))


def alive(table: LandedTable) -> list[tuple[int, int]]:
    rows = table.changes.get(VBUCKET, [])
    return [(row.batch, row.seqno) for row in rows if not row.void and row.op != "rollback"]


def test_a_batch_adds_its_rows_and_its_place() -> None:
    table = LandedTable()
    land(table, change(1, snapshot_start=0), change(3, snapshot_start=0), reached=4)
    assert alive(table) == [(0, 1), (0, 3)]
    assert table.offsets[VBUCKET] == StreamOffset.whole(Vbuuid(1), Seqno(4))
    assert table.boundaries[VBUCKET] == [4]


def test_a_rollback_voids_earlier_batches_and_what_came_before_it_in_its_own() -> None:
    table = LandedTable()
    land(table, change(1, snapshot_start=0), reached=1)
    land(table, change(2, snapshot_start=1), reached=2)
    land(
        table,
        change(3, snapshot_start=2),
        change(1, snapshot_start=1, op="rollback"),
        change(2, snapshot_start=1),
        reached=2,
    )
    assert alive(table) == [(0, 1), (2, 2)]
    assert table.boundaries[VBUCKET] == [1, 2]
    assert table.rollbacks == 1


def test_a_rollback_into_a_snapshot_has_the_vbucket_read_again() -> None:
    table = LandedTable()
    land(table, change(1, snapshot_start=0), change(5, snapshot_start=0), reached=5)
    land(table, change(3, snapshot_start=3, op="rollback"), change(4, snapshot_start=3), reached=4)
    assert alive(table) == []
    assert VBUCKET not in table.offsets
    assert table.boundaries[VBUCKET] == []


def test_only_the_last_boundaries_are_kept() -> None:
    table = LandedTable()
    for seqno in range(1, 2 * BOUNDARIES_MAX):
        land(table, change(seqno, snapshot_start=seqno - 1), reached=seqno)
    assert table.boundaries[VBUCKET] == list(range(BOUNDARIES_MAX, 2 * BOUNDARIES_MAX))
