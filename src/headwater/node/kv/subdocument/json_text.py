"""JSON as text with positions, paths into it, and lookups.

A position locates a part of a document in its text, so that a mutation changes no other byte. Kernels scan the values
(`protocol.kernels.json_path`): nothing here parses values, and numbers keep their text and never become Python numbers.
A document may have 20 MB, so nothing here scans all of it while holding the interpreter's lock, as Python's JSON
scanner and regular expressions do: other connections must be served meanwhile. Functions raise `RequestRefused` with
the status of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from headwater.kernels.memory import Bytes
from headwater.protocol.features import Opcode
from headwater.protocol.kernels import json_check, json_path
from headwater.protocol.status import RequestRefused, Status

XATTR_UNKNOWN_VATTR_MACRO = Status(0xD5)
CAN_ONLY_REVIVE_DELETED_DOCUMENTS = Status(0xD6)
DELETED_DOCUMENT_CANT_HAVE_VALUE = Status(0xD7)
FIELD_NOT_BINARY_VALUE = Status(0xD8)


LEVELS_MAX = 32
"""The most levels of a document. The root counts as one, and so does a number or string in the innermost array."""

_WHITESPACE = b" \t\n\r"
_SPACE = re.compile(rb"[ \t\n\r]*+")


class Span(NamedTuple):
    """The position of one value, or of one member with its name, in the text."""

    start: int
    end: int


class Member(NamedTuple):
    """One `"name": value` of an object."""

    name: str
    value: Span


def _array(text: bytes) -> Bytes:
    return np.frombuffer(text, dtype=np.uint8)


# --- checking that text is JSON, and not too deep -------------------------------------------------------------------


def is_json(data: bytes) -> bool:
    """Whether the bytes are one JSON value of any kind. Decides a document's datatype, whatever its writer sent."""
    return bool(json_check.is_json(_array(data), 0, len(data)))


def document_text(data: bytes) -> bytes:
    """Return the text of a document after checking that it is JSON into which paths can point."""
    start = root(data).start
    # Couchbase's parser accepts no primitive as a whole document.
    if data[start : start + 1] not in (b"{", b"["):
        raise RequestRefused(Status.SUBDOC_DOC_NOT_JSON)
    _check(data, levels=LEVELS_MAX, not_json=Status.SUBDOC_DOC_NOT_JSON, too_deep=Status.SUBDOC_DOC_E2DEEP)
    return data


def value_text(value: bytes, *, levels: int) -> bytes:
    """The text of one new value, after checking it. It may have this many levels."""
    return _new_text(value, b"%b", levels=levels)


def values_text(value: bytes, *, levels: int) -> bytes:
    """The text of new values, separated by commas as in an array. Each may have this many levels."""
    return _new_text(value, b"[%b]", levels=levels + 1)


def _new_text(value: bytes, whole: bytes, *, levels: int) -> bytes:
    text = value.strip(_WHITESPACE)
    if not text:
        raise RequestRefused(Status.SUBDOC_VALUE_CANTINSERT)
    refusals = {"not_json": Status.SUBDOC_VALUE_CANTINSERT, "too_deep": Status.SUBDOC_VALUE_ETOODEEP}
    _check(whole % text, levels=levels, **refusals)
    return text


def _check(text: bytes, *, levels: int, not_json: Status, too_deep: Status) -> None:
    found = json_check.count_levels(_array(text), 0, len(text))
    if found == json_check.NOT_JSON:
        raise RequestRefused(not_json)
    if found == json_check.TOO_DEEP or found > levels:
        raise RequestRefused(too_deep)


# --- scanning checked text ------------------------------------------------------------------------------------------


def root(text: bytes) -> Span:
    return Span(*json_path.trimmed(_array(text)))


def member(text: bytes, container: Span, name: str) -> Span | None:
    """The value of a name. If the name occurs twice, the last one counts, as in a parser of the whole document."""
    start, end = json_path.find_member(_array(text), *container, _array(name.encode()))
    return None if start < 0 else Span(start, end)


def members(text: bytes, container: Span) -> Iterator[Member]:
    """The members of an object, in order."""
    places = np.empty((json_path.count_items(_array(text), *container), 4), dtype=np.int64)
    json_path.find_members(_array(text), *container, places)
    for name_start, name_end, start, end in places.tolist():
        yield Member(json.loads(text[name_start:name_end]), Span(start, end))


def element(text: bytes, container: Span, index: int) -> Span | None:
    start, end = json_path.find_element(_array(text), *container, index)
    return None if start < 0 else Span(start, end)


def scalar(text: bytes, array: Span, value: bytes) -> int:
    """The position of an element with exactly this text; `NOT_THERE`, or `MISMATCH` if a container comes first."""
    return int(json_path.find_scalar(_array(text), *array, _array(value)))


def count(text: bytes, container: Span) -> int:
    """The number of elements of an array, or of different names of an object."""
    items = int(json_path.count_items(_array(text), *container))
    if text[container.start : container.start + 1] == b"[" or items < 2:
        return items
    hashes = np.empty(items, dtype=np.uint64)
    json_path.hash_names(_array(text), *container, hashes)
    hashes.sort()
    return 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))


def is_empty(text: bytes, container: Span) -> bool:
    found = _SPACE.match(text, container.start + 1)
    return found is not None and found.end() == container.end - 1


