"""What `headwater verify` looks at: made on the driver from one version of every table, cut into groups of vbuckets.

A group's part is all that a task needs to judge it, and can be carried to any process: the live files of each table,
and how far each table is. Tables are not all at the same place: `changes` is the furthest, and the others follow when
they are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as fs
from deltalake.exceptions import DeltaError
from numpy.typing import NDArray

from headwater.client.offsets import Offsets
from headwater.errors import LakeDamaged
from headwater.lake.collection_tables import CollectionTables, MergedTable
from headwater.lake.data_files import DataFile, FileReader
from headwater.lake.delta_log import DeltaLog
from headwater.lake.digests import HashedRows
from headwater.lake.judging import FINDINGS_MAX, BucketReading, Finding, FindingKind, Findings, Standing, table_label
from headwater.lake.lake import Lake
from headwater.lake.layout import GROUP, LakeFacts, LakePlace, TableKind, TablePlace, open_filesystem, split_keys
from headwater.lake.typed_columns import TypedColumns
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset

NOWHERE = StreamOffset()
MAKING_S_MAX = 60.0
"""Far beyond what it takes to make tables."""
UNREADABLE_LOG = (LakeDamaged, DeltaError, OSError, ValueError)
"""What is raised where the files of a table's log are not what they were."""

IsRolledBack = Callable[[VBucketId, StreamOffset], bool]
"""Whether a failover took back what a table at this place holds."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableCheck:
    """A table's part of a group: its live files, and how far it is."""

    place: TablePlace
    files: tuple[DataFile, ...]
    standing: Standing
    merged: int
    """The last batch that is in it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CollectionCheck:
    """The tables of a collection, as far as they are there."""

    name: str
    ids: frozenset[int]
    columns: TypedColumns | None = None
    documents: TableCheck | None = None
    history: TableCheck | None = None
    rejects: TableCheck | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupCheck:
    """All that is to be judged of a group."""

    facts: LakeFacts
    group: int
    changes: TableCheck
    collections: tuple[CollectionCheck, ...]
    live_ids: frozenset[int] | None = None
    """The collections that the bucket has, where that is known."""
    made_upto: int = -1
    """Collections with changes up to this batch have their tables."""
    is_trimmed: bool = False
    """Old rows of `changes` have been folded: what it lacks may have been there."""
    is_selection: bool = False
    """Other collections of `changes` than these are not looked at."""
    left_out: frozenset[int] = frozenset()
    """Vbuckets of which the bucket was not read to an end."""

    @property
    def vbuckets(self) -> range:
        return self.facts.vbuckets_of(self.group)

    @property
    def edges(self) -> tuple[float, float]:
        """The least and the highest vbucket whose rows are looked at. Rows of vbuckets that the bucket does not have
        are looked at with the first group and with the last."""
        first = float("-inf") if self.group == 0 else self.vbuckets.start
        return first, float("inf") if self.group == self.facts.groups - 1 else self.vbuckets.stop - 1

    def reading(self) -> BucketReading:
        """What the bucket's stream of the group is to be put into."""
        return BucketReading(self.vbuckets, xattrs=self.facts.xattrs)

    def leaving_out(self, vbuckets: frozenset[int]) -> GroupCheck:
        """The same, with nothing to be judged of some vbuckets."""
        if not vbuckets:
            return self
        here = [vbucket - self.vbuckets.start for vbucket in vbuckets]

        def rolled(table: TableCheck | None) -> TableCheck | None:
            return None if table is None else replace(table, standing=table.standing.also_rolled(here))

        return replace(
            self,
            changes=replace(self.changes, standing=self.changes.standing.also_rolled(here)),
            collections=tuple(
                replace(it, documents=rolled(it.documents), history=rolled(it.history)) for it in self.collections
            ),
            left_out=vbuckets,
        )


