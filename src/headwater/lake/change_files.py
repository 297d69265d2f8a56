"""Files of `changes`: writing batches to them, and marking the rows that rollbacks took back.

The driver makes a `ChangeWriter` for each batch. One writer gets all rows of a vbucket in the batch, in the order of
the stream, so for a rollback inside the batch it still has the earlier rows. A writer commits nothing: its report names
the files, and `commits.commit_batch` makes them live.

A file is sorted by group, collection and vbucket. Its row groups end where a group of vbuckets ends, if they are large
enough. So a merge of one group and a few collections reads little else.

The commit that contains a rollback marks the rows that the rollback took back as *void*. A rollback of a vbucket keeps
everything up to a seqno; earlier rows above that seqno never happened. A file that holds such rows is rewritten with
the mark set. The rows stay: `changes` records what was once believed. The tables of documents then drop what they hold
of the vbucket and rebuild it from `changes` (`change_rows.Fold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.client.batches import SYSTEM_EVENT_OPS
from headwater.errors import LakeOutOfStep
from headwater.kernels.memory import Column
from headwater.lake.data_files import ROW_GROUP_ROWS, DataFile, FileReader, FileWriter, numbers, read_files, reordered
from headwater.lake.layout import (
    CHANGE_RANGES,
    DOCUMENT_OPS,
    NAME_COLUMNS,
    NAME_TYPE,
    LakeFacts,
    changes_schema,
    to_change_columns,
)
from headwater.lake.location import Location
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset

BUFFER_BYTES = 128 * 1024 * 1024
"""How many bytes of input a writer holds before it writes a file."""
_RUN_ROWS_MIN = 64
"""Copy stretches of rows that are already in order, if they have at least this many rows on average."""
_GROUP_ROWS_MIN = 2 * 1024
"""A row group with fewer rows than this continues into the next group of vbuckets."""

ROLLBACK_OP = "rollback"
COLLECTION_GONE_OPS = ("collection_dropped", "collection_created")
"""These events remove all documents of a collection. One that is created again has been flushed."""
Rollbacks = dict[int, int]
"""By vbucket: the highest seqno that is kept."""


def add_rollback(rollbacks: Rollbacks, vbucket: int, kept: int) -> None:
    """Add a rollback. If a vbucket has several, the lowest kept seqno wins."""
    rollbacks[vbucket] = min(kept, rollbacks.get(vbucket, kept))


@dataclass(slots=True, kw_only=True)
class ChangeReport:
    """What a writer has written."""

    files: list[DataFile] = field(default_factory=list)
    rows: int = 0
    rollbacks: Rollbacks = field(default_factory=dict)
    """By vbucket: the lowest seqno that was kept."""
    torn: set[int] = field(default_factory=set)
    """Vbuckets with a rollback into the middle of a snapshot that the batch contains as well."""
    names: dict[int, tuple[str | None, str | None]] = field(default_factory=dict)
    """Collection id → scope and collection, of every id among the rows."""
    document_rows: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(collection id, group) → number of changes of documents."""
    system_events: int = 0
    collections_gone: set[tuple[int, int]] = field(default_factory=set)
    """(collection id, group) pairs for which the batch ends or recreates the collection."""
    reached: dict[VBucketId, StreamOffset] = field(default_factory=dict)
    """By vbucket that was read: the offset reached. The writer sees rows only, so its caller fills this in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeWriter:
    """Writes the changes of one batch; made on the driver, used in the executors."""

    location: Location
    facts: LakeFacts
    batch: int
    landed_at: datetime
    held_seqnos: Mapping[int, int] = field(default_factory=dict)
    """By vbucket: the seqno that the table holds. None up to it may arrive again, except after a rollback."""
    buffer_bytes: int = BUFFER_BYTES

    def write(
        self, batches: Iterable[pa.RecordBatch], on_rows: Callable[[pa.Table], None] = lambda rows: None
    ) -> ChangeReport:
        """Write batches to files. Calls `on_rows` with the sorted rows of each file."""
        run = _Run(self, on_rows)
        for batch in batches:
            if batch.num_rows:
                run.take(batch)
        return run.finish()

    def write_rollbacks_to_zero(self, vbuckets: Iterable[int]) -> DataFile:
        """Write one rollback to seqno 0 for each vbucket: all its rows are void, and it is read again from 0."""
        rows = [
            {"op": ROLLBACK_OP, "vbucket": vbucket, "batch": self.batch, "landed_at": self.landed_at, "void": False}
            for vbucket in sorted(vbuckets)
        ]
        columns = {}
        for column in changes_schema(xattrs=self.facts.xattrs):
            values = pa.array([row.get(column.name, None if column.nullable else 0) for row in rows], column.type)
            columns[column.name] = values.cast(NAME_TYPE) if column.name in NAME_COLUMNS else values
        return write_sorted(self.location, self.facts, sort_rows(self.facts, pa.table(columns)))


@dataclass(slots=True)
class _HeldBatch:
    """A batch that waits to be written, in the columns of the table."""

    columns: dict[str, pa.Array]
    vbuckets: Column
    seqnos: Column
    void: NDArray[np.bool_]


class _Run:
    """The state of one call of `ChangeWriter.write`."""

    def __init__(self, writer: ChangeWriter, on_rows: Callable[[pa.Table], None]) -> None:
        self._writer = writer
        self._on_rows = on_rows
        self._schema = changes_schema(xattrs=writer.facts.xattrs)
        self._report = ChangeReport()
        self._held: list[_HeldBatch] = []
        self._held_bytes = 0
        self._floors = np.full(writer.facts.vbuckets, -1, dtype=np.int64)
        for vbucket, seqno in writer.held_seqnos.items():
            self._floors[vbucket] = seqno
        self._late_rollbacks: dict[str, Rollbacks] = {}
        """By path of a file that was written before the rollbacks arrived."""

    def take(self, batch: pa.RecordBatch) -> None:
        columns = to_change_columns(batch, self._schema)
        held = _HeldBatch(
            columns,
            vbuckets=columns["vbucket"].to_numpy(),
            seqnos=columns["seqno"].to_numpy(),
            void=np.zeros(batch.num_rows, dtype=np.bool_),
        )
        for vbucket in (int(held.vbuckets.min()), int(held.vbuckets.max())):
            if not 0 <= vbucket < len(self._floors):
                raise LakeOutOfStep(
                    f"a change is in vbucket {vbucket}, and the tables were created for {len(self._floors)} of them",
                    hint="Give another directory: a bucket never changes its number of vbuckets",
                )
        size_bytes = sum(column.nbytes for column in columns.values())
        if self._held_bytes + size_bytes > self._writer.buffer_bytes:
            self._flush()
        self._held.append(held)
        self._held_bytes += size_bytes
        self._check_and_roll_back(held)

    def finish(self) -> ChangeReport:
        self._flush()
        location, facts = self._writer.location, self._writer.facts
        for number, file in enumerate(self._report.files):
            if rollbacks := self._late_rollbacks.get(file.path):
                voided = VoidTask(location=location, facts=facts, file=file, rollbacks=rollbacks).run()
                self._report.files[number] = voided.replacement or file
                self._report.torn |= voided.torn
        return self._report

    # --- checks in the order of the stream ----------------------------------------------------------------------------

    def _check_and_roll_back(self, held: _HeldBatch) -> None:
        """Go from rollback to rollback: rows between them must be new, and earlier rows above its seqno become void."""
        start = 0
        for row in np.flatnonzero(_is_one_of(held.columns["op"], {ROLLBACK_OP})).tolist():
            self._check_new(held, start, row)
            vbucket, kept = int(held.vbuckets[row]), int(held.seqnos[row])
            self._floors[vbucket] = kept
            self._roll_back(vbucket, kept, upto_row=row)
            start = row + 1
        self._check_new(held, start, len(held.void))

    def _check_new(self, held: _HeldBatch, start: int, end: int) -> None:
        vbuckets, seqnos = held.vbuckets[start:end], held.seqnos[start:end]
        old = np.flatnonzero(seqnos <= self._floors[vbuckets])
        if len(old):
            vbucket, seqno = int(vbuckets[old[0]]), int(seqnos[old[0]])
            raise LakeOutOfStep(
                f"seqno {seqno} of vbucket {vbucket} arrived again: the tables hold everything up to "
                f"{self._floors[vbucket]}",
                hint="Start again: the next run resumes where the tables end",
            )

    def _roll_back(self, vbucket: int, kept: int, *, upto_row: int) -> None:
        for number, held in enumerate(self._held):
            end = upto_row if number == len(self._held) - 1 else len(held.void)
            dead = (held.vbuckets[:end] == vbucket) & (held.seqnos[:end] > kept) & ~held.void[:end]
            held.void[:end] |= dead
            starts = held.columns["snapshot_start"].to_numpy()[:end]
            self._report.torn |= torn_vbuckets(held.vbuckets[:end][dead], starts[dead], self._floors)
        for file in self._report.files:
            add_rollback(self._late_rollbacks.setdefault(file.path, {}), vbucket, kept)
        add_rollback(self._report.rollbacks, vbucket, kept)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self._held:
            return
        rows = sort_rows(self._writer.facts, self._to_table())
        self._held, self._held_bytes = [], 0
        self._note(rows)
        self._report.files.append(write_sorted(self._writer.location, self._writer.facts, rows))
        self._on_rows(rows)

    def _note(self, rows: pa.Table) -> None:
        """Count what the driver needs for planning."""
        report = self._report
        report.rows += rows.num_rows
        ops, ids = rows.column("op").combine_chunks(), numbers(rows, "collection_id")
        groups = self._writer.facts.group_of(numbers(rows, "vbucket").astype(np.int64))
        is_document = _is_one_of(ops, set(DOCUMENT_OPS))
        report.system_events += int(_is_one_of(ops, set(SYSTEM_EVENT_OPS)).sum())
        assert not (is_document & (ids < 0)).any(), "a document is in a collection"
        for id_, group, count in _counts(ids, groups, is_document):
            report.document_rows[id_, group] += count
        gone = _counts(ids, groups, _is_one_of(ops, set(COLLECTION_GONE_OPS)))
        report.collections_gone |= {(id_, group) for id_, group, _ in gone}
        names = ["collection_id", "scope", "collection"]
        for row in rows.group_by(names, use_threads=False).aggregate([]).to_pylist():
            if (named := row["collection_id"]) is not None and None in report.names.get(named, (None,)):
                report.names[named] = row["scope"], row["collection"]

    def _to_table(self) -> pa.Table:
        batches = []
        for held in self._held:
            rows = len(held.void)
            columns = {
                **held.columns,
                "batch": pa.array(np.full(rows, self._writer.batch)),
                "landed_at": pa.repeat(pa.scalar(self._writer.landed_at, pa.timestamp("us", tz="UTC")), rows),
                "void": pa.array(held.void),
            }
            if "xattrs" in self._schema.names and "xattrs" not in columns:
                columns["xattrs"] = pa.nulls(rows, self._schema.field("xattrs").type)
            batches.append(pa.table({name: columns[name] for name in self._schema.names}))
        return pa.concat_tables(batches).unify_dictionaries()


def _is_one_of(column: pa.DictionaryArray, wanted: set[str]) -> NDArray[np.bool_]:
    marks = np.array([name in wanted for name in column.dictionary.to_pylist()], dtype=np.bool_)
    found: NDArray[np.bool_] = marks[column.indices.to_numpy()]
    return found


def _counts(ids: Column, groups: Column, marks: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield each pair of collection id and group among the marked rows, with its number of rows."""
    pairs = pa.array((ids << 16 | groups)[marks]).value_counts()
    for pair in pairs.to_pylist():
        yield pair["values"] >> 16, pair["values"] & 0xFFFF, pair["counts"]