def without(text: bytes, container: Span, component: Component) -> bytes:
    """The text without all members of a name, or without one element."""
    index = component if isinstance(component, int) else LAST
    if component == LAST:
        index = count(text, container) - 1
    name = _array(component.encode() if isinstance(component, str) else b"")
    kept = np.empty(len(text), dtype=np.uint8)
    return kept[: json_path.copy_without(_array(text), *container, name, index, kept)].tobytes()


# --- writing --------------------------------------------------------------------------------------------------------


def quote(name: str) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode()


def compact(text: bytes, part: Span) -> bytes:
    """A part of a text, without the whitespace between its tokens."""
    copied = np.empty(part.end - part.start, dtype=np.uint8)
    return copied[: json_path.copy_part(_array(text), *part, copied)].tobytes()


# --- paths ----------------------------------------------------------------------------------------------------------
#
# `name.name[0].name`, with `[-1]` for the last element and backticks around special names. A name must be escaped as
# inside a JSON string: `\"` for a quote. Dots and brackets inside backticks belong to the name, and two backticks mean
# one.


PATH_BYTES_MAX = 1024

COMPONENTS_MAX = LEVELS_MAX - 1
"""Couchbase's limit is 32, of which the root of the document is the first."""

LAST = -1
_INDEX_MAX = 2**63 - 1
_INDEX_DIGITS_MAX = len(str(_INDEX_MAX))

# Any character that needs no escape in JSON, or one of its short escapes. Couchbase accepts no \u in paths.
_CHARACTER = r'(?:[^"\\\x00-\x1f`.\[\]]|\\["\\/bfnrt])'
_QUOTED_CHARACTER = r'(?:[^"\\\x00-\x1f`]|\\["\\/bfnrt])'
_PATH_NAME = re.compile(rf"(?:{_CHARACTER}|`{_QUOTED_CHARACTER}*`)+")
_INDEX = re.compile(r"\[(-1|[0-9]+)\]")

Component = str | int
"""A name, or the index of an element."""

Path = tuple[Component, ...]


def parse_path(path: bytes) -> Path:
    """Parse a path into its components. The empty path is the document itself."""
    if len(path) > PATH_BYTES_MAX:
        raise RequestRefused(Status.SUBDOC_PATH_E2BIG)
    try:
        text = path.decode()
    except UnicodeDecodeError as error:
        raise RequestRefused(Status.SUBDOC_PATH_EINVAL) from error
    components: list[Component] = []
    at = 0
    while at < len(text):
        if len(components) == COMPONENTS_MAX:
            raise RequestRefused(Status.SUBDOC_PATH_E2BIG)
        component, at = _parse_index(text, at) if text[at] == "[" else _parse_name(text, at)
        components.append(component)
        # A dot or the bracket of an index follows a component. Couchbase ignores a dot at the very end.
        if text[at : at + 1] == ".":
            at += 1
        elif text[at : at + 1] not in ("", "["):
            raise RequestRefused(Status.SUBDOC_PATH_EINVAL)
    return tuple(components)


def _parse_index(text: str, at: int) -> tuple[int, int]:
    found = _INDEX.match(text, at)
    if found is None or len(found[1]) > _INDEX_DIGITS_MAX or int(found[1]) > _INDEX_MAX:
        raise RequestRefused(Status.SUBDOC_PATH_EINVAL)
    return int(found[1]), found.end()


def _parse_name(text: str, at: int) -> tuple[str, int]:
    found = _PATH_NAME.match(text, at)
    name = "" if found is None else found[0]
    if len(name) > 1 and name[0] == name[-1] == "`":
        name = name[1:-1]
    escaped = "`".join(part.replace("`", "") for part in name.split("``"))
    if found is None or not escaped:
        raise RequestRefused(Status.SUBDOC_PATH_EINVAL)
    return json.loads(f'"{escaped}"'), found.end()


class Located(NamedTuple):
    """The value at a path, or how much of the path exists."""

    value: Span | None
    """None if the path does not exist."""

    container: Span
    """The object or array around the value; if the value does not exist, the last one on the path that does."""

    components_found: int


def locate(text: bytes, path: Path) -> Located:
    container = value = root(text)
    for components_found, component in enumerate(path):
        container, child = value, _child(text, value, component)
        if child is None:
            return Located(None, container, components_found)
        value = child
    return Located(value, container, len(path))


def _child(text: bytes, container: Span, component: Component) -> Span | None:
    if text[container.start] != ord("{" if isinstance(component, str) else "["):
        raise RequestRefused(Status.SUBDOC_PATH_MISMATCH)
    return member(text, container, component) if isinstance(component, str) else element(text, container, component)


# --- lookups --------------------------------------------------------------------------------------------------------


def get(text: bytes, path: Path) -> bytes:
    return compact(text, _existing(text, path))


def exists(text: bytes, path: Path) -> bytes:
    """Returns nothing. Raises `RequestRefused` if the path does not exist."""
    _existing(text, path)
    return b""


def get_count(text: bytes, path: Path) -> bytes:
    """The number of elements or names, in decimal."""
    value = _existing(text, path)
    if text[value.start] not in b"{[":
        raise RequestRefused(Status.SUBDOC_PATH_MISMATCH)
    return b"%d" % count(text, value)


def _existing(text: bytes, path: Path) -> Span:
    value = locate(text, path).value
    if value is None:
        raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
    return value


LOOKUPS: Mapping[Opcode, Callable[[bytes, Path], bytes]] = {
    Opcode.SUBDOC_GET: get,
    Opcode.SUBDOC_EXISTS: exists,
    Opcode.SUBDOC_GET_COUNT: get_count,
}
