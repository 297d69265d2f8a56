"""`headwater verify` while the bucket goes on, fails over or loses collections: each time the right verdict."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater import spark as headwater_spark
from headwater.errors import HeadwaterError, InvalidInput, UnknownCollection
from headwater.lake import verify as verification
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Runner, run_here
from headwater.lake.verify import Verification, VerifyTask, compare
from headwater.lake.verify_judging import BucketReading, StreamRolledBack
from headwater.lake.verify_scan import FindingKind
from headwater.protocol.frames import DurabilityLevel, durability
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from support.driven_source import SimulatedLanding, without_spark
from support.landings import DEFAULT, SourceBucket
from support.node_process import PASSWORD, USER

HOTELS = "_default.hotels"
COMMAND_S_MAX = 120.0
LOOKS = 30
"""At a landing that goes on."""


@pytest.fixture
def landing(bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedLanding:
    without_spark(monkeypatch)
    return SimulatedLanding(bucket, tmp_path / "lake", rules=MergeRules(history=True))


def verify(landing: SimulatedLanding, run: Runner = run_here) -> Verification:
    return compare(landing.bucket.settings, str(landing.folder), run=run)


def put(bucket: SourceBucket, name: str, count: int = 5, into: str = DEFAULT) -> None:
    """Documents in every vbucket."""
    for vbucket in range(4):
        bucket.put(bucket.keys(name, count, vbucket=vbucket), b'{"in":"%s"}' % name.encode(), into=into)


@contextmanager
def being_written(bucket: SourceBucket) -> Iterator[None]:
    """Documents are written, overwritten and removed without a pause, from a connection of its own."""
    writer, is_over = SourceBucket(bucket.node, bucket.name), threading.Event()
    keys = [key for vbucket in range(4) for key in bucket.keys("busy", 50, vbucket=vbucket)]
    failures: list[BaseException] = []

    def write() -> None:
        try:
            number = 0
            while not is_over.is_set():
                for key in keys:
                    writer.put([key], b'{"n":%d}' % number)
                    number += 1
                writer.delete(keys[::7])
        except BaseException as error:
            failures.append(error)
        finally:
            writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert failures == []


def test_a_bucket_that_is_written_to_is_equal_with_changes_pending(landing: SimulatedLanding) -> None:
    put(landing.bucket, "kept")
    put(landing.bucket, "busy", 50)
    landing.land()
    with being_written(landing.bucket):
        seen = [verify(landing) for _ in range(4)]
        code, shown = command(landing.bucket, landing.folder)
    assert [one.sentence for it in seen for one in it.findings] == []
    assert all(it.is_equal for it in seen)
    assert any(it.pending > 0 for it in seen)
    assert all(it.landed >= 20 for it in seen), "what is not written to is compared all the same"
    assert (code, shown["equal"], shown["pending"] > 0) == (0, True, True)
    landing.land()
    assert verify(landing).pending == 0


def test_what_is_wrong_is_found_while_the_bucket_is_written_to(landing: SimulatedLanding) -> None:
    put(landing.bucket, "kept")
    landing.land()
    key = landing.bucket.keys("kept", 1, vbucket=2)[0].decode()
    DeltaTable(landing.folder / "documents" / DEFAULT).update(predicate=f"key = '{key}'", updates={"flags": "1"})
    with being_written(landing.bucket):
        found = verify(landing)
    assert [(one.kind, one.table, one.what) for one in found.findings] == [
        (FindingKind.DIFFERS, f"documents/{DEFAULT}", key)
    ]
    assert found.differing == 1


def test_each_change_is_pending_once(landing: SimulatedLanding) -> None:
    bucket = landing.bucket
    put(bucket, "a")
    landing.land()
    keys = bucket.keys("a", 5, vbucket=1)
    bucket.put(keys[:2], b'"new"')
    bucket.delete(keys[2:3])
    put(bucket, "b", 1)
    found = verify(landing)
    assert (found.is_equal, found.landed, found.pending) == (True, 17, 7)
    assert found.sentence == "Equal: 17 documents in 1 collection; 7 newer changes are pending."


class Ended(BaseException):
    """The landing is."""


def test_documents_that_are_behind_the_changes_are_judged_where_they_are(landing: SimulatedLanding) -> None:
    put(landing.bucket, "a")
    landing.land()
    put(landing.bucket, "a", 3)
    put(landing.bucket, "b")

    def end(step: str) -> None:
        if step == "run merges":
            raise Ended

    landing.step = end
    with pytest.raises(Ended):
        landing.land()
    found = verify(landing)
    assert (found.is_equal, found.landed, found.pending) == (True, 8, 32)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_no_moment_of_a_landing_looks_wrong(landing: SimulatedLanding, seed: int) -> None:
    """Between any two of its steps, while documents come and go, and vbuckets fail over."""
    bucket, dice, seen = landing.bucket, random.Random(seed), Counter[str]()
    keys = [bucket.keys("a", 4, vbucket=vbucket) for vbucket in range(4)]
    put(bucket, "a", 4)

    def look(step: str) -> None:
        if seen.total() >= LOOKS:
            return
        found = verify(landing)
        wrong = [one.sentence for one in found.findings if one.kind is not FindingKind.ROLLBACK_PENDING]
        assert wrong == [], f"before the step {step!r}"
        seen["equal" if found.is_equal else "rollback pending"] += 1
        vbucket = dice.randrange(4)
        if dice.random() < 0.1:
            bucket.fail_over(vbucket, max(0, bucket.high_seqnos()[vbucket] - dice.randrange(6)))
        elif dice.random() < 0.6:
            bucket.put([dice.choice(keys[vbucket])], b'{"n":%d}' % seen.total())

    landing.land()
    landing.step = look
    while seen.total() < LOOKS:
        bucket.put(keys[0][:1], b'{"n":%d}' % seen.total())
        landing.land()
    assert seen["equal"] > 0
    landing.step = lambda step: None
    landing.land()
    landing.check_equal()


# --- failovers --------------------------------------------------------------------------------------------------------


def test_a_failover_that_is_not_landed_is_a_verdict_of_its_own(landing: SimulatedLanding) -> None:
    put(landing.bucket, "a")
    landing.land()
    seqno = landing.bucket.high_seqnos()[1]
    landing.bucket.fail_over(1, seqno - 2)
    found = verify(landing)
    assert not found.is_equal
    assert found.rolled_back == (1,)
    assert {(one.kind, one.table, one.what) for one in found.findings} == {
        (FindingKind.ROLLBACK_PENDING, table, "vbucket 1")
        for table in ("changes", f"documents/{DEFAULT}", f"history/{DEFAULT}")
    }
    assert f"is at seqno {seqno}, with changes above seqno {seqno - 2}; land again" in found.findings[0].sentence
    assert found.sentence == ("Not equal: a failover took back changes of 1 vbucket that the tables hold: land again.")
    assert (found.landed, found.differing) == (15, 0), "the other vbuckets are compared"
    landing.land()
    assert verify(landing).is_equal


def test_a_vbucket_that_ends_in_an_aborted_durable_write_is_equal(landing: SimulatedLanding) -> None:
    """Its last seqno is not visible: tables that are landed then are at it, those that were landed before are not."""
    topology = b'{"topology":[["here","no copy"]]}'
    soon = (durability(DurabilityLevel.MAJORITY, timeout_ms=100),)
    landing.bucket.request(SetVBucket(vbucket=VBucketId(1), state=VBucketState.ACTIVE, value=topology))
    put(landing.bucket, "a")
    for key in landing.bucket.keys("hidden", 2, vbucket=1):
        with pytest.raises(HeadwaterError, match="AMBIGUOUS"):
            landing.bucket.request(
                Set(vbucket=VBucketId(1), collection_id=DEFAULT_COLLECTION, key=key, value=b"{}", frame_infos=soon)
            )
        landing.land()
        found = verify(landing)
        assert [one.sentence for one in found.findings] == []
        assert (found.is_equal, found.pending, found.landed) == (True, 0, 20)


def test_a_failover_that_took_back_nothing_landed_is_none(landing: SimulatedLanding) -> None:
    put(landing.bucket, "a")
    landing.land()
    seqno = landing.bucket.high_seqnos()[1]
    put(landing.bucket, "b")
    landing.bucket.fail_over(1, seqno + 1)
    found = verify(landing)
    assert (found.is_equal, found.rolled_back, found.landed) == (True, (), 20)


def test_a_failover_while_it_reads_is_judged_again(landing: SimulatedLanding) -> None:
    """It comes after the places were judged, and before the bucket is read."""
    put(landing.bucket, "a")
    landing.land()
    rounds: list[list[int]] = []

    def run(tasks: list[VerifyTask]) -> list[object]:
        if not rounds:
            landing.bucket.fail_over(3, landing.bucket.high_seqnos()[3] - 1)
        rounds.append([task.check.group for task in tasks])
        return run_here(tasks)

    found = verify(landing, run)
    assert rounds == [[0, 1], [1]], "only the group of the vbucket is judged again"
    assert found.rolled_back == (3,)
    assert {one.kind for one in found.findings} == {FindingKind.ROLLBACK_PENDING}
    assert found.landed == 15


def test_a_vbucket_that_loses_changes_each_time_is_left_out(
    landing: SimulatedLanding, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(landing.bucket, "a")
    landing.land()
    reads: list[frozenset[int]] = []
    read_into = VerifyTask._read_into

    def roll_back(self: VerifyTask, reading: BucketReading, vbuckets: frozenset[VBucketId]) -> None:
        read_into(self, reading, vbuckets)
        if 1 in vbuckets:
            reads.append(frozenset(vbuckets))
            raise StreamRolledBack(frozenset({1}))

    monkeypatch.setattr(VerifyTask, "_read_into", roll_back)
    found = verify(landing)
    assert len(reads) == verification.ATTEMPTS_MAX
    assert found.rolled_back == (1,)
    assert [(one.kind, one.what) for one in found.findings] == [(FindingKind.ROLLBACK_PENDING, "vbucket 1")]
    assert (found.landed, found.is_equal) == (15, False)


# --- collections ------------------------------------------------------------------------------------------------------


def test_a_collection_that_was_dropped_is_pending(landing: SimulatedLanding) -> None:
    landing.bucket.create_collection(HOTELS)
    put(landing.bucket, "h", into=HOTELS)
    landing.land()
    landing.bucket.drop_collection(HOTELS)
    found = verify(landing)
    assert found.is_equal
    assert {one.name: (one.landed, one.pending) for one in found.collections}[HOTELS] == (0, 20)
    landing.land()
    assert (verify(landing).is_equal, verify(landing).pending) == (True, 0)


def test_a_collection_that_is_new_is_pending(landing: SimulatedLanding) -> None:
    put(landing.bucket, "a")
    landing.land()
    landing.bucket.create_collection(HOTELS)
    put(landing.bucket, "h", 1, into=HOTELS)
    found = verify(landing)
    assert found.is_equal
    assert {one.name: (one.landed, one.pending) for one in found.collections} == {DEFAULT: (20, 0), HOTELS: (0, 4)}


def test_a_part_of_what_was_landed(landing: SimulatedLanding) -> None:
    landing.bucket.create_collection(HOTELS)
    put(landing.bucket, "h", into=HOTELS)
    put(landing.bucket, "a")
    landing.land()
    settings, folder = landing.bucket.settings, str(landing.folder)
    assert [one.name for one in compare(settings, folder, collections=[HOTELS]).collections] == [HOTELS]
    assert compare(settings, folder, collections=[HOTELS]).landed == 20
    assert compare(settings, folder, scopes=["_default"]).landed == 40
    with pytest.raises(UnknownCollection, match="hotel"):
        compare(settings, folder, collections=["_default.hotel"])
    landing.bucket.drop_collection(HOTELS)
    assert compare(settings, folder, collections=[HOTELS]).pending == 20


def test_a_collection_that_is_dropped_while_it_is_read(landing: SimulatedLanding) -> None:
    landing.options["collections"] = f"{HOTELS},{DEFAULT}"
    landing.bucket.create_collection(HOTELS)
    put(landing.bucket, "h", into=HOTELS)
    put(landing.bucket, "a")
    landing.land()
    rounds = 0

    def run(tasks: list[VerifyTask]) -> list[object]:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            landing.bucket.drop_collection(HOTELS)
        return run_here(tasks)

    found = verify(landing, run)
    assert rounds == 2
    assert found.is_equal
    assert {one.name: (one.landed, one.pending) for one in found.collections} == {DEFAULT: (20, 0), HOTELS: (0, 20)}


# --- how it is called -------------------------------------------------------------------------------------------------


def command(bucket: SourceBucket, folder: Path, *options: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "verify", bucket.url, str(folder), "--json", *options],
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        check=False,
        env={**os.environ, "HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_spark_says_the_same(landing: SimulatedLanding, spark: SparkSession) -> None:
    put(landing.bucket, "a")
    landing.land()
    put(landing.bucket, "b", 1)
    # All groups of the lake are in the one file of a small table.
    (path,) = (landing.folder / "documents" / DEFAULT).glob("vbucket_group=*/*.parquet")
    path.unlink()
    here = verify(landing)
    there = headwater_spark.verify(spark, landing.bucket.url, str(landing.folder), user=USER, password=PASSWORD)
    assert replace(here, waiting_s=there.waiting_s) == there, "but for how long the changes have waited"
    assert there.counts[FindingKind.MISSING_FILE, f"documents/{DEFAULT}"] == 1
    assert (there.landed, there.pending, there.differing) == (0, 4, 20)


def test_a_directory_without_tables_is_refused(bucket: SourceBucket, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no tables"):
        compare(bucket.settings, str(tmp_path))
