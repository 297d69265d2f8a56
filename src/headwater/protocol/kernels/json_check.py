"""Check whether a value is JSON. The server sets the datatype by this, whatever the writer claims.

A strict reading of RFC 8259: UTF-8 without a byte order mark, one value, white space around it. Nesting beyond
`DEPTH_MAX` counts as not JSON, so that no reader downstream has to follow it.
"""

from __future__ import annotations

from headwater.kernels.memory import Bytes, borrowed, inlined_part, kernel, kernel_part, load_u8, local_bytes

DEPTH_MAX = 512

_OBJECT, _ARRAY = 1, 2

# What may come next: the states between two tokens.
_VALUE, _FIRST_KEY, _KEY, _COLON, _COMMA_OR_END, _FIRST_VALUE, _DONE = range(7)

_SPACE, _LINE_FEED, _RETURN, _TAB = b" \n\r\t"
_LEFT_BRACE, _RIGHT_BRACE, _LEFT_BRACKET, _RIGHT_BRACKET = b"{}[]"
_COLON_MARK, _COMMA_MARK, _QUOTE, _BACKSLASH, _SLASH = b':,"\\/'
_MINUS, _PLUS, _POINT, _ZERO, _NINE = b"-+.09"
_A, _B, _E, _F, _L, _N, _R, _S, _T, _U = b"abeflnrstu"
_UPPER_A, _UPPER_E, _UPPER_F = b"AEF"


NOT_JSON, TOO_DEEP = 0, -1
"""Returned in place of a number of levels."""


@kernel
def is_json(data: Bytes, start: int, end: int) -> bool:
    return bool(_levels(borrowed(data), start, end) > 0)


@kernel
def count_levels(data: Bytes, start: int, end: int) -> int:
    """Return the levels of a JSON value: one for a string or a number, and one more for each container around the
    innermost value; `NOT_JSON` or `TOO_DEEP` in place of that."""
    return _levels(borrowed(data), start, end)


@kernel_part
def _levels(data: Bytes, start: int, end: int) -> int:
    stack = local_bytes(DEPTH_MAX)
    depth = 0
    levels = 0
    expect = _VALUE
    at = start
    while True:
        at = _white_end(data, at, end)
        if at >= end:
            return levels if expect == _DONE else NOT_JSON
        byte = data[at]
        if expect == _DONE:
            return NOT_JSON
        if expect == _COLON:
            if byte != _COLON_MARK:
                return NOT_JSON
            at += 1
            expect = _VALUE
        elif byte == _RIGHT_BRACE and expect == _FIRST_KEY:
            depth -= 1
            at += 1
            expect = _after_value(depth)
        elif expect == _FIRST_KEY or expect == _KEY:
            if byte != _QUOTE:
                return NOT_JSON
            at = _string_end(data, at, end)
            if at < 0:
                return NOT_JSON
            expect = _COLON
        elif expect == _COMMA_OR_END:
            inside = stack[depth - 1]
            if byte == _COMMA_MARK:
                expect = _KEY if inside == _OBJECT else _VALUE
            elif byte == (_RIGHT_BRACE if inside == _OBJECT else _RIGHT_BRACKET):
                depth -= 1
                expect = _after_value(depth)
            else:
                return NOT_JSON
            at += 1
        # A value, or the end of an empty array.
        elif byte == _LEFT_BRACE or byte == _LEFT_BRACKET:
            if depth == DEPTH_MAX:
                return TOO_DEEP
            stack[depth] = _OBJECT if byte == _LEFT_BRACE else _ARRAY
            depth += 1
            levels = max(levels, depth)
            at += 1
            expect = _FIRST_KEY if byte == _LEFT_BRACE else _FIRST_VALUE
        elif byte == _RIGHT_BRACKET and expect == _FIRST_VALUE:
            depth -= 1
            at += 1
            expect = _after_value(depth)
        else:
            at = _scalar_end(data, at, end)
            if at < 0:
                return NOT_JSON
            levels = max(levels, depth + 1)
            expect = _after_value(depth)


@inlined_part
def _after_value(depth: int) -> int:
    return _COMMA_OR_END if depth else _DONE


@inlined_part
def _white_end(data: Bytes, at: int, end: int) -> int:
    while at < end and (data[at] == _SPACE or data[at] == _LINE_FEED or data[at] == _RETURN or data[at] == _TAB):
        at += 1
    return at


