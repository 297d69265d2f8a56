"""The xattr kernel: split the extended attributes off the values of a batch, all in one go.

A value with the XATTR bit begins with its attributes (`values` shows the layout). The kernel walks over the values
once to check every length and to count, and once to copy. The typed codec reports the error for what it refuses, and
decides about what would cost the kernel too much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headwater.kernels.memory import (
    Bytes,
    Column,
    Int32s,
    ReadOnlyBytes,
    ReadOnlyInt32s,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    load_u32,
)
from headwater.protocol.kernels.decode import binary_column
from headwater.protocol.numbers import XATTR_SECTION_BYTES_MAX
from headwater.protocol.values import Datatype, decode_xattrs

XATTRS_TYPE = pa.map_(pa.string(), pa.binary())
"""Name → JSON text."""

_PAIRS_COMPARED_MAX = 16
"""A section with more pairs than this is left to the typed codec: comparing all names with all others takes time that
grows with the square of their number, and a section has room for a hundred thousand."""

# What measuring says about a row, if anything.
_LEFT_TO_THE_CODEC, _REFUSED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitValues:
    """The bodies and the extended attributes of the values of a batch."""

    bodies: pa.Array
    xattrs: pa.Array
    """Null if the value has no XATTR bit; empty if the section is."""


def split_xattrs(values: pa.Array, datatypes: Bytes) -> SplitValues:
    """Split inflated values. Values without the XATTR bit are all body."""
    data, offsets = binary_column(values)
    pair_offsets = np.empty(len(values) + 1, dtype=np.int32)
    verdicts = np.zeros(len(values), dtype=np.uint8)
    names_bytes, texts_bytes, bodies_bytes, is_ascii = _measure(datatypes, offsets, data, pair_offsets, verdicts)
    for row in np.flatnonzero(verdicts):
        decode_xattrs(values[row].as_py())
        assert verdicts[row] != _REFUSED, "the kernel refuses extended attributes that the typed codec takes"

    pairs = pair_offsets[-1]
    body_offsets = np.empty(len(values) + 1, dtype=np.int32)
    name_offsets, text_offsets = (np.empty(pairs + 1, dtype=np.int32) for _ in range(2))
    bodies, names, texts = (np.empty(length, dtype=np.uint8) for length in (bodies_bytes, names_bytes, texts_bytes))
    _extract(datatypes, offsets, data, body_offsets, bodies, name_offsets, names, text_offsets, texts)
    name_column = _binary(pa.string(), name_offsets, names)
    if not is_ascii:
        _check_names(name_column, values, datatypes)
    return SplitValues(
        bodies=_binary(pa.binary(), body_offsets, bodies),
        xattrs=_map(datatypes, pair_offsets, name_column, _binary(pa.binary(), text_offsets, texts)),
    )


def _binary(type_: pa.DataType, offsets: Column, data: Bytes) -> pa.Array:
    return pa.Array.from_buffers(type_, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _map(datatypes: Bytes, pair_offsets: Column, names: pa.Array, texts: pa.Array) -> pa.Array:
    has_xattrs = datatypes & Datatype.XATTR != 0
    pairs = pa.StructArray.from_arrays([names, texts], fields=[XATTRS_TYPE.key_field, XATTRS_TYPE.item_field])
    validity = pa.py_buffer(np.packbits(has_xattrs, bitorder="little"))
    return pa.Array.from_buffers(XATTRS_TYPE, len(datatypes), [validity, pa.py_buffer(pair_offsets)], children=[pairs])


def _check_names(names: pa.Array, values: pa.Array, datatypes: Bytes) -> None:
    """Check that all names are UTF-8. Arrow checks all at once, and the typed codec reports the one that is not."""
    try:
        names.validate(full=True)
    except pa.ArrowInvalid:
        for row in np.flatnonzero(datatypes & Datatype.XATTR):
            decode_xattrs(values[row].as_py())
        raise AssertionError("Arrow refuses a name that the typed codec takes") from None


@kernel
def _measure(
    datatypes: Bytes, offsets: ReadOnlyInt32s, data: ReadOnlyBytes, pair_offsets: Int32s, verdicts: Bytes
) -> tuple[int, int, int, bool]:
    """Check every section and count: the bytes of names, texts and bodies, and whether all names are ASCII."""
    names_bytes = i64(0)
    texts_bytes = i64(0)
    bodies_bytes = i64(0)
    is_ascii = True
    pairs = i64(0)
    pair_offsets[0] = 0
    for row in range(len(datatypes)):
        at = i64(offsets[row])
        end = i64(offsets[row + 1])
        if datatypes[row] & 0x04:
            section_end = _section_end(data, at, end)
            if section_end < 0:
                verdicts[row] = _REFUSED
                section_end = at
            else:
                at += 4
            first_at = at
            pairs_before = pairs
            while at < section_end:
                pair_end = _pair_end(data, at, section_end)
                if pair_end < 0:
                    verdicts[row] = _REFUSED
                    break
                name_end = at + 4
                while data[name_end] != 0:
                    is_ascii &= data[name_end] < 0x80
                    name_end += 1
                if pairs - pairs_before >= _PAIRS_COMPARED_MAX:
                    verdicts[row] = _LEFT_TO_THE_CODEC
                elif _stands_before(data, first_at, at, name_end):
                    verdicts[row] = _REFUSED
                    break
                names_bytes += name_end - at - 4
                texts_bytes += pair_end - name_end - 2
                pairs += 1
                at = pair_end
            at = section_end
        bodies_bytes += end - at
        pair_offsets[row + 1] = pairs
    return names_bytes, texts_bytes, bodies_bytes, is_ascii


@kernel_part
def has_sound_xattrs(data: Bytes, at: int, end: int) -> bool:
    """Whether the value from `at` to `end` begins with a section of whole pairs. Names may occur twice."""
    section_end = _section_end(data, at, end)
    if section_end < 0:
        return False
    at += 4
    while at < section_end:
        at = _pair_end(data, at, section_end)
        if at < 0:
            return False
    return True


@kernel_part
def _section_end(data: Bytes, at: int, end: int) -> int:
    """Return where the section ends that the value at `at` begins with; -1 if that is impossible."""
    if end - at < 4:
        return i64(-1)
    length = i64(load_u32(data, at))
    if length > XATTR_SECTION_BYTES_MAX or length > end - at - 4:
        return i64(-1)
    return at + 4 + length


@kernel_part
def _pair_end(data: Bytes, at: int, section_end: int) -> int:
    """Return where the pair at `at` ends; -1 if it is not `name NUL text NUL`."""
    if at + 4 > section_end:
        return i64(-1)
    end = at + 4 + i64(load_u32(data, at))
    if end > section_end:
        return i64(-1)
    nuls = 0
    for i in range(at + 4, end):
        nuls += data[i] == 0
    return end if nuls == 2 and data[end - 1] == 0 else i64(-1)


@kernel_part
def _stands_before(data: Bytes, first_at: int, at: int, name_end: int) -> bool:
    """Whether one of the pairs from `first_at` to `at` has the name of the pair at `at`."""
    length = name_end - at  # with the length field before it, and without the NUL behind it
    before = first_at
    while before < at:
        same = data[before + length] == 0
        i = i64(4)
        while same and i < length:
            same = data[before + i] == data[at + i]
            i += 1
        if same:
            return True
        before += 4 + i64(load_u32(data, before))
    return False


@kernel
def _extract(
    datatypes: Bytes, offsets: ReadOnlyInt32s, data: ReadOnlyBytes,
    body_offsets: Int32s, bodies: Bytes, name_offsets: Int32s, names: Bytes, text_offsets: Int32s, texts: Bytes,
) -> None:  # fmt: skip
    """Copy what was measured and found sound."""
    pair = i64(0)
    body_end = i64(0)
    names_end = i64(0)
    texts_end = i64(0)
    body_offsets[0] = 0
    name_offsets[0] = 0
    text_offsets[0] = 0
    for row in range(len(datatypes)):
        at = i64(offsets[row])
        end = i64(offsets[row + 1])
        if datatypes[row] & 0x04:
            section_end = at + 4 + i64(load_u32(data, at))
            at += 4
            while at < section_end:
                pair_end = at + 4 + i64(load_u32(data, at))
                name_at = at + 4
                text_at = name_at
                while data[text_at] != 0:
                    text_at += 1
                name_bytes = text_at - name_at
                text_at += 1
                text_bytes = pair_end - 1 - text_at
                copy_bytes(names, names_end, data, name_at, name_bytes)
                copy_bytes(texts, texts_end, data, text_at, text_bytes)
                names_end += name_bytes
                texts_end += text_bytes
                pair += 1
                name_offsets[pair] = names_end
                text_offsets[pair] = texts_end
                at = pair_end
        copy_bytes(bodies, body_end, data, at, end - at)
        body_end += end - at
        body_offsets[row + 1] = body_end
