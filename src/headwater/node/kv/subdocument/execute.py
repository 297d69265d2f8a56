"""A whole sub-document request against one document: its paths in their order, all of them or none.

Everything known comes in as values and everything decided goes out as an outcome; the handlers write it. A request that
is refused as a whole raises `RequestRefused`. A mutation that fails leaves nothing behind: it works on a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import LocalProtocolError
from headwater.node.kv.subdocument import json_text, requests
from headwater.node.kv.subdocument.mutation import DocumentTexts, Draft
from headwater.node.kv.subdocument.virtual_xattrs import (
    PREFIX,
    MacroExpansion,
    NewValue,
    SubdocDocument,
    virtual_xattr_text,
)
from headwater.protocol.features import Opcode
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
from headwater.protocol.values import Datatype, encode_xattrs

_NO_FLAGS = DocFlags(0)
_EMPTY = SubdocDocument(value=b"", datatype=Datatype.RAW)
_ARRAY_COMMANDS = frozenset(
    {Opcode.SUBDOC_ARRAY_PUSH_LAST, Opcode.SUBDOC_ARRAY_PUSH_FIRST, Opcode.SUBDOC_ARRAY_ADD_UNIQUE}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """One result a path, in the order of the request."""

    status: Status
    results: tuple[LookupResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFailed:
    """The first path that failed. The document stays as it was."""

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
    """The document is to be written: as a live one, or as a tombstone whose value is empty or system attributes."""

    status: Status
    results: tuple[MutationResult, ...]
    value: NewValue
    deleted: bool
    created: bool
    """No document was visible: the write must fail if there is one by then."""


# --- lookups --------------------------------------------------------------------------------------------------------


def lookup_in(
    document: SubdocDocument | None, specs: Sequence[LookupSpec], doc_flags: DocFlags = _NO_FLAGS
) -> LookedUp:
    """Look up all paths of a request. `document` is None if there is none, and may be a tombstone."""
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
    """Look up the path of a single-path request. The status of the result is that of the response."""
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
    """Apply all mutations of a request, or none. `document` is None if there is none, and may be a tombstone."""
    requests.check_many(specs, doc_flags, mutates=True)
    return _mutate(document, specs, doc_flags)


def mutate_one(document: SubdocDocument | None, spec: MutationSpec, doc_flags: DocFlags = _NO_FLAGS) -> Mutated:
    """Apply the mutation of a single-path request. If it fails, its status is that of the response."""
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
    # What macros say of a document that does not exist, they say of an empty one.
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
    """What a new document starts as: the first path decides whether it is an object or an array."""
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
