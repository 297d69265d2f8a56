"""The path syntax: `name.name[0].name`, with `[-1]` for the last element and backticks around special names.

A name must be escaped as inside a JSON string: `\\"` for a quote. Dots and brackets inside backticks belong to the
name, and two backticks stand for one.
"""

from __future__ import annotations

import json
import re

from headwater.node.kv.subdocument.failure import SubdocFailure
from headwater.node.kv.subdocument.json_text import LEVELS_MAX
from headwater.protocol.status import Status

PATH_BYTES_MAX = 1024

COMPONENTS_MAX = LEVELS_MAX - 1
"""Couchbase counts 32, and the root of the document is the first of them."""

LAST = -1
_INDEX_MAX = 2**63 - 1
_INDEX_DIGITS_MAX = len(str(_INDEX_MAX))

# Any character that needs no escape in JSON, or one of its short escapes. Couchbase takes no \u in paths.
_CHARACTER = r'(?:[^"\\\x00-\x1f`.\[\]]|\\["\\/bfnrt])'
_QUOTED_CHARACTER = r'(?:[^"\\\x00-\x1f`]|\\["\\/bfnrt])'
_NAME = re.compile(rf"(?:{_CHARACTER}|`{_QUOTED_CHARACTER}*`)+")
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
    found = _NAME.match(text, at)
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