class LakeChecks:
    """The tables of a lake as they are now, or some of them."""

    def __init__(self, lake: Lake, tables: Sequence[CollectionTables] | None = None) -> None:
        self._lake = lake
        self._tables = [table for _, table in sorted(lake.tables.items())] if tables is None else tables
        self._change_files = lake.changes.files()

    def held(self) -> dict[str, Offsets]:
        """By table that is compared with the bucket: how far it is."""
        held = {table_label(TableKind.CHANGES): self._lake.held_offsets()}
        for table in self._tables:
            for kind, merged in ((TableKind.DOCUMENTS, table.documents), (TableKind.HISTORY, table.history)):
                if merged is not None:
                    held[table_label(kind, table.name)] = merged.offsets
        return held

    def lost_commits(self) -> Findings:
        """Tables that are further than `changes`, which they are made from: its log has lost what it had."""
        findings, last = Findings(), self._lake.last_batch
        further = [
            table_label(kind, table.name)
            for table in self._tables
            for kind, merged in ((TableKind.DOCUMENTS, table.documents), (TableKind.HISTORY, table.history))
            if merged is not None and max(merged.merged.values()) > last
        ]
        if further:
            says = f"ends with batch {last}, and {further[0]} is made of later ones"
            label = table_label(TableKind.CHANGES)
            findings.add(Finding(kind=FindingKind.DAMAGED_LOG, table=label, what="_delta_log", says=says))
        return findings

    def of_group(
        self,
        group: int,
        is_rolled_back: IsRolledBack,
        *,
        live_ids: frozenset[int] | None = None,
        is_selection: bool = False,
    ) -> GroupCheck:
        lake = self._lake
        check = GroupCheck(
            facts=lake.facts,
            group=group,
            changes=TableCheck(
                place=lake.changes.place,
                files=(),
                standing=self._standing(lake.held_offsets(), group, is_rolled_back),
                merged=lake.last_batch,
            ),
            collections=tuple(self._collection(table, group, is_rolled_back) for table in self._tables),
            live_ids=live_ids,
            made_upto=self._made_upto(),
            is_trimmed=lake.trimmed_batch >= 0,
            is_selection=is_selection,
        )
        low, high = check.edges
        files = tuple(file for file in self._change_files if file.may_hold("vbucket", low=low, high=high))
        return replace(check, changes=replace(check.changes, files=files))

    def _made_upto(self) -> int:
        """A table is made right after the batch that brought its first change. While that may still be going on, it
        is no fault that it is not there."""
        newest_s = max((file.modified_ms for file in self._change_files), default=0) / 1000
        return self._lake.last_batch - (1 if time.time() - newest_s < MAKING_S_MAX else 0)

    def _collection(self, table: CollectionTables, group: int, is_rolled_back: IsRolledBack) -> CollectionCheck:
        def check(merged: MergedTable | None) -> TableCheck | None:
            if merged is None:
                return None
            return TableCheck(
                place=merged.log.place,
                files=self._files_of(merged, group),
                standing=self._standing(merged.offsets, group, is_rolled_back),
                merged=merged.merged[group],
            )

        return CollectionCheck(
            name=table.name,
            ids=frozenset(table.ids),
            columns=table.columns,
            documents=check(table.documents),
            history=check(table.history),
            rejects=check(table.rejects),
        )

    def _files_of(self, table: MergedTable, group: int) -> tuple[DataFile, ...]:
        """Files that another program has put into a group that the lake does not have are read with the first."""
        if group > 0:
            return table.files_of(group)
        groups = {str(number) for number in range(1, self._lake.facts.groups)}
        return tuple(file for file in table.log.files() if dict(file.partition)[GROUP.name] not in groups)

    def _standing(self, held: Offsets, group: int, is_rolled_back: IsRolledBack) -> Standing:
        vbuckets = [VBucketId(vbucket) for vbucket in self._lake.facts.vbuckets_of(group)]
        places = [held.get(vbucket) or NOWHERE for vbucket in vbuckets]
        rolled = [is_rolled_back(vbucket, place) for vbucket, place in zip(vbuckets, places, strict=True)]
        # Tables have seqnos as signed numbers.
        seqnos = np.array([place.seqno for place in places], dtype=np.uint64).view(np.int64)
        return Standing(seqnos=seqnos, is_rolled=np.array(rolled, dtype=np.bool_))


# --- tables that can't be opened --------------------------------------------------------------------------------------


