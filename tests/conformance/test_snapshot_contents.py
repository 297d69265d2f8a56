"""Snapshots: their markers, and which version of a key they hold."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.protocol.features import Feature
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamFlags
from headwater.store import checked_engine
from headwater.store.checksums import check_block
from headwater.store.scan import newest_in_snapshot
from support.dcp_world import COLLECTIONS, KEEP_NOTHING, PLAIN, VBUCKET, World, brief, changes, of_type, resume

BOTH = pytest.mark.parametrize("features", [PLAIN, COLLECTIONS], ids=["plain", "collections"])


def _marker(world: World, **controls: str) -> SnapshotMarker:
    consumer = world.consumer(features=COLLECTIONS, **controls)
    consumer.open()
    (marker,) = of_type(consumer.received(), SnapshotMarker)
    assert isinstance(marker, SnapshotMarker)
    return marker


def test_deletions_of_the_initial_backfill_are_left_out_where_the_open_asks_for_that(world: World) -> None:
    """The flag 0x200, MB-26074: a consumer that begins with nothing needs no deletions."""
    world.store("a", "b")
    world.remove("a")
    world.settle()
    flags = OpenFlags.PRODUCER | OpenFlags.SKIP_DELETES_IN_INITIAL_BACKFILL
    consumer = world.consumer(flags=flags, features=COLLECTIONS)
    assert consumer.stream() == ["marker 0..3", "set b@2", "advanced 3"]
    world.remove("b")
    world.commit()
    assert consumer.brief() == ["marker 4..4", "remove b@4"]
    resumed = world.consumer(flags=flags, features=COLLECTIONS)
    assert resumed.stream(**resume(world, 2)) == ["marker 2..4", "remove a@3", "remove b@4"]


# --- markers ------------------------------------------------------------------------------------------------------


def test_the_versions_of_snapshot_markers(world: World) -> None:
    world.write("a", "b")
    assert _marker(world, max_marker_version="2.2").version is None, "2.2 is for snapshots from disk"
    world.settle()
    first = _marker(world)
    assert (first.version, first.max_visible_seqno) == (None, None)
    newest = _marker(world, max_marker_version="2.2")
    assert (newest.version, newest.end_seqno, newest.purge_seqno) == (2, 2, 0)
    # As recorded from 8.0.2: without sync writes nothing of durable writes.
    assert (newest.max_visible_seqno, newest.high_completed_seqno, newest.high_prepared_seqno) == (0, 0, 0)
    world.speak_as("7.0")
    second = _marker(world, max_marker_version="2.0")
    assert (second.start_seqno, second.end_seqno, second.max_visible_seqno) == (0, 2, 2)
    assert second.purge_seqno is None


def test_a_disk_only_stream_has_no_marker_from_memory(world: World) -> None:
    """What it gets may be young, and still be in memory here."""
    world.write("a", "b")
    assert SnapshotFlags.MEMORY in _marker(world).flags
    consumer = world.consumer(features=COLLECTIONS)
    consumer.open(flags=StreamFlags.DISK_ONLY)
    (marker,) = of_type(consumer.received(), SnapshotMarker)
    assert marker.flags == SnapshotFlags.DISK | SnapshotFlags.CHECKPOINT


def test_the_first_marker_starts_at_the_requested_seqno_and_later_ones_after_the_last(world: World) -> None:
    world.store("a", "b", "c")
    consumer = world.consumer()
    assert consumer.stream(start_seqno=2, vbuuid=world.vbuuid())[0] == "marker 2..3"
    world.write("d")
    assert consumer.brief()[0] == "marker 4..4"


# --- deduplication ------------------------------------------------------------------------------------------------


@BOTH
def test_a_key_comes_at_most_once_in_a_snapshot(world: World, features: tuple[Feature, ...]) -> None:
    world.store("a", "b")
    world.store("a")
    world.write("b", "a")
    lines = world.consumer(features=features).stream()
    assert lines == ["marker 0..5", "set b@4", "set a@5"]


@BOTH
def test_a_key_that_is_overwritten_in_one_commit_comes_once(world: World, features: tuple[Feature, ...]) -> None:
    world.write("a", "a", "a")
    assert world.consumer(features=features).stream() == ["marker 0..3", "set a@3"]


@BOTH
def test_a_key_overwritten_before_and_during_the_backfill(world: World, features: tuple[Feature, ...]) -> None:
    world.store("a", "b", "c")
    world.store("b")
    consumer = world.consumer(features=features)
    consumer.open()
    assert brief(consumer.step(bytes_max=60)) == ["marker 0..4", "set a@1"]
    world.store("b", "c")
    assert consumer.brief() == ["set c@3", "set b@4", "marker 5..6", "set b@5", "set c@6"]


def test_deduplication_in_a_collection_that_a_scope_gets_inside_the_snapshot(world: World) -> None:
    world.set_manifest(Manifest().with_scope("shop"))
    consumer = world.consumer(features=COLLECTIONS)
    consumer.stream(value=b'{"scope":"8"}')
    world.set_manifest(world.bucket.manifest.with_collection("shop", "bills"))
    world.write("bill", "bill", collection=9)
    assert changes(consumer.brief()) == ["set 9:bill@4"]


@BOTH
def test_no_snapshot_repeats_a_key_at_any_pace(world: World, features: tuple[Feature, ...]) -> None:
    world.store(*(f"k{number % 7}" for number in range(30)))
    consumer = world.consumer(features=features)
    consumer.open()
    messages = []
    for number in range(60):
        world.put(f"k{number * 5 % 11}")
        if number % 3 == 0:
            world.commit()
        if number % 10 == 0:
            world.settle()
        messages += consumer.step(bytes_max=number % 4 * 50 + 1)
    world.commit()
    messages += consumer.received()
    keys: set[bytes] = set()
    state: dict[bytes, int] = {}
    end = last = 0
    for message in messages:
        if isinstance(message, SnapshotMarker):
            assert last == end, "the snapshot before has come to its end"
            keys, end = set(), message.end_seqno
        else:
            assert isinstance(message, Mutation)
            assert last < message.seqno <= end
            assert message.key not in keys
            keys.add(message.key)
            state[message.key], last = message.seqno, message.seqno
    entries = {key: world.bucket.find(0, 0, key) for key in state}
    assert state == {key: entry.seqno for key, entry in entries.items() if entry}


# --- history ------------------------------------------------------------------------------------------------------


def test_change_streams_bring_all_versions(world: World) -> None:
    world.store("a", "b")
    world.store("a")
    world.write("a")
    consumer = world.consumer(features=COLLECTIONS, change_streams="true")
    assert consumer.stream() == ["marker 0..4", "set a@1", "set b@2", "set a@3", "set a@4"]


def test_only_change_streams_promise_history_in_the_marker(world: World) -> None:
    world.store("a", "a")
    history = SnapshotFlags.HISTORY | SnapshotFlags.MAY_CONTAIN_DUPLICATES
    assert _marker(world, change_streams="true").flags & history == history
    assert not _marker(world).flags & history


def test_change_streams_tell_what_has_no_history_in_a_snapshot_of_its_own(world: World) -> None:
    world.store("a", "b", "a")
    world.compact(KEEP_NOTHING)
    world.store("a", "a")
    consumer = world.consumer(features=COLLECTIONS, change_streams="true")
    consumer.open()
    messages = consumer.received()
    assert brief(messages) == ["marker 0..3", "set b@2", "set a@3", "marker 4..5", "set a@4", "set a@5"]
    has_history = [SnapshotFlags.HISTORY in marker.flags for marker in of_type(messages, SnapshotMarker)]
    assert has_history == [False, True]


def test_change_streams_that_resume_inside_the_history_have_all_of_it(world: World) -> None:
    world.store("a", "b", "a")
    world.compact(KEEP_NOTHING)
    world.store("a", "a")
    consumer = world.consumer(features=COLLECTIONS, change_streams="true")
    consumer.open(start_seqno=3, vbuuid=world.vbuuid())
    messages = consumer.received()
    assert brief(messages) == ["marker 3..5", "set a@4", "set a@5"]
    assert SnapshotFlags.HISTORY in of_type(messages, SnapshotMarker)[0].flags


# --- what the index knows of a snapshot ---------------------------------------------------------------------------


def test_blocks_of_superseded_versions_are_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    large = b'"%s"' % (b"x" * 200_000)
    keys = ["a", "b", "c", "d"]
    world.store(*keys, value=large)
    world.set_manifest(world.bucket.manifest.with_collection("_default", "new"))
    world.store(*keys, *keys, value=large)
    world.remove("d")
    world.settle()
    read: set[int] = set()

    def noted(row: Any, *arguments: Any) -> Any:
        read.add(int.from_bytes(row[24:32].tobytes(), "big"))
        return check_block(row, *arguments)

    monkeypatch.setattr(checked_engine, "check_block", noted)
    consumer = world.consumer(features=COLLECTIONS)
    assert consumer.stream() == [
        "marker 0..14", "event COLLECTION_CREATED@5", "set a@10", "set b@11", "set c@12", "remove d@14",
    ]  # fmt: skip
    assert read == {1, 2, 3, 4, 5, 10, 11, 12, 14}, "large documents have blocks of their own, and an event begins one"


def test_the_index_does_not_know_a_snapshot_behind_which_keys_have_changed(world: World) -> None:
    """A version whose successor is not durable yet has to be sent."""
    world.store("a", "b", "a")
    known = newest_in_snapshot(world.bucket, VBUCKET, after_seqno=0, end_seqno=3)
    assert known.tolist() == [2, 3]
    world.put("a")
    assert newest_in_snapshot(world.bucket, VBUCKET, after_seqno=0, end_seqno=3) is None
