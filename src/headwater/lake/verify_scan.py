"""What `headwater verify` reads, and what it finds: the scan of a table's live files, and the findings.

The scan reads every column of every row group, with the checksums of its pages, because others may read pages that no
query of ours needs. A missing, cut off or damaged file is a finding: only the rows that can't be read are lost, and the
scan continues. A fault of a file never raises an error.

A row is identified by its *locator*, one number for the file and the row in it. The scan keeps no keys: it reads them
again only for wrong rows. Of each kind and table it keeps the first few findings, and the number of all of them. So a
report is small, however much of a table is wrong, and can be sent to the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError
from numpy.typing import NDArray

from headwater.client.changes import split_keys
from headwater.errors import LakeDamaged
from headwater.lake.data_files import DataFile, FileReader
from headwater.lake.delta_log import DeltaLog
from headwater.lake.layout import TableKind
from headwater.lake.location import Location
from headwater.lake.verify_hashes import HashedRows, per_row

FINDINGS_MAX = 20
"""How many findings of one kind in one table are kept."""
NOT_NAMED = "a document"
"""How a finding calls a document that only the bucket has, until its key has been looked up."""
UNREADABLE_LOG = (LakeDamaged, DeltaError, OSError, ValueError)
"""Errors that occur if the files of a table's log have been changed or damaged."""
OWN_LIBRARY = "parquet-cpp-arrow"
"""Arrow's name in the files that it writes. Other engines have other names."""
SCAN_BYTES = 2 * 1024 * 1024
"""How many uncompressed bytes of a file are held at once."""
_ROWS_BITS = 32
UNREADABLE_FILE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    OverflowError,
    MemoryError,
    pa.ArrowException,
    LakeDamaged,
)
"""Errors that Arrow raises for bytes that are not, or no longer, valid Parquet."""
Locators = NDArray[np.int64]
ReadsRowGroup = Callable[[FileReader, int], bool]


# --- findings ---------------------------------------------------------------------------------------------------------


class FindingKind(StrEnum):
    """What is wrong."""

    MISSING = "missing"
    """A document, a change or a version that the table must hold."""
    EXTRA = "extra"
    """One that it must not hold."""
    DIFFERS = "differs"
    TWICE = "twice"
    TYPED_COLUMN = "typed column"
    """A typed column differs from the document."""
    COLUMN = "column"
    """The log or other rows contradict a column that the bucket does not have."""
    VALIDITY = "validity"
    """A version is current and has ended, or neither, or two are valid at once, or it is valid at other times."""
    STATISTICS = "statistics"
    """The log has other rows, bytes, bounds or nulls of a file than the file: engines skip files by them."""
    NEVER_LANDED = "never landed"
    """The bucket has changes, but no landing has ever written one into the table."""
    MISSING_TABLE = "missing table"
    MISSING_FILE = "missing file"
    DAMAGED_FILE = "damaged file"
    DAMAGED_LOG = "damaged log"
    """The log of the table can't be read, so it is unknown what belongs to the table."""
    ROLLBACK_PENDING = "rollback pending"
    """A failover took back changes that the table holds."""


