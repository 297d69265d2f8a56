"""The mutations of a read in temporary files, one a collection, to be read again when it is known which hold.

`headwater export` puts every batch in, and at the end takes the live documents of each collection out. A read can't say
earlier which documents it leaves: a rollback or the end of a collection makes rows void that came long before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from numpy.typing import NDArray

from headwater.client.offsets import VBUCKETS_MAX
from headwater.errors import StoreFull

_Marks = NDArray[np.bool_]
_Numbers = NDArray[np.int64]

_DOCUMENT_OPS = ("mutation", "deletion", "expiration")
_VOIDING_OPS = ("rollback", "collection_created", "collection_dropped")
_NO_SNAPSHOT = np.uint64(2**64 - 1)
_LATER = ["identity", "vbucket", "seqno", "collection_id", "position"]
_KEPT = ("vbucket", "seqno", "collection_id", "key", "value", "datatype", "flags", "expiry")
POSITION = "position"


class DocumentSpool:
    """Takes batches in, and gives back the live documents of each collection. `folder` is the caller's to remove."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._survivors = Survivors()
        self._writers: dict[tuple[str, str], pa.RecordBatchFileWriter] = {}

    @property
    def rows(self) -> int:
        """That have come, of all kinds."""
        return self._survivors.positions

    def add(self, batch: pa.RecordBatch) -> None:
        are_mutations, positions = self._survivors.note(batch)
        if not are_mutations.any():
            return
        for name, marks in _by_collection(batch, are_mutations):
            rows = batch.select(_KEPT).append_column(POSITION, pa.array(positions))
            try:
                self._writer(name, rows.schema).write_batch(rows if marks.all() else rows.filter(pa.array(marks)))
            except OSError as error:
                raise StoreFull(
                    f"{self._folder} can't take the documents: {error.strerror or error}",
                    hint="Export to a disk with more room: it needs that of the documents twice for a time",
                ) from error

    def collections(self) -> list[tuple[str, str]]:
        """Scopes and collections that have had a document, in order. No more can be added then."""
        for writer in self._writers.values():
            writer.close()
        return sorted(self._writers)

    def documents(self, name: tuple[str, str]) -> Iterator[pa.RecordBatch]:
        """The live documents of a collection, with `key`, `value`, `datatype`, `flags` and `expiry`."""
        with pa.memory_map(str(self._path(name))) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                alive = self._survivors.alive(batch, batch.column(POSITION).to_numpy())
                if alive.any():
                    yield batch if alive.all() else batch.filter(pa.array(alive))

    def _writer(self, name: tuple[str, str], schema: pa.Schema) -> pa.RecordBatchFileWriter:
        if name not in self._writers:
            self._writers[name] = pa.ipc.new_file(str(self._path(name)), schema)
        return self._writers[name]

    def _path(self, name: tuple[str, str]) -> Path:
        return self._folder / f"{name[0]}.{name[1]}.arrow"


def _by_collection(batch: pa.RecordBatch, wanted: np.ndarray) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """The collections of a batch, and which of the wanted rows are in each."""
    ids = batch.column("collection_id").fill_null(0).to_numpy()
    for collection_id in np.unique(ids[wanted]):
        marks = wanted & (ids == collection_id)
        row = int(np.flatnonzero(marks)[0])
        scope, collection = (batch.column(name)[row].as_py() for name in ("scope", "collection"))
        # A collection that is gone has no name, and nothing of it is alive.
        if scope is not None and collection is not None:
            yield (scope, collection), marks


# --- which rows of a read still hold at its end -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Void:
    """Rows of a vbucket before a position do not hold: those of a collection, or else those above a seqno."""

    before: int
    vbucket: int
    seqno: int
    collection_id: int | None