# --- the order of rows in a file --------------------------------------------------------------------------------------


def write_sorted(location: Location, facts: LakeFacts, rows: pa.Table) -> DataFile:
    """Write sorted rows of `changes` as one file, in row groups that belong to few groups of vbuckets each."""
    writer = FileWriter(location, changes_schema(xattrs=facts.xattrs), ranges=CHANGE_RANGES, prefix="changes")
    for part in row_groups(facts, rows):
        writer.write_row_group(part)
    return writer.close()


def sort_rows(facts: LakeFacts, rows: pa.Table) -> pa.Table:
    """Return the rows sorted by group, collection and vbucket. The rows of a vbucket keep their order."""
    codes = _sort_codes(facts, numbers(rows, "vbucket").astype(np.int64), rows.column("collection_id"))
    if bool(np.all(codes[:-1] <= codes[1:])):
        return rows
    starts = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1])
    if len(starts) * _RUN_ROWS_MIN <= rows.num_rows:
        # A reader delivers stretches of rows of one vbucket: copy each stretch once, to its place.
        ends = np.append(starts[1:], rows.num_rows)
        order = np.argsort(codes[starts], kind="stable").tolist()
        return pa.concat_tables([rows.slice(starts[run], ends[run] - starts[run]) for run in order]).combine_chunks()
    # numpy sorts 16-bit numbers by radix, in a tenth of the time of wider ones.
    is_short = int(codes.max()) <= 0xFFFF
    order = np.argsort(codes.astype(np.uint16) if is_short else codes, kind="stable")
    return reordered(rows, order)


