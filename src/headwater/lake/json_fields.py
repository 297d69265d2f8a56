"""Locates values in JSON texts: one pass over the texts, which creates no objects.

For every document and every wanted top-level field the kernel records the kind of value and its byte range. It skips
nested values by matching brackets; they are parsed only on request: `find_members` looks for named members of objects,
`list_members` lists all members of objects or elements of arrays. A server has already parsed these documents as JSON,
so the kernel only checks what it needs to stay within the text; malformed texts that it notices are reported.

`column_values`, `typed_columns` and the exporter of `transfer` use this module. `variants` uses its first section,
which skips, compares and copies space, strings and their escapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.kernels.memory import (
    Bools,
    ByteRows,
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    borrowed,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    kernel_part,
    leading_zeros,
    load_u8,
    load_u64,
    read_only,
    u8,
    u64,
)

_QUOTE, _BACKSLASH, _COMMA, _COLON = (ord(sign) for sign in '"\\,:')
_MINUS, _ZERO, _NINE, _T, _F, _N, _U = (ord(sign) for sign in "-09tfnu")
_LOW_BITS, _QUOTES, _BACKSLASHES = (u64(sign * 0x0101010101010101) for sign in (0x7F, _QUOTE, _BACKSLASH))
_LONG_STRING = 64
"""A string longer than this many bytes is scanned in larger steps."""
_ESCAPED_SIGNS = tuple(b'"\\/bfnrt')
_ESCAPED_CODES = tuple(b'"\\/\b\f\n\r\t')


@inlined_part
def skip_space(data: Bytes, at: int, end: int) -> int:
    while at < end and (load_u8(data, at) == 32 or (9 <= load_u8(data, at) <= 13)):
        at += 1
    return at


@inlined_part
def _zero_bytes(word: int) -> int:
    """Set the highest bit of each of the eight bytes that is zero. No carry passes from one byte into the next."""
    return ~(((word & _LOW_BITS) + _LOW_BITS) | word | _LOW_BITS)


@inlined_part
def _signs(word: int) -> int:
    """Like `_zero_bytes`, for each quote and backslash."""
    return _zero_bytes(word ^ _QUOTES) | _zero_bytes(word ^ _BACKSLASHES)


@inlined_part
def _signs_in(data: Bytes, at: int) -> int:
    """Like `_signs`, for 32 bytes combined."""
    words = _signs(load_u64(data, at)) | _signs(load_u64(data, at + 8))
    return words | _signs(load_u64(data, at + 16)) | _signs(load_u64(data, at + 24))


@inlined_part
def skip_string(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """From behind an opening quote: the position behind the closing one, or beyond the end; and if it has escapes."""
    has_escapes, start = False, at
    while True:
        found = u64(0)
        while found == u64(0) and at + 8 <= end:
            if at - start >= _LONG_STRING:
                while at + 64 <= end and _signs_in(data, at) | _signs_in(data, at + 32) == u64(0):
                    at += 64
                if at + 8 > end:
                    break
            found = _signs(load_u64(data, at))
            at += leading_zeros(found) >> 3
        while found == u64(0) and at < end and load_u8(data, at) != _QUOTE and load_u8(data, at) != _BACKSLASH:
            at += 1
        if at >= end or load_u8(data, at) == _QUOTE:
            return at + 1, has_escapes
        has_escapes = True
        at += 2


@inlined_part
def begins_with_name(data: Bytes, start: int, end: int, names: Bytes, name_at: int, name_end: int) -> bool:
    """Whether a text begins with a name, followed by a quote."""
    length = name_end - name_at
    if start + length >= end or load_u8(data, start + length) != _QUOTE:
        return False
    k = 0
    while k < length and load_u8(data, start + k) == load_u8(names, name_at + k):
        k += 1
    return k == length


@kernel_part
def _hex_digit(sign: int) -> int:
    if _ZERO <= sign <= _NINE:
        return i64(sign) - _ZERO
    letter = i64(sign) | 32
    return letter - 87 if 97 <= letter <= 102 else -1


@kernel_part
def _unit(data: Bytes, at: int, end: int) -> int:
    """Parse four hexadecimal digits; return -1 if they are not."""
    if at + 4 > end:
        return -1
    number = i64(0)
    for i in range(4):
        digit = _hex_digit(data[at + i])
        if digit < 0:
            return -1
        number = number * 16 + digit
    return number


@kernel_part
def read_escape(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Decode the escape at a backslash: return its code point, or -1 if it is invalid, and the position behind it.

    RFC 8259, section 7: a character beyond U+FFFF is two escapes, a pair of surrogates. Half of one is no character.
    """
    sign = data[at + 1] if at + 1 < end else u8(0)
    if sign != _U:
        for i in range(len(_ESCAPED_SIGNS)):
            if sign == _ESCAPED_SIGNS[i]:
                return i64(_ESCAPED_CODES[i]), at + 2
        return i64(-1), end
    high = _unit(data, at + 2, end)
    if high < 0xD800 or high > 0xDFFF:
        return high, at + 6
    is_pair = high < 0xDC00 and at + 7 < end and data[at + 6] == _BACKSLASH and data[at + 7] == _U
    low = _unit(data, at + 8, end) if is_pair else i64(-1)
    if low < 0xDC00 or low > 0xDFFF:
        return i64(-1), end
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00), at + 12


