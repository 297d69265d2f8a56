"""System events: kv_engine's packed layouts (docs/dcp/documentation/commands/system_event.md), and FlatBuffers."""

from __future__ import annotations

from dataclasses import replace

import flatbuffers
import pytest

from headwater.errors import LocalProtocolError, MalformedSystemEvent
from headwater.protocol.manifest import (
    FLATBUFFERS_VERSION,
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    EncodedEvent,
    Event,
    ScopeCreated,
    ScopeDropped,
    decode_event,
    encode_event,
)
from headwater.protocol.messages.dcp_changes import SystemEvent, SystemEventId
from support.cases import case, each


def message(event: int, version: int, key: bytes, value: bytes) -> SystemEvent:
    return SystemEvent(seqno=1, event=SystemEventId(event), version=version, key=key, value=value)


def as_message(encoded: EncodedEvent) -> SystemEvent:
    return message(encoded.event, encoded.version, encoded.key, encoded.value)


# --- packed -------------------------------------------------------------------------------------------------------

UID = "0102030405060708"
SCOPE = "00000008"
COLLECTION = "00000009"
TTL = "00011940"
IDS = {"manifest_uid": 0x0102030405060708, "scope_id": 8}

GOLDEN: dict[str, tuple[int, int, bytes, str, Event]] = {
    "scope created": (3, 0, b"s1", UID + SCOPE, ScopeCreated(**IDS, name="s1")),
    "scope dropped": (4, 0, b"", UID + SCOPE, ScopeDropped(**IDS)),
    "collection created": (
        0,
        0,
        b"fruit",
        UID + SCOPE + COLLECTION,
        CollectionCreated(**IDS, collection_id=9, name="fruit"),
    ),
    "collection created, with a time to live": (
        0,
        1,
        b"c1",
        UID + SCOPE + COLLECTION + TTL,
        CollectionCreated(**IDS, collection_id=9, name="c1", max_ttl_s=72000),
    ),
    "a time to live of 0 is one, too": (
        0,
        1,
        b"c1",
        UID + SCOPE + COLLECTION + "00000000",
        CollectionCreated(**IDS, collection_id=9, name="c1", max_ttl_s=0),
    ),
    "collection dropped": (1, 0, b"", UID + SCOPE + COLLECTION, CollectionDropped(**IDS, collection_id=9)),
    # As Couchbase 7.0.5 sent them.
    "recorded scope": (3, 0, b"s1", "000000000000000000000008", ScopeCreated(manifest_uid=0, scope_id=8, name="s1")),
    "recorded collection with a time to live": (
        0,
        1,
        b"c1",
        "0000000000000000000000080000000900000005",
        CollectionCreated(manifest_uid=0, scope_id=8, collection_id=9, name="c1", max_ttl_s=5),
    ),
    "recorded collection, the last of its manifest": (
        0,
        0,
        b"fruit",
        "00000000000000020000000000000008",
        CollectionCreated(manifest_uid=2, scope_id=0, collection_id=8, name="fruit"),
    ),
}


@each(("event", "version", "key", "value", "decoded"), GOLDEN.values())
def test_packed_golden_bytes(event: int, version: int, key: bytes, value: str, decoded: Event) -> None:
    assert decode_event(message(event, version, key, bytes.fromhex(value))) == decoded
    encoded = encode_event(decoded)
    assert (encoded.event, encoded.version, encoded.key, encoded.value.hex()) == (event, version, key, value)


@case(3, 0, 11)
@case(3, 0, 16)
@case(4, 0, 0)
@case(0, 0, 15)
@case(0, 0, 20)
@case(0, 1, 16)
@case(0, 1, 24)
@case(1, 0, 12)
@case(1, 0, 17)
def test_a_packed_value_of_another_length_is_refused(event: int, version: int, value_bytes: int) -> None:
    with pytest.raises(MalformedSystemEvent):
        decode_event(message(event, version, b"name", bytes(value_bytes)))


@pytest.mark.parametrize(("event", "version"), [(0, 3), (1, 1), (3, 1), (4, 1), (0, 255)])
def test_a_version_nobody_knows_is_refused(event: int, version: int) -> None:
    with pytest.raises(MalformedSystemEvent, match=f"version {version}"):
        decode_event(message(event, version, b"name", bytes(20)))


@pytest.mark.parametrize("event", [2, 6, 2**32 - 1])
@pytest.mark.parametrize("version", [0, FLATBUFFERS_VERSION])
def test_an_event_nobody_knows_is_kept_in_the_message_and_refused_as_an_event(event: int, version: int) -> None:
    value = encode_event(ScopeDropped(**IDS), as_flatbuffers=True).value
    unknown = message(event, version, b"", value)
    assert unknown.event == event
    with pytest.raises(MalformedSystemEvent, match="not known"):
        decode_event(unknown)


def test_a_name_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(MalformedSystemEvent, match="utf-8"):
        decode_event(message(3, 0, b"\xff", bytes(12)))


def test_a_modified_collection_has_no_packed_form() -> None:
    modified = CollectionModified(**IDS, collection_id=9, name="c")
    with pytest.raises(LocalProtocolError, match="FlatBuffers"):
        encode_event(modified)
    with pytest.raises(MalformedSystemEvent):
        decode_event(message(SystemEventId.COLLECTION_MODIFIED, 0, b"c", bytes(16)))


