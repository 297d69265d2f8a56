"""The packets of the UPR draft: round trips, lengths that lie, unknown numbers, limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headwater import errors
from headwater.protocol import upr
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Magic
from headwater.protocol.frames import Frame, FrameBuffer, decode_frames
from headwater.protocol.numbers import KEY_BYTES_MAX, SEQNO_MAX, Cas, Seqno, VBucketId, Vbuuid
from support.cases import case, each

HEADER: dict[str, Any] = {"vbucket": VBucketId(12), "request_id": 45}
CHANGE: dict[str, Any] = {**HEADER, "cas": Cas(165), "by_seqno": Seqno(2251), "rev_seqno": 3, "key": b"mykey"}
PAIR = FailoverEntry(vbuuid=Vbuuid(3570), seqno=Seqno(62100))

STREAM_REQUEST = upr.UprStreamRequest(
    **HEADER, vbucket_uuid=Vbuuid(247178), high_seqno=Seqno(2680), group_id=b"replication_12"
)
ROLLBACK = upr.UprRollback(**HEADER, rollback_seqno=Seqno(17832))
FAILOVER_LOG = upr.UprFailoverLogResponse(**HEADER, failover_log=(PAIR, PAIR))
MUTATION = upr.UprMutation(**CHANGE, value=b"myvalue", item_flags=1, item_exp=2, lock_time=3)
DELETION = upr.UprDeletion(**CHANGE)
EXPIRATION = upr.UprExpiration(**CHANGE)
FLUSH = upr.UprFlush(**HEADER)

EMPTY: tuple[upr.UprPacket, ...] = (
    upr.UprFailoverLogRequest(**HEADER), upr.UprStreamOk(**HEADER), upr.UprNotMyVBucket(**HEADER),
    upr.UprStreamBegin(**HEADER), upr.UprSnapshotStart(**HEADER), upr.UprSnapshotEnd(**HEADER), FLUSH,
    upr.UprStreamEnd(**HEADER), upr.UprStreamEnd(**HEADER, reason=upr.UprStreamEndReason.STATE_CHANGED),
)  # fmt: skip
ALL: tuple[upr.UprPacket, ...] = (*EMPTY, STREAM_REQUEST, ROLLBACK, FAILOVER_LOG, MUTATION, DELETION, EXPIRATION)


def name(packet: object) -> str:
    return type(packet).__name__


def decode(data: bytes) -> upr.UprPacket:
    [frame] = decode_frames(data)
    return upr.decode_packet(frame)


# --- round trips -----------------------------------------------------------------------------------------------


def test_a_stream_request_asks_for_everything_by_default() -> None:
    request = upr.UprStreamRequest()
    assert (request.start_by_seqno, request.end_by_seqno, request.vbucket_uuid) == (0, SEQNO_MAX, 0)


def test_only_requests_have_the_request_magic() -> None:
    magics = {type(packet): packet.encode()[0] for packet in ALL}
    requests = {packet for packet, magic in magics.items() if magic == Magic.REQUEST}
    assert requests == {upr.UprStreamRequest, upr.UprFailoverLogRequest}
    assert {magics[packet] for packet in magics.keys() - requests} == {Magic.RESPONSE}


def test_the_body_tells_the_two_responses_of_type_2_apart() -> None:
    empty = upr.UprNotMyVBucket(**HEADER)
    full = upr.UprFailoverLogResponse(**HEADER, failover_log=(PAIR,))
    assert empty.encode()[:8] == full.encode()[:8]
    assert decode(empty.encode()) == empty
    assert decode(full.encode()) == full


def test_a_cas_where_none_belongs_is_kept() -> None:
    packet = replace(FLUSH, cas=Cas(7))
    assert decode(packet.encode()) == packet


@pytest.mark.parametrize("number", [0, 3, 255])
def test_an_unknown_reason_is_kept(number: int) -> None:
    packet = upr.UprStreamEnd(**HEADER, reason=upr.UprStreamEndReason(number))
    decoded = decode(packet.encode())
    assert isinstance(decoded, upr.UprStreamEnd)
    assert decoded.reason == number
    assert not decoded.reason.is_known
    assert decoded.encode() == packet.encode()


# --- the lengths as the draft prints them ----------------------------------------------------------------------


def printed(packet: upr.UprPacket, *, extras_bytes: int, body_bytes: int) -> bytes:
    """The packet with the lengths that the draft prints."""
    data = bytearray(packet.encode())
    data[4] = extras_bytes
    data[8:12] = body_bytes.to_bytes(4, "big")
    return bytes(data)


TOO_LONG = [
    pytest.param(printed(STREAM_REQUEST, extras_bytes=0x28, body_bytes=0x36), "32 bytes, not 40", id="StreamRequest"),
    pytest.param(printed(MUTATION, extras_bytes=0x24, body_bytes=0x30), "28 bytes, not 36", id="Mutation"),
    pytest.param(printed(DELETION, extras_bytes=0x24, body_bytes=0x29), "28 bytes, not 36", id="Deletion"),
    pytest.param(printed(EXPIRATION, extras_bytes=0x24, body_bytes=0x29), "28 bytes, not 36", id="Expiration"),
]


@pytest.mark.parametrize(("data", "reason"), TOO_LONG)
def test_a_printed_length_that_is_8_too_long_swallows_the_next_packet(data: bytes, reason: str) -> None:
    buffer = FrameBuffer()
    buffer.receive_data(data + FLUSH.encode())
    frame = buffer.next_frame()
    assert frame is not None
    with pytest.raises(errors.LengthMismatch, match=reason) as raised:
        upr.decode_packet(frame)
    assert raised.value.offset == 4
    with pytest.raises(errors.BadMagic):
        buffer.next_frame()


@pytest.mark.parametrize(("data", "reason"), TOO_LONG)
def test_a_printed_length_that_is_8_too_long_never_completes_by_itself(data: bytes, reason: str) -> None:
    with pytest.raises(errors.TruncatedFrame):
        decode_frames(data)


def test_a_rollback_with_the_printed_length_has_no_seqno() -> None:
    buffer = FrameBuffer()
    buffer.receive_data(printed(ROLLBACK, extras_bytes=0, body_bytes=0))
    frame = buffer.next_frame()
    assert frame is not None
    with pytest.raises(errors.LengthMismatch, match="a value of 8 bytes, not 0") as raised:
        upr.decode_packet(frame)
    assert raised.value.offset == 8
    with pytest.raises(errors.BadMagic):
        buffer.next_frame()


def test_a_failover_log_with_the_printed_length_is_not_my_vbucket_and_junk() -> None:
    buffer = FrameBuffer()
    buffer.receive_data(printed(FAILOVER_LOG, extras_bytes=0, body_bytes=0))
    frame = buffer.next_frame()
    assert frame is not None
    assert upr.decode_packet(frame) == upr.UprNotMyVBucket(**HEADER)
    with pytest.raises(errors.BadMagic):
        buffer.next_frame()


# --- other lengths that are not the layout's -------------------------------------------------------------------


def refused(frame: Frame, error: type[errors.RemoteProtocolError], reason: str, *, offset: int) -> None:
    with pytest.raises(error, match=reason) as raised:
        upr.decode_packet(frame)
    assert raised.value.offset == offset


@each("packet", [packet for packet in ALL if packet.layout().size_bytes])
@each("by", [-8, -1, 1, 8])
def test_extras_of_another_length(packet: upr.UprPacket, by: int) -> None:
    frame = packet.to_frame()
    extras = frame.extras[:by] if by < 0 else frame.extras + bytes(by)
    refused(replace(frame, extras=extras), errors.LengthMismatch, "must have extras of", offset=4)


@each("packet", [packet for packet in ALL if not packet.layout().size_bytes])
def test_extras_where_none_belong(packet: upr.UprPacket) -> None:
    frame = replace(packet.to_frame(), extras=b"\0")
    refused(frame, errors.LengthMismatch, "must have extras of 0 bytes, not 1", offset=4)


@each("packet", [packet for packet in ALL if packet.key_field is None])
def test_a_key_where_none_belongs(packet: upr.UprPacket) -> None:
    refused(replace(packet.to_frame(), key=b"k"), errors.LengthMismatch, "must not have a key", offset=2)


@pytest.mark.parametrize("packet", [MUTATION, DELETION, EXPIRATION], ids=name)
def test_a_change_with_no_key(packet: upr.UprPacket) -> None:
    refused(replace(packet.to_frame(), key=b""), errors.LengthMismatch, "must have a key", offset=2)


@each(
    "packet",
    # A value makes "not my vbucket" a failover log, see below.
    [
        *(packet for packet in EMPTY if not isinstance(packet, upr.UprNotMyVBucket)),
        STREAM_REQUEST,
        DELETION,
        EXPIRATION,
    ],
)
def test_a_value_where_none_belongs(packet: upr.UprPacket) -> None:
    refused(replace(packet.to_frame(), value=b"v"), errors.LengthMismatch, "1 bytes are left of its body", offset=8)


@pytest.mark.parametrize("size", [1, 8, 15, 17, 31])
def test_a_failover_log_that_is_no_whole_number_of_pairs(size: int) -> None:
    refused(replace(FAILOVER_LOG.to_frame(), value=bytes(size)), errors.LengthMismatch, "16-byte pairs", offset=8)


def test_a_failover_log_frame_of_no_pairs_decoded_as_such() -> None:
    """`decode_packet` never comes here: it takes the frame for "not my vbucket"."""
    with pytest.raises(errors.LengthMismatch, match="of 0 bytes"):
        upr.UprFailoverLogResponse.from_frame(upr.UprNotMyVBucket().to_frame())


@pytest.mark.parametrize("size", [0, 7, 9, 16])
def test_a_rollback_seqno_of_another_length(size: int) -> None:
    refused(replace(ROLLBACK.to_frame(), value=bytes(size)), errors.LengthMismatch, f"of 8 bytes, not {size}", offset=8)


# --- unknown numbers --------------------------------------------------------------------------------------


@each("opcode", [0, 6, 0x53, 255])
@each("magic", [Magic.REQUEST, Magic.RESPONSE])
def test_an_unknown_opcode(magic: Magic, opcode: int) -> None:
    refused(Frame(magic=magic, opcode=opcode), errors.UnknownOpcode, f"unknown opcode 0x{opcode:02x}", offset=1)


@case(upr.UprOpcode.REQUEST, (0, 3, 255))
@case(upr.UprOpcode.RESPONSE, (0, 4, 255))
@case(upr.UprOpcode.STREAM_BEGIN, (1, 255))
@case(upr.UprOpcode.STREAM_MESSAGE, (0, 7, 255))
def test_an_unknown_type(opcode: upr.UprOpcode, unknown: tuple[int, ...]) -> None:
    for number in unknown:
        frame = Frame(magic=opcode.magic, opcode=opcode, datatype=number)
        refused(frame, errors.MalformedMessage, f"{opcode.name} has no type {number}", offset=5)


@each("magic", list(Magic))
@each("packet", ALL)
def test_the_wrong_magic(packet: upr.UprPacket, magic: Magic) -> None:
    frame = packet.to_frame()
    if magic != frame.magic:
        refused(replace(frame, magic=magic), errors.MalformedMessage, f"not 0x{magic:02x}", offset=0)


def test_the_hint_of_a_malformed_packet_does_not_promise_an_answer() -> None:
    with pytest.raises(errors.MalformedMessage) as raised:
        upr.decode_packet(Frame(magic=Magic.REQUEST, opcode=upr.UprOpcode.REQUEST))
    assert raised.value.hint.startswith("Close the connection")


# --- limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packet", [packet for packet in ALL if packet.key_field is not None], ids=name)
def test_the_longest_key_and_one_more(packet: upr.UprPacket) -> None:
    frame = packet.to_frame()
    longest = replace(frame, key=b"k" * KEY_BYTES_MAX)
    assert upr.decode_packet(longest).encode() == longest.encode()
    refused(
        replace(frame, key=b"k" * (KEY_BYTES_MAX + 1)), errors.MalformedMessage, "of 251 bytes exceeds 250", offset=2
    )


def test_the_longest_failover_log_and_one_more() -> None:
    longest = replace(FAILOVER_LOG, failover_log=(PAIR,) * upr.FAILOVER_LOG_PAIRS_MAX)
    assert decode(longest.encode()) == longest
    frame = longest.to_frame()
    too_long = replace(frame, value=frame.value + frame.value[:16])
    refused(too_long, errors.MalformedMessage, "1025 pairs exceeds 1024", offset=8)


@case(replace(FAILOVER_LOG, failover_log=()), "1 to 1024 pairs, not 0. Answer UprNotMyVBucket")
@case(replace(FAILOVER_LOG, failover_log=(PAIR,) * 1025), "1 to 1024 pairs, not 1025")
@case(replace(STREAM_REQUEST, group_id=b"g" * 251), "a group_id of 251 bytes exceeds 250")
@case(replace(MUTATION, key=b"k" * 251), "a key of 251 bytes exceeds 250")
@case(replace(DELETION, key=b""), "Deletion must have a key")
@case(replace(ROLLBACK, rollback_seqno=Seqno(2**64)), "Rollback: .* rollback_seqno")
@case(replace(EXPIRATION, item_exp=2**32), "Expiration: .* item_exp")
@case(replace(FLUSH, vbucket=VBucketId(2**16)), "Flush: .* vbucket")
@case(replace(FLUSH, request_id=-1), "Flush: .* request_id")
@case(replace(FLUSH, cas=Cas(2**64)), "Flush: .* cas")
@case(upr.UprStreamEnd(reason=upr.UprStreamEndReason(256)), "StreamEnd: .* request_type")
def test_what_cannot_be_sent(packet: upr.UprPacket, reason: str) -> None:
    with pytest.raises(errors.LocalProtocolError, match=reason):
        packet.encode()
