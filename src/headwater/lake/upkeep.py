"""Upkeep of the tables: join small files, split tables into more groups, trim `changes`, and delete dead files and old
entries of the logs.

Every batch adds some small files, and so does every merge; a table of many small files is slow to read. Files of one
partition are joined when there are several of about one size. So every row is rewritten once for each size class that
its files go through: the cost is bounded by what has been written, whatever the table holds. A merge joins up to a
bound, and leaves the rest to the next, so none takes long because much has accumulated. Files with many dead rows are
rewritten, too.

The driver of a landing calls this module between batches. It must never change what a reader sees of a table.

A file is *dead* if the newest version of its table does not need it: a commit has removed it, it holds no deletion
vector of a live file, it belongs to the change feed, or no commit has ever named it. Dead files are kept so that
earlier versions can be read, for some hours (`vacuum`) and up to some bytes (`DeadFiles`), whichever ends first. A
merge rewrites files with changed documents, so in an hour a small table with many changes leaves many times its size.

What is never deleted: a live file; a file that was removed within `READERS_S_MIN`, for readers that have just opened
the version before; and a file that no commit has named yet within `VACUUM_HOURS_MIN`: a file that an executor has
written and the driver has not committed yet looks like one that will never be committed.

Dead bytes are counted from the lists of live files, which the logs have in memory: a file that was live before and is
not now has been removed. Each table's store is listed only once, and again after `vacuum`: that finds the leftovers of
earlier runs and crashes.

Cleaning a log removes the commit metadata of its old entries. So it first commits an entry that records again what the
table holds, and that entry stays.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.errors import InvalidInput
from headwater.lake import change_rows, data_files
from headwater.lake.change_files import row_groups, sort_rows
from headwater.lake.collection_tables import NOT_MERGED, CollectionTables, MergedTable
from headwater.lake.delta_log import LOG_RETENTION_DAYS, DeltaLog, TableCommit
from headwater.lake.key_index import KeyIndex, Marks, key_spaces
from headwater.lake.lake import TRIMMED_TRANSACTION, Lake, Runner, run_here
from headwater.lake.layout import CHANGE_RANGES, FEED_FOLDER, GROUP, STATE_FOLDER, LakeFacts, changes_schema
from headwater.lake.location import Location
from headwater.lake.row_order import files_in_order
from headwater.lake.table_state import TableState
from headwater.log_fields import LogEvent, fields
from headwater.options import parse_bytes

logger = logging.getLogger(__name__)

JOIN_FILES_MIN = 8
"""How many files of one size class are joined; a class is four times as large as the one before."""
_CLASS_STEP = 4
DEAD_SHARE = 0.2
"""A file is rewritten when a larger share of its rows is dead: that writes four live rows for each dead one."""
_LEAST_CLASS_BYTES = 16 * 1024
JOIN_BYTES_A_TIME = 256 * 1024 * 1024
"""Uncompressed bytes of changes that are sorted together."""
JOIN_BYTES = 32 * 1024 * 1024
"""Between two batches, and in a merge, files of up to this many bytes are joined, so that none takes long."""
CHANGE_FILES_MAX = 512
"""With more files than this, `changes` gets large files joined as well, which may take seconds: no batch runs then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinChangesTask:
    """Write the rows of some files of `changes` to one file, sorted by group."""

    location: Location
    files: tuple[data_files.DataFile, ...]
    facts: LakeFacts

    def run(self) -> list[data_files.DataFile]:
        """Sort some groups of vbuckets at a time."""
        facts, schema = self.facts, changes_schema(xattrs=self.facts.xattrs)
        writer = data_files.FileWriter(self.location, schema, ranges=CHANGE_RANGES, prefix="changes")
        passes = math.ceil(_uncompressed_bytes(self.location, self.files) / JOIN_BYTES_A_TIME)
        edges = [number * facts.groups // passes for number in range(passes + 1)]
        for first, end in pairwise(edges):
            if first < end:
                vbuckets = range(facts.vbuckets_of(first).start, facts.vbuckets_of(end - 1).stop)
                parts = [*_rows_of_vbuckets(self.location, self.files, vbuckets, schema.names)]
                if parts:
                    rows = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
                    for part in row_groups(facts, sort_rows(facts, rows)):
                        writer.write_row_group(part)
        return [writer.close()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTask:
    """Rewrite the live rows of some files of any other table, all of one partition, to fewer files, sorted by key;
    documents by their cluster columns first."""

    location: Location
    files: tuple[data_files.DataFile, ...]
    file_bytes: int
    ranges: tuple[str, ...]
    cluster_by: tuple[str, ...]
    has_places: bool
    """Whether the files get an index of their keys."""
    regrouped: LakeFacts | None = None
    """Facts with the new number of groups, if the rows are to be divided among these."""

    @classmethod
    def of(
        cls, tables: CollectionTables, table: MergedTable, files: Iterable[data_files.DataFile], **others: Any
    ) -> Self:
        return cls(
            location=table.log.location,
            files=tuple(files),
            ranges=tables.ranges_of(table),
            cluster_by=tables.cluster_by if table is tables.documents else (),
            has_places=table is tables.documents and table.is_merged_on_read,
            **others,
        )

    def run(self) -> list[data_files.DataFile]:
        schema = _joined_schema(self.location, self.files)
        ranges = [name for name in self.ranges if name in schema.names]
        writers: dict[int | None, data_files.RollingWriter] = {}
        for rows in files_in_order(self.location, [(file, None) for file in self.files], schema, self.cluster_by):
            for group, part in self._groups(rows):
                if group not in writers:
                    partition = dict(self.files[0].partition)
                    partition |= {} if group is None else {GROUP.name: str(group)}
                    writers[group] = data_files.RollingWriter(
                        self.location,
                        schema,
                        ranges=ranges,
                        partition=[*partition.items()],
                        file_bytes=self.file_bytes,
                        is_keyed=True,
                        has_places=self.has_places,
                    )
                writers[group].write(part)
        return [file for writer in writers.values() for file in writer.close()]

    def _groups(self, rows: pa.Table) -> Iterator[tuple[int | None, pa.Table]]:
        if self.regrouped is None:
            yield None, rows
            return
        groups = self.regrouped.group_of(data_files.numbers(rows, "vbucket").astype(np.int64))
        for group in np.unique(groups).tolist():
            yield group, data_files.filtered(rows, groups == group)


def _joined_schema(location: Location, files: Iterable[data_files.DataFile]) -> pa.Schema:
    """Return the joined schema of files: those written before a column was added lack it."""
    fields: dict[str, pa.Field] = {}
    for file in files:
        with data_files.FileReader(location, file) as reader:
            fields |= {field.name: field for field in reader.schema}
    return pa.schema([*fields.values()])


def _uncompressed_bytes(location: Location, files: Iterable[data_files.DataFile]) -> int:
    total = 1
    for file in files:
        with data_files.FileReader(location, file) as reader:
            total += sum(reader.uncompressed_bytes(row_group) for row_group in reader.row_groups)
    return total


def _rows_of_vbuckets(
    location: Location, files: Iterable[data_files.DataFile], vbuckets: range, columns: Sequence[str]
) -> Iterator[pa.Table]:
    for file in files:
        with data_files.FileReader(location, file) as reader:
            for row_group in reader.row_groups:
                low, high, _ = reader.range_of(row_group, "vbucket")
                if low < vbuckets.stop and vbuckets.start <= high:
                    rows = reader.read(row_group, columns)
                    here = data_files.numbers(rows, "vbucket")
                    kept = data_files.filtered(rows, (here >= vbuckets.start) & (here < vbuckets.stop))
                    if kept.num_rows:
                        yield kept


def files_to_join(files: Sequence[data_files.DataFile], *, file_bytes: int) -> list[tuple[data_files.DataFile, ...]]:
    """Return sets of files of one partition and one size class that are worth joining and small enough; and single
    files with too many dead rows."""
    classes: dict[tuple[object, int], list[data_files.DataFile]] = {}
    for file in files:
        if (size_bytes := _live_bytes([file])) < file_bytes // 2:
            size_class = max(0, int(math.log(max(1, size_bytes / _LEAST_CLASS_BYTES), _CLASS_STEP)))
            classes.setdefault((file.partition, size_class), []).append(file)
    joined = [part for alike in classes.values() for part in _parts(alike, file_bytes) if len(part) >= JOIN_FILES_MIN]
    paths = {file.path for part in joined for file in part}
    worn = [(file,) for file in files if file.rows - file.live_rows > DEAD_SHARE * file.rows and file.path not in paths]
    return [*joined, *worn]


def _parts(files: Sequence[data_files.DataFile], file_bytes: int) -> Iterator[tuple[data_files.DataFile, ...]]:
    part: list[data_files.DataFile] = []
    for file in files:
        part.append(file)
        if _live_bytes(part) >= file_bytes:
            yield tuple(part)
            part = []
    yield tuple(part)


def join_files(lake: Lake, run: Runner = run_here, *, file_bytes: int = data_files.FILE_BYTES_DEFAULT) -> int:
    """Join small files of all tables. Returns the decrease in files."""
    return join_changes(lake, run, file_bytes=file_bytes) + join_documents(lake, run, file_bytes=file_bytes)


def join_changes(
    lake: Lake, run: Runner = run_here, *, file_bytes: int = data_files.FILE_BYTES_DEFAULT, bytes_max: float = math.inf
) -> int:
    """Join small files of `changes`, the smallest first, up to `bytes_max` bytes. Returns the decrease in files.

    If only larger sets of files are left, one of them is joined once the table has more than `CHANGE_FILES_MAX` files.
    """
    files, sets = lake.changes.files(), list[tuple[data_files.DataFile, ...]]()
    for part in sorted(files_to_join(files, file_bytes=file_bytes), key=_live_bytes):
        bytes_max -= _live_bytes(part)
        if bytes_max < 0 and (sets or len(files) <= CHANGE_FILES_MAX):
            break
        sets.append(part)
    if not sets:
        return 0
    joined = _results([JoinChangesTask(location=lake.changes.location, files=it, facts=lake.facts) for it in sets], run)
    lake.step("join changes")
    removed = [file for part in sets for file in part]
    lake.commit_changes(TableCommit(add=joined, remove=removed, state=lake.state, is_rearrangement=True))
    return len(removed) - len(joined)


def join_documents(
    lake: Lake, run: Runner = run_here, *, file_bytes: int = data_files.FILE_BYTES_DEFAULT, bytes_max: float = math.inf
) -> int:
    """Join small files of all other tables, the smallest first, until `bytes_max` bytes are written. Returns the
    decrease in files."""
    found = [
        (tables.name, table, RewriteTask.of(tables, table, part, file_bytes=file_bytes))
        for tables in lake.in_service
        for table in tables.there
        for part in files_to_join(table.log.files(), file_bytes=file_bytes)
    ]
    chosen: dict[tuple[str, MergedTable], list[RewriteTask]] = {}
    for name, table, task in sorted(found, key=lambda it: _live_bytes(it[-1].files)):
        if bytes_max <= 0:
            break
        bytes_max -= _live_bytes(task.files)
        chosen.setdefault((name, table), []).append(task)
    gone = 0
    for (name, table), tasks in chosen.items():
        with lake.containing(name):
            joined = _results(tasks, run)
            lake.step("join documents")
            removed = [file for task in tasks for file in task.files]
            table.commit(add=joined, remove=removed)
            gone += len(removed) - len(joined)
    return gone


def _live_bytes(files: Iterable[data_files.DataFile]) -> int:
    """Return the size that files would have without their dead rows."""
    return sum(file.size_bytes * file.live_rows // max(1, file.rows) for file in files)


def switch_modes(lake: Lake, run: Runner = run_here) -> None:
    """Turn deletion vectors of documents and versions on or off, as the settings require. Turning them off
    first rewrites the files that have one."""
    wanted = lake.settings.merging.on_read
    if wanted is None:
        return
    for tables in lake.in_service:
        with lake.containing(tables.name):
            for table in tables.there:
                if table is tables.rejects or table.is_merged_on_read == wanted:
                    continue
                marked, file_bytes = [it for it in table.log.files() if it.vector], lake.settings.merging.file_bytes
                tasks = [RewriteTask.of(tables, table, [file], file_bytes=file_bytes) for file in marked]
                lake.step(f"switch {tables.name}")
                if tasks:
                    table.commit(add=_results(tasks, run), remove=marked)
                    lake.step(f"switch {tables.name}")
                table.set_merged_on_read(wanted)


def _results(tasks: Sequence[Any], run: Runner) -> list[data_files.DataFile]:
    """Run tasks, and return the files that they have written."""
    return [file for files in (run(tasks) if tasks else []) for file in files]


# --- more groups ------------------------------------------------------------------------------------------------------
#
# A merge holds the keys of a group in memory, and rewrites the files that have changed. So growing tables need more
# groups. Their number is doubled, which splits each group in two: the vbuckets of group 3 become those of 6 and 7.
#
# Each table is split in one commit, which records the number of groups, and `changes` records it last. So a table may
# have more groups than the lake: a reader combines those that its group was split into (`MergedTable.files_of`), and a
# landing that finds such tables first completes what was begun.
#
# A small table has fewer groups than the lake: it starts with one, and is split before a merge that makes it larger.
# `changes` does not record this: the tables of a collection are read and merged by the smallest number of groups that
# one of them has, and a merge first makes the number the same for all of them.


def grow_groups(lake: Lake, run: Runner = run_here, *, file_bytes: int = data_files.FILE_BYTES_DEFAULT) -> None:
    """Split large tables into as many groups as the documents of the lake need, or complete a split.

    A split does not start while a table is set aside. If a table fails, its next merge splits it.
    """
    for collection in lake.in_service:
        with lake.containing(collection.name):
            collection.refresh()
    if len(lake.aside) and not lake.is_growing:
        return
    most = max((table.groups for it in lake.in_service for table in it.there), default=1)
    groups = most if lake.is_growing else lake.facts.grown(lake.documents)
    if groups == lake.facts.groups:
        return
    for collection in lake.in_service:
        with lake.containing(collection.name):
            _regroup(lake, collection, groups, run, least=lake.facts.groups, file_bytes=file_bytes)
    lake.step("regroup the lake")
    lake.set_groups(groups)
    logger.info("the tables have %d groups now", groups, extra=fields(event=LogEvent.GROUPS_GROWN))


def grow_small_tables(lake: Lake, run: Runner = run_here, *, file_bytes: int = data_files.FILE_BYTES_DEFAULT) -> None:
    """Split tables with fewer groups than the lake into as many as their pending changes need, or complete a split."""
    for name in sorted(lake.pending.names):
        collection = lake.tables[name]
        if collection.documents is not None and collection.groups < lake.facts.groups:
            groups = collection.groups_for(collection.documents.rows + lake.pending.documents(name))
            with lake.containing(name):
                _regroup(lake, collection, groups, run, file_bytes=file_bytes)


def _regroup(
    lake: Lake, collection: CollectionTables, groups: int, run: Runner, *, least: int = 1, file_bytes: int
) -> None:
    """Split a collection's tables that have at least `least` groups into `groups` groups, each in one commit."""
    regrouped = replace(lake.facts, groups=groups)
    for table in collection.there:
        if not least <= table.groups < groups:
            continue
        parts: dict[object, list[data_files.DataFile]] = {}
        for file in table.log.files():
            parts.setdefault(file.partition, []).append(file)
        tasks = [
            RewriteTask.of(collection, table, files, regrouped=regrouped, file_bytes=file_bytes)
            for files in parts.values()
        ]
        added = _results(tasks, run)
        lake.step(f"regroup {collection.name}")
        table.regroup(groups, add=added, remove=table.log.files())


# --- trimming `changes` -----------------------------------------------------------------------------------------------
#
# Changes older than the retention are folded to their outcome: of every document the version stays that was current at
# that point, so the tables of documents can still be built from `changes`, and a rollback to any later point can still
# be done. Removals, superseded versions, void rows and events go. For each vbucket the row with the highest seqno
# stays, too: it shows how far back a rollback may go.
#
# Trimming happens only if most of the old rows would go, so that rows are not rewritten too often.


TRIM_ROWS_PER_DOCUMENT = 2
"""Changes are trimmed when there are more old ones than this for each document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimTask:
    """Rewrite the changes of one group, with the old ones folded."""

    location: Location
    facts: LakeFacts
    group: int
    files: tuple[data_files.DataFile, ...]
    upto_batch: int
    """Rows of later batches stay as they are."""
    last_batch: int

    def run(self) -> list[data_files.DataFile]:
        schema = changes_schema(xattrs=self.facts.xattrs)
        vbuckets = self.facts.vbuckets_of(self.group)
        wanted = change_rows.WantedChanges(
            vbuckets=tuple(vbuckets), after_batch=NOT_MERGED, upto_batch=self.last_batch, ids=None
        )
        parts = change_rows.read_changes(self.location, self.files, wanted, columns=schema.names)
        if not parts:
            return []
        writer = data_files.RollingWriter(self.location, schema, ranges=CHANGE_RANGES, partition=())
        for rows, kept in zip(parts, self._kept(parts, vbuckets), strict=True):
            if kept.any():
                writer.write(rows.wide(kept).select(schema.names))
        return writer.close()

    def _kept(self, parts: Sequence[change_rows.ChangeRows], vbuckets: range) -> Iterator[Marks]:
        old = [(rows.batches <= self.upto_batch) & ~rows.void for rows in parts]
        homes, ids, seqnos, ops = (_joined_changes(parts, old, name) for name in ("vbuckets", "ids", "seqnos", "ops"))
        barriers = change_rows.Barriers(np.unique(ids).tolist(), vbuckets)
        is_end = (ops == change_rows.COLLECTION_CREATED) | (ops == change_rows.COLLECTION_DROPPED)
        barriers.add(vbuckets=homes[is_end], ids=ids[is_end], seqnos=seqnos[is_end])
        is_change = ops <= change_rows.UNMATCHED
        keys = [rows.keys(marks & (rows.ops <= change_rows.UNMATCHED)) for rows, marks in zip(parts, old, strict=True)]
        index = KeyIndex(pa.concat_arrays(keys), seqnos[is_change], key_spaces(homes, ids)[is_change])
        kept = _highest(homes, seqnos)
        is_document = index.newest & (ops[is_change] == change_rows.MUTATION)
        kept[is_change] |= is_document & ~barriers.before(vbuckets=homes, ids=ids, seqnos=seqnos)[is_change]
        start = 0
        for rows, marks in zip(parts, old, strict=True):
            chosen = rows.batches > self.upto_batch
            chosen[marks] |= kept[start : (start := start + int(marks.sum()))]
            yield chosen


def _joined_changes(parts: Sequence[change_rows.ChangeRows], marks: Sequence[Marks], name: str) -> NDArray[np.int64]:
    columns = [getattr(rows, name)[chosen] for rows, chosen in zip(parts, marks, strict=True)]
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)


def _highest(vbuckets: NDArray[np.int64], seqnos: NDArray[np.int64]) -> Marks:
    """Mark the row with the highest seqno of each vbucket."""
    order = np.lexsort((seqnos, vbuckets))
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = vbuckets[order[1:]] != vbuckets[order[:-1]]
    found = np.zeros(len(order), dtype=np.bool_)
    found[order[is_last]] = True
    return found


def trim_changes(lake: Lake, before: datetime, run: Runner = run_here) -> int:
    """Fold changes that were landed before a time, if enough of them would go. Returns how many rows are gone.

    A rollback to before that time is no longer possible: such a vbucket is read again from 0.
    """
    upto = min([_last_batch_before(lake, before), *_merged_batches(lake)])
    old = [file for file in lake.changes.files() if file.may_hold("batch", high=upto)]
    rows = sum(file.live_rows for file in old)
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
    kept = _results(tasks, run)
    lake.step("commit trimmed changes")
    lake.commit_changes(TableCommit(add=kept, remove=old, transactions={TRIMMED_TRANSACTION: upto}, state=lake.state))
    return rows - sum(file.live_rows for file in kept)


def _last_batch_before(lake: Lake, before: datetime) -> int:
    """Return the last batch such that it, and every one before it, was landed before a time."""
    landed: dict[int, datetime] = {}

    for rows in data_files.read_files(lake.changes.location, lake.changes.files(), ["batch", "landed_at"]):
        for row in rows.group_by("batch", use_threads=False).aggregate([("landed_at", "max")]).to_pylist():
            batch, at = row["batch"], row["landed_at_max"]
            landed[batch] = max(at, landed.get(batch, at))
    young = [batch for batch, at in landed.items() if at >= before]
    return min(young) - 1 if young else max(landed, default=NOT_MERGED)


def _merged_batches(lake: Lake) -> Iterator[int]:
    """Yield the batches at which the tables are merged: later changes, which they still need, must stay."""
    for table in lake.tables.values():
        yield min(table.merged_at(group) for group in range(lake.facts.groups))
        if lake.settings.merging.history:
            yield NOT_MERGED if table.history is None else min(table.history.merged.values())


# --- dead files and old entries of the logs ---------------------------------------------------------------------------


VACUUM_HOURS_MIN = 1
"""Longer than any batch takes from its first file to its commit."""
VACUUM_HOURS_DEFAULT = 7 * 24
READERS_S_MIN = 120.0
"""A removed file is kept for at least this long, whatever its bytes: readers may have the previous version open, or be
about to open it."""
DEAD_BYTES_DEFAULT = "4x"
DEAD_BYTES_MIN = 16 * 1024 * 1024
"""The minimum for a relative limit: many versions of a small table cost nothing."""
LOG_BYTES_MIN = 64 * 1024 * 1024
"""The minimum limit of a log."""
_DELETIONS_MAX = 1000
"""How many files of a table are deleted at a time; the next turn deletes more."""
_DATA_FILE = re.compile(r"\.parquet$|(^|/)deletion_vector_[^/]*\.bin$")
_TIMES = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DeadBytes:
    """The limit on the bytes of each table's dead files."""

    times: float
    """This many times the bytes of its live files…"""
    least_bytes: int
    """…but at least this."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `4x` as a multiple of the live table, or a size such as `10GB`."""
        if match := _TIMES.fullmatch(text.strip()):
            return cls(float(match[1]), DEAD_BYTES_MIN)
        try:
            return cls(0.0, parse_bytes(text))
        except ValueError as error:
            raise InvalidInput(
                f"{text!r} is not a limit in bytes",
                hint="Write 4x for four times the live table, or a size such as 10GB",
            ) from error

    def of(self, live_bytes: int) -> int:
        return max(int(self.times * live_bytes), self.least_bytes)


@dataclass(frozen=True, slots=True)
class _DeadFile:
    size_bytes: int
    since_s: float
    """When it was removed; or when it was written, if no commit has named it."""
    kept_until_s: float


@dataclass(slots=True)
class _TableFiles:
    """The files of a table."""

    log: DeltaLog
    version: int = -1
    live: dict[str, int] = field(default_factory=dict)
    """Path → bytes."""
    dead: dict[str, _DeadFile] = field(default_factory=dict)
    """By path, in the order in which they died."""

    @property
    def dead_bytes(self) -> int:
        return sum(file.size_bytes for file in self.dead.values())

    def look(self, now_s: float) -> None:
        """Record the files that were live at the last look and are not now."""
        if self.version == self.log.version:
            return
        before, self.live = self.live, _live(self.log)
        died = {path: before[path] for path in before.keys() - self.live.keys()}
        if self.version >= 0:
            died |= self.log.fed_since(self.version)
        self.version = self.log.version
        for path, size_bytes in died.items():
            self.dead[path] = _DeadFile(size_bytes, now_s, now_s + READERS_S_MIN)
        # Restoring an earlier version makes dead files live again.
        for path in self.dead.keys() & self.live.keys():
            del self.dead[path]

    def list(self) -> None:
        """Find the dead files of earlier runs."""
        died_s = self.log.died_s()
        found = {}
        for path, size_bytes, written_s in _data_files(self.log.location):
            if path not in self.live:
                since_s = died_s.get(path)
                until_s = written_s + VACUUM_HOURS_MIN * 3600 if since_s is None else since_s + READERS_S_MIN
                found[path] = _DeadFile(size_bytes, since_s or written_s, until_s)
        self.dead = dict(sorted(found.items(), key=lambda item: item[1].since_s))

    def delete(self, bytes_max: int, now_s: float) -> int:
        """Delete the oldest dead files until the rest is within the limit. Returns how many files were deleted."""
        excess_bytes = self.dead_bytes - bytes_max
        if excess_bytes <= 0:
            return 0
        # Another program may have restored an earlier version in the meantime.
        self.log.refresh()
        self.look(now_s)
        chosen: list[str] = []
        for path, file in self.dead.items():
            if excess_bytes <= 0 or len(chosen) == _DELETIONS_MAX:
                break
            if file.kept_until_s <= now_s:
                chosen.append(path)
                excess_bytes -= file.size_bytes
        return self._delete(chosen)

    def delete_older(self, before_s: float) -> int:
        """Delete files that died before a time. Returns how many."""
        return self._delete([path for path, file in self.dead.items() if file.since_s < before_s])

    def _delete(self, chosen: Sequence[str]) -> int:
        self.log.location.delete(chosen)
        for path in chosen:
            del self.dead[path]
        return len(chosen)

    def keep_tombstones(self, state: TableState, *, keep_hours: int, has_deleted: bool, now_s: float) -> None:
        """Make checkpoints list removed files for as long as these exist, and not much longer: otherwise a checkpoint
        would list the files of a week, though they are deleted within minutes."""
        if not self.dead:
            return
        oldest_h = (now_s - next(iter(self.dead.values())).since_s) / 3600
        wanted = min(2 ** math.ceil(math.log2(max(1.0, 2 * oldest_h))), keep_hours)
        now = self.log.tombstone_hours
        if now < min(2 * oldest_h, keep_hours) or (has_deleted and now > 4 * wanted):
            self.log.set_tombstone_hours(wanted, state)


def _live(log: DeltaLog) -> dict[str, int]:
    """Return the files that the newest version needs, and their bytes. For a file of vectors that is the end of its
    last live vector: the log does not record more."""
    live = {file.path: file.size_bytes for file in log.files()}
    for file in log.files():
        if file.vector is not None and (path := file.vector.file) is not None:
            live[path] = max(live.get(path, 0), (file.vector.offset or 0) + file.vector.size_bytes)
    return live


def _data_files(location: Location, folder: str = "") -> Iterator[tuple[str, int, float]]:
    """Yield path, bytes and time of each file of rows, vectors or the change data feed. Skips folders such as
    `_delta_log`."""
    for entry in location.entries(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.changed_at is not None and _DATA_FILE.search(path):
            yield path, entry.size_bytes, entry.changed_at.timestamp()
        elif entry.changed_at is None and (path == FEED_FOLDER or not entry.name.startswith("_")):
            yield from _data_files(location, path)


class DeadFiles:
    """The dead files of all tables of a lake. For its single driver."""

    def __init__(self, bound: DeadBytes, *, keep_hours: int) -> None:
        self.bound = bound
        self._keep_hours = keep_hours
        self._tables: dict[str, _TableFiles] = {}

    @property
    def live_bytes(self) -> int:
        return sum(sum(table.live.values()) for table in self._tables.values())

    @property
    def dead_bytes(self) -> int:
        return sum(table.dead_bytes for table in self._tables.values())

    def forget(self) -> None:
        """After something else has deleted or left files: list all of them again."""
        self._tables.clear()

    def keep_within_bound(self, lake: Lake, *, now_s: float | None = None) -> int:
        """Delete dead files of each table beyond the limit, the oldest first. Returns how many files are gone."""
        now_s = time.time() if now_s is None else now_s
        deleted = 0
        for log, state, contained in logs(lake):
            with contained:
                table = self._tables.get(log.location.uri)
                if is_new := table is None:
                    table = self._tables[log.location.uri] = _TableFiles(log)
                table.log = log
                table.look(now_s)
                if is_new:
                    table.list()
                gone = table.delete(self.bound.of(sum(table.live.values())), now_s)
                table.keep_tombstones(state, keep_hours=self._keep_hours, has_deleted=gone > 0, now_s=now_s)
                deleted += gone
        return deleted


def check_retention(hours: int) -> None:
    """Raise `InvalidInput` unless deleting files after this many hours is safe."""
    if hours < VACUUM_HOURS_MIN:
        raise InvalidInput(
            f"files of the last {hours} hours can't be deleted safely",
            hint=f"Keep files for at least {VACUUM_HOURS_MIN}h",
        )


def vacuum(lake: Lake, *, retention_hours: int = VACUUM_HOURS_DEFAULT) -> int:
    """Delete files that have been dead for more than `retention_hours`. Returns how many."""
    check_retention(retention_hours)
    deleted = 0
    for log, _, contained in logs(lake):
        with contained:
            log.refresh()
            now_s = time.time()
            table = _TableFiles(log)
            table.look(now_s)
            table.list()
            deleted += table.delete_older(now_s - retention_hours * 3600)
    return deleted


def clean_logs(
    lake: Lake, *, retention_days: int = LOG_RETENTION_DAYS, bound: DeadBytes | None = None, now_s: float | None = None
) -> None:
    """Delete log entries older than `retention_days`, or those that exceed the limit of dead bytes.

    Versions before them can't be read afterwards.
    """
    bound = bound or DeadBytes.parse(DEAD_BYTES_DEFAULT)
    now_s = time.time() if now_s is None else now_s
    for log, state, contained in logs(lake):
        with contained:
            entries, states = (
                sorted(
                    (entry.changed_at.timestamp(), entry.size_bytes)
                    for entry in log.location.entries(folder)
                    if entry.changed_at is not None
                )
                for folder in ("_delta_log", STATE_FOLDER)
            )
            by_age = sorted([*entries, *states], reverse=True)
            hours = retention_days * 24
            left_bytes = max(bound.of(sum(file.size_bytes for file in log.files())), LOG_BYTES_MIN)
            if sum(size_bytes for _, size_bytes in by_age) > left_bytes:
                # Go down to half of it, to avoid cleaning every time.
                left_bytes //= 2
                for at_s, size_bytes in by_age:
                    left_bytes -= size_bytes
                    if left_bytes < 0:
                        hours = min(hours, max(VACUUM_HOURS_MIN, int((now_s - at_s) / 3600)))
                        break
            if entries and entries[0][0] < now_s - hours * 3600:
                log.clean(state, retention_hours=hours)


def logs(lake: Lake) -> Iterator[tuple[DeltaLog, TableState, AbstractContextManager[None]]]:
    """Yield the logs of all tables, each with its table's state, and a context that contains the table's faults."""
    yield lake.changes, lake.state, nullcontext()
    for tables in lake.in_service:
        for table in tables.there:
            yield table.log, table.state, lake.containing(tables.name)
