"""Collections and scopes: system events, filters, and consumers that know of neither."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headwater.protocol.manifest import FLATBUFFERS_VERSION, CollectionCreated, Manifest, ScopeCreated, decode_event
from headwater.protocol.messages.dcp_changes import Mutation, SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import CollectionId, ManifestUid, Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.store import checked_engine
from headwater.store.checksums import check_wanted
from headwater.store.receiving import begin_snapshot, receive_change, receive_event
from headwater.store.scan import CollectionSeqnos
from headwater.store.settling import remove_vbucket, roll_back
from support.cases import case_apart
from support.dcp_world import COLLECTIONS, VBUCKET, Consumer, World, brief, changes, of_type, resume, stream_request

FRUIT, SHOP, ORDERS = 8, 9, 10
"""Collection, scope, collection of that scope."""


@pytest.fixture
def shop(world: World) -> World:
    """Events at seqnos 1 to 3, then documents in all three collections."""
    manifest = Manifest().with_collection("_default", "fruit").with_scope("shop").with_collection("shop", "orders")
    world.set_manifest(manifest)
    world.write("plain")
    world.write("apple", collection=FRUIT)
    world.write("order", collection=ORDERS)
    world.write("pear", collection=FRUIT)
    return world


def _consumer(world: World, **controls: str) -> Consumer:
    return world.consumer(features=COLLECTIONS, **controls)


# --- everything ---------------------------------------------------------------------------------------------------


def test_a_stream_of_everything_has_system_events_in_their_places(shop: World) -> None:
    lines = _consumer(shop).stream()
    assert lines == [
        "marker 0..7", "event SCOPE_CREATED@1", "event COLLECTION_CREATED@2", "event COLLECTION_CREATED@3",
        "set plain@4", "set 8:apple@5", "set a:order@6", "set 8:pear@7",
    ]  # fmt: skip


def test_events_are_packed_unless_flatbuffers_are_asked_for(shop: World) -> None:
    """A scope comes before its collections, and the manifest's uid stands on the last event only."""
    for controls, version in (({}, 0), ({"flatbuffers_system_events": "true"}, FLATBUFFERS_VERSION)):
        consumer = _consumer(shop, **controls)
        consumer.open()
        messages = of_type(consumer.received(), SystemEvent)
        assert {message.version for message in messages} == {version}
        events = [decode_event(message) for message in messages]
        assert [event.manifest_uid for event in events] == [0, 0, 3]
        names = [event.name for event in events if isinstance(event, ScopeCreated | CollectionCreated)]
        assert names.index("shop") < names.index("orders")
        assert set(names) == {"shop", "orders", "fruit"}


def test_a_collection_that_comes_later_is_told_live(shop: World) -> None:
    consumer = _consumer(shop)
    consumer.stream()
    shop.set_manifest(shop.bucket.manifest.with_collection("_default", "new"))
    assert consumer.brief() == ["marker 8..8", "event COLLECTION_CREATED@8"]


def test_a_dropped_collection_is_told_and_its_documents_are_not(shop: World) -> None:
    shop.set_manifest(shop.bucket.manifest.without_collection("_default", "fruit"))
    lines = _consumer(shop).stream()
    assert changes(lines) == ["set plain@4", "set a:order@6"]
    assert lines[-1] == "event COLLECTION_DROPPED@8"


def test_a_collection_with_a_max_ttl_is_told_in_version_1(world: World) -> None:
    world.set_manifest(Manifest().with_collection("_default", "short", max_ttl_s=5))
    consumer = _consumer(world)
    consumer.open()
    (event,) = of_type(consumer.received(), SystemEvent)
    assert event.version == 1
    assert decode_event(event) == CollectionCreated(
        manifest_uid=1, scope_id=0, collection_id=8, name="short", max_ttl_s=5
    )


# --- filters ------------------------------------------------------------------------------------------------------


