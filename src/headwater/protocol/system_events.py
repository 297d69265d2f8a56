"""What system events mean: scopes and collections that come, go and change.

`decode_event` and `encode_event` stand between the `SystemEvent` message and the events that the client hands out and
the store keeps (kv_engine, docs/dcp/documentation/commands/system_event.md). Versions 0 and 1 pack their integers
big-endian in the value, with the name as the key. Version 2 puts a FlatBuffers table into the value; it is sent only to
consumers that asked for `flatbuffers_system_events`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import flatbuffers
from flatbuffers import number_types
from flatbuffers.table import Table

from headwater.errors import LocalProtocolError, MalformedSystemEvent
from headwater.protocol.messages.base import Layout, u32, u64
from headwater.protocol.messages.dcp_changes import SystemEvent, SystemEventId
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId

FLATBUFFERS_VERSION = 2

SCOPE_VALUE = Layout(u64("manifest_uid"), u32("scope_id"))
COLLECTION_VALUE = Layout(*SCOPE_VALUE.fields, u32("collection_id"))
COLLECTION_WITH_TTL_VALUE = Layout(*COLLECTION_VALUE.fields, u32("max_ttl_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeCreated:
    manifest_uid: ManifestUid
    scope_id: ScopeId
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeDropped:
    manifest_uid: ManifestUid
    scope_id: ScopeId
    is_system: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionCreated:
    """Also sent, at a higher seqno, when a collection is flushed."""

    manifest_uid: ManifestUid
    scope_id: ScopeId
    collection_id: CollectionId
    name: str
    max_ttl_s: int | None = None
    history: bool = False
    metered: bool = False
    flush_uid: ManifestUid = ManifestUid(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionModified(CollectionCreated):
    """Only ever sent as FlatBuffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionDropped:
    manifest_uid: ManifestUid
    scope_id: ScopeId
    collection_id: CollectionId
    is_system: bool = False


Event = ScopeCreated | ScopeDropped | CollectionCreated | CollectionModified | CollectionDropped


