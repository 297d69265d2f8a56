"""A landing whose changes go through a function: what it takes out is in no table, and the tables are still right."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headwater.cli.land import land
from headwater.errors import InvalidInput
from headwater.lake.chosen_rows import Transform
from headwater.lake.verify import compare
from headwater.landing.query import Landing
from headwater.spark.executors import shippable
from support.driven_source import RunHere
from support.lake_model import table_rows
from support.landings import ALWAYS_FRESH, GROUPS, SourceBucket

MASK = """
import pyarrow as pa, pyarrow.compute as pc
PATTERN = "[a-z]+@example"
def mask(batch):
    masked = pc.replace_substring_regex(batch.column("value"), PATTERN, "***@example")
    index = batch.schema.get_field_index("value")
    return batch.set_column(index, batch.schema.field(index), masked)
"""


def mask(batch: pa.RecordBatch) -> pa.RecordBatch:
    """No address is landed."""
    masked = pc.replace_substring_regex(batch.column("value"), "[a-z]+@example", "***@example")
    index = batch.schema.get_field_index("value")
    return batch.set_column(index, batch.schema.field(index), masked)


def test_personal_data_is_masked_in_all_tables(bucket: SourceBucket, tmp_path: Path) -> None:
    landing = Landing(
        source=bucket.options, into=str(tmp_path), fresh=ALWAYS_FRESH, groups=GROUPS, transform=Transform.of(mask)
    )

    def land_all() -> None:
        lake = landing.prepare()
        landing.start(RunHere(), lake=lake).awaitTermination()

    keys = bucket.keys("user", 5, vbucket=1)
    bucket.put(keys, b'{"mail":"jane@example.com"}')
    kept = bucket.high_seqnos()[1]
    land_all()
    bucket.put(keys, b'{"mail":"john@example.com"}')
    bucket.delete(keys[:1])
    land_all()
    bucket.fail_over(1, kept)
    land_all()
    documents = table_rows(tmp_path / "documents" / "_default._default")
    assert [row["document"] for row in documents] == ['{"mail":"***@example.com"}'] * 5
    values = [row["value"] for row in table_rows(tmp_path / "changes") if row["op"] == "mutation"]
    assert set(values) == {b'{"mail":"***@example.com"}'}

    found = compare(bucket.settings, str(tmp_path), transform=Transform.of(mask))
    assert found.is_equal, [one.sentence for one in found.findings]
    for attempt in (
        lambda: compare(bucket.settings, str(tmp_path)),
        lambda: replace(landing, transform=None).prepare(),
    ):
        with pytest.raises(InvalidInput, match="were landed with the transform mask, not with none"):
            attempt()


def test_a_condition_is_on_what_the_bucket_has(bucket: SourceBucket, tmp_path: Path) -> None:
    """Not on what the transform makes of it, which sees what is landed alone."""
    where = "mail LIKE 'jane@%'"
    landing = Landing(
        source={**bucket.options, "where": where}, into=str(tmp_path), groups=GROUPS, transform=Transform.of(mask)
    )
    bucket.put_each({b"a": b'{"mail":"jane@example.com"}', b"b": b'{"mail":"john@example.com"}', b"c": b"{}"})
    bucket.put([b"c"], b'{"mail":"jane@example.com"}')
    landing.start(RunHere(), lake=landing.prepare()).awaitTermination()
    documents = {row["key"]: row["document"] for row in table_rows(tmp_path / "documents" / "_default._default")}
    assert documents == dict.fromkeys("ac", '{"mail":"***@example.com"}')
    assert {row["key"] for row in table_rows(tmp_path / "changes") if row["op"] == "unmatched"} >= {"b"}
    assert compare(bucket.settings, str(tmp_path), transform=Transform.of(mask)).is_equal


def test_executors_need_not_have_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "masks.py").write_text(MASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    import masks  # type: ignore[import-not-found]

    sent = shippable(masks.mask)
    program = (
        "import pickle, sys, pyarrow as pa\n"
        "mask = pickle.loads(sys.stdin.buffer.read())\n"
        "print(mask(pa.record_batch({'value': [b'a@example']})).column(0).to_pylist())"
    )
    answer = subprocess.run([sys.executable, "-c", program], input=sent.pickled, capture_output=True, check=True)
    assert answer.stdout.strip() == b"[b'***@example']"
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.parametrize(("text", "sentence"), [("nowhere:mask", "No module named"), ("json:no", "has no attribute")])
def test_a_function_that_is_not_there(text: str, sentence: str) -> None:
    command = ["couchbase://127.0.0.1:1/b", "--into", "lake", "--transform", text]
    with pytest.raises(click.BadParameter, match=sentence):
        land.main(command, standalone_mode=False)
