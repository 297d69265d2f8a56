"""Sub-document look-ups for kernels: answer a request with the parts of a JSON text that its paths lead to.

A part is copied without the space between its tokens. The read kernel uses these for what most clients send: plain
names and indexes. Anything else, such as paths with escapes, is left to `node.kv.subdocument`, which decides what
every path means, uses these kernels to find its parts, and must always agree. The text was checked to be JSON
(`is_json`), so nothing here checks whether a string or a container ends.
"""

from __future__ import annotations

from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Int64Rows,
    ReadOnlyBytes,
    UInt64s,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    kernel_part,
    load_u16,
    store_u16,
    store_u32,
    u16,
    u32,
    u64,
)
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.kernels.frame_runs import (
    RAW,
    SUBDOC_EXISTS,
    SUBDOC_GET,
    SUBDOC_MULTI_LOOKUP,
    write_response_header,
)
from headwater.protocol.messages.subdocument import SPECS_MAX
from headwater.protocol.status import Status

NEEDS_CLOSER_LOOK, NOT_THERE, MISMATCH = -1, -2, -3
"""Returned in place of the start of a part: the path does not exist, or meets a value that is no object or array."""
DEPTH_MAX = 31
"""Containers inside one another. A document has at most 32 levels, and the innermost value is one."""
RESULT_BYTES = 6
"""Status and length before each value in the answer to a look-up of many paths."""
_SPEC_BYTES = 4
"""Opcode, flags and length of the path before each path of such a look-up."""
_PATH_EXTRAS_BYTES = 3
"""In a look-up of one path: the length of the path, and its flags."""
_PATH_BYTES_MAX = 1024
_LOOKUP_BYTES_MAX = 32 * 1024
"""Limit for the key and all paths."""
_SUCCESS = int(Status.SUCCESS)
_PATH_ENOENT = int(Status.SUBDOC_PATH_ENOENT)
_PATH_MISMATCH = int(Status.SUBDOC_PATH_MISMATCH)
_MULTI_PATH_FAILURE = int(Status.SUBDOC_MULTI_PATH_FAILURE)
_COMPONENTS_MAX = 31
_INDEX_DIGITS_MAX = 9
_QUOTE, _BACKSLASH, _DOT, _COMMA, _MINUS = (ord(character) for character in '"\\.,-')
_OPEN_ARRAY, _CLOSE_ARRAY, _OPEN_OBJECT, _CLOSE_OBJECT, _BACKTICK = (ord(character) for character in "[]{}`")
_SPACE, _ZERO, _NINE, _LAST_ASCII, _A, _U = 0x20, ord("0"), ord("9"), 0x7E, ord("a"), ord("u")
_ESCAPES = tuple(b'"\\/bfnrt')
_ESCAPED = tuple(b'"\\/\b\f\n\r\t')
_FNV_START, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_HIGH_SURROGATES, _LOW_SURROGATES = 0xD800 >> 10, 0xDC00 >> 10


# --- requests and answers -----------------------------------------------------------------------------------------


@inlined_part
def has_lookup_lengths(opcode: int, extras_bytes: int, body_bytes: int) -> bool:
    """Whether an opcode is that of a look-up, and may have these lengths."""
    expected = 0 if opcode == SUBDOC_MULTI_LOOKUP else _PATH_EXTRAS_BYTES
    is_lookup = opcode in (SUBDOC_GET, SUBDOC_EXISTS, SUBDOC_MULTI_LOOKUP)
    return bool(is_lookup and extras_bytes == expected and body_bytes <= _LOOKUP_BYTES_MAX)


@inlined_part
def count_paths(data: Bytes, at: int, value_at: int, end: int) -> int:
    """Return how many paths the look-up at `at` has; 0 if they are not sound and plain: no flags, and none empty."""
    if data[at + 1] != SUBDOC_MULTI_LOOKUP:
        path_bytes = i64(load_u16(data, at + HEADER_BYTES))
        is_plain = 0 < path_bytes <= _PATH_BYTES_MAX and value_at + path_bytes == end and data[at + 26] == 0
        return 1 if is_plain else 0
    paths = 0
    while value_at < end:
        if end - value_at < _SPEC_BYTES or data[value_at + 1] != 0:
            return 0
        path_bytes = i64(load_u16(data, value_at + 2))
        is_known = data[value_at] == SUBDOC_GET or data[value_at] == SUBDOC_EXISTS
        value_at += _SPEC_BYTES + path_bytes
        paths += 1
        if not is_known or path_bytes == 0 or path_bytes > _PATH_BYTES_MAX or value_at > end or paths > SPECS_MAX:
            return 0
    return paths


