"""`documents` as Iceberg tables: the files of the Delta tables, no more and no less, after every merge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import LakeInUse, LakeOfOtherBucket
from headwater.lake import iceberg_documents
from headwater.lake.iceberg_changes import IcebergSettings
from headwater.lake.iceberg_documents import IcebergDocuments
from support.lake_model import SmallLake, table_rows

pytest.importorskip("pyiceberg")

DEFAULT = "_default._default"


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not caplog.messages


def check_same(small: SmallLake, documents: IcebergDocuments) -> None:
    table = documents.catalog.load_table(documents.name_of(DEFAULT))
    rows = table.scan().to_arrow().to_pylist()
    expected = table_rows(Path(small.lake.location.uri) / "documents" / DEFAULT)

    def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(({name: row[name] for name in row if name != "vbucket_group"} for row in rows), key=repr)

    assert by_key(rows) == by_key(expected)
    assert table.properties["headwater.batch"] == str(small.lake.last_batch)


def test_updates_removals_a_rollback_and_a_crash(small: SmallLake, settings: IcebergSettings) -> None:
    documents = IcebergDocuments.open(settings, small.lake)
    for number in range(3):
        for vbucket in range(4):
            small.write(vbucket, "hot", value=b'{"n":%d}' % number)
            small.write(vbucket, f"key-{number}")
        small.land()
        assert documents.catch_up(small.lake) == 1
        check_same(small, documents)
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
    check_same(small, documents)


def test_old_snapshots_are_forgotten(
    small: SmallLake, settings: IcebergSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(iceberg_documents, "SNAPSHOTS_KEPT", 2)
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
    check_same(small, documents)


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
        patch.setattr(iceberg_documents, "documents_schema", lambda **_: wide)
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


def test_two_writers(small: SmallLake, settings: IcebergSettings) -> None:
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
    check_same(small, second)
