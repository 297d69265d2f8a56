"""Received bytes cut into runs and single frames, whatever pieces they come in."""

from __future__ import annotations

import random

import pytest

from headwater.errors import BadMagic, FrameTooLarge
from headwater.node.consumer.stream import ChangeRun, Inbound
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import DcpNoop
from headwater.protocol.numbers import CollectionId, Seqno

NOOP = DcpNoop(opaque=9).encode()
MARKER = SnapshotMarker(opaque=1, start_seqno=Seqno(0), end_seqno=Seqno(9), flags=SnapshotFlags.MEMORY).encode()


def _set(seqno: int, opaque: int = 1, value: bytes = b"v") -> bytes:
    return Mutation(
        opaque=opaque, seqno=Seqno(seqno), rev_seqno=1, collection_id=CollectionId(0), key=b"k", value=value
    ).encode()  # fmt: skip


WIRE = MARKER + _set(1) + _set(2) + NOOP + _set(3) + _set(1, opaque=2) + _set(4) + NOOP


def _items(inbound: Inbound, data: bytes) -> list[tuple[int, bytes]]:
    """Opaque and bytes of the items; those of runs that lie side by side put together again."""
    found: list[tuple[int, bytes]] = []
    for item in inbound.receive(data):
        if isinstance(item, ChangeRun):
            found.append((item.opaque, item.data.tobytes()))
        else:
            found.append((item.frame.opaque, item.frame.encode()))
            assert item.size_bytes == len(found[-1][1])
    return found


def test_changes_of_one_stream_are_one_run_and_the_order_stays() -> None:
    assert _items(Inbound(), WIRE) == [
        (1, MARKER),
        (1, _set(1) + _set(2)),
        (9, NOOP),
        (1, _set(3)),
        (2, _set(1, opaque=2)),
        (1, _set(4)),
        (9, NOOP),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_any_split_gives_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    inbound, found, at = Inbound(), b"", 0
    while at < len(WIRE):
        size = rng.choice((1, 2, 23, 24, 60, 200))
        found += b"".join(data for _, data in _items(inbound, WIRE[at : at + size]))
        at += size
    assert found == WIRE
    assert inbound.buffered_bytes == 0


def test_a_large_frame_is_not_looked_at_before_it_is_whole() -> None:
    wire = _set(1, value=bytes(1_000_000))
    inbound = Inbound()
    for at in range(0, len(wire) - 1000, 1000):
        assert _items(inbound, wire[at : at + 1000]) == []
    assert inbound.buffered_bytes > 900_000
    rest = wire[inbound.buffered_bytes :]
    assert _items(inbound, rest) == [(1, wire)]


def test_bytes_that_are_no_frames() -> None:
    with pytest.raises(BadMagic):
        _items(Inbound(), b"\x00" * 24)
    too_large = bytearray(_set(1)[:24])
    too_large[8:12] = b"\xff" * 4
    with pytest.raises(FrameTooLarge):
        _items(Inbound(), bytes(too_large))


@pytest.mark.parametrize("piece_bytes", [1, 23, 24, 25, 1000])
def test_what_is_held_waits_but_for_the_noops(piece_bytes: int) -> None:
    inbound = Inbound()
    begun = _set(7, value=NOOP)
    assert _items(inbound, begun[:30]) == []
    inbound.hold()
    wire, noops = begun[30:] + WIRE, []
    for at in range(0, len(wire), piece_bytes):
        assert _items(inbound, wire[at : at + piece_bytes]) == []
        noops += inbound.take_noops()
    assert noops == [9, 9]
    assert not inbound.is_held_back
    inbound.release()
    assert inbound.is_held_back
    held = (begun + WIRE).replace(NOOP, b"")
    assert b"".join(data for _, data in _items(inbound, b"")).replace(NOOP, b"") == held
    assert not inbound.is_held_back
    assert inbound.buffered_bytes == 0
    assert [data for _, data in _items(inbound, NOOP)] == [NOOP]
    assert inbound.take_noops() == []


def test_what_comes_behind_a_pause_waits() -> None:
    inbound = Inbound()
    found = []
    for item in inbound.receive(NOOP + _set(1) + MARKER):
        found.append(item)
        inbound.is_paused = True
    assert len(found) == 1
    assert not inbound.is_held_back
    assert _items(inbound, NOOP) == []
    inbound.is_paused = False
    assert inbound.is_held_back
    assert [data for _, data in _items(inbound, b"")] == [_set(1), MARKER, NOOP]
    assert not inbound.is_held_back
