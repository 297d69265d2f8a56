"""Rows with checksums: what the disk has changed is never given out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from headwater.errors import DataDamaged, VBucketDamaged
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import vbucket_of
from headwater.store.bucket import Bucket
from headwater.store.checked_engine import LAST, CheckedEngine
from headwater.store.data_format import BUCKET_FACTS, CLEAN_STOP, MANIFEST, block_key, vbucket_key
from headwater.store.engine import Engine, MemoryEngine, PutRow, Table
from headwater.store.opening import close_bucket, open_bucket
from headwater.store.settling import remove_vbucket, reset_vbucket, settle_now
from support.store_harness import SECRET, Clock, changes_of, compact, new_bucket, put, value_of


def opened(engine: Engine) -> Bucket:
    return open_bucket(engine, environment=Clock().environment(), secret=SECRET)


def settled_bucket(engine: Engine | None = None) -> Bucket:
    """Vbuckets 0 to 2 with documents in blocks and some in the journal."""
    bucket = new_bucket(engine or MemoryEngine())
    for number in range(90):
        put(bucket, number % 3, b"key %d" % number, b'{"value":"%s"}' % (b"%d" % number * 200))
    bucket.commit_now()
    settle_now(bucket)
    put(bucket, 0, b"young")
    bucket.commit_now()
    return bucket


def spoil(engine: CheckedEngine, table: Table, key: bytes, at: int) -> None:
    """Flip a bit of a stored row, below the checksums."""
    with engine.unchecked.view() as view:
        row = bytearray(view.get(table, key) or b"")
    row[at] ^= 0x10
    engine.unchecked.write([PutRow(table, key, bytes(row))])


def last_block(bucket: Bucket, vbucket: int) -> bytes:
    with bucket.engine.view() as view:
        row = view.last_before(Table.BLOCKS, block_key(vbucket, 2**64 - 1))
    return row[0]


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [BUCKET_FACTS, MANIFEST, CLEAN_STOP], ids=["facts", "manifest", "clean stop"])
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_damage_to_what_belongs_to_the_bucket_refuses_it(key: bytes, at: int) -> None:
    bucket = settled_bucket()
    close_bucket(bucket)
    spoil(bucket.engine, Table.BUCKET, key, at)
    with pytest.raises(DataDamaged) as raised:
        opened(bucket.engine)
    assert raised.value.hint
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, VBucketDamaged)


def test_damage_to_a_commit_stops_the_vbuckets_that_it_has_changes_of() -> None:
    """Every bit of it, one after the other. The keys are in the vbuckets that clients would put them into."""
    bucket = settled_bucket()
    keys = {int(vbucket_of(key, 4)): key for key in (b"key-%d" % number for number in range(20))}
    for vbucket in (0, 2):
        put(bucket, vbucket, keys[vbucket], b"1")
    bucket.commit_now()
    with bucket.engine.unchecked.view() as view:
        key, row = view.last_before(Table.JOURNAL, LAST) or (b"", b"")
        sound = bytes(row)
    stopped: Counter[tuple[int, ...]] = Counter()
    for at in range(len(sound) * 8):
        spoiled = bytearray(sound)
        spoiled[at // 8] ^= 1 << at % 8
        bucket.engine.unchecked.write([PutRow(Table.JOURNAL, key, bytes(spoiled))])
        again = opened(bucket.engine)
        assert set(again.vbuckets.damage) >= {0, 2}, f"bit {at}"
        stopped[tuple(again.vbuckets.damage)] += 1
        if 1 not in again.vbuckets.damage:
            assert value_of(again, 1, b"key 1") is not None
    assert stopped.keys() == {(0, 2), (0, 1, 2, 3)}
    assert stopped[0, 2] > len(sound) * 4, "most of a commit is documents"
    # A copy that is fetched again has nothing to do with it any more, and the last one takes the commit along.
    reset_vbucket(again, 0)
    assert list(opened(again.engine).vbuckets.damage) == [0, 2]
    for vbucket in list(again.vbuckets.damage):
        reset_vbucket(again, vbucket)
    assert not opened(again.engine).vbuckets.damage


def read_a_document(bucket: Bucket) -> None:
    entry = bucket.find(1, 0, b"key 1")
    assert entry is not None
    bucket.read(1, entry)


def read_all_changes(bucket: Bucket) -> None:
    changes_of(bucket, 1)


def compact_all(bucket: Bucket) -> None:
    compact(bucket, 1)


@pytest.mark.parametrize("read", [read_a_document, read_all_changes, compact_all])
def test_damage_found_while_it_runs_stops_the_vbucket_alone(read: Callable[[Bucket], None]) -> None:
    bucket = settled_bucket()
    found: list[VBucketDamaged] = []
    bucket.on_damage = found.append
    spoil(bucket.engine, Table.BLOCKS, last_block(bucket, 1), 100)
    for _ in range(2):
        with pytest.raises(VBucketDamaged, match=r"bucket default: vbucket 1, .* in the table blocks"):
            read(bucket)
    assert [error.vbucket for error in found] == [1]
    assert bucket.vbuckets.state(1) is VBucketState.DEAD
    assert [value_of(bucket, vbucket, b"key %d" % vbucket) is not None for vbucket in (0, 2)] == [True, True]


def test_what_is_young_settles_behind_a_damaged_block() -> None:
    """The block is not read, let alone written again with a checksum that fits."""
    bucket = settled_bucket()
    key = last_block(bucket, 0)
    spoil(bucket.engine, Table.BLOCKS, key, 100)
    for number in range(90):
        put(bucket, 0, b"more %d" % number, b"[%s]" % (b"1," * 500 + b"1"))
    bucket.commit_now()
    settle_now(bucket)
    assert list(opened(bucket.engine).vbuckets.damage) == [0]
    assert last_block(bucket, 0) > key


@pytest.mark.parametrize("table", [Table.BLOCKS, Table.VBUCKETS])
def test_a_damaged_vbucket_is_removed_or_emptied_for_a_copy(table: Table) -> None:
    bucket = settled_bucket()
    spoil(bucket.engine, table, last_block(bucket, 1) if table is Table.BLOCKS else vbucket_key(1), 20)
    again = opened(bucket.engine)
    again.set_vbucket_state(1, VBucketState.REPLICA)
    assert again.vbuckets.state(1) is VBucketState.DEAD
    reset_vbucket(again, 1)
    assert (again.vbuckets.state(1), again.vbuckets.damage) == (VBucketState.REPLICA, {})
    assert (changes_of(again, 1), int(again.vbuckets.high_seqnos[1])) == ([], 0)
    again = opened(bucket.engine)
    assert (again.vbuckets.state(1), again.vbuckets.damage) == (VBucketState.REPLICA, {})
    remove_vbucket(again, 1)
    assert not opened(bucket.engine).vbuckets.exists(1)


def test_a_vbucket_that_has_lost_its_facts_is_not_forgotten() -> None:
    """The name of its row was changed: as a vbucket of its own it is not sound, and the changes have no facts."""
    bucket = settled_bucket()
    with bucket.engine.unchecked.view() as view:
        facts = bytes(view.get(Table.VBUCKETS, vbucket_key(1)) or b"")
    remove_vbucket(bucket, 3)
    bucket.engine.unchecked.write([PutRow(Table.VBUCKETS, vbucket_key(3), facts)])
    assert list(opened(bucket.engine).vbuckets.damage) == [3]
