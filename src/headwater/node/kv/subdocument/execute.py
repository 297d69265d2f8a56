"""Executes a whole sub-document request on one document: its paths in order, and for mutations all or none.

The functions take values and return an outcome, which the handlers write. They raise `RequestRefused` if the whole
request is refused. A mutation that fails changes nothing, because mutations apply to a draft.

A mutation replaces one span of the text; the rest of the document stays as it was written. The checks are in
Couchbase's order, because the order decides which status a request with several faults gets: first the value, then the
components of the path, then what is at its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

from headwater.errors import LocalProtocolError
from headwater.node.kv.subdocument import json_text, requests
from headwater.node.kv.subdocument.json_text import LAST, LEVELS_MAX, Located, Path, Span
from headwater.node.kv.subdocument.requests import (
    PREFIX,
    SYSTEM_XATTR_PREFIX,
    MacroExpansion,
    NewValue,
    SubdocDocument,
    decode_binary,
    encode_binary,
    spec_path,
    virtual_xattr_text,
)
from headwater.protocol.features import Opcode
from headwater.protocol.kernels import json_path
from headwater.protocol.messages.subdocument import (
    DocFlags,
    LookupResult,
    LookupSpec,
    MutationResult,
    MutationSpec,
    PathFlags,
)
from headwater.protocol.numbers import VALUE_BYTES_MAX
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype, ValueParts, encode_xattrs

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT64_CHARACTERS_MAX = len(str(_INT64_MIN))
_DELTA = re.compile(rb"-?[1-9][0-9]*")
_INTEGER = re.compile(rb"-?[0-9]+")


class Edit(NamedTuple):
    """The result of a mutation."""

    text: bytes
    result: bytes | None = None
    """The value for the client; only counters return one."""


class PathMutation(Protocol):
    """`create_parents` is the flag MKDIR_P: create objects that are missing on the path."""

    def __call__(self, text: bytes, path: Path, value: bytes, *, create_parents: bool) -> Edit: ...


# --- objects --------------------------------------------------------------------------------------------------------


def dict_upsert(text: bytes, path: Path, value: bytes, *, create_parents: bool, only_new: bool = False) -> Edit:
    new, located = _prepare_store(text, path, value)
    _require_name(path)
    if located.value is None:
        return Edit(_add_member(text, located, path, new, create_parents=create_parents))
    if only_new:
        raise RequestRefused(Status.SUBDOC_PATH_EEXISTS)
    return Edit(_splice(text, located.value, new))


dict_add: PathMutation = partial(dict_upsert, only_new=True)


def replace(text: bytes, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new, located = _prepare_store(text, path, value)
    if located.value is None:
        raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
    return Edit(_splice(text, located.value, new))


def remove(text: bytes, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    _require_below_root(path)
    located = json_text.locate(text, path)
    if located.value is None:
        raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
    return Edit(json_text.without(text, located.container, path[-1]))


def _prepare_store(text: bytes, path: Path, value: bytes) -> tuple[bytes, Located]:
    _require_below_root(path)
    return json_text.value_text(value, levels=LEVELS_MAX - len(path)), json_text.locate(text, path)


def _require_below_root(path: Path) -> None:
    if not path:
        raise RequestRefused(Status.SUBDOC_VALUE_CANTINSERT)


def _require_name(path: Path) -> None:
    if not isinstance(path[-1], str):
        raise RequestRefused(Status.SUBDOC_PATH_EINVAL)


# --- arrays ---------------------------------------------------------------------------------------------------------


def array_push_last(text: bytes, path: Path, value: bytes, *, create_parents: bool, in_front: bool = False) -> Edit:
    new = json_text.values_text(value, levels=LEVELS_MAX - len(path) - 1)
    located = json_text.locate(text, path)
    if located.value is None:
        return Edit(_add_array(text, located, path, new, create_parents=create_parents))
    array = _require_array(text, located.value)
    if not in_front:
        return Edit(_append(text, array, new))
    first = array.start + 1
    return Edit(_splice(text, Span(first, first), new if json_text.is_empty(text, array) else new + b","))


array_push_first: PathMutation = partial(array_push_last, in_front=True)


def array_insert(text: bytes, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new = json_text.values_text(value, levels=LEVELS_MAX - len(path))
    index = path[-1] if path else None
    if not isinstance(index, int) or index == LAST:
        raise RequestRefused(Status.SUBDOC_PATH_EINVAL)
    located = json_text.locate(text, path)
    if located.value is not None:
        start = located.value.start
        return Edit(_splice(text, Span(start, start), new + b","))
    if located.components_found == len(path) - 1 and index == json_text.count(text, located.container):
        return Edit(_append(text, located.container, new))
    raise RequestRefused(Status.SUBDOC_PATH_ENOENT)


def array_add_unique(text: bytes, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    new = json_text.value_text(value, levels=LEVELS_MAX - len(path) - 1)
    if new[0] in b"{[":
        raise RequestRefused(Status.SUBDOC_VALUE_CANTINSERT)
    located = json_text.locate(text, path)
    if located.value is None:
        return Edit(_add_array(text, located, path, new, create_parents=create_parents))
    array = _require_array(text, located.value)
    # Couchbase compares the text: 1.0 does not equal 1.
    found = json_text.scalar(text, array, new)
    if found == json_path.MISMATCH:
        raise RequestRefused(Status.SUBDOC_PATH_MISMATCH)
    if found != json_path.NOT_THERE:
        raise RequestRefused(Status.SUBDOC_PATH_EEXISTS)
    return Edit(_append(text, array, new))


def _require_array(text: bytes, value: Span) -> Span:
    if text[value.start] != ord("["):
        raise RequestRefused(Status.SUBDOC_PATH_MISMATCH)
    return value


def _add_array(text: bytes, located: Located, path: Path, new: bytes, *, create_parents: bool) -> bytes:
    if not create_parents:
        raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
    return _add_member(text, located, path, b"[%b]" % new, create_parents=True)


# --- counters -------------------------------------------------------------------------------------------------------


def counter(text: bytes, path: Path, value: bytes, *, create_parents: bool) -> Edit:
    is_delta = _DELTA.fullmatch(value) is not None and len(value) <= _INT64_CHARACTERS_MAX
    if not is_delta or not _INT64_MIN <= int(value) <= _INT64_MAX:
        raise RequestRefused(Status.SUBDOC_DELTA_EINVAL)
    delta = int(value)
    located = json_text.locate(text, path)
    if located.value is None:
        return _new_counter(text, located, path, delta, create_parents=create_parents)
    digits = text[located.value.start : located.value.end]
    if not _INTEGER.fullmatch(digits):
        raise RequestRefused(Status.SUBDOC_PATH_MISMATCH)
    if len(digits) > _INT64_CHARACTERS_MAX or not _INT64_MIN <= int(digits) <= _INT64_MAX:
        raise RequestRefused(Status.SUBDOC_NUM_ERANGE)
    number = int(digits) + delta
    if not _INT64_MIN <= number <= _INT64_MAX:
        raise RequestRefused(Status.SUBDOC_VALUE_CANTINSERT)
    return Edit(_splice(text, located.value, b"%d" % number), b"%d" % number)


def _new_counter(text: bytes, located: Located, path: Path, delta: int, *, create_parents: bool) -> Edit:
    parent_is_missing = located.components_found < len(path) - 1
    if (parent_is_missing and not create_parents) or text[located.container.start] != ord("{"):
        raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
    _require_name(path)
    return Edit(_add_member(text, located, path, b"%d" % delta, create_parents=True), b"%d" % delta)


# --- cutting and pasting --------------------------------------------------------------------------------------------


def _splice(text: bytes, span: Span, new: bytes) -> bytes:
    return text[: span.start] + new + text[span.end :]


def _append(text: bytes, container: Span, item: bytes) -> bytes:
    closing = container.end - 1
    return _splice(text, Span(closing, closing), item if json_text.is_empty(text, container) else b"," + item)


def _add_member(text: bytes, located: Located, path: Path, new: bytes, *, create_parents: bool) -> bytes:
    """Add the new value, and the parents that its path lacks. These are only objects, never elements of arrays."""
    missing = path[located.components_found :]
    if len(missing) > 1 and not create_parents:
        raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
    names = [component for component in missing if isinstance(component, str)]
    if len(names) < len(missing):
        raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
    for name in reversed(names[1:]):
        new = b"{%b:%b}" % (json_text.quote(name), new)
    return _append(text, located.container, b"%b:%b" % (json_text.quote(names[0]), new))


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
    """The two texts that paths of a request refer to. Each is checked once, when it is first needed."""

    def __init__(self, document: SubdocDocument) -> None:
        self.document = document
        self.parts = document.parts()

    @cached_property
    def body(self) -> bytes:
        if not self.document.datatype & Datatype.JSON:
            raise RequestRefused(Status.SUBDOC_DOC_NOT_JSON)
        return json_text.document_text(self.parts.body)

    @cached_property
    def xattrs(self) -> bytes:
        """All extended attributes as one object. The first name of a path is the name of an attribute."""
        pairs = [json_text.quote(name) + b":" + json for name, json in self.parts.xattrs.items()]
        return json_text.document_text(b"{" + b",".join(pairs) + b"}")


class Draft:
    """A draft of the new document, to which the mutations of a request are applied in order.

    The original document is never changed.
    """

    def __init__(self, before: DocumentTexts) -> None:
        self._before = before
        self._body = before.parts.body
        self._body_text: bytes | None = None
        self._xattrs_text: bytes | None = None
        self.is_json = bool(before.document.datatype & Datatype.JSON)
        self.is_deleted = False

    def apply(self, spec: MutationSpec, value: bytes, *, create_parents: bool) -> bytes | None:
        """Apply one mutation. Returns the value for the client, if any."""
        if spec.opcode == Opcode.SET:
            self._set_body(value, as_json=json_text.is_json(value))
            return None
        if spec.opcode == Opcode.DELETE:
            self._set_body(b"", as_json=False)
            self.is_deleted = True
            return None
        path, is_binary = spec_path(spec), bool(spec.flags & PathFlags.BINARY_VALUE)
        if spec.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
            found = json_text.get(self._read_xattrs(), path)
            body = decode_binary(found) if is_binary else found
            self._set_body(body, as_json=not is_binary or json_text.is_json(body))
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
        """The extended attributes and the body after the mutations so far."""
        xattrs: Mapping[str, bytes] = self._before.parts.xattrs
        text = self._xattrs_text
        if text is not None:
            found = json_text.members(text, json_text.root(text))
            xattrs = {member.name: text[slice(*member.value)] for member in found}
        if self.is_deleted:
            xattrs = {name: json for name, json in xattrs.items() if name.startswith(SYSTEM_XATTR_PREFIX)}
        return ValueParts(xattrs, self._body if self._body_text is None else self._body_text)

    def _set_body(self, body: bytes, *, as_json: bool) -> None:
        self._body, self._body_text, self.is_json = body, None, as_json

    def _read_body(self) -> bytes:
        if self._body_text is not None:
            return self._body_text
        if not self.is_json:
            raise RequestRefused(Status.SUBDOC_DOC_NOT_JSON)
        return json_text.document_text(self._body)

    def _read_xattrs(self) -> bytes:
        return self._before.xattrs if self._xattrs_text is None else self._xattrs_text


# --- requests ---------------------------------------------------------------------------------------------------------


_NO_FLAGS = DocFlags(0)
_EMPTY = SubdocDocument(value=b"", datatype=Datatype.RAW)
_ARRAY_COMMANDS = frozenset(
    {Opcode.SUBDOC_ARRAY_PUSH_LAST, Opcode.SUBDOC_ARRAY_PUSH_FIRST, Opcode.SUBDOC_ARRAY_ADD_UNIQUE}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """One result per path, in the order of the request."""

    status: Status
    results: tuple[LookupResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFailed:
    """The first path that failed. The document stays unchanged."""

    index: int
    path_status: Status

    @property
    def status(self) -> Status:
        return Status.SUBDOC_MULTI_PATH_FAILURE

    @property
    def results(self) -> tuple[MutationResult, ...]:
        return (MutationResult(index=self.index, status=self.path_status),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutated:
    """The document to write: a live one, or a tombstone whose value has at most system attributes."""

    status: Status
    results: tuple[MutationResult, ...]
    value: NewValue
    deleted: bool
    created: bool
    """Whether no document was visible. The write must fail if there is one by then."""


# --- lookups --------------------------------------------------------------------------------------------------------


def lookup_in(
    document: SubdocDocument | None, specs: Sequence[LookupSpec], doc_flags: DocFlags = _NO_FLAGS
) -> LookedUp:
    """Look up all paths of a request. `document` is None if it does not exist, and may be a tombstone."""
    requests.check_many(specs, doc_flags, mutates=False)
    texts = _readable(document, doc_flags)
    results = tuple(_result(texts, spec) for spec in specs)
    is_tombstone = texts.document.deleted
    if all(result.status == Status.SUCCESS for result in results):
        status = _success(is_tombstone=is_tombstone)
    else:
        status = Status.SUBDOC_MULTI_PATH_FAILURE_DELETED if is_tombstone else Status.SUBDOC_MULTI_PATH_FAILURE
    return LookedUp(status=status, results=results)


def lookup_one(document: SubdocDocument | None, spec: LookupSpec, doc_flags: DocFlags = _NO_FLAGS) -> LookupResult:
    """Look up the path of a single-path request. The response has the status of the result."""
    requests.check_one(spec, doc_flags, mutates=False)
    texts = _readable(document, doc_flags)
    return LookupResult(status=_success(is_tombstone=texts.document.deleted), value=_look_up(texts, spec))


def _readable(document: SubdocDocument | None, doc_flags: DocFlags) -> DocumentTexts:
    visible = _visible(document, doc_flags)
    if visible is None:
        raise RequestRefused(Status.KEY_ENOENT)
    return DocumentTexts(visible)


def _result(texts: DocumentTexts, spec: LookupSpec) -> LookupResult:
    try:
        return LookupResult(status=Status.SUCCESS, value=_look_up(texts, spec))
    except RequestRefused as refused:
        return LookupResult(status=refused.status)


def _look_up(texts: DocumentTexts, spec: LookupSpec) -> bytes:
    if spec.opcode == Opcode.GET:
        if not texts.parts.body:
            raise RequestRefused(Status.SUBDOC_PATH_ENOENT)
        return texts.parts.body
    path = requests.spec_path(spec)
    if not spec.flags & PathFlags.XATTR:
        text = texts.body
    elif spec.path.startswith(PREFIX.encode()):
        text = virtual_xattr_text(texts.document, path)
    else:
        text = texts.xattrs
    found = json_text.LOOKUPS[spec.opcode](text, path)
    return requests.decode_binary(found) if spec.flags & PathFlags.BINARY_VALUE else found


# --- mutations ------------------------------------------------------------------------------------------------------


def mutate_in(
    document: SubdocDocument | None, specs: Sequence[MutationSpec], doc_flags: DocFlags = _NO_FLAGS
) -> Mutated | PathFailed:
    """Apply all mutations of a request, or none. `document` is None if it does not exist, and may be a tombstone."""
    requests.check_many(specs, doc_flags, mutates=True)
    return _mutate(document, specs, doc_flags)


def mutate_one(document: SubdocDocument | None, spec: MutationSpec, doc_flags: DocFlags = _NO_FLAGS) -> Mutated:
    """Apply the mutation of a single-path request. If it fails, this raises `RequestRefused` with its status."""
    requests.check_one(spec, doc_flags, mutates=True)
    outcome = _mutate(document, (spec,), doc_flags)
    if isinstance(outcome, PathFailed):
        raise RequestRefused(outcome.path_status)
    return outcome


def _mutate(
    document: SubdocDocument | None, specs: Sequence[MutationSpec], doc_flags: DocFlags
) -> Mutated | PathFailed:
    current = _visible(document, doc_flags)
    if current is None:
        if not doc_flags & (DocFlags.MKDOC | DocFlags.ADD):
            raise RequestRefused(Status.KEY_ENOENT)
    elif doc_flags & DocFlags.ADD:
        raise RequestRefused(Status.KEY_EEXISTS)
    elif doc_flags & DocFlags.REVIVE_DOCUMENT and not current.deleted:
        raise RequestRefused(json_text.CAN_ONLY_REVIVE_DELETED_DOCUMENTS, "the document is alive")
    before = _blank(specs, doc_flags) if current is None else current
    draft = Draft(DocumentTexts(before))
    # For a document that does not exist, macros have the values of an empty one.
    macros = MacroExpansion(specs, _EMPTY if current is None else current)
    creating = bool(doc_flags & (DocFlags.MKDOC | DocFlags.ADD))
    results = []
    for index, spec in enumerate(specs):
        create_parents = creating or bool(spec.flags & PathFlags.MKDIR_P)
        try:
            result = draft.apply(spec, macros.value(spec), create_parents=create_parents)
        except RequestRefused as refused:
            return PathFailed(index=index, path_status=refused.status)
        if result is not None:
            results.append(MutationResult(index=index, status=Status.SUCCESS, value=result))
    is_tombstone = before.deleted and not doc_flags & DocFlags.REVIVE_DOCUMENT
    return Mutated(
        status=_success(is_tombstone=is_tombstone),
        results=tuple(results),
        value=_encode(draft, macros, is_tombstone=is_tombstone),
        deleted=is_tombstone or draft.is_deleted,
        created=current is None,
    )


def _blank(specs: Sequence[MutationSpec], doc_flags: DocFlags) -> SubdocDocument:
    """The initial content of a new document. The first path decides whether it is an object or an array."""
    if doc_flags & DocFlags.CREATE_AS_DELETED:
        return SubdocDocument(value=b"", datatype=Datatype.RAW, deleted=True)
    by_path = [spec for spec in specs if requests.COMMANDS[spec.opcode].scope is requests.CommandScope.PATH]
    if not by_path:
        return _EMPTY
    first = by_path[0]
    is_array = first.path.startswith(b"[") or (not first.path and first.opcode in _ARRAY_COMMANDS)
    return SubdocDocument(value=b"[]" if is_array else b"{}", datatype=Datatype.JSON)


def _encode(draft: Draft, macros: MacroExpansion, *, is_tombstone: bool) -> NewValue:
    parts = draft.parts()
    if is_tombstone and parts.body:
        raise RequestRefused(json_text.DELETED_DOCUMENT_CANT_HAVE_VALUE, "a deleted document cannot have a body")
    datatype = Datatype.JSON if draft.is_json else Datatype.RAW
    encoded = parts.body
    if parts.xattrs:
        datatype |= Datatype.XATTR
        try:
            encoded = encode_xattrs(parts)
        except LocalProtocolError as error:
            raise RequestRefused(Status.E2BIG, error.reason) from error
    if len(encoded) > VALUE_BYTES_MAX:
        raise RequestRefused(Status.E2BIG, f"a document has at most {VALUE_BYTES_MAX} bytes")
    encoded = macros.with_checksum(encoded, body=parts.body)
    return NewValue(template=encoded, datatype=datatype, macros=macros.positions(encoded))


# --- both -----------------------------------------------------------------------------------------------------------


def _visible(document: SubdocDocument | None, doc_flags: DocFlags) -> SubdocDocument | None:
    if document is None or (document.deleted and not doc_flags & DocFlags.ACCESS_DELETED):
        return None
    return document


def _success(*, is_tombstone: bool) -> Status:
    return Status.SUBDOC_SUCCESS_DELETED if is_tombstone else Status.SUCCESS