def damaged_logs(root: str) -> Findings:
    """Which tables of a lake that can't be opened have a log that can't be read."""
    place, findings = LakePlace(root), Findings()
    for kind, name in _tables_in(root):
        try:
            log = DeltaLog.open(place.table(kind, name))
            if log is not None:
                log.state()
        except UNREADABLE_LOG as error:
            # delta-rs puts the stack of its own calls behind the first line.
            first = (str(getattr(error, "reason", error)).splitlines() or [type(error).__name__])[0]
            why = first.partition("can't be read: ")[2] or first
            findings.add(
                Finding(
                    kind=FindingKind.DAMAGED_LOG,
                    table=table_label(kind, name),
                    what="_delta_log",
                    says=f"can't be read, bring it back from a backup: {why.rstrip('.')}",
                )
            )
    return findings


def _tables_in(root: str) -> Iterator[tuple[TableKind, str | None]]:
    yield TableKind.CHANGES, None
    filesystem, path = open_filesystem(root.rstrip("/"))
    for kind in (TableKind.DOCUMENTS, TableKind.HISTORY, TableKind.REJECTS):
        found = filesystem.get_file_info(fs.FileSelector(f"{path}/{kind}", allow_not_found=True))
        yield from ((kind, entry.base_name) for entry in sorted(found, key=lambda entry: entry.base_name))


# Reading all of a table's live files to judge them: what can't be read is a finding, and the rest is read on.
#
# Every column of every row group is read, with the checksums of its pages, because a page that no query of ours needs
# is read by others. A file that is missing, cut off or damaged costs the rows that can't be read, and no more.
#
# A row is named by its *locator*, one number for the file and the place in it. Keys are read again for those rows alone
# that something is wrong with, so a scan keeps no keys.


OWN_LIBRARY = "parquet-cpp-arrow"
"""What Arrow calls itself in the files that it writes. Other engines have other names."""
SCAN_BYTES = 2 * 1024 * 1024
"""What is held of a file at once, uncompressed."""
_ROWS_BITS = 32
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError, pa.ArrowException, LakeDamaged)
"""What Arrow raises for bytes that are no Parquet, or are no longer."""

