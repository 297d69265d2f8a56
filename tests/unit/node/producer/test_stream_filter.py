"""What passes a stream's filter, before and after the system events that it follows."""

from __future__ import annotations

import pytest

from headwater.node.producer.controls import StreamFilter, read_event
from headwater.protocol.manifest import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    Event,
    Manifest,
    ScopeCreated,
    ScopeDropped,
    decode_event,
    encode_event,
)
from headwater.protocol.messages.dcp_changes import Mutation, SystemEvent
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId, Seqno
from headwater.store.runs import as_run
from headwater.store.vbuckets import stored_event

MANIFEST = Manifest().with_scope("shop").with_collection("shop", "orders").with_collection("shop", "returns")
SHOP = next(scope for scope in MANIFEST.scopes if scope.name == "shop")
ORDERS, RETURNS = (collection.id for collection in SHOP.collections)
UID = ManifestUid(9)


def wanted(stream_filter: StreamFilter, manifest: Manifest = MANIFEST) -> list[int] | None:
    ids = stream_filter.wanted(manifest)
    return None if ids is None else ids.tolist()


def dropped(collection: CollectionId) -> CollectionDropped:
    return CollectionDropped(manifest_uid=UID, scope_id=SHOP.id, collection_id=collection)


def test_no_filter_lets_all_pass_until_a_collection_is_gone() -> None:
    passes_all = StreamFilter(MANIFEST)
    assert wanted(passes_all) is None
    after = MANIFEST.without_collection("shop", "orders")
    assert wanted(passes_all, after) == [0, RETURNS]
    assert wanted(passes_all) is None
    assert passes_all.concerns(dropped(ORDERS))
    assert not passes_all.is_empty


def test_without_collections_the_default_one_passes_and_no_event() -> None:
    knows_none = StreamFilter(MANIFEST, knows_collections=False)
    assert wanted(knows_none) == [0]
    assert not knows_none.concerns(dropped(ORDERS))


def test_a_filter_of_collections_follows_their_drops() -> None:
    of_two = StreamFilter(MANIFEST, collections=(RETURNS, ORDERS))
    assert wanted(of_two) == sorted((ORDERS, RETURNS))
    assert not of_two.concerns(dropped(CollectionId(99)))
    assert of_two.concerns(dropped(ORDERS))
    assert wanted(of_two) == [RETURNS]
    assert not of_two.is_empty
    assert of_two.concerns(dropped(RETURNS))
    assert of_two.is_empty


def test_a_filter_of_a_scope_follows_what_comes_and_goes() -> None:
    of_shop = StreamFilter(MANIFEST, scope=SHOP.id)
    assert wanted(of_shop) == sorted((ORDERS, RETURNS))
    new = CollectionCreated(manifest_uid=UID, scope_id=SHOP.id, collection_id=CollectionId(77), name="carts")
    assert of_shop.concerns(new)
    assert of_shop.concerns(dropped(ORDERS))
    assert wanted(of_shop) == [RETURNS, 77]
    assert not of_shop.is_empty
    assert of_shop.concerns(ScopeDropped(manifest_uid=UID, scope_id=SHOP.id))
    assert of_shop.is_empty


# System events are read from stored runs, and told in the form that a consumer has asked for.


STORED_UID, SCOPE, COLLECTION = ManifestUid(3), ScopeId(8), CollectionId(9)
EVENTS: list[Event] = [
    ScopeCreated(manifest_uid=STORED_UID, scope_id=SCOPE, name="shop"),
    ScopeDropped(manifest_uid=STORED_UID, scope_id=SCOPE),
    CollectionCreated(manifest_uid=STORED_UID, scope_id=SCOPE, collection_id=COLLECTION, name="orders", max_ttl_s=60),
    CollectionCreated(manifest_uid=STORED_UID, scope_id=SCOPE, collection_id=COLLECTION, name="orders", history=True),
    CollectionModified(manifest_uid=STORED_UID, scope_id=SCOPE, collection_id=COLLECTION, name="orders", history=True),
    CollectionDropped(manifest_uid=STORED_UID, scope_id=SCOPE, collection_id=COLLECTION),
]


def stored(event: Event, *, vbucket: int = 1, seqno: int = 5) -> bytes:
    return stored_event(event, vbucket, Seqno(seqno)).encode()


BEFORE = Mutation(seqno=Seqno(4), rev_seqno=1, collection_id=CollectionId(0), key=b"k", value=b"v").encode()


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_read_where_it_stands(event: Event) -> None:
    frame = stored(event)
    found = read_event(as_run(BEFORE + frame + BEFORE), len(BEFORE))
    assert (found.seqno, found.known.event, found.end) == (5, event, len(BEFORE) + len(frame))


def told_of(event: Event, *, as_flatbuffers: bool) -> SystemEvent:
    known = read_event(as_run(stored(event)), 0).known
    extras, key, value = known.parts(Seqno(7), as_flatbuffers=as_flatbuffers)
    return SystemEvent(**SystemEvent.decode_extras(extras), key=key, value=value)


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_told_as_flatbuffers(event: Event) -> None:
    told = told_of(event, as_flatbuffers=True)
    assert (told.version, told.seqno) == (2, 7)
    assert decode_event(told) == event


@pytest.mark.parametrize("event", [event for event in EVENTS if not isinstance(event, CollectionModified)])
def test_an_event_is_told_packed(event: Event) -> None:
    told = told_of(event, as_flatbuffers=False)
    expected = encode_event(event)
    assert (told.seqno, told.version, told.key, told.value) == (7, expected.version, expected.key, expected.value)


def test_the_same_event_of_another_vbucket_is_decoded_once() -> None:
    one, other = (read_event(as_run(stored(EVENTS[2], vbucket=number, seqno=number)), 0) for number in (1, 2))
    assert one.known is other.known
    assert (one.seqno, other.seqno) == (1, 2)


def test_events_that_differ_in_one_byte_are_not_mixed_up() -> None:
    events = [
        ScopeCreated(manifest_uid=STORED_UID, scope_id=SCOPE, name="shop"),
        ScopeCreated(manifest_uid=STORED_UID, scope_id=SCOPE, name="shoq"),
        ScopeCreated(manifest_uid=STORED_UID, scope_id=ScopeId(9), name="shop"),
        ScopeDropped(manifest_uid=STORED_UID, scope_id=SCOPE),
    ]
    assert [read_event(as_run(stored(event)), 0).known.event for event in events] == events
