"""What waits for the caller: order, offset, room given back, and what goes to disk."""

from __future__ import annotations

import io
from typing import BinaryIO

import pytest

from headwater.client.delivery import Delivery
from headwater.client.metrics import ReaderMetrics
from headwater.client.pieces import ChangeRun, Spool
from headwater.client.vbucket_stream import StreamTerms, VBucketStream
from headwater.errors import StoreFull
from headwater.protocol.consumer import StreamRun
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages.dcp_changes import SnapshotFlags, SnapshotMarker
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

LINK = 7
TERMS = StreamTerms(metrics=ReaderMetrics("reader", "bucket"))


class World:
    def __init__(self, *, held_bytes_max: int = 1000) -> None:
        self.released = 0
        self.files: list[BinaryIO] = []
        self.delivery = Delivery(release=self._release, held_bytes_max=held_bytes_max, open_spool=self._open)

    def _release(self, link: int, window_bytes: int) -> None:
        assert link == LINK
        self.released += window_bytes

    def _open(self) -> BinaryIO:
        self.files.append(io.BytesIO())
        return self.files[-1]

    def stream(self, vbucket: int = 0) -> VBucketStream:
        stream = VBucketStream(VBucketId(vbucket), StreamOffset(), TERMS, now_s=0.0)
        stream.request()
        stream.on_accepted(FailoverLog.start(Vbuuid(1)))
        return stream

    def receive(self, stream: VBucketStream, first: int, end: int, *, put: bool = True) -> None:
        """A snapshot of changes of ten bytes; it is complete if `put` is, for the caller's queue."""
        marker = SnapshotMarker(start_seqno=Seqno(first), end_seqno=Seqno(end), flags=SnapshotFlags.MEMORY)
        stream.on_message(marker)
        for seqno in range(first, end + (1 if put else 0)):
            self.delivery.put(stream.on_run(StreamRun(1, 1, seqno, seqno, b"%010d" % seqno), LINK))
            self.delivery.note_held(stream)

    def taken(self, bytes_max: int = 10_000) -> list[int]:
        pieces = self.delivery.take(bytes_max).pieces
        return [int(bytes(piece.data)) for piece in pieces if isinstance(piece, ChangeRun)]


def test_room_is_given_back_when_the_caller_takes() -> None:
    world = World()
    world.receive(world.stream(), 1, 3)
    assert (world.released, world.delivery.waiting_bytes) == (0, 30)
    assert world.taken() == [1, 2, 3]
    assert (world.released, world.delivery.waiting_bytes) == (30, 0)
    assert world.delivery.offsets[VBucketId(0)].seqno == 3


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
    world.delivery.release_held([stream])
    world.delivery.release_held([stream])
    assert world.released == 30
    world.delivery.put(stream.on_run(StreamRun(1, 1, 4, 4, b"%010d" % 4), LINK))
    world.taken()
    assert world.released == 40


def test_beyond_its_memory_it_goes_to_disk_and_comes_back_in_order() -> None:
    world = World(held_bytes_max=25)
    world.receive(world.stream(), 1, 5)
    assert len(world.files) == 1
    assert world.delivery.held_bytes == 0
    assert world.taken() == [1, 2, 3, 4, 5]
    assert world.files[0].closed


def test_the_end_of_one_snapshot_on_disk_leaves_the_one_before_alone() -> None:
    world = World(held_bytes_max=0)
    stream = world.stream()
    world.receive(stream, 1, 3)
    world.receive(stream, 4, 6, put=False)
    world.delivery.drop(stream.drop())
    world.delivery.note_held(stream)
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
        world.delivery.note_held(stream)
    world.receive(stream, 4, 6, put=False)
    world.delivery.drop(stream.drop())
    world.delivery.note_held(stream)
    world.delivery.put(waiting)
    assert world.taken() == [1, 2, 3]
    assert all(file.closed for file in world.files)


@pytest.mark.parametrize("held_bytes_max", [0, 1000])
def test_what_is_left_is_acknowledged_and_forgotten(held_bytes_max: int) -> None:
    world = World(held_bytes_max=held_bytes_max)
    world.receive(world.stream(0), 1, 3)
    world.receive(world.stream(1), 1, 2)
    world.delivery.close_vbucket(VBucketId(0))
    assert (world.released, world.delivery.waiting_bytes) == (30, 20)
    assert world.taken() == [1, 2]
    assert all(file.closed for file in world.files)


def test_closing_leaves_no_file_open() -> None:
    world = World(held_bytes_max=0)
    world.receive(world.stream(0), 1, 3)
    world.receive(world.stream(1), 1, 3, put=False)
    world.delivery.close()
    assert len(world.files) == 1
    assert all(file.closed for file in world.files)


# --- runs on disk ---------------------------------------------------------------------------------------------------


def run(data: bytes) -> ChangeRun:
    return ChangeRun(
        vbucket=VBucketId(1), vbuuid=Vbuuid(2), snapshot_start=Seqno(3), snapshot_end=Seqno(4), rows=1, data=data
    )


def test_runs_come_back_as_they_were_and_the_file_goes_with_the_last() -> None:
    file = io.BytesIO()
    spool = Spool(lambda: file)
    spooled = [spool.put(run(data)) for data in (b"one", b"", b"three")]
    assert [item.load() for item in spooled[:2]] == [run(b"one"), run(b"")]
    assert not file.closed
    spooled[2].drop()
    assert file.closed
    assert spool.is_closed


class FullDisk(io.BytesIO):
    def write(self, data: object) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_says_what_to_do() -> None:
    with pytest.raises(StoreFull, match="No space left on device") as caught:
        Spool(FullDisk).put(run(b"data"))
    assert "TMPDIR" in str(caught.value)

    def no_folder() -> io.BytesIO:
        raise FileNotFoundError(2, "No usable temporary directory found")

    with pytest.raises(StoreFull, match="No usable temporary directory"):
        Spool(no_folder)