Locators = NDArray[np.int64]
ReadsRowGroup = Callable[[FileReader, int], bool]


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Some rows of a file, with all their columns."""

    file: DataFile
    rows: pa.Table
    locators: Locators


@dataclass(slots=True)
class TableScan:
    """The live files of a table, or of a part of it."""

    place: TablePlace
    label: str
    """What findings call the table."""
    schema: pa.Schema
    """The columns that every file has to have. Those by which the table is partitioned are not in its files."""
    files: Sequence[DataFile]
    findings: Findings
    engines: dict[int, str] = field(default_factory=dict)
    """By the number of a file that another engine wrote: its name."""

    def read(self, reads: ReadsRowGroup = lambda reader, row_group: True) -> Iterator[ScannedRows]:
        """All rows of the row groups that `reads` chooses."""
        for number, file in enumerate(self.files):
            yield from self._read_file(number, file, reads)

    def _read_file(self, number: int, file: DataFile, reads: ReadsRowGroup) -> Iterator[ScannedRows]:
        try:
            reader = FileReader(self.place, file.path, checks=True)
        except FileNotFoundError:
            self._report(FindingKind.MISSING_FILE, file, "is not there, and the table's log names it")
            return
        except _UNREADABLE as error:
            self._report(FindingKind.DAMAGED_FILE, file, _says(error))
            return
        with reader:
            start = number << _ROWS_BITS
            try:
                if OWN_LIBRARY not in reader.created_by:
                    self.engines[number] = reader.created_by or "of no name"
                self._check_size(file, reader)
                for row_group in reader.row_groups:
                    if reads(reader, row_group):
                        yield from self._read_row_group(file, reader, row_group, start)
                    start += reader.row_group_rows(row_group)
            except _UNREADABLE as error:
                self._report(FindingKind.DAMAGED_FILE, file, _says(error))

    def _read_row_group(self, file: DataFile, reader: FileReader, row_group: int, start: int) -> Iterator[ScannedRows]:
        parts = reader.batches(row_group, bytes_max=SCAN_BYTES)
        while True:
            try:
                # Only what reads is tried: an error of those who take the rows is no fault of the file.
                rows = next(parts, None)
                if rows is not None:
                    rows = _with_types(rows, self.schema)
                    # Without checksums, texts may be none.
                    rows.validate(full=not reader.is_sealed)
            except _UNREADABLE as error:
                self._report(FindingKind.DAMAGED_FILE, file, _says(error))
                return
            if rows is None:
                return
            yield ScannedRows(file, rows, np.arange(start, start + rows.num_rows, dtype=np.int64))
            start += rows.num_rows

    def _check_size(self, file: DataFile, reader: FileReader) -> None:
        """What was put behind the end of a file, or taken from it, and left its end intact."""
        if reader.size_bytes != file.size_bytes:
            says = f"has {reader.size_bytes:,} bytes, and the table's log says {file.size_bytes:,}"
            self._report(FindingKind.DAMAGED_FILE, file, says)
        elif file.rows and reader.rows != file.rows:
            says = f"has {reader.rows:,} rows, and the table's log says {file.rows:,}"
            self._report(FindingKind.DAMAGED_FILE, file, says)

    def _report(self, kind: FindingKind, file: DataFile, says: str) -> None:
        known = self.findings.kept.get((kind, self.label), ())
        if not any(one.what == file.path for one in known):
            self.findings.add(Finding(kind=kind, table=self.label, what=file.path, says=says))

    # --- telling rows by name ---------------------------------------------------------------------------------------

    def keys_of(self, locators: Locators) -> list[str | None]:
        """The keys of some rows, as `key` shows them. Events have none."""
        found: dict[int, str | None] = {}
        for number in np.unique(locators >> _ROWS_BITS).tolist():
            wanted = locators[locators >> _ROWS_BITS == number]
            with FileReader(self.place, self.files[number].path) as reader:
                start = number << _ROWS_BITS
                for row_group in reader.row_groups:
                    end = start + reader.row_group_rows(row_group)
                    here = wanted[(wanted >= start) & (wanted < end)]
                    if len(here):
                        keys = reader.read(row_group, ["key"]).column("key").take(pa.array(here - start))
                        shown = split_keys(keys.cast(pa.binary()).combine_chunks())[0].to_pylist()
                        found.update(zip(here.tolist(), shown, strict=True))
                    start = end
        return [found[locator] for locator in locators.tolist()]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableRows:
    """Rows that a scan has read, by their hashes, and where each of them is."""

    scan: TableScan
    rows: HashedRows
    locators: Locators

    @classmethod
    def joined(cls, scan: TableScan, parts: Sequence[TableRows]) -> TableRows:
        locators = np.concatenate([np.zeros(0, dtype=np.int64), *(part.locators for part in parts)])
        return cls(scan=scan, rows=HashedRows.joined([part.rows for part in parts]), locators=locators)

    def of(self, chosen: Any) -> TableRows:
        """Some of them, by marks or by numbers."""
        return TableRows(scan=self.scan, rows=self.rows.of(chosen), locators=self.locators[chosen])

    def report(self, kind: FindingKind, says: str, *, of_table: str | None = None) -> None:
        """All of them are wrong, in one way; or `of_table` is, because it does not have them."""
        scan, rows = self.scan, self.rows
        label = of_table or scan.label
        room = FINDINGS_MAX - len(scan.findings.kept.get((kind, label), ()))
        shown = self.locators[: max(1, room)]
        found = [
            Finding(
                kind=kind,
                table=label,
                what="an event" if key is None else key,
                says=says,
                vbucket=int(rows.vbuckets[at]),
                seqno=int(rows.seqnos[at]),
                file=scan.files[locator >> _ROWS_BITS].path if of_table is None else None,
                engine=scan.engines.get(locator >> _ROWS_BITS) if of_table is None else None,
            )
            for at, (locator, key) in enumerate(zip(shown.tolist(), scan.keys_of(shown), strict=True))
        ]
        scan.findings.add(*found, count=len(rows))


def _with_types(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of the schema, in its order and types; texts that are read as numbers of a dictionary stay so."""
    columns = []
    for wanted in schema:
        column = rows.column(wanted.name)
        if column.type != wanted.type and not pa.types.is_dictionary(column.type):
            column = column.cast(wanted.type)
        columns.append(column)
    return pa.table(columns, names=schema.names)


def _says(error: BaseException) -> str:
    if isinstance(error, LakeDamaged):
        return f"can't be read: {error.reason.partition(': ')[2]}"
    return f"can't be read: {(str(error).splitlines() or [type(error).__name__])[0].rstrip('.')}"
