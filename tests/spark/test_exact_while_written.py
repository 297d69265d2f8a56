"""Exact while the bucket is written to. Each test here is a way in which it was not.

The landing runs without Spark, which changes nothing of what is tested: plans, reads and commits are the real ones.
`test_chaos.py` has it with Spark and all of its processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.cli.land import batch_object, status_line
from headwater.lake.documents_merge import MergeRules
from headwater.landing.planning import Freshness
from support.driven_source import RunHere, SimulatedLanding, read_batch
from support.lake_model import table_rows
from support.landings import DEFAULT, NEVER_FRESH, WAIT_S_MAX, SourceBucket, SparkNode, wait_until
from support.live_bucket import LiveChecker, LiveWriter

BATCHES = 8


def keys_in(folder: Path) -> set[bytes]:
    return {row["key"].encode() for row in table_rows(folder / "documents" / DEFAULT)}


def test_a_batch_read_has_every_document(bucket: SourceBucket) -> None:
    """A document that is rewritten between the plan and the read comes in its newer version."""
    with LiveWriter(bucket, hot=200, cold=0) as writer:
        rows = read_batch(bucket)
    assert {row["key"].encode() for row in rows} >= {*writer.hot}


def test_a_landing_that_ends_has_every_document(bucket: SourceBucket, tmp_path: Path) -> None:
    landing = SimulatedLanding(bucket, tmp_path / "lake")
    with LiveWriter(bucket, hot=200, cold=0) as writer:
        for _ in range(3):
            landing.land()
            assert keys_in(landing.folder) == {*writer.hot}


@pytest.mark.parametrize(
    ("options", "on_read"), [({}, True), ({"maxRowsPerTrigger": "30"}, False)], ids=["all, on read", "limited"]
)
def test_a_landing_that_goes_on_has_what_was_written_before_each_batch(
    bucket: SourceBucket, tmp_path: Path, options: dict[str, str], on_read: bool
) -> None:
    """Hot documents, updates and deletes: no document is older than the table says that it is."""
    landing = SimulatedLanding(bucket, tmp_path / "lake", options=options, rules=MergeRules(on_read=on_read))
    with LiveWriter(bucket, hot=50, cold=100) as writer:
        query = landing.start(every=0.05)
        checker = LiveChecker(landing.folder, writer)
        try:
            while len(landing.batches) < BATCHES:
                checker.look()
                assert not query.awaitTermination(0.02)
            query.processAllAvailable()
        finally:
            query.stop()
    assert checker.compared > 100 * checker.looks / 2
    landing.land()
    checker.check_end(bucket)
    landing.check_equal()


def test_deletes_and_updates_are_in_documents_soon(bucket: SourceBucket, tmp_path: Path) -> None:
    """Ten of each among many do not wait until there are more of them."""
    landing = SimulatedLanding(bucket, tmp_path / "lake", fresh=Freshness())
    keys = [b"key-%d" % number for number in range(300)]
    bucket.put(keys, b'{"n":1}')
    query = landing.start(every=0.05)
    try:
        query.processAllAvailable()
        bucket.delete(keys[:10])
        bucket.put(keys[10:20], b'{"n":2}')
        expected = {key: '{"n":2}' if key in keys[10:20] else '{"n":1}' for key in keys[10:]}
        wait_until(lambda: documents(landing.folder) == expected, query)
    finally:
        query.stop()


def documents(folder: Path) -> dict[bytes, str]:
    return {row["key"].encode(): row["document"] for row in table_rows(folder / "documents" / DEFAULT)}


# --- the lag ------------------------------------------------------------------------------------------------------


class Gate(RunHere):
    """Tasks wait here until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.is_open.set()

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        self.is_open.wait(WAIT_S_MAX)
        return super().__call__(tasks)


def test_the_lag_is_that_of_the_bucket_while_a_batch_takes_long(bucket: SourceBucket, tmp_path: Path) -> None:
    landing, gate = SimulatedLanding(bucket, tmp_path / "lake"), Gate()
    query = landing.landing.start(gate, every=0.05, on_batch=landing.batches.append)
    try:
        bucket.put([b"first"], b"{}")
        query.processAllAvailable()
        wait_until(lambda: query.landing_status.lag_seqnos == 0, query)
        gate.is_open.clear()
        began_s = time.time()
        bucket.put([b"key-%d" % number for number in range(300)], b"{}")
        wait_until(lambda: query.landing_status.lag_seqnos == 300, query)
        wait_until(lambda: (query.landing_status.lag_s or 0) > 2, query)
        status = query.landing_status
        assert status.lag_s is not None
        assert status.documents_age_s is not None
        assert status.documents_age_s >= status.lag_s >= time.time() - began_s - 0.5
        assert "lag 300 seqnos" in str(status_line(status))
        gate.is_open.set()
        query.processAllAvailable()
        wait_until(lambda: query.landing_status.lag_seqnos == 0 and (query.landing_status.lag_s or 9) < 2, query)
        assert batch_object(landing.batches[-1])["documents"] == 301
    finally:
        gate.is_open.set()
        query.stop()


def test_the_lag_of_a_bucket_that_is_away_is_not_known(tmp_path: Path) -> None:
    with SparkNode(tmp_path / "data") as node:
        bucket = SourceBucket(node)
        bucket.put([b"a"], b"{}")
        landing = SimulatedLanding(bucket, tmp_path / "lake")
        query = landing.start(every=0.05)
        try:
            query.processAllAvailable()
            bucket.close()
            node.process.kill()
            wait_until(lambda: query.landing_status.lag_seqnos is None, query)
            node.process.start()
            wait_until(lambda: query.landing_status.lag_seqnos == 0, query)
        finally:
            query.stop()


def test_what_waits_to_be_merged_shows_as_the_age_of_documents(bucket: SourceBucket, tmp_path: Path) -> None:
    """Also after a restart, and by what the tables say."""
    landing = SimulatedLanding(bucket, tmp_path / "lake", fresh=NEVER_FRESH)
    bucket.put([b"a"], b"{}")
    landing.land()
    query = landing.start(every=0.05)
    try:
        wait_until(lambda: query.landing_status.lag_seqnos == 0, query)
        bucket.put([b"b"], b"{}")
        wait_until(lambda: bool(landing.batches), query)
        wait_until(lambda: (query.landing_status.documents_age_s or 0) > 1.5, query)
        assert (query.landing_status.lag_s or 9) < 1.5
        assert (query.landing_status.documents, query.landing_status.pending) == (1, 1)
    finally:
        query.stop()
    again = landing.start(every=0.05)
    try:
        assert (again.landing_status.documents_age_s or 0) > 1.5
        assert (again.landing_status.rows, again.landing_status.batch) == (2, 1), "totals are of the tables"
        again.processAllAvailable()
        assert again.landing_status.documents == 2
        wait_until(lambda: (again.landing_status.documents_age_s or 9) < 1.5, again)
    finally:
        again.stop()
