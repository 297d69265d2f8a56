"""Rows in order, by key or by more: exactly sorted, and with little in memory where files do not overlap."""

from __future__ import annotations

import random
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.lake.data_files import FileReader, FileWriter
from headwater.lake.layout import TIME
from headwater.lake.location import Location
from headwater.lake.row_order import PlacedRows, in_order, key_order, placed_row_groups

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("n", pa.int64())])


def rows(*keys: str) -> pa.Table:
    return pa.table({"key": keys, "n": [len(key) for key in keys]}, schema=SCHEMA)


@pytest.mark.parametrize(
    "keys",
    [
        [f"doc::{number}" for number in range(500)],
        [f"{'ab'[number % 2]}-the-same-for-many-bytes::{number}" for number in range(500)],
        ["", "a", "a\0", "a\0\0", "ab", "é", "\U0010ffff", "z", "same", "same"],
        ["only"],
        [],
    ],
)
def test_keys_are_sorted_by_their_bytes(keys: list[str]) -> None:
    shuffled = random.Random(7).sample(keys, len(keys))
    for given in (shuffled, sorted(keys)):
        order = key_order(pa.array(["cut off", *given], pa.string()).slice(1))
        found = given if order is None else [given[row] for row in order]
        assert [key.encode() for key in found] == sorted(key.encode() for key in keys)


def test_files_that_do_not_overlap_are_read_one_row_group_at_a_time() -> None:
    read: list[str] = []

    def part(letter: str) -> PlacedRows:
        def reading() -> pa.Table:
            read.append(letter)
            return rows(*(f"{letter}{number}" for number in range(4)))

        return PlacedRows(((False, f"{letter}0"),), reading)

    sorted_rows = in_order(SCHEMA, [part(letter) for letter in "dacb"], [rows("b9", "a9")])
    assert next(sorted_rows).column("key").to_pylist() == ["a0", "a1", "a2", "a3", "a9"]
    assert read == ["a"]
    rest = [key for table in sorted_rows for key in table.column("key").to_pylist()]
    assert rest == sorted(rest)
    assert len(rest) == 13


@pytest.mark.parametrize("bytes_max", [1, 2**20])
def test_what_overlaps_is_sorted_together_as_far_as_there_is_memory(bytes_max: int) -> None:
    keys = [f"{number:03}" for number in range(60)]
    parts = [PlacedRows(((False, keys[start]),), lambda start=start: rows(*keys[start::6])) for start in range(6)]  # type: ignore[misc]
    tables = [table.column("key").to_pylist() for table in in_order(SCHEMA, parts, bytes_max=bytes_max)]
    assert all(table == sorted(table) for table in tables)
    found = [key for table in tables for key in table]
    assert sorted(found) == keys
    assert (found == keys) is (bytes_max > 1)


def test_row_groups_are_read_in_the_order_of_several_columns(tmp_path: Path) -> None:
    """Files that do not overlap, one of them of before a column was there, and one of another engine."""
    schema = pa.schema([pa.field("since", TIME), pa.field("n", pa.float64()), SCHEMA.field("key")])
    by, times = ("since", "n", "key"), [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    written = {
        "later": {"since": [times[1], times[2], None, None], "n": [2.5, 1.0, 7.0, None], "key": ["d", "e", "c", "b"]},
        "earlier": {"since": [times[0], times[1]], "n": [9.0, 1.5], "key": ["z", "y"]},
        "no column": {"n": [1.0], "key": ["a"]},
        "foreign": {"since": [times[0]], "n": [3.0], "key": ["f"]},
    }
    location, found = Location.of(str(tmp_path)), []
    with ExitStack() as opened:
        parts: list[PlacedRows] = []
        for columns in written.values():
            own = pa.schema([schema.field(name) for name in columns])
            if columns is written["foreign"]:
                own = own.set(0, pa.field("since", pa.timestamp("ms", tz="UTC")))
            writer = FileWriter(location, own, ranges=own.names)
            for start in range(0, len(columns["key"]), 2):
                here = {name: values[start : start + 2] for name, values in columns.items()}
                writer.write_row_group(pa.table(here, schema=own))
            reader = opened.enter_context(FileReader(location, writer.close()))
            parts += placed_row_groups(reader, schema, by)
        for table in in_order(schema, parts, by=by):
            found.append(table.column("key").to_pylist())
    assert [key for keys in found for key in keys] == ["f", "z", "y", "d", "e", "a", "c", "b"]
    assert [len(part.least) for part in parts] == [3, 3, 3, 3, 0]
    assert len(found) > 2, "what no later row comes before is handed on"


def test_nothing_is_nothing() -> None:
    assert [*in_order(SCHEMA, [], [])] == []
    assert [*in_order(SCHEMA, [], [rows()])] == []
