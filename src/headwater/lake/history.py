"""What a merge writes beside `documents`: the table of versions, and the change feed.

The table of versions has every version of a document, with the times between which it was current. It is partitioned
by `is_current` as well as by group. Ended versions lie in files that are only ever added to; current versions lie in
other files. So a merge, which ends some versions and begins others, writes no more than the merge of the documents
does. As there, a file is either rewritten separately from new rows, or it stays and its rows are marked.

A version ends with the next one of its document, with the document's removal, or with its collection. `valid_to_seqno`
is the seqno of that change. A rollback removes every version above the kept seqno, and reopens those that a change
above it had ended. This needs nothing but the table itself.

The table has the typed columns of the documents. An ended version may have a field that no current document has: the
documents get a column for it as well, so that both tables always have the same columns. A version keeps the values
that it was written with; versions written before the history had a column have null in it.

`documents_merge.MergeTask` uses this module if a history is kept. It writes files, and commits nothing.

The change feed of `documents` records what each merge did, row by row, as Delta's change data feed. A table with
`delta.enableChangeDataFeed` shows its readers which rows a commit inserted, updated and deleted. If a commit has `cdc`
files, a reader uses these and nothing else. If it has none, the reader derives the changes: every row of an added file
is an insert, every row of a removed one a delete, unless the commit declares that no data has changed. So

* a merge that only adds files writes no `cdc` file: a first load costs nothing more;
* a merge that replaces or removes a row, or marks it in a deletion vector, writes `cdc` files with exactly the rows
  that it changed: not those that were only rewritten, nor those that come back equal in every column, as most rows of
  a vbucket do after a rollback;
* a merge that changes no row declares that, as joining files and dividing groups do.

`MergeTask` gives a `FeedWriter` the new rows, then those that leave. `commits` completes the feed of a commit: a group
that only adds files does not know whether another one replaces rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.errors import InvalidInput
from headwater.kernels.memory import Column
from headwater.lake import change_rows, data_files, layout
from headwater.lake.key_index import KeyIndex, Marks, key_spaces, raw_keys_of
from headwater.lake.location import Location
from headwater.lake.row_order import SORT_BYTES
from headwater.lake.typed_columns import ColumnGrowth, FieldTypes, TypedColumns, UnsettledColumns, joined_fields
from headwater.lake.variants import document_texts

FEED_HELD_BYTES = 64 * 1024 * 1024
"""New rows held in memory for comparison; more of them are written to a temporary file."""
_CHANGE_TYPE = pa.field(layout.FEED_COLUMNS[0], pa.string(), nullable=False)


def has_feed(properties: Mapping[str, str | None]) -> bool:
    """Whether a table with these properties has a change feed."""
    return properties.get(layout.FEED_PROPERTY) == "true"


def check_feed_columns(name: str, columns: Iterable[str]) -> None:
    """Raise `InvalidInput` if a table has columns with the names of a change feed's columns."""
    if taken := sorted({*layout.FEED_COLUMNS} & {column.lower() for column in columns}):
        raise InvalidInput(
            f"{name} can't have a change feed: it has the column {', '.join(taken)}, which the feed has as well",
            hint="Land without --change-feed, or omit that column with --columns",
        )