@kernel_part
def utf8_length(code: int) -> int:
    return 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4


@kernel_part
def utf8_byte(code: int, length: int, i: int) -> int:
    if length == 1:
        return code
    if i == 0:
        return ((0xF00 >> length) & 0xFF) | (code >> (6 * (length - 1)))
    return 0x80 | ((code >> (6 * (length - 1 - i))) & 0x3F)


@kernel_part
def unescape(data: Bytes, at: int, end: int, copied: Bytes, to: int) -> int:
    """Write a string with its escapes decoded. Returns the end position, or -1. No escape is shorter than its UTF-8."""
    while at < end:
        if data[at] != _BACKSLASH:
            copied[to] = data[at]
            at += 1
            to += 1
            continue
        code, at = read_escape(data, at, end)
        if code < 0:
            return -1
        length = utf8_length(code)
        for i in range(length):
            copied[to + i] = u8(utf8_byte(code, length, i))
        to += length
    return to


# --- values and fields ------------------------------------------------------------------------------------------------

Marks = NDArray[np.bool_]
Numbers = NDArray[np.int64]
Kinds = NDArray[np.uint8]


class JsonKind(IntEnum):
    """The kind of a field's value."""

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
    """The form of a document."""

    OBJECT = 0
    OTHER_JSON = 1
    MALFORMED = 2


_MISSING, _NULL, _TRUE, _FALSE, _INTEGER, _REAL, _STRING, _ESCAPED, _OBJECT, _ARRAY = (int(kind) for kind in JsonKind)
assert _MISSING == 0, "a kind times a mark"
_FORM_OBJECT, _FORM_OTHER, _FORM_MALFORMED = (int(form) for form in Form)
ABSENT = (JsonKind.MISSING, JsonKind.NULL)


