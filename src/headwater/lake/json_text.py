"""The parts of a JSON text that kernels pass over, compare and copy: space, strings and their escapes.

The text has been called JSON by a server that looked: nothing here checks more than it needs in order never to leave
it. `json_fields` finds values with these, and `headwater.spark.variants` copies them.
"""

from __future__ import annotations

from headwater.protocol.kernels.memory import (
    Bytes,
    i64,
    inlined_part,
    kernel_part,
    leading_zeros,
    load_u8,
    load_u64,
    u8,
    u64,
)

_QUOTE, _BACKSLASH, _ZERO, _NINE, _U = (ord(sign) for sign in '"\\09u')
_LOW_BITS, _QUOTES, _BACKSLASHES = (u64(sign * 0x0101010101010101) for sign in (0x7F, _QUOTE, _BACKSLASH))
_ESCAPED_SIGNS = tuple(b'"\\/bfnrt')
_ESCAPED_CODES = tuple(b'"\\/\b\f\n\r\t')


@inlined_part
def skip_space(data: Bytes, at: int, end: int) -> int:
    while at < end and (load_u8(data, at) == 32 or (9 <= load_u8(data, at) <= 13)):
        at += 1
    return at


@inlined_part
def _zero_bytes(word: int) -> int:
    """The highest bit of each of eight bytes that is zero. No carry goes from one byte into the next."""
    return ~(((word & _LOW_BITS) + _LOW_BITS) | word | _LOW_BITS)


@inlined_part
def skip_string(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """From behind the opening quote to behind the closing one, or beyond the end; and whether it has escapes."""
    has_escapes = False
    while True:
        found = u64(0)
        while found == u64(0) and at + 8 <= end:
            word = load_u64(data, at)
            found = _zero_bytes(word ^ _QUOTES) | _zero_bytes(word ^ _BACKSLASHES)
            at += leading_zeros(found) >> 3
        while found == u64(0) and at < end and load_u8(data, at) != _QUOTE and load_u8(data, at) != _BACKSLASH:
            at += 1
        if at >= end or load_u8(data, at) == _QUOTE:
            return at + 1, has_escapes
        has_escapes = True
        at += 2


@inlined_part
def begins_with_name(data: Bytes, start: int, end: int, names: Bytes, name_at: int, name_end: int) -> bool:
    """Whether a text begins with a name and the quote behind it."""
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
    """The number that four hexadecimal digits write, or -1."""
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
    """From a backslash: the code point that it stands for, and what is behind it; -1 where it stands for none.

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
    """Write what a string with escapes says. Returns what is behind it, or -1. No escape is shorter than its UTF-8."""
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
