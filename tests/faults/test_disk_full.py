"""A disk that is full: the store says so, keeps all it has promised, shows nothing of what failed, and goes on.

The disk is full for real: the kernel refuses to let the file grow (RLIMIT_FSIZE, in a process of its own), and writes a
part of what LMDB hands it where a part still fits, as file systems do. That needs no rights, and gives back room when
it is told to. `test_node_disk_full.py` has the same from a client's side.
"""

from __future__ import annotations

import json
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import StoreFull
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import Deletion, Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, Vbuuid
from headwater.protocol.values import Datatype
from headwater.store import settling
from headwater.store.bucket import Bucket, StoreEnvironment
from headwater.store.compaction import compact_vbucket, finish_compaction
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine, check_pages
from headwater.store.opening import close_bucket, create_bucket, open_bucket
from headwater.store.settling import abandon, flush, roll_back, settle_now
from headwater.store.vbuckets import Retention
from support.machine import forked

VBUCKETS = 4
ENVIRONMENT = StoreEnvironment(
    now_ns=lambda: 1_800_000_000_000_000_000, new_vbuuid=lambda: Vbuuid(secrets.randbits(63) + 1)
)
ROOM_BYTES = 600_000


def limit_files(size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def no_limit() -> None:
    limit_files(resource.RLIM_INFINITY)


def new_bucket(folder: Path) -> Bucket:
    facts = BucketFacts(name="full", uuid="0", vbuckets=VBUCKETS)
    bucket = create_bucket(LmdbEngine(folder), facts, environment=ENVIRONMENT, secret=(1, 2))
    for vbucket in range(VBUCKETS):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    bucket.commit_now()
    return bucket


def opened(folder: Path) -> Bucket:
    check_pages(folder / "data.mdb", ["bucket", "vbuckets", "journal", "blocks"])
    return open_bucket(LmdbEngine(folder), environment=ENVIRONMENT, secret=(1, 2))


def value_of(number: int, size: int) -> bytes:
    return (b"%d " % number * (size // 2 + 1))[:size]


def place_of(number: int) -> tuple[int, bytes]:
    return number % VBUCKETS, b"key %d" % (number // 2)


def put(bucket: Bucket, number: int, size: int) -> None:
    """Every document is written twice."""
    vbucket, key = place_of(number)
    bucket.put_mutation(
        vbucket, collection_id=DEFAULT_COLLECTION, key=key, value=value_of(number, size), datatype=Datatype.RAW
    )


def documents(bucket: Bucket) -> dict[tuple[int, bytes], bytes]:
    """All documents by the changes that are stored, each of which is read through the index as well."""
    found: dict[tuple[int, bytes], bytes] = {}
    for vbucket in range(VBUCKETS):
        runs = b"".join(run.tobytes() for run in bucket.runs(vbucket))
        for change in (decode_message(frame, WITH_COLLECTIONS) for frame in decode_frames(runs)):
            assert isinstance(change, Mutation | Deletion)
            found[vbucket, change.key] = change.value
        assert bucket.vbuckets.high_seqnos[vbucket] == bucket.vbuckets.durable_seqnos[vbucket]
    for (vbucket, key), value in found.items():
        entry = bucket.find(vbucket, DEFAULT_COLLECTION, key)
        assert entry is not None
        assert bucket.read(vbucket, entry).value == value
    assert bucket.index.live_documents() == len(found)
    return found


def expected(numbers: list[int], size: int) -> dict[tuple[int, bytes], bytes]:
    return {place_of(number): value_of(number, size) for number in numbers}


def batches(per_commit: int) -> Iterator[list[int]]:
    start = 0
    while True:
        yield list(range(start, start + per_commit))
        start += per_commit


def commit(bucket: Bucket, numbers: list[int], size: int) -> bool:
    """Whether a commit of these could be written. If not, it has been taken back."""
    for number in numbers:
        put(bucket, number, size)
    sealed = bucket.seal()
    assert sealed is not None
    try:
        bucket.persist(sealed)
    except StoreFull as error:
        check_sentence(error)
        put(bucket, numbers[0], size)
        abandon(bucket)
        return False
    bucket.publish(sealed)
    return True


def check_sentence(error: StoreFull) -> None:
    assert error.reason.startswith("the disk is full: no space for the data in ")
    assert error.hint == "Free disk space; the node resumes by itself"


SHAPES = [(10, 100), (400, 40), (3000, 5), (50_000, 1), (300_000, 1), (60_000, 7)]
SHAPE_IDS = [f"{count} of {size}" for size, count in SHAPES]


def fill(folder: Path, report: Path, *, size: int, per_commit: int, settles: bool) -> None:
    """Write until the disk is full, and some more when there is room again. Reports what was acknowledged."""
    bucket = new_bucket(folder)
    settling.YOUNG_COMMITS_MAX = 8 if settles else 10**9
    acknowledged: list[int] = []
    limit_files(ROOM_BYTES)
    failures = 0
    for numbers in batches(per_commit):
        if commit(bucket, numbers, size):
            acknowledged += numbers
            assert len(acknowledged) * size < 100 * ROOM_BYTES, "it never gets full"
        else:
            failures += 1
            assert documents(bucket) == expected(acknowledged, size)
        if failures == 3:
            break
        if settling.is_due(bucket):
            try:
                settle_now(bucket)
            except StoreFull as error:
                check_sentence(error)
    no_limit()
    more = list(range(10**6, 10**6 + 50))
    assert commit(bucket, more, size)
    acknowledged += more
    settle_now(bucket)
    assert documents(bucket) == expected(acknowledged, size)
    report.write_text(json.dumps(acknowledged))


@pytest.mark.parametrize(("size", "per_commit"), SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("settles", [False, True], ids=["journal only", "with settling"])
def test_exactly_what_was_acknowledged_is_there(tmp_path: Path, size: int, per_commit: int, settles: bool) -> None:
    folder, report = tmp_path / "data", tmp_path / "report"
    assert forked(lambda: fill(folder, report, size=size, per_commit=per_commit, settles=settles)) == 0
    bucket = opened(folder)
    assert documents(bucket) == expected(json.loads(report.read_text()), size)
    bucket.engine.close()


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_bucket_that_was_left_on_a_full_disk(tmp_path: Path, is_clean: bool) -> None:
    """It can't be closed in order there; what it holds is what it had promised."""
    folder, report = tmp_path / "data", tmp_path / "report"

    def fill_and_leave() -> None:
        bucket = new_bucket(folder)
        acknowledged: list[int] = []
        limit_files(ROOM_BYTES)
        for numbers in batches(10):
            if not commit(bucket, numbers, 1000):
                break
            acknowledged += numbers
        report.write_text(json.dumps(acknowledged))
        if is_clean:
            put(bucket, 5 * 10**6, 100_000)
            with pytest.raises(StoreFull):
                close_bucket(bucket)

    assert forked(fill_and_leave) == 0
    bucket = opened(folder)
    assert documents(bucket) == expected(json.loads(report.read_text()), 1000)
    facts = bucket.vbuckets.facts[0]
    assert len(facts.failover_log.entries) == 2
    bucket.engine.close()


def test_a_bucket_that_was_killed_can_be_read_on_a_full_disk(tmp_path: Path) -> None:
    """Its branches begin with the first commit. Until then consumers go on with the ones that they know."""
    folder = tmp_path / "data"
    bucket = new_bucket(folder)
    assert commit(bucket, list(range(100)), 1000)
    bucket.engine.close()
    size = (folder / "data.mdb").stat().st_size

    def logs(bucket: Bucket) -> list[FailoverLog]:
        return [facts.failover_log for facts in bucket.vbuckets.facts if facts is not None]

    def open_it() -> None:
        found, seqnos = logs(bucket), bucket.vbuckets.high_seqnos.tolist()
        limit_files(size)
        for _ in range(2):
            full = opened(folder)
            assert documents(full) == expected(list(range(100)), 1000)
            assert not commit(full, list(range(100, 200)), 20_000)
            assert logs(full) == found
            with pytest.raises(StoreFull):
                close_bucket(full)
            abandon(full)
            full.engine.close()
        full = opened(folder)
        no_limit()
        assert commit(full, [100], 1000)
        branched = logs(full)
        assert [log.entries[1:] for log in branched] == [log.entries for log in found]
        assert [log.newest.seqno for log in branched] == seqnos
        close_bucket(full)
        full.engine.close()
        again = opened(folder)
        assert logs(again) == branched
        again.engine.close()

    assert forked(open_it) == 0


def house_keeping(folder: Path) -> None:
    """Compaction, rollback and flush need room themselves. Where there is none they fail, and have not happened."""
    bucket = new_bucket(folder)
    numbers = list(range(600))
    assert commit(bucket, numbers, 2000)
    settle_now(bucket)
    before = documents(bucket)
    limit_files((folder / "data.mdb").stat().st_size)

    def compact() -> None:
        compacted = compact_vbucket(bucket, 1, Retention(history_s=0, history_bytes=0, purge_age_s=0))
        bucket.engine.write(compacted.changes)
        finish_compaction(bucket, 1, compacted)

    fails = 0
    for action in (compact, lambda: roll_back(bucket, 1, Seqno(100)), lambda: flush(bucket)):
        # What is free inside the file would do for a while.
        while True:
            try:
                bucket.engine.write([])
                put(bucket, 10**6, 50_000)
                bucket.commit_now()
            except StoreFull:
                abandon(bucket)
                break
        before = documents(bucket)
        try:
            action()
        except StoreFull:
            fails += 1
            assert documents(bucket) == before
        else:
            before = documents(bucket)
    no_limit()
    assert fails
    put(bucket, 7, 2000)
    bucket.commit_now()
    assert documents(bucket) == {**before, place_of(7): value_of(7, 2000)}
    flush(bucket)
    assert documents(bucket) == {}


def test_house_keeping_on_a_full_disk(tmp_path: Path) -> None:
    assert forked(lambda: house_keeping(tmp_path / "data")) == 0
    bucket = opened(tmp_path / "data")
    assert documents(bucket) == {}
    bucket.engine.close()
