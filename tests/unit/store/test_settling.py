"""Settling: young commits become blocks, of about one size, and nobody who reads notices."""

from __future__ import annotations

import random

import pytest

from headwater.errors import StoreFull
from headwater.store import settling
from headwater.store.bucket import Bucket
from headwater.store.data_format import block_last_seqno, blocks_of
from headwater.store.engine import MemoryEngine, PutRow, Table
from headwater.store.settling import Settling, is_due, settle_now
from support.store_harness import (
    FailingEngine,
    changes_of,
    check_counts,
    get,
    new_bucket,
    put,
    remove,
    seqnos_of,
    state_of,
    value_of,
)

TARGET = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "BLOCK_BYTES_TARGET", TARGET)


def blocks(bucket: Bucket, vbucket: int) -> list[tuple[int, int]]:
    """The last seqno and the size of every block."""
    with bucket.engine.view() as view:
        rows = view.scan(Table.BLOCKS, *blocks_of(vbucket))
        return [(block_last_seqno(key), len(value)) for key, value in rows]


def journal_rows(bucket: Bucket) -> int:
    with bucket.engine.view() as view:
        return sum(1 for _ in view.scan(Table.JOURNAL, b"", b"\xff" * 16))


def write(bucket: Bucket, vbucket: int, count: int, *, value_bytes: int = 100) -> None:
    start = int(bucket.vbuckets.high_seqnos[vbucket])
    for number in range(start + 1, start + 1 + count):
        put(bucket, vbucket, b"k%d" % number, b"%0*d" % (value_bytes, number))
    bucket.commit_now()


# --- blocks -------------------------------------------------------------------------------------------------------


def test_nothing_young_is_nothing_to_do() -> None:
    bucket = new_bucket()
    settle_now(bucket)
    assert (blocks(bucket, 0), bucket.young, journal_rows(bucket)) == ([], {}, 0)


def test_the_journal_is_empty_when_all_is_settled() -> None:
    bucket = new_bucket()
    for _ in range(5):
        write(bucket, 0, 2)
    assert (len(bucket.young), journal_rows(bucket)) == (5, 5)
    settle_now(bucket)
    assert (len(bucket.young), journal_rows(bucket)) == (0, 0)


def test_blocks_have_about_the_target_size() -> None:
    bucket = new_bucket()
    write(bucket, 0, 100)
    settle_now(bucket)
    sizes = [size for _, size in blocks(bucket, 0)]
    frame = len(next(iter(bucket.runs(0)))) // 5
    assert all(TARGET - frame < size <= TARGET for size in sizes[:-1])
    assert sizes[-1] <= TARGET
    assert blocks(bucket, 0)[-1][0] == 100


def test_a_change_that_is_larger_than_a_block_has_one_of_its_own() -> None:
    bucket = new_bucket()
    write(bucket, 0, 1, value_bytes=10)
    write(bucket, 0, 1, value_bytes=5 * TARGET)
    write(bucket, 0, 1, value_bytes=10)
    settle_now(bucket)
    assert [last for last, _ in blocks(bucket, 0)] == [1, 2, 3]
    assert seqnos_of(bucket, 0) == [1, 2, 3]


def test_a_small_last_block_is_filled_up() -> None:
    """However little each round brings, blocks do not stay small."""
    bucket = new_bucket()
    for _ in range(60):
        write(bucket, 0, 1)
        settle_now(bucket)
    sizes = [size for _, size in blocks(bucket, 0)]
    assert min(sizes[:-1]) > TARGET // 2
    assert seqnos_of(bucket, 0) == list(range(1, 61))


def test_a_block_that_is_full_is_left_alone() -> None:
    bucket = new_bucket()
    write(bucket, 0, 1, value_bytes=TARGET)
    settle_now(bucket)
    first = blocks(bucket, 0)
    write(bucket, 0, 1)
    (step,) = Settling(bucket).steps()
    assert [change for change in step if change.table == Table.BLOCKS and not isinstance(change, PutRow)] == []
    settle_now(bucket)
    assert blocks(bucket, 0)[:1] == first


def test_vbuckets_that_are_not_touched_are_not_written() -> None:
    bucket = new_bucket()
    write(bucket, 0, 3)
    write(bucket, 2, 3)
    settle_now(bucket)
    write(bucket, 2, 3)
    (step,) = Settling(bucket).steps()
    assert {change.key[:2] for change in step if change.table == Table.BLOCKS} == {b"\0\2"}


# --- steps --------------------------------------------------------------------------------------------------------


def test_steps_are_bounded_and_the_last_clears_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "STEP_BYTES", 1500)
    bucket = new_bucket(vbuckets=16)
    for vbucket in range(16):
        write(bucket, vbucket, 5)
    settling_round = Settling(bucket)
    sizes = []
    for step in settling_round.steps():
        bucket.engine.write(step)
        sizes.append(sum(len(change.value) for change in step if isinstance(change, PutRow)))
        has_cleared = any(change.table == Table.JOURNAL for change in step)
        assert journal_rows(bucket) == (0 if has_cleared else 16)
    settling_round.finish()
    assert len(sizes) > 4
    assert all(1500 <= size < 2500 for size in sizes[:-1])
    assert bucket.young == {}


