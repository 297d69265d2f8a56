"""Upkeep of the tables: joining small files, cutting tables into more groups, and trimming `changes`. `dead_files`
deletes what no table needs any more.

Every batch brings some small files, and a table of many small files is slow to read. Files of one partition are joined
when there are several of about one size. So every row is written again once for each size that its files go through,
and no more: the cost is bounded by what has been written, whatever the table holds.

The driver of a landing calls it between batches. It must never change what a reader sees of a table.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.lake.change_files import row_groups, sort_rows
from headwater.lake.change_rows import (
    COLLECTION_CREATED,
    COLLECTION_DROPPED,
    EXPIRATION,
    MUTATION,
    Barriers,
    ChangeRows,
    KeyIndex,
    Marks,
    WantedChanges,
    key_spaces,
    read_changes,
)
from headwater.lake.collection_tables import NOT_MERGED, CollectionTables
from headwater.lake.data_files import (
    FILE_BYTES_DEFAULT,
    DataFile,
    FileReader,
    FileWriter,
    RollingWriter,
    filtered,
    numbers,
    read_files,
)
from headwater.lake.delta_log import TableCommit
from headwater.lake.lake import TRIMMED_TRANSACTION, Lake, Runner, run_here
from headwater.lake.layout import CHANGE_RANGES, FORMAT_PROPERTY, GROUP, GROWN_FORMAT, LakeFacts, changes_schema
from headwater.lake.location import Location
from headwater.lake.row_order import in_order, placed_row_groups, sort_columns
from headwater.log_fields import LogEvent, fields

logger = logging.getLogger(__name__)

JOIN_FILES_MIN = 8
"""Files of one size class that are joined; a class is four times as large as the one before."""
_CLASS_STEP = 4
_LEAST_CLASS_BYTES = 64 * 1024
JOIN_BYTES_A_TIME = 256 * 1024 * 1024
"""Uncompressed, of changes that are sorted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTask:
    """Write the rows of some files of a table, all of one partition, to fewer."""

    location: Location
    files: tuple[DataFile, ...]
    file_bytes: int
    facts: LakeFacts | None
    """Given for `changes`, whose files are sorted by group; those of all other tables are sorted by key, those of
    documents before it by what they are clustered by."""
    ranges: tuple[str, ...]
    cluster_by: tuple[str, ...] = ()

    def run(self) -> list[DataFile]:
        if self.facts is not None:
            return [_join_changes(self.location, self.files, self.facts)]
        schema = _joined_schema(self.location, self.files)
        writer = RollingWriter(
            self.location,
            schema,
            ranges=[name for name in self.ranges if name in schema.names],
            partition=self.files[0].partition,
            file_bytes=self.file_bytes,
            is_keyed=True,
        )
        for rows in _rows_in_order(self.location, self.files, schema, self.cluster_by):
            writer.write(rows)
        return writer.close()


def _joined_schema(location: Location, files: Iterable[DataFile]) -> pa.Schema:
    """Files that were written after a column was added have it, and others do not."""
    fields: dict[str, pa.Field] = {}
    for file in files:
        with FileReader(location, file.path) as reader:
            fields |= {field.name: field for field in reader.schema}
    return pa.schema([*fields.values()])


def _rows_in_order(
    location: Location, files: Iterable[DataFile], schema: pa.Schema, cluster_by: Iterable[str]
) -> Iterator[pa.Table]:
    by = sort_columns(schema, cluster_by)
    with ExitStack() as opened:
        readers = [opened.enter_context(FileReader(location, file.path)) for file in files]
        yield from in_order(
            schema, [part for reader in readers for part in placed_row_groups(reader, schema, by)], by=by
        )


