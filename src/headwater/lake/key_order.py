"""Rows in the order of their keys, so that a file of documents holds a range of keys, and a row group a small one.

A merge has sorted row groups of older files and new rows in any order. `in_key_order` reads them in the order of their
least keys, and hands on what no later part can come before: of files that do not overlap it holds one row group at a
time. What overlaps is held together, up to a bound. Beyond it the rows are handed on as a run that is sorted in itself;
the next merge or join brings the runs together.

Called by the tasks of merges and joins, in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.lake.data_files import FileReader, aligned, conformed, filtered
from headwater.protocol.kernels.memory import Column

SORT_BYTES = 256 * 1024 * 1024
"""What is held in memory to be sorted together."""
_WORD = 8
_MASKS = np.array([(1 << 64) - (1 << 8 * (_WORD - kept)) for kept in range(_WORD + 1)], dtype=np.uint64)
"""By the number of bytes that a key has left: what of a word is the key's."""


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """Rows that are read when it is their turn."""

    least: str
    """No key among them is less; empty where that is not known."""
    read: Callable[[], pa.Table]


def row_groups_by_key(reader: FileReader, schema: pa.Schema, marks: Column | None = None) -> Iterator[KeyedRows]:
    """The row groups of a file, or the rows of them that are marked. It has to stay open until they are read."""
    start = 0
    for row_group in reader.row_groups:
        end = start + reader.row_group_rows(row_group)
        kept = None if marks is None else marks[start:end]
        yield KeyedRows(reader.least_key(row_group), partial(_read, reader, row_group, schema, kept))
        start = end


def _read(reader: FileReader, row_group: int, schema: pa.Schema, marks: Column | None) -> pa.Table:
    rows = reader.read(row_group)
    return conformed(rows if marks is None else filtered(rows, marks), schema)


def in_key_order(
    schema: pa.Schema,
    parts: Iterable[KeyedRows],
    unsorted: Iterable[pa.Table] = (),
    *,
    bytes_max: int = SORT_BYTES,
) -> Iterator[pa.Table]:
    """The rows of all parts, and others that are in any order, sorted by the column `key`."""
    waiting: list[pa.Table] = []
    waiting_bytes = waiting_rows = kept_rows = 0
    for rows, floor in _turns(schema, parts, unsorted):
        if rows.num_rows:
            waiting.append(aligned(rows, schema))
            waiting_bytes += rows.nbytes
            waiting_rows += rows.num_rows
        is_full = waiting_bytes >= bytes_max
        # What is kept is sorted again the next time, so there has to be twice as much by then.
        is_worth_it = floor != "" and waiting_rows >= 2 * kept_rows
        if not waiting or not (floor is None or is_full or is_worth_it):
            continue
        together = sort_by_key(pa.concat_tables(waiting).unify_dictionaries())
        kept_rows = 0
        if floor is not None and not is_full:
            kept_rows = together.num_rows - int(pc.sum(pc.less(together.column("key"), floor)).as_py())
        ready = together.num_rows - kept_rows
        if ready:
            yield together.slice(0, ready)
        waiting = [together.slice(ready)] if kept_rows else []
        waiting_rows, waiting_bytes = kept_rows, sum(it.nbytes for it in waiting)


def _turns(
    schema: pa.Schema, parts: Iterable[KeyedRows], unsorted: Iterable[pa.Table]
) -> Iterator[tuple[pa.Table, str | None]]:
    """Rows, and a key that no row of a later turn comes before; None at the end."""
    for rows in unsorted:
        yield rows, ""
    ordered = sorted(parts, key=lambda part: part.least)
    for part, following in zip(ordered, [*ordered[1:], KeyedRows("", schema.empty_table)], strict=False):
        yield part.read(), following.least
    yield schema.empty_table(), None


def sort_by_key(rows: pa.Table) -> pa.Table:
    """The rows by the bytes of their keys."""
    keys = rows.column("key").combine_chunks()
    order = key_order(keys)
    return rows if order is None else rows.combine_chunks().take(pa.array(order))


def key_order(keys: pa.StringArray) -> NDArray[np.int64] | None:
    """The numbers of the rows in the order of their keys; None where they are in order.

    The eight bytes behind what all keys begin with distinguish most keys, and numbers are sorted in a fraction of the
    time that texts take. Of keys that have the same eight, Arrow compares the texts.
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
        # Keys with the same word lie together, so sorting all of them as texts keeps each where its word belongs.
        tied = order[is_tie]
        order[is_tie] = tied[np.asarray(pc.sort_indices(keys.take(pa.array(tied))))]
    return order


def _words(keys: pa.StringArray, skipped: int) -> NDArray[np.uint64]:
    """Eight bytes of each key as a number in the order of the bytes; those that a key does not have are zero."""
    keys = keys.cast(pa.large_binary())
    _, offsets, data = keys.buffers()
    edges = np.frombuffer(offsets, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    padded = (b"" if data is None else data.to_pybytes()) + bytes(_WORD)
    at_any_byte = np.ndarray(len(padded) - _WORD + 1, dtype=">u8", buffer=padded, strides=(1,))
    starts = np.minimum(edges[:-1] + skipped, edges[1:])
    left = np.minimum(edges[1:] - starts, _WORD)
    words: NDArray[np.uint64] = at_any_byte[starts].astype(np.uint64) & _MASKS[left]
    return words
