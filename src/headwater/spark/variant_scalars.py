"""The scalars of Spark's VARIANT: strings, numbers, true, false and null, read from JSON texts.

A number takes the smallest integer that holds it, else a decimal of 9, 18 or 38 digits. One that is written with an
exponent, or longer, is a double. `variants` has the rest of the encoding, and has checked that the texts are JSON.
"""

from __future__ import annotations

import numpy as np

from headwater.lake.json_text import skip_string, unescape
from headwater.protocol.kernels.memory import (
    Bytes,
    Column,
    copy_bytes,
    i64,
    inlined_part,
    kernel_part,
    leading_zeros,
    load_u8,
    move_bytes,
    multiply_high,
    u8,
    u64,
)

_SHORT_STRING = 1
"""The two lowest bits of a string that is short. Those of any other scalar are 0, and its type is the bits above."""
_NULL, _TRUE, _FALSE, _INT8, _INT16, _INT32, _INT64, _DOUBLE, _DECIMAL4, _DECIMAL8, _DECIMAL16 = range(11)
_LONG_STRING = 16
_SHORT_STRING_MAX = 0x3F
U8_MAX, _U16_MAX = 0xFF, 0xFFFF


@inlined_part
def width_of(number: int) -> int:
    """How many bytes a number takes, below 2^24."""
    return i64(1) if number <= U8_MAX else i64(2) if number <= _U16_MAX else i64(3)


@inlined_part
def put_number(values: Bytes, at: int, number: int, width: int) -> None:
    """Write a number, the lowest byte first."""
    for i in range(width):
        values[at + i] = u8((number >> (8 * i)) & 0xFF)


@inlined_part
def write_string(data: Bytes, at: int, end: int, values: Bytes, to: int) -> tuple[int, int]:
    """From behind an opening quote. Returns what is behind the string in both, or -1 where it is no text."""
    behind, has_escapes = skip_string(data, at, end)
    length = behind - 1 - at
    if has_escapes:
        # Where it lies if it is long. It is not longer than it was with escapes.
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
_WORD_DIGITS = 19
"""So many digits fit 64 bits, whatever they are."""
_EXPONENT_MAX = 9999
_POWER_MIN, _POWER_MAX = -342, 308
"""Powers of ten with which a number of 19 digits can be a double and not zero."""


def _powers_of_ten() -> tuple[Column, Column, Column]:
    """Each as a number of 128 bits, the highest of which is set, in two halves, and a power of two. Rounded down."""
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
def write_number_or_word(data: Bytes, at: int, end: int, values: Bytes, to: int) -> tuple[int, int]:
    """Write a number, true, false or null. Returns what is behind it in both; -1 if it is left to Spark's parser."""
    sign = load_u8(data, at)
    if sign == _T or sign == _F or sign == _N:
        values[to] = u8((_TRUE if sign == _T else _FALSE if sign == _F else _NULL) << 2)
        return at + (5 if sign == _F else 4), to + 1
    is_negative = sign == _MINUS
    at += is_negative
    # What the digits say without the point is high * 2^64 + low. Zeros before the first other digit are not counted.
    high, low, digits, scale, is_integer = u64(0), u64(0), i64(0), i64(0), True
    while at < end:
        sign = load_u8(data, at)
        if sign == _POINT:
            is_integer = False
        elif _ZERO <= sign <= _NINE:
            digit = u64(sign) - u64(_ZERO)
            if digits >= _WORD_DIGITS:
                high = high * u64(10) + multiply_high(low, u64(10))
            low = low * u64(10) + digit
            if digits >= _WORD_DIGITS and low < digit:
                high += u64(1)
            digits += digits > 0 or digit > u64(0)
            scale += not is_integer
        else:
            break
        at += 1
    if at < end and load_u8(data, at) | 32 == _SMALL_E:
        at, exponent = _read_exponent(data, at + 1, end)
        return at, _write_double(values, to, is_negative, low, digits, exponent - scale)
    if digits > _DECIMAL16_DIGITS or scale > _DECIMAL16_DIGITS:
        return at, _write_double(values, to, is_negative, low, digits, -scale)
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
    """The smallest type that holds it."""
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
def _write_double(values: Bytes, to: int, is_negative: bool, digits_read: int, digits: int, power: int) -> int:
    """The double nearest to digits_read * 10^power. -1 where that is not certain: see below.

    The power of ten is known to 128 bits, and the product of both with it: what it is too small by is less than 2 in
    its lowest bit. So a product can be rounded to the 53 bits of a double unless what is cut off is about a half.
    """
    bits = u64(0)
    if digits > 0:
        if digits > _WORD_DIGITS or not _POWER_MIN <= power <= _POWER_MAX:
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
        # 128 bits of the product are below `high`; a double has 52 behind its point, and 1023 is its exponent 0.
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
