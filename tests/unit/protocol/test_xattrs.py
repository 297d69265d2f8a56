"""Extended attributes: the section's layout, and every way in which its lengths and terminators can be wrong."""

from __future__ import annotations

import pytest

from headwater.errors import LocalProtocolError, MalformedXattrs
from headwater.protocol.numbers import XATTR_SECTION_BYTES_MAX
from headwater.protocol.values import ValueParts, body_offset, decode_xattrs, encode_xattrs

GOLDEN = {
    "none": (ValueParts({}, b"body"), b"\0\0\0\0" + b"body"),
    "one": (ValueParts({"_sync": b'{"a":1}'}, b"{}"), b"\0\0\0\x12" + b'\0\0\0\x0e_sync\0{"a":1}\0' + b"{}"),
    "two, in their order": (
        ValueParts({"b": b"1", "a": b"2"}, b""),
        b"\0\0\0\x10" + b"\0\0\0\x04b\x001\0" + b"\0\0\0\x04a\x002\0",
    ),
    "an empty one": (ValueParts({"a": b""}, b""), b"\0\0\0\x07" + b"\0\0\0\x03a\0\0"),
    "a name beyond ASCII": (ValueParts({"é": b"1"}, b""), b"\0\0\0\x09" + b"\0\0\0\x05\xc3\xa9\x001\0"),
}


@pytest.mark.parametrize(("parts", "value"), GOLDEN.values(), ids=GOLDEN)
def test_golden_bytes(parts: ValueParts, value: bytes) -> None:
    assert encode_xattrs(parts) == value
    assert decode_xattrs(value) == parts
    assert value[body_offset(value) :] == parts.body


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "too short"),
        (b"\0\0\0", "too short"),
        (b"\0\0\0\x01", "claim 1 bytes of a value of 4"),
        (b"\xff\xff\xff\xff", "exceed"),
        (b"\0\0\0\x02\0\0", "length of an extended attribute is cut off"),
        (b"\0\0\0\x07\0\0\0\x04a\0\0", "beyond its section"),
        # The pair would fit the value, but not the section.
        (b"\0\0\0\x07\0\0\0\x04a\0\x001", "beyond its section"),
        (b"\0\0\0\x04\0\0\0\0", "not `name NUL json NUL`"),
        (b"\0\0\0\x06\0\0\0\x02a\0", "not `name NUL json NUL`"),
        (b"\0\0\0\x07\0\0\0\x03a\x001", "not `name NUL json NUL`"),
        (b"\0\0\0\x08\0\0\0\x04a\0\0\0", "not `name NUL json NUL`"),
        (b"\0\0\0\x07\0\0\0\x03\xff\0\0", "not UTF-8"),
        (b"\0\0\0\x0e" + b"\0\0\0\x03a\0\0" * 2, "stands twice"),
    ],
)
def test_a_section_that_does_not_add_up_is_refused(value: bytes, reason: str) -> None:
    with pytest.raises(MalformedXattrs, match=reason):
        decode_xattrs(value)


def test_a_fault_is_told_at_its_pair() -> None:
    with pytest.raises(MalformedXattrs) as raised:
        decode_xattrs(b"\0\0\0\x0e" + b"\0\0\0\x03a\0\0" * 2)
    assert raised.value.offset == 11


def test_the_section_has_a_limit_in_both_directions() -> None:
    overhead = len(b"\0\0\0\0a\0\0")
    largest = encode_xattrs(ValueParts({"a": b"1" * (XATTR_SECTION_BYTES_MAX - overhead)}, b""))
    assert len(decode_xattrs(largest).xattrs["a"]) == XATTR_SECTION_BYTES_MAX - overhead
    with pytest.raises(LocalProtocolError, match="exceed"):
        encode_xattrs(ValueParts({"a": b"1" * (XATTR_SECTION_BYTES_MAX - overhead + 1)}, b""))
    too_long = (XATTR_SECTION_BYTES_MAX + 1).to_bytes(4) + bytes(XATTR_SECTION_BYTES_MAX + 1)
    with pytest.raises(MalformedXattrs, match="exceed"):
        decode_xattrs(too_long)


@pytest.mark.parametrize("xattrs", [{"a\0": b"1"}, {"a": b"1\0"}])
def test_a_nul_in_an_attribute_is_our_own_fault(xattrs: dict[str, bytes]) -> None:
    with pytest.raises(LocalProtocolError, match="NUL"):
        encode_xattrs(ValueParts(xattrs, b""))
