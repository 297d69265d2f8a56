"""Sub-document paths for kernels: find a part of a JSON text, and copy it without the space between its tokens.

The read kernel uses these for what most clients send: plain names and indexes. Whatever needs a closer look, such as
names with escapes, is left to `node.kv.subdocument`, which decides what every path means and must always agree. The
text has been checked to be JSON (`is_json`), so that nothing here has to look whether a string or a container ends.
"""

from __future__ import annotations

from headwater.protocol.kernels.memory import Bytes, i64, kernel_part

NEEDS_CLOSER_LOOK, NOT_THERE, MISMATCH = -1, -2, -3
"""In place of where a part starts: the path does not exist, or meets a value that is no object or array."""
DEPTH_MAX = 31
"""Containers inside one another. A document has at most 32 levels, and the innermost value is one."""
_COMPONENTS_MAX = 31
_INDEX_DIGITS_MAX = 9
_QUOTE, _BACKSLASH, _DOT, _COMMA, _MINUS = (ord(character) for character in '"\\.,-')
_OPEN_ARRAY, _CLOSE_ARRAY, _OPEN_OBJECT, _CLOSE_OBJECT, _BACKTICK = (ord(character) for character in "[]{}`")
_SPACE, _ZERO, _NINE, _LAST_ASCII = 0x20, ord("0"), ord("9"), 0x7E


@kernel_part
def is_shallow_container(data: Bytes, at: int, end: int) -> bool:
    """Whether JSON is an object or an array, of levels that paths can point into for sure."""
    at = _skip_space(data, at, end)
    if at == end or (data[at] != _OPEN_OBJECT and data[at] != _OPEN_ARRAY):
        return False
    depth = i64(0)
    while at < end:
        byte = data[at]
        if byte == _QUOTE:
            at = _string_end(data, at)
            continue
        if byte == _OPEN_OBJECT or byte == _OPEN_ARRAY:
            depth += 1
            if depth > DEPTH_MAX:
                return False
        elif byte == _CLOSE_OBJECT or byte == _CLOSE_ARRAY:
            depth -= 1
        at += 1
    return True


@kernel_part
def find_part(data: Bytes, at: int, end: int, path: Bytes, path_at: int, path_end: int) -> tuple[int, int]:
    """Where the part starts and ends that a path leads to; one of the numbers above in place of the start."""
    if not _is_sound(path, path_at, path_end):
        return i64(NEEDS_CLOSER_LOOK), i64(0)
    at = _skip_space(data, at, end)
    while path_at < path_end:
        if path[path_at] == _OPEN_ARRAY:
            index, path_at = _index(path, path_at, path_end)
            if data[at] != _OPEN_ARRAY:
                return i64(MISMATCH), i64(0)
            at = _element(data, at, end, index)
        else:
            name_at = path_at
            path_at = _name_end(path, path_at, path_end)
            if data[at] != _OPEN_OBJECT:
                return i64(MISMATCH), i64(0)
            at = _member(data, at, end, path, name_at, path_at - name_at)
        if at < 0:
            return at, i64(0)
        if path_at < path_end and path[path_at] == _DOT:
            path_at += 1
    return at, _value_end(data, at, end)


@kernel_part
def copy_compact(target: Bytes, to: int, data: Bytes, at: int, end: int) -> int:
    """Copy JSON without the space between its tokens. Returns where the copy ends."""
    while at < end:
        if data[at] == _QUOTE:
            string_end = _string_end(data, at)
            while at < string_end:
                target[to] = data[at]
                at += 1
                to += 1
            continue
        if data[at] > _SPACE:
            target[to] = data[at]
            to += 1
        at += 1
    return to


# --- paths --------------------------------------------------------------------------------------------------------


@kernel_part
def _is_sound(path: Bytes, at: int, end: int) -> bool:
    """Whether a path is plain names and indexes, and not too many of them."""
    components = 0
    while at < end:
        components += 1
        at = _index(path, at, end)[1] if path[at] == _OPEN_ARRAY else _name_end(path, at, end)
        if at < 0 or components > _COMPONENTS_MAX:
            return False
        if at < end and path[at] == _DOT:
            at += 1
            if at == end:
                return False
    return components > 0


