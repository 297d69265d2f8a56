"""What a replica takes in: checked, copied, entered, and all of it or nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from headwater.errors import MalformedMessage, SnapshotViolation
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.frames import stream_id
from headwater.protocol.manifest import CollectionCreated, encode_event
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation, SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import (
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    Cas,
    CollectionId,
    ManifestUid,
    ScopeId,
    Seqno,
    VBucketId,
    Vbuuid,
)
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs
from headwater.store import commits, receiving
from headwater.store.bucket import Bucket
from headwater.store.data_format import blocks_of
from headwater.store.engine import Table
from headwater.store.runs import as_run
from headwater.store.search import Search, SearchedBucket, search_changes
from headwater.store.settling import abandon, roll_back, settle_now
from support.store_harness import facts_of, new_bucket, put, reopened

VBUCKET = 1
END = Seqno(100)
XATTRS = encode_xattrs(ValueParts(xattrs={"_a": b"1", "b": b"2"}, body=b"{}"))


@pytest.fixture
def bucket() -> Bucket:
    return new_bucket(state=VBucketState.REPLICA)


def _set(seqno: int, key: bytes = b"k", **fields: Any) -> Mutation:
    given = {"cas": Cas(seqno << 16), "value": b"{}", "datatype": Datatype.JSON, "collection_id": CollectionId(0)}
    return Mutation(
        **{**given, "vbucket": VBucketId(VBUCKET), "opaque": 0x1000, "seqno": Seqno(seqno), "rev_seqno": 1, "key": key,
           **fields}
    )  # fmt: skip


def _remove(kind: type[Deletion] | type[Expiration], seqno: int, key: bytes = b"k", **fields: Any) -> Any:
    given = {"cas": Cas(seqno << 16), "collection_id": CollectionId(0), "delete_time": 77, "rev_seqno": 5}
    return kind(
        **{**given, "vbucket": VBucketId(VBUCKET), "opaque": 0x1000, "seqno": Seqno(seqno), "key": key, **fields}
    )


def _receive(bucket: Bucket, *changes: Any, end: int = END) -> receiving.Received:
    run = as_run(b"".join(change.encode() for change in changes))
    return receiving.receive_run(bucket, VBUCKET, run, end_seqno=Seqno(end))


def _log(bucket: Bucket) -> bytes:
    bucket.commit_now()
    return b"".join(run.tobytes() for run in bucket.runs(VBUCKET))


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_is_stored_as_it_came_but_for_its_opaque(bucket: Bucket) -> None:
    changes = [
        _set(1, b"a", expiry=99, flags=3),
        _set(4, b"b", value=XATTRS, datatype=Datatype.JSON | Datatype.XATTR),
        _remove(Deletion, 5, b"a", value=XATTRS, datatype=Datatype.XATTR),
        _remove(Expiration, 9, b"b"),
        _set(10, b"a", collection_id=CollectionId(0x1234)),
    ]
    received = _receive(bucket, *changes)
    assert received.high_seqno == 10
    assert not received.has_to_be_decoded
    assert _log(bucket) == b"".join(replace(change, opaque=0).encode() for change in changes)
    assert bucket.vbuckets.high_seqnos[VBUCKET] == bucket.vbuckets.durable_seqnos[VBUCKET] == 10
    assert bucket.vbuckets.max_cas[VBUCKET] == 10 << 16
    assert bucket.vbuckets.superseded[VBUCKET] == 2
    assert bucket.vbuckets.deleted_revs[VBUCKET] == 6, "an expiration leaves one revision more behind"


def test_what_is_pending_is_read(bucket: Bucket) -> None:
    _receive(bucket, _set(1, b"a", value=b"[1]"), _set(2, b"b", value=b"[2]"), _set(3, b"a", value=b"[3]"))
    for key, value in ((b"a", b"[3]"), (b"b", b"[2]")):
        entry = bucket.find(VBUCKET, CollectionId(0), key)
        assert entry is not None
        assert bucket.read(VBUCKET, entry).value == value
    assert bucket.commit_of(entry) == bucket.pending.number


def test_the_index_grows_with_what_comes(bucket: Bucket) -> None:
    for first in range(1, 5000, 1000):
        _receive(bucket, *(_set(seqno, b"%d" % seqno) for seqno in range(first, first + 1000)), end=10_000)
    assert bucket.index.live_documents() == 5000
    bucket.commit_now()
    assert bucket.find(VBUCKET, CollectionId(0), b"4321") is not None


@pytest.mark.parametrize(("end", "slots"), [(1000, 1280), (2**62, 1536)])
def test_the_index_grows_once_for_a_snapshot_within_bounds(bucket: Bucket, end: int, slots: int) -> None:
    """A snapshot may end far behind the last document that it still has."""
    _receive(bucket, *(_set(seqno, b"%d" % seqno) for seqno in range(1, 301)), end=end)
    assert bucket.index.capacities[VBUCKET] == slots
    _receive(bucket, *(_set(seqno, b"%d" % seqno) for seqno in range(301, 801)), end=end)
    assert bucket.index.capacities[VBUCKET] == slots
    assert bucket.index.live_documents() == 800


def test_a_received_bucket_opens_again(bucket: Bucket) -> None:
    _receive(bucket, *(_set(seqno, b"%d" % (seqno % 7)) for seqno in range(1, 50)))
    log = _log(bucket)
    again = reopened(bucket)
    assert b"".join(run.tobytes() for run in again.runs(VBUCKET)) == log
    assert again.vbuckets.superseded[VBUCKET] == bucket.vbuckets.superseded[VBUCKET]
    assert facts_of(again, VBUCKET) == facts_of(bucket, VBUCKET)


def test_much_of_a_vbucket_becomes_blocks_at_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not behind what is young: of a vbucket that is always the newest."""
    monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", 4096)
    for first, last, is_young in ((1, 40, False), (41, 41, True), (42, 80, True)):
        _receive(bucket, *(_set(seqno, b"%d" % (seqno % 50)) for seqno in range(first, last + 1)))
        put(bucket, 2, b"little", b"%d" % first)
        before = bucket.durable_commit
        bucket.commit_now()
        assert list(bucket.young[before + 1].vbuckets()) == ([VBUCKET, 2] if is_young else [2])
        assert sorted(bucket.changed_after(before) or ()) == [VBUCKET, 2]
        if not is_young:
            with bucket.engine.view() as view:
                sizes = [len(value) for _, value in view.scan(Table.BLOCKS, *blocks_of(VBUCKET))]
            assert min(sizes) >= commits.full_block_bytes()
        entry = bucket.find(VBUCKET, CollectionId(0), b"%d" % (last % 50))
        assert entry is not None
        assert bucket.read(VBUCKET, entry).seqno == last
    log = _log(bucket)
    again = reopened(bucket)
    for _ in range(2):
        assert b"".join(run.tobytes() for run in again.runs(VBUCKET)) == log
        assert facts_of(again, VBUCKET) == facts_of(bucket, VBUCKET)
        settle_now(again)


