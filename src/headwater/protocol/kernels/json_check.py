"""Is a value JSON? The server sets the datatype by this, whatever the writer claims.

A strict reading of RFC 8259: UTF-8 without a mark, one value, white space around it. Nesting beyond `DEPTH_MAX`
counts as not JSON, so that nobody downstream has to follow it.
"""

from __future__ import annotations

import numpy as np

from headwater.protocol.kernels.memory import Bytes, kernel

DEPTH_MAX = 512

_OBJECT, _ARRAY = 1, 2

# What may come next: the states between two tokens.
_VALUE, _FIRST_KEY, _KEY, _COLON, _COMMA_OR_END, _FIRST_VALUE, _DONE = range(7)


@kernel
def is_json(data: Bytes, start: int, end: int) -> bool:
    stack = np.empty(DEPTH_MAX, dtype=np.uint8)
    depth = 0
    expect = _VALUE
    at = start
    while True:
        while at < end and (data[at] == 0x20 or data[at] == 0x0A or data[at] == 0x0D or data[at] == 0x09):
            at += 1
        if at >= end:
            return bool(expect == _DONE)
        byte = data[at]
        if expect == _DONE:
            return False
        if expect == _COLON:
            if byte != 0x3A:
                return False
            at += 1
            expect = _VALUE
            continue
        if expect == _FIRST_KEY or expect == _KEY:
            if byte == 0x7D and expect == _FIRST_KEY:
                depth -= 1
                at += 1
                expect = _COMMA_OR_END if depth else _DONE
                continue
            if byte != 0x22:
                return False
            at = _string_end(data, at, end)
            if at < 0:
                return False
            expect = _COLON
            continue
        if expect == _COMMA_OR_END:
            inside = stack[depth - 1]
            if byte == 0x2C:
                expect = _KEY if inside == _OBJECT else _VALUE
            elif (byte == 0x7D and inside == _OBJECT) or (byte == 0x5D and inside == _ARRAY):
                depth -= 1
                expect = _COMMA_OR_END if depth else _DONE
            else:
                return False
            at += 1
            continue
        # A value, or the end of an empty array.
        if byte == 0x7B or byte == 0x5B:
            if depth == DEPTH_MAX:
                return False
            stack[depth] = _OBJECT if byte == 0x7B else _ARRAY
            depth += 1
            at += 1
            expect = _FIRST_KEY if byte == 0x7B else _FIRST_VALUE
            continue
        if byte == 0x5D and expect == _FIRST_VALUE:
            depth -= 1
            at += 1
            expect = _COMMA_OR_END if depth else _DONE
            continue
        if byte == 0x22:
            at = _string_end(data, at, end)
        elif byte == 0x2D or (0x30 <= byte <= 0x39):
            at = _number_end(data, at, end)
        else:
            at = _word_end(data, at, end)
        if at < 0:
            return False
        expect = _COMMA_OR_END if depth else _DONE


@kernel
def _string_end(data: Bytes, at: int, end: int) -> int:
    """Behind the closing quote of the string that starts at `at`, or -1."""
    at += 1
    while at < end:
        byte = data[at]
        if byte == 0x22:
            return at + 1
        if byte < 0x20:
            return -1
        if byte == 0x5C:
            at += 1
            if at >= end:
                return -1
            escape = data[at]
            if escape == 0x75:
                if at + 4 >= end:
                    return -1
                for i in range(1, 5):
                    digit = data[at + i]
                    if not ((0x30 <= digit <= 0x39) or (0x41 <= digit <= 0x46) or (0x61 <= digit <= 0x66)):
                        return -1
                at += 5
            elif (
                escape == 0x22 or escape == 0x5C or escape == 0x2F or escape == 0x62
                or escape == 0x66 or escape == 0x6E or escape == 0x72 or escape == 0x74
            ):  # fmt: skip
                at += 1
            else:
                return -1
        elif byte < 0x80:
            at += 1
        else:
            at = _utf8_end(data, at, end)
            if at < 0:
                return -1
    return -1


@kernel
def _utf8_end(data: Bytes, at: int, end: int) -> int:
    """Behind the multi-byte character that starts at `at`, or -1 where it is not well-formed UTF-8."""
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


@kernel
def _digits_end(data: Bytes, at: int, end: int) -> int:
    while at < end and 0x30 <= data[at] <= 0x39:
        at += 1
    return at


@kernel
def _number_end(data: Bytes, at: int, end: int) -> int:
    if data[at] == 0x2D:
        at += 1
    if at >= end:
        return -1
    if data[at] == 0x30:
        at += 1
    else:
        digits = _digits_end(data, at, end)
        if digits == at:
            return -1
        at = digits
    if at < end and data[at] == 0x2E:
        digits = _digits_end(data, at + 1, end)
        if digits == at + 1:
            return -1
        at = digits
    if at < end and (data[at] == 0x65 or data[at] == 0x45):
        at += 1
        if at < end and (data[at] == 0x2B or data[at] == 0x2D):
            at += 1
        digits = _digits_end(data, at, end)
        if digits == at:
            return -1
        at = digits
    return at


@kernel
def _word_end(data: Bytes, at: int, end: int) -> int:
    """Behind `true`, `false` or `null` at `at`, or -1."""
    if end - at >= 4:
        if data[at] == 0x74 and data[at + 1] == 0x72 and data[at + 2] == 0x75 and data[at + 3] == 0x65:
            return at + 4
        if data[at] == 0x6E and data[at + 1] == 0x75 and data[at + 2] == 0x6C and data[at + 3] == 0x6C:
            return at + 4
    if (
        end - at >= 5 and data[at] == 0x66 and data[at + 1] == 0x61 and data[at + 2] == 0x6C
        and data[at + 3] == 0x73 and data[at + 4] == 0x65
    ):  # fmt: skip
        return at + 5
    return -1
