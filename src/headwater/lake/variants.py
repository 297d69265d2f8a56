"""JSON texts to variants and back, whole columns at once.

A variant is two binaries (the Variant encoding of the Parquet format, VariantEncoding.md). The *metadata* is a
dictionary of all member names, in the order of their first use. The *value* refers to names by their numbers: a scalar
is a byte with its type, and the bytes of the scalar; an object or array is a header, with the offset of each of its
members, and its members. The members of an object are listed in the order of their names.

The header's length depends on its widest number, so it is written after all members: these are moved to make room for
it, as Spark's own builders do. Numbers take the smallest integer, else a decimal of 9, 18 or 38 digits; numbers with an
exponent, or more digits, become doubles. The result is the same as that of PySpark's `VariantVal.parseJson`, byte for
byte.

The kernel encodes only texts that it can encode with certainty: JSON by a strict reading. The Spark source passes the
few others to Spark's own parser one by one, which decides (`spark.rows`). These are texts that are not JSON, lone
surrogates, `NaN`, objects with duplicate names, numbers with too many digits, doubles just between two, and texts that
exceed a limit of the kernel. The tables of a lake keep these others as bytes (`to_variants`), so a document is stored
either in full or unchanged.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.kernels.memory import (
    Bools,
    Bytes,
    Column,
    Int32s,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt64s,
    UInt64,
    UInt64s,
    borrowed,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    kernel_part,
    leading_zeros,
    load_u8,
    move_bytes,
    multiply_high,
    read_only,
    u8,
    u64,
)
from headwater.kernels.siphash import sip_bytes, sip_end, sip_start
from headwater.lake.json_fields import begins_with_name, skip_space, skip_string, unescape
from headwater.protocol.kernels.json_check import DEPTH_MAX, is_json

VARIANT_BYTES_MAX = 1 << 24
"""The maximum of a value or a metadata, as in Spark."""
VARIANT = pa.struct([pa.field(name, pa.binary(), nullable=False) for name in ("metadata", "value")])
"""A column of variants in a lake, and in its files. The log calls it `variant`."""

_SHORT_STRING = 1
"""The two lowest bits of a short string. For any other scalar they are 0, and its type is in the bits above."""
_NULL, _TRUE, _FALSE, _INT8, _INT16, _INT32, _INT64, _DOUBLE, _DECIMAL4, _DECIMAL8, _DECIMAL16 = range(11)
_LONG_STRING = 16
_SHORT_STRING_MAX = 0x3F
U8_MAX, _U16_MAX = 0xFF, 0xFFFF


@inlined_part
def width_of(number: int) -> int:
    """Return how many bytes a number below 2^24 takes."""
    return i64(1) if number <= U8_MAX else i64(2) if number <= _U16_MAX else i64(3)


@inlined_part
def put_number(values: Bytes, at: int, number: int, width: int) -> None:
    """Write a number, the lowest byte first."""
    for i in range(width):
        values[at + i] = u8((number >> (8 * i)) & 0xFF)


@inlined_part
def write_string(data: Bytes, at: int, end: int, values: Bytes, to: int) -> tuple[int, int]:
    """Write the string behind an opening quote. Returns its ends in text and variant; the second is -1 if invalid."""
    behind, has_escapes = skip_string(data, at, end)
    length = behind - 1 - at
    if has_escapes:
        # This is its place if it is long. Unescaped, it is no longer than before.
        text_end = unescape(data, at, behind - 1, values, to + 5)
        if text_end < 0:
            return behind, i64(-1)
        length = text_end - to - 5
        if length <= _SHORT_STRING_MAX:
            move_bytes(values, to + 1, to + 5, length)
    elif length > 0:
        copy_bytes(values, to + (1 if length <= _SHORT_STRING_MAX else 5), data, at, length)
    if length <= _SHORT_STRING_MAX:
        values[to] = u8(length << 2 | _SHORT_STRING)
        return behind, to + 1 + length
    values[to] = u8(_LONG_STRING << 2)
    put_number(values, to + 1, length, 4)
    return behind, to + 5 + length


# --- numbers ----------------------------------------------------------------------------------------------------------

_MINUS, _PLUS, _POINT, _ZERO, _NINE, _T, _F, _N, _SMALL_E = (ord(sign) for sign in "-+.09tfne")
_DECIMAL4_DIGITS, _DECIMAL8_DIGITS, _DECIMAL16_DIGITS = 9, 18, 38
WORD_DIGITS = 19
"""Any number with this many digits fits 64 bits."""
DOUBLE_DIGITS = 17
"""This many digits distinguish all doubles."""
_EXPONENT_MAX = 9999
_POWER_MIN, _POWER_MAX = -342, 308
"""The powers of ten with which a number of 19 digits can be a double other than zero."""


def _powers_of_ten() -> tuple[Column, Column, Column]:
    """Return each power as a 128-bit number with its highest bit set, in halves, and a power of two. Rounded down."""
    bits, exponents = [], []
    for power in range(_POWER_MIN, _POWER_MAX + 1):
        five = 5 ** abs(power)
        shift = 128 - five.bit_length() if power >= 0 else 127 + five.bit_length()
        exact = five << max(shift, 0) if power >= 0 else (1 << shift) // five
        bits.append(exact >> max(-shift, 0))
        exponents.append(power - shift)
    halves = [[it >> 64 for it in bits], [it & (2**64 - 1) for it in bits]]
    return np.array(halves[0], dtype=np.uint64), np.array(halves[1], dtype=np.uint64), np.array(exponents)


_POWER_HIGH, _POWER_LOW, _POWER_EXPONENT = _powers_of_ten()


@kernel_part
def write_number_or_word(data: Bytes, at: int, end: int, values: Bytes, to: int, digits_max: int) -> tuple[int, int]:
    """Write a number, true, false or null. Returns the positions behind it in text and variant; the second is -1 if it
    is not encoded here, as for a double of more digits."""
    sign = load_u8(data, at)
    if sign == _T or sign == _F or sign == _N:
        values[to] = u8((_TRUE if sign == _T else _FALSE if sign == _F else _NULL) << 2)
        return at + (5 if sign == _F else 4), to + 1
    is_negative = sign == _MINUS
    at += is_negative
    # Without the point, the digits give high * 2^64 + low. Leading zeros are not counted.
    high, low, digits, scale, is_integer = u64(0), u64(0), i64(0), i64(0), True
    while at < end:
        sign = load_u8(data, at)
        if sign == _POINT:
            is_integer = False
        elif _ZERO <= sign <= _NINE:
            digit = u64(sign) - u64(_ZERO)
            if digits >= WORD_DIGITS:
                high = high * u64(10) + multiply_high(low, u64(10))
            low = low * u64(10) + digit
            if digits >= WORD_DIGITS and low < digit:
                high += u64(1)
            digits += digits > 0 or digit > u64(0)
            scale += not is_integer
        else:
            break
        at += 1
    if at < end and load_u8(data, at) | 32 == _SMALL_E:
        at, exponent = _read_exponent(data, at + 1, end)
        return at, _write_double(values, to, is_negative, low, digits, exponent - scale, digits_max)
    if digits > _DECIMAL16_DIGITS or scale > _DECIMAL16_DIGITS:
        return at, _write_double(values, to, is_negative, low, digits, -scale, digits_max)
    is_of_64_bits = high == u64(0) and low <= u64(2**63 - 1) + u64(is_negative)
    if is_negative:
        low = ~low + u64(1)
        high = ~high + u64(low == u64(0))
    if is_integer and is_of_64_bits:
        return at, _write_integer(values, to, i64(low))
    return at, _write_decimal(values, to, i64(high), i64(low), max(digits, scale), scale)


@inlined_part
def _read_exponent(data: Bytes, at: int, end: int) -> tuple[int, int]:
    is_negative = load_u8(data, at) == _MINUS
    if is_negative or load_u8(data, at) == _PLUS:
        at += 1
    exponent = i64(0)
    while at < end and _ZERO <= load_u8(data, at) <= _NINE:
        exponent = min(exponent * 10 + i64(load_u8(data, at)) - _ZERO, _EXPONENT_MAX)
        at += 1
    return at, -exponent if is_negative else exponent


@inlined_part
def _write_integer(values: Bytes, to: int, number: int) -> int:
    """Write an integer with the smallest type that holds it."""
    kind, width = _INT64, 8
    if -(2**7) <= number < 2**7:
        kind, width = _INT8, 1
    elif -(2**15) <= number < 2**15:
        kind, width = _INT16, 2
    elif -(2**31) <= number < 2**31:
        kind, width = _INT32, 4
    values[to] = u8(kind << 2)
    put_number(values, to + 1, number, width)
    return to + 1 + width


@inlined_part
def _write_decimal(values: Bytes, to: int, high: int, low: int, digits: int, scale: int) -> int:
    kind, width = _DECIMAL16, 8
    if digits <= _DECIMAL4_DIGITS:
        kind, width = _DECIMAL4, 4
    elif digits <= _DECIMAL8_DIGITS:
        kind = _DECIMAL8
    values[to] = u8(kind << 2)
    values[to + 1] = u8(scale)
    put_number(values, to + 2, low, width)
    to += 2 + width
    if kind == _DECIMAL16:
        put_number(values, to, high, 8)
        to += 8
    return to


@inlined_part
def _write_double(
    values: Bytes, to: int, is_negative: bool, digits_read: int, digits: int, power: int, digits_max: int
) -> int:
    """Write the double nearest to digits_read * 10^power. Returns -1 if it is not certain which that is.

    The power of ten is known to 128 bits, and so is the product: it is too small by less than 2 in its lowest bit. So
    it can be rounded to the 53 bits of a double unless the bits cut off are about a half.
    """
    bits = u64(0)
    if digits > 0:
        if digits > digits_max or not _POWER_MIN <= power <= _POWER_MAX:
            return -1
        shift = leading_zeros(digits_read)
        number = digits_read << u64(shift)
        power_high = u64(_POWER_HIGH[power - _POWER_MIN])
        carried = multiply_high(number, u64(_POWER_LOW[power - _POWER_MIN]))
        low = number * power_high + carried
        high = multiply_high(number, power_high) + u64(low < carried)
        cut = i64(10) + i64(high >> u64(63))
        half = u64(1) << u64(cut - 1)
        rest = high & ((u64(1) << u64(cut)) - u64(1))
        if (rest == half and low == u64(0)) or (rest == half - u64(1) and low == ~u64(0)):
            return -1
        mantissa = (high >> u64(cut)) + u64(rest >= half)
        # 128 bits of the product are below `high`; a double has 52 behind its point, and stores exponent 0 as 1023.
        exponent = i64(_POWER_EXPONENT[power - _POWER_MIN]) + 128 + cut - shift + 52 + 1023
        if mantissa >> u64(53):
            mantissa >>= u64(1)
            exponent += 1
        if not 1 <= exponent <= 2046:
            return -1
        bits = (u64(exponent) << u64(52)) | (mantissa & u64(2**52 - 1))
    values[to] = u8(_DOUBLE << 2)
    put_number(values, to + 1, i64(bits | (u64(is_negative) << u64(63))), 8)
    return to + 9


# --- texts to variants ------------------------------------------------------------------------------------------------

NAMES_MAX = 1 << 15
"""How many different names are known at a time. A text with more names is not encoded here."""
_SLOTS = 2 * NAMES_MAX
_SECRET: Any = (np.uint64(secrets.randbits(64)), np.uint64(secrets.randbits(64)))
_SIZE_MAX = VARIANT_BYTES_MAX - 16
"""Of a value or a metadata. Spark's builder wants room for the longest number, 18 bytes, before it adds a short one."""


