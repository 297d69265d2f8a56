"""The UPR codec under all packets there can be, and under bytes that are none."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import RemoteProtocolError
from headwater.protocol import upr
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Magic
from headwater.protocol.frames import HEADER, Frame, FrameBuffer, decode_frames
from headwater.protocol.numbers import KEY_BYTES_MAX

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))

header: dict[str, Any] = {"vbucket": u16, "request_id": u32, "cas": u64}
keys = st.binary(min_size=1, max_size=KEY_BYTES_MAX)
change: dict[str, Any] = {
    **header,
    "by_seqno": u64,
    "rev_seqno": u64,
    "item_flags": u32,
    "item_exp": u32,
    "lock_time": u32,
    "key": keys,
}
pairs = st.builds(FailoverEntry, vbuuid=u64, seqno=u64)

PACKETS: dict[type[upr.UprPacket], st.SearchStrategy[upr.UprPacket]] = {
    upr.UprStreamRequest: st.builds(
        upr.UprStreamRequest,
        **header,
        start_by_seqno=u64,
        end_by_seqno=u64,
        vbucket_uuid=u64,
        high_seqno=u64,
        group_id=st.binary(max_size=KEY_BYTES_MAX),
    ),
    upr.UprFailoverLogRequest: st.builds(upr.UprFailoverLogRequest, **header),
    upr.UprStreamOk: st.builds(upr.UprStreamOk, **header),
    upr.UprNotMyVBucket: st.builds(upr.UprNotMyVBucket, **header),
    upr.UprFailoverLogResponse: st.builds(
        upr.UprFailoverLogResponse, **header, failover_log=st.lists(pairs, min_size=1, max_size=30).map(tuple)
    ),
    upr.UprRollback: st.builds(upr.UprRollback, **header, rollback_seqno=u64),
    upr.UprStreamBegin: st.builds(upr.UprStreamBegin, **header),
    upr.UprSnapshotStart: st.builds(upr.UprSnapshotStart, **header),
    upr.UprSnapshotEnd: st.builds(upr.UprSnapshotEnd, **header),
    upr.UprMutation: st.builds(upr.UprMutation, **change, value=st.binary(max_size=300)),
    upr.UprDeletion: st.builds(upr.UprDeletion, **change),
    upr.UprExpiration: st.builds(upr.UprExpiration, **change),
    upr.UprFlush: st.builds(upr.UprFlush, **header),
    upr.UprStreamEnd: st.builds(upr.UprStreamEnd, **header, reason=u8.map(upr.UprStreamEndReason)),
}
packets = st.one_of(*PACKETS.values())


def decode_all(data: bytes) -> list[upr.UprPacket]:
    return [upr.decode_packet(frame) for frame in decode_frames(data)]


def test_every_packet_has_a_strategy() -> None:
    assert PACKETS.keys() == {*upr.PACKETS.values(), upr.UprFailoverLogResponse, upr.UprStreamEnd}


@given(packets)
def test_round_trip(packet: upr.UprPacket) -> None:
    [decoded] = decode_all(packet.encode())
    assert type(decoded) is type(packet)
    assert decoded == packet
    assert decoded.encode() == packet.encode()


@given(st.lists(packets, max_size=6), st.data())
def test_any_split_gives_the_same_packets(sent: list[upr.UprPacket], data: st.DataObject) -> None:
    wire = b"".join(packet.encode() for packet in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    buffer = FrameBuffer()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        buffer.receive_data(wire[start:end])
        received += [upr.decode_packet(frame) for frame in buffer.frames()]
    buffer.receive_end()
    assert received == sent


@given(st.binary(max_size=200))
def test_junk_raises_only_the_documented_error(junk: bytes) -> None:
    try:
        decoded = decode_all(junk)
    except RemoteProtocolError:
        return
    assert b"".join(packet.encode() for packet in decoded) == junk


@given(
    st.builds(
        Frame,
        magic=st.sampled_from([Magic.REQUEST, Magic.RESPONSE]),
        opcode=st.integers(0, 6),
        datatype=st.integers(0, 7),
        specific=u16,
        opaque=u32,
        cas=u64,
        extras=st.integers(0, 48).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
        key=st.binary(max_size=260),
        value=st.binary(max_size=64),
    )
)
def test_a_sound_frame_is_a_packet_or_the_documented_error(frame: Frame) -> None:
    try:
        packet = upr.decode_packet(frame)
    except RemoteProtocolError:
        return
    assert packet.encode() == frame.encode()


@given(packets, st.data())
def test_mutated_bytes_raise_only_the_documented_error(packet: upr.UprPacket, data: st.DataObject) -> None:
    wire = bytearray(packet.encode())
    # Most of what can go wrong is in the header.
    for at in data.draw(st.lists(st.integers(0, min(len(wire), HEADER.size) - 1), min_size=1, max_size=3)):
        wire[at] = data.draw(u8)
    wire += data.draw(st.binary(max_size=16))
    try:
        decoded = decode_all(bytes(wire))
    except RemoteProtocolError:
        return
    assert b"".join(packet.encode() for packet in decoded) == wire
