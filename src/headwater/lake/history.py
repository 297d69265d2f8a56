"""The table of versions: every version of a document, with the time from which and up to which it was the document.

The table is partitioned by `is_current` as well as by group. Versions that have ended lie in files that are only ever
added to; versions that are current lie in files of their own. So a merge, which ends some and begins others, writes no
more than the documents' own merge does.

A version ends with the next one of its document, with the document's removal, or with its collection. `valid_to_seqno`
says which change that was. A rollback takes back every version above the seqno that is kept, and opens those again
that were ended by a change above it. For that nothing but the table itself is needed.

`documents_merge.MergeTask` calls it, where a history is asked for. It writes files, and commits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.lake.change_rows import (
    COLLECTION_CREATED,
    COLLECTION_DROPPED,
    EXPIRATION,
    MUTATION,
    ChangeRows,
    KeyIndex,
    Marks,
    key_spaces,
    rolled_back,
)
from headwater.lake.data_files import DataFile, RollingWriter, filtered, numbers, read_files
from headwater.lake.layout import (
    GROUP,
    HISTORY_RANGES,
    IS_CURRENT,
    TIME,
    LakeFacts,
    document_columns,
    history_schema,
    raw_keys,
)
from headwater.lake.location import Location

_FOREVER = np.iinfo(np.int64).max
_NARROW = ("key", "key_bytes", "vbucket", "seqno", "collection_id")
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTarget:
    """A collection's part of a merge."""

    name: str
    ids: frozenset[int]
    location: Location
    files: tuple[DataFile, ...]
    """The live files of the group, current and ended."""
    after_batch: int


def merge_history(
    target: HistoryTarget, facts: LakeFacts, group: int, pending: Sequence[ChangeRows], *, file_bytes: int
) -> tuple[list[DataFile], list[DataFile]]:
    """Merge pending changes into a group. Returns the files to add and to remove."""
    rolled = rolled_back(pending, after_batch=target.after_batch)
    merge = _Merge(target, facts, group, pending, rolled, file_bytes)
    for file in target.files:
        if _is_current(file):
            merge.current_file(file)
        elif _may_change(file, rolled):
            merge.ended_file(file)
    merge.new_versions()
    return merge.close()


def _is_current(file: DataFile) -> bool:
    return dict(file.partition)[IS_CURRENT.name] == "true"


def _may_change(file: DataFile, rolled: Mapping[int, int]) -> bool:
    """Whether a file of ended versions may hold one that a rollback takes back or opens again.

    A version ends later than it begins, so its end alone decides.
    """
    return any(
        file.may_hold("vbucket", low=vbucket, high=vbucket) and file.may_hold("valid_to_seqno", low=kept + 1)
        for vbucket, kept in rolled.items()
    )


@dataclass(frozen=True, slots=True)
class _Ends:
    """By version: the change that ends it."""

    seqnos: _Numbers
    """`_FOREVER` where none does."""
    times_us: _Numbers

    @property
    def is_ended(self) -> Marks:
        return self.seqnos < _FOREVER

    def earlier(self, other: _Ends) -> _Ends:
        is_ours = self.seqnos <= other.seqnos
        return _Ends(np.where(is_ours, self.seqnos, other.seqnos), np.where(is_ours, self.times_us, other.times_us))

    def of(self, marks: Marks) -> _Ends:
        return _Ends(self.seqnos[marks], self.times_us[marks])


class _CollectionEnds:
    """Ends of collections, by vbucket and collection: which is the first after a seqno?"""

    def __init__(self, pending: Sequence[tuple[ChangeRows, Marks]]) -> None:
        self._vbuckets = _joined([rows.vbuckets[marks] for rows, marks in pending])
        self._ids = _joined([rows.ids[marks] for rows, marks in pending])
        self._seqnos = _joined([rows.seqnos[marks] for rows, marks in pending])
        self._times_us = _joined([rows.times_us()[marks] for rows, marks in pending])

    def after(self, *, vbuckets: _Numbers, ids: _Numbers, seqnos: _Numbers) -> _Ends:
        """Put the versions and the ends in one order: the next end in it is the one, if it is of the same collection
        and vbucket."""
        ends = len(self._seqnos)
        all_vbuckets, all_ids = np.concatenate([self._vbuckets, vbuckets]), np.concatenate([self._ids, ids])
        order = np.lexsort((np.concatenate([self._seqnos, seqnos]), all_ids, all_vbuckets))
        last = len(order)
        numbers_of_ends = np.where(order < ends, np.arange(last), last)
        next_end = np.append(order, -1)[np.minimum.accumulate(numbers_of_ends[::-1])[::-1]]
        found = np.empty(last, dtype=np.int64)
        found[order] = next_end
        found = found[ends:]
        is_same = found >= 0
        is_same[is_same] = (self._vbuckets[found[is_same]] == vbuckets[is_same]) & (
            self._ids[found[is_same]] == ids[is_same]
        )
        seqno_ends, time_ends = np.full(len(seqnos), _FOREVER), np.zeros(len(seqnos), dtype=np.int64)
        seqno_ends[is_same] = self._seqnos[found[is_same]]
        time_ends[is_same] = self._times_us[found[is_same]]
        return _Ends(seqno_ends, time_ends)


