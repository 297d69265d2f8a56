"""`headwater verify` while the bucket goes on, fails over or loses collections: each time the right verdict."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater import spark as headwater_spark
from headwater.errors import HeadwaterError, UnknownCollection
from headwater.lake import layout, upkeep
from headwater.lake import verify as verification
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake, Runner, run_here
from headwater.lake.verify import Verification, VerifyTask, compare
from headwater.lake.verify_judging import BucketReading, StreamRolledBack
from headwater.lake.verify_scan import FindingKind
from headwater.protocol.frames import DurabilityLevel, durability
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from support.driven_source import SimulatedLanding
from support.landings import DEFAULT, SourceBucket, run_headwater
from support.live_bucket import Working
from support.node_process import PASSWORD, USER

HOTELS = "_default.hotels"
LOOKS = 30
"""At a landing that goes on."""


@pytest.fixture
def landing(bucket: SourceBucket, tmp_path: Path) -> SimulatedLanding:
    return SimulatedLanding(bucket, tmp_path / "lake", rules=MergeRules(history=True))


def verify(landing: SimulatedLanding, run: Runner = run_here) -> Verification:
    return compare(landing.bucket.settings, str(landing.folder), run=run)


def put(bucket: SourceBucket, name: str, count: int = 5, into: str = DEFAULT) -> None:
    """Documents in every vbucket."""
    for vbucket in range(4):
        bucket.put(bucket.keys(name, count, vbucket=vbucket), b'{"in":"%s"}' % name.encode(), into=into)


class BusyWriter(Working):
    """Writes, overwrites and removes documents without a pause."""

    def _work(self) -> None:
        keys = [key for vbucket in range(4) for key in self._bucket.keys("busy", 50, vbucket=vbucket)]
        while not self._is_over.is_set():
            for number, key in enumerate(keys):
                self._bucket.put([key], b'{"n":%d}' % number)
            self._bucket.delete(keys[::7])


def test_a_bucket_that_is_written_to_is_equal_with_changes_pending(landing: SimulatedLanding) -> None:
    put(landing.bucket, "kept")
    put(landing.bucket, "busy", 50)
    landing.land()
    with BusyWriter("busy writer", landing.bucket):
        seen = [verify(landing) for _ in range(4)]
        done = run_headwater("verify", landing.bucket.url, str(landing.folder), "--json")
    assert [one.sentence for it in seen for one in it.findings] == []
    assert all(it.is_equal for it in seen)
    assert any(it.pending > 0 for it in seen)
    assert all(it.landed >= 20 for it in seen), "what is not written to is compared all the same"
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["equal"], shown["pending"] > 0) == (0, True, True), done.stderr
    landing.land()
    assert verify(landing).pending == 0


def test_what_is_wrong_is_found_while_the_bucket_is_written_to(landing: SimulatedLanding) -> None:
    put(landing.bucket, "kept")
    landing.land()
    key = landing.bucket.keys("kept", 1, vbucket=2)[0].decode()
    DeltaTable(landing.folder / "documents" / DEFAULT).update(predicate=f"key = '{key}'", updates={"flags": "1"})
    with BusyWriter("busy writer", landing.bucket):
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
    landing.bucket.put(landing.bucket.keys("b", 2, vbucket=1), b"{}")
    landing.bucket.fail_over(1, seqno + 1)
    found = verify(landing)
    assert (found.is_equal, found.rolled_back, found.landed) == (True, (), 20), "it took back nothing that was landed"
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


def test_a_failover_while_it_reads_is_judged_again(landing: SimulatedLanding, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the places were judged, and before the bucket is read."""
    # Few changes would be judged as one group.
    monkeypatch.setattr(verification, "_JUDGED_CHANGES", 1)
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


def test_collections_that_are_new_or_were_dropped_are_pending(landing: SimulatedLanding) -> None:
    put(landing.bucket, "a")
    landing.land()
    landing.bucket.create_collection(HOTELS)
    put(landing.bucket, "h", 1, into=HOTELS)
    found = verify(landing)
    assert found.is_equal
    assert {one.name: (one.landed, one.pending) for one in found.collections} == {DEFAULT: (20, 0), HOTELS: (0, 4)}
    landing.land()
    landing.bucket.drop_collection(HOTELS)
    found = verify(landing)
    assert found.is_equal
    assert {one.name: (one.landed, one.pending) for one in found.collections} == {DEFAULT: (20, 0), HOTELS: (0, 4)}
    landing.land()
    assert (verify(landing).is_equal, verify(landing).pending) == (True, 0)


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


@pytest.mark.spark_versions("verify")
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


# --- upkeep of a landing by time: the next run does it when it is due, however short the runs are ---------------------

OLD_S = 30 * 24 * 3600


def leave_file(lake: Path, name: str) -> Path:
    """What an attempt that was killed a month ago has left in a table."""
    path = lake / "changes" / name
    path.write_bytes(b"no commit names me")
    os.utime(path, times=(time.time() - OLD_S,) * 2)
    return path


def test_old_files_are_deleted_when_it_is_due(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = SimulatedLanding(bucket, tmp_path / "lake")

    def land(key: bytes) -> None:
        bucket.put([key], b"{}")
        landing.land()
        assert len(landing.batches) == 1

    land(b"first")
    left = leave_file(landing.folder, "left.parquet")
    land(b"second")
    assert left.exists(), "it was looked for a moment ago"
    monkeypatch.setattr("headwater.landing.loop.TIDY_EVERY_S", 0.0)
    land(b"third")
    assert not left.exists()
    landing.check_equal()


def test_dead_files_are_deleted_by_bytes_also_where_each_run_ends_soon(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READERS_S_MIN", "DEAD_BYTES_MIN"):
        monkeypatch.setattr(upkeep, name, 0)
    landing = SimulatedLanding(bucket, tmp_path / "lake")
    for turn in range(12):
        bucket.put([b"key-%d" % number for number in range(8)], b'{"turn": %d}' % turn)
        query = landing.start()
        query.awaitTermination()
    files = [path for path in landing.folder.rglob("*.parquet") if "_delta_log" not in path.parts]
    status, on_disk = query.landing_status, sum(path.stat().st_size for path in files)
    assert status.live_bytes is not None
    assert status.dead_bytes == on_disk - status.live_bytes
    assert 0 < status.dead_bytes <= 4 * status.live_bytes
    # The newest, and four times as much: that are three files where the newest is the smallest.
    assert len([path for path in files if "documents" in path.parts]) in (4, 5)
    landing.check_equal()


@pytest.mark.parametrize(("asked", "groups"), [(2, 2), (None, 4)])
def test_tables_that_have_grown_are_cut_into_more_groups_unless_their_number_is_given(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, groups: int
) -> None:
    for name, number in (("GROUP_DOCUMENTS", 4), ("GROUPS_MIN", 2)):
        monkeypatch.setattr(layout, name, number)
    landing = SimulatedLanding(bucket, tmp_path / "lake", rules=MergeRules(history=True), groups=asked)
    for turn in range(2):
        bucket.put([b"key-%d-%d" % (turn, number) for number in range(20)], b'{"n": 1}')
        landing.land()
        landing.check_equal()
    lake = Lake.open(str(landing.folder))
    assert lake is not None
    assert (lake.facts.groups, lake.documents) == (groups, 40)
