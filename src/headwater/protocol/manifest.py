"""The collections manifest: scopes and their collections, as JSON, and the system events between two manifests.

The store keeps the manifest, the node changes it and the client reads it. Ids are base-16 strings with no 0x in the
JSON. Id 0 is the default scope and the default collection; the ids below 8 are reserved.

`decode_event` and `encode_event` convert between the `SystemEvent` message and the events that the client delivers and
the store keeps (kv_engine, docs/dcp/documentation/commands/system_event.md). Versions 0 and 1 pack their integers
big-endian in the value, with the name as the key. Version 2 puts a FlatBuffers table into the value; it is sent only
to consumers that asked for `flatbuffers_system_events`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import flatbuffers
from flatbuffers import number_types
from flatbuffers.table import Table

from headwater.errors import LocalProtocolError, MalformedJson, MalformedSystemEvent
from headwater.protocol.messages.base import Layout, u32, u64
from headwater.protocol.messages.dcp_changes import SystemEvent, SystemEventId
from headwater.protocol.numbers import DEFAULT_COLLECTION, DEFAULT_SCOPE, CollectionId, ManifestUid, ScopeId

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
    """The parts of a `SystemEvent` message that depend on the event."""

    event: SystemEventId
    version: int
    key: bytes
    value: bytes


# --- decoding -----------------------------------------------------------------------------------------------------


def decode_event(message: SystemEvent) -> Event:
    """Return the event in a message, by its id and version."""
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
    """Reads the fields of a FlatBuffers table by their number in the schema; an absent one has its default."""

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
        # The reader slices, so a length beyond the end would silently cut the string.
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
    """Return the event as a message carries it: packed in the lowest version that can hold it, or as FlatBuffers."""
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


# --- the manifest -----------------------------------------------------------------------------------------------------


DEFAULT_NAME = "_default"
FIRST_ID = 8
ID_MAX = 2**32 - 1
NAME_BYTES_MAX = 251
COLLECTIONS_MAX = 1200
SCOPES_MAX = 1200
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection of a scope."""

    id: CollectionId
    name: str
    max_ttl_s: int | None = None
    """`None` uses the bucket's setting; 0 disables it."""
    history: bool = False
    metered: bool = False
    flush_uid: ManifestUid = ManifestUid(0)
    """The uid of the manifest that flushed it last, 0 for none: its documents from before are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A scope with its collections."""

    id: ScopeId
    name: str
    collections: tuple[Collection, ...] = ()

    def collection(self, name: str) -> Collection | None:
        return next((collection for collection in self.collections if collection.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All scopes and collections of a bucket, at one uid. A change makes a new manifest with a higher one."""

    uid: ManifestUid = ManifestUid(0)
    scopes: tuple[Scope, ...] = (
        Scope(id=DEFAULT_SCOPE, name=DEFAULT_NAME, collections=(Collection(id=DEFAULT_COLLECTION, name=DEFAULT_NAME),)),
    )
    ids_used: int = FIRST_ID - 1
    """The highest id ever assigned, so that none is assigned again."""
    _by_id: dict[CollectionId, tuple[Scope, Collection]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = {collection.id: (scope, collection) for scope, collection in self.collections()}
        object.__setattr__(self, "_by_id", by_id)

    # --- looking up -----------------------------------------------------------------------------------------------

    def scope(self, name: str) -> Scope | None:
        return next((scope for scope in self.scopes if scope.name == name), None)

    def find(self, scope_name: str, collection_name: str) -> Collection | None:
        scope = self.scope(scope_name)
        return scope.collection(collection_name) if scope else None

    def collections(self) -> Iterator[tuple[Scope, Collection]]:
        for scope in self.scopes:
            for collection in scope.collections:
                yield scope, collection

    def collection_by_id(self, collection_id: CollectionId) -> tuple[Scope, Collection] | None:
        return self._by_id.get(collection_id)

    @property
    def has_dropped(self) -> bool:
        """Whether a collection may have been dropped, so that changes of it may still be stored."""
        given_out = sum(1 for _ in self.collections()) + len(self.scopes) - 2
        holds_default = self.collection_by_id(DEFAULT_COLLECTION) is not None
        return not holds_default or self.ids_used - (FIRST_ID - 1) > given_out

    # --- changing -------------------------------------------------------------------------------------------------

    def with_scope(self, name: str) -> Manifest:
        _check_name(name)
        if self.scope(name):
            raise LocalProtocolError(f'scope "{name}" already exists')
        scope = Scope(id=ScopeId(self.ids_used + 1), name=name)
        return self._next(scopes=(*self.scopes, scope), ids_used=self.ids_used + 1)

    def without_scope(self, name: str) -> Manifest:
        if name == DEFAULT_NAME or not self.scope(name):
            raise LocalProtocolError(f'scope "{name}" {"can not be dropped" if name == DEFAULT_NAME else "is unknown"}')
        return self._next(scopes=tuple(scope for scope in self.scopes if scope.name != name))

    def with_collection(
        self, scope_name: str, name: str, *, max_ttl_s: int | None = None, history: bool = False
    ) -> Manifest:
        _check_name(name)
        scope = self._scope_or_raise(scope_name)
        if scope.collection(name):
            raise LocalProtocolError(f'collection "{scope_name}.{name}" already exists')
        collection = Collection(id=CollectionId(self.ids_used + 1), name=name, max_ttl_s=max_ttl_s, history=history)
        changed = replace(scope, collections=(*scope.collections, collection))
        return self._next(scopes=self._replaced(changed), ids_used=self.ids_used + 1)

    def with_changed_collection(self, scope_name: str, changed: Collection) -> Manifest:
        """Return the manifest with other settings of a collection, which keeps its id and its name."""
        scope = self._scope_or_raise(scope_name)
        known = scope.collection(changed.name)
        if known is None or known.id != changed.id:
            raise LocalProtocolError(f'collection "{scope_name}.{changed.name}" is unknown')
        kept = tuple(changed if collection.id == changed.id else collection for collection in scope.collections)
        return self._next(scopes=self._replaced(replace(scope, collections=kept)))

    def without_collection(self, scope_name: str, name: str) -> Manifest:
        scope = self._scope_or_raise(scope_name)
        if not scope.collection(name):
            raise LocalProtocolError(f'collection "{scope_name}.{name}" is unknown')
        kept = tuple(collection for collection in scope.collections if collection.name != name)
        return self._next(scopes=self._replaced(replace(scope, collections=kept)))

    def _scope_or_raise(self, name: str) -> Scope:
        scope = self.scope(name)
        if scope is None:
            raise LocalProtocolError(f'scope "{name}" is unknown')
        return scope

    def _replaced(self, changed: Scope) -> tuple[Scope, ...]:
        return tuple(changed if scope.id == changed.id else scope for scope in self.scopes)

    def _next(self, **changes: Any) -> Manifest:
        manifest = replace(self, uid=ManifestUid(self.uid + 1), **changes)
        if manifest.ids_used > ID_MAX:
            raise LocalProtocolError("all ids of scopes and collections have been given out")
        if len(manifest.scopes) > SCOPES_MAX or sum(1 for _ in manifest.collections()) > COLLECTIONS_MAX:
            raise LocalProtocolError(f"a bucket has at most {SCOPES_MAX} scopes and {COLLECTIONS_MAX} collections")
        return manifest

    # --- JSON -----------------------------------------------------------------------------------------------------

    def encode(self, *, with_ids_used: bool = False) -> bytes:
        """Encode the manifest as JSON; the stored copy must include `ids_used`."""
        members = self.to_json()
        return json.dumps({**members, "ids_used": self.ids_used} if with_ids_used else members).encode()

    def to_json(self) -> dict[str, Any]:
        return {
            "uid": f"{self.uid:x}",
            "scopes": [
                {
                    "name": scope.name,
                    "uid": f"{scope.id:x}",
                    "collections": [_collection_to_json(collection) for collection in scope.collections],
                }
                for scope in self.scopes
            ],
        }

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Manifest:
        try:
            members = json.loads(bytes(data))
            scopes = tuple(_scope_from_json(scope) for scope in members["scopes"])
            uid = ManifestUid(_number(members["uid"], bits=64))
            ids_used = members.get("ids_used", 0)
            if type(ids_used) is not int or not 0 <= ids_used <= ID_MAX:
                raise ValueError(f"ids_used {ids_used}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MalformedJson(f"not a collections manifest: {error!r}") from error
        _check_unique(scopes)
        _check_defaults(scopes)
        ids = [collection.id for scope in scopes for collection in scope.collections]
        highest = max([FIRST_ID - 1, ids_used, *ids, *(scope.id for scope in scopes)])
        return cls(uid=uid, scopes=scopes, ids_used=highest)

    # --- what happened between two manifests ----------------------------------------------------------------------

    def events_to(self, newer: Manifest) -> list[Event]:
        """Return the system events that lead from here to `newer`.

        Only the last carries the new uid: until then the newer manifest has not been processed as a whole.
        """
        events = [
            *self._dropped_collections(newer),
            *(ScopeDropped(manifest_uid=self.uid, scope_id=scope.id) for scope in _missing(self, newer)),
            *(
                ScopeCreated(manifest_uid=self.uid, scope_id=scope.id, name=scope.name)
                for scope in _missing(newer, self)
            ),
            *self._created_collections(newer),
        ]
        if events:
            events[-1] = replace(events[-1], manifest_uid=newer.uid)
        return events

    def _dropped_collections(self, newer: Manifest) -> Iterator[Event]:
        for scope, collection in self.collections():
            if newer.collection_by_id(collection.id) is None:
                yield CollectionDropped(manifest_uid=self.uid, scope_id=scope.id, collection_id=collection.id)

    def _created_collections(self, newer: Manifest) -> Iterator[Event]:
        # As recorded from 7.0.5: by name, whatever the ids and scopes are. "c1" with id 9 came before "fruit" with id
        # 8, and "c8" with id 8 before "c9" with id 9.
        for scope, collection in sorted(newer.collections(), key=lambda pair: (pair[1].name, pair[1].id)):
            known = self.collection_by_id(collection.id)
            # A flush is sent as the creation of an existing collection (kv_engine, docs, "System Event"). A flush by a
            # manifest up to this one was sent already: an event of version 0 or 1 does not say which flush it is.
            is_flushed = known is not None and collection.flush_uid > max(known[1].flush_uid, self.uid)
            is_changed = known is not None and replace(known[1], flush_uid=collection.flush_uid) != collection
            if known is None or is_flushed or is_changed:
                kind = CollectionModified if is_changed and not is_flushed else CollectionCreated
                yield kind(
                    manifest_uid=self.uid,
                    scope_id=scope.id,
                    collection_id=collection.id,
                    name=collection.name,
                    max_ttl_s=collection.max_ttl_s,
                    history=collection.history,
                    metered=collection.metered,
                    flush_uid=collection.flush_uid,
                )


def _missing(here: Manifest, there: Manifest) -> Iterator[Scope]:
    known = {scope.id for scope in there.scopes}
    return (scope for scope in here.scopes if scope.id not in known)


def _check_unique(scopes: tuple[Scope, ...]) -> None:
    ids = [collection.id for scope in scopes for collection in scope.collections]
    if len(ids) != len(set(ids)) or len(scopes) != len({scope.id for scope in scopes}):
        raise MalformedJson("a collections manifest gives an id twice")
    for names in ([scope.name for scope in scopes], *([c.name for c in scope.collections] for scope in scopes)):
        if len(names) != len(set(names)):
            raise MalformedJson("a collections manifest gives a name twice")


def _check_defaults(scopes: tuple[Scope, ...]) -> None:
    """Id 0 and the default's name belong together. The default scope is always there, its collection may be dropped."""
    if not any(scope.id == DEFAULT_SCOPE for scope in scopes):
        raise MalformedJson("a collections manifest has the default scope")
    for scope in scopes:
        if (scope.id == DEFAULT_SCOPE) != (scope.name == DEFAULT_NAME):
            raise MalformedJson(f'scope "{scope.name}" can not have id {scope.id:x}')
        for collection in scope.collections:
            is_default = scope.id == DEFAULT_SCOPE and collection.name == DEFAULT_NAME
            if (collection.id == DEFAULT_COLLECTION) != is_default:
                raise MalformedJson(f'collection "{scope.name}.{collection.name}" can not have id {collection.id:x}')


def _collection_to_json(collection: Collection) -> dict[str, Any]:
    members: dict[str, Any] = {"name": collection.name, "uid": f"{collection.id:x}"}
    if collection.max_ttl_s is not None:
        members["maxTTL"] = collection.max_ttl_s
    if collection.history:
        members["history"] = True
    if collection.metered:
        members["metered"] = True
    if collection.flush_uid:
        members["flush_uid"] = f"{collection.flush_uid:x}"
    return members


def _scope_from_json(members: Any) -> Scope:
    return Scope(
        id=ScopeId(_number(members["uid"], bits=32)),
        name=_name(members["name"]),
        collections=tuple(_collection_from_json(collection) for collection in members.get("collections", ())),
    )


def _collection_from_json(members: Any) -> Collection:
    max_ttl_s = members.get("maxTTL", members.get("max_ttl"))
    if max_ttl_s is not None and (type(max_ttl_s) is not int or not 0 <= max_ttl_s < 2**31):
        raise ValueError(f"maxTTL {max_ttl_s}")
    return Collection(
        id=CollectionId(_number(members["uid"], bits=32)),
        name=_name(members["name"]),
        max_ttl_s=max_ttl_s,
        history=bool(members.get("history", False)),
        metered=bool(members.get("metered", False)),
        flush_uid=ManifestUid(_number(members.get("flush_uid", "0"), bits=64)),
    )


def _name(name: Any) -> str:
    """Check a name that exists already: servers have some that no user may choose here."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_BYTES_MAX or not _NAME_CHARACTERS.issuperset(name):
        raise ValueError(f"{name!r} is not a name")
    return name


def _number(text: str, *, bits: int) -> int:
    number = int(text, 16)
    if not 0 <= number < 2**bits:
        raise ValueError(f"{text} has more than {bits} bits")
    return number


def _check_name(name: str) -> None:
    if not name or name[0] in "_%" or len(name) > NAME_BYTES_MAX or not _NAME_CHARACTERS.issuperset(name):
        raise LocalProtocolError(
            f'"{name}" is not a name for a scope or collection',
            hint="Use letters, digits, _ - and %, not beginning with _ or %, up to 251 characters",
        )
