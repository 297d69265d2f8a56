"""What waits for the caller: order, place, room given back, and what goes to disk."""

from __future__ import annotations

import io
from typing import BinaryIO

import pytest

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.dcp_link import StreamRun
from headwater.client.delivery import HandOut, PersistenceHold
from headwater.client.persistence_gate import PersistenceGate
from headwater.client.pieces import ChangeRun, Piece, RollbackPiece
from headwater.client.vbucket_stream import Passed, VBucketStream
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages.dcp_changes import SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import StreamFlags
from headwater.protocol.messages.vbuckets import ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

LINK = 7


class World:
    def __init__(self, *, held_bytes_max: int = 1000) -> None:
        self.released = 0
        self.files: list[BinaryIO] = []
        self.hand_out = HandOut(release=self._release, held_bytes_max=held_bytes_max, open_spool=self._open)

    def _release(self, link: int, window_bytes: int) -> None:
        assert link == LINK
        self.released += window_bytes

    def _open(self) -> BinaryIO:
        self.files.append(io.BytesIO())
        return self.files[-1]

    def stream(self, vbucket: int = 0) -> VBucketStream:
        stream = VBucketStream(VBucketId(vbucket), StreamOffset(), whole_snapshots=True)
        stream.request(flags=StreamFlags(0), value=b"")
        stream.on_accepted(FailoverLog.start(Vbuuid(1)))
        return stream

    def receive(self, stream: VBucketStream, first: int, end: int, *, put: bool = True) -> None:
        """A snapshot of changes of ten bytes; it is complete if `put` is, for the caller's queue."""
        marker = SnapshotMarker(start_seqno=Seqno(first), end_seqno=Seqno(end), flags=SnapshotFlags.MEMORY)
        stream.on_message(marker)
        for seqno in range(first, end + (1 if put else 0)):
            self.hand_out.put(stream.on_run(StreamRun(1, 1, seqno, seqno, b"%010d" % seqno), LINK))
            self.hand_out.note_held(stream)

    def taken(self, bytes_max: int = 10_000) -> list[int]:
        pieces = self.hand_out.take(bytes_max).pieces
        return [int(bytes(piece.data)) for piece in pieces if isinstance(piece, ChangeRun)]


def test_room_is_given_back_when_the_caller_takes() -> None:
    world = World()
    world.receive(world.stream(), 1, 3)
    assert (world.released, world.hand_out.waiting_bytes) == (0, 30)
    assert world.taken() == [1, 2, 3]
    assert (world.released, world.hand_out.waiting_bytes) == (30, 0)
    assert world.hand_out.offsets[VBucketId(0)].seqno == 3


def test_a_small_snapshot_is_not_cut_in_two_and_a_large_one_is() -> None:
    world = World()
    world.receive(world.stream(), 1, 3)
    assert world.taken(20) == [1, 2, 3]
    world.receive(world.stream(1), 1, 9)
    assert world.taken(20) == [1, 2, 3, 4]


def test_what_is_held_is_acknowledged_once() -> None:
    world = World()
    stream = world.stream()
    world.receive(stream, 1, 4, put=False)
    world.hand_out.release_held([stream])
    world.hand_out.release_held([stream])
    assert world.released == 30
    world.hand_out.put(stream.on_run(StreamRun(1, 1, 4, 4, b"%010d" % 4), LINK))
    world.taken()
    assert world.released == 40


def test_beyond_its_memory_it_goes_to_disk_and_comes_back_in_order() -> None:
    world = World(held_bytes_max=25)
    world.receive(world.stream(), 1, 5)
    assert len(world.files) == 1
    assert world.hand_out.held_bytes == 0
    assert world.taken() == [1, 2, 3, 4, 5]
    assert world.files[0].closed


def test_the_end_of_one_snapshot_on_disk_leaves_the_one_before_alone() -> None:
    world = World(held_bytes_max=0)
    stream = world.stream()
    world.receive(stream, 1, 3)
    world.receive(stream, 4, 6, put=False)
    world.hand_out.drop(stream.on_lost())
    world.hand_out.note_held(stream)
    assert world.taken() == [1, 2, 3]
    assert all(file.closed for file in world.files)


def test_a_snapshot_that_waits_elsewhere_keeps_its_file_while_the_next_one_is_dropped() -> None:
    """As with changes that wait to be persisted, which come to the queue later."""
    world = World(held_bytes_max=0)
    stream = world.stream()
    waiting = []
    stream.on_message(SnapshotMarker(start_seqno=Seqno(1), end_seqno=Seqno(3), flags=SnapshotFlags.MEMORY))
    for seqno in range(1, 4):
        waiting += stream.on_run(StreamRun(1, 1, seqno, seqno, b"%010d" % seqno), LINK)
        world.hand_out.note_held(stream)
    world.receive(stream, 4, 6, put=False)
    world.hand_out.drop(stream.on_lost())
    world.hand_out.note_held(stream)
    world.hand_out.put(waiting)
    assert world.taken() == [1, 2, 3]
    assert all(file.closed for file in world.files)


