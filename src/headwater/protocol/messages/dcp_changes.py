"""DCP messages that are changes, and those that frame them: snapshots, seqno-advanced, cache transfer, system events.

The pages of the same names in kv_engine's docs/dcp/documentation/commands define their layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.features import Opcode, OpenIntEnum, OpenIntFlag
from headwater.protocol.frames import HEADER_BYTES, DurabilityLevel, decode_collection_id, encode_collection_id
from headwater.protocol.messages.base import Layout, Request, list_codec, message, take, u8, u16, u32, u64
from headwater.protocol.numbers import KEY_BYTES_MAX, Cas, CollectionId, Seqno
from headwater.protocol.values import Datatype

_V1_REMOVAL = Layout(u64("seqno"), u64("rev_seqno"), u16("nmeta"))


@message(Opcode.DCP_MUTATION)
class Mutation(Request):
    layouts = (
        Layout(
            u64("seqno"),
            u64("rev_seqno"),
            u32("flags"),
            u32("expiry"),
            u32("lock_time"),
            u16("nmeta"),
            u8("nru"),
        ),
    )

    seqno: Seqno
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    nmeta: int = 0
    """How many bytes of extended metadata are at the end of the value. Servers since 5.0 send none."""
    nru: int = 0
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message(Opcode.DCP_DELETION)
class Deletion(Request):
    """Version 2, with the time of the deletion, if the consumer asked for delete times; else version 1.

    As recorded from 7.0.5: version 2 is sent if the open had the delete-times flag, whatever HELLO says.
    """

    layouts = (_V1_REMOVAL, Layout(u64("seqno"), u64("rev_seqno"), u32("delete_time"), u8("unused")))

    seqno: Seqno
    rev_seqno: int
    nmeta: int = 0
    delete_time: int | None = None
    unused: int = 0
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""
    """The extended attributes that outlive the document, if there are any."""


@message(Opcode.DCP_EXPIRATION)
class Expiration(Request):
    """Sent to consumers that enabled the expiry opcode; others get a deletion. Before 6.5 it had no delete time."""

    layouts = (_V1_REMOVAL, Layout(u64("seqno"), u64("rev_seqno"), u32("delete_time")))

    seqno: Seqno
    rev_seqno: int
    nmeta: int = 0
    delete_time: int | None = None
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message(Opcode.DCP_FLUSH)
class DcpFlush(Request):
    """Drop all data of the vbucket. Newer servers no longer send it."""


@message(Opcode.DCP_PREPARE)
class Prepare(Request):
    """A durable write has begun. For flow control it counts two bytes more than are sent."""

    layouts = (
        Layout(
            u64("seqno"),
            u64("rev_seqno"),
            u32("flags"),
            u32("expiry"),
            u32("lock_time"),
            u8("nru"),
            u8("deleted"),
            u8("durability", DurabilityLevel),
        ),
    )

    seqno: Seqno
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    nru: int = 0
    deleted: int = 0
    durability: DurabilityLevel
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message(Opcode.DCP_SEQNO_ACKNOWLEDGED)
class SeqnoAcknowledged(Request):
    """The consumer has prepared everything up to this seqno."""

    layouts = (Layout(u64("prepared_seqno")),)

    prepared_seqno: Seqno


@message(Opcode.DCP_COMMIT)
class Commit(Request):
    layouts = (Layout(u64("prepared_seqno"), u64("commit_seqno")),)

    prepared_seqno: Seqno
    commit_seqno: Seqno
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.DCP_ABORT)
class Abort(Request):
    layouts = (Layout(u64("prepared_seqno"), u64("abort_seqno")),)

    prepared_seqno: Seqno
    abort_seqno: Seqno
    collection_id: CollectionId | None = None
    key: bytes


# --- what frames the changes of a stream: snapshot marker, OSO snapshot, seqno-advanced, cache transfer ---------------


class SnapshotFlags(OpenIntFlag):
    MEMORY = 0x01
    DISK = 0x02
    CHECKPOINT = 0x04
    ACK = 0x08
    """Acknowledge the snapshot once it has arrived as a whole."""
    HISTORY = 0x10
    MAY_CONTAIN_DUPLICATES = 0x20


_V1 = Layout(u64("start_seqno"), u64("end_seqno"), u32("flags", SnapshotFlags))
_V2_VERSION = Layout(u8("version"))
_V2_0_FIELDS = (
    u64("start_seqno"),
    u64("end_seqno"),
    u32("flags", SnapshotFlags),
    u64("max_visible_seqno"),
    u64("high_completed_seqno"),
)
MARKER_V2_VALUES = {
    0: Layout(*_V2_0_FIELDS),
    2: Layout(*_V2_0_FIELDS, u64("purge_seqno"), u64("high_prepared_seqno")),
}
"""Version byte → value. Version 1 (a timestamp for point-in-time recovery) was never released. A recorded 8.0.2 server
that has purged sends the purge seqno at offset 36, and the high prepared seqno at 44."""


@message(Opcode.DCP_SNAPSHOT_MARKER)
class SnapshotMarker(Request):
    """A snapshot begins: the changes between these seqnos follow.

    Version 1 has all its fields in the extras. Version 2 has one byte there, which names the layout of the value:
    2.0 adds the seqnos of durable writes, 2.2 the purge seqno and the high prepared seqno. The version is the least
    that holds the given fields.
    """

    layouts = (_V1, _V2_VERSION)

    start_seqno: Seqno
    end_seqno: Seqno
    flags: SnapshotFlags
    max_visible_seqno: Seqno | None = None
    high_completed_seqno: Seqno | None = None
    purge_seqno: Seqno | None = None
    high_prepared_seqno: Seqno | None = None

    @property
    def version(self) -> int | None:
        """The version byte of a version 2 marker, or None for version 1."""
        if self.purge_seqno is not None or self.high_prepared_seqno is not None:
            return 2
        return None if self.max_visible_seqno is None and self.high_completed_seqno is None else 0

    def layout(self) -> Layout:
        return _V1 if self.version is None else _V2_VERSION

    def encode_value(self) -> bytes:
        version = self.version
        if version is None:
            return b""
        layout = MARKER_V2_VALUES[version]
        missing = [field.name for field in layout.fields if getattr(self, field.name) is None]
        if missing:
            raise LocalProtocolError(f"snapshot marker v2.{version} also needs {', '.join(missing)}")
        return layout.pack(self)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        # Snapshot Marker: version 1.0 must not have a value; from 2.0 on the value holds what the version byte names.
        if "version" not in known:
            return super(SnapshotMarker, cls).decode_value(value, known)
        version = known.pop("version")
        if version not in MARKER_V2_VALUES:
            raise MalformedMessage(f"snapshot marker v2.{version} is not known", offset=HEADER_BYTES)
        layout = MARKER_V2_VALUES[version]
        if len(value) != layout.size_bytes:
            raise MalformedMessage(
                f"snapshot marker v2.{version} must have a value of {layout.size_bytes} bytes, not {len(value)}",
                offset=HEADER_BYTES + 1,
            )
        return dict(layout.unpack(value))


class OsoFlags(OpenIntFlag):
    START = 0x01
    END = 0x02


@message(Opcode.DCP_OSO_SNAPSHOT)
class OsoSnapshot(Request):
    """The start or the end of a snapshot whose changes come in any order."""

    layouts = (Layout(u32("flags", OsoFlags)),)

    flags: OsoFlags


@message(Opcode.DCP_SEQNO_ADVANCED)
class SeqnoAdvanced(Request):
    """The snapshot extends to this seqno, but its last changes are hidden from this stream."""

    layouts = (Layout(u64("seqno")),)

    seqno: Seqno


_CACHE_ITEM = Layout(
    u64("cas"),
    u64("seqno"),
    u64("rev_seqno"),
    u32("value_bytes"),
    u32("flags"),
    u32("expiry"),
    u16("key_bytes"),
    u8("datatype", Datatype),
    u8("cache_hint"),
)
_CACHE_KEY_BYTES_MIN = 2  # a collection id and one byte


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheItem:
    """One document of a cache transfer. Its key always has a collection id; its value may be left out."""

    cas: Cas = Cas(0)
    seqno: Seqno
    rev_seqno: int = 0
    flags: int = 0
    expiry: int = 0
    datatype: Datatype = Datatype.RAW
    cache_hint: int = 0
    collection_id: CollectionId
    key: bytes
    value: bytes = b""

    @property
    def value_bytes(self) -> int:
        return len(self.value)

    @property
    def key_bytes(self) -> int:
        return len(encode_collection_id(self.collection_id)) + len(self.key)

    def encode(self) -> bytes:
        return _CACHE_ITEM.pack(self) + encode_collection_id(self.collection_id) + self.key + self.value

    @classmethod
    def decode(cls, data: bytes, offset: int) -> tuple[Self, int]:
        """Return the item at `offset` and the offset after it."""
        known, at = _CACHE_ITEM.take(data, offset)
        wire_key, at = take(data, at, known.pop("key_bytes"))
        value, at = take(data, at, known.pop("value_bytes"))
        if len(wire_key) < _CACHE_KEY_BYTES_MIN:
            raise MalformedMessage("a cache transfer key needs 2 bytes", offset=HEADER_BYTES + offset)
        collection_id, key_at = decode_collection_id(wire_key)
        if len(wire_key) - key_at > KEY_BYTES_MAX:
            raise MalformedMessage(f"a cache transfer key exceeds {KEY_BYTES_MAX} bytes", offset=HEADER_BYTES + offset)
        return cls(collection_id=collection_id, key=wire_key[key_at:], value=value, **known), at


@message(Opcode.DCP_CACHE_TRANSFER)
class CacheTransfer(Request):
    """Documents copied from the producer's cache, in no order and outside any snapshot."""

    value_codec = list_codec("items", CacheItem.encode, CacheItem.decode, count_min=1)

    items: tuple[CacheItem, ...]


@message(Opcode.DCP_CACHE_TRANSFER_END)
class CacheTransferEnd(Request):
    """The cache transfer is over; what follows is an ordinary stream."""


# --- the system-event message; what its key and value mean is in `headwater.protocol.manifest` -------------------


class SystemEventId(OpenIntEnum):
    COLLECTION_CREATED = 0
    COLLECTION_DROPPED = 1
    SCOPE_CREATED = 3
    SCOPE_DROPPED = 4
    COLLECTION_MODIFIED = 5


@message(Opcode.DCP_SYSTEM_EVENT)
class SystemEvent(Request):
    """A collection or a scope was created, dropped or changed."""

    layouts = (Layout(u64("seqno"), u32("event", SystemEventId), u8("version")),)

    seqno: Seqno
    event: SystemEventId
    version: int = 0
    key: bytes = b""
    value: bytes = b""
