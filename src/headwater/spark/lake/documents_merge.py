"""Merging one group of vbuckets of a collection's table: the files of the group, and the changes that are pending.

A file is written again only if some of its rows are replaced or gone; new documents go to new files. So a first load
appends, and a merge of updates costs what the files with updated rows hold. Only the keys are read of files that turn
out to stay.

The same goes on when a table is read in between: `merged_rows` gives what the table would hold after a merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headwater.spark.lake.change_rows import ChangeRows, Marks, Wanted, read_changes
from headwater.spark.lake.data_files import (
    FILE_BYTES_DEFAULT,
    DataFile,
    FileReader,
    RollingWriter,
    filtered,
    numbers,
)
from headwater.spark.lake.document_rows import document_columns
from headwater.spark.lake.fold import Fold, rolled_back
from headwater.spark.lake.history import HistoryTarget, merge_history
from headwater.spark.lake.layout import LakeFacts, TableKind, TablePlace
from headwater.spark.lake.schemas import (
    DOCUMENT_RANGES,
    GROUP,
    REJECTS_SCHEMA,
    documents_schema,
    raw_keys,
)
from headwater.spark.lake.typed_columns import TypedColumns

_NARROW = ("key", "key_bytes", "vbucket", "seqno", "collection_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsTarget:
    """A collection's part of a merge."""

    name: str
    ids: frozenset[int]
    """Every collection that has or had this name."""
    place: TablePlace
    files: tuple[DataFile, ...]
    """The live files of the group."""
    after_batch: int
    """The group holds all changes up to this batch."""
    columns: TypedColumns | None = None
    rejects_place: TablePlace
    rejects_files: tuple[DataFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What a merge of one group of one table came to."""

    kind: TableKind
    name: str
    group: int
    add: list[DataFile]
    remove: list[DataFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTask:
    """Merge a group of vbuckets of some tables. What is read of `changes` is read once for all of them."""

    facts: LakeFacts
    group: int
    changes: TablePlace
    pending: tuple[DataFile, ...]
    """The files of `changes` that may hold changes after the least `after_batch`."""
    whole: tuple[DataFile, ...] | None = None
    """All files that may hold changes of the group: for vbuckets that were rolled back. Not given where none was."""
    upto_batch: int
    documents: tuple[DocumentsTarget, ...] = ()
    history: tuple[HistoryTarget, ...] = ()
    file_bytes: int = FILE_BYTES_DEFAULT

    def run(self) -> list[Merged]:
        pending = self.read_pending()
        merged = []
        for target in self.documents:
            merged += self._merge_documents(target, self.fold(target, pending))
        for history in self.history:
            add, remove = merge_history(history, self.facts, self.group, pending, file_bytes=self.file_bytes)
            merged.append(Merged(kind=TableKind.HISTORY, name=history.name, group=self.group, add=add, remove=remove))
        return merged

    def read_pending(self) -> list[ChangeRows]:
        targets: list[DocumentsTarget | HistoryTarget] = [*self.documents, *self.history]
        wanted = Wanted(
            vbuckets=tuple(self.facts.vbuckets_of(self.group)),
            after_batch=min(target.after_batch for target in targets),
            upto_batch=self.upto_batch,
            ids=frozenset().union(*(target.ids for target in targets)),
        )
        return read_changes(self.changes, self.pending, wanted)

    def fold(self, target: DocumentsTarget, pending: Sequence[ChangeRows]) -> Fold:
        rolled = sorted(rolled_back(pending, after_batch=target.after_batch))
        assert self.whole is not None or not rolled, "a rollback was not known when the merge was planned"
        wanted = Wanted(vbuckets=tuple(rolled), after_batch=-1, upto_batch=self.upto_batch, ids=target.ids)
        return Fold(
            ids=target.ids,
            vbuckets=self.facts.vbuckets_of(self.group),
            after_batch=target.after_batch,
            rolled=np.array(rolled, dtype=np.int64),
            pending=pending,
            whole=read_changes(self.changes, self.whole or (), wanted),
        )

    # --- writing --------------------------------------------------------------------------------------------------

    def _merge_documents(self, target: DocumentsTarget, fold: Fold) -> list[Merged]:
        touched = [*_touched(target.place, target.files, fold)]
        touched_rejects = [*_touched(target.rejects_place, target.rejects_files, fold)]
        schema = documents_schema(xattrs=self.facts.xattrs, typed=_typed_schema(target))
        documents = self._writer(target.place, schema)
        rejects = self._writer(target.rejects_place, REJECTS_SCHEMA)
        for rows in _kept_rows(target.place, touched):
            documents.write(rows.select(schema.names))
        for rows in _kept_rows(target.rejects_place, touched_rejects):
            rejects.write(rows.select(REJECTS_SCHEMA.names))
        for changes in fold.live():
            rows, rejected = _document_rows(changes, schema, target.columns)
            documents.write(rows)
            rejects.write(rejected)
        # The rejects come first: once the documents are merged, they are not looked at again.
        return [
            self._merged(TableKind.REJECTS, target.name, rejects, touched_rejects),
            self._merged(TableKind.DOCUMENTS, target.name, documents, touched),
        ]

    def _writer(self, place: TablePlace, schema: pa.Schema) -> RollingWriter:
        partition = [(GROUP.name, str(self.group))]
        return RollingWriter(place, schema, ranges=DOCUMENT_RANGES, partition=partition, file_bytes=self.file_bytes)

    def _merged(
        self, kind: TableKind, name: str, writer: RollingWriter, touched: Sequence[tuple[DataFile, Marks]]
    ) -> Merged:
        removed = [file for file, _ in touched]
        return Merged(kind=kind, name=name, group=self.group, add=writer.close(), remove=removed)


def merged_rows(task: MergeTask) -> Iterator[pa.Table]:
    """All documents that the group of the task's only table would hold after it."""
    (target,) = task.documents
    fold = task.fold(target, task.read_pending())
    schema = documents_schema(xattrs=task.facts.xattrs, typed=_typed_schema(target))
    touched = {file.path: (file, marks) for file, marks in _touched(target.place, target.files, fold)}
    for file in target.files:
        if file.path in touched:
            yield from (rows.select(schema.names) for rows in _kept_rows(target.place, [touched[file.path]]))
        else:
            yield from _all_rows(target.place, file, schema)
    for changes in fold.live():
        yield _document_rows(changes, schema, target.columns)[0]


def _typed_schema(target: DocumentsTarget) -> pa.Schema | None:
    return None if target.columns is None else target.columns.schema


def _touched(place: TablePlace, files: Sequence[DataFile], fold: Fold) -> Iterator[tuple[DataFile, Marks]]:
    """The files that have to be written again, with a mark on every row that stays."""
    for file in files:
        if not fold.can_touch(file.ranges.get("vbucket", (float("-inf"), float("inf")))):
            continue
        with FileReader(place, file.path) as reader:
            parts = [reader.read(row_group, _NARROW) for row_group in reader.row_groups]
        rows = pa.concat_tables(parts)
        marks = fold.survivors(
            keys=raw_keys(rows.column("key"), rows.column("key_bytes")).combine_chunks(),
            vbuckets=numbers(rows, "vbucket"),
            seqnos=numbers(rows, "seqno"),
            ids=numbers(rows, "collection_id"),
        )
        if not marks.all():
            yield file, marks


def _kept_rows(place: TablePlace, touched: Sequence[tuple[DataFile, Marks]]) -> Iterator[pa.Table]:
    for file, marks in touched:
        start = 0
        with FileReader(place, file.path) as reader:
            for row_group in reader.row_groups:
                rows = reader.read(row_group)
                yield filtered(rows, marks[start : start + rows.num_rows])
                start += rows.num_rows


def _all_rows(place: TablePlace, file: DataFile, schema: pa.Schema) -> Iterator[pa.Table]:
    with FileReader(place, file.path) as reader:
        for row_group in reader.row_groups:
            yield reader.read(row_group, schema.names).select(schema.names)


def _document_rows(changes: pa.Table, schema: pa.Schema, typed: TypedColumns | None) -> tuple[pa.Table, pa.Table]:
    """The documents that mutations make, and those among them that do not fit the typed columns."""
    columns = document_columns(changes, schema)
    if typed is None:
        return pa.table([columns[name] for name in schema.names], schema=schema), REJECTS_SCHEMA.empty_table()
    parsed = typed.parse(columns["document"])
    rows = pa.table([{**columns, **parsed.columns}[name] for name in schema.names], schema=schema)
    rejected = {**columns, "reason": parsed.reasons}
    rejects = pa.table({name: rejected[name] for name in REJECTS_SCHEMA.names})
    return rows, rejects.filter(rejects.column("reason").is_valid()).cast(REJECTS_SCHEMA)