@inlined_part
def answer_lookup(
    data: Bytes, at: int, value_at: int, end: int, cas: int, text: Bytes, body_at: int, body_end: int, answers: Bytes,
    to: int,
) -> int:  # fmt: skip
    """Answer the look-up at `at`, whose paths `count_paths` has found plain. Returns where the answer ends, or
    `NEEDS_CLOSER_LOOK`."""
    if data[at + 1] != SUBDOC_MULTI_LOOKUP:
        status, answer_end = _look_up(
            data[at + 1], text, body_at, body_end, data, value_at, end, answers, to + HEADER_BYTES
        )  # fmt: skip
        if status < 0:
            return NEEDS_CLOSER_LOOK
        if status != _SUCCESS:
            cas = u64(0)
        write_response_header(data, at, 0, 0, RAW, status, answer_end - to - HEADER_BYTES, cas, answers, to)
        return answer_end
    result_at = to + HEADER_BYTES
    overall = _SUCCESS
    while value_at < end:
        path_at = value_at + _SPEC_BYTES
        path_end = path_at + i64(load_u16(data, value_at + 2))
        status, result_end = _look_up(
            data[value_at], text, body_at, body_end, data, path_at, path_end, answers, result_at + RESULT_BYTES
        )  # fmt: skip
        if status < 0:
            return NEEDS_CLOSER_LOOK
        store_u16(answers, result_at, u16(status))
        store_u32(answers, result_at + 2, u32(result_end - result_at - RESULT_BYTES))
        if status != _SUCCESS:
            overall = _MULTI_PATH_FAILURE
        result_at = result_end
        value_at = path_end
    write_response_header(data, at, 0, 0, RAW, overall, result_at - to - HEADER_BYTES, cas, answers, to)
    return result_at


@inlined_part
def _look_up(
    opcode: int, text: Bytes, body_at: int, body_end: int, data: Bytes, path_at: int, path_end: int, answers: Bytes,
    to: int,
) -> tuple[int, int]:  # fmt: skip
    """Write the value of one path to `to`. Returns its status, -1 if it needs a closer look, and where it ends."""
    start, stop = find_part(text, body_at, body_end, data, path_at, path_end)
    if start == NEEDS_CLOSER_LOOK:
        return i64(-1), to
    if start < 0:
        return i64(_PATH_ENOENT if start == NOT_THERE else _PATH_MISMATCH), to
    if opcode == SUBDOC_EXISTS:
        return i64(_SUCCESS), to
    return i64(_SUCCESS), copy_compact(answers, to, text, start, stop)


# --- paths --------------------------------------------------------------------------------------------------------


@kernel_part
def is_shallow_container(data: Bytes, at: int, end: int) -> bool:
    """Whether JSON is an object or an array, with no more levels than paths can certainly point into."""
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
    """Return where the part starts and ends that a path leads to; one of the numbers above in place of the start."""
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
    """Whether a path has only plain names and indexes, and not too many of them."""
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
    """Return where a name ends, at a dot or a bracket; -1 if it is empty or has a character that may be escaped."""
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
    """Return an index in brackets, -1 for the last element, and where it ends: -1 if there is none."""
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
    """Return `at` if a dot, another index or nothing follows an index, else -1."""
    return at if at == end or path[at] == _DOT or path[at] == _OPEN_ARRAY else i64(-1)


# --- walking over checked text ------------------------------------------------------------------------------------


@kernel_part
def _skip_space(data: Bytes, at: int, end: int) -> int:
    while at < end and data[at] <= _SPACE:
        at += 1
    return at


@kernel_part
def _string_end(data: Bytes, at: int) -> int:
    """Return where the string that starts at `at` ends, after its quote."""
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
    """Return where an element of the array at `at` starts."""
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
    """Return where the value of a member of the object at `at` starts. Of two with one name the last one counts."""
    at = _skip_space(data, at + 1, end)
    found = i64(NOT_THERE)
    while data[at] != _CLOSE_OBJECT:
        name_end = _string_end(data, at)
        is_same = _is_name(data, at + 1, name_end - 1, path, name_at, name_at + name_bytes)
        at = _value_of(data, at, end)
        if is_same:
            found = at
        at = _past_item(data, _value_end(data, at, end), end)
    return found


