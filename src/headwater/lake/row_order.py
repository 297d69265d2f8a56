"""The order of rows in the files of documents: by key, or first by the columns that a table is clustered by.

So a file covers a range of the sort columns, and a row group a small one: a query on them reads few row groups. Nulls
come last. The order never decides which rows a table holds: an imperfect order only costs time.

A join has sorted row groups of several files, a merge has new rows in any order. `in_order` reads them by their lowest
places, and passes on each row that no later part can precede: for files that do not overlap it holds one row group at a
time. Overlapping parts are held together, up to a bound. Beyond it the rows are passed on as a separate sorted run; the
next join merges the runs.

The tasks of merges and joins use this module, in any process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.kernels.memory import Column
from headwater.lake.data_files import Bound, DataFile, FileReader, aligned, conformed, filtered, reordered
from headwater.lake.layout import has_bounds
from headwater.lake.location import Location

SORT_BYTES = 256 * 1024 * 1024
"""How many bytes of rows are held in memory to be sorted together."""
BY_KEY = ("key",)
_WORD = 8
_MASKS = np.array([(1 << 64) - (1 << 8 * (_WORD - kept)) for kept in range(_WORD + 1)], dtype=np.uint64)
"""By the number of bytes left in a key: the mask of the part of a word that belongs to the key."""

Place = tuple[Bound, ...]
"""Where a row belongs: its values in the sort columns, or in the first few of them."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows that are read when it is their turn."""

    least: Place
    """A lower bound on their places; empty if unknown."""
    read: Callable[[], pa.Table]


def sort_columns(schema: pa.Schema, cluster_by: Iterable[str]) -> tuple[str, ...]:
    """Return the columns to sort by: those of `cluster_by` that exist and have an order, then the key."""
    there = (name for name in cluster_by if name in schema.names and has_bounds(schema.field(name).type))
    return (*there, *BY_KEY)


