"""Files of the tables: any byte that changes is found, and files of other engines are read as ours are."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater._version import __version__
from headwater.errors import LakeDamaged
from headwater.lake.data_files import DataFile, FileReader, FileWriter, RollingWriter, find_rows, mark_rows, reordered
from headwater.lake.key_index import KeyIndex, key_spaces
from headwater.lake.layout import TIME
from headwater.lake.location import Location

SCHEMA = pa.schema(
    [
        pa.field("vbucket", pa.int32()),
        pa.field("op", pa.string()),
        pa.field("value", pa.binary()),
        pa.field("key", pa.string()),
        pa.field("key_bytes", pa.binary()),
        pa.field("collection_id", pa.int64()),
    ]
)


def rows(count: int, start: int = 0) -> pa.Table:
    numbers = range(start, start + count)
    ops = pa.array(["mutation"] * count).dictionary_encode()
    values = [b"%d" % number for number in numbers]
    keys, ids = [pa.array(values).cast(pa.string()), pa.nulls(count, pa.binary())], pa.array([8] * count)
    return pa.table([pa.array(numbers, pa.int32()), ops, pa.array(values), *keys, ids], SCHEMA.names)


def write(folder: Path) -> DataFile:
    writer = FileWriter(Location(str(folder)), SCHEMA, ranges=("vbucket",), filter_keys=30, has_places=True)
    for start in (0, 30):
        part = rows(30, start)
        writer.write_row_group(part.set_column(1, "op", part.column("op").cast(pa.dictionary(pa.int32(), pa.string()))))
    return writer.close()


def read(folder: Path, path: str) -> list[bytes]:
    with FileReader(Location(str(folder)), DataFile(path=path, size_bytes=0, rows=0), checks=True) as reader:
        return [
            value
            for row_group in reader.row_groups
            for part in reader.batches(row_group)
            for value in part.column("value").to_pylist()
        ]


def test_any_reader_reads_a_sealed_file(tmp_path: Path) -> None:
    file = write(tmp_path)
    path = tmp_path / file.path
    assert path.stat().st_size == file.size_bytes
    assert pq.read_table(path).column("value").to_pylist() == [b"%d" % number for number in range(60)]
    metadata = pq.read_metadata(path)
    assert metadata.metadata[b"headwater"] == __version__.encode()
    assert metadata.num_row_groups == 2
    with FileReader(Location(str(tmp_path)), file, checks=True) as reader:
        assert reader.is_sealed
        assert reader.range_of(1, "vbucket") == (30, 59, False)


def test_every_byte_of_a_file_is_checked(tmp_path: Path) -> None:
    """Every third here: also those that Arrow aborts the process for or reads over, and those of filters and keys."""
    path = write(tmp_path).path
    sound = (tmp_path / path).read_bytes()
    assert pq.read_metadata(tmp_path / path).row_group(0).column(3).bloom_filter_offset is not None
    unseen = []
    for at in range(0, len(sound), 3):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        (tmp_path / path).write_bytes(damaged)
        with contextlib.suppress(LakeDamaged):
            read(tmp_path, path)
            unseen.append(at)
    assert unseen == []


@pytest.mark.parametrize("length", [0, 3, 11, 12, 100, -1, -100])
def test_a_file_that_is_cut_off_is_damaged(tmp_path: Path, length: int) -> None:
    path = write(tmp_path).path
    (tmp_path / path).write_bytes((tmp_path / path).read_bytes()[:length])
    with pytest.raises(LakeDamaged, match="can't be read"):
        read(tmp_path, path)


def test_rows_are_found_by_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are dead already are not found again, and an index that is cut off is damaged."""
    location, file = Location(str(tmp_path)), write(tmp_path)
    asked = KeyIndex(
        pa.array([b"7", b"34", b"none"]), np.arange(3), key_spaces(np.array([7, 34, 0]), np.array([8] * 3))
    )
    found = find_rows(location, file, lambda places: places.find(asked))
    assert found is not None
    assert (found.positions.tolist(), np.flatnonzero(~found.kept).tolist()) == ([7, 34], [7, 34])
    (marked,) = mark_rows(location, [replace(found, positions=np.array([3, 7]))])
    again = find_rows(location, marked, lambda places: places.find(asked))
    assert again is not None
    assert (again.positions.tolist(), np.flatnonzero(~again.kept).tolist()) == ([34], [32])
    monkeypatch.setattr(Location, "read_ranges", lambda _self, _path, ranges: [b"" for _ in ranges])
    with pytest.raises(LakeDamaged, match="ends before its index of keys"):
        find_rows(location, file, lambda places: places.find(asked))


def test_a_footer_may_be_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.lake.data_files._TAIL_BYTES", 64)
    assert len(read(tmp_path, write(tmp_path).path)) == 60


