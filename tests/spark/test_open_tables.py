"""The tables are plain Delta tables: whoever reads those, reads these, and sees the same."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest
from deltalake import DeltaTable

from headwater.lake.documents_merge import MergeRules
from support.driven_source import SimulatedLanding, without_spark
from support.landings import SourceBucket

VBUCKET = 1
KEYS = 6
PEOPLE = "_default.people"

Rows = list[dict[str, Any]]


@pytest.fixture
def lake(bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything is in it: updates, removals, a binary document, a rollback, typed columns, rejects, history."""
    without_spark(monkeypatch)
    landed = SimulatedLanding(
        bucket, tmp_path / "lake", rules=MergeRules(history=True), columns={PEOPLE: "name STRING, age INT"}
    )
    keys = bucket.keys("key", KEYS, vbucket=VBUCKET)
    bucket.create_collection(PEOPLE)
    for number, key in enumerate(keys):
        bucket.put([key], b'{"name":"%d","age":%d}' % (number, 20 + number), into=PEOPLE)
    bucket.put([b"odd"], b'{"name":"odd","age":"unknown"}', into=PEOPLE)
    bucket.put([b"binary"], b"\x00\xff")
    landed.land()
    kept_seqno = bucket.high_seqnos()[VBUCKET]
    bucket.delete(keys[:2], of=PEOPLE)
    bucket.put(keys[2:3], b'{"name":"lost","age":99}', into=PEOPLE)
    landed.land()
    bucket.fail_over(VBUCKET, kept_seqno)
    bucket.put(keys[3:4], b'{"name":"new","age":44}', into=PEOPLE)
    landed.land()
    landed.check_equal()
    return landed.folder


# --- readers ------------------------------------------------------------------------------------------------------


def with_deltalake(table: Path) -> Rows:
    rows: Rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    return rows


def with_pandas(table: Path) -> Rows:
    frame = DeltaTable(table).to_pandas()
    return [{name: None if _is_missing(value) else value for name, value in row.items()} for row in _records(frame)]


def _records(frame: pd.DataFrame) -> Rows:
    records: Rows = frame.astype(object).to_dict("records")
    return records


def _is_missing(value: Any) -> bool:
    return not isinstance(value, list | bytes | str) and bool(pd.isna(value))


def with_polars(table: Path) -> Rows:
    return pl.scan_delta(str(table)).collect().to_dicts()


def with_duckdb(table: Path) -> Rows:
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as connection:
        connection.sql("SET TimeZone = 'UTC'")
        try:
            connection.load_extension("delta")
            found = connection.sql(f"SELECT * FROM delta_scan('{table}')")
        except duckdb.Error:
            # Its Delta extension has to be downloaded. Without it, Arrow carries the table over.
            delta = DeltaTable(table).to_pyarrow_table()
            connection.register("delta", delta)
            found = connection.sql("SELECT * FROM delta")
        return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


READERS = {"deltalake": with_deltalake, "pandas": with_pandas, "Polars": with_polars, "DuckDB": with_duckdb}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_all_tables(lake: Path, bucket: SourceBucket, read: Callable[[Path], Rows]) -> None:
    keys = [key.decode() for key in bucket.keys("key", KEYS, vbucket=VBUCKET)]
    documents = {row["key"]: row for row in read(lake / "documents" / PEOPLE)}
    assert {key: (row["name"], row["age"]) for key, row in documents.items()} == {
        **{key: (str(number), 20 + number) for number, key in enumerate(keys)},
        keys[3]: ("new", 44),
        "odd": (None, None),
    }
    assert documents[keys[0]]["document"] == '{"name":"0","age":20}'
    assert documents[keys[0]]["changed_at"] > datetime(2025, 1, 1, tzinfo=UTC)
    (binary,) = read(lake / "documents" / "_default._default")
    assert (binary["key"], binary["document"], bytes(binary["content"])) == ("binary", None, b"\x00\xff")
    (reject,) = read(lake / "rejects" / PEOPLE)
    assert reject["key"] == "odd"
    assert "age" in reject["reason"]
    versions = [row for row in read(lake / "history" / PEOPLE) if row["key"] == keys[3]]
    assert sorted((row["is_current"], row["document"]) for row in versions) == [
        (False, '{"name":"3","age":23}'),
        (True, '{"name":"new","age":44}'),
    ]
    changes = read(lake / "changes")
    assert len([row for row in changes if row["op"] == "rollback"]) == 1
    assert {row["key"] for row in changes if row["void"]} >= set(keys[:3])
    assert len(changes) == len(with_deltalake(lake / "changes"))
