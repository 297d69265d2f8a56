"""The columns of a batch that the wire does not have as they are: filled for all rows at once.

What is constant in a run (its branch of history, its snapshot) is repeated for its rows; operation, datatype, expiry
and time are worked out from what was decoded; collection ids become codes of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.client.collection_names import NO_CODE, NameTable
from headwater.client.pieces import ChangeRun
from headwater.errors import UnexpectedMessage
from headwater.protocol.kernels.memory import Column, i64, kernel, u8, u64

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
    """The columns of the rows that `decoded` holds, which are those of `runs`, `run_rows` of each."""

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
        """One block of Arrow's own pool, which gives freed blocks out again while they are warm."""
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
        """A column that has no nulls."""
        return pa.Array.from_buffers(type_, self._rows, [None, self._buffers[name]])

    def changed_at(self, type_: pa.DataType, cas: pa.Array) -> pa.Array:
        """Null where the CAS is 0."""
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
        """The values, null where a document was removed and nothing of it is left."""
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
    run_rows: Column, run_vbuckets: Column, run_vbuuids: Column, run_starts: Column, run_ends: Column,
    vbuckets: Column, vbuuids: Column, starts: Column, ends: Column,
) -> int:  # fmt: skip
    """Fill the columns. Returns the first row that is of another vbucket than its run, or -1."""
    row = 0
    for run in range(len(run_rows)):
        end = row + i64(run_rows[run])
        vbuuids[row:end] = run_vbuuids[run]
        starts[row:end] = run_starts[run]
        ends[row:end] = run_ends[run]
        strays = 0
        for i in range(row, end):
            strays += vbuckets[i] != run_vbuckets[run]
        if strays:
            while vbuckets[row] == run_vbuckets[run]:
                row += 1
            return row
        row = end
    return -1


@kernel
def _fill_rows(
    opcodes: Column, datatypes: Column, expiries: Column, delete_times: Column, cas: Column,
    ops: Column, plain_datatypes: Column, times: Column, changed_at: Column,
) -> tuple[bool, bool]:  # fmt: skip
    """Fill the columns, and tell whether there are removals, and CASes of 0.

    One short loop a column: the compiler turns each into instructions that work on many rows at a time.
    """
    removals = u8(0)
    for row in range(len(opcodes)):
        op = opcodes[row] - u8(0x57)  # mutation, deletion, expiration: 0, 1, 2
        ops[row] = op
        removals |= op
    for row in range(len(opcodes)):
        plain_datatypes[row] = datatypes[row] & u8(0x01)
    for row in range(len(opcodes)):
        times[row] = expiries[row] | delete_times[row]  # a message has one of them at most
    has_zero_cas = False
    for row in range(len(opcodes)):
        # The upper 48 bits are nanoseconds since 1970, the lower ones tell changes of the same moment apart.
        changed_at[row] = (cas[row] & u64(0xFFFF_FFFF_FFFF_0000)) // u64(1000)
        has_zero_cas |= cas[row] == 0
    return removals != 0, has_zero_cas


@kernel
def _fill_names(
    ids: Column, known_ids: Column, scope_codes: Column, collection_codes: Column, scopes: Column, collections: Column
) -> bool:
    """Fill in the codes of the names, and tell whether one is not known."""
    has_unknown = False
    id_before = i64(-1)
    scope = i64(NO_CODE)
    collection = i64(NO_CODE)
    for row in range(len(ids)):
        id_ = i64(ids[row])
        if id_ != id_before:  # neighbours are mostly of one collection
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
def mark_kept(ids: Column, keep: Column, run_rows: Column, marks: Column, kept_rows: Column) -> None:
    """Mark the rows whose collection is among `keep`, which rises, and count them run by run."""
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
