"""Snappy: the raw block format, and the limit that is held before anything is allocated."""

from __future__ import annotations

import tracemalloc

import pytest

from headwater.errors import MalformedSnappy
from headwater.protocol.numbers import VALUE_BYTES_MAX
from headwater.protocol.values import compress, decompress, decompressed_bytes

# Length 11, then one literal of 11 bytes (tag (11 - 1) << 2): the block format written by hand.
HELLO = b"\x0b\x28hello world"
# Length 20, the literal "ab", and a copy of 18 bytes from two bytes back.
REPEATED = b"\x14\x04ab\x46\x02\x00"


@pytest.mark.parametrize(("compressed", "value"), [(HELLO, b"hello world"), (REPEATED, b"ab" * 10), (b"\x00", b"")])
def test_blocks_written_by_hand(compressed: bytes, value: bytes) -> None:
    assert decompress(compressed) == value
    assert decompressed_bytes(compressed) == len(value)


@pytest.mark.parametrize("value", [b"", b"x", b'{"n":0}', bytes(100_000)])
def test_round_trip(value: bytes) -> None:
    assert decompress(compress(value)) == value


@pytest.mark.parametrize(
    "compressed",
    [
        b"",
        b"\xff\xff\xff\xff\xff\xff",
        HELLO[:-1],
        HELLO + b"x",
        b"\x0c" + HELLO[1:],
        b"\x14\x04ab\x46\x03\x00",
        b'{"n":0}',
    ],
    ids=["empty", "no length", "cut", "too long", "wrong length", "a copy from before the start", "JSON"],
)
def test_what_is_not_snappy_is_refused(compressed: bytes) -> None:
    with pytest.raises(MalformedSnappy, match="not snappy"):
        decompress(compressed)


def test_the_length_of_what_has_none_is_refused() -> None:
    with pytest.raises(MalformedSnappy):
        decompressed_bytes(b"\xff\xff\xff\xff\xff\xff")


def test_a_value_may_inflate_to_the_limit_and_not_beyond() -> None:
    compressed = compress(bytes(1000))
    assert decompress(compressed, bytes_max=1000) == bytes(1000)
    with pytest.raises(MalformedSnappy, match="inflate to 1000 bytes, above the limit of 999"):
        decompress(compressed, bytes_max=999)


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    """Five bytes that promise 4 GiB."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedSnappy, match="above the limit"):
            decompress(b"\xff\xff\xff\xff\x0f")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_limit_is_that_of_a_value() -> None:
    with pytest.raises(MalformedSnappy, match=f"limit of {VALUE_BYTES_MAX}"):
        decompress(compress(bytes(VALUE_BYTES_MAX + 1)))
