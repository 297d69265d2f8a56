"""Pieces of the changes to Arrow batches: one row a change, with no Python object per row.

The runs of a batch are decoded in one go; values are inflated, and extended attributes split off, where there are any.
Events and rollbacks are rare: their rows are made one by one and put in their places.

A row is one of these, told by `op`:

* a mutation, a deletion or an expiration of a document;
* a collection or a scope that was created, dropped or (a collection) modified. It has no key and no value, and for a
  scope no collection;
* a rollback: everything of the vbucket above `seqno`, on other branches than `vbuuid`, is void. Its value is JSON with
  `from_seqno`, `old_vbuuid` and `new_vbuuid`.

Names are null where nobody has told them: the id was given out and dropped before the reader came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.client.batch_columns import FilledColumns, mark_kept, value_lengths
from headwater.client.collection_names import NO_CODE, CollectionFilter, CollectionNames
from headwater.client.pieces import ChangeRun, EventPiece, Piece, RollbackPiece
from headwater.protocol.datatype import Datatype
from headwater.protocol.kernels import decompress_values
from headwater.protocol.kernels.decode_runs import decode_runs
from headwater.protocol.kernels.memory import Column
from headwater.protocol.kernels.xattr_split import XATTRS_TYPE, split_xattrs
from headwater.protocol.system_events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    Event,
    ScopeCreated,
    ScopeDropped,
)

OPS = (
    "mutation",
    "deletion",
    "expiration",
    "rollback",
    "collection_created",
    "collection_dropped",
    "collection_modified",
    "scope_created",
    "scope_dropped",
)
"""The values of `op`. The first three are in the order of their opcodes."""

_NAME_TYPE = pa.dictionary(pa.int32(), pa.string())

CHANGE_SCHEMA = pa.schema(
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
"""What a row does not have is 0 where it can't be null.

`value` is the body alone, inflated, so `datatype` has only the JSON bit left. It is null where a document was removed
and nothing of it is left. `expiry` is in seconds since 1970: of a mutation when it will expire, of a removal when it
took place, where the server tells that. `changed_at` is from the CAS, and null where that is 0.
"""

_SCHEMA_WITH_XATTRS = CHANGE_SCHEMA.append(pa.field("xattrs", XATTRS_TYPE))

_OP_NAMES = pa.array(OPS, pa.string())
_EVENT_OPS: dict[type[Event], str] = {
    CollectionCreated: "collection_created",
    CollectionDropped: "collection_dropped",
    CollectionModified: "collection_modified",
    ScopeCreated: "scope_created",
    ScopeDropped: "scope_dropped",
}


def change_schema(*, xattrs: bool) -> pa.Schema:
    """The schema of the batches. With `xattrs` they have a column more: name → JSON text.

    All attributes are there, also those of the system, whose names begin with `_`. The column is null for a change
    that has none.
    """
    return _SCHEMA_WITH_XATTRS if xattrs else CHANGE_SCHEMA


def build_batch(
    pieces: Sequence[Piece],
    names: CollectionNames,
    *,
    collections: bool,
    xattrs: bool,
    only: CollectionFilter | None = None,
) -> pa.RecordBatch:
    """The rows of all pieces, in their order.

    `collections` says whether collections were negotiated on the connection; if not, everything is in the default
    one. `names` learns from the events among the pieces first. `only` drops the changes and events of all other
    collections, for filters that a server does not know; rollbacks always stay.

    Raises the `RemoteProtocolError` that names it where frames, compression or extended attributes are not sound.
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
    """The rows of the runs, and how many there are of each."""
    found = decode_runs([run.data for run in runs], collections=collections)
    decoded, run_rows = found.batch, found.rows
    if only is not None:
        decoded, run_rows = _filter(decoded, run_rows, names.ids_in(only))
    filled = FilledColumns(decoded, runs, run_rows, names.table)
    values, xattr_column = _read_values(decoded)
    schema = change_schema(xattrs=xattrs)
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
    """The bodies, inflated, and the extended attributes, where any row has them."""
    datatypes = decoded.column("datatype").to_numpy()
    if not _has(datatypes, Datatype.SNAPPY | Datatype.XATTR):
        return decoded.column("value"), None
    # A server that was asked for no values may still tell their datatypes. What is not there is not compressed.
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
    """The rows of all pieces: those of the runs, which are there, and those of events and rollbacks between them."""
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
    return pa.concat_batches([(changes if is_runs else others).slice(start, rows) for is_runs, start, rows in spans])


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
        # What is kept is whole again: a snapshot that holds nothing but its end.
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
    """Rows whose operation and names are codes; what they lack is null, or 0 where it can't be."""
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