def _join_changes(location: Location, files: Sequence[DataFile], facts: LakeFacts) -> DataFile:
    """Sorted rows of many files in one. What is sorted together are some groups of vbuckets at a time."""
    schema = changes_schema(xattrs=facts.xattrs)
    writer = FileWriter(location, schema, ranges=CHANGE_RANGES, prefix="changes")
    passes = math.ceil(_uncompressed_bytes(location, files) / JOIN_BYTES_A_TIME)
    edges = [number * facts.groups // passes for number in range(passes + 1)]
    for first, end in pairwise(edges):
        if first < end:
            vbuckets = range(facts.vbuckets_of(first).start, facts.vbuckets_of(end - 1).stop)
            parts = [*_rows_of_vbuckets(location, files, vbuckets, schema.names)]
            if parts:
                rows = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
                for part in row_groups(facts, sort_rows(facts, rows)):
                    writer.write_row_group(part)
    return writer.close()


def _uncompressed_bytes(location: Location, files: Iterable[DataFile]) -> int:
    total = 1
    for file in files:
        with FileReader(location, file.path) as reader:
            total += sum(reader.uncompressed_bytes(row_group) for row_group in reader.row_groups)
    return total


def _rows_of_vbuckets(
    location: Location, files: Iterable[DataFile], vbuckets: range, columns: Sequence[str]
) -> Iterator[pa.Table]:
    for file in files:
        with FileReader(location, file.path) as reader:
            for row_group in reader.row_groups:
                low, high, _ = reader.range_of(row_group, "vbucket")
                if low < vbuckets.stop and vbuckets.start <= high:
                    rows = reader.read(row_group, columns)
                    here = numbers(rows, "vbucket")
                    kept = filtered(rows, (here >= vbuckets.start) & (here < vbuckets.stop))
                    if kept.num_rows:
                        yield kept


def files_to_join(files: Iterable[DataFile], *, file_bytes: int) -> list[tuple[DataFile, ...]]:
    """Sets of files of one partition and one size class, each worth to be joined and small enough to be."""
    classes: dict[tuple[object, int], list[DataFile]] = {}
    for file in files:
        if file.size_bytes < file_bytes // 2:
            size_class = max(0, int(math.log(max(1, file.size_bytes / _LEAST_CLASS_BYTES), _CLASS_STEP)))
            classes.setdefault((file.partition, size_class), []).append(file)
    return [part for alike in classes.values() for part in _parts(alike, file_bytes) if len(part) >= JOIN_FILES_MIN]


def _parts(files: Sequence[DataFile], file_bytes: int) -> Iterator[tuple[DataFile, ...]]:
    part: list[DataFile] = []
    for file in files:
        part.append(file)
        if sum(it.size_bytes for it in part) >= file_bytes:
            yield tuple(part)
            part = []
    yield tuple(part)


def join_files(lake: Lake, run: Runner = run_here, *, file_bytes: int = FILE_BYTES_DEFAULT) -> int:
    """Join small files of all tables. Returns how many files are gone."""
    sets = files_to_join(lake.changes.files(), file_bytes=file_bytes)
    task = partial(JoinTask, location=lake.changes.location, file_bytes=file_bytes)
    joined = _joined([task(files=part, facts=lake.facts, ranges=CHANGE_RANGES) for part in sets], run)
    if sets:
        lake.step("join changes")
        removed = [file for part in sets for file in part]
        lake.commit_changes(TableCommit(add=joined, remove=removed, state=lake.state, is_rearrangement=True))
    gone = sum(len(part) for part in sets) - len(joined)
    for tables in lake.in_service:
        with lake.containing(tables.name):
            for table, ranges in tables.with_ranges():
                sets = files_to_join(table.log.files(), file_bytes=file_bytes)
                cluster_by = tables.cluster_by if table is tables.documents else ()
                task = partial(JoinTask, location=table.log.location, file_bytes=file_bytes, cluster_by=cluster_by)
                joined = _joined([task(files=part, facts=None, ranges=ranges) for part in sets], run)
                if sets:
                    lake.step("join documents")
                    removed = [file for part in sets for file in part]
                    table.commit(add=joined, remove=removed)
                gone += sum(len(part) for part in sets) - len(joined)
    return gone


def _joined(tasks: Sequence[JoinTask], run: Runner) -> list[DataFile]:
    return [file for files in (run(tasks) if tasks else []) for file in files]


# --- more groups ------------------------------------------------------------------------------------------------------
#
# A merge holds the keys of a group in memory, and writes the files again that have changed. So tables that grow need
# more groups. Their number is doubled, for then each of them becomes two: the vbuckets of group 3 are those of 6 and 7.
#
# Each table is cut in one commit, which says into how many groups, and `changes` says it last. So a table may have more
# groups than the lake: a reader takes those together that its group has become (`MergedTable.files_of`), and a landing
# that finds such tables first completes what was begun.
#
# A table has fewer groups than the lake as long as it is small: it has one at first, and is cut before a merge that
# makes it larger. Then `changes` has nothing to say: the tables of a collection are read and merged by the least number
# of groups that one of them has, and a merge first makes it the same for all of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupTask:
    """Write the rows of some files of a table, all of one partition, to the groups that they are in now."""

    location: Location
    files: tuple[DataFile, ...]
    facts: LakeFacts
    """With as many groups as there are now."""
    ranges: tuple[str, ...]
    cluster_by: tuple[str, ...]
    file_bytes: int

    def run(self) -> list[DataFile]:
        schema = _joined_schema(self.location, self.files)
        ranges = [name for name in self.ranges if name in schema.names]
        writers: dict[int, RollingWriter] = {}
        for rows in _rows_in_order(self.location, self.files, schema, self.cluster_by):
            groups = self.facts.group_of(numbers(rows, "vbucket").astype(np.int64))
            for group in np.unique(groups).tolist():
                if group not in writers:
                    partition = {**dict(self.files[0].partition), GROUP.name: str(group)}
                    writers[group] = RollingWriter(
                        self.location,
                        schema,
                        ranges=ranges,
                        partition=[*partition.items()],
                        file_bytes=self.file_bytes,
                        is_keyed=True,
                    )
                writers[group].write(filtered(rows, groups == group))
        return [file for writer in writers.values() for file in writer.close()]


def grow_groups(lake: Lake, run: Runner = run_here, *, file_bytes: int = FILE_BYTES_DEFAULT) -> None:
    """Cut large tables into as many groups as the documents of the lake need, or as was begun.

    It is not begun while a table is set aside. One that fails meanwhile is cut when it is merged again.
    """
    for collection in lake.in_service:
        with lake.containing(collection.name):
            collection.refresh()
    if len(lake.aside) and not lake.is_growing:
        return
    most = max((table.groups for it in lake.in_service for table, _ in it.with_ranges()), default=1)
    groups = most if lake.is_growing else lake.facts.grown(lake.documents)
    if groups == lake.facts.groups:
        return
    if lake.facts.format < GROWN_FORMAT:
        lake.step("set the format")
        lake.changes.set_properties({FORMAT_PROPERTY: str(GROWN_FORMAT)}, lake.state)
    for collection in lake.in_service:
        with lake.containing(collection.name):
            _regroup(lake, collection, groups, run, least=lake.facts.groups, file_bytes=file_bytes)
    lake.step("regroup the lake")
    lake.set_groups(groups)
    logger.info("the tables have %d groups now", groups, extra=fields(event=LogEvent.GROUPS_GROWN))


def grow_small_tables(lake: Lake, run: Runner = run_here, *, file_bytes: int = FILE_BYTES_DEFAULT) -> None:
    """Cut tables with fewer groups than the lake into as many as they need for what is pending, or as was begun."""
    for name in sorted(lake.pending.names):
        collection = lake.tables[name]
        if collection.documents is not None and collection.groups < lake.facts.groups:
            groups = collection.groups_for(collection.documents.rows + lake.pending.documents(name))
            with lake.containing(name):
                _regroup(lake, collection, groups, run, file_bytes=file_bytes)


def _regroup(
    lake: Lake, collection: CollectionTables, groups: int, run: Runner, *, least: int = 1, file_bytes: int
) -> None:
    """Cut the tables of a collection that have at least `least` groups into so many, each in one commit."""
    for table, ranges in collection.with_ranges():
        if not least <= table.groups < groups:
            continue
        parts: dict[object, list[DataFile]] = {}
        for file in table.log.files():
            parts.setdefault(file.partition, []).append(file)
        tasks = [
            RegroupTask(
                location=table.log.location,
                files=tuple(files),
                facts=replace(lake.facts, groups=groups),
                ranges=ranges,
                cluster_by=collection.cluster_by if table is collection.documents else (),
                file_bytes=file_bytes,
            )
            for files in parts.values()
        ]
        added = [file for files in (run(tasks) if tasks else []) for file in files]
        lake.step(f"regroup {collection.name}")
        table.regroup(groups, add=added, remove=table.log.files())


# --- trimming `changes` -----------------------------------------------------------------------------------------------
#
# What is older than the retention is folded to what it left.
# Of every document the version stays that it had at that point, so the tables of documents can still be built from
# `changes`, and a rollback to any later point can be undone. Removals, superseded versions, void rows and events go.
# One row more stays of each vbucket, the one with the highest seqno: it says how far back a rollback may go.
#
# It is done where most of the old rows would go, so that a row is not written again too often.


TRIM_ROWS_PER_DOCUMENT = 2
"""Changes are trimmed when there are more old ones than this for each document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimTask:
    """Write the changes of one group again, with the old ones folded."""

    location: Location
    facts: LakeFacts
    group: int
    files: tuple[DataFile, ...]
    upto_batch: int
    """What came with a later batch stays as it is."""
    last_batch: int

    def run(self) -> list[DataFile]:
        schema = changes_schema(xattrs=self.facts.xattrs)
        vbuckets = self.facts.vbuckets_of(self.group)
        wanted = WantedChanges(vbuckets=tuple(vbuckets), after_batch=NOT_MERGED, upto_batch=self.last_batch, ids=None)
        parts = read_changes(self.location, self.files, wanted, columns=schema.names)
        if not parts:
            return []
        writer = RollingWriter(self.location, schema, ranges=CHANGE_RANGES, partition=())
        for rows, kept in zip(parts, self._kept(parts, vbuckets), strict=True):
            if kept.any():
                writer.write(rows.wide(kept).select(schema.names))
        return writer.close()

    def _kept(self, parts: Sequence[ChangeRows], vbuckets: range) -> Iterator[Marks]:
        old = [(rows.batches <= self.upto_batch) & ~rows.void for rows in parts]
        homes, ids, seqnos, ops = (_joined_changes(parts, old, name) for name in ("vbuckets", "ids", "seqnos", "ops"))
        barriers = Barriers(np.unique(ids).tolist(), vbuckets)
        is_end = (ops == COLLECTION_CREATED) | (ops == COLLECTION_DROPPED)
        barriers.add(vbuckets=homes[is_end], ids=ids[is_end], seqnos=seqnos[is_end])
        is_change = ops <= EXPIRATION
        keys = [rows.keys(marks & (rows.ops <= EXPIRATION)) for rows, marks in zip(parts, old, strict=True)]
        index = KeyIndex(pa.concat_arrays(keys), seqnos[is_change], key_spaces(homes, ids)[is_change])
        kept = _highest(homes, seqnos)
        is_document = index.newest & (ops[is_change] == MUTATION)
        kept[is_change] |= is_document & ~barriers.before(vbuckets=homes, ids=ids, seqnos=seqnos)[is_change]
        start = 0
        for rows, marks in zip(parts, old, strict=True):
            chosen = rows.batches > self.upto_batch
            chosen[marks] |= kept[start : (start := start + int(marks.sum()))]
            yield chosen


def _joined_changes(parts: Sequence[ChangeRows], marks: Sequence[Marks], name: str) -> NDArray[np.int64]:
    columns = [getattr(rows, name)[chosen] for rows, chosen in zip(parts, marks, strict=True)]
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)


def _highest(vbuckets: NDArray[np.int64], seqnos: NDArray[np.int64]) -> Marks:
    """The row with the highest seqno of each vbucket."""
    order = np.lexsort((seqnos, vbuckets))
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = vbuckets[order[1:]] != vbuckets[order[:-1]]
    found = np.zeros(len(order), dtype=np.bool_)
    found[order[is_last]] = True
    return found


def trim_changes(lake: Lake, before: datetime, run: Runner = run_here) -> int:
    """Fold changes that were landed before a time, where enough of them would go. Returns how many rows are gone.

    A rollback to before that time can't be undone afterwards: such a vbucket is read again from 0.
    """
    upto = min([_last_batch_before(lake, before), *_merged_batches(lake)])
    old = [file for file in lake.changes.files() if file.may_hold("batch", high=upto)]
    rows = sum(file.rows for file in old)
    if upto < 0 or rows <= TRIM_ROWS_PER_DOCUMENT * lake.documents:
        return 0
    tasks = [
        TrimTask(
            location=lake.changes.location,
            facts=lake.facts,
            group=group,
            files=tuple(old),
            upto_batch=upto,
            last_batch=lake.last_batch,
        )
        for group in range(lake.facts.groups)
    ]
    kept: list[DataFile] = [file for files in run(tasks) for file in files]
    lake.step("commit trimmed changes")
    lake.commit_changes(TableCommit(add=kept, remove=old, transactions={TRIMMED_TRANSACTION: upto}, state=lake.state))
    kept_rows = sum(int(file.rows) for file in kept)
    return rows - kept_rows


def _last_batch_before(lake: Lake, before: datetime) -> int:
    """The last batch such that it, and every one before it, was landed before a time."""
    landed: dict[int, datetime] = {}

    for rows in read_files(lake.changes.location, lake.changes.files(), ["batch", "landed_at"]):
        for row in rows.group_by("batch", use_threads=False).aggregate([("landed_at", "max")]).to_pylist():
            batch, at = row["batch"], row["landed_at_max"]
            landed[batch] = max(at, landed.get(batch, at))
    young = [batch for batch, at in landed.items() if at >= before]
    return min(young) - 1 if young else max(landed, default=NOT_MERGED)


def _merged_batches(lake: Lake) -> Iterator[int]:
    """The batches that the tables are merged at: what they still need must stay as it is."""
    for table in lake.tables.values():
        yield min(table.merged_at(group) for group in range(lake.facts.groups))
        if lake.settings.merging.history:
            yield NOT_MERGED if table.history is None else min(table.history.merged.values())