class FeedWriter:
    """Writes the `cdc` files of one group of a table: give it all new rows (`after`), then all rows that leave
    (`before`)."""

    def __init__(
        self, location: Location, schema: pa.Schema, *, partition: Sequence[tuple[str, str]], file_bytes: int
    ) -> None:
        self._schema = schema
        self._writer = _CdcWriter(location, schema, partition, file_bytes)
        self._after = _HeldRows()
        self._index: KeyIndex | None = None
        self._replaced: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """By new row: how many rows it replaces…"""
        self._equals: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """…and how many of them are equal to it in every column."""

    def after(self, rows: pa.Table) -> pa.Table:
        """Take new rows, and return them."""
        assert self._index is None, "new rows come before those that leave"
        self._after.add(rows)
        return rows

    def before(self, rows: pa.Table) -> None:
        """Take rows that leave, whether others replace them or not."""
        rows = data_files.aligned(data_files.conformed(rows, self._schema), self._schema).combine_chunks()
        found = self._indexed().find(raw_keys_of(rows), _spaces_of_rows(rows))
        is_equal = np.zeros(rows.num_rows, dtype=np.bool_)
        for start, others in self._after.parts():
            here = np.flatnonzero((found >= start) & (found < start + others.num_rows))
            if len(here):
                is_equal[here] = _are_equal(rows, here, others, found[here] - start)
        paired = found[found >= 0]
        np.add.at(self._replaced, paired, 1)
        np.add.at(self._equals, paired, is_equal[found >= 0])
        self._writer.write(rows, ~is_equal, np.where(found >= 0, "update_preimage", "delete"))

    def _indexed(self) -> KeyIndex:
        if self._index is None:
            self._index = self._after.index()
            self._replaced, self._equals = (np.zeros(len(self._index), dtype=np.int64) for _ in range(2))
        return self._index

    def close(self, leaving: Iterable[pa.Table]) -> list[data_files.DataFile]:
        """Take the last rows that leave, and complete the files."""
        for rows in leaving:
            self.before(rows)
        self._indexed()
        # In a damaged table two rows may share a key: then the new row is listed, although it equals one of them.
        is_unchanged = (self._replaced == 1) & (self._equals == 1)
        for start, rows in self._after.parts():
            end = start + rows.num_rows
            kinds = np.where(self._replaced[start:end] > 0, "update_postimage", "insert")
            self._writer.write(rows, ~is_unchanged[start:end], kinds)
        self._after.close()
        return self._writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertsTask:
    """Write the `cdc` files of a group to which a merge has only added files."""

    location: Location
    files: tuple[data_files.DataFile, ...]
    file_bytes: int

    def run(self) -> list[data_files.DataFile]:
        with data_files.FileReader(self.location, self.files[0]) as reader:
            writer = _CdcWriter(self.location, reader.schema, self.files[0].partition, self.file_bytes)
        for rows in data_files.read_files(self.location, self.files):
            writer.write(rows, np.ones(rows.num_rows, dtype=np.bool_), np.full(rows.num_rows, "insert"))
        return writer.close()


class _CdcWriter:
    """Writes rows with their change types."""

    def __init__(
        self, location: Location, schema: pa.Schema, partition: Sequence[tuple[str, str]], file_bytes: int
    ) -> None:
        self._writer = data_files.RollingWriter(
            location.join(layout.FEED_FOLDER),
            schema.append(_CHANGE_TYPE),
            ranges=(),
            partition=partition,
            file_bytes=file_bytes,
            prefix="cdc",
        )

    def write(self, rows: pa.Table, marks: Marks, kinds: Column) -> None:
        """Write the marked rows."""
        if marks.any():
            self._writer.write(
                data_files.filtered(rows.append_column(_CHANGE_TYPE, pa.array(kinds, pa.string())), marks)
            )

    def close(self) -> list[data_files.DataFile]:
        return [replace(file, path=f"{layout.FEED_FOLDER}/{file.path}") for file in self._writer.close()]


class _HeldRows:
    """Rows numbered in the order of arrival: in memory, and beyond a bound in a temporary file."""

    def __init__(self) -> None:
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spilled: IO[bytes] | None = None
        self._keys: list[pa.Array] = []
        self._seqnos: list[Column] = []
        self._beside: list[Column] = []

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        rows = rows.combine_chunks()
        self._keys.append(raw_keys_of(rows))
        self._seqnos.append(data_files.numbers(rows, "seqno"))
        self._beside.append(_spaces_of_rows(rows))
        self._held_bytes += rows.nbytes
        self._held.append(rows if self._held_bytes <= FEED_HELD_BYTES else self._spill(rows))

    def _spill(self, rows: pa.Table) -> pa.Table:
        """Write rows to the temporary file, and return them mapped from it."""
        if self._spilled is None:
            self._spilled = tempfile.NamedTemporaryFile(prefix="headwater-feed-")  # noqa: SIM115
        start = self._spilled.seek(0, 2)
        with pa.ipc.new_stream(pa.PythonFile(self._spilled, mode="w"), rows.schema) as stream:
            stream.write_table(rows)
        self._spilled.flush()
        mapped = pa.memory_map(self._spilled.name)
        mapped.seek(start)
        return pa.ipc.open_stream(mapped).read_all()

    def index(self) -> KeyIndex:
        """Return an index of all rows by key."""
        if not self._held:
            return KeyIndex(pa.array([], pa.binary()), np.zeros(0, dtype=np.int64))
        keys, seqnos, beside = pa.concat_arrays(self._keys), np.concatenate(self._seqnos), np.concatenate(self._beside)
        self._keys, self._seqnos, self._beside = [], [], []
        return KeyIndex(keys, seqnos, beside)

    def parts(self) -> Iterable[tuple[int, pa.Table]]:
        """Yield the rows in parts, each with the number of its first row."""
        start = 0
        for rows in self._held:
            yield start, rows
            start += rows.num_rows

    def close(self) -> None:
        self._held = []
        if self._spilled is not None:
            self._spilled.close()