@pytest.mark.parametrize("held_bytes_max", [0, 1000])
def test_what_is_left_is_acknowledged_and_forgotten(held_bytes_max: int) -> None:
    world = World(held_bytes_max=held_bytes_max)
    world.receive(world.stream(0), 1, 3)
    world.receive(world.stream(1), 1, 2)
    world.hand_out.leave(VBucketId(0))
    assert (world.released, world.hand_out.waiting_bytes) == (30, 20)
    assert world.taken() == [1, 2]
    assert all(file.closed for file in world.files)


def test_closing_leaves_no_file_open() -> None:
    world = World(held_bytes_max=0)
    world.receive(world.stream(0), 1, 3)
    world.receive(world.stream(1), 1, 3, put=False)
    world.hand_out.close()
    assert len(world.files) == 1
    assert all(file.closed for file in world.files)


# Where changes wait for the persistence gate: what goes, when, and what a rollback takes back in silence.


NODE = Address("node", 11210)
VBUCKET, BRANCH, NEW_BRANCH = VBucketId(3), Vbuuid(7), Vbuuid(8)
MAP = ClusterMap(epoch=1, revision=1, bucket="b", uuid="u", nodes=(NODE,), vbucket_nodes=((0,),) * 8)


def change(seqno: int, end: int | None = None, branch: Vbuuid = BRANCH) -> Passed:
    end_seqno = Seqno(seqno if end is None else end)
    offset = StreamOffset(vbuuid=branch, seqno=Seqno(seqno), snapshot_start=Seqno(0), snapshot_end=end_seqno)
    piece = ChangeRun(
        vbucket=VBUCKET, vbuuid=branch, snapshot_start=Seqno(0), snapshot_end=end_seqno, rows=1, data=b"%d" % seqno
    )
    return Passed(vbucket=VBUCKET, piece=piece, offset=offset)


def rollback(seqno: int, from_seqno: int) -> Passed:
    kept = Seqno(seqno)
    piece = RollbackPiece(
        vbucket=VBUCKET, seqno=kept, from_seqno=Seqno(from_seqno), old_vbuuid=BRANCH, new_vbuuid=NEW_BRANCH
    )
    offset = StreamOffset(vbuuid=NEW_BRANCH, seqno=kept, snapshot_start=kept, snapshot_end=kept)
    return Passed(vbucket=VBUCKET, piece=piece, offset=offset)


class HoldWorld:
    def __init__(self, *, whole_snapshots: bool = False) -> None:
        self.hand_out = HandOut(release=lambda link, count: None, held_bytes_max=1 << 20, open_spool=io.BytesIO)
        self.hand_out.offsets[VBUCKET] = StreamOffset()
        self.hold = PersistenceHold(PersistenceGate(MAP), self.hand_out, whole_snapshots=whole_snapshots)
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
        return [_told(piece) for piece in self.hand_out.take(1 << 20).pieces]


def _told(piece: Piece) -> int | str:
    if isinstance(piece, RollbackPiece):
        return f"back to {piece.seqno}"
    assert isinstance(piece, ChangeRun)
    return int(bytes(piece.data))


def test_nothing_goes_before_it_is_persisted() -> None:
    world = HoldWorld()
    world.hold.put([change(1), change(2), change(3)])
    assert world.taken() == []
    assert not world.hold.is_empty
    world.persisted(2)
    assert world.taken() == [1, 2]
    world.persisted(3)
    assert world.taken() == [3]
    assert world.hold.is_empty


def test_a_snapshot_that_is_to_come_whole_goes_as_a_whole() -> None:
    world = HoldWorld(whole_snapshots=True)
    world.hold.put([change(1, end=3), change(2, end=3), change(3, end=3)])
    world.persisted(2)
    assert world.taken() == []
    world.persisted(3)
    assert world.taken() == [1, 2, 3]


def test_what_nobody_has_seen_is_rolled_back_in_silence() -> None:
    world = HoldWorld()
    world.hold.put([change(1), change(2)])
    world.persisted(1)
    assert world.taken() == [1]
    world.hold.put([rollback(1, 2), change(2, branch=NEW_BRANCH)])
    assert world.taken() == []
    world.persisted(2, NEW_BRANCH)
    assert world.taken() == [2]


def test_what_was_handed_out_is_told_to_be_rolled_back() -> None:
    world = HoldWorld()
    world.hold.put([change(1), change(2)])
    world.persisted(2)
    assert world.taken() == [1, 2]
    world.hold.put([rollback(1, 2)])
    assert world.taken() == ["back to 1"]


def test_what_waits_below_a_rollback_still_waits() -> None:
    world = HoldWorld()
    world.hold.put([change(1), change(2), rollback(1, 2)])
    assert world.taken() == []
    world.persisted(1)
    assert world.taken() == [1]


@pytest.mark.parametrize("whole_snapshots", [False, True])
def test_a_vbucket_that_is_left_leaves_nothing(whole_snapshots: bool) -> None:
    world = HoldWorld(whole_snapshots=whole_snapshots)
    world.hold.put([change(1)])
    world.hold.leave(VBUCKET)
    assert world.hold.is_empty
    assert world.hold.gate.waiting == []
