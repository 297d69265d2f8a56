"""Snappy: the raw block format, and the limit that is held before anything is allocated."""

from __future__ import annotations

import tracemalloc

import pytest

from headwater.errors import LocalProtocolError, MalformedSnappy, MalformedXattrs
from headwater.protocol import values
from headwater.protocol.numbers import VALUE_BYTES_MAX, XATTR_SECTION_BYTES_MAX
from support.cases import case, case_apart

# Length 11, then one literal of 11 bytes (tag (11 - 1) << 2): the block format written by hand.
HELLO = b"\x0b\x28hello world"
# Length 20, the literal "ab", and a copy of 18 bytes from two bytes back.
REPEATED = b"\x14\x04ab\x46\x02\x00"


@pytest.mark.parametrize(("compressed", "value"), [(HELLO, b"hello world"), (REPEATED, b"ab" * 10), (b"\x00", b"")])
def test_blocks_written_by_hand(compressed: bytes, value: bytes) -> None:
    assert values.decompress(compressed) == value
    assert values.decompressed_bytes(compressed) == len(value)


@case_apart(b"", id="empty")
@case_apart(b"\xff\xff\xff\xff\xff\xff", id="no length")
@case_apart(HELLO[:-1], id="cut")
@case_apart(HELLO + b"x", id="too long")
@case_apart(b"\x0c" + HELLO[1:], id="wrong length")
@case_apart(b"\x14\x04ab\x46\x03\x00", id="a copy from before the start")
@case_apart(b'{"n":0}', id="JSON")
def test_what_is_not_snappy_is_refused(compressed: bytes) -> None:
    with pytest.raises(MalformedSnappy, match="not snappy"):
        values.decompress(compressed)


def test_the_length_of_what_has_none_is_refused() -> None:
    with pytest.raises(MalformedSnappy):
        values.decompressed_bytes(b"\xff\xff\xff\xff\xff\xff")


def test_a_value_may_inflate_to_the_limit_and_not_beyond() -> None:
    compressed = values.compress(bytes(1000))
    assert values.decompress(compressed, bytes_max=1000) == bytes(1000)
    with pytest.raises(MalformedSnappy, match="inflate to 1000 bytes, above the limit of 999"):
        values.decompress(compressed, bytes_max=999)


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    """Five bytes that promise 4 GiB."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedSnappy, match="above the limit"):
            values.decompress(b"\xff\xff\xff\xff\x0f")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_limit_is_that_of_a_value() -> None:
    with pytest.raises(MalformedSnappy, match=f"limit of {VALUE_BYTES_MAX}"):
        values.decompress(values.compress(bytes(VALUE_BYTES_MAX + 1)))


# Extended attributes: the section's layout, and every way in which its lengths and terminators can be wrong.


GOLDEN = {
    "none": (values.ValueParts({}, b"body"), b"\0\0\0\0" + b"body"),
    "one": (values.ValueParts({"_sync": b'{"a":1}'}, b"{}"), b"\0\0\0\x12" + b'\0\0\0\x0e_sync\0{"a":1}\0' + b"{}"),
    "two, in their order": (
        values.ValueParts({"b": b"1", "a": b"2"}, b""),
        b"\0\0\0\x10" + b"\0\0\0\x04b\x001\0" + b"\0\0\0\x04a\x002\0",
    ),
    "an empty one": (values.ValueParts({"a": b""}, b""), b"\0\0\0\x07" + b"\0\0\0\x03a\0\0"),
    "a name beyond ASCII": (values.ValueParts({"é": b"1"}, b""), b"\0\0\0\x09" + b"\0\0\0\x05\xc3\xa9\x001\0"),
}


@pytest.mark.parametrize(("parts", "value"), GOLDEN.values(), ids=GOLDEN)
def test_golden_bytes(parts: values.ValueParts, value: bytes) -> None:
    assert values.encode_xattrs(parts) == value
    assert values.decode_xattrs(value) == parts
    assert value[values.body_offset(value) :] == parts.body


@case(b"", "too short")
@case(b"\0\0\0", "too short")
@case(b"\0\0\0\x01", "claim 1 bytes of a value of 4")
@case(b"\xff\xff\xff\xff", "exceed")
@case(b"\0\0\0\x02\0\0", "length of an extended attribute is cut off")
@case(b"\0\0\0\x07\0\0\0\x04a\0\0", "beyond its section")
# The pair would fit the value, but not the section.
@case(b"\0\0\0\x07\0\0\0\x04a\0\x001", "beyond its section")
@case(b"\0\0\0\x04\0\0\0\0", "not `name NUL json NUL`")
@case(b"\0\0\0\x06\0\0\0\x02a\0", "not `name NUL json NUL`")
@case(b"\0\0\0\x07\0\0\0\x03a\x001", "not `name NUL json NUL`")
@case(b"\0\0\0\x08\0\0\0\x04a\0\0\0", "not `name NUL json NUL`")
@case(b"\0\0\0\x07\0\0\0\x03\xff\0\0", "not UTF-8")
@case(b"\0\0\0\x0e" + b"\0\0\0\x03a\0\0" * 2, "stands twice")
def test_a_section_that_does_not_add_up_is_refused(value: bytes, reason: str) -> None:
    with pytest.raises(MalformedXattrs, match=reason):
        values.decode_xattrs(value)


def test_a_fault_is_told_at_its_pair() -> None:
    with pytest.raises(MalformedXattrs) as raised:
        values.decode_xattrs(b"\0\0\0\x0e" + b"\0\0\0\x03a\0\0" * 2)
    assert raised.value.offset == 11


def test_the_section_has_a_limit_in_both_directions() -> None:
    overhead = len(b"\0\0\0\0a\0\0")
    largest = values.encode_xattrs(values.ValueParts({"a": b"1" * (XATTR_SECTION_BYTES_MAX - overhead)}, b""))
    assert len(values.decode_xattrs(largest).xattrs["a"]) == XATTR_SECTION_BYTES_MAX - overhead
    with pytest.raises(LocalProtocolError, match="exceed"):
        values.encode_xattrs(values.ValueParts({"a": b"1" * (XATTR_SECTION_BYTES_MAX - overhead + 1)}, b""))
    too_long = (XATTR_SECTION_BYTES_MAX + 1).to_bytes(4) + bytes(XATTR_SECTION_BYTES_MAX + 1)
    with pytest.raises(MalformedXattrs, match="exceed"):
        values.decode_xattrs(too_long)


@pytest.mark.parametrize("xattrs", [{"a\0": b"1"}, {"a": b"1\0"}])
def test_a_nul_in_an_attribute_is_our_own_fault(xattrs: dict[str, bytes]) -> None:
    with pytest.raises(LocalProtocolError, match="NUL"):
        values.encode_xattrs(values.ValueParts(xattrs, b""))
