"""`headwater check` on folders that stores have written: what it finds, what it says, and that it changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.store.data_format import BUCKET_FACTS, MANIFEST, block_key, commit_key
from headwater.store.engine import PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket
from headwater.store.settling import settle_now
from support.store_harness import new_bucket, put


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two buckets with one block of 30 changes in vbucket 2, and a commit in the journal."""
    for name in ("first", "second"):
        engine = LmdbEngine(tmp_path / "data" / "buckets" / name)
        bucket = new_bucket(engine)
        for number in range(30):
            put(bucket, 2, b"key %d" % number, b"[%d]" % number)
        bucket.commit_now()
        settle_now(bucket)
        put(bucket, 1, b"young")
        close_bucket(bucket)
        engine.close()
    return tmp_path / "data"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def spoil(data: Path, table: Table, key: bytes) -> None:
    engine = LmdbEngine(data / "buckets" / "second")
    with engine.view() as view:
        row = bytearray(view.get(table, key) or b"")
    row[40 % len(row)] ^= 1
    engine.write([PutRow(table, key, bytes(row))])
    engine.close()


def contents(data: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in data.rglob("*") if path.is_file()}


def test_sound_data_is_reported_and_left_alone(data: Path) -> None:
    before = contents(data)
    result = run(data)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 buckets, ")
    assert result.stdout.endswith("bytes: all of it is what was written\n")
    assert contents(data) == before
    assert LmdbEngine(data / "buckets" / "first").was_left_alone


def test_each_finding_is_a_line(data: Path) -> None:
    spoil(data, Table.BLOCKS, block_key(2, 30))
    spoil(data, Table.BUCKET, MANIFEST)
    spoil(data, Table.JOURNAL, commit_key(3))
    result = run(data)
    assert result.exit_code == 1
    *lines, summary = result.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{data}/buckets/second/data.mdb: bucket second: ") for line in lines)
    assert "vbucket 2, the block of changes up to seqno 30, in the table blocks is not what was written" in lines[2]
    assert summary.endswith(": 3 findings")
    report = json.loads(run(data, "--json").stdout)
    assert [finding["table"] for finding in report["findings"]] == ["bucket", "journal", "blocks"]
    assert report["findings"][2]["vbucket"] == 2
    assert report["findings"][2]["last_seqno"] == 30


def test_a_file_that_the_engine_can_not_read_is_a_finding(data: Path) -> None:
    path = data / "buckets" / "first" / "data.mdb"
    path.write_bytes(path.read_bytes()[:20_000])
    result = run(data)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{path}: the data in {path.parent} is damaged: ")


def test_what_can_not_be_checked_is_an_error(data: Path, tmp_path: Path) -> None:
    engine = LmdbEngine(data / "buckets" / "first")
    assert "another process uses the data" in run(data).stderr
    engine.close()
    engine = LmdbEngine(data / "buckets" / "first")
    engine.write([PutRow(Table.BUCKET, BUCKET_FACTS, b'{"version": 2}')])
    engine.close()
    assert "the data has format 2, which no release has written" in run(data).stderr
    shutil.rmtree(data / "buckets")
    assert "has no folder named buckets" in run(data).stderr
