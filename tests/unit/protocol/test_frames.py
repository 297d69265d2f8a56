"""Frames: the header's fields at their places, its faults, and the buffer that cuts a stream into frames."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headwater import errors
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import (
    HEADER_BYTES,
    DurabilityLevel,
    Frame,
    FrameBuffer,
    FrameInfo,
    RequestInfo,
    ResponseInfo,
    decode_durability,
    decode_frame,
    decode_frame_infos,
    decode_frames,
    decode_server_duration,
    decode_stream_id,
    durability,
    encode_frame_infos,
    encode_header,
    find,
    impersonate,
    opcode_name,
    preserve_ttl,
    server_duration,
    stream_id,
)
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX
from support.cases import case, each

CLASSIC = Frame(
    magic=Magic.REQUEST,
    opcode=Opcode.SET,
    specific=0x0102,
    opaque=0xDEADBEEF,
    cas=0x1122334455667788,
    datatype=0x05,
    extras=b"eeee",
    key=b"kk",
    value=b"vvv",
)
CLASSIC_BYTES = bytes.fromhex("80 01 0002 04 05 0102 00000009 deadbeef 1122334455667788") + b"eeeekkvvv"

FLEXIBLE = Frame(
    magic=Magic.FLEXIBLE_REQUEST,
    opcode=Opcode.DCP_MUTATION,
    specific=7,
    framing_extras=b"\x22\x00\x05",
    extras=b"e",
    key=b"kk",
    value=b"v",
)
FLEXIBLE_BYTES = bytes.fromhex("08 57 03 02 01 00 0007 00000007 00000000 0000000000000000 220005") + b"ekkv"


@pytest.mark.parametrize(("frame", "encoded"), [(CLASSIC, CLASSIC_BYTES), (FLEXIBLE, FLEXIBLE_BYTES)])
def test_fields_stand_at_their_places(frame: Frame, encoded: bytes) -> None:
    assert frame.encode() == encoded
    assert encode_header(frame) == encoded[:HEADER_BYTES]
    assert decode_frame(encoded) == (frame, len(encoded))
    assert frame.body_bytes == len(encoded) - HEADER_BYTES


@case(0x80, True, False)
@case(0x81, False, False)
@case(0x08, True, True)
@case(0x18, False, True)
@case(0x82, True, False)
@case(0x83, False, False)
def test_the_six_magics(magic: int, is_request: bool, is_flexible: bool) -> None:
    assert Magic(magic).is_request == is_request
    assert Magic(magic).is_flexible == is_flexible


def test_there_are_no_other_magics() -> None:
    assert sorted(Magic) == [0x08, 0x18, 0x80, 0x81, 0x82, 0x83]


@each("magic", sorted(set(range(256)) - set(Magic)))
def test_any_other_magic_is_refused_on_its_first_byte(magic: int) -> None:
    with pytest.raises(errors.BadMagic, match=f"0x{magic:02x} is not a magic byte"):
        decode_frame(bytes([magic]))


def test_an_opcode_is_named_by_its_magic() -> None:
    assert opcode_name(Magic.REQUEST, 0x01) == "SET"
    assert opcode_name(Magic.SERVER_REQUEST, 0x01) == "CLUSTERMAP_CHANGE_NOTIFICATION"
    assert opcode_name(Magic.SERVER_RESPONSE, 0x01) == "CLUSTERMAP_CHANGE_NOTIFICATION"
    assert Frame(magic=Magic.RESPONSE, opcode=0xEE).opcode_name == "UNKNOWN_0xee"


# --- faults of a header -------------------------------------------------------------------------------------------


def header(*, magic: int = 0x80, lengths: str = "0000", extras: int = 0, body: int = 0) -> bytes:
    return bytes.fromhex(f"{magic:02x} 57 {lengths} {extras:02x} 00 0000 {body:08x} 00000000 0000000000000000")


@case(header(lengths="0003", extras=4, body=7), True)
@case(header(lengths="0003", extras=4, body=6), False)
@case(header(lengths="0100", extras=0, body=255), False)
@case(header(extras=1, body=0), False)
@case(header(magic=0x08, lengths="0203", extras=4, body=9), True)
@case(header(magic=0x08, lengths="0203", extras=4, body=8), False)
# In flexible framing 0x0203 is 2 and 3, in classic framing it is 515.
@case(header(magic=0x80, lengths="0203", extras=4, body=9), False)
def test_parts_must_fit_the_body(data: bytes, is_sound: bool) -> None:
    """The fault shows in the header, so it is raised before the body has come."""
    if is_sound:
        assert decode_frame(data) is None
        return
    with pytest.raises(errors.LengthMismatch) as raised:
        decode_frame(data)
    assert raised.value.offset == 2


def test_a_body_above_the_limit_is_refused_before_it_is_waited_for() -> None:
    assert decode_frame(header(body=FRAME_BODY_BYTES_MAX)) is None
    with pytest.raises(errors.FrameTooLarge) as raised:
        decode_frame(header(body=FRAME_BODY_BYTES_MAX + 1))
    assert raised.value.offset == 8
    assert str(FRAME_BODY_BYTES_MAX) in str(raised.value)


def test_the_largest_document_fits_the_limit() -> None:
    """20 MiB of value, a key of 250 bytes behind five of LEB128, the longest extras and framing extras."""
    assert FRAME_BODY_BYTES_MAX >= 20 * 1024 * 1024 + 250 + 5 + 255 + 255


@each("kept", range(HEADER_BYTES + 9))
def test_missing_bytes_are_waited_for(kept: int) -> None:
    assert decode_frame(CLASSIC_BYTES[:kept]) is None


# --- what cannot be encoded ---------------------------------------------------------------------------------------


@case(Frame(magic=Magic.FLEXIBLE_REQUEST, opcode=0, framing_extras=bytes(256)))
@case(Frame(magic=Magic.FLEXIBLE_REQUEST, opcode=0, key=bytes(256)))
@case(Frame(magic=Magic.REQUEST, opcode=0, framing_extras=b"x"))
@case(Frame(magic=Magic.SERVER_REQUEST, opcode=0, framing_extras=b"x"))
@case(Frame(magic=Magic.REQUEST, opcode=0, key=bytes(0x10000)))
@case(Frame(magic=Magic.REQUEST, opcode=0, extras=bytes(256)))
@case(Frame(magic=Magic.REQUEST, opcode=0x100))
@case(Frame(magic=Magic.REQUEST, opcode=0, specific=0x10000))
@case(Frame(magic=Magic.REQUEST, opcode=0, specific=-1))
@case(Frame(magic=Magic.REQUEST, opcode=0, opaque=2**32))
@case(Frame(magic=Magic.REQUEST, opcode=0, cas=2**64))
@case(Frame(magic=Magic.REQUEST, opcode=0, datatype=0x100))
def test_what_does_not_fit_the_header_is_our_own_fault(frame: Frame) -> None:
    with pytest.raises(errors.LocalProtocolError):
        frame.encode()


@case(Frame(magic=Magic.FLEXIBLE_REQUEST, opcode=0, framing_extras=bytes(255), key=bytes(255), extras=bytes(255)))
@case(Frame(magic=Magic.REQUEST, opcode=0xFF, key=bytes(0xFFFF), specific=0xFFFF, opaque=2**32 - 1, cas=2**64 - 1))
def test_the_largest_that_fits_is_taken(frame: Frame) -> None:
    assert decode_frames(frame.encode()) == [frame]


# --- the buffer ---------------------------------------------------------------------------------------------------


def test_frames_come_out_as_soon_as_they_are_complete() -> None:
    buffer = FrameBuffer()
    for byte in CLASSIC_BYTES[:-1]:
        buffer.receive_data(bytes([byte]))
        assert buffer.next_frame() is None
    buffer.receive_data(CLASSIC_BYTES[-1:] + FLEXIBLE_BYTES + b"\x80")
    assert list(buffer.frames()) == [CLASSIC, FLEXIBLE]
    assert buffer.buffered_bytes == 1


def test_a_broken_buffer_stays_broken_and_holds_nothing() -> None:
    buffer = FrameBuffer()
    buffer.receive_data(CLASSIC_BYTES + b"\x42" + CLASSIC_BYTES)
    assert buffer.next_frame() == CLASSIC
    with pytest.raises(errors.BadMagic) as first:
        buffer.next_frame()
    assert first.value.offset == len(CLASSIC_BYTES)
    buffer.receive_data(CLASSIC_BYTES)
    assert buffer.buffered_bytes == 0
    with pytest.raises(errors.BadMagic) as second:
        buffer.next_frame()
    assert str(second.value) == str(first.value)


def test_offsets_count_from_the_first_byte_of_the_connection() -> None:
    buffer = FrameBuffer()
    for _ in range(3):
        buffer.receive_data(CLASSIC_BYTES)
        assert buffer.next_frame() == CLASSIC
    buffer.receive_data(2 * CLASSIC_BYTES + header(body=FRAME_BODY_BYTES_MAX + 1))
    assert [buffer.next_frame(), buffer.next_frame()] == [CLASSIC, CLASSIC]
    with pytest.raises(errors.FrameTooLarge) as raised:
        buffer.next_frame()
    assert raised.value.offset == 5 * len(CLASSIC_BYTES) + 8


def test_an_end_inside_a_frame_is_an_error_and_one_between_frames_is_not() -> None:
    buffer = FrameBuffer()
    buffer.receive_data(CLASSIC_BYTES)
    assert buffer.next_frame() == CLASSIC
    buffer.receive_end()
    buffer.receive_data(CLASSIC_BYTES[:10])
    with pytest.raises(errors.TruncatedFrame, match="10 bytes into a frame") as raised:
        buffer.receive_end()
    assert raised.value.offset == len(CLASSIC_BYTES)


def test_decode_frames_wants_whole_frames() -> None:
    assert decode_frames(b"") == []
    assert decode_frames(CLASSIC_BYTES + FLEXIBLE_BYTES) == [CLASSIC, FLEXIBLE]
    with pytest.raises(errors.TruncatedFrame):
        decode_frames(CLASSIC_BYTES + FLEXIBLE_BYTES[:-1])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_frame_owns_its_bytes(kind: type) -> None:
    """The parts must not change when the buffer they came from does."""
    frame, _ = decode_frame(kind(bytearray(CLASSIC_BYTES))) or pytest.fail("incomplete")
    assert [type(part) for part in (frame.extras, frame.key, frame.value, frame.framing_extras)] == [bytes] * 4


# Frame infos: the nibbles of their headers, the escapes, and the infos with a meaning of their own.


GOLDEN = {
    "a stream id": ((stream_id(5),), "22 0005"),
    "a barrier, which is empty": ((FrameInfo(RequestInfo.BARRIER),), "00"),
    "durability without a time-out": ((durability(DurabilityLevel.MAJORITY),), "11 01"),
    "durability with one": ((durability(DurabilityLevel.PERSIST_TO_MAJORITY, timeout_ms=1500),), "13 03 05dc"),
    "a user": ((impersonate("jo"),), "42 6a6f"),
    "preserve-ttl": ((preserve_ttl(),), "50"),
    "the longest without an escape": ((FrameInfo(14, bytes(14)),), "ee" + "00" * 14),
    "an escaped id": ((FrameInfo(15, b"x"),), "f1 00 78"),
    "the largest id": ((FrameInfo(270, b"x"),), "f1 ff 78"),
    "an escaped length": ((FrameInfo(2, bytes(15)),), "2f 00" + "00" * 15),
    "the longest": ((FrameInfo(2, bytes(270)),), "2f ff" + "00" * 270),
    "both escaped, the id first": ((FrameInfo(20, bytes(16)),), "ff 05 01" + "00" * 16),
    "several": ((stream_id(1), preserve_ttl()), "22 0001 50"),
    "none": ((), ""),
}


@each(("infos", "encoded"), GOLDEN.values())
def test_golden_bytes(infos: tuple[FrameInfo, ...], encoded: str) -> None:
    assert encode_frame_infos(infos).hex() == encoded.replace(" ", "")
    assert decode_frame_infos(bytes.fromhex(encoded)) == infos


@case("22 00", 0)
@case("2f", 1)
@case("f1", 1)
@case("ff 00", 2)
@case("2f 00 0000", 0)
@case("50 22 00", 1)
def test_an_info_that_is_cut_off_is_refused_at_its_place(encoded: str, offset: int) -> None:
    with pytest.raises(errors.MalformedFrameInfo) as raised:
        decode_frame_infos(bytes.fromhex(encoded))
    assert raised.value.offset == offset


@pytest.mark.parametrize("info", [FrameInfo(271), FrameInfo(-1), FrameInfo(0, bytes(271))])
def test_what_no_header_can_say_is_our_own_fault(info: FrameInfo) -> None:
    with pytest.raises(errors.LocalProtocolError):
        encode_frame_infos((info,))


def test_the_numbers_of_the_infos() -> None:
    requests = "BARRIER DURABILITY STREAM_ID TRACING_CONTEXT IMPERSONATE PRESERVE_TTL EXTRA_PRIVILEGE"
    assert [info.name for info in RequestInfo] == requests.split()
    assert [info.name for info in ResponseInfo] == ["SERVER_DURATION", "READ_UNITS", "WRITE_UNITS", "THROTTLE_DURATION"]
    for kind in (RequestInfo, ResponseInfo):
        assert list(kind) == list(range(len(kind)))
    assert list(DurabilityLevel) == [1, 2, 3]


# --- stream id, durability, server duration (the round trips are in `property/test_codec_properties`) --------------


@pytest.mark.parametrize("sid", [-1, 0x10000])
def test_a_larger_stream_id_is_our_own_fault(sid: int) -> None:
    with pytest.raises(errors.LocalProtocolError, match="16-bit"):
        stream_id(sid)


@case(decode_stream_id, RequestInfo.STREAM_ID, {2})
@case(decode_durability, RequestInfo.DURABILITY, {1, 3})
@case(decode_server_duration, ResponseInfo.SERVER_DURATION, {2})
def test_an_info_has_one_length(decode: Callable[[tuple[FrameInfo, ...]], object], id: int, lengths: set[int]) -> None:
    assert decode((FrameInfo(id + 5),)) is None
    for length in range(6):
        infos = (FrameInfo(id, bytes(length)),)
        if length in lengths:
            assert decode(infos) is not None
        else:
            with pytest.raises(errors.MalformedFrameInfo, match=f"{length} bytes, not"):
                decode(infos)


def test_a_durability_level_nobody_knows_is_kept() -> None:
    level, timeout_ms = decode_durability((FrameInfo(RequestInfo.DURABILITY, b"\x63"),)) or pytest.fail("none")
    assert (level, level.is_known, timeout_ms) == (0x63, False, None)


@pytest.mark.parametrize("duration_us", [0, 1, 119, 5_000, 1_000_000, 100_000_000])
def test_a_server_duration_is_kept_to_its_precision_up_to_two_minutes(duration_us: int) -> None:
    decoded = decode_server_duration((server_duration(duration_us),))
    assert decoded == pytest.approx(duration_us, rel=0.05, abs=1)
    longest = decode_server_duration((server_duration(10**12),))
    assert longest == pytest.approx(120_000_000, rel=0.01)


def test_the_first_info_of_an_id_is_found() -> None:
    infos = (FrameInfo(9, b"a"), FrameInfo(9, b"b"))
    assert find(infos, 9) == FrameInfo(9, b"a")
    assert find(infos, 8) is None