def test_files_of_other_engines_have_the_types_of_ours(tmp_path: Path) -> None:
    """As delta-rs writes them: it has Arrow read texts as views."""
    views = {
        "text": pa.string_view(), "bytes": pa.binary_view(), "large": pa.large_string(),
        "list": pa.list_(pa.string_view()), "struct": pa.struct([pa.field("a", pa.string_view())]),
    }  # fmt: skip
    values = {"text": "a", "bytes": b"b", "large": "c", "list": ["d"], "struct": {"a": "e"}}
    table = pa.table({name: pa.array([values[name], None], type_) for name, type_ in views.items()})
    pairs = pa.array([[("k", b"v")], None], pa.map_(pa.string(), pa.binary()))
    table = table.append_column("map", pairs.cast(pa.map_(pa.string_view(), pa.binary_view())))
    table = table.append_column("vbucket", pa.array([1, 2], pa.int32()))
    pq.write_table(table, tmp_path / "other")
    with FileReader(Location(str(tmp_path)), DataFile(path="other", size_bytes=0, rows=0), checks=True) as reader:
        assert not reader.is_sealed
        assert reader.range_of(0, "vbucket") == (1, 2, True)
        (part,) = reader.batches(0)
        assert part.equals(reader.read(0))
        assert reader.schema.types == part.schema.types
    plain = {"text": pa.string(), "bytes": pa.binary(), "large": pa.string(), "list": pa.list_(pa.string())}
    assert {name: part.schema.field(name).type for name in plain} == plain
    assert part.column("map").type == pairs.type
    assert part.to_pylist() == table.to_pylist()


def test_large_row_groups_come_in_parts(tmp_path: Path) -> None:
    pq.write_table(rows(1000), tmp_path / "large")
    with FileReader(Location(str(tmp_path)), DataFile(path="large", size_bytes=0, rows=0)) as reader:
        parts = [*reader.batches(0, bytes_max=reader.uncompressed_bytes(0) // 3 + 1)]
    assert [part.num_rows for part in parts] == [334, 334, 332]
    assert pa.concat_tables(parts).column("value").to_pylist() == [b"%d" % number for number in range(1000)]


def bounds(values: pa.Array, folder: Path) -> tuple[object, object, int]:
    schema = pa.schema([pa.field("a b", values.type)])
    writer = FileWriter(Location(str(folder)), schema, ranges=["a b"])
    writer.write_row_group(pa.table([values], schema=schema))
    stats = json.loads(writer.close().stats())
    return stats["minValues"].get("a b"), stats["maxValues"].get("a b"), stats["nullCount"]["a b"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([3, None, -7]), (-7, 3, 1)),
        (pa.array(["b" * 40, "a" * 40]), ("a" * 32, "b" * 32 + "\U0010ffff", 0)),
        (pa.array(["b" * 5000, "a"]), ("a", "b" * 32 + "\U0010ffff", 0)),
        (pa.array(["b" * 32]), ("b" * 32, "b" * 32, 0)),
        (pa.array(["\U0010ffff" * 40 + "x"]), ("\U0010ffff" * 32, "\U0010ffff" * 41, 0)),
        (pa.array(["\U0010ffff" * 40]), ("\U0010ffff" * 32, "\U0010ffff" * 40, 0)),
        (pa.array([1_999, 1_001], TIME), ("1970-01-01T00:00:00.001Z", "1970-01-01T00:00:00.002Z", 0)),
        (pa.array([date(2026, 2, 1)]), ("2026-02-01", "2026-02-01", 0)),
        (pa.array([1.5, 2.0]), (1.5, 2.0, 0)),
        (pa.array([1.0, float("inf")]), (None, None, 0)),
        (pa.array([None, None], pa.int64()), (None, None, 2)),
        (pa.array([datetime.max.replace(tzinfo=UTC)], TIME), (None, None, 0)),
        (pa.array([-(10**17)], TIME), (None, None, 0)),
    ],
)
def test_statistics_are_never_narrower_than_what_the_file_holds(
    tmp_path: Path, values: pa.Array, expected: tuple[object, object, int]
) -> None:
    """Texts are cut off, times are of milliseconds, and what JSON or Python does not have is left out."""
    assert bounds(values, tmp_path) == expected


def test_columns_that_repeat_their_values_get_a_dictionary(tmp_path: Path) -> None:
    columns = {"key": [f"k{n}" for n in range(100)], "city": ["Oslo", "Riga"] * 50, "n": [*range(100)]}
    table = pa.table(columns)
    writer = RollingWriter(Location(str(tmp_path)), table.schema, ranges=table.schema.names, partition=())
    writer.write(table)
    row_group = pq.read_metadata(tmp_path / writer.close()[0].path).row_group(0)
    with_dictionary = [row_group.column(number).has_dictionary_page for number in range(len(columns))]
    assert with_dictionary == [False, True, False]


def test_long_values_are_put_in_another_order_without_a_copy() -> None:
    short, long = [None, "a", "b", "c", "d"], [b"%d" % at * 8192 for at in range(4)] + [None]
    parts = [pa.table({"short": short[at : at + 3], "long": long[at : at + 3]}) for at in (0, 3)]
    rows = pa.concat_tables(parts)
    order = np.array([3, 4, 1, 2, 0])
    held_bytes = pa.total_allocated_bytes()
    found = reordered(rows, order)
    assert pa.total_allocated_bytes() - held_bytes < 4096
    assert found.equals(rows.take(pa.array(order)))
    assert [len(chunk) for chunk in found.column("long").chunks] == [2, 2, 1]
    assert reordered(rows.slice(0, 0), order[:0]).num_rows == 0