def to_variants(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Encode the texts of a binary column as variants, and return the bytes of those that can't be.

    The latter are not JSON, or a variant would change them: objects with duplicate names, numbers that would be rounded
    or are out of range, and texts that exceed a limit. Numbers with an exponent, or with more than 38 digits, become
    the nearest doubles if they have no more digits than a double; others are among the latter.
    """
    values, dictionaries, is_done = encode_texts(texts, texts.is_valid().to_numpy(zero_copy_only=False), DOUBLE_DIGITS)
    variants = pa.StructArray.from_arrays([dictionaries, values], fields=[*VARIANT], mask=pa.array(~is_done))
    if is_done.all():
        return variants, pa.nulls(len(texts), pa.binary())
    return variants, pc.if_else(pa.array(is_done), pa.scalar(None, texts.type), texts)


def as_variants(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert variants as another engine has written them: with their two parts in any order, and as views."""
    parts = [
        pa.StructArray.from_arrays(
            [chunk.field(field.name).cast(field.type) for field in VARIANT], fields=[*VARIANT], mask=chunk.is_null()
        )
        for chunk in column.chunks
    ]
    return pa.chunked_array(parts, VARIANT)


def encode_texts(texts: pa.Array, wanted: Column, digits_max: int) -> tuple[pa.Array, pa.Array, Column]:
    """Return values, metadata, and which of the wanted texts have both. Those with a double of more digits do not."""
    rows = len(texts)
    texts = texts.cast(pa.large_binary())
    _, offset_buffer, data_buffer = texts.buffers()
    data = read_only(np.frombuffer(b"" if data_buffer is None else data_buffer, dtype=np.uint8))
    offsets = read_only(np.frombuffer(offset_buffer, dtype=np.int64)[texts.offset : texts.offset + rows + 1])
    lengths = np.diff(offsets)
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    is_done = np.zeros(rows, dtype=np.bool_)
    # A text of n bytes gives a value of less than 4 n, as nested arrays do, and metadata of at most n + 7.
    values, dictionaries = np.empty(4 * total, dtype=np.uint8), np.empty(total + 7 * rows, dtype=np.uint8)
    value_offsets, dictionary_offsets = np.zeros(rows + 1, dtype=np.int64), np.zeros(rows + 1, dtype=np.int64)
    counts = np.array([0, 0, 0, 0, digits_max], dtype=np.int64)
    _encode(
        data, offsets, wanted, is_done, np.empty((_NAME_FACTS, NAMES_MAX + 1), dtype=np.int64),
        np.empty(NAMES_MAX, dtype=np.uint64), np.empty(total, dtype=np.uint8), np.empty(_SLOTS, dtype=np.int32),
        _SECRET[0], _SECRET[1], np.empty((2, longest // 2 + 1), dtype=np.int64), values, value_offsets, dictionaries,
        dictionary_offsets, counts, np.empty((3, DEPTH_MAX), dtype=np.int64),
    )  # fmt: skip
    return _binaries(values, value_offsets), _binaries(dictionaries, dictionary_offsets), is_done


def _binaries(data: Column, offsets: Column) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data[: offsets[-1]])]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers).cast(pa.binary())


