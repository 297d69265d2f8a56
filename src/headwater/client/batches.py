"""Builds Arrow batches from pieces: one row per change, with no Python object per row.

All runs of a batch are decoded together; values are decompressed and extended attributes split off if there are any.
Events and rollbacks are rare, so their rows are built one by one and inserted. `reading` calls this from any thread;
nothing here knows about connections.

A row is one of these, by its `op`:

* a mutation, a deletion or an expiration of a document;
* a collection or a scope that was created, dropped or (a collection) modified. It has no key and no value, and for a
  scope no collection;
* a rollback: everything of the vbucket above `seqno`, on other branches than `vbuuid`, is void. Its value is JSON with
  `from_seqno`, `old_vbuuid` and `new_vbuuid`.

Keys are bytes here, because the lake and Spark compare and hash bytes. Users get text: `with_text_keys`.

Names are null if no manifest and no event contained them: the collection was dropped before the reader started.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.client.changes import split_keys
from headwater.client.collection_names import NO_CODE, CollectionFilter, CollectionNames, NameTable
from headwater.client.pieces import ChangeRun, EventPiece, Piece, RollbackPiece
from headwater.errors import UnexpectedMessage
from headwater.kernels.memory import (
    Bools,
    Bytes,
    Column,
    Int8s,
    Int32s,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyUInt16s,
    ReadOnlyUInt32s,
    ReadOnlyUInt64s,
    UInt16s,
    UInt32s,
    UInt64s,
    i64,
    kernel,
    u8,
    u64,
)
from headwater.protocol.kernels import decompress_values
from headwater.protocol.kernels.decode import decode_runs
from headwater.protocol.kernels.xattr_split import XATTRS_TYPE, split_xattrs
from headwater.protocol.manifest import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    Event,
    ScopeCreated,
    ScopeDropped,
)
from headwater.protocol.values import Datatype

OPS = (
    "mutation", "deletion", "expiration", "rollback", "collection_created", "collection_dropped",
    "collection_modified", "scope_created", "scope_dropped",
)  # fmt: skip
"""The values of `op`. The first three are in the order of their opcodes."""
SYSTEM_EVENT_OPS = OPS[4:]
"""Events of scopes and collections. Every vbucket sends them, and they change no document."""

_NAME_TYPE = pa.dictionary(pa.int32(), pa.string())

RAW_SCHEMA = pa.schema(
    [
        pa.field("vbucket", pa.uint16(), nullable=False),
        pa.field("vbuuid", pa.uint64(), nullable=False),
        pa.field("seqno", pa.uint64(), nullable=False),
        pa.field("rev", pa.uint64(), nullable=False),
        pa.field("op", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("scope", _NAME_TYPE),
        pa.field("collection", _NAME_TYPE),
        pa.field("collection_id", pa.uint32()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("datatype", pa.uint8(), nullable=False),
        pa.field("flags", pa.uint32(), nullable=False),
        pa.field("expiry", pa.uint32(), nullable=False),
        pa.field("cas", pa.uint64(), nullable=False),
        pa.field("changed_at", pa.timestamp("us", tz="UTC")),
        pa.field("snapshot_start", pa.uint64(), nullable=False),
        pa.field("snapshot_end", pa.uint64(), nullable=False),
    ]
)
"""A field that a row does not have is null, or 0 if the column is not nullable.

