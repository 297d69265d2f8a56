"""JSON as text with positions, the paths that lead into it, and the lookups.

Positions say where the parts of a document stand, so that a change leaves every other byte as it was. Python's own JSON
scanner walks over the values, so nothing here parses character by character, and numbers are never turned into Python
numbers: their text is their meaning. Every function raises `SubdocFailure` with the status of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, NoReturn

from headwater.protocol.features import Opcode
from headwater.protocol.status import Status

XATTR_UNKNOWN_VATTR_MACRO = Status(0xD5)
CAN_ONLY_REVIVE_DELETED_DOCUMENTS = Status(0xD6)
DELETED_DOCUMENT_CANT_HAVE_VALUE = Status(0xD7)
FIELD_NOT_BINARY_VALUE = Status(0xD8)


class SubdocFailure(Exception):
    """The status in which an operation or a whole request ends. It never leaves this package: callers get outcomes."""

    def __init__(self, status: Status, reason: str = "") -> None:
        self.status = status
        self.reason = reason
        super().__init__(reason or status.name)


LEVELS_MAX = 32
"""Levels of a document. The root is one, and so is a number or a string inside the innermost array."""

_WHITESPACE = " \t\n\r"
_S = rf"[{_WHITESPACE}]*+"
# Possessive throughout: JSON never needs a second try, and remembering one would cost memory for every escape.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING)
_SPACE = re.compile(_S)
_NAME = re.compile(rf"({_STRING}){_S}:{_S}")
_SEPARATOR = re.compile(rf"{_S},?+{_S}")
_WITHOUT_SPACE = re.compile(rf'{_STRING}|[^"{_WHITESPACE}]++')

_SEPARATORS = f"{_WHITESPACE},:".encode()
_BRACKETS = {"[": "[", "{": "[", "]": "]", "}": "]"}
_TO_SKELETON = bytes(ord(_BRACKETS.get(chr(code), "x")) for code in range(256))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_scan = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse_constant).raw_decode


class Span(NamedTuple):
    """The text of one value, or of one member with its name."""

    start: int
    end: int


class Member(NamedTuple):
    """One `"name": value` of an object."""

    name: str
    item: Span
    value: Span


# --- is it JSON, and how deep ---------------------------------------------------------------------------------------


def is_json(data: bytes) -> bool:
    """Whether the bytes are one JSON value of any kind. What Python cannot nest counts as no JSON."""
    try:
        return _is_one_value(data.decode())
    except (UnicodeDecodeError, RecursionError):
        return False


def document_text(data: bytes) -> str:
    """The text of a document that paths can point into."""
    try:
        text = data.decode()
        start = _skip_space(text, 0)
        # Couchbase's parser takes no primitive as a document of its own.
        if text[start : start + 1] not in ("{", "[") or not _is_one_value(text):
            raise SubdocFailure(Status.SUBDOC_DOC_NOT_JSON)
    except UnicodeDecodeError as error:
        raise SubdocFailure(Status.SUBDOC_DOC_NOT_JSON) from error
    except RecursionError as error:
        raise SubdocFailure(Status.SUBDOC_DOC_E2DEEP) from error
    if _is_deeper(text, levels=LEVELS_MAX):
        raise SubdocFailure(Status.SUBDOC_DOC_E2DEEP)
    return text


def value_text(value: bytes, *, levels: int) -> str:
    """The text of one new value, which may have so many levels."""
    text = _new_text(value)
    _check_new(text, levels=levels)
    return text


def values_text(value: bytes, *, levels: int) -> str:
    """The text of one or more new values as they stand between the brackets of an array, each of so many levels."""
    text = _new_text(value)
    _check_new(f"[{text}]", levels=levels + 1)
    return text


def _new_text(value: bytes) -> str:
    try:
        text = value.decode().strip(_WHITESPACE)
    except UnicodeDecodeError as error:
        raise SubdocFailure(Status.SUBDOC_VALUE_CANTINSERT) from error
    if not text:
        raise SubdocFailure(Status.SUBDOC_VALUE_CANTINSERT)
    return text


def _check_new(text: str, *, levels: int) -> None:
    try:
        if not _is_one_value(text):
            raise SubdocFailure(Status.SUBDOC_VALUE_CANTINSERT)
    except RecursionError as error:
        raise SubdocFailure(Status.SUBDOC_VALUE_ETOODEEP) from error
    if _is_deeper(text, levels=levels):
        raise SubdocFailure(Status.SUBDOC_VALUE_ETOODEEP)


def _is_one_value(text: str) -> bool:
    try:
        end = _scan(text, _skip_space(text, 0))[1]
    except ValueError:
        return False
    return _skip_space(text, end) == len(text)


def _is_deeper(text: str, *, levels: int) -> bool:
    """Whether valid JSON has more levels than that. Each round peels off the innermost level of the whole text."""
    if text.count("[") + text.count("{") < levels:
        return False
    skeleton = _STRINGS.sub("x", text).encode().translate(_TO_SKELETON, _SEPARATORS)
    for _ in range(levels):
        if not skeleton:
            return False
        # Primitives are a level themselves: they go in the first round, together with the empty containers.
        skeleton = skeleton.replace(b"[]", b"").replace(b"x", b"")
    return bool(skeleton)


# --- walking over checked text --------------------------------------------------------------------------------------


def root(text: str) -> Span:
    return Span(_skip_space(text, 0), len(text.rstrip(_WHITESPACE)))


def members(text: str, start: int) -> Iterator[Member]:
    """The members of the object that starts there, in their order."""
    at = _skip_space(text, start + 1)
    while text[at] != "}":
        found = _NAME.match(text, at)
        assert found is not None, "the text was checked to be JSON"
        name = found[1]
        value = Span(found.end(), _scan(text, found.end())[1])
        yield Member(json.loads(name) if "\\" in name else name[1:-1], Span(at, value.end), value)
        at = _next_item(text, value.end)


def elements(text: str, start: int) -> Iterator[Span]:
    """The elements of the array that starts there, in their order."""
    at = _skip_space(text, start + 1)
    while text[at] != "]":
        end = _scan(text, at)[1]
        yield Span(at, end)
        at = _next_item(text, end)


def count(text: str, container: Span) -> int:
    """The elements of an array, or the different names of an object."""
    return len(_scan(text, container.start)[0])


def is_empty(text: str, container: Span) -> bool:
    return _skip_space(text, container.start + 1) == container.end - 1


def _next_item(text: str, item_end: int) -> int:
    found = _SEPARATOR.match(text, item_end)
    assert found is not None, "the pattern matches nothing, too"
    return found.end()


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern matches nothing, too"
    return found.end()


# --- writing --------------------------------------------------------------------------------------------------------


def quote(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def compact(text: str) -> str:
    """The same JSON without the space between its tokens."""
    return "".join(_WITHOUT_SPACE.findall(text))


# --- paths ----------------------------------------------------------------------------------------------------------
#
# `name.name[0].name`, with `[-1]` for the last element and backticks around special names. A name must be escaped as
# inside a JSON string: `\"` for a quote. Dots and brackets inside backticks belong to the name, and two backticks stand
# for one.


PATH_BYTES_MAX = 1024

COMPONENTS_MAX = LEVELS_MAX - 1
"""Couchbase counts 32, and the root of the document is the first of them."""

LAST = -1
_INDEX_MAX = 2**63 - 1
_INDEX_DIGITS_MAX = len(str(_INDEX_MAX))

# Any character that needs no escape in JSON, or one of its short escapes. Couchbase takes no \u in paths.
_CHARACTER = r'(?:[^"\\\x00-\x1f`.\[\]]|\\["\\/bfnrt])'
_QUOTED_CHARACTER = r'(?:[^"\\\x00-\x1f`]|\\["\\/bfnrt])'
_PATH_NAME = re.compile(rf"(?:{_CHARACTER}|`{_QUOTED_CHARACTER}*`)+")
_INDEX = re.compile(r"\[(-1|[0-9]+)\]")

Component = str | int
"""A name, or the index of an element."""

Path = tuple[Component, ...]


def parse_path(path: bytes) -> Path:
    """The components of a path; the empty path is the document itself."""
    if len(path) > PATH_BYTES_MAX:
        raise SubdocFailure(Status.SUBDOC_PATH_E2BIG)
    try:
        text = path.decode()
    except UnicodeDecodeError as error:
        raise SubdocFailure(Status.SUBDOC_PATH_EINVAL) from error
    components: list[Component] = []
    at = 0
    while at < len(text):
        if len(components) == COMPONENTS_MAX:
            raise SubdocFailure(Status.SUBDOC_PATH_E2BIG)
        component, at = _parse_index(text, at) if text[at] == "[" else _parse_name(text, at)
        components.append(component)
        at = _past_separator(text, at)
    return tuple(components)


def _past_separator(text: str, at: int) -> int:
    """A dot or the bracket of an index may follow a component; a dot at the very end is nothing, as in Couchbase."""
    if at == len(text) or text[at] == "[":
        return at
    if text[at] == ".":
        return at + 1
    raise SubdocFailure(Status.SUBDOC_PATH_EINVAL)


def _parse_index(text: str, at: int) -> tuple[int, int]:
    found = _INDEX.match(text, at)
    if found is None or len(found[1]) > _INDEX_DIGITS_MAX or int(found[1]) > _INDEX_MAX:
        raise SubdocFailure(Status.SUBDOC_PATH_EINVAL)
    return int(found[1]), found.end()


def _parse_name(text: str, at: int) -> tuple[str, int]:
    found = _PATH_NAME.match(text, at)
    if found is None:
        raise SubdocFailure(Status.SUBDOC_PATH_EINVAL)
    escaped = _without_backticks(found[0])
    if not escaped:
        raise SubdocFailure(Status.SUBDOC_PATH_EINVAL)
    return json.loads(f'"{escaped}"'), found.end()


def _without_backticks(name: str) -> str:
    if len(name) > 1 and name[0] == name[-1] == "`":
        name = name[1:-1]
    return "`".join(part.replace("`", "") for part in name.split("``"))


class Located(NamedTuple):
    """What a path leads to, or how far it leads."""

    value: Span | None
    """None where the path does not exist."""

    container: Span
    """The object or array around the value; where there is none, the last one on the path that exists."""

    components_found: int


def locate(text: str, path: Path) -> Located:
    container = value = root(text)
    for components_found, component in enumerate(path):
        container, child = value, _child(text, value, component)
        if child is None:
            return Located(None, container, components_found)
        value = child
    return Located(value, container, len(path))


def _child(text: str, container: Span, component: Component) -> Span | None:
    if text[container.start] != ("{" if isinstance(component, str) else "["):
        raise SubdocFailure(Status.SUBDOC_PATH_MISMATCH)
    child = None
    if isinstance(component, str):
        # Where a name stands twice, the last one counts, as it does for a parser of the whole document.
        for member in members(text, container.start):
            if member.name == component:
                child = member.value
    elif component == LAST:
        for element in elements(text, container.start):
            child = element
    else:
        child = next(islice(elements(text, container.start), component, None), None)
    return child


# --- lookups --------------------------------------------------------------------------------------------------------


def get(text: str, path: Path) -> str:
    value = _existing(text, path)
    return compact(text[value.start : value.end])


def exists(text: str, path: Path) -> str:
    """Nothing: the status says it."""
    _existing(text, path)
    return ""


def get_count(text: str, path: Path) -> str:
    """The number of elements or of names, in decimal."""
    value = _existing(text, path)
    if text[value.start] not in "{[":
        raise SubdocFailure(Status.SUBDOC_PATH_MISMATCH)
    return str(count(text, value))


def _existing(text: str, path: Path) -> Span:
    value = locate(text, path).value
    if value is None:
        raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)
    return value


LOOKUPS: Mapping[Opcode, Callable[[str, Path], str]] = {
    Opcode.SUBDOC_GET: get,
    Opcode.SUBDOC_EXISTS: exists,
    Opcode.SUBDOC_GET_COUNT: get_count,
}
