"""The mutations: what each makes of a document's text.

A mutation cuts the text at one place and puts its own there; the rest of the document stays as it was written. The
checks stand in Couchbase's order, because the order decides which status a request with several faults gets: first
the value, then the way along the path, then what is at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol

from headwater.node.kv.subdocument.json_text import (
    LAST,
    LEVELS_MAX,
    Located,
    Path,
    Span,
    SubdocFailure,
    count,
    document_text,
    elements,
    get,
    is_empty,
    is_json,
    locate,
    members,
    quote,
    root,
    value_text,
    values_text,
)
from headwater.node.kv.subdocument.requests import decode_binary, encode_binary, spec_path
from headwater.node.kv.subdocument.virtual_xattrs import SYSTEM_XATTR_PREFIX, SubdocDocument
from headwater.protocol.features import Opcode
from headwater.protocol.messages.subdocument import MutationSpec, PathFlags
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, ValueParts

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT64_CHARACTERS_MAX = len(str(_INT64_MIN))
_DELTA = re.compile(rb"-?[1-9][0-9]*")
_INTEGER = re.compile(r"-?[0-9]+")


class Edit(NamedTuple):
    """What a mutation leaves."""

    text: str
    result: str | None = None
    """What the client gets back; only a counter has something to say."""


class PathMutation(Protocol):
    """`create_parents` is the flag MKDIR_P: objects that are missing on the path are made."""

    def __call__(self, text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit: ...


# --- objects --------------------------------------------------------------------------------------------------------


def dict_add(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new, located = _prepare_store(text, path, value)
    _require_name(path)
    if located.value is not None:
        raise SubdocFailure(Status.SUBDOC_PATH_EEXISTS)
    return Edit(_add_member(text, located, path, new, create_parents=create_parents))


def dict_upsert(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new, located = _prepare_store(text, path, value)
    _require_name(path)
    if located.value is not None:
        return Edit(_splice(text, located.value, new))
    return Edit(_add_member(text, located, path, new, create_parents=create_parents))


def replace(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new, located = _prepare_store(text, path, value)
    if located.value is None:
        raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)
    return Edit(_splice(text, located.value, new))


def remove(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    _require_below_root(path)
    located = locate(text, path)
    if located.value is None:
        raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)
    start, last = located.container.start, path[-1]
    if isinstance(last, str):
        # A name that stands twice must be gone afterwards.
        return Edit(_without(text, ((member.item, member.name == last) for member in members(text, start))))
    neighbours = islice(elements(text, start), None if last == LAST else last + 2)
    return Edit(_without(text, ((element, element == located.value) for element in neighbours)))


def _prepare_store(text: str, path: Path, value: bytes) -> tuple[str, Located]:
    _require_below_root(path)
    return value_text(value, levels=LEVELS_MAX - len(path)), locate(text, path)


def _require_below_root(path: Path) -> None:
    if not path:
        raise SubdocFailure(Status.SUBDOC_VALUE_CANTINSERT)


def _require_name(path: Path) -> None:
    if not isinstance(path[-1], str):
        raise SubdocFailure(Status.SUBDOC_PATH_EINVAL)


# --- arrays ---------------------------------------------------------------------------------------------------------


def array_push_last(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new = values_text(value, levels=LEVELS_MAX - len(path) - 1)
    located = locate(text, path)
    if located.value is None:
        return Edit(_add_array(text, located, path, new, create_parents=create_parents))
    return Edit(_append(text, _require_array(text, located.value), new))


def array_push_first(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new = values_text(value, levels=LEVELS_MAX - len(path) - 1)
    located = locate(text, path)
    if located.value is None:
        return Edit(_add_array(text, located, path, new, create_parents=create_parents))
    array = _require_array(text, located.value)
    first = array.start + 1
    return Edit(_splice(text, Span(first, first), new if is_empty(text, array) else f"{new},"))


def array_insert(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new = values_text(value, levels=LEVELS_MAX - len(path))
    index = path[-1] if path else None
    if not isinstance(index, int) or index == LAST:
        raise SubdocFailure(Status.SUBDOC_PATH_EINVAL)
    located = locate(text, path)
    if located.value is not None:
        start = located.value.start
        return Edit(_splice(text, Span(start, start), f"{new},"))
    if located.components_found == len(path) - 1 and index == count(text, located.container):
        return Edit(_append(text, located.container, new))
    raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)


def array_add_unique(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new = value_text(value, levels=LEVELS_MAX - len(path) - 1)
    if new[0] in "{[":
        raise SubdocFailure(Status.SUBDOC_VALUE_CANTINSERT)
    located = locate(text, path)
    if located.value is None:
        return Edit(_add_array(text, located, path, new, create_parents=create_parents))
    array = _require_array(text, located.value)
    for start, end in elements(text, array.start):
        if text[start] in "{[":
            raise SubdocFailure(Status.SUBDOC_PATH_MISMATCH)
        # Couchbase compares the text: 1.0 is not 1.
        if text[start:end] == new:
            raise SubdocFailure(Status.SUBDOC_PATH_EEXISTS)
    return Edit(_append(text, array, new))


def _require_array(text: str, value: Span) -> Span:
    if text[value.start] != "[":
        raise SubdocFailure(Status.SUBDOC_PATH_MISMATCH)
    return value


def _add_array(text: str, located: Located, path: Path, new: str, *, create_parents: bool) -> str:
    if not create_parents:
        raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)
    return _add_member(text, located, path, f"[{new}]", create_parents=True)


# --- counters -------------------------------------------------------------------------------------------------------


def counter(text: str, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    delta = _delta(value)
    located = locate(text, path)
    if located.value is None:
        return _new_counter(text, located, path, delta, create_parents=create_parents)
    number = _int64(text[located.value.start : located.value.end]) + delta
    if not _INT64_MIN <= number <= _INT64_MAX:
        raise SubdocFailure(Status.SUBDOC_VALUE_CANTINSERT)
    return Edit(_splice(text, located.value, str(number)), str(number))


def _new_counter(text: str, located: Located, path: Path, delta: int, *, create_parents: bool) -> Edit:
    parent_is_missing = located.components_found < len(path) - 1
    if (parent_is_missing and not create_parents) or text[located.container.start] != "{":
        raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)
    _require_name(path)
    return Edit(_add_member(text, located, path, str(delta), create_parents=True), str(delta))


def _delta(value: bytes) -> int:
    if _DELTA.fullmatch(value) and len(value) <= _INT64_CHARACTERS_MAX:
        delta = int(value)
        if _INT64_MIN <= delta <= _INT64_MAX:
            return delta
    raise SubdocFailure(Status.SUBDOC_DELTA_EINVAL)


def _int64(number: str) -> int:
    if not _INTEGER.fullmatch(number):
        raise SubdocFailure(Status.SUBDOC_PATH_MISMATCH)
    if len(number) <= _INT64_CHARACTERS_MAX and _INT64_MIN <= int(number) <= _INT64_MAX:
        return int(number)
    raise SubdocFailure(Status.SUBDOC_NUM_ERANGE)


# --- cutting and pasting --------------------------------------------------------------------------------------------


def _splice(text: str, span: Span, new: str) -> str:
    return text[: span.start] + new + text[span.end :]


def _append(text: str, container: Span, item: str) -> str:
    closing = container.end - 1
    return _splice(text, Span(closing, closing), item if is_empty(text, container) else f",{item}")


def _add_member(text: str, located: Located, path: Path, new: str, *, create_parents: bool) -> str:
    """Puts the new value under what is missing of its path. Only objects are made on the way, never elements."""
    missing = path[located.components_found :]
    if len(missing) > 1 and not create_parents:
        raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)
    names = [component for component in missing if isinstance(component, str)]
    if len(names) < len(missing):
        raise SubdocFailure(Status.SUBDOC_PATH_ENOENT)
    for name in reversed(names[1:]):
        new = f"{{{quote(name)}:{new}}}"
    return _append(text, located.container, f"{quote(names[0])}:{new}")


def _without(text: str, items: Iterable[tuple[Span, bool]]) -> str:
    """The text without the items of a container that are marked.

    An item goes together with the comma before it. Where nothing is kept before it, the first item that is kept moves
    up to the front.
    """
    cuts: list[Span] = []
    front: int | None = None
    previous_end = 0
    has_kept = False
    for item, is_doomed in items:
        front = item.start if front is None else front
        if is_doomed and has_kept:
            cuts.append(Span(previous_end, item.end))
        elif not is_doomed and not has_kept:
            cuts.append(Span(front, item.start))
            has_kept = True
        previous_end = item.end
    if front is not None and not has_kept:
        cuts.append(Span(front, previous_end))
    starts = [0, *(cut.end for cut in cuts)]
    ends = [*(cut.start for cut in cuts), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))


MUTATIONS: Mapping[Opcode, PathMutation] = {
    Opcode.SUBDOC_DICT_ADD: dict_add,
    Opcode.SUBDOC_DICT_UPSERT: dict_upsert,
    Opcode.SUBDOC_DELETE: remove,
    Opcode.SUBDOC_REPLACE: replace,
    Opcode.SUBDOC_ARRAY_PUSH_LAST: array_push_last,
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: array_push_first,
    Opcode.SUBDOC_ARRAY_INSERT: array_insert,
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: array_add_unique,
    Opcode.SUBDOC_COUNTER: counter,
}


# --- a document's texts ---------------------------------------------------------------------------------------------


class DocumentTexts:
    """The two texts that the paths of a request point into, each checked once and only when it is needed."""

    def __init__(self, document: SubdocDocument) -> None:
        self.document = document

    @cached_property
    def parts(self) -> ValueParts:
        return self.document.parts()

    @cached_property
    def body(self) -> str:
        if not self.document.datatype & Datatype.JSON:
            raise SubdocFailure(Status.SUBDOC_DOC_NOT_JSON)
        return document_text(self.parts.body)

    @cached_property
    def xattrs(self) -> str:
        """All extended attributes as one object, in which the first name of a path is the name of an attribute."""
        pairs = [quote(name).encode() + b":" + json for name, json in self.parts.xattrs.items()]
        return document_text(b"{" + b",".join(pairs) + b"}")


class Draft:
    """A document in the making: the mutations of a request apply to it one after the other.

    The document it was made from is never touched.
    """

    def __init__(self, before: DocumentTexts) -> None:
        self._before = before
        self._body = before.parts.body
        self._body_text: str | None = None
        self._xattrs_text: str | None = None
        self.is_json = bool(before.document.datatype & Datatype.JSON)
        self.is_deleted = False

    def apply(self, spec: MutationSpec, value: bytes, *, create_parents: bool) -> str | None:
        """Applies one mutation. What it gives back goes to the client."""
        if spec.opcode == Opcode.SET:
            self._set_body(value, as_json=is_json(value))
            return None
        if spec.opcode == Opcode.DELETE:
            self._set_body(b"", as_json=False)
            self.is_deleted = True
            return None
        path, is_binary = spec_path(spec), bool(spec.flags & PathFlags.BINARY_VALUE)
        if spec.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
            found = get(self._read_xattrs(), path).encode()
            body = decode_binary(found) if is_binary else found
            self._set_body(body, as_json=not is_binary or is_json(body))
            return None
        if is_binary:
            value = encode_binary(value)
        mutate = MUTATIONS[spec.opcode]
        if spec.flags & PathFlags.XATTR:
            self._xattrs_text, result = mutate(self._read_xattrs(), path, value, create_parents=create_parents)
        else:
            self._body_text, result = mutate(self._read_body(), path, value, create_parents=create_parents)
        return result

    def parts(self) -> ValueParts:
        """What has become of the document."""
        xattrs = self._xattrs()
        if self.is_deleted:
            xattrs = {name: json for name, json in xattrs.items() if name.startswith(SYSTEM_XATTR_PREFIX)}
        return ValueParts(xattrs, self._body if self._body_text is None else self._body_text.encode())

    def _set_body(self, body: bytes, *, as_json: bool) -> None:
        self._body, self._body_text, self.is_json = body, None, as_json

    def _read_body(self) -> str:
        if self._body_text is not None:
            return self._body_text
        if not self.is_json:
            raise SubdocFailure(Status.SUBDOC_DOC_NOT_JSON)
        return document_text(self._body)

    def _read_xattrs(self) -> str:
        return self._before.xattrs if self._xattrs_text is None else self._xattrs_text

    def _xattrs(self) -> dict[str, bytes]:
        text = self._xattrs_text
        if text is None:
            return dict(self._before.parts.xattrs)
        start = root(text).start
        return {member.name: text[slice(*member.value)].encode() for member in members(text, start)}
