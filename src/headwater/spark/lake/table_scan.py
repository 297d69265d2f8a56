"""Reading all of a table's live files to judge them: what can't be read is a finding, and the rest is read on.

Every column of every row group is read, with the checksums of its pages, because a page that no query of ours needs is
read by others. A file that is missing, cut off or damaged costs the rows that can't be read, and no more.

A row is named by its *locator*, one number for the file and the place in it. Keys are read again for those rows alone
that something is wrong with, so a scan keeps no keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.errors import LakeDamaged
from headwater.spark.lake.data_files import DataFile, FileReader
from headwater.spark.lake.digests import HashedRows
from headwater.spark.lake.findings import FINDINGS_MAX, Finding, FindingKind, Findings
from headwater.spark.lake.layout import TablePlace
from headwater.spark.lake.schemas import split_keys

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
