"""The control messages that a consumer may send, and the form in which it then gets changes.

An unknown key gets EINVAL, and so does a bad value: clients find out this way what a server supports (kv_engine, DCP
docs, "Control"). To add a control, add a setting to `Controls` and a line to `CONTROLS`. The dialect of a version
(`protocol.stream_requests`) lists the values that it accepts, and keys that get NOT_SUPPORTED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from headwater.kernels.memory import Bytes, Column
from headwater.protocol import manifest as manifests
from headwater.protocol.manifest import EncodedEvent, Event, Manifest
from headwater.protocol.messages.dcp_changes import SystemEvent, SystemEventId
from headwater.protocol.numbers import (
    CONNECTION_BUFFER_BYTES_MAX,
    CONNECTION_NAME_BYTES_MAX,
    DEFAULT_COLLECTION,
    CollectionId,
    ScopeId,
    Seqno,
)
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import Dialect


class OsoMode(Enum):
    OFF = "false"
    ON = "true"
    ON_WITH_SEQNO_ADVANCED = "true_with_seqno_advanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The settings of one connection."""

    noop_enabled: bool = False
    """The node sends noops, and closes the connection if the consumer does not answer. Required for xattrs and
    collections.
    """
    noop_interval_s: float = 180.0
    """Seconds between noops: a number from 0.1 on; as 7.0, from 0 to 10800."""
    buffer_bytes: int = 0
    """The consumer's buffer; 0 for no flow control."""
    priority: str = "medium"
    """`high`, `medium` or `low`: shown by `stat dcp`, without further effect."""
    force_value_compression: bool = False
    """The node compresses all values; otherwise only those written compressed. Requires snappy in HELLO."""
    cursor_dropping: bool = False
    """No effect: a slow consumer is always served from disk."""
    end_on_close: bool = False
    """A stream-end follows each close-stream."""
    expiry_opcode: bool = False
    """Expirations are sent as expirations instead of deletions, if the open had the flag for delete times."""
    deleted_user_xattrs: bool = False
    """No effect: the flag of the open decides. Without that flag, the control is rejected."""
    hifi_mfu: bool = False
    """No effect: it concerns the field for how often a document is used, which is always 0 here."""
    stream_id: bool = False
    """Stream requests have a `sid`. Can't be turned off again, and excludes `enable_sync_writes`."""
    oso: OsoMode = OsoMode.OFF
    """The first backfill of a filtered stream is an OSO snapshot; with `true_with_seqno_advanced`, a seqno-advanced
    marks its end if the last change is not sent.
    """
    backfill_order: str = "round-robin"
    """Streams are served in turns (`round-robin`) or one after the other (`sequential`)."""
    v7_status_codes: bool = False
    """Makes no difference."""
    flatbuffers_events: bool = False
    """System events have version 2. Modified collections are sent only in this version."""
    change_streams: bool = False
    """The node sends every version inside the history window, not only the newest."""
    marker_version: str = "1.0"
    """The highest version of snapshot markers: `2.2`; as 7.0, also `1.0` and `2.0`. The default is 1.0, or 2.0 with
    sync writes. 2.2 applies to disk snapshots, and requires collections in HELLO.
    """
    sync_writes: bool = False
    """The node sends prepares, commits and aborts."""
    consumer_name: str = ""
    """The name under which the consumer acknowledges prepares, as in the vbucket's topology."""


class BadControl(ValueError):
    """The key of a control is unknown, or its value is not valid."""

    def __init__(self, what: str, status: Status = Status.EINVAL) -> None:
        super().__init__(what)
        self.status = status


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BadControl(value) from None


