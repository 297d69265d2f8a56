"""Frame infos: the nibbles of their headers, the escapes, and the infos with a meaning of their own."""

from __future__ import annotations

import pytest

from headwater.errors import LocalProtocolError, MalformedFrameInfo
from headwater.protocol.frames import (
    DurabilityLevel,
    FrameInfo,
    RequestInfo,
    ResponseInfo,
    decode_durability,
    decode_frame_infos,
    decode_server_duration,
    decode_stream_id,
    durability,
    encode_frame_infos,
    find,
    impersonate,
    preserve_ttl,
    server_duration,
    stream_id,
)

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


@pytest.mark.parametrize(("infos", "encoded"), GOLDEN.values(), ids=GOLDEN)
def test_golden_bytes(infos: tuple[FrameInfo, ...], encoded: str) -> None:
    assert encode_frame_infos(infos).hex() == encoded.replace(" ", "")
    assert decode_frame_infos(bytes.fromhex(encoded)) == infos


@pytest.mark.parametrize(
    ("encoded", "offset"),
    [
        ("22 00", 0),
        ("2f", 1),
        ("f1", 1),
        ("ff 00", 2),
        ("2f 00 0000", 0),
        ("50 22 00", 1),
    ],
)
def test_an_info_that_is_cut_off_is_refused_at_its_place(encoded: str, offset: int) -> None:
    with pytest.raises(MalformedFrameInfo) as raised:
        decode_frame_infos(bytes.fromhex(encoded))
    assert raised.value.offset == offset


@pytest.mark.parametrize("info", [FrameInfo(271), FrameInfo(-1), FrameInfo(0, bytes(271))])
def test_what_no_header_can_say_is_our_own_fault(info: FrameInfo) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame_infos((info,))


def test_the_numbers_of_the_infos() -> None:
    assert [info.name for info in sorted(RequestInfo)] == [
        "BARRIER",
        "DURABILITY",
        "STREAM_ID",
        "TRACING_CONTEXT",
        "IMPERSONATE",
        "PRESERVE_TTL",
        "EXTRA_PRIVILEGE",
    ]
    assert [info.name for info in sorted(ResponseInfo)] == [
        "SERVER_DURATION",
        "READ_UNITS",
        "WRITE_UNITS",
        "THROTTLE_DURATION",
    ]
    assert max(RequestInfo) == len(RequestInfo) - 1
    assert max(ResponseInfo) == len(ResponseInfo) - 1
    assert sorted(DurabilityLevel) == [1, 2, 3]


# --- stream id ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sid", [0, 1, 0xFFFF])
def test_a_stream_id_has_16_bits(sid: int) -> None:
    assert decode_stream_id((preserve_ttl(), stream_id(sid))) == sid


@pytest.mark.parametrize("sid", [-1, 0x10000])
def test_a_larger_stream_id_is_our_own_fault(sid: int) -> None:
    with pytest.raises(LocalProtocolError, match="16-bit"):
        stream_id(sid)


@pytest.mark.parametrize("data", [b"", b"\1", b"\0\0\1"])
def test_a_stream_id_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedFrameInfo, match="not 2"):
        decode_stream_id((FrameInfo(RequestInfo.STREAM_ID, data),))


def test_no_stream_id_is_none() -> None:
    assert decode_stream_id((preserve_ttl(),)) is None


# --- durability ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_ms", [None, 0, 1500, 0xFFFF])
def test_a_durability_has_a_level_and_perhaps_a_time_out(timeout_ms: int | None) -> None:
    level = DurabilityLevel.MAJORITY_AND_PERSIST_ON_ACTIVE
    assert decode_durability((durability(level, timeout_ms=timeout_ms),)) == (level, timeout_ms)


def test_a_durability_level_nobody_knows_is_kept() -> None:
    level, timeout_ms = decode_durability((FrameInfo(RequestInfo.DURABILITY, b"\x63"),)) or pytest.fail("none")
    assert (level, level.is_known, timeout_ms) == (0x63, False, None)


@pytest.mark.parametrize("data", [b"", b"\1\0", b"\1\0\0\0"])
def test_a_durability_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedFrameInfo, match="not 1 or 3"):
        decode_durability((FrameInfo(RequestInfo.DURABILITY, data),))


def test_no_durability_is_none() -> None:
    assert decode_durability(()) is None


# --- server duration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duration_us", [0, 1, 119, 5_000, 1_000_000, 100_000_000])
def test_a_server_duration_is_kept_to_its_precision(duration_us: int) -> None:
    decoded = decode_server_duration((server_duration(duration_us),))
    assert decoded == pytest.approx(duration_us, rel=0.05, abs=1)


def test_a_server_duration_ends_at_two_minutes() -> None:
    longest = decode_server_duration((server_duration(10**12),))
    assert longest == pytest.approx(120_000_000, rel=0.01)


def test_a_server_duration_of_another_length_is_refused() -> None:
    with pytest.raises(MalformedFrameInfo, match="not 2"):
        decode_server_duration((FrameInfo(0, b"\0"),))


def test_no_server_duration_is_none() -> None:
    assert decode_server_duration(()) is None


def test_the_first_info_of_an_id_is_found() -> None:
    infos = (FrameInfo(9, b"a"), FrameInfo(9, b"b"))
    assert find(infos, 9) == FrameInfo(9, b"a")
    assert find(infos, 8) is None