def _spaces_of_rows(rows: pa.Table) -> NDArray[np.int64]:
    return key_spaces(data_files.numbers(rows, "vbucket"), data_files.numbers(rows, "collection_id"))


def _are_equal(rows: pa.Table, here: Column, others: pa.Table, there: Column) -> Marks:
    """Mark the pairs of rows, given by their numbers in two tables, that are equal in every column."""
    # Versions of a document differ in seqno or CAS, so hardly any documents have to be compared.
    is_equal: Marks = np.ones(len(here), dtype=np.bool_)
    for name in ("seqno", "cas"):
        is_equal &= data_files.numbers(rows, name)[here] == data_files.numbers(others, name)[there]
    left, right = rows.take(here[is_equal]), others.take(there[is_equal])
    for name in rows.schema.names:
        if not left.num_rows:
            break
        same = ~data_files.differing(left.column(name), right.column(name))
        is_equal[np.flatnonzero(is_equal)[~same]] = False
        left, right = data_files.filtered(left, same), data_files.filtered(right, same)
    return is_equal


# --- the history ------------------------------------------------------------------------------------------------------


_FOREVER = np.iinfo(np.int64).max
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTarget:
    """A collection's part of a merge."""

    name: str
    ids: frozenset[int]
    location: Location
    files: tuple[data_files.DataFile, ...]
    """The live files of the group, with current and with ended versions."""
    after_batch: int
    columns: TypedColumns | None = None
    unused: pa.Schema = field(default_factory=lambda: pa.schema([]))
    """Typed columns that only existing versions have."""
    is_merged_on_read: bool = False
    """Whether versions that end or are taken back are marked in deletion vectors, and their files stay."""


@dataclass(frozen=True, slots=True)
class MergedVersions:
    """The result of merging a group. The members are those of `documents_merge.Merged`."""

    add: list[data_files.DataFile]
    remove: list[data_files.DataFile]
    wanted: FieldTypes
    columns: TypedColumns | None
    is_written: bool = True


def merge_history(
    target: HistoryTarget,
    facts: layout.LakeFacts,
    group: int,
    pending: Sequence[change_rows.ChangeRows],
    *,
    file_bytes: int,
) -> MergedVersions:
    """Merge pending changes into a group."""
    merge = _Merge(target, facts, group, pending, file_bytes)
    try:
        return merge.write()
    except UnsettledColumns:
        return MergedVersions([], [], merge.wanted(), None, is_written=False)


def _may_change(file: data_files.DataFile, rolled: Mapping[int, int]) -> bool:
    """Whether a file of ended versions may hold one that a rollback removes or reopens.

    A version ends later than it begins, so its end alone decides.
    """
    return any(
        file.may_hold("vbucket", low=vbucket, high=vbucket) and file.may_hold("valid_to_seqno", low=kept + 1)
        for vbucket, kept in rolled.items()
    )


