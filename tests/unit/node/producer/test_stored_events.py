"""System events are read from stored runs, and told in the form that a consumer has asked for."""

from __future__ import annotations

import pytest

from headwater.node.producer.stream_filter import read_event
from headwater.protocol.messages.dcp_changes import Mutation, SystemEvent
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId, Seqno, VBucketId
from headwater.protocol.system_events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    Event,
    ScopeCreated,
    ScopeDropped,
    decode_event,
    encode_event,
)
from headwater.store.runs import as_run
from headwater.store.vbuckets import encode_stored_event

UID, SCOPE, COLLECTION = ManifestUid(3), ScopeId(8), CollectionId(9)
EVENTS: list[Event] = [
    ScopeCreated(manifest_uid=UID, scope_id=SCOPE, name="shop"),
    ScopeDropped(manifest_uid=UID, scope_id=SCOPE),
    CollectionCreated(manifest_uid=UID, scope_id=SCOPE, collection_id=COLLECTION, name="orders", max_ttl_s=60),
    CollectionCreated(manifest_uid=UID, scope_id=SCOPE, collection_id=COLLECTION, name="orders", history=True),
    CollectionModified(manifest_uid=UID, scope_id=SCOPE, collection_id=COLLECTION, name="orders", history=True),
    CollectionDropped(manifest_uid=UID, scope_id=SCOPE, collection_id=COLLECTION),
]


def stored(event: Event, *, vbucket: int = 1, seqno: int = 5) -> bytes:
    encoded = encode_stored_event(event)
    return SystemEvent(
        vbucket=VBucketId(vbucket), seqno=Seqno(seqno), event=encoded.event, version=encoded.version, key=encoded.key,
        value=encoded.value,
    ).encode()  # fmt: skip


BEFORE = Mutation(seqno=Seqno(4), rev_seqno=1, collection_id=CollectionId(0), key=b"k", value=b"v").encode()


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_read_where_it_stands(event: Event) -> None:
    frame = stored(event)
    found = read_event(as_run(BEFORE + frame + BEFORE), len(BEFORE))
    assert (found.seqno, found.known.event, found.end) == (5, event, len(BEFORE) + len(frame))


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_told_as_flatbuffers(event: Event) -> None:
    told = read_event(as_run(stored(event)), 0).known.told(Seqno(7), as_flatbuffers=True)
    assert (told.version, told.seqno) == (2, 7)
    assert decode_event(told) == event


@pytest.mark.parametrize("event", [event for event in EVENTS if not isinstance(event, CollectionModified)])
def test_an_event_is_told_packed(event: Event) -> None:
    told = read_event(as_run(stored(event)), 0).known.told(Seqno(7), as_flatbuffers=False)
    expected = encode_event(event)
    assert (told.seqno, told.version, told.key, told.value) == (7, expected.version, expected.key, expected.value)


def test_the_same_event_of_another_vbucket_is_decoded_once() -> None:
    one, other = (read_event(as_run(stored(EVENTS[2], vbucket=number, seqno=number)), 0) for number in (1, 2))
    assert one.known is other.known
    assert (one.seqno, other.seqno) == (1, 2)


def test_events_that_differ_in_one_byte_are_not_mixed_up() -> None:
    events = [
        ScopeCreated(manifest_uid=UID, scope_id=SCOPE, name="shop"),
        ScopeCreated(manifest_uid=UID, scope_id=SCOPE, name="shoq"),
        ScopeCreated(manifest_uid=UID, scope_id=ScopeId(9), name="shop"),
        ScopeDropped(manifest_uid=UID, scope_id=SCOPE),
    ]
    assert [read_event(as_run(stored(event)), 0).known.event for event in events] == events