# --- documents --------------------------------------------------------------------------------------------------------
#
# Documents are alike, so names are remembered across all texts of a column: where a name lies in `name_bytes`, which
# name followed it last time, and its number in the dictionary of which row. Members that are written and wait for
# their header are on one stack, those of an inner object above those of the outer.

_QUOTE, _COMMA, _OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = (ord(sign) for sign in '",{}[]')
_NAME_START, _NAME_END, _NEXT_NAME, _ROW, _NUMBER, _IN_ORDER, _NAME_FACTS = range(7)
"""The rows of `names`, by name; `_IN_ORDER` has the names of the dictionary by their numbers instead."""
_KNOWN, _KNOWN_BYTES, _IN_ROW, _IS_AS_BEFORE, _DIGITS_MAX = range(5)
"""The members of `counts`, such as the known names and those in this row's dictionary. The last is an input."""
_FIRST, _START, _IS_OBJECT = range(3)
"""Of an open object or array: its first member on the stack, where its value begins, and whether it is an object."""
_NAME, _OFFSET = range(2)
"""Of a member."""
_NO_NAME = NAMES_MAX
"""Stands for the position before the first name of a text."""


@kernel
def _encode(
    data: ReadOnlyBytes, offsets: ReadOnlyInt64s, wanted: Bools, is_done: Bools, names: Int64Rows, heads: UInt64s,
    name_bytes: Bytes, slots: Int32s, secret0: UInt64, secret1: UInt64, members: Int64Rows, values: Bytes,
    value_offsets: Int64s, dictionaries: Bytes, dictionary_offsets: Int64s, counts: Int64s, levels: Int64Rows,
) -> None:  # fmt: skip
    data, names, heads, name_bytes, slots = (
        borrowed(data), borrowed(names), borrowed(heads), borrowed(name_bytes), borrowed(slots)
    )  # fmt: skip
    members, values, dictionaries = borrowed(members), borrowed(values), borrowed(dictionaries)
    # The size of the last dictionary in names, and its position.
    last_names, last_start, last_end = i64(-1), i64(0), i64(0)
    _forget_names(names, slots, counts)
    for row in range(len(wanted)):
        to, dictionary_to = value_offsets[row], dictionary_offsets[row]
        if wanted[row] and is_json(data, offsets[row], offsets[row + 1]):
            if counts[_KNOWN] > NAMES_MAX // 2:
                _forget_names(names, slots, counts)
                last_names = i64(-1)
            behind = i64(-1)
            while behind < 0:
                known = counts[_KNOWN]
                counts[_IN_ROW], counts[_IS_AS_BEFORE] = 0, last_names >= 0
                behind = _write_document(
                    data, offsets[row], offsets[row + 1], row, names, heads, name_bytes, slots, secret0, secret1,
                    members, borrowed(levels), borrowed(counts), values, to,
                )  # fmt: skip
                if known == 0 or counts[_KNOWN] < NAMES_MAX:
                    break
                # Whether a text can be encoded must not depend on the names of earlier texts.
                _forget_names(names, slots, counts)
                last_names = i64(-1)
            last_names = counts[_IN_ROW] if counts[_IS_AS_BEFORE] and counts[_IN_ROW] == last_names else i64(-1)
            if i64(0) <= behind <= to + _SIZE_MAX:
                if last_names >= 0:
                    copy_bytes(dictionaries, dictionary_to, dictionaries, last_start, last_end - last_start)
                    dictionary_behind = dictionary_to + last_end - last_start
                else:
                    dictionary_behind = _write_dictionary(names, name_bytes, counts, dictionaries, dictionary_to)
                if dictionary_behind >= 0:
                    last_names, last_start, last_end = counts[_IN_ROW], dictionary_to, dictionary_behind
                    to, dictionary_to = behind, dictionary_behind
                    is_done[row] = True
        value_offsets[row + 1], dictionary_offsets[row + 1] = to, dictionary_to


