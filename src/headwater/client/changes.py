"""Typed changes: what `client.changes()` yields, one object per change.

A written document is a `Mutation`; a removed one is a `Deletion`, or an `Expiration` if its time ran out.
`CollectionCreated` and similar classes are events of collections and scopes. A `Rollback` reports that changes which
were yielded before never happened.

Keys are `str`, because Couchbase keys are UTF-8 and programs write them as text. Servers do not enforce that, so a
byte that is not UTF-8 becomes a lone surrogate, as in Python's file names; `key_bytes` returns the key as it was sent.
Arrow's text can't hold surrogates: batches show such a byte as `\\xff` (`split_keys`). Values are `bytes`: not every
document is JSON, and not every program that reads a document parses it.

A change of a document is a row of its batch, and reads its fields lazily: the first access to a field reads it for all
changes of a chunk at once, which costs a fraction of single reads. Unused fields are never built. When the walk leaves
a chunk, changes that the program still holds get their missing fields, so none keeps a batch in memory.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from itertools import pairwise, repeat
from sys import getrefcount
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
import pyarrow as pa

from headwater.errors import LocalProtocolError
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# --- documents ----------------------------------------------------------------------------------------------------


class _Row:
    """A row of a chunk. Fields that have not been read from it are empty slots."""

    __slots__ = ("_chunk",)

    if not TYPE_CHECKING:  # With it, a type checker would accept any name.

        def __getattr__(self, name: str) -> Any:
            if name in _FIELD_NAMES and (chunk := self._chunk) is not None:
                chunk.read(name)
            return object.__getattribute__(self, name)

    def keep(self) -> Self:
        """Read all fields now, so that the change no longer needs its batch. Returns the change.

        Without this call, a change that the program holds gets its fields when the walk leaves its chunk.
        """
        for name in _FIELD_NAMES:
            getattr(self, name)
        _CHUNK.__set__(self, None)
        return self


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DocumentChange(_Row):
    """A change of a document: a mutation, a deletion or an expiration."""

    op: ClassVar[str]

    vbucket: VBucketId
    vbuuid: Vbuuid
    """The branch of history on which the change was read."""
    seqno: Seqno
    rev: int
    """How often the document has been changed, including this time."""
    scope: str | None
    """None if the name is unknown: the scope was dropped before the reader started."""
    collection: str | None
    collection_id: CollectionId
    key: str
    value: bytes | None
    datatype: Datatype
    """JSON or RAW. The client has already removed compression and extended attributes."""
    flags: int
    """Set by the writer. SDKs record here how they encoded the value."""
    expiry: int
    """For a mutation: when the document will expire, 0 for never. For a removal: when it took place, 0 if unknown. In
    seconds since 1970."""
    cas: Cas
    snapshot_start: Seqno
    snapshot_end: Seqno
    xattrs: Mapping[str, bytes] | None = field(default=None, hash=False)
    """Name → JSON text, including attributes of the system (their names begin with `_`). None if the document has
    none, or if the read did not request them."""

    def __repr__(self) -> str:
        value = "" if self.value is None else f", value={_shortened(self.value)}"
        where = f"collection={self.scope}.{self.collection}, vbucket={self.vbucket}, seqno={self.seqno}"
        return f"<{type(self).__name__} of {self.key!r}: {where}, changed_at={self.changed_at}{value}>"

    @property
    def changed_at(self) -> datetime | None:
        """When the server made the change, according to its CAS. None if there is no CAS."""
        # The upper 48 bits are nanoseconds; the lower 16 distinguish changes of the same moment.
        return _EPOCH + timedelta(microseconds=(self.cas >> 16 << 16) // 1000) if self.cas else None

    @property
    def key_bytes(self) -> bytes:
        """The key as it was sent."""
        return self.key.encode(errors="surrogateescape")

    @property
    def is_json(self) -> bool:
        """Whether the server says that the value is JSON."""
        return Datatype.JSON in self.datatype

    def json(self) -> Any:
        """The value as Python objects; None without a value. Raises `LocalProtocolError` if it is not JSON."""
        if self.value is None:
            return None
        try:
            return _load(self.value)
        except (ValueError, RecursionError) as error:
            raise LocalProtocolError(
                f"the value of {self.key!r} can't be read as JSON: {error}",
                hint="Check `is_json` first, and use `value` if it is not JSON",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """The change as members of a JSON object.

        Data that JSON can't represent is base64 under another name: a key that is not UTF-8 as `key_base64`, a value
        that is not JSON as `value_base64`, extended attributes that are not JSON as `xattrs_base64`.
        """
        changed_at = self.changed_at
        return {
            "op": self.op,
            "vbucket": self.vbucket,
            "vbuuid": self.vbuuid,
            "seqno": self.seqno,
            "rev": self.rev,
            "scope": self.scope,
            "collection": self.collection,
            "collection_id": self.collection_id,
            **self._key_members(),
            **self._value_members(),
            "flags": self.flags,
            "expiry": self.expiry,
            "cas": self.cas,
            "changed_at": changed_at.isoformat(timespec="microseconds") if changed_at else None,
            "snapshot_start": self.snapshot_start,
            "snapshot_end": self.snapshot_end,
            **self._xattr_members(),
        }

    def _key_members(self) -> dict[str, Any]:
        try:
            self.key.encode()
        except UnicodeEncodeError:
            return {"key_base64": _base64(self.key_bytes)}
        return {"key": self.key}

    def _value_members(self) -> dict[str, Any]:
        if self.value is None:
            return {"value": None}
        # A value such as a number may be text to its writer. The server distinguishes JSON from text.
        if self.is_json and _is_json(self.value):
            return {"value": _load(self.value)}
        return {"value_base64": _base64(self.value)}

    def _xattr_members(self) -> dict[str, Any]:
        if self.xattrs is None:
            return {}
        as_json = {name: _load(text) for name, text in self.xattrs.items() if _is_json(text)}
        others = {name: _base64(text) for name, text in self.xattrs.items() if name not in as_json}
        return {"xattrs": as_json, "xattrs_base64": others} if others else {"xattrs": as_json}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Mutation(DocumentChange):
    """A document was written."""

    op = "mutation"
    value: bytes
    """Empty if the read did not request values."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Deletion(DocumentChange):
    """A document was deleted. Its value is what the tombstone keeps, which is usually nothing."""

    op = "deletion"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Expiration(DocumentChange):
    """A document was removed because its time ran out."""

    op = "expiration"


