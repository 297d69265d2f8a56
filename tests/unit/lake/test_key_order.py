"""Rows in the order of their keys: exactly sorted, and with little in memory where files do not overlap."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from headwater.lake.key_order import KeyedRows, in_key_order, key_order

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

    def part(letter: str) -> KeyedRows:
        def reading() -> pa.Table:
            read.append(letter)
            return rows(*(f"{letter}{number}" for number in range(4)))

        return KeyedRows(f"{letter}0", reading)

    sorted_rows = in_key_order(SCHEMA, [part(letter) for letter in "dacb"], [rows("b9", "a9")])
    assert next(sorted_rows).column("key").to_pylist() == ["a0", "a1", "a2", "a3", "a9"]
    assert read == ["a"]
    rest = [key for table in sorted_rows for key in table.column("key").to_pylist()]
    assert rest == sorted(rest)
    assert len(rest) == 13


@pytest.mark.parametrize("bytes_max", [1, 2**20])
def test_what_overlaps_is_sorted_together_as_far_as_there_is_memory(bytes_max: int) -> None:
    keys = [f"{number:03}" for number in range(60)]
    parts = [KeyedRows(keys[start], lambda start=start: rows(*keys[start::6])) for start in range(6)]  # type: ignore[misc]
    tables = [table.column("key").to_pylist() for table in in_key_order(SCHEMA, parts, bytes_max=bytes_max)]
    assert all(table == sorted(table) for table in tables)
    found = [key for table in tables for key in table]
    assert sorted(found) == keys
    assert (found == keys) is (bytes_max > 1)


def test_nothing_is_nothing() -> None:
    assert [*in_key_order(SCHEMA, [], [])] == []
    assert [*in_key_order(SCHEMA, [], [rows()])] == []