@inlined_part
def _write_document(
    data: Bytes, at: int, end: int, row: int, names: Column, heads: Column, name_bytes: Bytes, slots: Column,
    secret0: int, secret1: int, members: Column, levels: Column, counts: Column, values: Bytes, to: int,
) -> int:  # fmt: skip
    """Write the value of a text that is JSON. Returns the position behind it, or -1 if it is not encoded here."""
    depth, members_end, name = i64(0), i64(0), i64(_NO_NAME)
    at = skip_space(data, at, end)
    while True:
        sign = load_u8(data, at)
        if sign == _OPEN_OBJECT or sign == _OPEN_ARRAY:
            levels[_FIRST, depth], levels[_START, depth] = members_end, to
            levels[_IS_OBJECT, depth] = sign == _OPEN_OBJECT
            depth += 1
            at += 1
        elif sign == _QUOTE:
            at, to = write_string(data, at + 1, end, values, to)
        else:
            at, to = write_number_or_word(data, at, end, values, to, counts[_DIGITS_MAX])
        if to < 0:
            return -1
        at = skip_space(data, at, end)
        while depth > 0 and (load_u8(data, at) == _CLOSE_OBJECT or load_u8(data, at) == _CLOSE_ARRAY):
            depth -= 1
            first, start = levels[_FIRST, depth], levels[_START, depth]
            if levels[_IS_OBJECT, depth]:
                _sort_members(members, first, members_end, names, heads, name_bytes)
                to = _close_object(members, first, members_end, names, values, start, to)
            else:
                to = _close_array(members, first, members_end, values, start, to)
            if to < 0:
                return -1
            members_end = first
            at = skip_space(data, at + 1, end)
        if depth == 0:
            return to
        if load_u8(data, at) == _COMMA:
            at = skip_space(data, at + 1, end)
        if levels[_IS_OBJECT, depth - 1]:
            name, at = _read_name(data, at + 1, end, name, names, heads, name_bytes, slots, secret0, secret1, counts)
            if name < 0:
                return -1
            _number_name(name, row, names, counts)
            members[_NAME, members_end] = name
            at = skip_space(data, skip_space(data, at, end) + 1, end)
        members[_OFFSET, members_end] = to - levels[_START, depth - 1]
        members_end += 1


# --- names ------------------------------------------------------------------------------------------------------------


@kernel_part
def _forget_names(names: Column, slots: Column, counts: Column) -> None:
    slots[:] = -1
    names[_NEXT_NAME, _NO_NAME] = -1
    counts[_KNOWN] = counts[_KNOWN_BYTES] = 0


@inlined_part
def _read_name(
    data: Bytes, at: int, end: int, last: int, names: Column, heads: Column, name_bytes: Bytes, slots: Column,
    secret0: int, secret1: int, counts: Column,
) -> tuple[int, int]:  # fmt: skip
    """Read a name from behind its opening quote. Returns its number (-1 if invalid or one too many), and the end.

    Most names follow the same name as before: then no lookup is needed.
    """
    guess = names[_NEXT_NAME, last]
    if guess >= 0 and begins_with_name(data, at, end, name_bytes, names[_NAME_START, guess], names[_NAME_END, guess]):
        return guess, at + names[_NAME_END, guess] - names[_NAME_START, guess] + 1
    behind, has_escapes = skip_string(data, at, end)
    name = _find_name(
        data, at, behind - 1, has_escapes, names, heads, name_bytes, slots, secret0, secret1, counts
    )  # fmt: skip
    # A name that contains a quote can't be compared with a text, where a backslash precedes the quote.
    if not has_escapes and name >= 0:
        names[_NEXT_NAME, last] = name
    return name, behind