# --- collections and scopes ---------------------------------------------------------------------------------------


class _Members:
    """The JSON form of changes whose fields are numbers and names."""

    __slots__ = ()
    op: ClassVar[str]

    @property
    def changed_at(self) -> None:
        """Always None: servers send no time with these."""

    def keep(self) -> Self:
        """Return the change, which does not depend on a batch."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The change as members of a JSON object."""
        names = (member.name for member in fields(self))  # type: ignore[arg-type]
        return {"op": self.op, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeEvent(_Members):
    """A scope was created or dropped. Every vbucket sends this."""

    vbucket: VBucketId
    vbuuid: Vbuuid
    seqno: Seqno
    scope: str | None
    """None if the name is unknown."""
    snapshot_start: Seqno
    snapshot_end: Seqno


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeCreated(ScopeEvent):
    op = "scope_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeDropped(ScopeEvent):
    """The scope was dropped, after all its collections."""

    op = "scope_dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionEvent(ScopeEvent):
    """A collection was created, dropped or modified. Every vbucket sends this."""

    collection: str | None
    collection_id: CollectionId


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionCreated(CollectionEvent):
    """A collection was created. Also sent when a collection is flushed, which leaves it empty."""

    op = "collection_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionDropped(CollectionEvent):
    """The collection was dropped with all its documents. There are no deletions for the single documents."""

    op = "collection_dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionModified(CollectionEvent):
    """The settings of the collection changed."""

    op = "collection_modified"


# --- rollbacks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(_Members):
    """The vbucket's history has branched. Its changes above `seqno` are void and must be undone."""

    op = "rollback"

    vbucket: VBucketId
    seqno: Seqno
    """The last seqno that remains valid."""
    from_seqno: Seqno
    """The last seqno that had been yielded."""
    old_vbuuid: Vbuuid
    new_vbuuid: Vbuuid


CollectionOrScopeEvent = CollectionCreated | CollectionDropped | CollectionModified | ScopeCreated | ScopeDropped
Change = Mutation | Deletion | Expiration | CollectionOrScopeEvent | Rollback


# --- out of batches -----------------------------------------------------------------------------------------------

ROWS_AT_A_TIME = 1024
"""Rows per chunk. This many changes are created before the first of them is yielded."""

_DOCUMENTS: dict[str, type[Mutation | Deletion | Expiration]] = {
    cls.op: cls for cls in (Mutation, Deletion, Expiration)
}
_EVENTS: dict[str, type[CollectionOrScopeEvent]] = {
    cls.op: cls for cls in (CollectionCreated, CollectionDropped, CollectionModified, ScopeCreated, ScopeDropped)
}
_RARE_COLUMNS = ("op", "value", *(member.name for member in fields(CollectionEvent)))
_DATATYPES = [Datatype.RAW, Datatype.JSON]
_FIELD_NAMES = frozenset(member.name for member in fields(DocumentChange))
_CHUNK = _Row.__dict__["_chunk"]
_UNHELD_REFERENCES = next(map(getrefcount, [object()]))
"""The reference count of an object that only a list holds."""


def changes_of(batch: pa.RecordBatch) -> Iterator[Change]:
    """Yield the rows of a batch as changes, in order. The batch may have the column `xattrs` or not."""
    for chunk in chunks_of(batch):
        yield from chunk


def chunks_of(batch: pa.RecordBatch) -> Iterator[Sequence[Change]]:
    """Yield the same in chunks. A chunk is emptied when the caller requests the second one after it, or finishes."""
    # The caller may hold the last change of a chunk until it gets the first one of the next chunk: that alone is no
    # reason to read all fields of the chunk.
    open_chunks: deque[_Chunk] = deque()
    try:
        for start in range(0, batch.num_rows, ROWS_AT_A_TIME):
            open_chunks.append(_Chunk(batch.slice(start, ROWS_AT_A_TIME)))
            yield open_chunks[-1].changes
            if len(open_chunks) > 1:
                open_chunks.popleft().leave()
    finally:
        for chunk in open_chunks:
            chunk.leave()


class _Chunk:
    """Some rows of a batch, as changes."""

    __slots__ = ("_documents", "_rows", "_unread", "changes")

    def __init__(self, rows: pa.RecordBatch) -> None:
        ops = rows.column("op")
        classes = [_DOCUMENTS.get(op) for op in ops.dictionary.to_pylist()]
        codes = ops.indices.to_numpy()
        is_document = np.array([cls is not None for cls in classes])[codes]
        are_documents = bool(is_document.all())
        self._rows = rows if are_documents else rows.filter(pa.array(is_document))
        self._unread = set(_FIELD_NAMES)
        # The objects are created empty, and their slots filled one column at a time: that needs no bytecode per field,
        # and takes less than half the time of the constructor of a frozen class.
        self._documents: list[Change] = list(
            map(object.__new__, map(classes.__getitem__, codes[is_document].tolist()))  # type: ignore[arg-type]
        )
        _set_slots(_CHUNK, self._documents, repeat(self))
        self.changes = self._documents
        if not are_documents:
            documents, others = iter(self._documents), _events_and_rollbacks(rows.filter(pa.array(~is_document)))
            self.changes = [next(documents) if is_one else next(others) for is_one in is_document]

    def read(self, name: str) -> None:
        """Set this field of all documents."""
        _set_slots(getattr(DocumentChange, name), self._documents, _values(self._rows, name))
        # Only after setting: another thread may be in `leave`.
        self._unread.discard(name)

    def leave(self) -> None:
        """Set the missing fields of documents that the program holds, and forget all documents.

        A change and its chunk refer to each other: without this, only the garbage collector would free them.
        """
        if self.changes is not self._documents:
            self.changes.clear()
        references = map(getrefcount, self._documents)
        held = [row for row, count in enumerate(references) if count > _UNHELD_REFERENCES]
        if held:
            first, last = held[0], held[-1]
            rows = self._rows.slice(first, last + 1 - first)
            documents = [self._documents[row] for row in held]
            for name in tuple(self._unread):
                values = _values(rows, name)
                _set_slots(getattr(DocumentChange, name), documents, (values[row - first] for row in held))
            _set_slots(_CHUNK, documents, repeat(None))
        self._documents.clear()


def _set_slots(slot: Any, changes: Sequence[Change], values: Iterable[Any]) -> None:
    deque(map(slot.__set__, changes, values), maxlen=0)


def _values(batch: pa.RecordBatch, name: str) -> Sequence[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows  # the read did not request extended attributes
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        return _decoded(column)
    if name == "key":
        return _keys(column)
    if name == "datatype":
        return [_DATATYPES[datatype] for datatype in column.to_pylist()]
    if name == "xattrs":
        return _xattrs(column)
    values: list[Any] = column.to_pylist()
    return values


def _decoded(column: pa.DictionaryArray) -> list[Any]:
    """Return the texts of a dictionary column. Arrow itself would first make an object for each of them."""
    names = [*column.dictionary.to_pylist(), None]
    null = len(names) - 1
    codes = column.indices.fill_null(null) if column.indices.null_count else column.indices
    return [names[code] for code in codes.to_pylist()]


def _keys(column: pa.Array) -> list[str]:
    try:
        keys: list[str] = column.view(pa.string()).to_pylist()
    except UnicodeDecodeError:
        keys = [key.decode(errors="surrogateescape") for key in column.to_pylist()]
    return keys


def split_keys(keys: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the keys of a batch as text, with escapes in those that are not UTF-8, and the bytes of these."""
    try:
        return keys.cast(pa.string()), pa.nulls(len(keys), pa.binary())
    except pa.ArrowInvalid:
        pass
    # The import takes long, and only these keys need it.
    import pyarrow.compute as pc

    # ASCII keys are valid text; check only the others one by one.
    unsure = np.zeros(len(keys), dtype=np.bool_)
    offsets = np.frombuffer(keys.buffers()[1], dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1]
    data = np.frombuffer(keys.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    unsure[np.searchsorted(offsets - offsets[0], np.flatnonzero(data >= 0x80), side="right") - 1] = True
    unsure &= keys.is_valid().to_numpy(zero_copy_only=False)
    given = keys.filter(pa.array(unsure)).to_pylist()
    texts = [key.decode(errors="backslashreplace") for key in given]
    odd = [None if text.encode() == key else key for text, key in zip(texts, given, strict=True)]
    plain = pc.if_else(pa.array(unsure), pa.scalar(None, pa.binary()), keys).cast(pa.string())
    return (
        pc.replace_with_mask(plain, pa.array(unsure), pa.array(texts, pa.string())),
        pc.replace_with_mask(pa.nulls(len(keys), pa.binary()), pa.array(unsure), pa.array(odd, pa.binary())),
    )


def _xattrs(column: pa.MapArray) -> list[dict[str, bytes] | None]:
    """Read all pairs as two lists, and cut these where the rows end. Arrow itself would make objects for each pair."""
    offsets = column.offsets.to_pylist()
    first, last = offsets[0], offsets[-1]
    names = column.keys[first:last].to_pylist()
    texts = column.items[first:last].to_pylist()
    return [
        dict(zip(names[start - first : end - first], texts[start - first : end - first], strict=True))
        if is_there
        else None
        for is_there, (start, end) in zip(column.is_valid().to_pylist(), pairwise(offsets), strict=True)
    ]


def _events_and_rollbacks(batch: pa.RecordBatch) -> Iterator[Change]:
    rows = zip(*(_values(batch, name) for name in _RARE_COLUMNS), strict=True)
    for row in (dict(zip(_RARE_COLUMNS, values, strict=True)) for values in rows):
        if row["op"] == Rollback.op:
            yield Rollback(vbucket=row["vbucket"], seqno=row["seqno"], **json.loads(row["value"]))
        else:
            cls = _EVENTS[row["op"]]
            yield cls(**{member.name: row[member.name] for member in fields(cls)})


# --- JSON ---------------------------------------------------------------------------------------------------------


def _load(text: bytes) -> Any:
    # Decode first, because the library interprets some bytes as UTF-16.
    return json.loads(text.decode(), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a value of JSON")


def _is_json(text: bytes) -> bool:
    try:
        _load(text)
    except (ValueError, RecursionError):
        return False
    return True


REPR_BYTES_MAX = 80


def _shortened(value: bytes) -> str:
    """Shorten the value: a document may have 20 MiB, and a list may contain many."""
    return repr(value) if len(value) <= REPR_BYTES_MAX else f"{value[:REPR_BYTES_MAX]!r}… ({len(value):,} bytes)"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
