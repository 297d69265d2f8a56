"""`changes` as an Iceberg table: read back with pyiceberg, it is the Delta table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.errors import InvalidInput, LakeError, LakeInUse, LakeOfOtherBucket
from headwater.lake.iceberg_changes import IcebergChanges, IcebergSettings, load_catalog_of
from headwater.lake.lake import Lake
from support.lake_model import SmallLake, table_rows

pytest.importorskip("pyiceberg")


class Crash(Exception):
    """Between two steps."""


def by_place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["batch"], row["vbucket"], row["seqno"], row["op"]


def iceberg_rows(small: SmallLake, settings: IcebergSettings) -> list[dict[str, Any]]:
    """As anybody reads them."""
    table = load_catalog_of(settings, small.lake.location).load_table(settings.table)
    return sorted(table.scan().to_arrow().to_pylist(), key=by_place)


def check_same(small: SmallLake, settings: IcebergSettings) -> None:
    expected = sorted(table_rows(Path(small.lake.location.uri) / "changes"), key=by_place)
    assert iceberg_rows(small, settings) == expected


def test_it_is_the_delta_table_through_a_rollback(small: SmallLake, settings: IcebergSettings) -> None:
    iceberg = IcebergChanges.open(settings, small.lake)
    assert iceberg.last_batch == -1
    for number in range(3):
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


def test_a_batch_is_copied_once(small: SmallLake, settings: IcebergSettings) -> None:
    small.write(0, "key")
    small.land()
    for _ in range(2):
        iceberg = IcebergChanges.open(settings, small.lake)
        iceberg.catch_up(small.lake)
        assert iceberg.catch_up(small.lake) == 0
    check_same(small, settings)
    assert len(iceberg_rows(small, settings)) == 1


def test_two_processes_copy_a_batch_once(small: SmallLake, settings: IcebergSettings) -> None:
    first, second = IcebergChanges.open(settings, small.lake), IcebergChanges.open(settings, small.lake)
    small.write(0, "a")
    small.land()
    first.catch_up(small.lake)
    with pytest.raises(LakeInUse, match="another process has written to the Iceberg table"):
        second.catch_up(small.lake)
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
    ("catalog", "table", "told"),
    [
        ("sqlite:////nowhere/at/all.db", "shop.changes", "can't be used|can't be opened"),
        ("nobody-has-configured-this", "shop.changes", "catalog can't be used"),
        ("odd://user:secret@host", "shop.changes", "catalog can't be used"),
        ("sqlite:////tmp/x.db", "changes", "is no name of an Iceberg table"),
    ],
)
def test_what_can_not_be_used_is_told(small: SmallLake, catalog: str, table: str, told: str) -> None:
    with pytest.raises((InvalidInput, LakeError), match=told) as caught:
        IcebergChanges.open(IcebergSettings(catalog=catalog, table=table), small.lake)
    assert "secret" not in str(caught.value)