@kernel_part
def _find_name(
    data: Bytes, at: int, end: int, has_escapes: bool, names: Column, heads: Column, name_bytes: Bytes, slots: Column,
    secret0: int, secret1: int, counts: Column,
) -> int:  # fmt: skip
    """Return the number of a name, and add it if it is new."""
    start = counts[_KNOWN_BYTES]
    name_end = start + end - at
    if has_escapes:
        name_end = unescape(data, at, end, name_bytes, start)
        if name_end < 0:
            return -1
    else:
        copy_bytes(name_bytes, start, data, at, end - at)
    length = name_end - start
    slot = i64(sip_end(sip_bytes(sip_start(secret0, secret1), name_bytes, start, length))[0] & u64(_SLOTS - 1))
    while slots[slot] >= 0:
        name = i64(slots[slot])
        known = names[_NAME_START, name]
        if names[_NAME_END, name] - known == length:
            k = i64(0)
            while k < length and load_u8(name_bytes, known + k) == load_u8(name_bytes, start + k):
                k += 1
            if k == length:
                return name
        slot = (slot + 1) & (_SLOTS - 1)
    name = counts[_KNOWN]
    if name == NAMES_MAX:
        return -1
    slots[slot] = name
    names[_NAME_START, name], names[_NAME_END, name] = start, name_end
    names[_NEXT_NAME, name], names[_ROW, name], names[_IN_ORDER, name] = -1, -1, -1
    head = u64(0)
    for k in range(min(length, 8)):
        head |= u64(name_bytes[start + k]) << u64(56 - 8 * k)
    heads[name] = head
    counts[_KNOWN], counts[_KNOWN_BYTES] = name + 1, name_end
    return name


@inlined_part
def _number_name(name: int, row: int, names: Column, counts: Column) -> None:
    """Add a name to the dictionary of a row, if it is missing."""
    if names[_ROW, name] != row:
        number = counts[_IN_ROW]
        names[_ROW, name], names[_NUMBER, name] = row, number
        if names[_IN_ORDER, number] != name:
            names[_IN_ORDER, number] = name
            counts[_IS_AS_BEFORE] = 0
        counts[_IN_ROW] = number + 1


@kernel_part
def _write_dictionary(names: Column, name_bytes: Bytes, counts: Column, dictionaries: Bytes, to: int) -> int:
    """Write the metadata of a row. Returns the position behind it, or -1 if it is too large."""
    count = counts[_IN_ROW]
    size = i64(0)
    for number in range(count):
        name = names[_IN_ORDER, number]
        size += names[_NAME_END, name] - names[_NAME_START, name]
    width = width_of(max(size, count))
    if 1 + (count + 2) * width + size > _SIZE_MAX:
        return -1
    dictionaries[to] = u8(1 | (width - 1) << 6)
    put_number(dictionaries, to + 1, count, width)
    to += 1 + width
    first = text_to = to + (count + 1) * width
    for number in range(count):
        name = names[_IN_ORDER, number]
        start, end = names[_NAME_START, name], names[_NAME_END, name]
        put_number(dictionaries, to + number * width, text_to - first, width)
        copy_bytes(dictionaries, text_to, name_bytes, start, end - start)
        text_to += end - start
    put_number(dictionaries, to + count * width, size, width)
    return text_to


@inlined_part
def _is_before(one: int, other: int, names: Column, heads: Column, name_bytes: Bytes) -> bool:
    """Whether a name sorts before another, by its bytes. `heads` has the first eight as a number."""
    if heads[one] != heads[other]:
        return heads[one] < heads[other]
    start, other_start = names[_NAME_START, one], names[_NAME_START, other]
    length, other_length = names[_NAME_END, one] - start, names[_NAME_END, other] - other_start
    for k in range(8, min(length, other_length)):
        if name_bytes[start + k] != name_bytes[other_start + k]:
            return name_bytes[start + k] < name_bytes[other_start + k]
    return length < other_length