@inlined_part
def _scalar_end(data: Bytes, at: int, end: int) -> int:
    """Return where the string, number or word that starts at `at` ends, or -1."""
    byte = data[at]
    if byte == _QUOTE:
        return _string_end(data, at, end)
    if byte == _MINUS or (_ZERO <= byte <= _NINE):
        return _number_end(data, at, end)
    return _word_end(data, at, end)


@kernel_part
def _string_end(data: Bytes, at: int, end: int) -> int:
    """Return where the string that starts at `at` ends, after its closing quote, or -1."""
    at += 1
    while at < end:
        byte = load_u8(data, at)
        if byte == _QUOTE:
            return at + 1
        if byte < _SPACE:
            return -1
        if byte == _BACKSLASH:
            at = _escape_end(data, at + 1, end)
            if at < 0:
                return -1
        elif byte < 0x80:
            at += 1
        else:
            at = _utf8_end(data, at, end)
            if at < 0:
                return -1
    return -1


@inlined_part
def _escape_end(data: Bytes, at: int, end: int) -> int:
    """Return where the escape whose backslash precedes `at` ends, or -1."""
    if at >= end:
        return -1
    escape = data[at]
    if escape == _U:
        if at + 4 >= end:
            return -1
        for i in range(1, 5):
            if not _is_hex_digit(data[at + i]):
                return -1
        return at + 5
    is_known = (
        escape == _QUOTE or escape == _BACKSLASH or escape == _SLASH or escape == _B
        or escape == _F or escape == _N or escape == _R or escape == _T
    )  # fmt: skip
    return at + 1 if is_known else -1


@kernel_part
def _is_hex_digit(byte: int) -> bool:
    return bool((_ZERO <= byte <= _NINE) or (_UPPER_A <= byte <= _UPPER_F) or (_A <= byte <= _F))


@inlined_part
def _utf8_end(data: Bytes, at: int, end: int) -> int:
    """Return where the multi-byte character that starts at `at` ends, or -1 if it is not well-formed UTF-8."""
    lead = data[at]
    if 0xC2 <= lead <= 0xDF:
        length = 2
    elif 0xE0 <= lead <= 0xEF:
        length = 3
    elif 0xF0 <= lead <= 0xF4:
        length = 4
    else:
        return -1
    if at + length > end:
        return -1
    second = data[at + 1]
    low = 0xA0 if lead == 0xE0 else (0x90 if lead == 0xF0 else 0x80)
    high = 0x9F if lead == 0xED else (0x8F if lead == 0xF4 else 0xBF)
    if second < low or second > high:
        return -1
    for i in range(2, length):
        if data[at + i] < 0x80 or data[at + i] > 0xBF:
            return -1
    return at + length


@kernel_part
def _digits_end(data: Bytes, at: int, end: int) -> int:
    while at < end and _ZERO <= data[at] <= _NINE:
        at += 1
    return at


@kernel_part
def _number_end(data: Bytes, at: int, end: int) -> int:
    """Return where the number that starts at `at` ends, or -1."""
    if data[at] == _MINUS:
        at += 1
    if at >= end:
        return -1
    if data[at] == _ZERO:
        at += 1
    else:
        digits = _digits_end(data, at, end)
        if digits == at:
            return -1
        at = digits
    if at < end and data[at] == _POINT:
        digits = _digits_end(data, at + 1, end)
        if digits == at + 1:
            return -1
        at = digits
    if at < end and (data[at] == _E or data[at] == _UPPER_E):
        at += 1
        if at < end and (data[at] == _PLUS or data[at] == _MINUS):
            at += 1
        digits = _digits_end(data, at, end)
        if digits == at:
            return -1
        at = digits
    return at


@kernel_part
def _word_end(data: Bytes, at: int, end: int) -> int:
    """Return where `true`, `false` or `null` at `at` ends, or -1."""
    if end - at >= 4:
        if data[at] == _T and data[at + 1] == _R and data[at + 2] == _U and data[at + 3] == _E:
            return at + 4
        if data[at] == _N and data[at + 1] == _U and data[at + 2] == _L and data[at + 3] == _L:
            return at + 4
    if (
        end - at >= 5 and data[at] == _F and data[at + 1] == _A and data[at + 2] == _L
        and data[at + 3] == _S and data[at + 4] == _E
    ):  # fmt: skip
        return at + 5
    return -1
