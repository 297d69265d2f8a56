"""The kernel that splits extended attributes off equals the typed codec, its oracle, value by value."""

from __future__ import annotations

from struct import pack

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.errors import MalformedXattrs
from headwater.protocol.kernels.xattr_split import XATTRS_TYPE, split_xattrs
from headwater.protocol.numbers import XATTR_SECTION_BYTES_MAX
from headwater.protocol.values import Datatype, ValueParts, decode_xattrs, encode_xattrs
from support.cases import each

XATTR = int(Datatype.XATTR)

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
texts = st.binary(max_size=20).map(lambda text: text.replace(b"\0", b" "))
sections = st.builds(
    lambda xattrs, body: encode_xattrs(ValueParts(xattrs, body)),
    st.dictionaries(names, texts, max_size=20),
    st.binary(max_size=30),
)
rows = st.lists(st.one_of(st.tuples(sections, st.just(XATTR)), st.tuples(st.binary(max_size=30), st.just(0))))


def split(values: list[bytes], datatypes: list[int], *, skip: int = 0):
    column = pa.array([b"skipped"] * skip + values, pa.binary())[skip:]
    result = split_xattrs(column, np.array(datatypes, dtype=np.uint8))
    for part in (result.bodies, result.xattrs):
        part.validate(full=True)
        assert len(part) == len(values)
    assert result.xattrs.type == XATTRS_TYPE
    return [
        (body, None if xattrs is None else dict(xattrs))
        for body, xattrs in zip(result.bodies.to_pylist(), result.xattrs.to_pylist(), strict=True)
    ]


def by_the_codec(value: bytes, datatype: int):
    if not datatype:
        return value, None
    parts = decode_xattrs(value)
    return parts.body, dict(parts.xattrs)


@given(rows, st.integers(0, 2))
def test_splitting_equals_the_typed_codec(rows, skip):
    values, datatypes = [value for value, _ in rows], [datatype for _, datatype in rows]
    assert split(values, datatypes, skip=skip) == [by_the_codec(*row) for row in rows]


def outcome(function, *args):
    try:
        return function(*args)
    except MalformedXattrs as error:
        return error.reason


def pair(data: bytes) -> bytes:
    return pack(">I", len(data)) + data


def section(*pairs: bytes) -> bytes:
    return pack(">I", sum(map(len, pairs))) + b"".join(pairs)


NAMED_FAULTS = {
    "nothing": b"",
    "too short for a length": b"\0\0\0",
    "longer than the value": pack(">I", 5) + b"four",
    "above the limit": section(pair(b"a\0" + b"1" * XATTR_SECTION_BYTES_MAX + b"\0")),
    "length of a pair cut off": section(pair(b"a\0001\0"), b"\0\0\0"),
    "pair beyond its section": section(pack(">I", 4) + b"a\0\0"),
    "empty pair": section(pair(b"")),
    "one NUL": section(pair(b"a\0")[:-1] + b"b"),
    "three NULs": section(pair(b"a\0b\0c\0")),
    "not ended by a NUL": section(pair(b"a\0b\0c")),
    "a name twice": section(pair(b"a\0001\0"), pair(b"b\0001\0"), pair(b"a\0002\0")),
    "a name of many twice": section(*(pair(b"%d\0001\0" % (number % 40)) for number in range(41))),
    "a name that is not UTF-8": section(pair(b"\xff\0001\0")),
    "a name that is half a character": section(pair(b"\xc3\0001\0"), pair(b"\xa9\0001\0")),
}


@each("fault", NAMED_FAULTS)
def test_a_fault_is_named_by_the_typed_codec(fault):
    value = NAMED_FAULTS[fault]
    with pytest.raises(MalformedXattrs) as expected:
        decode_xattrs(value)
    sound = encode_xattrs(ValueParts({"naïve": b"1"}, b"{}"))
    with pytest.raises(MalformedXattrs) as raised:
        split([sound, value, b"no attributes"], [XATTR, XATTR, 0])
    assert str(raised.value) == str(expected.value)
    assert raised.value.hint


@pytest.mark.parametrize("count", [15, 16, 17, 2_000])
def test_many_attributes_are_split(count):
    xattrs = {f"{number:x}": b"%d" % number for number in range(count)}
    assert split([encode_xattrs(ValueParts(xattrs, b"{}"))], [XATTR]) == [(b"{}", xattrs)]


def test_a_name_that_another_begins_with_is_another():
    xattrs = {"ab": b"1", "a": b"2", "abc": b"3", "": b"4"}
    assert split([encode_xattrs(ValueParts(xattrs, b""))], [XATTR]) == [(b"", xattrs)]


@given(sections, st.data())
@example(b"\0\0\0\0", None)
def test_damaged_sections_are_taken_or_refused_as_the_typed_codec_does(value, data):
    damaged = bytearray(value)
    for _ in range(data.draw(st.integers(0, 3)) if data else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.sampled_from([0, 1, 4, 6, 0x61, 0xFF]))
    damaged = bytes(damaged[: data.draw(st.integers(0, len(damaged)))] if data else damaged)
    sound = encode_xattrs(ValueParts({"a": b"1"}, b"{}"))
    expected = outcome(by_the_codec, damaged, XATTR)
    found = outcome(split, [sound, damaged, sound], [XATTR] * 3)
    assert (found[1] if isinstance(found, list) else found) == expected
