"""Documents as variants: a bucket with odd ones, landed without Spark, and read by decoders that are not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import VariantType

import headwater.spark
from headwater.errors import ColumnsChanged, InvalidInput
from headwater.lake.data_files import RollingWriter, read_files
from headwater.lake.documents_merge import MergeRules
from headwater.lake.iceberg import IcebergSettings
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.lake_look import LakeWatch
from headwater.lake.layout import TableKind
from headwater.lake.variants import to_variants
from headwater.lake.verify import compare
from headwater.landing.query import Landing
from headwater.landing.tasks import LocalRunner
from support.lake_model import Follower, document_text, is_same, said, table_rows
from support.landings import DEFAULT, SourceBucket, key_of, run_headwater

VBUCKET = 2
PLAIN = {
    b"object": b' { "b" : [1, 2.50, null], "a": {"\\u00e4\\n": true, "": "\xc3\xa4"}, "n": 1 } ',
    b"integers": b"[0, -1, 127, -129, 40000, 3000000000, -9223372036854775808, 18446744073709551616]",
    b"decimals": b'{"n": 0.1, "m": -12345678901234567890.123456789, "z": 0.00}',
    b"doubles": b'{"n": 1e5, "m": -1.7976931348623157e308, "k": 12345678901234567e-20}',
    b"scalar": b"17",
    b"null": b"null",
    b"text": '"nur Text: ☃"'.encode(),
    b"long": json.dumps({"n": "x" * 70_000, **{f"field {number}": number for number in range(400)}}).encode(),
    b"deep": b"[" * 100 + b"]" * 100,
}
"""What a variant says all of."""
KEPT = {
    b"twice": b'{"n": 1, "n": 2}',
    b"digits": b'{"n": ' + b"1" * 39 + b"}",
    b"rounded": b'{"n": 1.2345678901234567890e5}',
    b"infinite": b'{"n": 1e400}',
    b"surrogate": b'{"n": "\\ud800"}',
    b"too deep": b"[" * 600 + b"]" * 600,
    b"binary": b"\x00\xff\xfe",
    b"empty": b"",
}
"""What it would change, or is no JSON: its bytes are kept."""


def check_documents(bucket: SourceBucket, folder: Path, keys: set[bytes]) -> None:
    """The table has just these keys, and what the bucket says of each."""
    rows = {key_of(row): row for row in table_rows(folder / "documents" / DEFAULT)}
    assert rows.keys() == keys
    for key, row in rows.items():
        value, text = bucket.get(key), document_text(row)
        assert value is not None
        if text is None:
            assert row["content"] == value, key
        else:
            assert row["content"] is None
            assert is_same(said(text), said(value)), key
    assert {key for key in keys if rows[key]["document"] is None} == keys & KEPT.keys()


@pytest.mark.parametrize("on_read", [False, True])
def test_odd_documents(spark: SparkSession, bucket: SourceBucket, tmp_path: Path, on_read: bool) -> None:
    folder = tmp_path / "lake"
    landing = Landing(
        source=bucket.options,
        into=str(folder),
        lake=LakeSettings(merging=MergeRules(history=True, change_feed=True, on_read=on_read), document="variant"),
    )

    def land() -> None:
        landing.start(LocalRunner(2)).awaitTermination()
        follower.follow()
        found = compare(bucket.settings, str(folder))
        assert found.is_equal, found.findings

    bucket.put_each(PLAIN | KEPT)
    mode = "--merge-on-read" if on_read else "--copy-on-write"
    command = ("land", bucket.url, "--into", str(folder), "--once", "--runner", "local", "--history", mode)
    done = run_headwater(*command, "--change-feed", "--document", "variant")
    assert done.returncode == 0, done.stderr
    check_documents(bucket, folder, {*PLAIN, *KEPT})
    table = folder / "documents" / DEFAULT
    follower = Follower(table)

    # Updates from one column to the other and back, deletions, and a rollback to what was before some of them.
    bucket.put_each({b"object": KEPT[b"twice"], b"twice": PLAIN[b"object"]})
    bucket.delete([b"text", b"digits"])
    land()
    bucket.put_each({b"object": PLAIN[b"object"], b"twice": KEPT[b"twice"]})
    doomed = bucket.keys("doomed", 3, vbucket=VBUCKET)
    bucket.put(doomed[:2], b'{"wrote": "A", "n": 1.50}')
    kept_seqno = bucket.high_seqnos()[VBUCKET]
    bucket.put(doomed[1:], b'{"wrote": "B", "n": 2e5}')
    land()
    bucket.fail_over(VBUCKET, kept_seqno)
    land()
    keys = {*PLAIN, *KEPT, *doomed[:2]} - {b"text", b"digits"}
    check_documents(bucket, folder, keys)
    assert said(document_text(next(it for it in table_rows(table) if key_of(it) == doomed[1])) or "")[0]["wrote"] == "A"
    history = [row for row in table_rows(folder / "history" / DEFAULT) if row["is_current"]]
    assert {key_of(row): row["document"] for row in history} == {
        key_of(row): row["document"] for row in table_rows(table)
    }

    # Engines without the type have its two parts.
    parts = {row["key"]: row["document"] for row in table_rows(table)}
    assert dict(pl.read_delta(str(table)).select("key", "document").iter_rows()) == parts
    scanned = DeltaTable(table).scan(columns=["key", "document"])
    assert dict(duckdb.from_arrow(scanned).fetchall()) == parts
    if not on_read:
        columns = DeltaTable(table).to_pyarrow_table(columns=["key", "document"]).to_pydict()
        assert dict(zip(columns["key"], columns["document"], strict=True)) == parts
        of_files = duckdb.read_parquet(DeltaTable(table).file_uris()).select("key", "document")
        assert dict(of_files.fetchall()) == parts

    # Spark: by Headwater's frame, and by its own reader of Parquet where no file has dead rows.
    frames = [headwater.spark.documents(spark, str(folder), DEFAULT)]
    if not on_read:
        frames.append(spark.read.schema("key STRING, document VARIANT").parquet(*DeltaTable(table).file_uris()))
    for frame in frames:
        assert frame.schema["document"].dataType == VariantType()
        rows = {
            row.key: row
            for row in frame.selectExpr(
                "key", "to_json(document) AS text", "variant_get(document, '$.b[1]', 'decimal(9,2)') AS b"
            ).collect()
        }
        for key in (b"object", b"integers", b"decimals", b"null", b"long"):
            assert is_same(said(rows[key.decode()].text), said(bucket.get(key) or b"")), key
        assert str(rows["object"].b) == "2.50"
        assert rows["twice"].text is None

    # The page shows them as text.
    sample = LakeWatch(Lake.open(str(folder)).location).sample(TableKind.DOCUMENTS, DEFAULT)  # type: ignore[union-attr]
    shown = [row[sample.columns.index("document")] for row in sample.rows]
    assert any(text is not None and text.startswith("{") for text in shown)


def plant(folder: Path, key: str, text: bytes) -> None:
    """Give a document another variant, in a file like ours."""
    lake = Lake.open(str(folder))
    assert lake is not None
    table = lake.tables[DEFAULT].documents
    assert table is not None
    for file in table.log.files():
        rows = pa.concat_tables(read_files(table.log.location, [file]))
        if key in rows["key"].to_pylist():
            (variant,) = to_variants(pa.array([text]))[0].to_pylist()
            pairs = zip(rows["key"].to_pylist(), rows["document"].to_pylist(), strict=True)
            documents = [variant if its_key == key else document for its_key, document in pairs]
            at = rows.schema.get_field_index("document")
            rows = rows.set_column(at, rows.schema.field(at), pa.array(documents, rows.schema.field(at).type))
            writer = RollingWriter(
                table.log.location, rows.schema, ranges=[*file.ranges], partition=file.partition, is_keyed=True
            )
            writer.write(rows)
            table.commit(add=writer.close(), remove=[file])


def test_a_planted_difference_is_found_and_repaired(bucket: SourceBucket, tmp_path: Path) -> None:
    landing = Landing(
        source=bucket.options,
        into=str(tmp_path / "lake"),
        lake=LakeSettings(document="variant", merging=MergeRules(history=True)),
    )
    bucket.put([b"a", b"b"], b'{"n": 1.50, "m": [1, {"x": null}]}')
    landing.start(LocalRunner()).awaitTermination()
    assert compare(bucket.settings, landing.into).is_equal
    for planted in (b'{"n": 1.5, "m": [1, {"x": null}]}', b'{"n": 1.50, "m": [1, {"x": false}]}', b"[]"):
        plant(tmp_path / "lake", "b", planted)
        found = compare(bucket.settings, landing.into)
        assert not found.is_equal
        assert {it.what for it in found.findings if it.kind == "differs"} == {"b"}, planted
        done = run_headwater("repair", bucket.url, landing.into)
        assert done.returncode == 0, done.stderr
        assert compare(bucket.settings, landing.into).is_equal


def test_what_can_not_be_had_with_variants(bucket: SourceBucket, tmp_path: Path) -> None:
    catalog = IcebergSettings(catalog=f"sqlite:///{tmp_path}/catalog.db")

    def landing(document: Any, **others: Any) -> Landing:
        lake = LakeSettings(document=document)
        return Landing(source=bucket.options, into=str(tmp_path / "lake"), lake=lake, **others)

    with pytest.raises(InvalidInput, match="pyiceberg knows no variants"):
        landing("variant", iceberg=catalog).prepare()
    with pytest.raises(InvalidInput, match="'variants' is not a form of documents"):
        landing("variants")
    landing("variant").prepare()
    with pytest.raises(InvalidInput, match="pyiceberg knows no variants"):
        landing(None, iceberg=catalog).prepare()
    with pytest.raises(ColumnsChanged, match="as variant, not as string"):
        landing("string").prepare()
    landing(None).prepare()
