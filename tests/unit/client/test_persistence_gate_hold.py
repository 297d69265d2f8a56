"""Where changes wait for the persistence gate: what goes, when, and what a rollback takes back in silence."""

from __future__ import annotations

import io

import pytest

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.delivery import Delivery
from headwater.client.persistence_gate import PersistenceGate, PersistenceHold
from headwater.client.pieces import ChangeRun, Piece, RollbackPiece
from headwater.client.vbucket_stream import StreamItem
from headwater.protocol.messages.vbuckets import ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

NODE = Address("node", 11210)
VBUCKET, BRANCH, NEW_BRANCH = VBucketId(3), Vbuuid(7), Vbuuid(8)
MAP = ClusterMap(epoch=1, revision=1, bucket="b", uuid="u", nodes=(NODE,), vbucket_nodes=((0,),) * 8)


def change(seqno: int, end: int | None = None, branch: Vbuuid = BRANCH) -> StreamItem:
    end_seqno = Seqno(seqno if end is None else end)
    offset = StreamOffset(vbuuid=branch, seqno=Seqno(seqno), snapshot_start=Seqno(0), snapshot_end=end_seqno)
    piece = ChangeRun(
        vbucket=VBUCKET, vbuuid=branch, snapshot_start=Seqno(0), snapshot_end=end_seqno, rows=1, data=b"%d" % seqno
    )
    return StreamItem(vbucket=VBUCKET, piece=piece, offset=offset)


def rollback(seqno: int, from_seqno: int) -> StreamItem:
    kept = Seqno(seqno)
    piece = RollbackPiece(
        vbucket=VBUCKET, seqno=kept, from_seqno=Seqno(from_seqno), old_vbuuid=BRANCH, new_vbuuid=NEW_BRANCH
    )
    offset = StreamOffset(vbuuid=NEW_BRANCH, seqno=kept, snapshot_start=kept, snapshot_end=kept)
    return StreamItem(vbucket=VBUCKET, piece=piece, offset=offset)


class World:
    def __init__(self, *, whole_snapshots: bool = False) -> None:
        self.delivery = Delivery(release=lambda link, count: None, held_bytes_max=1 << 20, open_spool=io.BytesIO)
        self.delivery.offsets[VBUCKET] = StreamOffset()
        self.hold = PersistenceHold(PersistenceGate(MAP), self.delivery, whole_snapshots=whole_snapshots)
        self.now_s = 0.0

    def persisted(self, seqno: int, branch: Vbuuid = BRANCH) -> None:
        """The node answers everything that it is asked now."""
        self.now_s += 1
        for address, request in self.hold.gate.requests_due(self.now_s, {NODE}):
            answer = ObserveSeqnoResponse(
                vbucket=request.vbucket, vbuuid=branch, persisted_seqno=Seqno(seqno), current_seqno=Seqno(seqno)
            )
            self.hold.on_answer(address, request, answer, None)

    def taken(self) -> list[int | str]:
        return [_shown(piece) for piece in self.delivery.take(1 << 20).pieces]


def _shown(piece: Piece) -> int | str:
    if isinstance(piece, RollbackPiece):
        return f"back to {piece.seqno}"
    assert isinstance(piece, ChangeRun)
    return int(bytes(piece.data))


def test_nothing_goes_before_it_is_persisted() -> None:
    world = World()
    world.hold.put([change(1), change(2), change(3)])
    assert world.taken() == []
    assert not world.hold.is_empty
    world.persisted(2)
    assert world.taken() == [1, 2]
    world.persisted(3)
    assert world.taken() == [3]
    assert world.hold.is_empty


def test_a_snapshot_that_is_to_come_whole_goes_as_a_whole() -> None:
    world = World(whole_snapshots=True)
    world.hold.put([change(1, end=3), change(2, end=3), change(3, end=3)])
    world.persisted(2)
    assert world.taken() == []
    world.persisted(3)
    assert world.taken() == [1, 2, 3]


def test_what_nobody_has_seen_is_rolled_back_in_silence() -> None:
    world = World()
    world.hold.put([change(1), change(2)])
    world.persisted(1)
    assert world.taken() == [1]
    world.hold.put([rollback(1, 2), change(2, branch=NEW_BRANCH)])
    assert world.taken() == []
    world.persisted(2, NEW_BRANCH)
    assert world.taken() == [2]


def test_what_was_handed_out_is_told_to_be_rolled_back() -> None:
    world = World()
    world.hold.put([change(1), change(2)])
    world.persisted(2)
    assert world.taken() == [1, 2]
    world.hold.put([rollback(1, 2)])
    assert world.taken() == ["back to 1"]


def test_what_waits_below_a_rollback_still_waits() -> None:
    world = World()
    world.hold.put([change(1), change(2), rollback(1, 2)])
    assert world.taken() == []
    world.persisted(1)
    assert world.taken() == [1]


@pytest.mark.parametrize("whole_snapshots", [False, True])
def test_a_vbucket_that_is_left_leaves_nothing(whole_snapshots: bool) -> None:
    world = World(whole_snapshots=whole_snapshots)
    world.hold.put([change(1)])
    world.hold.close_vbucket(VBUCKET)
    assert world.hold.is_empty
    assert world.hold.gate.waiting == []