class _Merge:
    """The merge of one group."""

    def __init__(
        self,
        target: HistoryTarget,
        facts: LakeFacts,
        group: int,
        pending: Sequence[ChangeRows],
        rolled: Mapping[int, int],
        file_bytes: int,
    ) -> None:
        self._location = target.location
        self._kept = np.full(facts.vbuckets, _FOREVER)
        """By vbucket: the last seqno that a rollback kept."""
        for vbucket, kept in rolled.items():
            self._kept[vbucket] = kept
        self._schema = history_schema(xattrs=facts.xattrs)
        self._writers = {
            is_current: RollingWriter(
                target.location,
                self._schema,
                ranges=HISTORY_RANGES,
                partition=[(GROUP.name, str(group)), (IS_CURRENT.name, str(is_current).lower())],
                file_bytes=file_bytes,
                is_keyed=True,
            )
            for is_current in (True, False)
        }
        self._removed: list[DataFile] = []
        ids = np.array(sorted(target.ids), dtype=np.int64)
        parts = [(rows, (rows.batches > target.after_batch) & ~rows.void & np.isin(rows.ids, ids)) for rows in pending]
        events = [
            (rows, marks & ((rows.ops == COLLECTION_CREATED) | (rows.ops == COLLECTION_DROPPED)))
            for rows, marks in parts
        ]
        self._collection_ends = _CollectionEnds(events)
        self._parts = [(rows, marks & (rows.ops <= EXPIRATION)) for rows, marks in parts]
        self._index_changes()

    def _index_changes(self) -> None:
        """Put the changes of each document in the order of their seqnos."""
        self._seqnos = _joined([rows.seqnos[marks] for rows, marks in self._parts])
        self._times_us = _joined([rows.times_us()[marks] for rows, marks in self._parts])
        self._ids = _joined([rows.ids[marks] for rows, marks in self._parts])
        self._vbuckets = _joined([rows.vbuckets[marks] for rows, marks in self._parts])
        keys = [rows.keys(marks) for rows, marks in self._parts if marks.any()]
        joined = pa.concat_arrays(keys) if keys else pa.array([], pa.binary())
        self._index = KeyIndex(joined, self._seqnos, key_spaces(self._vbuckets, self._ids))
        documents = self._index.documents
        order = np.lexsort((self._seqnos, documents))
        follows = np.full(len(order), -1, dtype=np.int64)
        is_same = documents[order[1:]] == documents[order[:-1]]
        follows[order[:-1][is_same]] = order[1:][is_same]
        self._next = follows
        starts = np.ones(len(order), dtype=np.bool_)
        starts[1:] = ~is_same
        self._first = np.full(len(order), -1, dtype=np.int64)
        """By the number of a document in the index: the row with its least seqno."""
        self._first[documents[order[starts]]] = order[starts]

    def _ends_at(self, rows: _Numbers) -> _Ends:
        """The ends that changes make; -1 stands for none."""
        is_there = rows >= 0
        seqnos, times_us = np.full(len(rows), _FOREVER), np.zeros(len(rows), dtype=np.int64)
        seqnos[is_there] = self._seqnos[rows[is_there]]
        times_us[is_there] = self._times_us[rows[is_there]]
        return _Ends(seqnos, times_us)

    # --- versions that the table has ----------------------------------------------------------------------------------

    def current_file(self, file: DataFile) -> None:
        fates = [self._fate(rows) for rows in read_files(self._location, [file], _NARROW)]
        if all(stays.all() for stays, _ in fates):
            return
        self._removed.append(file)
        for rows, (stays, ends) in zip(read_files(self._location, [file], self._schema.names), fates, strict=True):
            self._write_current(rows, stays, ends)

    def ended_file(self, file: DataFile) -> None:
        marks = []
        for rows in read_files(self._location, [file], ["vbucket", "seqno", "valid_to_seqno"]):
            kept = self._kept[numbers(rows, "vbucket")]
            is_dead = numbers(rows, "seqno") > kept
            marks.append((is_dead, ~is_dead & (numbers(rows, "valid_to_seqno") > kept)))
        if not any(is_dead.any() or is_opened.any() for is_dead, is_opened in marks):
            return
        self._removed.append(file)
        for rows, (is_dead, is_opened) in zip(
            read_files(self._location, [file], self._schema.names), marks, strict=True
        ):
            self._writers[False].write(filtered(rows, ~is_dead & ~is_opened))
            opened = filtered(rows, is_opened)
            if opened.num_rows:
                self._write_current(opened, *self._fate(opened))

    def _fate(self, rows: pa.Table) -> tuple[Marks, _Ends]:
        """Of versions that are current, or are again: which of them stay so, and what ends the others.

        Those that a rollback took back neither stay nor end.
        """
        vbuckets, seqnos, ids = (numbers(rows, name) for name in ("vbucket", "seqno", "collection_id"))
        keys = raw_keys(rows.column("key"), rows.column("key_bytes")).combine_chunks()
        found = self._index.find(keys, key_spaces(vbuckets, ids))
        first = np.full(len(found), -1, dtype=np.int64)
        first[found >= 0] = self._first[self._index.documents[found[found >= 0]]]
        ends = self._ends_at(first).earlier(self._collection_ends.after(vbuckets=vbuckets, ids=ids, seqnos=seqnos))
        is_dead = seqnos > self._kept[vbuckets]
        ends.seqnos[is_dead] = _FOREVER
        return ~ends.is_ended & ~is_dead, ends

    def _write_current(self, rows: pa.Table, stays: Marks, ends: _Ends) -> None:
        count = int(stays.sum())
        self._write(True, filtered(rows, stays), _Ends(np.full(count, _FOREVER), np.zeros(count, dtype=np.int64)))
        self._write(False, filtered(rows, ends.is_ended), ends.of(ends.is_ended))

    def _write(self, is_current: bool, rows: pa.Table, ends: _Ends) -> None:
        if rows.num_rows == 0:
            return
        is_open = ~ends.is_ended
        given = {
            "valid_to": pa.array(ends.times_us, pa.int64(), mask=is_open).cast(TIME),
            "valid_to_seqno": pa.array(ends.seqnos, pa.int64(), mask=is_open),
        }
        columns = [given[name] if name in given else rows.column(name) for name in self._schema.names]
        self._writers[is_current].write(pa.table(columns, schema=self._schema))

    # --- versions that the changes bring ------------------------------------------------------------------------------

    def new_versions(self) -> None:
        ends = self._ends_at(self._next).earlier(
            self._collection_ends.after(vbuckets=self._vbuckets, ids=self._ids, seqnos=self._seqnos)
        )
        start = 0
        for rows, marks in self._parts:
            here = slice(start, start := start + int(marks.sum()))
            part_ends = _Ends(ends.seqnos[here], ends.times_us[here])
            is_version = rows.ops[marks] == MUTATION
            for is_current in (True, False):
                chosen = is_version & (part_ends.is_ended != is_current)
                kept = marks.copy()
                kept[marks] = chosen
                if kept.any():
                    self._write(is_current, self._to_versions(rows.wide(kept)), part_ends.of(chosen))

    def _to_versions(self, changes: pa.Table) -> pa.Table:
        columns = document_columns(changes, self._schema)
        columns["valid_from"] = pc.coalesce(changes.column("changed_at"), changes.column("landed_at"))
        nothing = pa.nulls(changes.num_rows, pa.int64())
        columns["valid_to"], columns["valid_to_seqno"] = nothing.cast(TIME), nothing
        return pa.table([columns[name] for name in self._schema.names], schema=self._schema)

    def close(self) -> tuple[list[DataFile], list[DataFile]]:
        return [*self._writers[True].close(), *self._writers[False].close()], self._removed


def _joined(columns: Sequence[NDArray[np.generic]]) -> _Numbers:
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)