`value` is only the decompressed body, so `datatype` keeps only the JSON bit. It is null for a removal that left no
value. `expiry` is in seconds since 1970: for a mutation, when the document will expire; for a removal, when it took
place, if the server sends that. `changed_at` comes from the CAS, and is null if the CAS is 0.
"""

_KEY = RAW_SCHEMA.get_field_index("key")
CHANGE_SCHEMA = RAW_SCHEMA.set(_KEY, pa.field("key", pa.string())).insert(_KEY + 1, pa.field("key_bytes", pa.binary()))
"""The same with keys as text, as in the tables and in Spark. Servers accept keys that are not valid UTF-8: such a key
has its bytes in `key_bytes`, and escapes such as `\\xff` in `key`. For all other keys `key_bytes` is null."""

_OP_NAMES = pa.array(OPS, pa.string())
_EVENT_OPS: dict[type[Event], str] = {
    CollectionCreated: "collection_created",
    CollectionDropped: "collection_dropped",
    CollectionModified: "collection_modified",
    ScopeCreated: "scope_created",
    ScopeDropped: "scope_dropped",
}


def raw_schema(*, xattrs: bool) -> pa.Schema:
    """The schema of the batches that `build_batch` returns."""
    return _with_xattrs(RAW_SCHEMA) if xattrs else RAW_SCHEMA


def change_schema(*, xattrs: bool) -> pa.Schema:
    """The schema of the batches that users get. With `xattrs`, it has one more column: name → JSON text.

    It contains all attributes, also those of the system, whose names begin with `_`. It is null for a change without
    any.
    """
    return _with_xattrs(CHANGE_SCHEMA) if xattrs else CHANGE_SCHEMA


def _with_xattrs(schema: pa.Schema) -> pa.Schema:
    return schema.append(pa.field("xattrs", XATTRS_TYPE))


def build_batch(
    pieces: Sequence[Piece],
    names: CollectionNames,
    *,
    collections: bool,
    xattrs: bool,
    only: CollectionFilter | None = None,
) -> pa.RecordBatch:
    """Build the rows of all pieces, in order.

    `collections` says whether the connection negotiated collections; without them, every row is in the default
    collection. `names` first learns from the events among the pieces. `only` drops the changes and events of all other
    collections, for filters that a server does not support; rollbacks always stay.

    Raises the matching `RemoteProtocolError` if frames, compression or extended attributes are malformed.
    """
    for piece in pieces:
        if isinstance(piece, EventPiece):
            names.learn(piece.event)
    runs = [piece for piece in pieces if isinstance(piece, ChangeRun)]
    changes, run_rows = _change_rows(runs, names, collections=collections, xattrs=xattrs, only=only)
    if len(runs) == len(pieces):
        return changes
    return _in_order(pieces, changes, run_rows, names, only)


# --- changes of documents -----------------------------------------------------------------------------------------


def _change_rows(
    runs: Sequence[ChangeRun], names: CollectionNames, *, collections: bool, xattrs: bool, only: CollectionFilter | None
) -> tuple[pa.RecordBatch, Column]:
    """Return the rows of the runs, and the number of rows of each run."""
    found = decode_runs([run.data for run in runs], collections=collections)
    decoded, run_rows = found.batch, found.rows
    if only is not None:
        decoded, run_rows = _filter(decoded, run_rows, names.ids_in(only))
    filled = FilledColumns(decoded, runs, run_rows, names.table)
    values, xattr_column = _read_values(decoded)
    schema = raw_schema(xattrs=xattrs)
    columns = {
        **{name: decoded.column(name) for name in ("vbucket", "seqno", "collection_id", "key", "flags", "cas")},
        **{name: filled.plain(name, schema.field(name).type) for name in _FILLED_PLAIN},
        "rev": decoded.column("rev_seqno"),
        "op": filled.op(schema.field("op").type, _OP_NAMES),
        "scope": filled.scope(_NAME_TYPE),
        "collection": filled.collection(_NAME_TYPE),
        "value": filled.without_empty_removals(values),
        "changed_at": filled.changed_at(schema.field("changed_at").type, decoded.column("cas")),
        "xattrs": xattr_column,
    }
    if xattrs and xattr_column is None:
        columns["xattrs"] = pa.nulls(decoded.num_rows, XATTRS_TYPE)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema), run_rows


_FILLED_PLAIN = ("vbuuid", "datatype", "expiry", "snapshot_start", "snapshot_end")


def _filter(decoded: pa.RecordBatch, run_rows: Column, keep: Column) -> tuple[pa.RecordBatch, Column]:
    marks = np.empty(decoded.num_rows, dtype=np.bool_)
    kept_rows = np.empty_like(run_rows)
    mark_kept(decoded.column("collection_id").to_numpy(), keep, run_rows, marks, kept_rows)
    return (decoded if marks.all() else decoded.filter(pa.array(marks))), kept_rows


def _read_values(decoded: pa.RecordBatch) -> tuple[pa.Array, pa.Array | None]:
    """Return the decompressed bodies, and the extended attributes if any row has them."""
    datatypes = decoded.column("datatype").to_numpy()
    if not _has(datatypes, Datatype.SNAPPY | Datatype.XATTR):
        return decoded.column("value"), None
    # With no_value, a server may still send the datatypes of the values. A missing value is not compressed.
    datatypes = np.where(value_lengths(decoded.column("value")) > 0, datatypes, np.uint8(0))
    if _has(datatypes, Datatype.SNAPPY):
        index = decoded.schema.get_field_index("datatype")
        decoded = decompress_values(decoded.set_column(index, decoded.schema.field(index), pa.array(datatypes)))
    values = decoded.column("value")
    if not _has(datatypes, Datatype.XATTR):
        return values, None
    split = split_xattrs(values, datatypes)
    return split.bodies, split.xattrs


def _has(datatypes: Column, bits: Datatype) -> bool:
    return bool(np.bitwise_or.reduce(datatypes, initial=0) & bits)


# --- events and rollbacks -----------------------------------------------------------------------------------------


def _in_order(
    pieces: Sequence[Piece],
    changes: pa.RecordBatch,
    run_rows: Column,
    names: CollectionNames,
    only: CollectionFilter | None,
) -> pa.RecordBatch:
    """Return the rows of all pieces: `changes`, with the rows of events and rollbacks inserted in their places."""
    rare: list[dict[str, Any]] = []
    spans: list[tuple[bool, int, int]] = []
    start = 0
    run = 0
    for is_runs, group in groupby(pieces, key=lambda piece: isinstance(piece, ChangeRun)):
        if is_runs:
            count = len(list(group))
            rows = int(run_rows[run : run + count].sum())
            spans.append((True, start, rows))
            start, run = start + rows, run + count
        else:
            rare_before = len(rare)
            rare.extend(_rare_rows(group, names, only))
            spans.append((False, rare_before, len(rare) - rare_before))
    others = _to_batch(rare, names, changes.schema)
    parts = [(changes if is_runs else others).slice(start, rows) for is_runs, start, rows in spans]
    # The oldest supported pyarrow does not have `pa.concat_batches`.
    joined = pa.Table.from_batches(parts, changes.schema).combine_chunks().to_batches()
    return joined[0] if joined else changes.slice(0, 0)


def _rare_rows(
    pieces: Iterable[Piece], names: CollectionNames, only: CollectionFilter | None
) -> Iterator[dict[str, Any]]:
    for piece in pieces:
        if isinstance(piece, RollbackPiece):
            yield _rollback_row(piece)
        elif isinstance(piece, EventPiece) and (only is None or only.passes(piece.event)):
            yield _event_row(piece, names)


def _rollback_row(piece: RollbackPiece) -> dict[str, Any]:
    details = {"from_seqno": piece.from_seqno, "old_vbuuid": piece.old_vbuuid, "new_vbuuid": piece.new_vbuuid}
    return {
        "op": OPS.index("rollback"),
        "vbucket": piece.vbucket,
        "vbuuid": piece.new_vbuuid,
        "seqno": piece.seqno,
        "value": json.dumps(details).encode(),
        # The consumer is now at the end of a whole snapshot, which starts and ends with this seqno.
        "snapshot_start": piece.seqno,
        "snapshot_end": piece.seqno,
    }


def _event_row(piece: EventPiece, names: CollectionNames) -> dict[str, Any]:
    event = piece.event
    row = {
        "op": OPS.index(_EVENT_OPS[type(event)]),
        "vbucket": piece.vbucket,
        "vbuuid": piece.vbuuid,
        "seqno": piece.seqno,
        "scope": names.scope_code(event.scope_id),
        "snapshot_start": piece.snapshot_start,
        "snapshot_end": piece.snapshot_end,
    }
    if not isinstance(event, ScopeCreated | ScopeDropped):
        row["collection"] = names.collection_code(event.collection_id)
        row["collection_id"] = event.collection_id
    return row


def _to_batch(rows: Sequence[dict[str, Any]], names: CollectionNames, schema: pa.Schema) -> pa.RecordBatch:
    """Make a batch of rows whose operation and names are codes. Missing values are null, or 0 if not nullable."""
    dictionaries = {"op": _OP_NAMES, "scope": names.table.scopes, "collection": names.table.collections}
    columns = []
    for field in schema:
        column = [row.get(field.name, None if field.nullable else 0) for row in rows]
        if field.name in dictionaries:
            codes = pa.array([None if code == NO_CODE else code for code in column], field.type.index_type)
            columns.append(pa.DictionaryArray.from_arrays(codes, dictionaries[field.name]))
        else:
            columns.append(pa.array(column, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- keys as text -------------------------------------------------------------------------------------------------


def with_text_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert a batch of `raw_schema` to `change_schema`. If all keys are UTF-8, no bytes are copied."""
    keys, key_bytes = split_keys(batch.column("key"))
    columns = batch.columns
    columns[_KEY : _KEY + 1] = [keys, key_bytes]
    return pa.RecordBatch.from_arrays(columns, schema=change_schema(xattrs="xattrs" in batch.schema.names))


