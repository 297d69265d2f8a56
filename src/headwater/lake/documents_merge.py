"""Merging into the tables of documents: the task for a group of vbuckets, what is pending, and the plan.

A merge rewrites a file only if some of its rows are replaced or removed, and each such file separately; new documents
go to new files. So recent rows lie apart from old ones: a document that changes again and again is in a small file, and
never causes a large one to be rewritten. In a table that is merged on read, replaced and removed rows are marked in a
deletion vector, and their file stays. `upkeep` joins files by size. If a file turns out to stay, only its keys are
read. Reading a table between merges works the same way: `merged_rows` returns what the table would hold after one.

Rows are written in order (`row_order`), so that a lookup by key, or a query on the cluster columns, reads one of the
files that a merge has written, and few of its row groups.

`commits` plans and commits on the driver; `MergeTask` runs in any process, and writes files that no commit names yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import HeadwaterError
from headwater.lake.change_files import COLLECTION_GONE_OPS, ROLLBACK_OP, ChangeReport
from headwater.lake.change_rows import KEEP_BYTES, ChangeRows, Fold, WantedChanges, read_changes, rolled_back
from headwater.lake.collection_tables import NOT_MERGED, CollectionTables, MergedTable
from headwater.lake.column_rules import ColumnRules, rules_of
from headwater.lake.data_files import (
    FILE_BYTES_DEFAULT,
    DataFile,
    FileReader,
    Leaving,
    RollingWriter,
    conformed,
    filtered,
    find_rows,
    mark_rows,
    numbers,
    read_files,
)
from headwater.lake.history import FeedWriter, HistoryTarget, has_feed, merge_history
from headwater.lake.key_index import KeyIndex, KeyPlaces, Marks, key_spaces
from headwater.lake.layout import (
    EVERY_COLLECTION,
    GROUP,
    LakeFacts,
    TableKind,
    document_columns,
    document_ranges,
    documents_schema,
    folder_name,
    groups_within,
    rejects_schema,
    table_name,
)
from headwater.lake.location import Location
from headwater.lake.row_order import SORT_BYTES, files_in_order, sort_rows
from headwater.lake.set_aside import own_fault
from headwater.lake.typed_columns import (
    ColumnChoice,
    ColumnGrowth,
    FieldTypes,
    Parsed,
    TypedColumns,
    UnsettledColumns,
    chosen_columns,
    joined_fields,
)
from headwater.lake.variants import document_texts
from headwater.options import suggest_keywords
from headwater.phrases import may_be_escaped
from headwater.protocol.numbers import vbucket_of

YOUNG_BYTES = 64 * 1024
"""Files below this size that have to be rewritten are written together with the new rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsTarget:
    """A collection's part of a merge."""

    name: str
    ids: frozenset[int]
    """Every collection that has or had this name."""
    location: Location
    files: tuple[DataFile, ...]
    """The live files of the group."""
    after_batch: int
    """The group holds all changes up to this batch."""
    columns: TypedColumns | None = None
    cluster_by: tuple[str, ...] = ()
    """The columns by which documents are sorted before their keys, if the table has them."""
    is_rebuilt: bool = False
    """Whether existing documents are parsed again, because the columns have changed."""
    is_merged_on_read: bool = False
    """Whether replaced and removed rows are marked in deletion vectors, and their files stay."""
    has_feed: bool = False
    """Whether the table has a change feed."""
    replaced: tuple[DataFile, ...] = ()
    """Files that a repair replaces instead of merging into them: the feed gets the differences from them."""
    rejects_location: Location
    rejects_files: tuple[DataFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of merging one group of one table."""

    kind: TableKind
    name: str
    group: int
    add: list[DataFile] = field(default_factory=list)
    remove: list[DataFile] = field(default_factory=list)
    feed: list[DataFile] | None = None
    """The `cdc` files of the change feed; None if readers derive it from the data files, or if there is no feed."""
    wanted: FieldTypes = field(default_factory=dict)
    """Fields that need columns which the table does not have yet."""
    columns: TypedColumns | None = None
    """The columns that were written: those of the table, and those that are wanted."""
    is_written: bool = True
    """If false, the merge only found out what is wanted: the table gets its columns, and the group is merged again."""
    fault: HeadwaterError | None = None
    """The fault that prevents merging into the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTask:
    """Merge a group of vbuckets of some tables. The task reads `changes` once for all of them."""

    facts: LakeFacts
    group: int
    changes: Location
    pending: tuple[DataFile, ...]
    """The files of `changes` that may hold changes after the lowest `after_batch`."""
    whole: tuple[DataFile, ...] | None = None
    """All files that may hold changes of the group, for vbuckets that were rolled back. None if none was."""
    upto_batch: int
    documents: tuple[DocumentsTarget, ...] = ()
    history: tuple[HistoryTarget, ...] = ()
    file_bytes: int = FILE_BYTES_DEFAULT

    @property
    def targets(self) -> list[DocumentsTarget | HistoryTarget]:
        return [*self.documents, *self.history]

    def run(self) -> list[Merged]:
        return self.merge(self.read_pending())

    def merge(self, pending: Sequence[ChangeRows]) -> list[Merged]:
        merged: list[Merged] = []
        for target in self.documents:
            work = partial(self._merge_documents, target, pending)
            merged += self._contained(TableKind.DOCUMENTS, target.name, work)
        for history in self.history:
            work = partial(self._merge_history, history, pending)
            merged += self._contained(TableKind.HISTORY, history.name, work)
        return merged

    def _contained(self, kind: TableKind, name: str, work: Callable[[], list[Merged]]) -> list[Merged]:
        """Run the work on one table. Reports a fault of that table, so that others continue."""
        try:
            return work()
        except BaseException as error:
            fault = own_fault(error)
            if fault is None:
                raise
            return [self._merged(kind, name, fault=fault)]

    def _merged(self, kind: TableKind, name: str, **found: Any) -> Merged:
        return Merged(kind=kind, name=name, group=self.group, **found)

    def read_pending(self) -> list[ChangeRows]:
        wanted = WantedChanges(
            vbuckets=tuple(self.facts.vbuckets_of(self.group)),
            after_batch=min(target.after_batch for target in self.targets),
            upto_batch=self.upto_batch,
            ids=frozenset().union(*(target.ids for target in self.targets)),
        )
        return read_changes(self.changes, self.pending, wanted)

    def fold(self, target: DocumentsTarget, pending: Sequence[ChangeRows]) -> Fold:
        rolled = sorted(rolled_back(pending, after_batch=target.after_batch))
        assert self.whole is not None or not rolled, "a rollback was not known when the merge was planned"
        wanted = WantedChanges(vbuckets=tuple(rolled), after_batch=-1, upto_batch=self.upto_batch, ids=target.ids)
        return Fold(
            ids=target.ids,
            vbuckets=self.facts.vbuckets_of(self.group),
            after_batch=target.after_batch,
            rolled=np.array(rolled, dtype=np.int64),
            pending=pending,
            whole=read_changes(self.changes, self.whole or (), wanted),
        )

    # --- writing ------------------------------------------------------------------------------------------------------

    def _merge_history(self, target: HistoryTarget, pending: Sequence[ChangeRows]) -> list[Merged]:
        merged = merge_history(target, self.facts, self.group, pending, file_bytes=self.file_bytes)
        found = {it.name: getattr(merged, it.name) for it in fields(merged)}
        return [self._merged(TableKind.HISTORY, target.name, **found)]

    def _merge_documents(self, target: DocumentsTarget, pending: Sequence[ChangeRows]) -> list[Merged]:
        fold = self.fold(target, pending)
        touched = [*_touched(target.location, target.files, fold, every=target.is_rebuilt)]
        touched_rejects = [*_touched(target.rejects_location, target.rejects_files, fold, every=target.is_rebuilt)]

        def documents() -> Iterator[pa.Table]:
            """Yield the rows to parse, without typed columns."""
            schema = documents_schema(xattrs=self.facts.xattrs, form=self.facts.document)
            if target.is_rebuilt:
                yield from (rows.select(schema.names) for rows in _kept_rows(target.location, _staying(touched)))
            # Sort first: the typed columns parsed from sorted rows need not be reordered later.
            yield from (sort_rows(_documents_of(changes, schema)) for changes in fold.live())

        try:
            return self._write_documents(target, touched, touched_rejects, documents())
        except UnsettledColumns:
            assert target.columns is not None, "only columns that are inferred are unsettled"
            parsed = (
                target.columns.parse(document_texts(rows.column("document")), discovers=True) for rows in documents()
            )
            nothing: FieldTypes = {}
            wanted = reduce(joined_fields, (part.wanted for part in parsed), nothing)
            return [self._merged(TableKind.DOCUMENTS, target.name, wanted=wanted, is_written=False)]

    def _write_documents(
        self,
        target: DocumentsTarget,
        touched: Sequence[Leaving],
        touched_rejects: Sequence[Leaving],
        documents: Iterator[pa.Table],
    ) -> list[Merged]:
        growth = None if target.columns is None else ColumnGrowth(target.columns)
        with_field = target.columns is None or not target.columns.is_whole_row
        reject_schema = rejects_schema(with_field=with_field, form=self.facts.document)
        rejects = self._writer(target.rejects_location, reject_schema)
        if not target.is_rebuilt:
            for rows in _kept_rows(target.rejects_location, _staying(touched_rejects)):
                rejects.write(conformed(rows, reject_schema))

        def parse(rows: pa.Table) -> pa.Table:
            if growth is None:
                return rows
            parsed = growth.parse(document_texts(rows.column("document")))
            rejects.write(_rejected(rows, parsed, reject_schema))
            return _with_typed(rows, parsed.columns)

        # More columns can be added until something is written.
        held, held_bytes = [], 0
        for rows in documents:
            held.append(parse(rows))
            held_bytes += held[-1].nbytes
            if held_bytes >= SORT_BYTES:
                break
        columns = None
        if growth is not None:
            growth.is_settled, columns = True, growth.columns
        typed = None if columns is None else columns.whole_schema
        schema = documents_schema(xattrs=self.facts.xattrs, form=self.facts.document, typed=typed)
        unsorted: Iterable[pa.Table] = (conformed(rows, schema) for rows in chain(held, map(parse, documents)))
        writer = self._writer(target.location, schema, has_places=target.is_merged_on_read)
        feed, left_out = self._feed(target, schema, changes_files=bool(touched)), None
        if feed is not None:
            unsorted, left_out = map(feed.after, unsorted), feed.before
        kept = [] if target.is_rebuilt or target.is_merged_on_read else [*_staying(touched)]
        young = [(file, marks) for file, marks in kept if file.size_bytes < YOUNG_BYTES]
        try:
            for rows in files_in_order(target.location, young, schema, target.cluster_by, unsorted, left_out):
                writer.write(rows)
        finally:
            added, added_rejects = writer.close(), rejects.close()
        if target.is_merged_on_read and not target.is_rebuilt:
            added += mark_rows(target.location, touched)
        for file, marks in kept:
            if file.size_bytes >= YOUNG_BYTES:
                again = self._writer(target.location, schema)
                for rows in files_in_order(target.location, [(file, marks)], schema, target.cluster_by, (), left_out):
                    again.write(rows)
                added += again.close()
        # The rejects come first: once the documents are merged, they are not checked again.
        return [
            self._merged(TableKind.REJECTS, target.name, add=added_rejects, remove=[it.file for it in touched_rejects]),
            self._merged(
                TableKind.DOCUMENTS,
                target.name,
                add=added,
                remove=[it.file for it in touched],
                feed=None if feed is None else feed.close(_kept_rows(target.location, _leaving(target, touched))),
                wanted={} if growth is None else growth.found,
                columns=columns,
            ),
        ]

    def _feed(self, target: DocumentsTarget, schema: pa.Schema, *, changes_files: bool) -> FeedWriter | None:
        """Return the writer of the change feed; None without a feed, or if readers derive it because no row leaves."""
        # Readers could derive it from deletion vectors, too. But deltalake 1.6.6 aborts the reader's process if the
        # rows that a commit marks lie in more than one row group of a file (decision 73).
        if not target.has_feed or not (changes_files or target.replaced):
            return None
        partition = [(GROUP.name, str(self.group))]
        return FeedWriter(target.location, schema, partition=partition, file_bytes=self.file_bytes)

    def _writer(self, location: Location, schema: pa.Schema, *, has_places: bool = False) -> RollingWriter:
        return RollingWriter(
            location,
            schema,
            ranges=document_ranges(schema),
            partition=[(GROUP.name, str(self.group))],
            file_bytes=self.file_bytes,
            is_keyed=True,
            has_places=has_places,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDocuments:
    """Writes the documents of an empty lake while its first changes are landed: the rows just written to `changes` are
    in memory, and need not be read back."""

    location: Location
    """Of the lake."""
    facts: LakeFacts
    batch: int
    columns: Mapping[str, ColumnChoice]
    """By table, or for `EVERY_COLLECTION`."""
    cluster_by: Mapping[str, tuple[str, ...]]
    """By table, or for `EVERY_COLLECTION`."""
    rules: Mapping[str, ColumnRules]
    is_merged_on_read: bool = False
    """Whether the tables will be merged on read."""
    file_bytes: int = FILE_BYTES_DEFAULT
    held_bytes_max: int = KEEP_BYTES

    def hold(self) -> HeldChanges:
        """Return what the writer of the changes must be given, as `on_rows`."""
        return HeldChanges(self.facts, self.held_bytes_max)

    def write(self, report: ChangeReport, held: HeldChanges) -> list[Merged]:
        """Write the documents of all groups of vbuckets in a report, which must contain each group as a whole. Returns
        nothing if that is impossible here, and a merge has to do it."""
        if report.rollbacks or held.is_full or any(None in names for names in report.names.values()):
            return []
        names = {id_: table_name(*parts, id_) for id_, parts in report.names.items()}
        rows: Counter[tuple[str, int]] = Counter()
        for (id_, group), count in report.document_rows.items():
            rows[names[id_], group] += count
        due: dict[int, set[str]] = {}
        for (name, group), count in rows.items():
            # A table that may be small gets fewer groups, which a merge writes.
            if self.facts.groups_of_table(count * self.facts.groups) == self.facts.groups:
                due.setdefault(group, set()).add(name)
        return [part for group in sorted(due) for part in self._task(group, names, due[group]).merge(held.of(group))]

    def _task(self, group: int, names: Mapping[int, str], due: Iterable[str]) -> MergeTask:
        targets = [
            DocumentsTarget(
                name=name,
                ids=frozenset(id_ for id_ in names if names[id_] == name),
                location=self.location.join(TableKind.DOCUMENTS, folder_name(name)),
                files=(),
                after_batch=NOT_MERGED,
                is_merged_on_read=self.is_merged_on_read,
                columns=chosen_columns(
                    self.columns.get(name, self.columns[EVERY_COLLECTION]), rules_of(name, self.rules)
                ),
                cluster_by=self.cluster_by.get(name, self.cluster_by[EVERY_COLLECTION]),
                rejects_location=self.location.join(TableKind.REJECTS, folder_name(name)),
            )
            for name in sorted(due)
        ]
        return MergeTask(
            facts=self.facts,
            group=group,
            changes=self.location.join(TableKind.CHANGES),
            pending=(),
            upto_batch=self.batch,
            documents=tuple(targets),
            file_bytes=self.file_bytes,
        )


class HeldChanges:
    """Sorted rows of `changes` kept in memory. Beyond a bound, it drops all of them."""

    def __init__(self, facts: LakeFacts, bytes_max: int) -> None:
        self._facts = facts
        self._bytes_left = bytes_max
        self._tables: list[pa.Table] = []

    @property
    def is_full(self) -> bool:
        return self._bytes_left < 0

    def take(self, rows: pa.Table) -> None:
        self._bytes_left -= rows.nbytes
        self._tables = [] if self.is_full else [*self._tables, rows]

    def of(self, group: int) -> list[ChangeRows]:
        """Return the rows of a group of vbuckets."""
        found = []
        for rows in self._tables:
            groups = self._facts.group_of(numbers(rows, "vbucket").astype(np.int64))
            start, end = np.searchsorted(groups, [group, group + 1]).tolist()
            if end > start:
                found.append(ChangeRows.in_memory(rows.slice(start, end - start)))
        return found


def merged_rows(
    task: MergeTask, columns: Sequence[str] | None = None, keys: Collection[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the documents that the group of the task's only table would hold after the merge: some columns, or those
    with some keys. For keys, `key` must be among the columns."""
    (target,) = task.documents
    fold = task.fold(target, task.read_pending())
    typed = None if target.columns is None else target.columns.schema
    plain = documents_schema(xattrs=task.facts.xattrs, form=task.facts.document)
    schema = pa.schema([*plain, *(typed or [])])
    schema = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    chosen = None if keys is None else pa.array([*keys], pa.string())
    files = [file for file in target.files if keys is None or _may_hold_keys(file, keys)]
    marked: Iterable[tuple[DataFile, Marks | None]] = [(file, None) for file in files]
    if keys is not None:
        wanted = _KeysLookedUp(frozenset(keys), target.ids, task.facts.vbuckets)
        found = [(file, wanted.marks(target.location, file)) for file in files]
        marked = [(file, marks) for file, marks in found if marks.any()]
    within = {file.path: marks for file, marks in marked if marks is not None}
    touching = _touched(target.location, [file for file, _ in marked], fold, within=within)
    touched = {file.path: kept for file, kept in _staying(touching)}

    def documents() -> Iterator[pa.Table]:
        left = [
            (file, kept if marks is None else marks if kept is None else marks & kept)
            for file, marks in marked
            for kept in [touched.get(file.path)]
        ]
        yield from _kept_rows(target.location, left, columns)
        for changes in fold.live():
            rows = _documents_of(changes, plain)
            if target.columns is not None:
                rows = _with_typed(rows, target.columns.parse(document_texts(rows.column("document"))).columns)
            yield rows

    for rows in documents():
        yield conformed(rows if chosen is None else rows.filter(pc.is_in(rows.column("key"), chosen)), schema)


def _may_hold_keys(file: DataFile, keys: Iterable[str]) -> bool:
    if "key" not in file.ranges:
        return True
    low, high = file.ranges["key"]
    return any(low <= key <= high for key in keys)


class _KeysLookedUp:
    """Looks up documents by the keys that a reader wants."""

    def __init__(self, keys: frozenset[str], ids: Collection[int], vbuckets: int) -> None:
        self._shown = sorted(keys)
        self._index: KeyIndex | None = None
        """By the bytes of the keys. None if a key may be escaped, and stand for other bytes: row groups are chosen
        instead."""
        if not any(map(may_be_escaped, keys)):
            raw = [key.encode() for key in self._shown for _ in ids]
            homes = np.array([vbucket_of(key, vbuckets) for key in raw], dtype=np.int64)
            spaces = key_spaces(homes, np.array([*ids] * len(keys), dtype=np.int64))
            self._index = KeyIndex(pa.array(raw, pa.binary()), np.zeros(len(raw), dtype=np.int64), spaces)

    def marks(self, location: Location, file: DataFile) -> Marks:
        """Mark each live row of a file that may have one of the keys: those in its index of keys, or all rows of row
        groups whose key ranges contain one of the keys."""
        if self._index is not None:
            found = find_rows(location, file, partial(KeyPlaces.find, index=self._index))
            if found is not None:
                return ~found.kept
        with FileReader(location, file) as reader:
            return np.concatenate(
                [
                    np.full(reader.row_group_rows(row_group), self._may_be_in(reader.text_range(row_group, "key")))
                    for row_group in reader.row_groups
                ]
            )

    def _may_be_in(self, keys: tuple[str, str] | None) -> bool:
        if keys is None:
            return True
        at = bisect_left(self._shown, keys[0])
        return at < len(self._shown) and self._shown[at] <= keys[1]


def _touched(
    location: Location,
    files: Sequence[DataFile],
    fold: Fold,
    *,
    every: bool = False,
    within: Mapping[str, Marks] | None = None,
) -> Iterator[Leaving]:
    """Yield the files with rows that are replaced or removed, and these rows; with `every`, all files. In a file with
    marks in `within`, row groups without a mark are skipped."""
    for file in files:
        can_change = fold.can_touch(file.ranges.get("vbucket", (float("-inf"), float("inf"))))
        if not every and not (can_change and fold.may_change(file.ranges.get("key"))):
            continue
        leaving = None if every or fold.looks_at_rows else find_rows(location, file, fold.superseded)
        if leaving is None:
            with FileReader(location, file) as reader:
                marks = (within or {}).get(file.path)
                kept = np.ones(reader.live_rows, dtype=np.bool_)
                start = 0
                for row_group in reader.row_groups:
                    end = start + reader.row_group_rows(row_group)
                    # Read keys only where one of them may have changed.
                    is_looked_at = marks is None or marks[start:end].any()
                    if is_looked_at and fold.may_change(reader.text_range(row_group, "key")):
                        kept[start:end] = fold.match_rows(end - start, partial(reader.read, row_group))
                    start = end
                leaving = Leaving.of(reader, kept)
        if every or len(leaving.positions):
            yield leaving


def _staying(touched: Iterable[Leaving]) -> Iterator[tuple[DataFile, Marks]]:
    """Yield the files, with a mark on every row that stays."""
    return ((it.file, it.kept) for it in touched)


def _leaving(target: DocumentsTarget, touched: Iterable[Leaving]) -> Iterable[tuple[DataFile, Marks | None]]:
    """Return the rows that leave a table but are not read while a file is rewritten: those marked in deletion vectors,
    or all rows of files that a repair or new columns replace."""
    if target.replaced or target.is_rebuilt:
        return [(file, None) for file in target.replaced or target.files]
    return [(it.file, ~it.kept) for it in touched] if target.is_merged_on_read else []


def _kept_rows(
    location: Location, files: Iterable[tuple[DataFile, Marks | None]], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the marked rows of files, or all if a file has no marks; with all columns, or those of `columns` it has."""
    for file, marks in files:
        start = 0
        with FileReader(location, file) as reader:
            # A file may be older than all of these columns, but its rows count.
            there = None if columns is None else [name for name in columns if name in reader.schema.names] or ["key"]
            for row_group in reader.row_groups:
                end = start + reader.row_group_rows(row_group)
                if marks is None:
                    yield reader.read(row_group, there)
                elif marks[start:end].any():
                    yield filtered(reader.read(row_group, there), marks[start:end])
                start = end


def _documents_of(changes: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the documents that mutations make, without typed columns."""
    columns = document_columns(changes, schema)
    return pa.table({name: columns[name] for name in schema.names if name in columns})


def _with_typed(rows: pa.Table, typed: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    for name, values in typed.items():
        rows = rows.append_column(name, values)
    return rows


def _rejected(rows: pa.Table, parsed: Parsed, schema: pa.Schema) -> pa.Table:
    """Return a row for each value that does not fit its typed column, with the document."""
    if not len(parsed.misfits):
        return schema.empty_table()
    reasons = {"field": parsed.misfits.fields, "reason": parsed.misfits.reasons}
    found = rows.take(pa.array(parsed.misfits.rows))
    columns = [reasons[name] if name in reasons else found.column(name) for name in schema.names]
    return pa.table(columns, names=schema.names).cast(schema)


# --- what is pending --------------------------------------------------------------------------------------------------
#
# Changes that are not merged yet, counted by table and group: merges are planned by these numbers. Commits update the
# counts. When a lake is opened, they are counted once from a few columns of the files that may hold unmerged changes.
# They need not be exact: the rows decide what a merge does.


_COLUMNS = ("vbucket", "collection_id", "op", "batch")
_EVERY_TABLE = -1


@dataclass(slots=True)
class Pending:
    """Changes that wait to be merged."""

    rows: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(table, group) → changes of documents."""
    urgent: set[tuple[str, int]] = field(default_factory=set)
    """(table, group) pairs that can't wait: documents may have to be removed or restored."""
    since_s: dict[str, float | None] = field(default_factory=dict)
    """By table: nothing that was written before this time is pending; None if unknown."""
    size_bytes: int = 0
    """Of the files that `changes` has got since everything was last merged."""

    @property
    def names(self) -> set[str]:
        """The tables that have pending changes."""
        return {name for name, _ in [*self.rows, *self.urgent]}

    def add(self, report: ChangeReport, names: Mapping[int, str], facts: LakeFacts, *, since_s: float | None) -> None:
        """Count the changes of a batch. `names` has the tables by collection id, including those of the batch;
        `since_s` is the time up to which the tables held everything before the batch."""
        before = self.names
        self.size_bytes += sum(file.size_bytes for file in report.files)
        for (id_, group), count in report.document_rows.items():
            self.rows[names[id_], group] += count
        self.urgent |= {(names[id_], group) for id_, group in report.collections_gone}
        rolled = {int(facts.group_of(vbucket)) for vbucket in report.rollbacks}
        self.urgent |= {(name, group) for name in set(names.values()) for group in rolled}
        for name in self.names - before:
            self.since_s.setdefault(name, since_s)

    def documents(self, name: str) -> int:
        """Return how many changes of documents wait for a table."""
        return sum(count for (table, _), count in self.rows.items() if table == name)

    def has(self, name: str, group: int) -> bool:
        return self.rows[name, group] > 0 or (name, group) in self.urgent

    def forget(self, name: str) -> None:
        """Drop the counts of a table that has been merged."""
        for counted in [key for key in self.rows if key[0] == name]:
            del self.rows[counted]
        self.urgent = {key for key in self.urgent if key[0] != name}
        self.since_s.pop(name, None)
        if not self.names:
            self.size_bytes = 0


def count_pending(
    location: Location,
    files: Iterable[DataFile],
    facts: LakeFacts,
    names: Mapping[int, str],
    merged_at: Callable[[str, int], int],
) -> Pending:
    """Count the changes after the batch at which each table and group was last merged."""
    least = min((merged_at(name, group) for name in set(names.values()) for group in range(facts.groups)), default=-1)
    waiting = [file for file in files if file.may_hold("batch", low=least + 1)]
    pending = Pending(size_bytes=sum(file.size_bytes for file in waiting))
    for rows in read_files(location, waiting, _COLUMNS):
        for id_, group, op, batch, count in _counts(rows, facts):
            tables = set(names.values()) if id_ == _EVERY_TABLE else {names[id_]} if id_ in names else set()
            for name in tables:
                if batch <= merged_at(name, group):
                    continue
                if op == ROLLBACK_OP or op in COLLECTION_GONE_OPS:
                    pending.urgent.add((name, group))
                elif id_ != _EVERY_TABLE:
                    pending.rows[name, group] += count
    return pending


def _counts(rows: pa.Table, facts: LakeFacts) -> Iterator[tuple[int, int, str, int, int]]:
    """Count the rows of each combination of collection, group, operation and batch."""
    counted = pa.table(
        {
            "id": numbers(rows, "collection_id", null=_EVERY_TABLE),
            "group": facts.group_of(numbers(rows, "vbucket").astype(np.int64)),
            "op": rows.column("op").cast(pa.string()),
            "batch": rows.column("batch"),
        }
    )
    grouped = counted.group_by(["id", "group", "op", "batch"], use_threads=False).aggregate([([], "count_all")])
    for row in grouped.to_pylist():
        yield row["id"], row["group"], row["op"], row["batch"], row["count_all"]


# --- the tasks of a merge ---------------------------------------------------------------------------------------------
#
# There is one task for each group of vbuckets with pending changes, for all tables with the same number of groups.
# `headwater.landing.planning` decides when to merge. A merge takes everything that is pending, so after it all vbuckets
# of a table are at the same batch.


TASK_TABLES_MAX = 32
"""More tables are divided among several tasks, for several cores."""


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRules:
    """How changes are merged into the tables of documents."""

    history: bool = False
    """Keep a table with every version of each document."""
    change_feed: bool | None = None
    """Whether tables of documents have a change feed. `None` leaves each table as it is."""
    file_bytes: int = FILE_BYTES_DEFAULT
    """Start a new data file once a file has this size."""
    on_read: bool | None = None
    """Mark superseded rows in deletion vectors (True), or rewrite the files that hold them (False). `None` leaves each
    table as it is; new tables have no vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans the tasks of merges from what the tables hold."""

    location: Location
    facts: LakeFacts
    rules: MergeRules
    change_files: Sequence[DataFile]
    upto_batch: int

    def plan(self, tables: Iterable[CollectionTables], pending: Pending) -> list[MergeTask]:
        due: dict[tuple[int, int], list[CollectionTables]] = {}
        for table in tables:
            is_rebuilt = table.documents is not None and table.documents.has_to_be_rebuilt
            waiting = {
                group * table.groups // self.facts.groups
                for group in range(self.facts.groups)
                if is_rebuilt or pending.has(table.name, group) or self.history_lags(table, group)
            }
            for group in waiting:
                due.setdefault((table.groups, group), []).append(table)
        tasks = [
            self._task(group, groups, due[groups, group][first : first + TASK_TABLES_MAX], pending)
            for groups, group in sorted(due)
            for first in range(0, len(due[groups, group]), TASK_TABLES_MAX)
        ]
        # Largest first: free cores take the next task, so no core is left alone with a large one at the end.
        return sorted(tasks, key=_bytes_to_read, reverse=True)

    def history_lags(self, table: CollectionTables, group: int) -> bool:
        if not self.rules.history or table.documents is None:
            return False
        at = NOT_MERGED if table.history is None else table.history.merged[group]
        return at < table.documents.merged[group]

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _task(self, group: int, groups: int, tables: Sequence[CollectionTables], pending: Pending) -> MergeTask:
        within = groups_within(group, of=groups, groups=self.facts.groups)
        return self.merge_task(
            group,
            of=groups,
            documents=tuple(self.documents_target(table, group) for table in tables),
            history=tuple(self._history_target(table, group) for table in tables) if self.rules.history else (),
            with_whole=any((table.name, part) in pending.urgent for table in tables for part in within),
        )

    def merge_task(
        self,
        group: int,
        *,
        of: int,
        documents: tuple[DocumentsTarget, ...],
        history: tuple[HistoryTarget, ...] = (),
        with_whole: bool,
    ) -> MergeTask:
        """Return the task of `group`, out of `of` groups."""
        facts = replace(self.facts, groups=of)
        vbuckets = facts.vbuckets_of(group)
        targets: list[DocumentsTarget | HistoryTarget] = [*documents, *history]
        after = min(target.after_batch for target in targets)
        whole = tuple(pending_files(self.change_files, after_batch=NOT_MERGED, vbuckets=vbuckets))
        return MergeTask(
            facts=facts,
            group=group,
            changes=self.location.join(TableKind.CHANGES),
            pending=tuple(pending_files(self.change_files, after_batch=after, vbuckets=vbuckets)),
            whole=whole if with_whole else None,
            upto_batch=self.upto_batch,
            documents=documents,
            history=history,
            file_bytes=self.rules.file_bytes,
        )

    def new_table_task(self, table: CollectionTables, group: int, *, with_history: bool, with_feed: bool) -> MergeTask:
        """Return the task that rebuilds a group of a collection's tables from all of `changes`."""
        target = self.documents_target(table, group)
        documents = replace(
            target,
            files=(),
            after_batch=NOT_MERGED,
            is_rebuilt=False,
            has_feed=target.has_feed and with_feed,
            replaced=target.files,
            rejects_files=(),
        )
        history = replace(self._history_target(table, group), files=(), after_batch=NOT_MERGED)
        return self.merge_task(
            group,
            of=table.groups,
            documents=(documents,),
            history=(history,) if with_history else (),
            with_whole=True,
        )

    def documents_target(self, table: CollectionTables, group: int) -> DocumentsTarget:
        return DocumentsTarget(
            **_target_members(table, TableKind.DOCUMENTS, table.documents, group),
            columns=table.columns,
            cluster_by=table.cluster_by,
            is_rebuilt=table.documents is not None and table.documents.has_to_be_rebuilt,
            has_feed=table.documents is not None and has_feed(table.documents.log.properties),
            rejects_location=table.location_of(TableKind.REJECTS),
            rejects_files=() if table.rejects is None else table.rejects.files_of(group, of=table.groups),
        )

    def _history_target(self, table: CollectionTables, group: int) -> HistoryTarget:
        members = _target_members(table, TableKind.HISTORY, table.history, group)
        return HistoryTarget(**members, columns=table.history_columns, unused=table.history_unused)


def _target_members(table: CollectionTables, kind: TableKind, merged: MergedTable | None, group: int) -> dict[str, Any]:
    """Return the members that targets of documents and of histories share."""
    return {
        "name": table.name,
        "ids": frozenset(table.ids),
        "location": table.location_of(kind),
        "files": () if merged is None else merged.files_of(group, of=table.groups),
        "after_batch": NOT_MERGED if merged is None else merged.merged_at(group, of=table.groups),
        "is_merged_on_read": merged is not None and merged.is_merged_on_read,
    }


def _bytes_to_read(task: MergeTask) -> int:
    """Return the bytes of the tables only: the files of `changes` are shared with other groups."""
    return sum(file.size_bytes for target in task.targets for file in target.files)


def pending_files(files: Iterable[DataFile], *, after_batch: int, vbuckets: Sequence[int]) -> list[DataFile]:
    """Return the files that may hold changes of some vbuckets after a batch."""
    return [
        file
        for file in files
        if file.may_hold("batch", low=after_batch + 1) and file.may_hold("vbucket", low=vbuckets[0], high=vbuckets[-1])
    ]