@dataclass(frozen=True, slots=True)
class _Ends:
    """By version, or by row of changes: the change that ends it."""

    seqnos: _Numbers
    """`_FOREVER` if no change ends it."""
    times_us: _Numbers

    @property
    def is_ended(self) -> Marks:
        return self.seqnos < _FOREVER

    def earlier(self, other: _Ends) -> _Ends:
        is_ours = self.seqnos <= other.seqnos
        return _Ends(np.where(is_ours, self.seqnos, other.seqnos), np.where(is_ours, self.times_us, other.times_us))

    def of(self, chosen: Marks | slice) -> _Ends:
        return _Ends(self.seqnos[chosen], self.times_us[chosen])

    def at(self, rows: _Numbers) -> _Ends:
        """Return the ends at some rows; -1 stands for none."""
        is_there, ends = rows >= 0, _Ends.none(len(rows))
        ends.seqnos[is_there], ends.times_us[is_there] = self.seqnos[rows[is_there]], self.times_us[rows[is_there]]
        return ends

    @classmethod
    def none(cls, versions: int) -> _Ends:
        return cls(np.full(versions, _FOREVER), np.zeros(versions, dtype=np.int64))

    @classmethod
    def made_by(cls, parts: Sequence[tuple[change_rows.ChangeRows, Marks]]) -> _Ends:
        """Return changes in the form of ends for earlier versions."""
        times_us = _joined([rows.times_us()[marks] for rows, marks in parts])
        return cls(_joined([rows.seqnos[marks] for rows, marks in parts]), times_us)