@kernel_part
def _name_end(path: Bytes, at: int, end: int) -> int:
    """Where a name ends, at a dot or a bracket; -1 where it is empty or has a character that may have to be escaped."""
    start = at
    while at < end and path[at] != _DOT and path[at] != _OPEN_ARRAY:
        byte = path[at]
        if byte < _SPACE or byte > _LAST_ASCII or byte == _QUOTE or byte == _BACKSLASH or byte == _BACKTICK:
            return -1
        if byte == _CLOSE_ARRAY:
            return -1
        at += 1
    return at if at > start else -1


@kernel_part
def _index(path: Bytes, at: int, end: int) -> tuple[int, int]:
    """An index in brackets, -1 for the last element, and where it ends: -1 where it is none."""
    at += 1
    if at + 2 < end and path[at] == _MINUS and path[at + 1] == _ZERO + 1 and path[at + 2] == _CLOSE_ARRAY:
        return i64(-1), _past_index(path, at + 3, end)
    start = at
    index = i64(0)
    while at < end and _ZERO <= path[at] <= _NINE and at - start < _INDEX_DIGITS_MAX:
        index = 10 * index + i64(path[at]) - _ZERO
        at += 1
    if at == start or at == end or path[at] != _CLOSE_ARRAY:
        return i64(0), i64(-1)
    return index, _past_index(path, at + 1, end)


@kernel_part
def _past_index(path: Bytes, at: int, end: int) -> int:
    """A dot, another index or nothing follows an index."""
    return at if at == end or path[at] == _DOT or path[at] == _OPEN_ARRAY else i64(-1)


# --- walking over checked text ------------------------------------------------------------------------------------


@kernel_part
def _skip_space(data: Bytes, at: int, end: int) -> int:
    while at < end and data[at] <= _SPACE:
        at += 1
    return at


@kernel_part
def _string_end(data: Bytes, at: int) -> int:
    """Where the string ends that starts there, behind its quote."""
    at += 1
    while data[at] != _QUOTE:
        at += 2 if data[at] == _BACKSLASH else 1
    return at + 1


@kernel_part
def _value_end(data: Bytes, at: int, end: int) -> int:
    if data[at] == _QUOTE:
        return _string_end(data, at)
    depth = i64(0)
    while at < end:
        byte = data[at]
        if byte == _QUOTE:
            at = _string_end(data, at)
            continue
        if byte == _OPEN_OBJECT or byte == _OPEN_ARRAY:
            depth += 1
        elif byte == _CLOSE_OBJECT or byte == _CLOSE_ARRAY:
            if depth == 0:
                return at
            depth -= 1
            if depth == 0:
                return at + 1
        elif depth == 0 and (byte == _COMMA or byte <= _SPACE):
            return at
        at += 1
    return at


@kernel_part
def _element(data: Bytes, at: int, end: int, index: int) -> int:
    """Where an element of the array starts that starts there."""
    at = _skip_space(data, at + 1, end)
    found = i64(NOT_THERE)
    number = i64(0)
    while data[at] != _CLOSE_ARRAY:
        if number == index:
            return at
        if index < 0:
            found = at
        at = _skip_space(data, _value_end(data, at, end), end)
        if data[at] == _COMMA:
            at = _skip_space(data, at + 1, end)
        number += 1
    return found


@kernel_part
def _member(data: Bytes, at: int, end: int, path: Bytes, name_at: int, name_bytes: int) -> int:
    """Where the value of a member of the object starts that starts there. Of two with one name the last one counts."""
    at = _skip_space(data, at + 1, end)
    found = i64(NOT_THERE)
    while data[at] != _CLOSE_OBJECT:
        name_end = _string_end(data, at)
        is_same = name_end - at - 2 == name_bytes
        for offset in range(name_end - at - 2):
            byte = data[at + 1 + offset]
            if byte == _BACKSLASH:
                return i64(NEEDS_CLOSER_LOOK)
            if is_same and byte != path[name_at + offset]:
                is_same = False
        at = _skip_space(data, name_end, end)
        at = _skip_space(data, at + 1, end)
        if is_same:
            found = at
        at = _skip_space(data, _value_end(data, at, end), end)
        if data[at] == _COMMA:
            at = _skip_space(data, at + 1, end)
    return found