@inlined_part
def _sort_members(members: Column, first: int, end: int, names: Column, heads: Column, name_bytes: Bytes) -> None:
    """Sort by names: a Shell sort, which for few members is an insertion sort."""
    gap = end - first if end - first > 16 else i64(2)
    while gap > 1:
        gap = max(gap * 5 // 11, 1)
        for i in range(first + gap, end):
            name, offset = members[_NAME, i], members[_OFFSET, i]
            k = i64(i)
            while k - gap >= first and _is_before(name, members[_NAME, k - gap], names, heads, name_bytes):
                members[_NAME, k], members[_OFFSET, k] = members[_NAME, k - gap], members[_OFFSET, k - gap]
                k -= gap
            members[_NAME, k], members[_OFFSET, k] = name, offset


# --- objects and arrays -----------------------------------------------------------------------------------------------

_BASIC_OBJECT, _BASIC_ARRAY = 2, 3


@inlined_part
def _close_array(members: Column, first: int, end: int, values: Bytes, start: int, to: int) -> int:
    """Write the header of an array before its elements. Returns the position behind them; -1 if they are too large."""
    count, size = end - first, to - start
    if size > _SIZE_MAX:
        return -1
    width, count_width = width_of(size), 4 if count > U8_MAX else 1
    header = 1 + count_width + (count + 1) * width
    move_bytes(values, start + header, start, size)
    values[start] = u8((count_width >> 2) << 4 | (width - 1) << 2 | _BASIC_ARRAY)
    put_number(values, start + 1, count, count_width)
    _write_offsets(members, first, end, values, start + 1 + count_width, size, width)
    return to + header


@inlined_part
def _close_object(members: Column, first: int, end: int, names: Column, values: Bytes, start: int, to: int) -> int:
    """Do the same for an object with sorted members; also -1 for a duplicate name, of which the last would count."""
    count, size = end - first, to - start
    number_max = i64(0)
    for i in range(first, end):
        number_max = max(number_max, names[_NUMBER, members[_NAME, i]])
        if i > first and members[_NAME, i] == members[_NAME, i - 1]:
            return -1
    if size > _SIZE_MAX:
        return -1
    width, number_width, count_width = width_of(size), width_of(number_max), 4 if count > U8_MAX else 1
    header = 1 + count_width + count * number_width + (count + 1) * width
    move_bytes(values, start + header, start, size)
    values[start] = u8((count_width >> 2) << 6 | (number_width - 1) << 4 | (width - 1) << 2 | _BASIC_OBJECT)
    put_number(values, start + 1, count, count_width)
    at = start + 1 + count_width
    for i in range(first, end):
        put_number(values, at, names[_NUMBER, members[_NAME, i]], number_width)
        at += number_width
    _write_offsets(members, first, end, values, at, size, width)
    return to + header


@inlined_part
def _write_offsets(members: Column, first: int, end: int, values: Bytes, at: int, size: int, width: int) -> None:
    for i in range(first, end):
        put_number(values, at, members[_OFFSET, i], width)
        at += width
    put_number(values, at, size, width)


# --- back to texts ----------------------------------------------------------------------------------------------------
#
# The text of a variant is JSON without spaces, with the members of an object in the order of their names. Another
# program may have written or damaged a variant: whatever it contains, nothing outside of it is read, and no byte twice.
# Arrow writes doubles, as the shortest text that gives the same double: the kernel records where they belong.

TEXT_BYTES_MAX = 1 << 28
"""The maximum of a text. A variant has each name once, its text as often as the name is used."""
_DAMAGED, _NO_ROOM = -1, -2
_AT_ROW, _DOUBLES, _VISITED, _PLACES = range(4)
_NEXT, _COUNT, _OFFSETS_AT, _WIDTH, _VALUES_AT, _NAMES_AT, _NAMES_WIDTH, _LEVEL_FACTS = range(8)
"""Of an open object or array, which has no names: the next member, the number of members, and where they lie."""
_ESCAPES = tuple((ord(sign), ord(letter)) for sign, letter in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True))
_BACKSLASH, _SPACE, _COLON = ord("\\"), ord(" "), ord(":")
_WORDS = np.frombuffer(b"nulltruefalse", dtype=np.uint8)
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