@dataclass(frozen=True, slots=True)
class JsonValues:
    """Some values: the kind of each, and where in `data` it lies."""

    data: Bytes
    kinds: Kinds
    starts: Numbers
    ends: Numbers
    """For strings, without the quotes."""

    def __len__(self) -> int:
        return len(self.kinds)

    def is_one_of(self, *kinds: JsonKind) -> Marks:
        marks = np.zeros(len(self), dtype=np.bool_)
        for kind in kinds:
            marks |= self.kinds == kind
        return marks

    @property
    def is_there(self) -> Marks:
        return self.kinds > _NULL

    def of(self, chosen: Column) -> JsonValues:
        """Return some of them, chosen by marks or by numbers."""
        return JsonValues(self.data, self.kinds[chosen], self.starts[chosen], self.ends[chosen])

    def where(self, marks: Marks) -> JsonValues:
        """Return the same values, with those that are not marked as missing."""
        return replace(self, kinds=self.kinds * marks)

    def texts(self, wanted: Marks) -> tuple[pa.Array, Marks]:
        """Return the wanted values as texts, strings decoded, and a mark on each that has a text. A string with half of
        a surrogate pair has none."""
        lengths = np.where(wanted, self.ends - self.starts, 0)
        copied = np.empty(int(lengths.sum()), dtype=np.uint8)
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        good = wanted.copy()
        _copy_texts(
            self.data, np.ascontiguousarray(self.kinds), np.ascontiguousarray(self.starts),
            np.ascontiguousarray(self.ends), good, offsets, copied,
        )  # fmt: skip
        valid = None if good.all() else pa.py_buffer(np.packbits(good, bitorder="little"))
        array = pa.LargeStringArray.from_buffers(len(self), pa.py_buffer(offsets), pa.py_buffer(copied), valid)
        return (array if int(offsets[-1]) > _SHORT_BYTES_MAX else array.cast(pa.string())), good

    def integers(self) -> tuple[Numbers, Marks]:
        """Return the integers, and a mark on each value that is one and fits 64 bits."""
        return integers(self.data, self.starts, self.ends, self.kinds == _INTEGER)


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Where named fields of some documents lie. The last three arrays are indexed by field and document."""

    data: Bytes
    forms: Kinds
    """By document."""
    others: Numbers
    """By document: how many other fields have a value that is not null."""
    kinds: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def values(self, number: int) -> JsonValues:
        """Return one field of all documents."""
        return JsonValues(self.data, self.kinds[number], self.starts[number], self.ends[number])


@dataclass(frozen=True, slots=True)
class JsonMembers:
    """All members of some objects, or elements of some arrays, one after the other."""

    offsets: Numbers
    """The members of object `n` are from `offsets[n]` up to, but not including, `offsets[n + 1]`."""
    names: JsonValues
    """Strings; empty for elements of arrays."""
    values: JsonValues
    is_whole: Marks
    """By object: whether it could be read to its end."""


def find_fields(documents: pa.Array, names: Sequence[str]) -> JsonFields:
    """Find top-level fields by name in an array of strings without nulls."""
    return _find_named(_whole_texts(documents), names)


def find_members(objects: JsonValues, names: Sequence[str]) -> JsonFields:
    """Find members by name in those values that are objects."""
    return _find_named(_only(objects, objects.kinds == _OBJECT), names)


def list_fields(documents: pa.Array) -> JsonMembers:
    """List all fields of those documents that are objects, in an array of strings without nulls."""
    return list_members(_whole_texts(documents), JsonKind.OBJECT)


def list_members(values: JsonValues, kind: JsonKind) -> JsonMembers:
    """List all members of those values that are objects, or all elements of those that are arrays."""
    spans = _only(values, values.kinds == kind)
    is_object = np.array([kind == JsonKind.OBJECT])
    counts = np.zeros(len(spans), dtype=np.int64)
    nothing, no_kinds = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8)
    _list(
        spans.data, spans.starts, spans.ends, is_object, counts, no_kinds, nothing, nothing, no_kinds, nothing, nothing
    )
    is_whole = counts >= 0
    offsets = np.zeros(len(spans) + 1, dtype=np.int64)
    np.cumsum(np.maximum(counts, 0), out=offsets[1:])
    found = [JsonValues(spans.data, *_room_for(int(offsets[-1]))) for _ in range(2)]
    names, members = found
    _list(
        spans.data, spans.starts, spans.ends, is_object, counts, names.kinds, names.starts, names.ends,
        members.kinds, members.starts, members.ends,
    )  # fmt: skip
    return JsonMembers(offsets, names, members, is_whole)


def integers(data: Bytes, starts: Numbers, ends: Numbers, wanted: Marks) -> tuple[Numbers, Marks]:
    """Parse parts of a text as integers; return them, and a mark on each that is wanted and fits 64 bits."""
    values = np.zeros(len(starts), dtype=np.int64)
    fits = np.zeros(len(starts), dtype=np.bool_)
    _parse_integers(read_only(data), np.ascontiguousarray(starts), np.ascontiguousarray(ends), wanted, values, fits)
    return values, fits


_SHORT_BYTES_MAX = 2**31 - 1


def _whole_texts(documents: pa.Array) -> JsonValues:
    """Return each text as one value from end to end, with the kind object."""
    documents = documents.cast(pa.large_string())
    rows = len(documents)
    _, offsets, data = documents.buffers()
    content = np.frombuffer(b"" if data is None else data, dtype=np.uint8)
    edges = np.frombuffer(offsets, dtype=np.int64)[documents.offset : documents.offset + rows + 1]
    return JsonValues(read_only(content), np.full(rows, _OBJECT, dtype=np.uint8), edges[:-1].copy(), edges[1:].copy())


def _only(values: JsonValues, wanted: Marks) -> JsonValues:
    """Return the values with the range of each unwanted one empty."""
    starts = np.ascontiguousarray(values.starts)
    return JsonValues(values.data, values.kinds, starts, np.where(wanted, values.ends, starts))


def _room_for(count: int) -> tuple[Kinds, Numbers, Numbers]:
    return np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)


def _find_named(texts: JsonValues, names: Sequence[str]) -> JsonFields:
    rows = len(texts)
    encoded = [name.encode() for name in names]
    name_ends = np.cumsum([0, *(len(name) for name in encoded)]).astype(np.int64)
    shape = (len(names), rows)
    fields = JsonFields(
        texts.data,
        np.zeros(rows, dtype=np.uint8),
        np.zeros(rows, dtype=np.int64),
        np.zeros(shape, dtype=np.uint8),
        np.zeros(shape, dtype=np.int64),
        np.zeros(shape, dtype=np.int64),
    )
    name_bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    # Texts write other names with escapes.
    is_plain = np.array([not {_QUOTE, _BACKSLASH} & {*name} for name in encoded], dtype=np.bool_)
    _find(
        texts.data, texts.starts, texts.ends, name_bytes, name_ends, is_plain, fields.forms, fields.others,
        fields.kinds, fields.starts, fields.ends,
    )  # fmt: skip
    return fields


# --- kernels ----------------------------------------------------------------------------------------------------------

_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = (ord(sign) for sign in "{}[]")


@inlined_part
def _skip_nested(data: Bytes, at: int, end: int) -> int:
    """Skip from an opening bracket to behind its closing one, or beyond the end."""
    depth = 0
    while at < end:
        sign = load_u8(data, at)
        at += 1
        if sign == _QUOTE:
            at = skip_string(data, at, end)[0]
        elif sign == _OPEN_OBJECT or sign == _OPEN_ARRAY:
            depth += 1
        elif sign == _CLOSE_OBJECT or sign == _CLOSE_ARRAY:
            depth -= 1
            if depth == 0:
                return at
    return end + 1


@inlined_part
def _skip_scalar(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """Skip a number or a word; also return whether it could be an integer."""
    is_integer = True
    while at < end:
        sign = load_u8(data, at)
        if sign == _COMMA or sign == _CLOSE_OBJECT or sign == _CLOSE_ARRAY or sign <= 32:
            break
        is_integer &= _ZERO <= sign <= _NINE or sign == _MINUS
        at += 1
    return at, is_integer


@inlined_part
def _skip_value(data: Bytes, at: int, end: int) -> tuple[int, int, bool]:
    """Skip a value; return the position behind it, its kind, and whether it is valid."""
    sign = load_u8(data, at)
    if sign == _QUOTE:
        behind, has_escapes = skip_string(data, at + 1, end)
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
def _is_name(data: Bytes, at: int, end: int, names: Bytes, name_at: int, name_end: int) -> bool:
    """Whether a name with escapes equals a plain name."""
    while at < end:
        if data[at] != _BACKSLASH:
            if name_at >= name_end or names[name_at] != data[at]:
                return False
            at += 1
            name_at += 1
            continue
        code, at = read_escape(data, at, end)
        if code < 0:
            return False
        length = utf8_length(code)
        if name_at + length > name_end:
            return False
        for i in range(length):
            if names[name_at + i] != utf8_byte(code, length, i):
                return False
        name_at += length
    return name_at == name_end


@inlined_part
def _field_of(data: Bytes, start: int, end: int, names: Bytes, name_ends: Column, guess: int) -> int:
    """Return the number of the field with this name, or -1. After an omitted field, the next one is near the guess."""
    count = len(name_ends) - 1
    field = guess if guess < count else 0
    for _ in range(count):
        name = name_ends[field]
        length = name_ends[field + 1] - name
        if length == end - start:
            k = 0
            while k < length and load_u8(data, start + k) == load_u8(names, name + k):
                k += 1
            if k == length:
                return field
        field = field + 1 if field + 1 < count else 0
    return -1


@kernel_part
def _field_of_escaped(data: Bytes, start: int, end: int, names: Bytes, name_ends: Column) -> int:
    for field in range(len(name_ends) - 1):
        if _is_name(data, start, end, names, name_ends[field], name_ends[field + 1]):
            return field
    return -1


@inlined_part
def _skip_colon(data: Bytes, at: int, end: int) -> int:
    """Skip from behind a name to its value, or to the end if it has none."""
    at = skip_space(data, at, end)
    if at >= end or load_u8(data, at) != _COLON:
        return end
    return skip_space(data, at + 1, end)


@kernel_part
def _find_in(
    data: Bytes, at: int, end: int, names: Bytes, name_ends: Column, is_plain: Column, row: int, others: Column,
    kinds: Column, starts: Column, ends: Column,
) -> int:  # fmt: skip
    """Record the fields of one document. Returns its form."""
    guess, count = 0, len(is_plain)
    at = skip_space(data, at + 1, end)
    if at < end and load_u8(data, at) == _CLOSE_OBJECT:
        return _FORM_OBJECT if skip_space(data, at + 1, end) == end else _FORM_MALFORMED
    while True:
        if at >= end or load_u8(data, at) != _QUOTE:
            return _FORM_MALFORMED
        name_at = at + 1
        # Documents are alike: first try the field that came next in others, which avoids a search for its name.
        if (
            guess < count
            and is_plain[guess]
            and begins_with_name(data, name_at, end, names, name_ends[guess], name_ends[guess + 1])
        ):
            field = guess
            at = name_at + name_ends[guess + 1] - name_ends[guess] + 1
        else:
            at, has_escapes = skip_string(data, name_at, end)
            if has_escapes:
                field = _field_of_escaped(data, name_at, at - 1, names, name_ends)
            else:
                field = _field_of(data, name_at, at - 1, names, name_ends, guess)
        start = _skip_colon(data, at, end)
        if start >= end:
            return _FORM_MALFORMED
        behind, kind, is_value = _skip_value(data, start, end)
        if not is_value:
            return _FORM_MALFORMED
        if field >= 0:
            is_string = kind == _STRING or kind == _ESCAPED
            kinds[field, row] = u8(kind)
            starts[field, row] = start + 1 if is_string else start
            ends[field, row] = behind - 1 if is_string else behind
            guess = field + 1
        elif kind != _NULL:
            others[row] += 1
        at = skip_space(data, behind, end)
        if at < end and load_u8(data, at) == _CLOSE_OBJECT:
            return _FORM_OBJECT if skip_space(data, at + 1, end) == end else _FORM_MALFORMED
        if at >= end or load_u8(data, at) != _COMMA:
            return _FORM_MALFORMED
        at = skip_space(data, at + 1, end)


@kernel
def _find(
    data: ReadOnlyBytes, row_starts: Int64s, row_ends: Int64s, names: ReadOnlyBytes, name_ends: Int64s, is_plain: Bools,
    forms: Bytes, others: Int64s, kinds: ByteRows, starts: Int64Rows, ends: Int64Rows,
) -> None:  # fmt: skip
    data, names, name_ends, is_plain = borrowed(data), borrowed(names), borrowed(name_ends), borrowed(is_plain)
    others, kinds, starts, ends = borrowed(others), borrowed(kinds), borrowed(starts), borrowed(ends)
    for row in range(len(forms)):
        end = i64(row_ends[row])
        at = skip_space(data, i64(row_starts[row]), end)
        if at >= end:
            forms[row] = _FORM_MALFORMED
        elif load_u8(data, at) != _OPEN_OBJECT:
            behind, _, is_value = _skip_value(data, at, end)
            is_whole = is_value and skip_space(data, behind, end) == end
            forms[row] = _FORM_OTHER if is_whole else _FORM_MALFORMED
        else:
            forms[row] = _find_in(data, at, end, names, name_ends, is_plain, row, others, kinds, starts, ends)


@kernel_part
def _list_in(
    data: Bytes, at: int, end: int, is_object: bool, first: int, name_kinds: Column, name_starts: Column,
    name_ends: Column, kinds: Column, starts: Column, ends: Column,
) -> int:  # fmt: skip
    """Record the members of one value, if there is room. Returns their number, or -1 if the value is malformed."""
    closing = _CLOSE_OBJECT if is_object else _CLOSE_ARRAY
    count = 0
    at = skip_space(data, at, end)
    if at >= end:
        return 0
    if data[at] != (_OPEN_OBJECT if is_object else _OPEN_ARRAY):
        return -1
    at = skip_space(data, at + 1, end)
    if at < end and data[at] == closing:
        return 0
    while True:
        name_at, name_end, has_escapes = at, at, False
        if is_object:
            if at >= end or load_u8(data, at) != _QUOTE:
                return -1
            name_at = at + 1
            at, has_escapes = skip_string(data, name_at, end)
            name_end = at - 1
            at = _skip_colon(data, at, end)
        if at >= end:
            return -1
        start = at
        behind, kind, is_value = _skip_value(data, start, end)
        if not is_value:
            return -1
        if len(kinds) > 0:
            place = first + count
            name_kinds[place] = u8(_ESCAPED if has_escapes else _STRING)
            name_starts[place] = name_at
            name_ends[place] = name_end
            is_string = kind == _STRING or kind == _ESCAPED
            kinds[place] = u8(kind)
            starts[place] = start + 1 if is_string else start
            ends[place] = behind - 1 if is_string else behind
        count += 1
        at = skip_space(data, behind, end)
        if at < end and data[at] == closing:
            return count if skip_space(data, at + 1, end) == end else -1
        if at >= end or data[at] != _COMMA:
            return -1
        at = skip_space(data, at + 1, end)


@kernel
def _list(
    data: ReadOnlyBytes, row_starts: Int64s, row_ends: Int64s, is_object: Bools, counts: Int64s, name_kinds: Bytes,
    name_starts: Int64s, name_ends: Int64s, kinds: Bytes, starts: Int64s, ends: Int64s,
) -> None:  # fmt: skip
    """Count members if there is no room for them (the first call), record them otherwise (the second)."""
    data, name_kinds, name_starts, name_ends = (
        borrowed(data), borrowed(name_kinds), borrowed(name_starts), borrowed(name_ends)
    )  # fmt: skip
    kinds, starts, ends = borrowed(kinds), borrowed(starts), borrowed(ends)
    first = i64(0)
    for row in range(len(counts)):
        if counts[row] < 0 or (len(kinds) > 0 and counts[row] == 0):
            continue
        counts[row] = _list_in(
            data, i64(row_starts[row]), i64(row_ends[row]), is_object[0], first, name_kinds, name_starts, name_ends,
            kinds, starts, ends,
        )  # fmt: skip
        first += counts[row]


@kernel
def _copy_texts(
    data: ReadOnlyBytes, kinds: Bytes, starts: Int64s, ends: Int64s, good: Bools, offsets: Int64s, copied: Bytes
) -> None:
    to = i64(0)
    for row in range(len(starts)):
        if good[row]:
            if kinds[row] == _ESCAPED:
                behind = unescape(data, starts[row], ends[row], copied, to)
                good[row] = behind >= 0
                to = behind if behind >= 0 else to
            elif ends[row] > starts[row]:
                copy_bytes(copied, to, data, starts[row], ends[row] - starts[row])
                to += ends[row] - starts[row]
        offsets[row + 1] = to


@kernel
def _parse_integers(
    data: ReadOnlyBytes, starts: Int64s, ends: Int64s, wanted: Bools, values: Int64s, fits: Bools
) -> None:
    """Accumulate digits as a negative number: 64 bits hold one more number below zero than above."""
    data = borrowed(data)
    least = i64(-9223372036854775807 - 1)
    last_safe = i64(-922337203685477580)
    for row in range(len(starts)):
        if not wanted[row]:
            continue
        at, end = starts[row], ends[row]
        is_negative = load_u8(data, at) == _MINUS
        if is_negative:
            at += 1
        value = i64(0)
        is_good = at < end
        while at < end and is_good:
            digit = i64(load_u8(data, at)) - _ZERO
            is_good = 0 <= digit <= 9 and (value > last_safe or (value == last_safe and digit <= 8))
            if is_good:
                value = value * 10 - digit
            at += 1
        if is_good and not is_negative:
            is_good = value != least
            value = -value
        values[row] = value
        fits[row] = is_good