def test_a_search_finds_what_is_newer_in_blocks_than_what_is_young(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", 4096)
    _receive(bucket, *(_set(seqno, b"%d" % seqno, cas=Cas(2**62 + seqno)) for seqno in range(1, 41)))
    put(bucket, 2, b"little", b"1")
    bucket.commit_now()
    wanted = Search(rows=1, bytes_max=2**20, seconds_max=10)
    (frame,) = search_changes(SearchedBucket.of(bucket), wanted, now_s=time.monotonic).frames
    assert frame[24:32] == (40).to_bytes(8)


@pytest.mark.parametrize("last", [3, 2, 101])
def test_a_seqno_out_of_range_stops_behind_what_is_sound(bucket: Bucket, last: int) -> None:
    with pytest.raises(SnapshotViolation, match=f"seqno {last} after 3"):
        _receive(bucket, _set(1), _set(3, b"b"), _set(last))
    assert bucket.vbuckets.high_seqnos[VBUCKET] == 3
    assert bucket.index.live_documents() == 2


OTHERS = {
    "another vbucket": _set(2, vbucket=VBucketId(2)),
    "compressed, and cut off": _set(2, value=compress(b"{}")[:-1], datatype=Datatype.SNAPPY),
    "compressed with attributes": _set(2, value=compress(bytes(4)), datatype=Datatype.SNAPPY | Datatype.XATTR),
    "a stream id": _set(2, frame_infos=(stream_id(1),)),
    "metadata": _set(2, nmeta=1),
    "a lock": _set(2, lock_time=1),
    "no time": _remove(Deletion, 2, delete_time=None),
    "no time of an expiration": _remove(Expiration, 2, delete_time=None),
    "an unknown datatype": _set(2, datatype=Datatype(0x08)),
    "a bad section": _set(2, value=b"\0\0\0\x09\0", datatype=Datatype.XATTR),
    "a pair without its end": _set(2, value=b"\0\0\0\x07\0\0\0\x03a\0b", datatype=Datatype.XATTR),
    "a collection id too long": _set(2, collection_id=None, key=b"\xff\xff\xff\xff\xff\x01k"),
    "no key behind the collection id": _set(2, collection_id=None, key=b"\x08"),
    "a long key": _set(2, collection_id=None, key=b"\x00" + b"k" * (KEY_BYTES_MAX + 1)),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_change_in_another_form_is_left_alone(bucket: Bucket, change: Any) -> None:
    before = _set(1, b"before")
    received = _receive(bucket, before, change, _set(3))
    assert received == receiving.Received(
        consumed_bytes=len(before.encode()), high_seqno=Seqno(1), has_to_be_decoded=True
    )  # fmt: skip
    assert bucket.index.live_documents() == 1


def test_a_value_that_is_too_long(bucket: Bucket) -> None:
    received = _receive(bucket, _set(1, value=bytes(VALUE_BYTES_MAX + 1)))
    assert received.has_to_be_decoded
    with pytest.raises(MalformedMessage, match="exceeds"):
        receiving.receive_change(bucket, VBUCKET, _set(1, value=bytes(VALUE_BYTES_MAX + 1)), end_seqno=END)
    assert bucket.vbuckets.high_seqnos[VBUCKET] == 0
    assert _receive(bucket, _set(1, value=bytes(VALUE_BYTES_MAX))).high_seqno == 1


def test_bytes_that_are_cut_off_are_left_alone(bucket: Bucket) -> None:
    whole = _set(1).encode()
    for length in range(1, len(whole)):
        received = receiving.receive_run(bucket, VBUCKET, as_run(whole[:length]), end_seqno=END)
        assert received.has_to_be_decoded
        assert received.consumed_bytes == 0
    assert bucket.pending.is_empty


# --- single changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [_set(1), _remove(Deletion, 1), _remove(Expiration, 1)])
def test_a_change_that_is_decoded_is_stored_as_one_that_is_not(bucket: Bucket, change: Any) -> None:
    receiving.receive_change(bucket, VBUCKET, replace(change, frame_infos=(stream_id(7),)), end_seqno=END)
    assert _log(bucket) == replace(change, opaque=0).encode()


def test_a_change_without_a_collection_is_in_the_default_one(bucket: Bucket) -> None:
    receiving.receive_change(bucket, VBUCKET, _set(1, collection_id=None), end_seqno=END)
    assert bucket.find(VBUCKET, CollectionId(0), b"k") is not None


@pytest.mark.parametrize("change", [_set(0), _set(101), _set(2**63, key=b"x")])
def test_a_single_change_out_of_range(bucket: Bucket, change: Mutation) -> None:
    with pytest.raises(SnapshotViolation):
        receiving.receive_change(bucket, VBUCKET, change, end_seqno=END)
    assert bucket.pending.is_empty


def test_no_vbucket_gets_to_the_highest_seqnos(bucket: Bucket) -> None:
    with pytest.raises(MalformedMessage):
        receiving.receive_change(bucket, VBUCKET, _set(2**63), end_seqno=Seqno(2**64 - 1))


@pytest.mark.parametrize("as_flatbuffers", [False, True])
def test_a_system_event_is_stored_in_one_form(bucket: Bucket, as_flatbuffers: bool) -> None:
    event = CollectionCreated(
        manifest_uid=ManifestUid(3), scope_id=ScopeId(0), collection_id=CollectionId(8), name="c"
    )  # fmt: skip
    encoded = encode_event(event, as_flatbuffers=as_flatbuffers)
    message = SystemEvent(
        vbucket=VBucketId(VBUCKET), opaque=5, seqno=Seqno(1), event=encoded.event, version=encoded.version,
        key=encoded.key, value=encoded.value,
    )  # fmt: skip
    assert receiving.receive_event(bucket, VBUCKET, message, end_seqno=END) == 3
    assert bucket.vbuckets.manifest_uids[VBUCKET] == 3
    packed = encode_event(event)
    stored = replace(message, opaque=0, version=packed.version, key=packed.key, value=packed.value)
    assert _log(bucket) == stored.encode()


# --- where a copy is ----------------------------------------------------------------------------------------------


def test_where_to_go_on(bucket: Bucket) -> None:
    def place() -> tuple[int, int, int]:
        offset = receiving.resume_offset(bucket, VBUCKET)
        return offset.seqno, offset.snapshot_start, offset.snapshot_end

    assert place() == (0, 0, 0)
    receiving.begin_snapshot(bucket, VBUCKET, start=Seqno(0), end=Seqno(5), has_history=True)
    assert place() == (0, 0, 0), "nothing of it has come"
    _receive(bucket, _set(2))
    assert place() == (2, 0, 5)
    _receive(bucket, _set(5))
    assert place() == (5, 5, 5)
    receiving.begin_snapshot(bucket, VBUCKET, start=Seqno(5), end=Seqno(9), has_history=True)
    assert place() == (5, 5, 5)


def test_the_branch_is_that_of_the_snapshots_end(bucket: Bucket) -> None:
    entries = (
        FailoverEntry(vbuuid=Vbuuid(3), seqno=Seqno(20)),
        FailoverEntry(vbuuid=Vbuuid(2), seqno=Seqno(10)),
        FailoverEntry(vbuuid=Vbuuid(1), seqno=Seqno(0)),
    )
    receiving.take_failover_log(bucket, VBUCKET, entries)
    assert facts_of(bucket, VBUCKET).failover_log == FailoverLog(entries)
    receiving.begin_snapshot(bucket, VBUCKET, start=Seqno(0), end=Seqno(15), has_history=True)
    _receive(bucket, _set(7))
    assert receiving.resume_offset(bucket, VBUCKET).vbuuid == 2
    _receive(bucket, _set(15))
    assert receiving.resume_offset(bucket, VBUCKET).vbuuid == 2
    receiving.begin_snapshot(bucket, VBUCKET, start=Seqno(15), end=Seqno(20), has_history=True)
    _receive(bucket, _set(20))
    assert receiving.resume_offset(bucket, VBUCKET).vbuuid == 2, (
        "a branch that begins at a seqno names what comes after it"
    )


def test_a_snapshot_without_history_moves_the_window(bucket: Bucket) -> None:
    receiving.begin_snapshot(bucket, VBUCKET, start=Seqno(0), end=Seqno(5), has_history=False, purge_seqno=Seqno(3))
    _receive(bucket, _set(1), _set(5, b"b"))
    receiving.begin_snapshot(bucket, VBUCKET, start=Seqno(5), end=Seqno(8), has_history=True, purge_seqno=Seqno(2))
    _receive(bucket, _set(7), _set(8))
    assert (facts_of(bucket, VBUCKET).history_start_seqno, facts_of(bucket, VBUCKET).purge_seqno) == (5, 3)
    assert roll_back(bucket, VBUCKET, Seqno(7)) == 7
    assert roll_back(bucket, VBUCKET, Seqno(4)) == 0


def test_a_seqno_without_a_change_becomes_durable_with_its_commit(bucket: Bucket) -> None:
    _receive(bucket, _set(1))
    receiving.advance_seqno(bucket, VBUCKET, Seqno(7))
    assert bucket.vbuckets.high_seqnos[VBUCKET] == 7
    assert bucket.vbuckets.durable_seqnos[VBUCKET] == 0
    commit = bucket.seal()
    _receive(bucket, _set(9))
    bucket.persist(commit)
    bucket.publish(commit)
    assert bucket.vbuckets.durable_seqnos[VBUCKET] == 7
    again = reopened(bucket)
    assert again.vbuckets.high_seqnos[VBUCKET] == 7
    bucket.commit_now()
    assert bucket.vbuckets.durable_seqnos[VBUCKET] == 9


def test_what_is_abandoned_is_asked_for_again(bucket: Bucket) -> None:
    receiving.begin_snapshot(bucket, VBUCKET, start=Seqno(0), end=Seqno(5), has_history=True)
    _receive(bucket, _set(1))
    bucket.commit_now()
    _receive(bucket, _set(2))
    receiving.advance_seqno(bucket, VBUCKET, Seqno(5))
    abandon(bucket)
    offset = receiving.resume_offset(bucket, VBUCKET)
    assert (offset.seqno, offset.snapshot_end) == (1, 5)
    bucket.commit_now()
    assert bucket.vbuckets.durable_seqnos[VBUCKET] == 1
