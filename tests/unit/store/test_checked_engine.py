"""Rows with checksums: what the disk has changed is never given out, and data without checksums gets them.

`formats/` holds the data files of buckets that programs of formats 1 and 2 have written: four vbuckets, blocks and
journal, a collection, deletions, an expiration, and in format 2 a committed and an aborted durable write.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from headwater.errors import DataDamaged, StoreFull, VBucketDamaged
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.store.bucket import Bucket
from headwater.store.checked_engine import CheckedEngine
from headwater.store.data_format import (
    BUCKET_FACTS,
    CLEAN_STOP,
    FORMAT_VERSION,
    MANIFEST,
    BucketFacts,
    block_key,
    commit_key,
    vbucket_key,
)
from headwater.store.engine import Engine, MemoryEngine, PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, open_bucket, stored_facts
from headwater.store.settling import remove_vbucket, reset_vbucket, settle_now
from support.store_harness import (
    SECRET,
    Clock,
    FailingEngine,
    changes_of,
    compact,
    new_bucket,
    put,
    value_of,
)

FORMATS = Path(__file__).parent / "formats"
RUNS = {
    1: ("3297ef86d380", "379064f0b1f1", "2744875d8c19", "e3b0c44298fc"),
    2: ("3297ef86d380", "71c2585491c0", "2744875d8c19", "e3b0c44298fc"),
}
"""What the programs that wrote the files had in each vbucket: the SHA-256 of its changes."""


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
    assert row is not None
    return row[0]


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", [BUCKET_FACTS, MANIFEST, CLEAN_STOP, commit_key(3)], ids=["facts", "manifest", "clean stop", "journal"]
)
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_damage_to_what_belongs_to_the_bucket_refuses_it(key: bytes, at: int) -> None:
    bucket = settled_bucket()
    close_bucket(bucket)
    table = Table.JOURNAL if key == commit_key(3) else Table.BUCKET
    spoil(bucket.engine, table, key, at)
    with pytest.raises(DataDamaged) as raised:
        opened(bucket.engine)
    assert raised.value.hint
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, VBucketDamaged)


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


# --- the formats before -------------------------------------------------------------------------------------------


def data_of_format(version: int, folder: Path) -> LmdbEngine:
    folder.mkdir()
    (folder / "data.mdb").write_bytes(lzma.decompress((FORMATS / f"format-{version}.mdb.xz").read_bytes()))
    return LmdbEngine(folder)


def digests(bucket: Bucket) -> tuple[str, ...]:
    hashes = (sha256(b"".join(bytes(run) for run in bucket.runs(vbucket))) for vbucket in range(4))
    return tuple(digest.hexdigest()[:12] for digest in hashes)


@pytest.mark.parametrize("version", [1, 2])
def test_data_of_the_formats_before_gets_checksums(version: int, tmp_path: Path) -> None:
    engine = data_of_format(version, tmp_path / "data")
    bucket = opened(engine)
    assert digests(bucket) == RUNS[version]
    assert not bucket.vbuckets.damage
    assert stored_facts(engine) == BucketFacts(name="default", uuid="5eed" * 8, vbuckets=4, version=FORMAT_VERSION)
    for vbucket in range(4):
        assert digests(opened(engine)) == RUNS[version]
        spoil(bucket.engine, Table.VBUCKETS, vbucket_key(vbucket), 3)
    spoil(bucket.engine, Table.BLOCKS, last_block(bucket, 2), 3)
    assert sorted(opened(engine).vbuckets.damage) == [0, 1, 2, 3]
    engine.close()


def test_an_upgrade_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every number of steps: what is sealed is not sealed again, and what is not is not read as if it were."""
    monkeypatch.setattr("headwater.store.checked_engine._UPGRADE_STEP_BYTES", 1)
    lmdb = data_of_format(2, tmp_path / "data")
    with lmdb.view() as view:
        rows = [
            PutRow(table, key, bytes(value)) for table in Table for key, value in view.scan(table, b"", b"\xff" * 16)
        ]
    for steps in range(len(rows) + 3):
        memory = MemoryEngine()
        memory.write(rows)
        try:
            opened(FailingEngine(memory, writes_left=steps))
        except StoreFull:
            facts = stored_facts(memory)
            assert facts is not None
            assert facts.version == (FORMAT_VERSION if steps else 2)
        assert digests(opened(memory)) == RUNS[2]
    lmdb.close()
