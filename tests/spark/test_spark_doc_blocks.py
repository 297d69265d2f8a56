"""The code blocks of the documentation that need a Spark session."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from headwater.lake.layout import GROUP, documents_schema
from headwater.spark import land
from support.doc_blocks import PAGES, ROOT, Block, blocks_of, check_printed, run_python
from support.landings import SourceBucket
from support.node_process import PASSWORD, USER

BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.need == "spark"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_runs(block: Block, spark: SparkSession, bucket: SourceBucket) -> None:
    bucket.put([b"fox"], b'{"legs":4}')
    code = block.code.replace('"me"', repr(USER)).replace('"secret"', repr(PASSWORD))
    for url in ("couchbase://localhost/default", "couchbase://127.0.0.1/travel"):
        code = code.replace(url, bucket.url)
    names = {"spark": spark}
    exec(compile(code, block.place, "exec"), names)
    made = [value for value in names.values() if isinstance(value, DataFrame)]
    assert made
    for frame in made:
        if not frame.isStreaming:
            assert frame.count() >= 0


def test_the_start_page_shows_its_table(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bucket.create_scope("inventory")
    bucket.create_collection("inventory.hotels")
    hotels = {1: ("Graz", 4), 2: ("Lyon", 5), 3: ("Graz", 3)}
    documents = {
        f"hotel::{number}".encode(): json.dumps({"id": number, "city": city, "stars": stars}).encode()
        for number, (city, stars) in hotels.items()
    }
    bucket.put_each(documents, into="inventory.hotels")
    land(spark, bucket.url, "lake", user=USER, password=PASSWORD).awaitTermination()
    [block] = [block for block in blocks_of(ROOT / "docs" / "start.md") if block.need == "lake"]
    check_printed(block, run_python(block, block.code))


def test_the_guide_lists_all_columns_of_documents() -> None:
    guide = (ROOT / "docs" / "guides" / "landing.md").read_text()
    listed = guide.partition("### Columns")[2].partition("\n`changes` has")[0]
    names = {name for row in re.findall(r"^\| (`.*?) \|", listed, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert names == {*documents_schema(xattrs=True).names, GROUP.name}


def test_there_are_some() -> None:
    assert len(BLOCKS) >= 2
