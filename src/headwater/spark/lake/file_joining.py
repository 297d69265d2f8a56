"""Joining small files: every batch brings some, and a table of many small files is slow to read.

Files of one partition are joined when there are several of about one size. So every row is written again once for each
size that its files go through, and no more: the cost is bounded by what has been written, whatever the table holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log

import pyarrow as pa

from headwater.spark.lake.change_files import row_groups, sort_rows
from headwater.spark.lake.collection_tables import MergedTable
from headwater.spark.lake.data_files import (
    FILE_BYTES_DEFAULT,
    DataFile,
    FileReader,
    FileWriter,
    RollingWriter,
    filtered,
    numbers,
    read_files,
)
from headwater.spark.lake.delta_log import Commit
from headwater.spark.lake.lake import Lake
from headwater.spark.lake.layout import LakeFacts, TablePlace
from headwater.spark.lake.schemas import CHANGE_RANGES, DOCUMENT_RANGES, HISTORY_RANGES, changes_schema
from headwater.spark.lake.tasks import Runner, run_here

JOIN_FILES_MIN = 8
"""Files of one size class that are joined; a class is four times as large as the one before."""
_CLASS_STEP = 4
_LEAST_CLASS_BYTES = 64 * 1024
JOIN_BYTES_A_TIME = 256 * 1024 * 1024
"""Uncompressed, of changes that are sorted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTask:
    """Write the rows of some files of a table, all of one partition, to fewer."""

    place: TablePlace
    files: tuple[DataFile, ...]
    file_bytes: int
    facts: LakeFacts | None
    """Given for `changes`, whose files are sorted."""
    ranges: tuple[str, ...]

    def run(self) -> list[DataFile]:
        if self.facts is not None:
            return [_join_changes(self.place, self.files, self.facts)]
        with FileReader(self.place, self.files[0].path) as reader:
            schema = reader.schema
        partition = self.files[0].partition
        writer = RollingWriter(self.place, schema, ranges=self.ranges, partition=partition, file_bytes=self.file_bytes)
        for _, rows in read_files(self.place, self.files, schema.names):
            writer.write(rows)
        return writer.close()


def _join_changes(place: TablePlace, files: Sequence[DataFile], facts: LakeFacts) -> DataFile:
    """Sorted rows of many files in one. What is sorted together are some groups of vbuckets at a time."""
    schema = changes_schema(xattrs=facts.xattrs)
    writer = FileWriter(place, schema, ranges=CHANGE_RANGES, prefix="changes")
    passes = ceil(_uncompressed_bytes(place, files) / JOIN_BYTES_A_TIME)
    edges = [number * facts.groups // passes for number in range(passes + 1)]
    for first, end in pairwise(edges):
        if first < end:
            vbuckets = range(facts.vbuckets_of(first).start, facts.vbuckets_of(end - 1).stop)
            parts = [*_rows_of_vbuckets(place, files, vbuckets, schema.names)]
            if parts:
                rows = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
                for part in row_groups(facts, sort_rows(facts, rows)):
                    writer.write_row_group(part)
    return writer.close()


def _uncompressed_bytes(place: TablePlace, files: Iterable[DataFile]) -> int:
    total = 1
    for file in files:
        with FileReader(place, file.path) as reader:
            total += sum(reader.uncompressed_bytes(row_group) for row_group in reader.row_groups)
    return total


def _rows_of_vbuckets(
    place: TablePlace, files: Iterable[DataFile], vbuckets: range, columns: Sequence[str]
) -> Iterator[pa.Table]:
    for file in files:
        with FileReader(place, file.path) as reader:
            for row_group in reader.row_groups:
                low, high, _ = reader.range_of(row_group, "vbucket")
                if low < vbuckets.stop and vbuckets.start <= high:
                    rows = reader.read(row_group, columns).select(columns)
                    here = numbers(rows, "vbucket")
                    kept = filtered(rows, (here >= vbuckets.start) & (here < vbuckets.stop))
                    if kept.num_rows:
                        yield kept


def files_to_join(files: Iterable[DataFile], *, file_bytes: int) -> list[tuple[DataFile, ...]]:
    """Sets of files of one partition and one size class, each worth to be joined and small enough to be."""
    classes: dict[tuple[object, int], list[DataFile]] = {}
    for file in files:
        if file.size_bytes < file_bytes // 2:
            size_class = max(0, int(log(max(1, file.size_bytes / _LEAST_CLASS_BYTES), _CLASS_STEP)))
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
    joined = _joined(lake.changes.place, sets, run, ranges=CHANGE_RANGES, facts=lake.facts, file_bytes=file_bytes)
    if sets:
        lake.step("join changes")
        removed = [file for part in sets for file in part]
        lake.commit_changes(Commit(add=joined, remove=removed, state=lake.state, is_rearrangement=True))
    gone = sum(len(part) for part in sets) - len(joined)
    for table, ranges in _merged_tables(lake):
        sets = files_to_join(table.log.files(), file_bytes=file_bytes)
        joined = _joined(table.log.place, sets, run, ranges=ranges, facts=None, file_bytes=file_bytes)
        if sets:
            lake.step("join documents")
            removed = [file for part in sets for file in part]
            table.commit(add=joined, remove=removed)
        gone += sum(len(part) for part in sets) - len(joined)
    return gone


def _joined(
    place: TablePlace,
    sets: Sequence[tuple[DataFile, ...]],
    run: Runner,
    *,
    ranges: tuple[str, ...],
    facts: LakeFacts | None,
    file_bytes: int,
) -> list[DataFile]:
    tasks = [JoinTask(place=place, files=part, file_bytes=file_bytes, facts=facts, ranges=ranges) for part in sets]
    return [file for files in (run(tasks) if tasks else []) for file in files]


def _merged_tables(lake: Lake) -> Iterator[tuple[MergedTable, tuple[str, ...]]]:
    for tables in lake.tables.values():
        for table, ranges in (
            (tables.documents, DOCUMENT_RANGES),
            (tables.history, HISTORY_RANGES),
            (tables.rejects, DOCUMENT_RANGES),
        ):
            if table is not None:
                yield table, ranges
