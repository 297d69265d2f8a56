"""Where the fields of JSON objects lie: one walk over the texts, with no object made.

For every document and every wanted field of its top level the kernel notes what kind of value it has and the bytes that
it stands in. What is nested is passed over by its brackets. The documents have been called JSON by a server that
looked, so this checks no more than it needs in order never to leave the text; what is odd all the same is reported.

`typed_columns` and the exporter of `transfer` use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.protocol.kernels.memory import (
    Bools,
    ByteRows,
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    u8,
)

Numbers = NDArray[np.int64]


class JsonKind(IntEnum):
    """What a field holds."""

    MISSING = 0
    NULL = 1
    TRUE = 2
    FALSE = 3
    INTEGER = 4
    REAL = 5
    STRING = 6
    ESCAPED_STRING = 7
    OBJECT = 8
    ARRAY = 9


class Form(IntEnum):
    """What a document is."""

    OBJECT = 0
    OTHER_JSON = 1
    MALFORMED = 2
    ESCAPED_NAMES = 3
    """The name of a field has escapes in it, so it can't be compared by its bytes."""


_MISSING, _NULL, _TRUE, _FALSE, _INTEGER, _REAL, _STRING, _ESCAPED, _OBJECT, _ARRAY = (int(kind) for kind in JsonKind)
_FORM_OBJECT, _FORM_OTHER, _FORM_MALFORMED, _FORM_ESCAPED = (int(form) for form in Form)


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Where the fields of some documents lie. By field and document, in two dimensions."""

    data: Bytes
    forms: NDArray[np.uint8]
    """By document."""
    kinds: NDArray[np.uint8]
    starts: Numbers
    ends: Numbers
    """In `data`. Of a string, without its quotes."""


def find_fields(documents: pa.Array, names: Sequence[str]) -> JsonFields:
    """Find fields of the top level by their names, in an array of strings without nulls."""
    documents = documents.cast(pa.large_string())
    rows = len(documents)
    _, offsets, data = documents.buffers()
    row_ends = np.frombuffer(offsets, dtype=np.int64)[documents.offset : documents.offset + rows + 1]
    content = np.frombuffer(b"" if data is None else data, dtype=np.uint8)
    encoded = [name.encode() for name in names]
    name_ends = np.cumsum([0, *(len(name) for name in encoded)]).astype(np.int64)
    shape = (len(names), rows)
    fields = JsonFields(
        content,
        np.zeros(rows, dtype=np.uint8),
        np.zeros(shape, dtype=np.uint8),
        np.zeros(shape, dtype=np.int64),
        np.zeros(shape, dtype=np.int64),
    )
    name_bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    _find(content, row_ends, name_bytes, name_ends, fields.forms, fields.kinds, fields.starts, fields.ends)
    return fields


def texts(data: Bytes, starts: Numbers, ends: Numbers, wanted: NDArray[np.bool_]) -> pa.Array:
    """Parts of a text as strings; null where they are not wanted."""
    lengths = np.where(wanted, ends - starts, 0)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    copied = np.empty(int(offsets[-1]), dtype=np.uint8)
    _copy(data, np.ascontiguousarray(starts), offsets, copied)
    valid = pa.array(wanted).buffers()[1]
    array = pa.LargeStringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(copied), valid)
    return array if int(offsets[-1]) > _SHORT_BYTES_MAX else array.cast(pa.string())


def integers(
    data: Bytes, starts: Numbers, ends: Numbers, wanted: NDArray[np.bool_]
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Parts of a text as integers, and a mark on those that are wanted and fit 64 bits."""
    values = np.zeros(len(starts), dtype=np.int64)
    fits = np.zeros(len(starts), dtype=np.bool_)
    _parse_integers(data, np.ascontiguousarray(starts), np.ascontiguousarray(ends), wanted, values, fits)
    return values, fits


_SHORT_BYTES_MAX = 2**31 - 1

# --- kernels ----------------------------------------------------------------------------------------------------------

_QUOTE, _BACKSLASH, _COMMA, _COLON = (ord(sign) for sign in '"\\,:')
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = (ord(sign) for sign in "{}[]")
_MINUS, _ZERO, _NINE, _T, _F, _N = (ord(sign) for sign in "-09tfn")


@kernel_part
def _skip_space(data: Bytes, at: int, end: int) -> int:
    while at < end and (data[at] == 32 or (9 <= data[at] <= 13)):
        at += 1
    return at


