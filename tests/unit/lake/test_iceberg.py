"""Iceberg tables beside the Delta tables. As pyiceberg reads them, `changes` is the Delta table, and `documents` has
its files, no more and no less, after every merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import InvalidInput, LakeError, LakeInUse, LakeOfOtherBucket
from headwater.lake import iceberg as iceberg_module
from headwater.lake.iceberg import IcebergChanges, IcebergDocuments, IcebergSettings, load_catalog_of
from headwater.lake.lake import Lake
from support.lake_model import SmallLake, table_rows

pytest.importorskip("pyiceberg")

DEFAULT = "_default._default"


class Crash(Exception):
    """Between two steps."""


def by_place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["batch"], row["vbucket"], row["seqno"], row["op"]


def iceberg_rows(small: SmallLake, settings: IcebergSettings) -> list[dict[str, Any]]:
    """As pyiceberg reads them."""
    table = load_catalog_of(settings, small.lake.location).load_table(settings.table)
    return sorted(table.scan().to_arrow().to_pylist(), key=by_place)


def check_same(small: SmallLake, settings: IcebergSettings) -> None:
    expected = sorted(table_rows(Path(small.lake.location.uri) / "changes"), key=by_place)
    assert iceberg_rows(small, settings) == expected


def test_it_is_the_delta_table_through_a_rollback(small: SmallLake, settings: IcebergSettings) -> None:
    iceberg = IcebergChanges.open(settings, small.lake)
    assert iceberg.last_batch == -1
    for number in range(2):
        for vbucket in range(4):
            small.write(vbucket, f"key-{number}", value=b'{"n":%d}' % number)
        small.land()
        assert iceberg.catch_up(small.lake) == 1
        check_same(small, settings)
    small.bucket.change(1, "deletion", 0, b"key-1")
    small.bucket.fail_over(2, 1)
    small.land()
    iceberg.catch_up(small.lake)
    rows = iceberg_rows(small, settings)
    assert [row["op"] for row in rows].count("rollback") == 1
    assert {row["vbucket"] for row in rows if row["void"]} == {2}
    check_same(small, settings)


def test_two_processes_copy_a_batch_once(small: SmallLake, settings: IcebergSettings) -> None:
    first, second = IcebergChanges.open(settings, small.lake), IcebergChanges.open(settings, small.lake)
    small.write(0, "a")
    small.land()
    first.catch_up(small.lake)
    with pytest.raises(LakeInUse, match="another process has written to the Iceberg table"):
        second.catch_up(small.lake)
    assert first.catch_up(small.lake) == IcebergChanges.open(settings, small.lake).catch_up(small.lake) == 0
    check_same(small, settings)


def test_what_a_crash_has_left_out_comes_with_the_next_run(
    small: SmallLake, settings: IcebergSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.table import Transaction

    iceberg = IcebergChanges.open(settings, small.lake)
    small.write(0, "first")
    small.write(1, "first")
    small.land()
    iceberg.catch_up(small.lake)

    def crash(*_: Any) -> None:
        raise Crash

    small.bucket.fail_over(1, 0)
    small.write(0, "second")
    small.land()
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "commit_transaction", crash)
        with pytest.raises(LakeError, match="Crash"):
            iceberg.catch_up(small.lake)
    small.write(0, "third")
    small.land()
    again = IcebergChanges.open(settings, small.lake)
    assert again.catch_up(small.lake) == 2
    check_same(small, settings)


def test_the_files_lie_in_the_directory_of_the_lake(
    settings: IcebergSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = SmallLake(Path("my lake"))
    small.write(0, "key")
    small.land()
    IcebergChanges.open(settings, small.lake).catch_up(small.lake)
    check_same(small, settings)
    assert len(list((tmp_path / "my lake" / "iceberg").rglob("*.parquet"))) == 1


def test_a_table_of_another_bucket_is_refused(small: SmallLake, settings: IcebergSettings, tmp_path: Path) -> None:
    IcebergChanges.open(settings, small.lake)
    other = Lake.create(str(tmp_path / "other"), bucket_uuid="another", vbuckets=4)
    with pytest.raises(LakeOfOtherBucket, match=r"shop\.changes .*--iceberg-table"):
        IcebergChanges.open(settings, other)


@pytest.mark.parametrize(
    ("catalog", "table", "says"),
    [
        ("sqlite:////nowhere/at/all.db", "shop.changes", "can't be used|can't be opened"),
        ("nobody-has-configured-this", "shop.changes", "catalog can't be used"),
        ("odd://user:secret@host", "shop.changes", "catalog can't be used"),
        ("sqlite:////tmp/x.db", "changes", "is not a name of an Iceberg table"),
    ],
)
def test_what_can_not_be_used_is_refused(small: SmallLake, catalog: str, table: str, says: str) -> None:
    with pytest.raises((InvalidInput, LakeError), match=says) as caught:
        IcebergChanges.open(IcebergSettings(catalog=catalog, table=table), small.lake)
    assert "secret" not in str(caught.value)


# --- the documents -------------------------------------------------------------------------------------------------


def check_documents_same(small: SmallLake, documents: IcebergDocuments) -> None:
    table = documents.catalog.load_table(documents.name_of(DEFAULT))
    rows = table.scan().to_arrow().to_pylist()
    expected = table_rows(Path(small.lake.location.uri) / "documents" / DEFAULT)

    def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(({name: row[name] for name in row if name != "vbucket_group"} for row in rows), key=repr)

    assert by_key(rows) == by_key(expected)
    assert table.properties["headwater.batch"] == str(small.lake.last_batch)


def test_updates_removals_a_rollback_and_a_crash(
    small: SmallLake, settings: IcebergSettings, caplog: pytest.LogCaptureFixture
) -> None:
    documents = IcebergDocuments.open(settings, small.lake)
    for number in range(3):
        for vbucket in range(4):
            small.write(vbucket, "hot", value=b'{"n":%d}' % number)
            small.write(vbucket, f"key-{number}")
        small.land()
        assert documents.catch_up(small.lake) == 1
        check_documents_same(small, documents)
    assert documents.catch_up(small.lake) == 0, "nothing was merged meanwhile"
    scan = documents.tables[DEFAULT].scan(row_filter="key = 'zzz'")
    assert [*scan.plan_files()] == [], "the statistics say that it is in no file"
    small.bucket.change(1, "deletion", 0, b"key-1")
    small.land()
    small.bucket.fail_over(2, 1)
    small.land()
    # As after a crash between a merge and this: two merges are missing, and the process is another one.
    documents = IcebergDocuments.open(settings, small.lake)
    assert documents.catch_up(small.lake) == 1
    check_documents_same(small, documents)
    assert not caplog.messages, "pyiceberg has nothing to warn of"


def test_old_snapshots_are_forgotten(
    small: SmallLake, settings: IcebergSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(iceberg_module, "SNAPSHOTS_KEPT", 2)
    documents = IcebergDocuments.open(settings, small.lake)
    for number in range(6):
        small.write(number % 2, f"key-{number}")
        small.land()
        documents.catch_up(small.lake)
    table = documents.catalog.load_table(documents.name_of(DEFAULT))
    kept = [*table.metadata.snapshots]
    assert 2 <= len(kept) < 4
    named = {manifest.manifest_path for snapshot in kept for manifest in snapshot.manifests(table.io)}
    named |= {snapshot.manifest_list for snapshot in kept}
    assert {f"file://{path}" for path in tmp_path.rglob("*.avro")} == named
    check_documents_same(small, documents)


def test_columns_that_come_later(small: SmallLake, settings: IcebergSettings) -> None:
    documents = IcebergDocuments.open(settings, small.lake)
    small.write(0, "a")
    small.land()
    documents.catch_up(small.lake)
    narrow = documents.tables[DEFAULT].schema().as_arrow()
    wide = narrow.append(pa.field("total", pa.float64()))
    small.write(1, "b")
    small.land()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iceberg_module, "documents_schema", lambda **_: wide)
        documents.catch_up(small.lake)
    rows = documents.catalog.load_table(documents.name_of(DEFAULT)).scan().to_arrow()
    assert rows.column("total").to_pylist() == [None, None]


def test_a_table_of_something_else_is_not_touched(small: SmallLake, settings: IcebergSettings) -> None:
    documents = IcebergDocuments.open(settings, small.lake)
    small.write(0, "a")
    small.land()
    documents.catch_up(small.lake)
    documents.tables[DEFAULT].transaction().set_properties({"headwater.table": "a.b_c"}).commit_transaction()
    small.write(0, "b")
    small.land()
    with pytest.raises(LakeOfOtherBucket, match=r"shop.documents__default__default is not of _default._default"):
        IcebergDocuments.open(settings, small.lake).catch_up(small.lake)


def test_two_writers_of_documents(small: SmallLake, settings: IcebergSettings) -> None:
    small.write(0, "a")
    small.land()
    first, second = IcebergDocuments.open(settings, small.lake), IcebergDocuments.open(settings, small.lake)
    first.catch_up(small.lake)
    second.catch_up(small.lake)
    small.write(0, "b")
    small.land()
    first.catch_up(small.lake)
    with pytest.raises(LakeInUse, match="another process has written to the Iceberg table"):
        second.catch_up(small.lake)
    assert second.catch_up(small.lake) == 0, "it looks again"
    check_documents_same(small, second)