class _Merge:
    """The merge of one group."""

    def __init__(
        self,
        target: HistoryTarget,
        facts: layout.LakeFacts,
        group: int,
        pending: Sequence[change_rows.ChangeRows],
        file_bytes: int,
    ) -> None:
        self._target, self._location, self._is_merged_on_read = target, target.location, target.is_merged_on_read
        self._rolled = rolled = change_rows.rolled_back(pending, after_batch=target.after_batch)
        self._kept = np.full(facts.vbuckets, _FOREVER)
        """By vbucket: the last seqno that a rollback kept."""
        for vbucket, kept in rolled.items():
            self._kept[vbucket] = kept
        self._facts, self._group, self._file_bytes = facts, group, file_bytes
        self._growth = None if target.columns is None else ColumnGrowth(target.columns)
        self._added: list[data_files.DataFile] = []
        self._removed: list[data_files.DataFile] = []
        ids = np.array(sorted(target.ids), dtype=np.int64)
        parts = [(rows, (rows.batches > target.after_batch) & ~rows.void & np.isin(rows.ids, ids)) for rows in pending]
        events = [
            (
                rows,
                marks & ((rows.ops == change_rows.COLLECTION_CREATED) | (rows.ops == change_rows.COLLECTION_DROPPED)),
            )
            for rows, marks in parts
        ]
        self._collection_ends, self._ended = _Ends.made_by(events), _spaces(events)
        """The events that end collections, and for each the collection and vbucket in which it does."""
        self._is_any_touched = bool(rolled) or any(marks.any() for _, marks in events)
        """Whether versions may end although their keys have not changed."""
        self._parts = [(rows, marks & (rows.ops <= change_rows.UNMATCHED)) for rows, marks in parts]
        self._index_changes()

    def _writer(self, is_current: bool) -> data_files.RollingWriter:
        return data_files.RollingWriter(
            self._location,
            self._schema,
            ranges=layout.history_ranges(self._schema),
            partition=[(layout.GROUP.name, str(self._group)), (layout.IS_CURRENT.name, str(is_current).lower())],
            file_bytes=self._file_bytes,
            is_keyed=True,
        )

    def _index_changes(self) -> None:
        """Link the changes of each document in the order of their seqnos."""
        self._changes, self._spaces = _Ends.made_by(self._parts), _spaces(self._parts)
        keys = [rows.keys(marks) for rows, marks in self._parts if marks.any()]
        joined = pa.concat_arrays(keys) if keys else pa.array([], pa.binary())
        self._index = KeyIndex(joined, self._changes.seqnos, self._spaces)
        documents = self._index.documents
        order = np.lexsort((self._changes.seqnos, documents))
        follows = np.full(len(order), -1, dtype=np.int64)
        is_same = documents[order[1:]] == documents[order[:-1]]
        follows[order[:-1][is_same]] = order[1:][is_same]
        self._next = follows
        starts = np.ones(len(order), dtype=np.bool_)
        starts[1:] = ~is_same
        self._first = np.full(len(order), -1, dtype=np.int64)
        """By the number of a document in the index: the row with its lowest seqno."""
        self._first[documents[order[starts]]] = order[starts]

    def _ends_at(self, rows: _Numbers, spaces: _Numbers, seqnos: _Numbers) -> _Ends:
        """Return what ends versions first: the changes in some rows (-1 stands for none), or the ends of their
        collections."""
        of_collections = change_rows.first_after(self._ended, self._collection_ends.seqnos, spaces, seqnos)
        return self._changes.at(rows).earlier(self._collection_ends.at(of_collections))

    def write(self) -> MergedVersions:
        """Write the group. Raises `UnsettledColumns` if versions turn out to need other columns while it writes."""
        versions = ((is_current, self._typed(rows), ends) for is_current, rows, ends in self._new_versions())
        held, held_bytes = [], 0
        if self._growth is not None and self._growth.columns.is_inferred:
            # More columns can be added until something is written.
            for version in versions:
                held.append(version)
                held_bytes += version[1].nbytes
                if held_bytes >= SORT_BYTES:
                    break
            self._growth.is_settled = True
        columns = None if self._growth is None else self._growth.columns
        there = {it.name: it for it in (*self._target.unused, *([] if columns is None else columns.schema))}
        typed = pa.schema([*there.values()])
        self._schema = layout.history_schema(xattrs=self._facts.xattrs, form=self._facts.document, typed=typed)
        self._writers = {is_current: self._writer(is_current) for is_current in (True, False)}
        try:
            for file in self._target.files:
                if dict(file.partition)[layout.IS_CURRENT.name] == "true":
                    self._current_file(file)
                elif _may_change(file, self._rolled):
                    self._ended_file(file)
            for is_current, rows, ends in chain(held, versions):
                self._write(is_current, rows, ends)
        finally:
            written = [file for writer in self._writers.values() for file in writer.close()]
        wanted = {} if self._growth is None else self._growth.found
        return MergedVersions([*self._added, *written], self._removed, wanted, columns)

    def wanted(self) -> FieldTypes:
        """Return all fields of the new versions that need columns."""
        assert self._target.columns is not None, "only columns that are inferred are unsettled"
        parse = partial(self._target.columns.parse, discovers=True)
        found = (parse(document_texts(rows.column("document"))).wanted for _, rows, _ in self._new_versions())
        nothing: FieldTypes = {}
        return reduce(joined_fields, found, nothing)

    # --- versions that the table has ----------------------------------------------------------------------------------

    def _current_file(self, file: data_files.DataFile) -> None:
        with data_files.FileReader(self._location, file) as reader:
            fates = [
                self._fate(reader.row_group_rows(row_group), partial(reader.read, row_group))
                for row_group in reader.row_groups
            ]
            leaving = data_files.Leaving.of(reader, np.concatenate([stays for stays, _ in fates]))
        if not len(leaving.positions):
            return
        self._removed.append(file)
        again = self._writer(True)
        with data_files.FileReader(self._location, file) as reader:
            for row_group, (stays, ends) in zip(reader.row_groups, fates, strict=True):
                # If the file stays, only the values of ended versions are needed.
                if not self._is_merged_on_read or ends.is_ended.any():
                    rows = data_files.conformed(reader.read(row_group), self._schema)
                    if not self._is_merged_on_read:
                        again.write(data_files.filtered(rows, stays))
                    self._write(False, data_files.filtered(rows, ends.is_ended), ends.of(ends.is_ended))
        self._added += again.close()
        if self._is_merged_on_read:
            self._added += data_files.mark_rows(self._location, [leaving])

    def _ended_file(self, file: data_files.DataFile) -> None:
        marks = []
        for rows in data_files.read_files(self._location, [file], ["vbucket", "seqno", "valid_to_seqno"]):
            kept = self._kept[data_files.numbers(rows, "vbucket")]
            is_dead = data_files.numbers(rows, "seqno") > kept
            marks.append((is_dead, ~is_dead & (data_files.numbers(rows, "valid_to_seqno") > kept)))
        if not any(is_dead.any() or is_opened.any() for is_dead, is_opened in marks):
            return
        self._removed.append(file)
        for read, (is_dead, is_opened) in zip(data_files.read_files(self._location, [file]), marks, strict=True):
            rows = data_files.conformed(read, self._schema)
            if not self._is_merged_on_read:
                self._writers[False].write(data_files.filtered(rows, ~is_dead & ~is_opened))
            opened = data_files.filtered(rows, is_opened)
            if opened.num_rows:
                stays, ends = self._fate(opened.num_rows, opened.select)
                self._write(True, data_files.filtered(opened, stays), _Ends.none(int(stays.sum())))
                self._write(False, data_files.filtered(opened, ends.is_ended), ends.of(ends.is_ended))
        if self._is_merged_on_read:
            stays = np.concatenate([~is_dead & ~is_opened for is_dead, is_opened in marks])
            with data_files.FileReader(self._location, file) as reader:
                self._added += data_files.mark_rows(self._location, [data_files.Leaving.of(reader, stays)])

    def _fate(self, rows: int, read: Callable[[Sequence[str]], pa.Table]) -> tuple[Marks, _Ends]:
        """Decide on versions that are current, or are current again: return a mark for each that stays so, and what
        ends the others. Versions that a rollback removed neither stay nor end. `read` returns columns of them."""
        stays: Marks = np.ones(rows, dtype=np.bool_)
        ends = _Ends.none(rows)
        keys = raw_keys_of(read(("key", "key_bytes")))
        chosen = np.arange(rows) if self._is_any_touched else self._index.maybe(keys)
        if len(chosen):
            beside = read(("vbucket", "seqno", "collection_id"))
            vbuckets, seqnos, ids = (data_files.numbers(beside, name)[chosen] for name in beside.column_names)
            spaces = key_spaces(vbuckets, ids)
            found = self._index.find(keys.take(pa.array(chosen)), spaces)
            first = np.full(len(found), -1, dtype=np.int64)
            first[found >= 0] = self._first[self._index.documents[found[found >= 0]]]
            ended = self._ends_at(first, spaces, seqnos)
            is_dead = seqnos > self._kept[vbuckets]
            ended.seqnos[is_dead] = _FOREVER
            stays[chosen] = ~ended.is_ended & ~is_dead
            ends.seqnos[chosen], ends.times_us[chosen] = ended.seqnos, ended.times_us
        return stays, ends

    def _write(self, is_current: bool, rows: pa.Table, ends: _Ends) -> None:
        if rows.num_rows == 0:
            return
        is_open = ~ends.is_ended
        given = {
            "valid_to": pa.array(ends.times_us, pa.int64(), mask=is_open).cast(layout.TIME),
            "valid_to_seqno": pa.array(ends.seqnos, pa.int64(), mask=is_open),
        }
        rows = data_files.conformed(rows, self._schema)
        columns = [given[name] if name in given else rows.column(name) for name in self._schema.names]
        self._writers[is_current].write(pa.table(columns, schema=self._schema))

    # --- versions that the changes bring ------------------------------------------------------------------------------

    def _new_versions(self) -> Iterator[tuple[bool, pa.Table, _Ends]]:
        """Yield current and ended versions, without typed columns, and what ends them."""
        ends = self._ends_at(self._next, self._spaces, self._changes.seqnos)
        start = 0
        for rows, marks in self._parts:
            part_ends = ends.of(slice(start, start := start + int(marks.sum())))
            is_version = rows.ops[marks] == change_rows.MUTATION
            for is_current in (True, False):
                chosen = is_version & (part_ends.is_ended != is_current)
                kept = marks.copy()
                kept[marks] = chosen
                if kept.any():
                    yield is_current, self._to_versions(rows.wide(kept)), part_ends.of(chosen)

    def _to_versions(self, changes: pa.Table) -> pa.Table:
        schema = layout.history_schema(xattrs=self._facts.xattrs, form=self._facts.document)
        columns = layout.document_columns(changes, schema)
        columns["valid_from"] = pc.coalesce(changes.column("changed_at"), changes.column("landed_at"))
        nothing = pa.nulls(changes.num_rows, pa.int64())
        columns["valid_to"], columns["valid_to_seqno"] = nothing.cast(layout.TIME), nothing
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _typed(self, versions: pa.Table) -> pa.Table:
        if self._growth is None:
            return versions
        for name, values in self._growth.parse(document_texts(versions.column("document"))).columns.items():
            if name not in versions.schema.names:
                versions = versions.append_column(name, values)
        return versions


def _spaces(parts: Sequence[tuple[change_rows.ChangeRows, Marks]]) -> _Numbers:
    return _joined([key_spaces(rows.vbuckets[marks], rows.ids[marks]) for rows, marks in parts])


def _joined(columns: Sequence[NDArray[np.generic]]) -> _Numbers:
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)