@kernel_part
def _skip_string(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """From behind the opening quote to behind the closing one, or beyond the end; and whether it has escapes."""
    has_escapes = False
    while at < end and data[at] != _QUOTE:
        if data[at] == _BACKSLASH:
            has_escapes = True
            at += 1
        at += 1
    return at + 1, has_escapes


@kernel_part
def _skip_nested(data: Bytes, at: int, end: int) -> int:
    """From an opening bracket to behind its closing one, or beyond the end."""
    depth = 0
    while at < end:
        sign = data[at]
        at += 1
        if sign == _QUOTE:
            at = _skip_string(data, at, end)[0]
        elif sign == _OPEN_OBJECT or sign == _OPEN_ARRAY:
            depth += 1
        elif sign == _CLOSE_OBJECT or sign == _CLOSE_ARRAY:
            depth -= 1
            if depth == 0:
                return at
    return end + 1


@kernel_part
def _skip_scalar(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """To behind a number or a word, and whether it is all digits."""
    is_integer = True
    while at < end and not (
        data[at] == _COMMA or data[at] == _CLOSE_OBJECT or data[at] == _CLOSE_ARRAY or data[at] <= 32
    ):
        if not (_ZERO <= data[at] <= _NINE or data[at] == _MINUS):
            is_integer = False
        at += 1
    return at, is_integer


@kernel_part
def _skip_value(data: Bytes, at: int, end: int) -> tuple[int, int, bool]:
    """From the first byte of a value to behind its last; its kind; and whether it is one at all."""
    sign = data[at]
    if sign == _QUOTE:
        behind, has_escapes = _skip_string(data, at + 1, end)
        return behind, _ESCAPED if has_escapes else _STRING, behind <= end
    if sign == _OPEN_OBJECT or sign == _OPEN_ARRAY:
        behind = _skip_nested(data, at, end)
        return behind, _OBJECT if sign == _OPEN_OBJECT else _ARRAY, behind <= end
    behind, is_integer = _skip_scalar(data, at, end)
    if sign == _T or sign == _F or sign == _N:
        kind = _TRUE if sign == _T else (_FALSE if sign == _F else _NULL)
        return behind, kind, behind - at == (5 if sign == _F else 4)
    is_number = sign == _MINUS or _ZERO <= sign <= _NINE
    return behind, _INTEGER if is_integer else _REAL, is_number


@kernel_part
def _field_of(data: Bytes, start: int, end: int, names: Bytes, name_ends: Column, guess: int) -> int:
    """The number of a field by its name, or -1. Documents are alike, so a guess is tried first."""
    count = len(name_ends) - 1
    for i in range(count):
        field = (guess + i) % count
        name = name_ends[field]
        length = name_ends[field + 1] - name
        if length != end - start:
            continue
        k = 0
        while k < length and data[start + k] == names[name + k]:
            k += 1
        if k == length:
            return field
    return -1


@kernel_part
def _find_in(
    data: Bytes, at: int, end: int, names: Bytes, name_ends: Column, row: int, kinds: Column, starts: Column,
    ends: Column,
) -> int:  # fmt: skip
    """Note the fields of one document. Returns its form."""
    form = _FORM_OBJECT
    guess = 0
    at = _skip_space(data, at + 1, end)
    if at < end and data[at] == _CLOSE_OBJECT:
        return form if _skip_space(data, at + 1, end) == end else _FORM_MALFORMED
    while at < end and data[at] == _QUOTE:
        name_at = at + 1
        at, has_escapes = _skip_string(data, name_at, end)
        if has_escapes:
            form = _FORM_ESCAPED
        name_end = at - 1
        at = _skip_space(data, at, end)
        if at >= end or data[at] != _COLON:
            return _FORM_MALFORMED
        at = _skip_space(data, at + 1, end)
        if at >= end:
            return _FORM_MALFORMED
        start = at
        at, kind, is_value = _skip_value(data, at, end)
        if not is_value:
            return _FORM_MALFORMED
        field = _field_of(data, name_at, name_end, names, name_ends, guess)
        if field >= 0:
            is_string = kind == _STRING or kind == _ESCAPED
            kinds[field, row] = u8(kind)
            starts[field, row] = start + 1 if is_string else start
            ends[field, row] = at - 1 if is_string else at
            guess = field + 1
        at = _skip_space(data, at, end)
        if at < end and data[at] == _CLOSE_OBJECT:
            return form if _skip_space(data, at + 1, end) == end else _FORM_MALFORMED
        if at >= end or data[at] != _COMMA:
            return _FORM_MALFORMED
        at = _skip_space(data, at + 1, end)
    return _FORM_MALFORMED


@kernel
def _find(
    data: Bytes, row_ends: Int64s, names: ReadOnlyBytes, name_ends: Int64s, forms: Bytes, kinds: ByteRows,
    starts: Int64Rows, ends: Int64Rows,
) -> None:  # fmt: skip
    for row in range(len(forms)):
        end = i64(row_ends[row + 1])
        at = _skip_space(data, i64(row_ends[row]), end)
        if at >= end:
            forms[row] = _FORM_MALFORMED
        elif data[at] != _OPEN_OBJECT:
            behind, _, is_value = _skip_value(data, at, end)
            is_whole = is_value and _skip_space(data, behind, end) == end
            forms[row] = _FORM_OTHER if is_whole else _FORM_MALFORMED
        else:
            forms[row] = _find_in(data, at, end, names, name_ends, row, kinds, starts, ends)


@kernel
def _copy(data: Bytes, starts: Int64s, offsets: Int64s, copied: Bytes) -> None:
    for row in range(len(starts)):
        length = offsets[row + 1] - offsets[row]
        if length > 0:
            copy_bytes(copied, offsets[row], data, starts[row], length)


@kernel
def _parse_integers(data: Bytes, starts: Int64s, ends: Int64s, wanted: Bools, values: Int64s, fits: Bools) -> None:
    """Digits are added up below zero, where there is room for one number more than above."""
    least = i64(-9223372036854775807 - 1)
    last_safe = i64(-922337203685477580)
    for row in range(len(starts)):
        if not wanted[row]:
            continue
        at, end = starts[row], ends[row]
        is_negative = data[at] == _MINUS
        if is_negative:
            at += 1
        value = i64(0)
        is_good = at < end
        while at < end and is_good:
            digit = i64(data[at]) - _ZERO
            is_good = 0 <= digit <= 9 and (value > last_safe or (value == last_safe and digit <= 8))
            if is_good:
                value = value * 10 - digit
            at += 1
        if is_good and not is_negative:
            is_good = value != least
            value = -value
        values[row] = value
        fits[row] = is_good