# --- FlatBuffers --------------------------------------------------------------------------------------------------

EVENTS: dict[str, Event] = {
    "scope created": ScopeCreated(**IDS, name="s1"),
    "scope dropped": ScopeDropped(**IDS),
    "system scope dropped": ScopeDropped(**IDS, is_system=True),
    "collection created": CollectionCreated(**IDS, collection_id=9, name="fruit"),
    "collection with everything": CollectionCreated(
        **IDS, collection_id=9, name="früit", max_ttl_s=60, history=True, metered=True, flush_uid=2**64 - 1
    ),
    "a time to live of 0": CollectionCreated(**IDS, collection_id=9, name="c", max_ttl_s=0),
    "collection modified": CollectionModified(**IDS, collection_id=9, name="fruit", history=True),
    # One flag at a time: a wrong slot would read its neighbour.
    "collection with history": CollectionCreated(**IDS, collection_id=9, name="c", history=True),
    "collection that is metered": CollectionCreated(**IDS, collection_id=9, name="c", metered=True),
    "collection that was flushed": CollectionCreated(**IDS, collection_id=9, name="c", flush_uid=1),
    "all one, which is no default": CollectionCreated(
        manifest_uid=1, scope_id=1, collection_id=1, name="c", max_ttl_s=1, flush_uid=1
    ),
    "scope dropped, all one": ScopeDropped(manifest_uid=1, scope_id=1),
    "collection dropped, all one": CollectionDropped(manifest_uid=1, scope_id=1, collection_id=1),
    "collection dropped": CollectionDropped(**IDS, collection_id=9),
    "system collection dropped": CollectionDropped(**IDS, collection_id=9, is_system=True),
    "all zero": CollectionCreated(manifest_uid=0, scope_id=0, collection_id=0, name=""),
}
EVENT_IDS = {ScopeCreated: 3, ScopeDropped: 4, CollectionCreated: 0, CollectionModified: 5, CollectionDropped: 1}


@each("event", EVENTS.values())
def test_flatbuffers_round_trip(event: Event) -> None:
    encoded = encode_event(event, as_flatbuffers=True)
    assert encoded.version == 2
    assert encoded.event == EVENT_IDS[type(event)]
    assert encoded.key == getattr(event, "name", "").encode()
    assert decode_event(as_message(encoded)) == event
    assert type(decode_event(as_message(encoded))) is type(event)


def collection_by_hand(*, is_new: bool = False) -> bytes:
    """A `Collection` of kv_engine's events.fbs, slot by slot, as another writer would lay it out."""
    builder = flatbuffers.Builder(0)
    name = builder.CreateString("fruit")
    builder.StartObject(10 if is_new else 6)
    if is_new:
        builder.PrependUint64Slot(9, 0xF, 0)
        builder.PrependBoolSlot(8, True, False)
        builder.PrependUint64Slot(7, 0xE, 0)  # The default collection's highest visible seqno: not ours to read.
        builder.PrependBoolSlot(6, True, False)
    builder.PrependUOffsetTRelativeSlot(5, name, 0)
    builder.PrependUint32Slot(4, 60, 0)
    builder.PrependBoolSlot(3, True, False)
    builder.PrependUint32Slot(2, 9, 0)
    builder.PrependUint32Slot(1, 8, 0)
    builder.PrependUint64Slot(0, 0x0102030405060708, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def test_slots_are_those_of_the_schema_and_later_ones_have_defaults() -> None:
    """A server before flush and metering writes a shorter table."""
    decoded = decode_event(message(0, FLATBUFFERS_VERSION, b"", collection_by_hand()))
    assert decoded == CollectionCreated(**IDS, collection_id=9, name="fruit", max_ttl_s=60)
    newer = decode_event(message(0, FLATBUFFERS_VERSION, b"", collection_by_hand(is_new=True)))
    assert newer == replace(decoded, history=True, metered=True, flush_uid=0xF)


def test_a_string_that_runs_beyond_the_value_is_refused() -> None:
    """The FlatBuffers reader would cut it, and a collection would be called `fru`."""
    value = collection_by_hand()
    at = value.index(b"\x05\0\0\0fruit")
    longer = value[:at] + b"\xff\0\0\0" + value[at + 4 :]
    with pytest.raises(MalformedSystemEvent, match="runs beyond"):
        decode_event(message(0, FLATBUFFERS_VERSION, b"", longer))


@each("event", EVENTS.values())
def test_a_wrong_root_or_vtable_is_refused(event: Event) -> None:
    encoded = encode_event(event, as_flatbuffers=True)
    root = int.from_bytes(encoded.value[:4], "little")
    for damaged in (
        b"",
        b"\xff\xff\xff\xff" + encoded.value[4:],
        encoded.value[:root] + b"\xff\xff\xff\x7f" + encoded.value[root + 4 :],
        encoded.value[:root] + b"\x00\x00\x00\x80" + encoded.value[root + 4 :],
    ):
        with pytest.raises(MalformedSystemEvent):
            decode_event(message(encoded.event, encoded.version, encoded.key, damaged))