def files_in_order(
    location: Location,
    files: Iterable[tuple[DataFile, Column | None]],
    schema: pa.Schema,
    cluster_by: Iterable[str],
    unsorted: Iterable[pa.Table] = (),
    left_out: Callable[[pa.Table], None] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of files and of `unsorted`, sorted. Each file comes with marks on its wanted rows, or None for
    all. `unsorted` is read first. Rows that are not marked go to `left_out`."""
    by = sort_columns(schema, cluster_by)
    with ExitStack() as opened:
        parts: list[PlacedRows] = []
        for file, marks in files:
            reader = opened.enter_context(FileReader(location, file))
            parts += placed_row_groups(reader, schema, by, marks, left_out)
        yield from in_order(schema, parts, unsorted, by=by)


def placed_row_groups(
    reader: FileReader,
    schema: pa.Schema,
    by: Sequence[str],
    marks: Column | None = None,
    left_out: Callable[[pa.Table], None] | None = None,
) -> Iterator[PlacedRows]:
    """Yield the row groups of a file, or their marked rows. The file has to stay open until they are read."""
    start, own = 0, reader.schema
    for row_group in reader.row_groups:
        end = start + reader.row_group_rows(row_group)
        kept = None if marks is None else marks[start:end]
        least = _least_place(reader, row_group, own, schema, by)
        yield PlacedRows(least, partial(_read, reader, row_group, schema, kept, left_out))
        start = end


def _least_place(reader: FileReader, row_group: int, own: pa.Schema, schema: pa.Schema, by: Sequence[str]) -> Place:
    """Return the lowest value of each column: no row precedes this place, though they may be from different rows."""
    least: list[Bound] = []
    for name in by:
        if name not in own.names:
            least.append((True, None))
            continue
        # Another engine may have written the column with another type, whose values can't be compared.
        bound = reader.least(row_group, name) if own.field(name).type == schema.field(name).type else None
        if bound is None:
            break
        least.append(bound)
    return tuple(least)


def _place(rows: pa.Table, by: Sequence[str], row: int) -> Place:
    return tuple(_bound(rows.column(name)[row]) for name in by)


def _bound(value: pa.Scalar) -> Bound:
    # Python can't represent all times.
    plain = value.value if pa.types.is_temporal(value.type) else value.as_py()
    return (True, None) if plain is None or plain != plain else (False, plain)


def _read(
    reader: FileReader,
    row_group: int,
    schema: pa.Schema,
    marks: Column | None,
    left_out: Callable[[pa.Table], None] | None,
) -> pa.Table:
    rows = reader.read(row_group)
    if left_out is not None and marks is not None and not marks.all():
        left_out(filtered(rows, ~marks))
    return conformed(rows if marks is None else filtered(rows, marks), schema)


def in_order(
    schema: pa.Schema,
    parts: Iterable[PlacedRows],
    unsorted: Iterable[pa.Table] = (),
    *,
    by: Sequence[str] = BY_KEY,
    bytes_max: int = SORT_BYTES,
) -> Iterator[pa.Table]:
    """Yield the rows of all parts, and of `unsorted`, sorted by some columns."""
    waiting: list[pa.Table] = []
    waiting_bytes = waiting_rows = kept_rows = 0
    for rows, floor in _turns(schema, parts, unsorted):
        if rows.num_rows:
            waiting.append(aligned(rows, schema))
            waiting_bytes += rows.nbytes
            waiting_rows += rows.num_rows
        is_full = waiting_bytes >= bytes_max
        # Kept rows are sorted again next time, so wait until there are twice as many.
        is_worth_it = floor != () and waiting_rows >= 2 * kept_rows
        if not waiting or not (floor is None or is_full or is_worth_it):
            continue
        together = sort_rows(pa.concat_tables(waiting).unify_dictionaries(), by)
        ready = together.num_rows
        if floor is not None and not is_full:
            ready = bisect_left(range(ready), floor, key=partial(_place, together, by))
        if ready:
            yield together.slice(0, ready)
        kept_rows = together.num_rows - ready
        waiting = [together.slice(ready)] if kept_rows else []
        waiting_rows, waiting_bytes = kept_rows, sum(it.nbytes for it in waiting)


def _turns(
    schema: pa.Schema, parts: Iterable[PlacedRows], unsorted: Iterable[pa.Table]
) -> Iterator[tuple[pa.Table, Place | None]]:
    """Yield rows, each with a place that no later row precedes; None at the end."""
    for rows in unsorted:
        yield rows, ()
    ordered = sorted(parts, key=lambda part: part.least)
    for part, following in zip(ordered, [*ordered[1:], PlacedRows((), schema.empty_table)], strict=False):
        yield part.read(), following.least
    yield schema.empty_table(), None


def sort_rows(rows: pa.Table, by: Sequence[str] = BY_KEY) -> pa.Table:
    """Sort rows by some columns, texts by their bytes."""
    if tuple(by) == BY_KEY:
        order = key_order(rows.column("key").combine_chunks())
        return rows if order is None else reordered(rows, order)
    rows = rows.combine_chunks()
    return rows.take(pc.sort_indices(rows.select(by), sort_keys=[(name, "ascending") for name in by]))


def key_order(keys: pa.StringArray) -> NDArray[np.int64] | None:
    """Return the numbers of the rows in the order of their keys; None if they are in order.

    The eight bytes after the common prefix distinguish most keys, and sorting numbers takes a fraction of the time of
    sorting texts. For keys with the same eight bytes, Arrow compares the texts.
    """
    if len(keys) < 2:
        return None
    bounds = pc.min_max(keys)
    least, highest = (bounds[name].as_py().encode() for name in ("min", "max"))
    shared = next((at for at, (a, b) in enumerate(zip(least, highest, strict=False)) if a != b), len(least))
    words = _words(keys, shared)
    if bool(np.all(words[:-1] < words[1:])):
        return None
    order: NDArray[np.int64] = np.argsort(words)
    words = words[order]
    is_tie = np.zeros(len(order), dtype=np.bool_)
    is_tie[1:] = words[1:] == words[:-1]
    is_tie[:-1] |= is_tie[1:]
    if is_tie.any():
        # Keys with the same word are adjacent, so sorting all of them as texts keeps each in the place of its word.
        tied = order[is_tie]
        order[is_tie] = tied[np.asarray(pc.sort_indices(keys.take(pa.array(tied))))]
    return order


def _words(keys: pa.StringArray, skipped: int) -> NDArray[np.uint64]:
    """Return eight bytes of each key as a number that sorts like the bytes; missing bytes are zero."""
    keys = keys.cast(pa.large_binary())
    _, offsets, data = keys.buffers()
    edges = np.frombuffer(offsets, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    padded = (b"" if data is None else data.to_pybytes()) + bytes(_WORD)
    at_any_byte = np.ndarray(len(padded) - _WORD + 1, dtype=">u8", buffer=padded, strides=(1,))
    starts = np.minimum(edges[:-1] + skipped, edges[1:])
    left = np.minimum(edges[1:] - starts, _WORD)
    words: NDArray[np.uint64] = at_any_byte[starts].astype(np.uint64) & _MASKS[left]
    return words
