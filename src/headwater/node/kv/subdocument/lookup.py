"""The lookups: what each gives back for one path of a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headwater.node.kv.subdocument.failure import SubdocFailure
from headwater.node.kv.subdocument.json_text import Span, compact, count
from headwater.node.kv.subdocument.locate import locate
from headwater.node.kv.subdocument.path import Path
from headwater.protocol.opcodes import Opcode
from headwater.protocol.status import Status


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