# --- filled columns -----------------------------------------------------------------------------------------------
#
# Columns that are not on the wire as such, filled for all rows at once. What is constant in a run (its branch of
# history, its snapshot) is repeated for its rows; operation, datatype, expiry and time are computed from decoded
# fields; collection ids become codes of names.

_DTYPES: dict[str, np.dtype[Any]] = {
    "vbuuid": np.dtype(np.uint64),
    "snapshot_start": np.dtype(np.uint64),
    "snapshot_end": np.dtype(np.uint64),
    "changed_at": np.dtype(np.int64),
    "expiry": np.dtype(np.uint32),
    "scope": np.dtype(np.int32),
    "collection": np.dtype(np.int32),
    "op": np.dtype(np.int8),
    "datatype": np.dtype(np.uint8),
}
_ALIGNMENT_BYTES = 64  # what Arrow recommends


class FilledColumns:
    """The filled columns of the rows in `decoded`: the rows of `runs`, of which run `i` has `run_rows[i]`."""

    def __init__(self, decoded: pa.RecordBatch, runs: Sequence[ChangeRun], run_rows: Column, table: NameTable) -> None:
        self._rows = decoded.num_rows
        self._table = table
        self._allocate()
        stray_row = _fill_runs(
            run_rows,
            np.array([run.vbucket for run in runs], dtype=np.uint16),
            np.array([run.vbuuid for run in runs], dtype=np.uint64),
            np.array([run.snapshot_start for run in runs], dtype=np.uint64),
            np.array([run.snapshot_end for run in runs], dtype=np.uint64),
            decoded.column("vbucket").to_numpy(),
            *(self._columns[name] for name in ("vbuuid", "snapshot_start", "snapshot_end")),
        )
        if stray_row >= 0:
            raise UnexpectedMessage(f"a change of vbucket {decoded.column('vbucket')[stray_row]} on another's stream")
        sources = ("opcode", "datatype", "expiry", "delete_time", "cas")
        self._has_removals, self._has_zero_cas = _fill_rows(
            *(decoded.column(name).to_numpy() for name in sources),
            *(self._columns[name] for name in ("op", "datatype", "expiry", "changed_at")),
        )
        self._has_unknown = _fill_names(
            decoded.column("collection_id").to_numpy(),
            table.collection_ids,
            table.scope_codes,
            table.collection_codes,
            self._columns["scope"],
            self._columns["collection"],
        )

    def _allocate(self) -> None:
        """Allocate all columns as one block of Arrow's pool, which reuses freed blocks while they are cached."""
        spans = {name: self._rows * dtype.itemsize for name, dtype in _DTYPES.items()}
        *starts, end = accumulate((_aligned(length) for length in spans.values()), initial=0)
        block = pa.allocate_buffer(end)
        room = np.frombuffer(block, dtype=np.uint8)
        self._buffers: dict[str, pa.Buffer] = {}
        self._columns: dict[str, Column] = {}
        for (name, length), start in zip(spans.items(), starts, strict=True):
            self._buffers[name] = block.slice(start, length)
            self._columns[name] = room[start : start + length].view(_DTYPES[name])

    def plain(self, name: str, type_: pa.DataType) -> pa.Array:
        """Return a column that has no nulls."""
        return pa.Array.from_buffers(type_, self._rows, [None, self._buffers[name]])

    def changed_at(self, type_: pa.DataType, cas: pa.Array) -> pa.Array:
        """Return `changed_at`, which is null where the CAS is 0."""
        validity = _validity(cas.to_numpy() != 0) if self._has_zero_cas else None
        return pa.Array.from_buffers(type_, self._rows, [validity, self._buffers["changed_at"]])

    def op(self, type_: pa.DataType, names: pa.Array) -> pa.Array:
        return self._coded("op", type_, names, None)

    def scope(self, type_: pa.DataType) -> pa.Array:
        return self._coded("scope", type_, self._table.scopes, self._known("scope"))

    def collection(self, type_: pa.DataType) -> pa.Array:
        return self._coded("collection", type_, self._table.collections, self._known("collection"))

    def _known(self, name: str) -> pa.Buffer | None:
        return _validity(self._columns[name] != NO_CODE) if self._has_unknown else None

    def _coded(self, name: str, type_: pa.DataType, names: pa.Array, validity: pa.Buffer | None) -> pa.Array:
        return pa.DictionaryArray.from_buffers(type_, self._rows, [validity, self._buffers[name]], names)

    def without_empty_removals(self, values: pa.Array) -> pa.Array:
        """Return the values, with null for removals that have no value."""
        if not self._has_removals:
            return values
        is_there = (self._columns["op"] == 0) | (value_lengths(values) > 0)
        _, offsets, data = values.buffers()
        return pa.Array.from_buffers(values.type, self._rows, [_validity(is_there), offsets, data])