def _buffer_bytes(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 <= int(value) <= CONNECTION_BUFFER_BYTES_MAX:
        raise BadControl(value)
    return int(value)


def _name(value: str) -> str:
    if len(value.encode()) > CONNECTION_NAME_BYTES_MAX:
        raise BadControl(value)
    return value


def _one_of(*values: str) -> dict[str, Any]:
    return dict(zip(values, values, strict=True))


_FLAG = {"true": True, "false": False}

CONTROLS: dict[str, tuple[str, Callable[[str], Any] | Mapping[str, Any]]] = {
    "enable_noop": ("noop_enabled", _FLAG),
    "set_noop_interval": ("noop_interval_s", _seconds),
    "connection_buffer_size": ("buffer_bytes", _buffer_bytes),
    "set_priority": ("priority", _one_of("high", "medium", "low")),
    "force_value_compression": ("force_value_compression", _FLAG),
    "supports_cursor_dropping": ("cursor_dropping", _FLAG),
    "supports_cursor_dropping_vulcan": ("cursor_dropping", _FLAG),
    "supports_hifi_MFU": ("hifi_mfu", _FLAG),
    "include_deleted_user_xattrs": ("deleted_user_xattrs", _FLAG),
    "send_stream_end_on_client_close_stream": ("end_on_close", _FLAG),
    "enable_expiry_opcode": ("expiry_opcode", _FLAG),
    "enable_stream_id": ("stream_id", _FLAG),
    "enable_out_of_order_snapshots": ("oso", {mode.value: mode for mode in OsoMode}),
    "backfill_order": ("backfill_order", _one_of("round-robin", "sequential")),
    "v7_dcp_status_codes": ("v7_status_codes", _FLAG),
    "flatbuffers_system_events": ("flatbuffers_events", _FLAG),
    "change_streams": ("change_streams", _FLAG),
    "max_marker_version": ("marker_version", _one_of("1.0", "2.0", "2.2")),
    "enable_sync_writes": ("sync_writes", _FLAG),
    "consumer_name": ("consumer_name", _name),
}
"""Key → the attribute of `Controls`, and its valid values or the function that parses one."""


def with_control(controls: Controls, key: str, value: str, dialect: Dialect) -> Controls:
    """The settings after a control message. Raises `BadControl` if it is not valid."""
    if key not in CONTROLS:
        raise BadControl(key, Status.NOT_SUPPORTED if key in dialect.unsupported_controls else Status.EINVAL)
    if key in dialect.only_true_controls and value == "false":
        raise BadControl(value)
    if key in dialect.lenient_controls and value != "true":
        value = "false"
    name, values = CONTROLS[key]
    if isinstance(values, Mapping) and value not in values:
        raise BadControl(value)
    changed = replace(controls, **{name: values[value] if isinstance(values, Mapping) else values(value)})
    least_s, most_s = dialect.noop_interval_s
    if key == "set_noop_interval" and not least_s <= changed.noop_interval_s <= most_s:
        raise BadControl(value)
    if key == "max_marker_version" and value not in dialect.marker_versions:
        raise BadControl(value)
    # As recorded from 8.0.2: they exclude each other, whichever comes first.
    if changed.stream_id and changed.sync_writes:
        raise BadControl(key, Status.NOT_SUPPORTED)
    return changed


# --- the shape of changes -----------------------------------------------------------------------------------------


STRIP_PREFIX = 0x01
INCLUDE_XATTRS = 0x02
INCLUDE_DELETED_USER_XATTRS = 0x04
INCLUDE_DELETE_TIMES = 0x08
EXPIRY_OPCODE = 0x10
COMPRESS = 0x20
SYNC_WRITES = 0x40
TAKES_COMPRESSED = 0x80
COMPRESS_PREPARES = 0x100
"""Set for snapshots from disk, not by a shape. See `outbound.shape_run`."""
SKIP_REMOVALS = 0x200
VALUES_SHIFT = 10
"""The bits from here on are one of `Values`."""


class Values(IntEnum):
    """What happens to the values of documents."""

    KEEP = 0
    DROP = 1
    DROP_BUT_KEEP_DATATYPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The form in which a consumer wants changes. Streams of a connection that ask for the same form share one."""

    strip_prefix: bool = False
    values: Values = Values.KEEP
    include_xattrs: bool = True
    include_deleted_user_xattrs: bool = True
    """Removed documents keep attributes that are not the system's."""
    include_delete_times: bool = True
    expiry_opcode: bool = True
    takes_compressed: bool = False
    """Values that are stored as snappy are sent as they are. Other consumers get them inflated."""
    compress: bool = False
    """Values are sent as snappy if that makes them smaller."""
    sync_writes: bool = False
    """The consumer takes part in durable writes: it gets prepares, commits and aborts as such."""
    skip_removals: bool = False
    """Deletions and expirations are not sent."""
    bits: int = field(init=False, repr=False, compare=False)
    """All of the above as one number, for the kernels."""

    def __post_init__(self) -> None:
        bits = int(self.values) << VALUES_SHIFT
        for is_set, bit in (
            (self.strip_prefix, STRIP_PREFIX),
            (self.include_xattrs, INCLUDE_XATTRS),
            (self.include_deleted_user_xattrs, INCLUDE_DELETED_USER_XATTRS),
            (self.include_delete_times, INCLUDE_DELETE_TIMES),
            (self.expiry_opcode, EXPIRY_OPCODE),
            (self.takes_compressed, TAKES_COMPRESSED),
            (self.compress, COMPRESS),
            (self.sync_writes, SYNC_WRITES),
            (self.skip_removals, SKIP_REMOVALS),
        ):
            bits |= bit if is_set else 0
        object.__setattr__(self, "bits", bits)


# --- filters -------------------------------------------------------------------------------------------------------
# A filter follows the system events of its stream: collections may be added to its scope, and any may be dropped. Once
# all are dropped, the stream has nothing left to send. A filter that lets everything pass never changes, so the streams
# of a connection share it.


class StreamFilter:
    """Decides which changes and system events a stream gets."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        collections: tuple[CollectionId, ...] | None = None,
        scope: ScopeId | None = None,
        knows_collections: bool = True,
    ) -> None:
        self.collections = None if collections is None else frozenset(collections)
        self.scope = scope
        self.knows_collections = knows_collections
        """If False, the consumer gets only the default collection, and no system events."""
        self._live = self.collections or frozenset[CollectionId]()
        if scope is not None:
            self._live = frozenset(c.id for holder, c in manifest.collections() if holder.id == scope)
        self._is_scope_dropped = False
        self._wanted: Column | None = None
        self._wanted_as_of: Manifest | None = None
        """The manifest for which `_wanted` is valid; None if it has to be computed again."""

    @property
    def lets_all_pass(self) -> bool:
        return self.collections is None and self.scope is None

    @property
    def is_empty(self) -> bool:
        """Whether nothing will ever pass again."""
        return self._is_scope_dropped or (self.collections is not None and not self._live)

    def wanted(self, manifest: Manifest) -> Column | None:
        """The ids of the collections whose changes pass now, ascending; None for all."""
        if self._wanted_as_of is not manifest:
            ids = self._wanted_ids(manifest)
            self._wanted = None if ids is None else np.array(sorted(ids), dtype=np.uint32)
            self._wanted_as_of = manifest
        return self._wanted

    def _wanted_ids(self, manifest: Manifest) -> Set[CollectionId] | None:
        if not self.knows_collections:
            return {DEFAULT_COLLECTION}
        if not self.lets_all_pass:
            return self._live
        if not manifest.has_dropped:
            return None
        return {collection.id for _, collection in manifest.collections()}

    def concerns(self, event: Event) -> bool:
        """Whether the next system event of the stream passes. The event also updates the filter."""
        if not self.knows_collections:
            return False
        if self.scope is not None:
            return self._follow_scope(event)
        if self.collections is None:
            return True
        if not isinstance(event, manifests.CollectionCreated | manifests.CollectionDropped):
            return False
        concerns = event.collection_id in self.collections
        if concerns and isinstance(event, manifests.CollectionDropped):
            self._live -= {event.collection_id}
            self._wanted_as_of = None
        return concerns

    def _follow_scope(self, event: Event) -> bool:
        if event.scope_id != self.scope:
            return False
        if isinstance(event, manifests.CollectionCreated):
            self._live |= {event.collection_id}
        elif isinstance(event, manifests.CollectionDropped):
            self._live -= {event.collection_id}
        self._is_scope_dropped |= isinstance(event, manifests.ScopeDropped)
        self._wanted_as_of = None
        return True


# --- system events ------------------------------------------------------------------------------------------------
#
# Every vbucket has the same events, but at its own seqnos. So each event is decoded once, and cached by its bytes.


_KEPT_MAX = 1024
_HEADER = Struct(">xxHxxxxI12xQIB")
"""The key's length, the body's length, the seqno, the event's id and its version."""
_EXTRAS_BYTES = 13


class KnownEvent:
    """A decoded system event, which is the same in all vbuckets and at all seqnos."""

    def __init__(self, stored: EncodedEvent) -> None:
        message = SystemEvent(
            seqno=Seqno(0), event=stored.event, version=stored.version, key=stored.key, value=stored.value
        )
        self.event: Event = manifests.decode_event(message)
        self._encoded: dict[bool, tuple[bytes, bytes, bytes]] = {}
        if stored.version != manifests.FLATBUFFERS_VERSION:
            self._encoded[False] = _parts(stored)

    def parts(self, seqno: Seqno, *, as_flatbuffers: bool) -> tuple[bytes, bytes, bytes]:
        """Extras, key and value of the message in the form that the consumer has asked for."""
        encoded = self._encoded.get(as_flatbuffers)
        if encoded is None:
            event = manifests.encode_event(self.event, as_flatbuffers=as_flatbuffers)
            encoded = self._encoded[as_flatbuffers] = _parts(event)
        kind, key, value = encoded
        return seqno.to_bytes(8) + kind, key, value


def _parts(encoded: EncodedEvent) -> tuple[bytes, bytes, bytes]:
    return encoded.event.to_bytes(4) + bytes([encoded.version]), encoded.key, encoded.value


class EventInRun(NamedTuple):
    seqno: Seqno
    known: KnownEvent
    end: int
    """Where the next change starts in the run."""


def read_event(run: Bytes, at: int) -> EventInRun:
    """Read the system event that starts at `at` in a stored run."""
    key_bytes, body_bytes, seqno, event, version = _HEADER.unpack_from(run.data, at)
    body_at = at + _HEADER.size - _EXTRAS_BYTES
    end = body_at + body_bytes
    known = _known(event, version, key_bytes, run[body_at + _EXTRAS_BYTES : end].tobytes())
    return EventInRun(Seqno(seqno), known, end)


@lru_cache(_KEPT_MAX)
def _known(event: int, version: int, key_bytes: int, body: bytes) -> KnownEvent:
    return KnownEvent(
        EncodedEvent(event=SystemEventId(event), version=version, key=body[:key_bytes], value=body[key_bytes:])
    )