def _sort_codes(facts: LakeFacts, vbuckets: NDArray[np.int64], ids: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return small sort codes, one per row: there are vbuckets × collections of them."""
    encoded = ids.combine_chunks().dictionary_encode(null_encoding="encode")
    distinct = np.array([-1 if id_ is None else id_ for id_ in encoded.dictionary.to_pylist()])
    collections = np.argsort(np.argsort(distinct))[encoded.indices.to_numpy()]
    edges = np.array([facts.vbuckets_of(group).start for group in range(facts.groups)] + [facts.vbuckets])
    groups = facts.group_of(vbuckets)
    first, size = edges[groups], np.diff(edges)[groups]
    codes: NDArray[np.int64] = first * len(distinct) + collections * size + (vbuckets - first)
    return codes


def row_groups(facts: LakeFacts, rows: pa.Table) -> Iterator[pa.Table]:
    """Yield sorted rows in parts for row groups, cut between groups of vbuckets and at `ROW_GROUP_ROWS`."""
    groups = facts.group_of(numbers(rows, "vbucket").astype(np.int64))
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), rows.num_rows]
    start = 0
    for edge, following in zip(edges[1:], [*edges[2:], None], strict=True):
        if following is not None and edge - start < _GROUP_ROWS_MIN:
            continue
        for at in range(start, edge, ROW_GROUP_ROWS):
            yield rows.slice(at, min(ROW_GROUP_ROWS, edge - at))
        start = edge


# --- what rollbacks took back -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Voided:
    """The result of a `VoidTask`: a file, and its replacement if it had dead rows."""

    file: DataFile
    replacement: DataFile | None
    rows: int = 0
    """Number of rows that this task marked as dead."""
    torn: frozenset[int] = frozenset()
    """Vbuckets with a rollback into the middle of a snapshot, where the file has rows of the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidTask:
    """Mark the dead rows of one file."""

    location: Location
    facts: LakeFacts
    file: DataFile
    rollbacks: Rollbacks

    def run(self) -> Voided:
        limits = np.full(self.facts.vbuckets, np.iinfo(np.int64).max)
        for vbucket, kept in self.rollbacks.items():
            limits[vbucket] = kept
        torn: set[int] = set()
        with FileReader(self.location, self.file) as reader:
            deaths = [_newly_dead(reader, row_group, limits, torn) for row_group in reader.row_groups]
            if not any(dead.any() for dead in deaths):
                return Voided(file=self.file, replacement=None)
            schema = changes_schema(xattrs=self.facts.xattrs)
            writer = FileWriter(self.location, schema, ranges=CHANGE_RANGES, prefix="changes")
            index = schema.get_field_index("void")
            for row_group, dead in zip(reader.row_groups, deaths, strict=True):
                rows = reader.read(row_group, schema.names)
                void = np.asarray(rows.column("void").to_numpy()) | dead
                writer.write_row_group(rows.set_column(index, schema.field(index), pa.array(void)))
        rows_dead = sum(int(dead.sum()) for dead in deaths)
        return Voided(file=self.file, replacement=writer.close(), rows=rows_dead, torn=frozenset(torn))


def _newly_dead(reader: FileReader, row_group: int, limits: NDArray[np.int64], torn: set[int]) -> NDArray[np.bool_]:
    rows = reader.read(row_group, ["vbucket", "seqno", "snapshot_start", "void"])
    vbuckets = numbers(rows, "vbucket")
    dead: NDArray[np.bool_] = numbers(rows, "seqno") > limits[vbuckets]
    dead &= ~np.asarray(rows.column("void").to_numpy())
    torn |= torn_vbuckets(vbuckets[dead], numbers(rows, "snapshot_start")[dead], limits)
    return dead


def torn_vbuckets(vbuckets: Column, snapshot_starts: Column, kept: Column) -> set[int]:
    """Return the vbuckets of dead rows whose snapshot began before the kept seqno. `kept` is indexed by vbucket.

    A snapshot contains each key once, in its newest version (the seed "UPR Transport Specification", "Streams": unique
    keys). If a snapshot extends beyond the kept seqno, versions up to it may be missing in favour of newer ones that
    are dead now, so the state of the vbucket at that seqno is unknown. A careful reader never asks for such a rollback.
    """
    return {int(vbucket) for vbucket in np.unique(vbuckets[snapshot_starts < kept[vbuckets]])}


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidedFiles:
    """The files that a commit adds to and removes from `changes` to mark all rows that its rollbacks took back."""

    add: list[DataFile]
    remove: list[DataFile]
    rows: int
    """Number of rows of the live files that become void."""
    wiped: frozenset[int]
    """Vbuckets that can't be rolled back: all their rows are void, and they have to be read again from 0."""


def void_rows(
    location: Location,
    facts: LakeFacts,
    *,
    live: Sequence[DataFile],
    added: Sequence[DataFile],
    rollbacks: Rollbacks,
    wiped: Iterable[int],
    run: Callable[[Sequence[VoidTask]], list[Voided]],
) -> VoidedFiles:
    """Mark what the rollbacks of a batch took back, in the live files of the table and in those that the batch adds.

    `wiped` are vbuckets known to be out of reach; the result adds those that turn out to be torn.
    """
    lost = set(wiped)
    while True:
        limits = {vbucket: 0 if vbucket in lost else kept for vbucket, kept in rollbacks.items()}
        # Also void the rows of a wiped vbucket in this batch: the vbucket is read again from 0.
        tasks = [
            VoidTask(location=location, facts=facts, file=file, rollbacks=taken_back)
            for files, taken_back in ((live, limits), (added, dict.fromkeys(lost, 0)))
            for file in files
            if _may_hold_dead_rows(file, taken_back)
        ]
        results = run(tasks)
        torn = {vbucket for voided in results for vbucket in voided.torn}
        if torn <= lost:
            break
        lost |= torn
    replaced = {voided.file.path: voided.replacement for voided in results if voided.replacement is not None}
    kept_or_new = [replaced.pop(file.path, file) for file in added]
    removed = [file for file in live if file.path in replaced]
    paths = {file.path for file in live}
    rows = sum(voided.rows for voided in results if voided.file.path in paths)
    return VoidedFiles(add=[*kept_or_new, *replaced.values()], remove=removed, rows=rows, wiped=frozenset(lost))


def _may_hold_dead_rows(file: DataFile, rollbacks: Rollbacks) -> bool:
    """Whether a file can hold rows that the rollbacks took back, according to its ranges in the log."""
    return any(
        file.may_hold("vbucket", low=vbucket, high=vbucket) and file.may_hold("seqno", low=kept + 1)
        for vbucket, kept in rollbacks.items()
    )


def out_of_reach(
    location: Location, files: Sequence[DataFile], rollbacks: Rollbacks, *, trimmed_batch: int
) -> set[int]:
    """Return the vbuckets whose rollback goes back behind rows that have been trimmed (up to `trimmed_batch`).

    Trimming keeps only the newest version of each key, and nothing of removed keys. So the versions that such a
    rollback would restore no longer exist.
    """
    wanted = np.array(sorted(rollbacks))
    trimmed = [
        file
        for file in files
        if file.ranges.get("batch", (0, 0))[0] <= trimmed_batch
        and any(file.may_hold("vbucket", low=vbucket, high=vbucket) for vbucket in rollbacks)
    ]
    reach: dict[int, int] = {}
    for rows in read_files(location, trimmed, ["vbucket", "seqno", "batch", "void"]):
        vbuckets, seqnos = numbers(rows, "vbucket"), numbers(rows, "seqno")
        marks = np.isin(vbuckets, wanted) & (numbers(rows, "batch") <= trimmed_batch)
        marks &= ~np.asarray(rows.column("void").to_numpy())
        for vbucket in np.unique(vbuckets[marks]).tolist():
            highest = int(seqnos[marks & (vbuckets == vbucket)].max())
            reach[vbucket] = max(highest, reach.get(vbucket, 0))
    return {vbucket for vbucket, kept in rollbacks.items() if 0 < kept < reach.get(vbucket, 0)}