def document_texts(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the texts of a column `document`, whether it has variants or texts."""
    return json_texts(column) if pa.types.is_struct(column.type) else column


def json_texts(variants: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Convert variants to JSON. Null if one is null, damaged, or contains another program's value that JSON lacks."""
    variants = variants.combine_chunks() if isinstance(variants, pa.ChunkedArray) else variants
    dictionaries, values = (
        pc.fill_null(variants.field(name).cast(pa.large_binary()), b"") for name in ("metadata", "value")
    )
    is_done = variants.is_valid().to_numpy(zero_copy_only=False).copy()
    parts = (*_parts_of(values), *_parts_of(dictionaries))
    rows, places = len(variants), np.zeros(_PLACES, dtype=np.int64)
    doubles, double_at = (np.empty(len(parts[0]) // 9 + 1, dtype=np.int64) for _ in range(2))
    texts, offsets = np.empty(4 * len(parts[0]) + 64, dtype=np.uint8), np.zeros(rows + 1, dtype=np.int64)
    levels, digits = np.empty((_LEVEL_FACTS, DEPTH_MAX), dtype=np.int64), np.empty(64, dtype=np.uint8)
    while True:
        _decode(*parts, is_done, texts, offsets, doubles, double_at, levels, digits, places, TEXT_BYTES_MAX)
        if places[_AT_ROW] == rows:
            break
        texts = np.concatenate([texts, np.empty(len(texts), dtype=np.uint8)])
    if count := int(places[_DOUBLES]):
        written = _double_texts(doubles[:count].view(np.float64))
        longer, longer_offsets = np.empty(offsets[-1] + len(written[0]), dtype=np.uint8), offsets.copy()
        _insert_texts(texts, offsets, double_at[:count], *written, longer, longer_offsets)
        texts, offsets = longer, longer_offsets
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(texts[: offsets[-1]])]
    found = pa.LargeBinaryArray.from_buffers(pa.large_binary(), rows, buffers).cast(pa.binary())
    if not is_done.all():
        found = pc.if_else(pa.array(is_done), found, pa.scalar(None, pa.binary()))
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        # Another program has written text that is not UTF-8.
        return pa.array([_text_or_none(text) for text in found.to_pylist()], pa.string())


def _text_or_none(text: bytes | None) -> str | None:
    try:
        return None if text is None else text.decode()
    except UnicodeDecodeError:
        return None


def _parts_of(array: pa.Array) -> tuple[Column, Column]:
    """Return the bytes and the offsets of large binaries."""
    _, offsets, data = array.buffers()
    if not len(array):
        return read_only(np.zeros(0, dtype=np.uint8)), read_only(np.zeros(1, dtype=np.int64))
    ends = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return read_only(np.frombuffer(b"" if data is None else data, dtype=np.uint8)), read_only(ends)


def _double_texts(doubles: Column) -> tuple[Column, Column]:
    """Return the bytes and the offsets of doubles as JSON. All are recognizable as doubles."""
    texts = pa.array(doubles).cast(pa.string())
    texts = pc.if_else(pc.match_substring_regex(texts, "[.e]"), texts, pc.binary_join_element_wise(texts, ".0", ""))
    return _parts_of(texts.cast(pa.large_binary()))


@kernel
def _insert_texts(
    texts: ReadOnlyBytes, offsets: ReadOnlyInt64s, at: ReadOnlyInt64s, inserted: ReadOnlyBytes,
    inserted_offsets: ReadOnlyInt64s, longer: Bytes, longer_offsets: Int64s,
) -> None:  # fmt: skip
    done, to, row = i64(0), i64(0), i64(0)
    for i in range(len(at)):
        while offsets[row + 1] <= at[i]:
            row += 1
            longer_offsets[row] += inserted_offsets[i] - i
        copy_bytes(longer, to, texts, done, at[i] - done)
        to += at[i] - done
        done = at[i] + 1
        length = inserted_offsets[i + 1] - inserted_offsets[i]
        copy_bytes(longer, to, inserted, inserted_offsets[i], length)
        to += length
    copy_bytes(longer, to, texts, done, offsets[len(offsets) - 1] - done)
    while row + 1 < len(offsets):
        row += 1
        longer_offsets[row] += inserted_offsets[len(at)] - len(at)


@kernel
def _decode(
    values: ReadOnlyBytes, value_offsets: ReadOnlyInt64s, dictionaries: ReadOnlyBytes,
    dictionary_offsets: ReadOnlyInt64s, is_done: Bools, texts: Bytes, text_offsets: Int64s, doubles: Int64s,
    double_at: Int64s, levels: Int64Rows, digits: Bytes, places: Int64s, text_bytes_max: UInt64,
) -> None:  # fmt: skip
    """Write the texts of rows until the room is used up."""
    values, dictionaries, texts, levels = borrowed(values), borrowed(dictionaries), borrowed(texts), borrowed(levels)
    doubles, double_at, digits, places = borrowed(doubles), borrowed(double_at), borrowed(digits), borrowed(places)
    while places[_AT_ROW] < len(is_done):
        row, doubles_before = places[_AT_ROW], places[_DOUBLES]
        to = text_offsets[row]
        if is_done[row]:
            behind = _write_text(
                values, value_offsets[row], value_offsets[row + 1], dictionaries, dictionary_offsets[row],
                dictionary_offsets[row + 1], texts, to, doubles, double_at, levels, digits, places,
            )  # fmt: skip
            if behind == _NO_ROOM and i64(len(texts)) - to < i64(text_bytes_max):
                places[_DOUBLES] = doubles_before
                return
            is_done[row] = behind >= 0
            if behind >= 0:
                to = behind
            else:
                places[_DOUBLES] = doubles_before
        text_offsets[row + 1] = to
        places[_AT_ROW] = row + 1


@inlined_part
def _number_at(data: Bytes, at: int, width: int) -> int:
    """Read an unsigned number, the lowest byte first."""
    number = i64(0)
    for i in range(width):
        number |= i64(load_u8(data, at + i)) << (8 * i)
    return number


@inlined_part
def _signed_at(data: Bytes, at: int, width: int) -> int:
    shift = 64 - 8 * width
    return (_number_at(data, at, width) << shift) >> shift


@kernel_part
def _write_text(
    values: Bytes, at: int, end: int, dictionaries: Bytes, dictionary_at: int, dictionary_end: int, texts: Bytes,
    to: int, doubles: Column, double_at: Column, levels: Column, digits: Bytes, places: Column,
) -> int:  # fmt: skip
    """Write one variant. Returns the position behind its text."""
    room, depth, left = i64(len(texts)), i64(0), i64(end - at)
    names_width, names = i64(1), i64(0)
    if dictionary_at >= dictionary_end or load_u8(dictionaries, dictionary_at) & 0x0F != 1:
        return _DAMAGED
    names_width = (i64(load_u8(dictionaries, dictionary_at)) >> 6) + 1
    if dictionary_at + 1 + names_width > dictionary_end:
        return _DAMAGED
    names = _number_at(dictionaries, dictionary_at + 1, names_width)
    names_at = dictionary_at + 1 + names_width
    name_bytes_at = names_at + (names + 1) * names_width
    if name_bytes_at > dictionary_end:
        return _DAMAGED
    while True:
        if at >= end or left <= 0:
            return _DAMAGED
        if to + 64 > room:
            return _NO_ROOM
        header = i64(load_u8(values, at))
        basic, kind = header & 3, header >> 2
        size = i64(1)
        if basic == _SHORT_STRING or (basic == 0 and kind == _LONG_STRING):
            at += 1
            length = kind
            if basic == 0:
                if at + 4 > end:
                    return _DAMAGED
                length = _number_at(values, at, 4)
                at += 4
                size += 4
            if at + length > end:
                return _DAMAGED
            if to + 6 * length + 2 > room:
                return _NO_ROOM
            to = _write_quoted(values, at, length, texts, to)
            size += length
        elif basic == 0:
            if kind <= _FALSE:
                first = i64(0) if kind == _NULL else i64(4) if kind == _TRUE else i64(8)
                length = i64(5) if kind == _FALSE else i64(4)
                copy_bytes(texts, to, _WORDS, first, length)
                to += length
            elif kind <= _INT64:
                width = i64(1) << (kind - _INT8)
                if at + 1 + width > end:
                    return _DAMAGED
                number = _signed_at(values, at + 1, width)
                magnitude = u64(number) if number >= 0 else ~u64(number) + u64(1)
                to = _write_digits(texts, to, digits, number < 0, u64(0), magnitude, i64(0))
                size += width
            elif kind == _DOUBLE:
                if at + 9 > end:
                    return _DAMAGED
                bits = _number_at(values, at + 1, 8)
                if (bits >> 52) & 0x7FF == 0x7FF:
                    # Infinity or NaN.
                    return _DAMAGED
                doubles[places[_DOUBLES]], double_at[places[_DOUBLES]] = bits, to
                places[_DOUBLES] += 1
                # A placeholder, so that each double has its own position.
                texts[to] = u8(_ZERO)
                to += 1
                size += 8
            elif kind <= _DECIMAL16:
                width = i64(4) << (kind - _DECIMAL4)
                if at + 2 + width > end:
                    return _DAMAGED
                scale = i64(load_u8(values, at + 1))
                if scale > _DECIMAL16_DIGITS:
                    return _DAMAGED
                low_signed = _signed_at(values, at + 2, min(width, 8))
                high_signed = _number_at(values, at + 10, 8) if width == 16 else low_signed >> 63
                high, low = u64(high_signed), u64(low_signed)
                if high_signed < 0:
                    low = ~low + u64(1)
                    high = ~high + u64(low == u64(0))
                to = _write_digits(texts, to, digits, high_signed < 0, high, low, scale)
                size += 1 + width
            else:
                return _DAMAGED
        else:
            is_object = basic == _BASIC_OBJECT
            width = (kind & 3) + 1
            number_width = ((kind >> 2) & 3) + 1 if is_object else i64(0)
            is_large = (kind >> 4) & 1 if is_object else (kind >> 2) & 1
            count_width = i64(4) if is_large else i64(1)
            if depth == DEPTH_MAX or at + 1 + count_width > end:
                return _DAMAGED
            count = _number_at(values, at + 1, count_width)
            size += count_width + count * number_width + (count + 1) * width
            if at + size > end:
                return _DAMAGED
            levels[_NEXT, depth], levels[_COUNT, depth], levels[_WIDTH, depth] = 0, count, width
            levels[_NAMES_AT, depth], levels[_NAMES_WIDTH, depth] = at + 1 + count_width, number_width
            levels[_OFFSETS_AT, depth] = at + 1 + count_width + count * number_width
            levels[_VALUES_AT, depth] = at + size
            depth += 1
            texts[to] = u8(_OPEN_OBJECT if is_object else _OPEN_ARRAY)
            to += 1
        left -= size
        while depth > 0 and levels[_NEXT, depth - 1] == levels[_COUNT, depth - 1]:
            depth -= 1
            if to + 64 > room:
                return _NO_ROOM
            texts[to] = u8(_CLOSE_OBJECT if levels[_NAMES_WIDTH, depth] > 0 else _CLOSE_ARRAY)
            to += 1
        if depth == 0:
            return to if left >= 0 else i64(_DAMAGED)
        level = depth - 1
        member = levels[_NEXT, level]
        levels[_NEXT, level] = member + 1
        if member > 0:
            texts[to] = u8(_COMMA)
            to += 1
        number_width = levels[_NAMES_WIDTH, level]
        if number_width > 0:
            number = _number_at(values, levels[_NAMES_AT, level] + member * number_width, number_width)
            if number >= names:
                return _DAMAGED
            first = _number_at(dictionaries, names_at + number * names_width, names_width)
            last = _number_at(dictionaries, names_at + (number + 1) * names_width, names_width)
            if last < first or name_bytes_at + last > dictionary_end:
                return _DAMAGED
            if to + 6 * (last - first) + 64 > room:
                return _NO_ROOM
            to = _write_quoted(dictionaries, name_bytes_at + first, last - first, texts, to)
            texts[to] = u8(_COLON)
            to += 1
        width = levels[_WIDTH, level]
        at = levels[_VALUES_AT, level] + _number_at(values, levels[_OFFSETS_AT, level] + member * width, width)


@inlined_part
def _write_quoted(data: Bytes, at: int, length: int, texts: Bytes, to: int) -> int:
    """Write a string. The caller has made enough room even if every character is escaped."""
    texts[to] = u8(_QUOTE)
    to += 1
    for i in range(at, at + length):
        sign = load_u8(data, i)
        if sign >= _SPACE and sign != _QUOTE and sign != _BACKSLASH:
            texts[to] = sign
            to += 1
            continue
        letter = i64(0)
        for escaped, its_letter in _ESCAPES:
            if sign == escaped:
                letter = i64(its_letter)
        texts[to] = u8(_BACKSLASH)
        if letter > 0:
            texts[to + 1] = u8(letter)
            to += 2
        else:
            texts[to + 1], texts[to + 2], texts[to + 3] = u8(ord("u")), u8(_ZERO), u8(_ZERO)
            texts[to + 4], texts[to + 5] = _HEX[sign >> 4], _HEX[sign & 15]
            to += 6
    texts[to] = u8(_QUOTE)
    return to + 1


@inlined_part
def _write_digits(texts: Bytes, to: int, digits: Bytes, is_negative: bool, high: int, low: int, scale: int) -> int:
    """Write a 128-bit number, with `scale` of its digits behind a point."""
    if is_negative:
        texts[to] = u8(_MINUS)
        to += 1
    count = i64(0)
    while high > u64(0) or low > u64(0) or count <= scale:
        digit = u64(0)
        if high == u64(0):
            digit = low % u64(10)
            low //= u64(10)
        else:
            # Divide 32 bits at a time, so that the remainder and the next bits fit a word.
            upper, rest = high // u64(10), high % u64(10)
            middle = (rest << u64(32)) | (low >> u64(32))
            lower = ((middle % u64(10)) << u64(32)) | (low & u64(0xFFFFFFFF))
            digit = lower % u64(10)
            high, low = upper, ((middle // u64(10)) << u64(32)) | (lower // u64(10))
        digits[count] = u8(digit) + u8(_ZERO)
        count += 1
    for i in range(count):
        if i > 0 and count - i == scale:
            texts[to] = u8(_POINT)
            to += 1
        texts[to] = digits[count - 1 - i]
        to += 1
    return to