@dataclass(slots=True)
class Survivors:
    """Takes every batch in order by `note`, and says by `alive` which rows hold, when all have come. Rows are numbered.

    Inside a snapshot a key comes once. So a row can be void for three causes only, all of which come behind it: a row
    of the same key in a later snapshot of its vbucket, a rollback of the vbucket, or an event that dropped its
    collection or created it again. Only those are kept in memory; a bucket at rest has a single snapshot a vbucket, and
    none of them.
    """

    positions: int = 0
    """Of rows that have been noted."""
    _voids: list[_Void] = field(default_factory=list)
    _later: list[pa.Table] = field(default_factory=list)
    _first_start: NDArray[np.uint64] = field(default_factory=lambda: np.full(VBUCKETS_MAX, _NO_SNAPSHOT))
    _first_end: NDArray[np.uint64] = field(default_factory=lambda: np.full(VBUCKETS_MAX, _NO_SNAPSHOT))
    _superseded: tuple[pa.Array, _Numbers] | None = None
    _has_later: _Marks = field(default_factory=lambda: np.zeros(VBUCKETS_MAX, dtype=np.bool_))

    def note(self, batch: pa.RecordBatch) -> tuple[_Marks, _Numbers]:
        """Gives which rows of a batch are mutations, and the positions of all rows."""
        positions = np.arange(self.positions, self.positions + batch.num_rows)
        self.positions += batch.num_rows
        ops = batch.column("op")
        is_op = {op: _is(ops, op) for op in ops.dictionary.to_pylist()}
        nowhere = np.zeros(batch.num_rows, dtype=np.bool_)
        for row in np.flatnonzero(np.logical_or.reduce([is_op.get(op, nowhere) for op in _VOIDING_OPS])):
            self._note_void(_void(batch, int(row), int(positions[row])))
        are_documents = np.logical_or.reduce([is_op.get(op, nowhere) for op in _DOCUMENT_OPS])
        self._note_later(batch, are_documents, positions)
        return is_op.get("mutation", nowhere), positions

    def _note_void(self, void: _Void) -> None:
        if void.collection_id is None:
            # What was dropped on the branch that is dead has not been dropped.
            self._voids = [
                other
                for other in self._voids
                if other.vbucket != void.vbucket or other.collection_id is None or other.seqno <= void.seqno
            ]
        self._voids.append(void)

    def _note_later(self, batch: pa.RecordBatch, are_documents: _Marks, positions: _Numbers) -> None:
        vbuckets = batch.column("vbucket").to_numpy()
        starts = batch.column("snapshot_start").to_numpy()
        ends = batch.column("snapshot_end").to_numpy()
        rows = np.flatnonzero(are_documents)
        seen, first_rows = np.unique(vbuckets[rows], return_index=True)
        new = self._first_end[seen] == _NO_SNAPSHOT
        self._first_start[seen[new]] = starts[rows[first_rows[new]]]
        self._first_end[seen[new]] = ends[rows[first_rows[new]]]
        is_later = are_documents & ((starts != self._first_start[vbuckets]) | (ends != self._first_end[vbuckets]))
        if is_later.any():
            self._has_later[vbuckets[is_later]] = True
            kept = pa.table([_identities(batch), *_keys_of_voids(batch), pa.array(positions)], names=_LATER)
            self._later.append(kept.filter(pa.array(is_later)))

    def alive(self, batch: pa.RecordBatch, positions: _Numbers) -> _Marks:
        """Which of some mutations hold."""
        marks = ~self._void_marks(batch, positions)
        doubtful = marks & self._has_later[batch.column("vbucket").to_numpy()]
        if doubtful.any():
            keys, last = self._last_positions()
            found = pc.index_in(_identities(batch), value_set=keys)
            codes = pc.fill_null(found, -1).to_numpy()
            marks &= (codes < 0) | (last[codes] <= positions)
        return marks

    def _last_positions(self) -> tuple[pa.Array, _Numbers]:
        """The keys that came again and hold, and where they came last."""
        if self._superseded is None:
            later = pa.concat_tables(self._later)
            holds = ~self._void_marks(later, later.column("position").to_numpy())
            last = later.filter(pa.array(holds)).group_by("identity").aggregate([("position", "max")])
            keys = last.column("identity").combine_chunks()
            self._superseded = keys, np.append(last.column("position_max").to_numpy(), -1)
        return self._superseded

    def _void_marks(self, rows: pa.RecordBatch | pa.Table, positions: _Numbers) -> _Marks:
        marks = np.zeros(rows.num_rows, dtype=np.bool_)
        if not self._voids:
            return marks
        vbuckets, seqnos, ids = (rows.column(name).to_numpy() for name in ("vbucket", "seqno", "collection_id"))
        for void in self._voids:
            hit = (positions < void.before) & (vbuckets == void.vbucket)
            if void.collection_id is None:
                hit &= seqnos > void.seqno
            else:
                hit &= ids == void.collection_id
            marks |= hit
        return marks


def _is(ops: pa.DictionaryArray, op: str) -> _Marks:
    marks: _Marks = ops.indices.to_numpy() == ops.dictionary.to_pylist().index(op)
    return marks


def _void(batch: pa.RecordBatch, row: int, position: int) -> _Void:
    vbucket, seqno, collection_id = (batch.column(name)[row].as_py() for name in ("vbucket", "seqno", "collection_id"))
    is_rollback = batch.column("op")[row].as_py() == "rollback"
    return _Void(before=position, vbucket=vbucket, seqno=seqno, collection_id=None if is_rollback else collection_id)


def _keys_of_voids(batch: pa.RecordBatch) -> list[pa.Array]:
    return [batch.column("vbucket"), batch.column("seqno"), batch.column("collection_id").fill_null(0)]


def _identities(batch: pa.RecordBatch) -> pa.Array:
    """The identity of each document: the collection's id, and the key."""
    ids = batch.column("collection_id").fill_null(0).cast(pa.string()).cast(pa.binary())
    return pc.binary_join_element_wise(ids, batch.column("key").fill_null(b""), pa.scalar(b":", pa.binary()))
