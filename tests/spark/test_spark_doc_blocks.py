"""The code blocks of the documentation that need a Spark session."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession

from support.doc_blocks import PAGES, Block, blocks_of
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


def test_there_are_some() -> None:
    assert len(BLOCKS) >= 2
