"""The small codecs: frame infos, LEB128, xattrs, snappy, stream-request values and system events.

Each round trip is taken in both directions where there is only one spelling, and every codec is fed junk.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater import errors
from headwater.protocol import manifest as manifests
from headwater.protocol import values
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS
from headwater.protocol.frames import (
    DurabilityLevel,
    FrameInfo,
    ResponseInfo,
    decode_collection_id,
    decode_durability,
    decode_frame_infos,
    decode_frames,
    decode_server_duration,
    decode_stream_id,
    durability,
    encode_collection_id,
    encode_frame_infos,
    server_duration,
    stream_id,
)
from headwater.protocol.messages import REQUESTS, RESPONSES, SERVER_REQUESTS, Message, decode_message
from headwater.protocol.messages.dcp_changes import SystemEvent, SystemEventId
from headwater.protocol.stream_requests import CacheTransferOptions, StreamRequestValue
from support.cases import each
from support.message_strategies import (
    MESSAGE_CLASSES,
    STRUCTURED,
    any_message,
    frame_infos,
    messages_of,
    only,
    structured_parts,
    u8,
    u16,
    u32,
    u64,
)

# --- frame infos --------------------------------------------------------------------------------------------------


@given(frame_infos)
def test_frame_infos_round_trip(infos: tuple[FrameInfo, ...]) -> None:
    assert decode_frame_infos(encode_frame_infos(infos)) == infos


@given(st.binary(max_size=60))
def test_frame_infos_have_one_spelling_or_are_refused(data: bytes) -> None:
    with only(errors.MalformedFrameInfo, within_bytes=len(data)):
        assert encode_frame_infos(decode_frame_infos(data)) == data


@given(sid=u16, others=st.lists(st.builds(FrameInfo, id=st.integers(3, 270), data=st.binary(max_size=8))))
def test_stream_id_is_found_among_others(sid: int, others: list[FrameInfo]) -> None:
    assert decode_stream_id((*others, stream_id(sid))) == sid
    assert decode_stream_id(tuple(others)) is None


@given(level=u8.map(DurabilityLevel), timeout_ms=st.none() | u16)
def test_durability_round_trip(level: DurabilityLevel, timeout_ms: int | None) -> None:
    assert decode_durability((durability(level, timeout_ms=timeout_ms),)) == (level, timeout_ms)


@given(u16)
def test_every_encoded_server_duration_is_its_own_image(encoded: int) -> None:
    info = FrameInfo(ResponseInfo.SERVER_DURATION, encoded.to_bytes(2))
    duration_us = decode_server_duration((info,))
    assert duration_us is not None
    assert server_duration(duration_us) == info


# --- LEB128 -------------------------------------------------------------------------------------------------------


@given(collection_id=u32, before=st.binary(max_size=8), after=st.binary(max_size=8))
@example(0, b"", b"")
@example(2**32 - 1, b"", b"\xff")
def test_collection_id_round_trip(collection_id: int, before: bytes, after: bytes) -> None:
    encoded = encode_collection_id(collection_id)
    data = before + encoded + after
    assert decode_collection_id(data, len(before)) == (collection_id, len(before) + len(encoded))
    assert len(encoded) == max(1, -(-collection_id.bit_length() // 7))


@given(st.binary(max_size=8))
def test_collection_id_has_one_spelling_or_is_refused(data: bytes) -> None:
    with only(errors.MalformedLeb128, within_bytes=len(data)):
        collection_id, end = decode_collection_id(data)
        assert encode_collection_id(collection_id) == data[:end]


# --- xattrs -------------------------------------------------------------------------------------------------------

names = st.text("ab_.$ é漢😀", max_size=12)
json_texts = st.binary(max_size=30).map(lambda text: text.replace(b"\0", b"0"))
value_parts = st.builds(
    values.ValueParts, xattrs=st.dictionaries(names, json_texts, max_size=5), body=st.binary(max_size=40)
)


@given(value_parts)
def test_xattrs_round_trip(parts: values.ValueParts) -> None:
    encoded = values.encode_xattrs(parts)
    assert values.decode_xattrs(encoded) == parts
    assert encoded[values.body_offset(encoded) :] == parts.body
    assert list(values.decode_xattrs(encoded).xattrs) == list(parts.xattrs)


@given(st.binary(max_size=60))
@example(b"\0\0\0\x05\0\0\0\x01\0")
def test_xattrs_have_one_spelling_or_are_refused(value: bytes) -> None:
    with only(errors.MalformedXattrs, within_bytes=len(value)):
        assert values.encode_xattrs(values.decode_xattrs(value)) == value


@given(parts=value_parts, data=st.data())
def test_truncated_xattrs_are_refused_or_lose_only_their_body(parts: values.ValueParts, data: st.DataObject) -> None:
    encoded = values.encode_xattrs(parts)
    kept = data.draw(st.integers(0, len(encoded)))
    if kept < len(encoded) - len(parts.body):
        with pytest.raises(errors.MalformedXattrs):
            values.decode_xattrs(encoded[:kept])
    else:
        assert values.decode_xattrs(encoded[:kept]).xattrs == parts.xattrs


# --- snappy -------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300) | st.builds(lambda text, n: text * n, st.binary(max_size=20), st.integers(1, 500)))
def test_snappy_round_trip(value: bytes) -> None:
    compressed = values.compress(value)
    assert values.decompressed_bytes(compressed) == len(value)
    assert values.decompress(compressed, bytes_max=len(value)) == value
    if value:
        with pytest.raises(errors.MalformedSnappy, match="above the limit"):
            values.decompress(compressed, bytes_max=len(value) - 1)


@given(st.binary(max_size=60))
def test_junk_snappy_raises_only_malformed_snappy(compressed: bytes) -> None:
    with only(errors.MalformedSnappy, within_bytes=len(compressed)):
        assert len(values.decompress(compressed, bytes_max=2**16)) <= 2**16


@given(value=st.binary(min_size=1, max_size=100), data=st.data())
def test_damaged_snappy_raises_only_malformed_snappy(value: bytes, data: st.DataObject) -> None:
    compressed = bytearray(values.compress(value))
    compressed[data.draw(st.integers(0, len(compressed) - 1))] ^= data.draw(st.integers(1, 255))
    with only(errors.MalformedSnappy, within_bytes=len(compressed)):
        values.decompress(bytes(compressed))


# --- stream-request values ----------------------------------------------------------------------------------------

stream_request_values = st.tuples(
    st.fixed_dictionaries(
        {},
        optional={
            "uid": u64,
            "sid": u16,
            "purge_seqno": u64,
            "cache_transfer": st.builds(CacheTransferOptions, free_memory_bytes=u64, all_keys=st.booleans()),
        },
    ),
    st.one_of(
        st.just({}),
        st.fixed_dictionaries({"scope": u32}),
        st.fixed_dictionaries({"collections": st.lists(u32, min_size=1, max_size=5).map(tuple)}),
    ),
).map(lambda parts: StreamRequestValue(**parts[0], **parts[1]))


@given(stream_request_values)
def test_stream_request_value_round_trip(value: StreamRequestValue) -> None:
    assert StreamRequestValue.decode(value.encode()) == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text('08af-é\\"\ud800', max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
members = st.dictionaries(
    st.sampled_from(["uid", "sid", "collections", "scope", "purge_seqno", "cts", "free_memory", "new"]),
    json_values,
    max_size=4,
)


@given(members)
def test_json_of_any_form_is_taken_or_refused_as_malformed_json(value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    with only(errors.MalformedJson, within_bytes=len(text)):
        decoded = StreamRequestValue.decode(text)
        assert StreamRequestValue.decode(decoded.encode()) == decoded


@given(st.binary(max_size=60))
@example(b"[" * 100_000)
@example(b'{"sid":' + b"9" * 10_000 + b"}")
@example(b'{"uid":"\\ud800"}')
@example(b"\xff\xfe{")
def test_junk_stream_request_values_raise_only_malformed_json(value: bytes) -> None:
    with only(errors.MalformedJson, within_bytes=len(value)):
        StreamRequestValue.decode(value)


# --- system events ------------------------------------------------------------------------------------------------

texts = st.text("ab_\0é漢😀", max_size=20)
collection = {"manifest_uid": u64, "scope_id": u32, "collection_id": u32}
packed_events = st.one_of(
    st.builds(manifests.ScopeCreated, manifest_uid=u64, scope_id=u32, name=texts),
    st.builds(manifests.ScopeDropped, manifest_uid=u64, scope_id=u32),
    st.builds(manifests.CollectionCreated, **collection, name=texts, max_ttl_s=st.none() | u32),
    st.builds(manifests.CollectionDropped, **collection),
)
flatbuffers_only = {"history": st.booleans(), "metered": st.booleans(), "flush_uid": u64}
flatbuffers_events = st.one_of(
    packed_events,
    st.builds(manifests.CollectionCreated, **collection, name=texts, max_ttl_s=st.none() | u32, **flatbuffers_only),
    st.builds(manifests.CollectionModified, **collection, name=texts, max_ttl_s=st.none() | u32, **flatbuffers_only),
    st.builds(manifests.CollectionDropped, **collection, is_system=st.booleans()),
    st.builds(manifests.ScopeDropped, manifest_uid=u64, scope_id=u32, is_system=st.booleans()),
)


def as_message(encoded: manifests.EncodedEvent, *, value: bytes | None = None) -> SystemEvent:
    return SystemEvent(
        seqno=1,
        event=encoded.event,
        version=encoded.version,
        key=encoded.key,
        value=encoded.value if value is None else value,
    )


@given(packed_events)
def test_packed_event_round_trip(event: manifests.Event) -> None:
    encoded = manifests.encode_event(event)
    assert encoded.version < manifests.FLATBUFFERS_VERSION
    assert manifests.decode_event(as_message(encoded)) == event


@given(flatbuffers_events)
def test_flatbuffers_event_round_trip(event: manifests.Event) -> None:
    encoded = manifests.encode_event(event, as_flatbuffers=True)
    assert encoded.version == manifests.FLATBUFFERS_VERSION
    assert manifests.decode_event(as_message(encoded)) == event


@given(event=packed_events, data=st.data())
def test_packed_event_of_another_length_is_refused(event: manifests.Event, data: st.DataObject) -> None:
    encoded = manifests.encode_event(event)
    length = data.draw(st.integers(0, 40).filter(lambda length: length != len(encoded.value)))
    with pytest.raises(errors.MalformedSystemEvent):
        manifests.decode_event(as_message(encoded, value=encoded.value.ljust(length, b"\0")[:length]))


def decode_or_refuse(message: SystemEvent) -> None:
    """The only error is the documented one, and no name is longer than the value it was read from."""
    with only(errors.MalformedSystemEvent, within_bytes=len(message.value)):
        name: str = getattr(manifests.decode_event(message), "name", "")
        assert len(name.encode()) <= max(len(message.key), len(message.value))


@given(event=flatbuffers_events, data=st.data())
def test_truncated_flatbuffers_raise_only_malformed_system_event(event: manifests.Event, data: st.DataObject) -> None:
    encoded = manifests.encode_event(event, as_flatbuffers=True)
    kept = data.draw(st.integers(0, len(encoded.value)))
    decode_or_refuse(as_message(encoded, value=encoded.value[:kept]))


@given(event=flatbuffers_events, data=st.data())
def test_mutated_flatbuffers_raise_only_malformed_system_event(event: manifests.Event, data: st.DataObject) -> None:
    encoded = manifests.encode_event(event, as_flatbuffers=True)
    value = bytearray(encoded.value)
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(u8)
    decode_or_refuse(as_message(encoded, value=bytes(value)))


@given(event=st.integers(0, 7).map(SystemEventId), version=st.integers(0, 3), value=st.binary(max_size=80))
@example(SystemEventId.COLLECTION_CREATED, manifests.FLATBUFFERS_VERSION, b"")
@example(SystemEventId.COLLECTION_CREATED, manifests.FLATBUFFERS_VERSION, b"\xff" * 64)
@example(SystemEventId.COLLECTION_CREATED, manifests.FLATBUFFERS_VERSION, b"\0" * 64)
def test_junk_events_raise_only_malformed_system_event(event: SystemEventId, version: int, value: bytes) -> None:
    decode_or_refuse(SystemEvent(seqno=1, event=event, version=version, key=b"\xff", value=value))


# --- every message survives the way to bytes and back, whatever its fields are ----------------------------------------

FIXED_FIELDS: dict[type[Message], set[str]] = {
    # Server-initiated frames have no room for frame infos.
    **{cls: {"frame_infos"} for cls in SERVER_REQUESTS.values()},
    # A response to one opcode only has it as the default.
    **{cls: {"opcode"} for cls in RESPONSES.values() if len(cls.opcodes) == 1},
}
BY_NAME = [pytest.param(cls, id=cls.__name__) for cls in MESSAGE_CLASSES]


def decode(data: bytes, *, collections: bool) -> Message:
    (frame,) = decode_frames(data)
    return decode_message(frame, WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED)


# There are a hundred classes, and most of what a message is they share.
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data(), collections=st.booleans())
@pytest.mark.parametrize("cls", BY_NAME)
def test_message_decodes_to_itself(cls: type[Message], data: st.DataObject, collections: bool) -> None:
    message = data.draw(messages_of(cls, collections=collections))
    encoded = message.encode()
    decoded = decode(encoded, collections=collections)
    assert type(decoded) is cls
    assert decoded == message
    assert decoded.encode() == encoded


@given(data=st.data(), collections=st.booleans())
def test_messages_keep_their_order_in_one_stream(data: st.DataObject, collections: bool) -> None:
    messages = data.draw(st.lists(any_message(collections=collections), max_size=5))
    frames = decode_frames(b"".join(message.encode() for message in messages))
    negotiated = WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED
    assert [decode_message(frame, negotiated) for frame in frames] == messages


# --- the strategies themselves ------------------------------------------------------------------------------------


def test_every_registered_class_is_covered() -> None:
    registered = {*REQUESTS.values(), *RESPONSES.values(), *SERVER_REQUESTS.values()}
    assert registered <= set(MESSAGE_CLASSES)
    assert len(REQUESTS) + len(SERVER_REQUESTS) == len({*REQUESTS.values(), *SERVER_REQUESTS.values()})


def test_class_with_a_value_of_its_own_has_a_strategy_of_its_own() -> None:
    encoding = {
        cls
        for cls in MESSAGE_CLASSES
        if cls.encode_value is not Message.encode_value or cls.value_codec or cls.value_layout.fields
    }
    assert encoding == {cls for cls in MESSAGE_CLASSES if structured_parts(cls) is not None}


def test_no_structured_strategy_is_left_over() -> None:
    assert set(STRUCTURED) <= {base for cls in MESSAGE_CLASSES for base in cls.__mro__}


@each("cls", BY_NAME)
def test_strategy_reaches_every_field(cls: type[Message]) -> None:
    """A field that no strategy ever sets would round-trip by its default only."""
    unseen = {field.name for field in fields(cls)} - FIXED_FIELDS.get(cls, set())

    @settings(max_examples=20, derandomize=True, database=None)
    @given(messages_of(cls, collections=True))
    def draw(message: Message) -> None:
        for field in fields(message):
            if getattr(message, field.name) not in (field.default, None):
                unseen.discard(field.name)

    draw()
    assert unseen == set()