@inlined_part
def _value_of(data: Bytes, at: int, end: int) -> int:
    """Return where the value of a member starts, whose name starts at `at`."""
    at = _skip_space(data, _string_end(data, at), end)
    return _skip_space(data, at + 1, end)


@inlined_part
def _past_item(data: Bytes, at: int, end: int) -> int:
    """Return where the next item of a container, or its closing bracket, is after the value that ends at `at`."""
    at = _skip_space(data, at, end)
    return _skip_space(data, at + 1, end) if data[at] == _COMMA else at


@kernel_part
def _is_name(data: Bytes, at: int, end: int, name: Bytes, name_at: int, name_end: int) -> bool:
    """Whether the string between two quotes is equal to a name, which is in UTF-8 and has no escapes."""
    while at < end and name_at < name_end:
        if data[at] != _BACKSLASH:
            if data[at] != name[name_at]:
                return False
            at += 1
            name_at += 1
            continue
        character, at = _escaped(data, at + 1)
        name_at = _past_character(name, name_at, name_end, character)
        if name_at < 0:
            return False
    return bool(at == end and name_at == name_end)


@kernel_part
def _escaped(data: Bytes, at: int) -> tuple[int, int]:
    """Return the character of an escape, after its backslash, and where it ends. Half a surrogate stays one."""
    if data[at] != _U:
        for place in range(len(_ESCAPES)):
            if data[at] == _ESCAPES[place]:
                return i64(_ESCAPED[place]), at + 1
    code = _hex(data, at + 1)
    at += 5
    if code >> 10 == _HIGH_SURROGATES and data[at] == _BACKSLASH and data[at + 1] == _U:
        low = _hex(data, at + 2)
        if low >> 10 == _LOW_SURROGATES:
            return 0x10000 + ((code & 0x3FF) << 10) + (low & 0x3FF), at + 6
    return code, at


@kernel_part
def _hex(data: Bytes, at: int) -> int:
    """Return four hexadecimal digits as a number."""
    number = i64(0)
    for place in range(4):
        digit = i64(data[at + place])
        number = number << 4 | (digit - _ZERO if digit <= _NINE else (digit | 0x20) - _A + 10)
    return number


@kernel_part
def _past_character(name: Bytes, at: int, end: int, character: int) -> int:
    """Return where a name continues after a character, or -1 if it does not have that character there."""
    size = _utf8_bytes(character)
    if at + size > end:
        return i64(-1)
    for place in range(size):
        if name[at + place] != _utf8_byte(character, size, place):
            return i64(-1)
    return at + size


@inlined_part
def _utf8_bytes(character: int) -> int:
    return i64(1) + (character >= 0x80) + (character >= 0x800) + (character >= 0x10000)


@inlined_part
def _utf8_byte(character: int, size: int, place: int) -> int:
    """Return a byte of a character in UTF-8. Half a surrogate gets bytes that no UTF-8 has."""
    bits = character >> (6 * (size - 1 - place))
    if place > 0:
        return 0x80 | bits & 0x3F
    return bits if size == 1 else (0xF00 >> size) & 0xFF | bits


# --- for the sub-document engine ----------------------------------------------------------------------------------
#
# `node.kv.subdocument.json_text` calls these with documents of any size, in a worker if they are large. An object or
# array is given by the position of its bracket.


@kernel
def trimmed(data: AnyBytes) -> tuple[int, int]:
    """Return where the value of a text starts and ends, without the space around it."""
    end = len(data)
    while end > 0 and data[end - 1] <= _SPACE:
        end -= 1
    return _skip_space(data, i64(0), end), i64(end)


@kernel
def find_member(data: AnyBytes, at: int, end: int, name: ReadOnlyBytes) -> tuple[int, int]:
    """Return where the value of a member of an object starts and ends; `NOT_THERE` in place of the start."""
    found = _member(data, i64(at), end, name, i64(0), len(name))
    return found, _value_end(data, found, end) if found >= 0 else i64(0)


@kernel
def find_element(data: AnyBytes, at: int, end: int, index: int) -> tuple[int, int]:
    """Return where an element of an array starts and ends, -1 for the last; `NOT_THERE` in place of the start."""
    found = _element(data, i64(at), end, index)
    return found, _value_end(data, found, end) if found >= 0 else i64(0)