def value_lengths(values: pa.Array) -> Column:
    assert values.offset == 0, "the values of a batch that was made here begin where their buffers do"
    return np.diff(np.frombuffer(values.buffers()[1], dtype=np.int32)[: len(values) + 1])


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _validity(is_valid: Column) -> pa.Buffer:
    return pa.py_buffer(np.packbits(is_valid, bitorder="little"))


@kernel
def _fill_runs(
    run_rows: Int64s, run_vbuckets: UInt16s, run_vbuuids: UInt64s, run_starts: UInt64s, run_ends: UInt64s,
    vbuckets: ReadOnlyUInt16s, vbuuids: UInt64s, starts: UInt64s, ends: UInt64s,
) -> int:  # fmt: skip
    """Fill the columns. Returns the first row whose vbucket differs from that of its run, or -1."""
    row = 0
    for run in range(len(run_rows)):
        end = row + i64(run_rows[run])
        strays = 0
        for i in range(row, end):
            vbuuids[i] = run_vbuuids[run]
            starts[i] = run_starts[run]
            ends[i] = run_ends[run]
            strays += vbuckets[i] != run_vbuckets[run]
        if strays:
            while vbuckets[row] == run_vbuckets[run]:
                row += 1
            return row
        row = end
    return -1


@kernel
def _fill_rows(
    opcodes: ReadOnlyBytes, datatypes: ReadOnlyBytes, expiries: ReadOnlyUInt32s, delete_times: ReadOnlyUInt32s,
    cas: ReadOnlyUInt64s, ops: Int8s, plain_datatypes: Bytes, times: UInt32s, changed_at: Int64s,
) -> tuple[bool, bool]:  # fmt: skip
    """Fill the columns. Returns whether there are removals, and whether there are CASes of 0.

    One short loop per column: the compiler vectorizes each of them.
    """
    removals = u8(0)
    for row in range(len(opcodes)):
        op = opcodes[row] - u8(0x57)  # mutation, deletion, expiration: 0, 1, 2
        ops[row] = op
        removals |= op
    for row in range(len(opcodes)):
        plain_datatypes[row] = datatypes[row] & u8(0x01)
    for row in range(len(opcodes)):
        times[row] = expiries[row] | delete_times[row]  # a message has at most one of them
    has_zero_cas = False
    for row in range(len(opcodes)):
        # The CAS is nanoseconds since 1970 in the upper 48 bits; the lower 16 distinguish changes of the same moment.
        changed_at[row] = (cas[row] & u64(0xFFFF_FFFF_FFFF_0000)) // u64(1000)
        has_zero_cas |= cas[row] == 0
    return removals != 0, has_zero_cas


