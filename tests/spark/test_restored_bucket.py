"""A bucket that is restored from an older copy: the tables lose what it has lost, and have what came instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.driven_source import SimulatedLanding, without_spark
from support.lake_model import table_rows
from support.landings import DEFAULT, SourceBucket, SparkNode, key_of


@pytest.mark.parametrize("crashes", [False, True], ids=["", "to before a crash"])
def test_tables_follow_a_restored_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashes: bool) -> None:
    without_spark(monkeypatch)
    data, copy = tmp_path / "data", tmp_path / "copy"
    with SparkNode(data) as node:
        bucket = SourceBucket(node)
        pipeline = SimulatedLanding(bucket, tmp_path / "lake")

        def put(name: str, count: int) -> None:
            bucket.put([b"%s-%d" % (name.encode(), number) for number in range(count)], b'{"in":"%s"}' % name.encode())

        def stop() -> None:
            bucket.close()
            assert node.process.stop() == 0

        put("kept", 10)
        pipeline.land()
        stop()
        shutil.copytree(data, copy)
        node.process.start()
        if crashes:
            bucket.close()
            node.kill_and_restart()
        for name in ("lost", "lost as well"):
            put(name, 10)
            pipeline.land()
        stop()
        shutil.rmtree(data)
        shutil.copytree(copy, data)
        node.process.start()
        # Beyond the seqnos that the tables have.
        for name in ("instead", "and on", "and on still"):
            put(name, 10)
        pipeline.land()
        pipeline.check_equal()
        rows = table_rows(pipeline.folder / "documents" / DEFAULT)
        names = {key_of(row).rpartition(b"-")[0] for row in rows}
        assert names == {b"kept", b"instead", b"and on", b"and on still"}
        assert {vbucket for batch in pipeline.batches for vbucket in batch.rollbacks} == set(range(node.vbuckets))
        bucket.close()