OF_FILES = frozenset({FindingKind.MISSING_FILE, FindingKind.DAMAGED_FILE})
_REPORTED_AGAIN = OF_FILES | {FindingKind.MISSING_TABLE}
"""Findings that every task reports that meets them. There are few."""
_ORDER = {kind: number for number, kind in enumerate(FindingKind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    table: str
    """Such as `changes` or `documents/shop.orders`."""
    what: str
    """A key, a file, or a vbucket."""
    says: str
    """The rest of the sentence."""
    vbucket: int | None = None
    seqno: int | None = None
    file: str | None = None
    """The path of the file with the row, relative to the table's directory."""
    engine: str | None = None
    """The engine that wrote that file, if it was not Headwater."""
    column: str | None = None
    """The wrong column, if it is one."""

    @property
    def sentence(self) -> str:
        details = [
            f"{name} {value}"
            for name, value in (("vbucket", self.vbucket), ("seqno", self.seqno), ("file", self.file))
            if value is not None
        ]
        if self.engine is not None:
            details.append(f"rewritten by another engine, {self.engine}")
        where = f" ({', '.join(details)})" if details else ""
        return f"{self.table}: {self.what} {self.says}{where}"


def table_label(kind: TableKind, name: str | None = None) -> str:
    return str(kind) if name is None else f"{kind}/{name}"


@dataclass(slots=True)
class Findings:
    """Any number of findings: counts, and the first of each kind and table."""

    kept: dict[tuple[FindingKind, str], list[Finding]] = field(default_factory=dict)
    counts: Counter[tuple[FindingKind, str]] = field(default_factory=Counter)
    vbuckets: dict[str, set[int]] = field(default_factory=dict)
    """By table: the vbuckets with wrong or missing rows."""

    def add(self, *found: Finding, count: int | None = None) -> None:
        """Add findings of one kind and table; `count` is their total if these are only the first."""
        for one in found:
            self._keep(one)
        if found:
            self.counts[found[0].kind, found[0].table] += len(found) if count is None else count

    def merge(self, others: Findings) -> None:
        """Add those of another report."""
        self.counts += others.counts
        for table, vbuckets in others.vbuckets.items():
            self.locate(table, vbuckets)
        for key, found in others.kept.items():
            for one in found:
                if one.kind in _REPORTED_AGAIN and any(one.what == known.what for known in self.kept.get(key, ())):
                    self.counts[key] -= 1
                else:
                    self._keep(one)

    def name(self, keys: Mapping[tuple[int, int], str]) -> None:
        """Insert the keys of documents, given by vbucket and seqno, into findings without one."""

        def named(one: Finding) -> Finding:
            if one.what != NOT_NAMED or one.vbucket is None or one.seqno is None:
                return one
            return replace(one, what=keys.get((one.vbucket, one.seqno), NOT_NAMED))

        for key, found in self.kept.items():
            self.kept[key] = [named(one) for one in found]

    def locate(self, table: str, vbuckets: Iterable[int]) -> None:
        """Record that rows of these vbuckets are wrong."""
        self.vbuckets.setdefault(table, set()).update(vbuckets)

    def _keep(self, finding: Finding) -> None:
        kept = self.kept.setdefault((finding.kind, finding.table), [])
        # Repeated findings are kept until the last task has reported; otherwise they would be counted twice.
        if len(kept) < FINDINGS_MAX or finding.kind in _REPORTED_AGAIN:
            kept.append(finding)

    def first(self) -> tuple[Finding, ...]:
        """Return the findings in the order of their kinds, at most `FINDINGS_MAX` of each kind and table."""
        keys = sorted(self.kept, key=lambda key: (_ORDER[key[0]], key[1]))
        return tuple(one for key in keys for one in self.kept[key][:FINDINGS_MAX])


# --- the scan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Some rows of a file, with all their columns."""

    file: DataFile
    rows: pa.Table
    locators: Locators


@dataclass(slots=True)
class TableScan:
    """The live files of a table, or of a part of it."""

    location: Location
    label: str
    """The table's name in findings."""
    schema: pa.Schema
    """The columns that every file must have. The partition columns are not in the files."""
    files: Sequence[DataFile]
    findings: Findings = field(default_factory=Findings)
    added: frozenset[str] = frozenset()
    """Columns that files from before their addition lack: they have null there."""
    owned: frozenset[str] | None = None
    """The paths of files whose statistics are judged here; None for all. Several tasks read a file of `changes`."""
    engines: dict[int, str] = field(default_factory=dict)
    """By the number of a file that another engine wrote: the engine's name."""

    def read(self, reads: ReadsRowGroup = lambda reader, row_group: True) -> Iterator[ScannedRows]:
        """Yield all rows of the row groups that `reads` chooses."""
        for number, file in enumerate(self.files):
            yield from self._read_file(number, file, reads)

    def _read_file(self, number: int, file: DataFile, reads: ReadsRowGroup) -> Iterator[ScannedRows]:
        try:
            reader = FileReader(self.location, file, checks=True)
        except FileNotFoundError:
            self._report(FindingKind.MISSING_FILE, file, "is not there, and the table's log names it")
            return
        except UNREADABLE_FILE as error:
            self._report(FindingKind.DAMAGED_FILE, file, _says(error))
            return
        with reader:
            start = number << _ROWS_BITS
            try:
                if OWN_LIBRARY not in reader.created_by:
                    self.engines[number] = reader.created_by or "of no name"
                self._check_statistics(file, reader)
                for row_group in reader.row_groups:
                    if reads(reader, row_group):
                        yield from self._read_row_group(file, reader, row_group, start)
                    start += reader.row_group_rows(row_group)
            except UNREADABLE_FILE as error:
                self._report(FindingKind.DAMAGED_FILE, file, _says(error))

    def _read_row_group(self, file: DataFile, reader: FileReader, row_group: int, start: int) -> Iterator[ScannedRows]:
        parts = reader.batches(row_group, bytes_max=SCAN_BYTES)
        while True:
            try:
                # Only reading is inside the `try`: an error of the caller that takes the rows is no fault of the file.
                rows = next(parts, None)
                if rows is not None:
                    rows = _with_types(rows, self.schema, self.added)
                    # Without checksums, texts may be invalid.
                    rows.validate(full=not reader.is_sealed)
            except UNREADABLE_FILE as error:
                self._report(FindingKind.DAMAGED_FILE, file, _says(error))
                return
            if rows is None:
                return
            yield ScannedRows(file, rows, np.arange(start, start + rows.num_rows, dtype=np.int64))
            start += rows.num_rows

    def _check_statistics(self, file: DataFile, reader: FileReader) -> None:
        if self.owned is None or file.path in self.owned:
            for column, says in file.wrong_statistics(reader):
                kind = FindingKind.STATISTICS
                self.findings.add(Finding(kind=kind, table=self.label, what=file.path, says=says, column=column))

    def _report(self, kind: FindingKind, file: DataFile, says: str) -> None:
        known = self.findings.kept.get((kind, self.label), ())
        if not any(one.what == file.path for one in known):
            self.findings.add(Finding(kind=kind, table=self.label, what=file.path, says=says))

    # --- naming rows --------------------------------------------------------------------------------------------------

    def keys_of(self, locators: Locators) -> list[str | None]:
        """Return the keys of some rows, as `key` shows them. Events have none."""
        found: dict[int, str | None] = {}
        for number in np.unique(locators >> _ROWS_BITS).tolist():
            wanted = locators[locators >> _ROWS_BITS == number]
            with FileReader(self.location, self.files[number]) as reader:
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
class TableRows(HashedRows):
    """Rows that a scan has read, and where each of them is."""

    scan: TableScan
    locators: Locators = per_row(np.int64)

    def report(self, kind: FindingKind, says: str, *, of_table: str | None = None, column: str | None = None) -> None:
        """Report all of them, if any, as wrong in one way; or report that `of_table` lacks them."""
        if not len(self):
            return
        scan = self.scan
        label = of_table or scan.label
        room = FINDINGS_MAX - len(scan.findings.kept.get((kind, label), ()))
        shown = self.locators[: max(1, room)]
        found = [
            Finding(
                kind=kind,
                table=label,
                what="an event" if key is None else key,
                says=says,
                vbucket=int(self.vbuckets[at]),
                seqno=int(self.seqnos[at]),
                file=scan.files[locator >> _ROWS_BITS].path if of_table is None else None,
                engine=scan.engines.get(locator >> _ROWS_BITS) if of_table is None else None,
                column=column,
            )
            for at, (locator, key) in enumerate(zip(shown.tolist(), scan.keys_of(shown), strict=True))
        ]
        scan.findings.add(*found, count=len(self))
        scan.findings.locate(label, np.unique(self.vbuckets).tolist())


def _with_types(rows: pa.Table, schema: pa.Schema, added: frozenset[str]) -> pa.Table:
    """Return the columns of the schema, in its order and types; dictionary-encoded texts stay so."""
    columns = []
    for wanted in schema:
        if wanted.name in added and wanted.name not in rows.schema.names:
            columns.append(pa.nulls(rows.num_rows, wanted.type))
            continue
        column = rows.column(wanted.name)
        if column.type != wanted.type and not pa.types.is_dictionary(column.type):
            column = column.cast(wanted.type)
        columns.append(column)
    return pa.table(columns, names=schema.names)


def _says(error: BaseException) -> str:
    if isinstance(error, LakeDamaged):
        return f"can't be read: {error.reason.partition(': ')[2]}"
    return f"can't be read: {(str(error).splitlines() or [type(error).__name__])[0].rstrip('.')}"


# --- tables that can't be opened --------------------------------------------------------------------------------------


def damaged_logs(location: Location) -> Findings:
    """Find the tables with unreadable logs in a lake that can't be opened."""
    findings = Findings()
    for kind, name in _tables_in(location):
        try:
            log = DeltaLog.open(location.join(kind) if name is None else location.join(kind, name))
            if log is not None:
                log.state()
        except UNREADABLE_LOG as error:
            # delta-rs appends its own call stack after the first line.
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


def _tables_in(location: Location) -> Iterator[tuple[TableKind, str | None]]:
    yield TableKind.CHANGES, None
    for kind in (TableKind.DOCUMENTS, TableKind.HISTORY, TableKind.REJECTS):
        yield from ((kind, entry.name) for entry in location.entries(kind))