@kernel
def _fill_names(
    ids: ReadOnlyUInt32s,
    known_ids: UInt32s,
    scope_codes: Int32s,
    collection_codes: Int32s,
    scopes: Int32s,
    collections: Int32s,
) -> bool:
    """Fill in the codes of the names. Returns whether any name is unknown."""
    has_unknown = False
    id_before = i64(-1)
    scope = i64(NO_CODE)
    collection = i64(NO_CODE)
    for row in range(len(ids)):
        id_ = i64(ids[row])
        if id_ != id_before:  # neighbouring rows are mostly in one collection
            id_before = id_
            entry = np.searchsorted(known_ids, ids[row])
            is_known = entry < len(known_ids) and known_ids[entry] == ids[row]
            scope = i64(scope_codes[entry]) if is_known else i64(NO_CODE)
            collection = i64(collection_codes[entry]) if is_known else i64(NO_CODE)
            has_unknown |= scope == NO_CODE or collection == NO_CODE
        scopes[row] = scope
        collections[row] = collection
    return has_unknown


@kernel
def mark_kept(ids: ReadOnlyUInt32s, keep: UInt32s, run_rows: Int64s, marks: Bools, kept_rows: Int64s) -> None:
    """Mark the rows whose collection is in `keep` (sorted), and count them for each run."""
    row = i64(0)
    id_before = i64(-1)
    is_kept = False
    for run in range(len(run_rows)):
        kept_rows[run] = 0
        for _ in range(run_rows[run]):
            id_ = i64(ids[row])
            if id_ != id_before:
                id_before = id_
                entry = np.searchsorted(keep, ids[row])
                is_kept = entry < len(keep) and keep[entry] == ids[row]
            marks[row] = is_kept
            kept_rows[run] += is_kept
            row += 1