@kernel
def find_scalar(data: AnyBytes, at: int, end: int, scalar: ReadOnlyBytes) -> int:
    """Return where the element of an array starts that is written like a string, number or word; `NOT_THERE`, or
    `MISMATCH` if an object or array comes before it."""
    at = _skip_space(data, i64(at) + 1, end)
    while data[at] != _CLOSE_ARRAY:
        if data[at] == _OPEN_ARRAY or data[at] == _OPEN_OBJECT:
            return i64(MISMATCH)
        value_end = _value_end(data, at, end)
        if value_end - at == len(scalar):
            place = 0
            while place < len(scalar) and data[at + place] == scalar[place]:
                place += 1
            if place == len(scalar):
                return at
        at = _past_item(data, value_end, end)
    return i64(NOT_THERE)


@kernel
def count_items(data: AnyBytes, at: int, end: int) -> int:
    """Count the elements of an array, or the members of an object."""
    is_object = data[at] == _OPEN_OBJECT
    at = _skip_space(data, i64(at) + 1, end)
    items = i64(0)
    while data[at] != _CLOSE_ARRAY and data[at] != _CLOSE_OBJECT:
        if is_object:
            at = _value_of(data, at, end)
        at = _past_item(data, _value_end(data, at, end), end)
        items += 1
    return items


@kernel
def hash_names(data: AnyBytes, at: int, end: int, hashes: UInt64s) -> None:
    """Hash the name of each member of an object, whatever its escapes (FNV-1a)."""
    at = _skip_space(data, i64(at) + 1, end)
    for item in range(len(hashes)):
        name_end = _string_end(data, at) - 1
        place = at + 1
        hashed = u64(_FNV_START)
        while place < name_end:
            if data[place] != _BACKSLASH:
                hashed = (hashed ^ u64(data[place])) * u64(_FNV_PRIME)
                place += 1
                continue
            character, place = _escaped(data, place + 1)
            size = _utf8_bytes(character)
            for byte in range(size):
                hashed = (hashed ^ u64(_utf8_byte(character, size, byte))) * u64(_FNV_PRIME)
        hashes[item] = hashed
        at = _past_item(data, _value_end(data, _value_of(data, at, end), end), end)


@kernel
def find_members(data: AnyBytes, at: int, end: int, places: Int64Rows) -> None:
    """Find where the names and the values of all members of an object start and end; names with their quotes."""
    at = _skip_space(data, i64(at) + 1, end)
    for item in range(len(places)):
        places[item, 0] = at
        places[item, 1] = _string_end(data, at)
        at = _value_of(data, at, end)
        places[item, 2] = at
        places[item, 3] = _value_end(data, at, end)
        at = _past_item(data, places[item, 3], end)


@kernel
def copy_without(data: AnyBytes, at: int, end: int, name: ReadOnlyBytes, index: int, target: Bytes) -> int:
    """Copy a text without the members of an object that have a name, or without one element of an array. Returns where
    the copy ends.

    An item is left out together with the comma before it. If none is kept before it, the first item that is kept moves
    up to the front.
    """
    is_object = data[at] == _OPEN_OBJECT
    at = _skip_space(data, i64(at) + 1, end)
    front, previous_end, copied, to, item = at, at, i64(0), i64(0), i64(0)
    has_kept = False
    while data[at] != _CLOSE_ARRAY and data[at] != _CLOSE_OBJECT:
        is_doomed = item == index
        value_at = at
        if is_object:
            is_doomed = _is_name(data, at + 1, _string_end(data, at) - 1, name, i64(0), len(name))
            value_at = _value_of(data, at, end)
        value_end = _value_end(data, value_at, end)
        # What is left out so far starts after the last item that was kept, or at the first item.
        if not is_doomed and not has_kept:
            copy_bytes(target, to, data, copied, front - copied)
            to += front - copied
            copied = at
            has_kept = True
        elif is_doomed and has_kept:
            copy_bytes(target, to, data, copied, previous_end - copied)
            to += previous_end - copied
            copied = value_end
        previous_end = value_end
        at = _past_item(data, value_end, end)
        item += 1
    if not has_kept:
        copy_bytes(target, to, data, copied, front - copied)
        to += front - copied
        copied = previous_end
    copy_bytes(target, to, data, copied, len(data) - copied)
    return to + len(data) - copied


@kernel
def copy_part(data: AnyBytes, at: int, end: int, target: Bytes) -> int:
    """Copy JSON without the space between its tokens. Returns where the copy ends."""
    return copy_compact(target, i64(0), data, i64(at), end)