def test_commits_between_the_steps_stay_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "STEP_BYTES", 1)
    bucket = new_bucket()
    for vbucket in range(4):
        write(bucket, vbucket, 3)
    settling_round = Settling(bucket)
    for step in settling_round.steps():
        bucket.engine.write(step)
        for vbucket in range(4):
            put(bucket, vbucket, b"k1", b"between")
            bucket.commit_now()
            assert value_of(bucket, vbucket, b"k1") == b"between"
            assert seqnos_of(bucket, vbucket) == list(range(1, int(bucket.vbuckets.high_seqnos[vbucket]) + 1))
    settling_round.finish()
    assert len(bucket.young) == 4 * 4
    settle_now(bucket)
    for vbucket in range(4):
        assert seqnos_of(bucket, vbucket) == list(range(1, 8))
    check_counts(bucket)


def test_a_step_that_fails_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "STEP_BYTES", 1)
    engine = FailingEngine(MemoryEngine())
    bucket = new_bucket(engine)
    for vbucket in range(4):
        write(bucket, vbucket, 3)
    expected = [changes_of(bucket, vbucket) for vbucket in range(4)]
    for writes_left in (0, 1, 2):
        engine.writes_left = writes_left
        with pytest.raises(StoreFull):
            settle_now(bucket)
        assert [changes_of(bucket, vbucket) for vbucket in range(4)] == expected
        assert len(bucket.young) == 4
    engine.writes_left = None
    settle_now(bucket)
    assert [changes_of(bucket, vbucket) for vbucket in range(4)] == expected
    assert (bucket.young, journal_rows(bucket)) == ({}, 0)


def test_when_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = new_bucket()
    write(bucket, 0, 1)
    assert not is_due(bucket)
    monkeypatch.setattr(settling, "YOUNG_COMMITS_MAX", 2)
    assert not is_due(bucket)
    write(bucket, 0, 1)
    assert is_due(bucket)
    monkeypatch.undo()
    monkeypatch.setattr(settling, "YOUNG_BYTES_MAX", 200)
    assert is_due(bucket)
    settle_now(bucket)
    assert not is_due(bucket)


# --- reading ------------------------------------------------------------------------------------------------------


def test_runs_are_complete_from_every_seqno() -> None:
    bucket = new_bucket()
    source = random.Random(2)
    for number in range(80):
        write(bucket, 1, source.randrange(1, 4), value_bytes=source.randrange(1, 400))
        if number % 7 == 3:
            settle_now(bucket)
    high = int(bucket.vbuckets.durable_seqnos[1])
    assert bucket.young
    assert len(blocks(bucket, 1)) > 10
    for after in range(high + 2):
        assert seqnos_of(bucket, 1, after_seqno=after) == list(range(after + 1, high + 1))


def test_runs_show_durable_changes_only() -> None:
    bucket = new_bucket()
    write(bucket, 0, 2)
    put(bucket, 0, b"in flight")
    sealed = bucket.seal()
    put(bucket, 0, b"pending")
    assert seqnos_of(bucket, 0) == [1, 2]
    assert sealed is not None
    bucket.persist(sealed)
    assert seqnos_of(bucket, 0) == [1, 2]
    bucket.publish(sealed)
    assert seqnos_of(bucket, 0) == [1, 2, 3]


def test_runs_that_are_being_read_do_not_change() -> None:
    """A stream may take its time: what it began with is what it gets."""
    bucket = new_bucket()
    write(bucket, 0, 20)
    settle_now(bucket)
    write(bucket, 0, 5)
    runs = bucket.runs(0)
    read = [next(runs).tobytes()]
    settle_now(bucket)
    write(bucket, 0, 5)
    settle_now(bucket)
    read += [run.tobytes() for run in runs]
    again = [run.tobytes() for run in bucket.runs(0)]
    assert b"".join(again).startswith(b"".join(read))
    assert seqnos_of(bucket, 0) == list(range(1, 31))


def test_every_document_can_be_read_wherever_it_is() -> None:
    bucket = new_bucket()
    source = random.Random(4)
    expected: dict[bytes, bytes | None] = {}
    for number in range(300):
        key = b"k%d" % source.randrange(40)
        if source.random() < 0.2 and expected.get(key):
            remove(bucket, 0, key)
            expected[key] = None
        else:
            expected[key] = source.randbytes(source.randrange(300))
            put(bucket, 0, key, expected[key] or b"")
        if number % 5 == 0:
            bucket.commit_now()
        if number % 50 == 0:
            settle_now(bucket)
        assert {key: value_of(bucket, 0, key) for key in expected} == expected
    assert get(bucket, 0, b"never") is None
    bucket.commit_now()
    assert len(state_of(bucket, 0)) == len(expected)
    check_counts(bucket)