@case_apart(b'{"collections":["8"]}', ["event COLLECTION_CREATED@2", "set 8:apple@5", "set 8:pear@7"])
@case_apart(b'{"collections":["0","a"]}', ["event COLLECTION_CREATED@3", "set plain@4", "set a:order@6", "advanced 7"])
@case_apart(b'{"scope":"9"}', ["event SCOPE_CREATED@1", "event COLLECTION_CREATED@3", "set a:order@6", "advanced 7"])
def test_a_filter_brings_only_its_documents_and_events(shop: World, value: bytes, expected: list[str]) -> None:
    """A seqno-advanced says where the snapshot ends if the filter hides its last change."""
    assert _consumer(shop).stream(value=value, end_seqno=7) == ["marker 0..7", *expected, "end OK"]


def test_a_collection_is_streamed_again_without_reading_what_is_not_of_it(
    shop: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stream finds out what the pieces of blocks hold, and so do those after a rollback to other changes."""
    checked = 0

    def counted(*arguments: Any) -> Any:
        nonlocal checked
        start, end, piece = check_wanted(*arguments)
        checked += end - start
        return start, end, piece

    monkeypatch.setattr(checked_engine, "check_wanted", counted)
    large = b'"%s"' % (b"x" * 5000)
    others = [f"other {number}" for number in range(40)]
    shop.write(*others, value=large)
    shop.write("kiwi", collection=FRUIT)
    shop.write(*others, value=large, collection=ORDERS)
    shop.set_manifest(shop.bucket.manifest.with_collection("_default", "new"))
    shop.settle()
    value = b'{"collections":["8"]}'
    expected = ["set 8:apple@5", "set 8:pear@7", "set 8:kiwi@48"]
    assert changes(_consumer(shop).stream(value=value)) == expected
    assert checked == 0
    assert changes(_consumer(shop).stream(value=value)) == expected
    assert 0 < checked < 20 * len(large)
    assert len(changes(_consumer(shop).stream(value=b'{"collections":["8","a"]}'))) == 44
    assert changes(_consumer(shop).stream(value=value, **resume(shop, 7))) == expected[2:]
    roll_back(shop.bucket, VBUCKET, Seqno(47), branch=True)
    shop.write("lime", "plum", collection=FRUIT)
    shop.write(*others[2:], value=large)
    shop.settle()
    expected[2:] = ["set 8:lime@48", "set 8:plum@49"]
    for _ in range(2):
        assert changes(_consumer(shop).stream(value=value)) == expected


def test_a_scope_filter_follows_collections_that_come_later(shop: World) -> None:
    consumer = _consumer(shop)
    consumer.stream(value=b'{"scope":"9"}')
    shop.set_manifest(shop.bucket.manifest.with_collection("shop", "bills"))
    shop.write("bill", collection=11)
    lines = consumer.brief()
    assert "event COLLECTION_CREATED@8" in lines
    assert changes(lines) == ["set b:bill@9"]


def test_a_filtered_stream_is_told_of_changes_that_are_not_its_own(shop: World) -> None:
    consumer = _consumer(shop)
    consumer.stream(value=b'{"collections":["8"]}')
    shop.write("plain again")
    assert consumer.brief() == ["marker 8..8", "advanced 8"]


def test_drop_of_a_filtered_collection_ends_the_stream_when_the_filter_is_empty(shop: World) -> None:
    consumer = _consumer(shop)
    consumer.stream(value=b'{"collections":["8"]}')
    shop.set_manifest(shop.bucket.manifest.without_collection("_default", "fruit"))
    lines = consumer.brief()
    assert lines == ["marker 8..8", "event COLLECTION_DROPPED@8", "end FILTER_EMPTY"]


def test_drop_of_one_of_two_filtered_collections_goes_on_with_the_other(shop: World) -> None:
    consumer = _consumer(shop)
    consumer.stream(value=b'{"collections":["8","a"]}')
    shop.set_manifest(shop.bucket.manifest.without_collection("_default", "fruit"))
    assert consumer.brief() == ["marker 8..8", "event COLLECTION_DROPPED@8"]
    shop.write("another", collection=ORDERS)
    assert changes(consumer.brief()) == ["set a:another@9"]


def test_drop_of_a_filtered_scope_ends_the_stream(shop: World) -> None:
    consumer = _consumer(shop)
    consumer.stream(value=b'{"scope":"9"}')
    shop.set_manifest(shop.bucket.manifest.without_scope("shop"))
    lines = consumer.brief()
    assert "event SCOPE_DROPPED@9" in lines
    assert lines[-1] == "end FILTER_EMPTY"


@case_apart(b'{"collections":["99"]}', Status.UNKNOWN_COLLECTION)
@case_apart(b'{"scope":"99"}', Status.UNKNOWN_SCOPE)
def test_what_is_unknown_is_refused_with_the_manifest_uid(shop: World, value: bytes, status: Status) -> None:
    answer = _consumer(shop).call(stream_request(value=value))
    assert answer.status == status
    assert b'"manifest_uid":"3"' in answer.value.replace(b" ", b"")


def test_manifest_ahead(shop: World) -> None:
    _consumer(shop).open(value=b'{"uid":"4"}')
    shop.speak_as("7.0")
    consumer = _consumer(shop)
    for value in (b'{"uid":"4"}', b'{"uid":"4","collections":["99"]}'):
        assert consumer.refused(stream_request(value=value)) == Status.MANIFEST_IS_AHEAD
    consumer.open(value=b'{"uid":"3"}')


# --- consumers that know nothing of collections -------------------------------------------------------------------


def test_a_default_collection_only_client_gets_its_documents_alone(shop: World) -> None:
    """Without prefix and events, in a snapshot that ends with what it gets."""
    consumer = shop.consumer()
    consumer.open()
    messages = consumer.received()
    assert brief(messages) == ["marker 0..4", "set plain@4"]
    assert of_type(messages, Mutation)[0].key == b"plain"
    shop.write("banana", collection=FRUIT)
    assert consumer.brief() == []
    shop.write("later")
    assert consumer.brief()[-1] == "set later@9"


def test_a_default_collection_only_client_ends_at_an_end_inside_another_collection(shop: World) -> None:
    assert shop.consumer().stream(end_seqno=7) == ["marker 0..4", "set plain@4", "end OK"]


def test_a_default_collection_only_client_that_is_bounded_by_nothing_of_its_own(world: World) -> None:
    world.set_manifest(Manifest().with_collection("_default", "fruit"))
    assert world.consumer().stream(end_seqno=1) == ["end OK"]


# --- out of order -------------------------------------------------------------------------------------------------


def test_oso_brings_a_filtered_backfill_between_its_markers_and_then_goes_on_in_order(shop: World) -> None:
    shop.settle()
    consumer = _consumer(shop, enable_out_of_order_snapshots="true")
    lines = consumer.stream(value=b'{"collections":["8"]}')
    assert (lines[0], lines[-1]) == ("oso START", "oso END")
    assert sorted(changes(lines)) == ["set 8:apple@5", "set 8:pear@7"]
    assert not any(line.startswith("marker") for line in lines)
    shop.write("fig", collection=FRUIT)
    assert consumer.brief() == ["marker 8..8", "set 8:fig@8"]


@pytest.mark.parametrize(("mode", "advanced"), [("true_with_seqno_advanced", ["advanced 7"]), ("true", [])])
def test_oso_with_seqno_advanced_says_where_the_snapshot_ends(shop: World, mode: str, advanced: list[str]) -> None:
    shop.settle()
    lines = _consumer(shop, enable_out_of_order_snapshots=mode).stream(value=b'{"collections":["a"]}')
    assert [line for line in lines if line.startswith("advanced")] == advanced
    assert lines[-1] == "oso END"


def test_oso_is_not_for_streams_that_resume_or_have_no_filter(shop: World) -> None:
    shop.settle()
    assert _consumer(shop, enable_out_of_order_snapshots="true").stream()[0] == "marker 0..7"
    consumer = _consumer(shop, enable_out_of_order_snapshots="true")
    lines = consumer.stream(start_seqno=5, vbuuid=shop.vbuuid(), value=b'{"collections":["8"],"uid":"3"}')
    assert lines == ["marker 5..7", "set 8:pear@7"]


# --- flush --------------------------------------------------------------------------------------------------------


def _flushed(manifest: Manifest, collection_id: int) -> Manifest:
    """The next manifest, which flushes a collection, as a server of 8.0 gets it."""
    uid = ManifestUid(manifest.uid + 1)
    scopes = tuple(
        replace(
            scope,
            collections=tuple(
                replace(held, flush_uid=uid) if held.id == collection_id else held for held in scope.collections
            ),
        )
        for scope in manifest.scopes
    )
    return replace(manifest, uid=uid, scopes=scopes)


COPY = 5
"""A vbucket to be received."""


def _keys(world: World, collection: int, *keys: str) -> list[str]:
    found = {key: world.bucket.find(0, CollectionId(collection), key.encode()) for key in keys}
    return [key for key, entry in found.items() if entry is not None and not entry.is_deleted]


def test_a_flush_voids_the_documents_of_its_collection_alone(shop: World) -> None:
    shop.set_manifest(_flushed(shop.bucket.manifest, FRUIT))
    shop.store("pear", "plum", collection=FRUIT)
    for reopens in (False, True):
        if reopens:
            shop.node.reopen()
        assert _keys(shop, FRUIT, "apple", "pear", "plum") == ["pear", "plum"]
        assert _keys(shop, 0, "plain") == ["plain"]
        assert _keys(shop, ORDERS, "order") == ["order"]
        assert shop.bucket.index.live_documents() == 4
    shop.compact()
    consumer = _consumer(shop, flatbuffers_system_events="true")
    consumer.open()
    messages = consumer.received()
    events = [decode_event(message) for message in of_type(messages, SystemEvent)]
    assert [event.flush_uid for event in events if isinstance(event, CollectionCreated)] == [0, 0, 4]
    assert brief(messages)[4:] == [
        "set plain@4",
        "set a:order@6",
        "event COLLECTION_CREATED@8",
        "set 8:pear@9",
        "set 8:plum@10",
    ]


def test_a_live_stream_gets_a_flush_as_another_creation(shop: World) -> None:
    consumer = _consumer(shop)
    consumer.stream()
    shop.set_manifest(_flushed(shop.bucket.manifest, FRUIT))
    assert consumer.brief() == ["marker 8..8", "event COLLECTION_CREATED@8"]
    assert shop.bucket.manifest.events_to(shop.bucket.manifest) == []


def test_the_high_seqno_of_a_collection_counts_its_flush(shop: World) -> None:
    shop.set_manifest(_flushed(shop.bucket.manifest, FRUIT))
    assert CollectionSeqnos.of(shop.bucket, [0], CollectionId(FRUIT)).high_seqnos() == [8]


def test_a_copy_voids_what_its_producer_flushed(shop: World) -> None:
    shop.set_manifest(_flushed(shop.bucket.manifest, FRUIT))
    consumer = _consumer(shop, flatbuffers_system_events="true")
    consumer.open()
    (event,) = [message for message in of_type(consumer.received(), SystemEvent) if message.seqno == 8]
    copy = shop.bucket
    remove_vbucket(copy, COPY)
    copy.set_vbucket_state(COPY, VBucketState.REPLICA)
    begin_snapshot(copy, COPY, start=Seqno(0), end=Seqno(9), has_history=True)
    fruit, other = (
        Mutation(vbucket=VBucketId(COPY), seqno=Seqno(seqno), rev_seqno=1, collection_id=CollectionId(number), key=b"x")
        for seqno, number in ((1, FRUIT), (2, ORDERS))
    )
    for change in (fruit, other):
        receive_change(copy, COPY, change, end_seqno=Seqno(9))
    receive_event(copy, COPY, replace(event, vbucket=VBucketId(COPY)), end_seqno=Seqno(9))
    receive_change(copy, COPY, replace(fruit, seqno=Seqno(9), key=b"y"), end_seqno=Seqno(9))
    found = [
        (number, key)
        for number in (FRUIT, ORDERS)
        for key in (b"x", b"y")
        if copy.find(COPY, CollectionId(number), key) is not None
    ]
    assert found == [(FRUIT, b"y"), (ORDERS, b"x")]
    assert roll_back(copy, COPY, Seqno(3)) == 0, "versions from before the flush may be gone"