_EVENT_CLASSES: dict[SystemEventId, type[Event]] = {
    SystemEventId.SCOPE_CREATED: ScopeCreated,
    SystemEventId.SCOPE_DROPPED: ScopeDropped,
    SystemEventId.COLLECTION_CREATED: CollectionCreated,
    SystemEventId.COLLECTION_MODIFIED: CollectionModified,
    SystemEventId.COLLECTION_DROPPED: CollectionDropped,
}
_EVENT_IDS = {cls: event_id for event_id, cls in _EVENT_CLASSES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedEvent:
    """The parts of a `SystemEvent` message that an event decides."""

    event: SystemEventId
    version: int
    key: bytes
    value: bytes


# --- decoding -----------------------------------------------------------------------------------------------------


def decode_event(message: SystemEvent) -> Event:
    """The event in a message, by its id and version."""
    try:
        if message.version == FLATBUFFERS_VERSION:
            return _decode_flatbuffers(message)
        return _decode_packed(message)
    except (struct.error, IndexError, OverflowError, TypeError, UnicodeDecodeError) as error:
        # The FlatBuffers reader checks nothing itself: a wrong offset shows as one of these.
        raise MalformedSystemEvent(f"system event {message.event.name}: {error}") from error


PACKED_VALUES: dict[tuple[SystemEventId, int], Layout] = {
    (SystemEventId.COLLECTION_CREATED, 0): COLLECTION_VALUE,
    (SystemEventId.COLLECTION_CREATED, 1): COLLECTION_WITH_TTL_VALUE,
    (SystemEventId.COLLECTION_DROPPED, 0): COLLECTION_VALUE,
    (SystemEventId.SCOPE_CREATED, 0): SCOPE_VALUE,
    (SystemEventId.SCOPE_DROPPED, 0): SCOPE_VALUE,
}
"""Event and version → the layout of the value."""


def _decode_packed(message: SystemEvent) -> Event:
    layout = PACKED_VALUES.get((message.event, message.version))
    if layout is None:
        raise MalformedSystemEvent(f"version {message.version} of system event {message.event.name} is not known")
    if len(message.value) != layout.size_bytes:
        raise MalformedSystemEvent(
            f"system event {message.event.name} must have a value of {layout.size_bytes} bytes, "
            f"not {len(message.value)}"
        )
    members: dict[str, Any] = layout.unpack(message.value)
    if message.event in (SystemEventId.COLLECTION_CREATED, SystemEventId.SCOPE_CREATED):
        members["name"] = message.key.decode()
    return _EVENT_CLASSES[message.event](**members)


class _TableReader:
    """The fields of a FlatBuffers table by their number in the schema; an absent one has its default."""

    def __init__(self, value: bytes) -> None:
        root = number_types.UOffsetTFlags.py_type(flatbuffers.encode.Get(flatbuffers.packer.uoffset, value, 0))
        self._table = Table(value, root)

    def _position(self, field: int) -> int:
        offset: int = self._table.Offset(4 + 2 * field)
        position: int = offset + self._table.Pos if offset else 0
        if position < 0 or position > len(self._table.Bytes):
            raise IndexError(f"field {field} lies outside the value")
        return position

    def u64(self, field: int) -> int:
        at = self._position(field)
        return int(self._table.Get(number_types.Uint64Flags, at)) if at else 0

    def u32(self, field: int) -> int:
        at = self._position(field)
        return int(self._table.Get(number_types.Uint32Flags, at)) if at else 0

    def flag(self, field: int) -> bool:
        at = self._position(field)
        return bool(self._table.Get(number_types.BoolFlags, at)) if at else False

    def string(self, field: int) -> str:
        at = self._position(field)
        if not at:
            return ""
        text = bytes(self._table.String(at))
        # The reader slices, so a length beyond the end would cut the string without a word.
        if len(text) != self._table.Get(number_types.UOffsetTFlags, self._table.Indirect(at)):
            raise IndexError(f"the string of field {field} runs beyond the value")
        return text.decode()


def _decode_flatbuffers(message: SystemEvent) -> Event:
    table = _TableReader(message.value)
    uid, scope = ManifestUid(table.u64(0)), ScopeId(table.u32(1))
    if message.event in (SystemEventId.COLLECTION_CREATED, SystemEventId.COLLECTION_MODIFIED):
        created = message.event == SystemEventId.COLLECTION_CREATED
        return (CollectionCreated if created else CollectionModified)(
            manifest_uid=uid,
            scope_id=scope,
            collection_id=CollectionId(table.u32(2)),
            max_ttl_s=table.u32(4) if table.flag(3) else None,
            name=table.string(5),
            history=table.flag(6),
            metered=table.flag(8),
            flush_uid=ManifestUid(table.u64(9)),
        )
    if message.event == SystemEventId.COLLECTION_DROPPED:
        return CollectionDropped(
            manifest_uid=uid,
            scope_id=scope,
            collection_id=CollectionId(table.u32(2)),
            is_system=table.flag(3),
        )
    if message.event == SystemEventId.SCOPE_CREATED:
        return ScopeCreated(manifest_uid=uid, scope_id=scope, name=table.string(2))
    if message.event == SystemEventId.SCOPE_DROPPED:
        return ScopeDropped(manifest_uid=uid, scope_id=scope, is_system=table.flag(2))
    raise MalformedSystemEvent(f"system event {message.event} is not known")


# --- encoding -----------------------------------------------------------------------------------------------------


def encode_event(event: Event, *, as_flatbuffers: bool = False) -> EncodedEvent:
    """The event as a message carries it: packed in the least version that holds it, or as FlatBuffers."""
    event_id = _EVENT_IDS[type(event)]
    name = event.name.encode() if isinstance(event, ScopeCreated | CollectionCreated) else b""
    if as_flatbuffers:
        return EncodedEvent(event=event_id, version=FLATBUFFERS_VERSION, key=name, value=_encode_flatbuffers(event))
    if isinstance(event, CollectionModified):
        raise LocalProtocolError("a modified collection can be sent as FlatBuffers only")
    version, value = _encode_packed(event)
    return EncodedEvent(event=event_id, version=version, key=name, value=value)


def _encode_packed(event: Event) -> tuple[int, bytes]:
    version = 1 if isinstance(event, CollectionCreated) and event.max_ttl_s is not None else 0
    return version, PACKED_VALUES[_EVENT_IDS[type(event)], version].pack(event)


def _encode_flatbuffers(event: Event) -> bytes:
    builder = flatbuffers.Builder(128)
    name = builder.CreateString(event.name) if isinstance(event, ScopeCreated | CollectionCreated) else 0
    builder.StartObject(10)
    builder.PrependUint64Slot(0, event.manifest_uid, 0)
    builder.PrependUint32Slot(1, event.scope_id, 0)
    if isinstance(event, CollectionCreated):
        builder.PrependUint32Slot(2, event.collection_id, 0)
        builder.PrependBoolSlot(3, event.max_ttl_s is not None, False)
        builder.PrependUint32Slot(4, event.max_ttl_s or 0, 0)
        builder.PrependUOffsetTRelativeSlot(5, name, 0)
        builder.PrependBoolSlot(6, event.history, False)
        builder.PrependBoolSlot(8, event.metered, False)
        builder.PrependUint64Slot(9, event.flush_uid, 0)
    elif isinstance(event, CollectionDropped):
        builder.PrependUint32Slot(2, event.collection_id, 0)
        builder.PrependBoolSlot(3, event.is_system, False)
    elif isinstance(event, ScopeCreated):
        builder.PrependUOffsetTRelativeSlot(2, name, 0)
    else:
        builder.PrependBoolSlot(2, event.is_system, False)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())
