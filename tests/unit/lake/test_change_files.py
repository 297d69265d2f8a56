"""A batch to files of `changes`: sorted, cut by groups, counted, and with rollbacks inside it undone."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.client.batches import RAW_SCHEMA
from headwater.errors import InvalidInput, LakeOutOfStep
from headwater.lake import change_files
from headwater.lake.change_files import ChangeReport, ChangeWriter, sort_rows
from headwater.lake.chosen_rows import Transform
from headwater.lake.layout import LakeFacts
from headwater.lake.location import Location
from headwater.spark.executors import RESULT_SCHEMA, result_batch, results_of
from support.cases import each
from support.lake_model import ModelBucket, batches

VBUCKETS = 8
LANDED_AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def bucket() -> ModelBucket:
    bucket = ModelBucket(VBUCKETS)
    bucket.names[8] = ("inventory", "hotel")
    return bucket


def writer_in(directory: Path, **settings: Any) -> ChangeWriter:
    facts = LakeFacts(bucket_uuid="u", vbuckets=VBUCKETS, groups=4)
    return ChangeWriter(location=Location(str(directory)), facts=facts, batch=5, landed_at=LANDED_AT, **settings)


def rows_of(directory: Path, report: ChangeReport) -> list[dict[str, Any]]:
    return [row for file in report.files for row in pq.read_table(directory / file.path).to_pylist()]


def fill(bucket: ModelBucket, rows: int) -> list[dict[str, object]]:
    for number in range(rows):
        collection = 8 if number % 3 == 0 else 0
        bucket.change((number * 5) % VBUCKETS, "mutation", collection, b"key-%d" % number, b'{"n": 1}')
    everything = [bucket.rows(vbucket) for vbucket in range(VBUCKETS)]
    # As they come from several streams: of each vbucket in order, all of them mixed.
    longest = max(map(len, everything))
    return [rows[at] for at in range(longest) for rows in everything if at < len(rows)]


def test_every_row_is_written_once_in_the_order_of_groups_collections_and_vbuckets(
    tmp_path: Path, bucket: ModelBucket
) -> None:
    rows = fill(bucket, 100)
    writer = writer_in(tmp_path)
    report = writer.write(batches(rows, 7))
    written = rows_of(tmp_path, report)
    facts = writer.facts
    order = [(facts.group_of(row["vbucket"]), row["collection_id"], row["vbucket"], row["seqno"]) for row in written]
    assert order == sorted(order)
    assert sorted((row["vbucket"], row["seqno"]) for row in written) == sorted((r["vbucket"], r["seqno"]) for r in rows)  # type: ignore[type-var]
    assert {(row["batch"], row["landed_at"], row["void"]) for row in written} == {(5, LANDED_AT, False)}
    assert report.rows == 100


def test_the_report_counts_what_merges_are_planned_by(tmp_path: Path, bucket: ModelBucket) -> None:
    rows = fill(bucket, 40)
    bucket.change(7, "collection_dropped", 8)
    bucket.change(0, "deletion", 0, b"key-0")
    report = writer_in(tmp_path).write(batches([*rows, bucket.rows(7)[-1], bucket.rows(0)[-1]], 7))
    facts = writer_in(tmp_path).facts
    expected: dict[tuple[int, int], int] = {}
    for row in [*rows, {"vbucket": 0, "collection_id": 0}]:
        place = row["collection_id"], facts.group_of(row["vbucket"])
        expected[place] = expected.get(place, 0) + 1  # type: ignore[index, arg-type]
    assert report.document_rows == expected
    assert report.collections_gone == {(8, 3)}
    assert report.names == {0: ("_default", "_default"), 8: ("inventory", "hotel")}
    assert report.rollbacks == {}


def test_files_tell_the_ranges_of_what_they_hold(tmp_path: Path, bucket: ModelBucket) -> None:
    report = writer_in(tmp_path).write(batches(fill(bucket, 40), 7))
    (file,) = report.files
    numbers = {"vbucket": (0, 7), "seqno": (1, 5), "collection_id": (0, 8), "batch": (5, 5)}
    assert {name: file.ranges[name] for name in numbers} == numbers
    assert file.ranges["key"] == ("key-0", "key-9")
    assert file.ranges.keys() - numbers.keys() == {"key", "changed_at", "landed_at"}
    assert file.size_bytes == (tmp_path / file.path).stat().st_size
    assert file.rows == 40


def test_row_groups_end_with_groups_of_vbuckets(
    tmp_path: Path, bucket: ModelBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_files, "_GROUP_ROWS_MIN", 20)
    monkeypatch.setattr(change_files, "ROW_GROUP_ROWS", 30)
    writer = writer_in(tmp_path)
    (file,) = writer.write(batches(fill(bucket, 200), 100)).files
    parquet = pq.ParquetFile(tmp_path / file.path)
    for number in range(parquet.num_row_groups):
        vbuckets = parquet.read_row_group(number, ["vbucket"]).column(0).to_pylist()
        assert len({writer.facts.group_of(vbucket) for vbucket in vbuckets}) == 1
        assert len(vbuckets) <= 30
    assert parquet.num_row_groups == 8


def test_what_does_not_fit_the_buffer_goes_to_another_file(tmp_path: Path, bucket: ModelBucket) -> None:
    report = writer_in(tmp_path, buffer_bytes=1000).write(batches(fill(bucket, 40), 4))
    assert len(report.files) > 3
    assert len(rows_of(tmp_path, report)) == 40


@pytest.mark.parametrize("buffer_bytes", [1, 2**27])
@pytest.mark.parametrize("size", [1, 100])
def test_a_rollback_makes_void_what_came_before_it_in_the_batch(
    tmp_path: Path, bucket: ModelBucket, buffer_bytes: int, size: int
) -> None:
    for key in (b"a", b"b", b"c"):
        bucket.change(2, "mutation", 0, key, b"{}")
        bucket.change(3, "mutation", 0, key, b"{}")
    rows = [*bucket.rows(2), *bucket.rows(3)]
    bucket.mark_sent([2, 3])
    bucket.fail_over(2, 1)
    bucket.change(2, "mutation", 0, b"d", b"{}")
    rows += bucket.rows(2, careless=True)
    report = writer_in(tmp_path, buffer_bytes=buffer_bytes).write(batches(rows, size))
    written = rows_of(tmp_path, report)
    assert {(row["vbucket"], row["seqno"], row["key"]) for row in written if row["void"]} == {(2, 2, "b"), (2, 3, "c")}
    assert len(written) == 8
    assert report.rollbacks == {2: 1}
    # It goes into the middle of a snapshot, and that is reported.
    assert report.torn == {2}
    names = {file.path for file in report.files}
    assert len(names) == len(report.files)


def test_of_several_rollbacks_the_furthest_counts(tmp_path: Path, bucket: ModelBucket) -> None:
    bucket.change(2, "mutation", 0, b"a", b"{}")
    rows = bucket.rows(2)
    for seqno in (1, 0):
        bucket.mark_sent([2])
        bucket.fail_over(2, seqno)
        bucket.vbuckets[2].fork_seqno = seqno
        rows += bucket.rows(2)
    report = writer_in(tmp_path).write(batches(rows, 10))
    assert report.rollbacks == {2: 0}
    assert report.torn == set()


def test_after_a_rollback_changes_may_come_again_from_there(tmp_path: Path, bucket: ModelBucket) -> None:
    bucket.change(2, "mutation", 0, b"a", b"{}")
    bucket.change(2, "mutation", 0, b"b", b"{}")
    bucket.mark_sent([2])
    bucket.fail_over(2, 1)
    bucket.change(2, "mutation", 0, b"c", b"{}")
    rows = bucket.rows(2, careless=True)
    assert writer_in(tmp_path, held_seqnos={2: 2}).write(batches(rows, 10)).rows == 2
    bucket.vbuckets[2].fork_seqno = 2
    with pytest.raises(LakeOutOfStep, match="arrived again"):
        writer_in(tmp_path, held_seqnos={2: 2}).write(batches([*bucket.rows(2, careless=True), rows[1]], 10))


def test_a_vbucket_that_the_bucket_does_not_have_is_refused(tmp_path: Path) -> None:
    bucket = ModelBucket(VBUCKETS + 1)
    bucket.change(VBUCKETS, "mutation", 0, b"a", b"{}")
    with pytest.raises(LakeOutOfStep, match="vbucket 8"):
        writer_in(tmp_path).write(batches(bucket.rows(VBUCKETS), 10))


def test_a_writer_is_carried_to_where_it_works(tmp_path: Path, bucket: ModelBucket) -> None:
    writer = pickle.loads(pickle.dumps(writer_in(tmp_path)))
    answer = result_batch(writer.write(batches(fill(bucket, 10), 5)))
    assert answer.schema == RESULT_SCHEMA
    (report,) = results_of((row["number"], row["result"]) for row in answer.to_pylist())
    assert report.rows == 10


def test_nothing_to_write_makes_no_file(tmp_path: Path) -> None:
    assert writer_in(tmp_path).write([]) == ChangeReport()
    assert list(tmp_path.iterdir()) == []


def test_more_collections_than_16_bits_can_number_are_sorted_as_well() -> None:
    facts = LakeFacts(bucket_uuid="u", vbuckets=1024, groups=16)
    rng = np.random.default_rng(1)
    rows = pa.table(
        {"vbucket": rng.integers(0, 1024, 5000).astype(np.int32), "collection_id": rng.integers(0, 100, 5000)}
    )
    ordered = sort_rows(facts, rows).to_pylist()
    keys = [(facts.group_of(row["vbucket"]), row["collection_id"], row["vbucket"]) for row in ordered]
    assert keys == sorted(keys)


@pytest.mark.parametrize("run_rows", [1, 20, 200], ids=["row by row", "short runs", "long runs"])
def test_rows_are_sorted_and_those_of_a_vbucket_keep_their_order(run_rows: int) -> None:
    facts = LakeFacts(bucket_uuid="u", vbuckets=16, groups=4)
    rng = np.random.default_rng(run_rows)
    runs = 60
    columns = {
        "vbucket": np.repeat(rng.integers(0, 16, runs), run_rows).astype(np.int32),
        "collection_id": np.repeat(rng.integers(0, 3, runs), run_rows),
        "seqno": np.arange(runs * run_rows),
    }
    whole = pa.table(columns)
    # As a writer holds them: in pieces that end anywhere.
    pieces = [whole.slice(at, 777) for at in range(0, whole.num_rows, 777)]
    ordered = sort_rows(facts, pa.concat_tables(pieces))
    assert all(column.num_chunks == 1 for column in ordered.columns)
    keys = [
        (facts.group_of(row["vbucket"]), row["collection_id"], row["vbucket"], row["seqno"])
        for row in ordered.to_pylist()
    ]
    assert keys == sorted(keys)
    assert sorted(row[3] for row in keys) == list(range(whole.num_rows))


# --- what a transform may do to a batch, and what not -----------------------------------------------------------------

ROWS = [
    {"op": "mutation", "key": b"a", "value": b'{"email":"a@example.com"}', "datatype": 1},
    {"op": "rollback", "value": b'{"from_seqno":9}'},
    {"op": "deletion", "key": b"b", "value": None},
]
BATCH = pa.RecordBatch.from_pylist(
    [{field.name: None if field.nullable else 0 for field in RAW_SCHEMA} | row for row in ROWS], RAW_SCHEMA
)


def with_column(batch: pa.RecordBatch, name: str, values: list[Any]) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, batch.schema.field(index), pa.array(values, batch.schema.field(index).type))


def mask(batch: pa.RecordBatch) -> pa.RecordBatch:
    return with_column(batch, "value", [b'"masked"'] * batch.num_rows)


def drop_a_row(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.slice(1)


def change_a_seqno(batch: pa.RecordBatch) -> pa.RecordBatch:
    return with_column(batch, "seqno", [5] * batch.num_rows)


def add_a_column(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column("more", pa.nulls(batch.num_rows))


def return_a_table(batch: pa.RecordBatch) -> Any:
    return pa.Table.from_batches([batch])


def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
    return json.loads("{")


def test_documents_are_changed_and_all_other_rows_stay() -> None:
    changed = Transform.of(mask).function()(BATCH)
    assert changed.schema == BATCH.schema
    assert changed.column("value").to_pylist() == [b'"masked"', b'{"from_seqno":9}', b'"masked"']
    assert changed.drop_columns(["value"]).to_pylist() == BATCH.drop_columns(["value"]).to_pylist()


@each(
    ("function", "sentence"),
    [
        (drop_a_row, "drop_a_row was given 3 rows and has returned 2"),
        (change_a_seqno, "change_a_seqno has changed the column seqno"),
        (add_a_column, "add_a_column has returned other columns"),
        (return_a_table, "return_a_table has returned a Table"),
        (fail, "fail has failed: JSONDecodeError"),
    ],
)
def test_what_it_may_not_do(function: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Transform.of(function).function()(BATCH)
    assert sentence in str(caught.value)


def test_what_is_no_transform() -> None:
    for none in (lambda batch: batch, "mask"):
        with pytest.raises(InvalidInput, match="can't be"):
            Transform.of(none)
