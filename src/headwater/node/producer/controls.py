"""What a consumer may set with control messages, and the shape in which it gets changes because of that.

A key that is not in `CONTROLS` gets EINVAL, and so does a bad value: by that clients find out what a server can do
(kv_engine, DCP docs, "Control"). To add a control, add a setting to `Controls` and a line to `CONTROLS`. Which values a
version takes is in its dialect (`protocol.dialects`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any

from headwater.protocol.dialects import Dialect
from headwater.protocol.numbers import CONNECTION_BUFFER_BYTES_MAX, CONNECTION_NAME_BYTES_MAX
from headwater.protocol.status import Status


class OsoMode(Enum):
    OFF = "false"
    ON = "true"
    ON_WITH_SEQNO_ADVANCED = "true_with_seqno_advanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The settings of one connection."""

    noop_enabled: bool = False
    """Noops are sent, and a consumer that answers none is closed. Xattrs and collections need it."""
    noop_interval_s: float = 180.0
    """Seconds between noops, with fractions: 0.1 and more; as 7.0, from 0 to 10800."""
    buffer_bytes: int = 0
    """The consumer's buffer; 0 for no flow control."""
    priority: str = "medium"
    """`high`, `medium` or `low`: shown by `stat dcp`, and makes no difference."""
    force_value_compression: bool = False
    """All values are sent compressed; without it those that were written so. It needs snappy in HELLO."""
    cursor_dropping: bool = False
    """Makes no difference: a slow consumer is always served from disk."""
    end_on_close: bool = False
    """A close-stream is followed by the stream-end."""
    expiry_opcode: bool = False
    """Expirations come as such, and not as deletions, where the open had the flag for delete times."""
    deleted_user_xattrs: bool = False
    """Makes no difference: the open's flag decides. Without that flag the control is refused."""
    hifi_mfu: bool = False
    """Makes no difference: it is about a field that says how much a document is used, which is always 0 here."""
    stream_id: bool = False
    """Stream requests have a `sid`. It can't be switched off again, and excludes `enable_sync_writes`."""
    oso: OsoMode = OsoMode.OFF
    """The first backfill of a filtered stream comes as an OSO snapshot; with `true_with_seqno_advanced` a
    seqno-advanced says where it ends if that change is not sent."""
    backfill_order: str = "round-robin"
    """Streams are served in turns (`round-robin`) or one after the other (`sequential`)."""
    v7_status_codes: bool = False
    """Makes no difference."""
    flatbuffers_events: bool = False
    """System events come as version 2. Only then a collection that was modified is sent."""
    change_streams: bool = False
    """Every version inside the history window is sent, and not only the newest."""
    marker_version: str = "1.0"
    """The highest version of snapshot markers: `2.2`; as 7.0, also `1.0` and `2.0`. Without it 1.0, or 2.0 with sync
    writes. 2.2 is for disk snapshots, and needs collections in HELLO."""
    sync_writes: bool = False
    """Prepares, commits and aborts come as such."""
    consumer_name: str = ""
    """Who acknowledges prepares, as the vbucket's topology names it."""


class BadControl(ValueError):
    """The key is unknown, or its value is not one of those it takes."""

    def __init__(self, what: str, status: Status = Status.EINVAL) -> None:
        super().__init__(what)
        self.status = status


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise BadControl(value)
    return value == "true"


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BadControl(value) from None


def _buffer_bytes(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 <= int(value) <= CONNECTION_BUFFER_BYTES_MAX:
        raise BadControl(value)
    return int(value)


def _one_of(*values: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in values:
            raise BadControl(value)
        return value

    return check


def _name(value: str) -> str:
    if len(value.encode()) > CONNECTION_NAME_BYTES_MAX:
        raise BadControl(value)
    return value


def _oso(value: str) -> OsoMode:
    try:
        return OsoMode(value)
    except ValueError:
        raise BadControl(value) from None


CONTROLS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "enable_noop": ("noop_enabled", _flag),
    "set_noop_interval": ("noop_interval_s", _seconds),
    "connection_buffer_size": ("buffer_bytes", _buffer_bytes),
    "set_priority": ("priority", _one_of("high", "medium", "low")),
    "force_value_compression": ("force_value_compression", _flag),
    "supports_cursor_dropping": ("cursor_dropping", _flag),
    "supports_cursor_dropping_vulcan": ("cursor_dropping", _flag),
    "supports_hifi_MFU": ("hifi_mfu", _flag),
    "include_deleted_user_xattrs": ("deleted_user_xattrs", _flag),
    "send_stream_end_on_client_close_stream": ("end_on_close", _flag),
    "enable_expiry_opcode": ("expiry_opcode", _flag),
    "enable_stream_id": ("stream_id", _flag),
    "enable_out_of_order_snapshots": ("oso", _oso),
    "backfill_order": ("backfill_order", _one_of("round-robin", "sequential")),
    "v7_dcp_status_codes": ("v7_status_codes", _flag),
    "flatbuffers_system_events": ("flatbuffers_events", _flag),
    "change_streams": ("change_streams", _flag),
    "max_marker_version": ("marker_version", _one_of("1.0", "2.0", "2.2")),
    "enable_sync_writes": ("sync_writes", _flag),
    "consumer_name": ("consumer_name", _name),
}
"""Key → the setting, and what makes its value."""


def with_control(controls: Controls, key: str, value: str, dialect: Dialect) -> Controls:
    """The settings after a control message, or `BadControl`."""
    if key not in CONTROLS:
        raise BadControl(key, Status.NOT_SUPPORTED if key in dialect.unsupported_controls else Status.EINVAL)
    if key in dialect.only_true_controls and value == "false":
        raise BadControl(value)
    if key in dialect.lenient_controls and value != "true":
        value = "false"
    name, convert = CONTROLS[key]
    changed = replace(controls, **{name: convert(value)})
    least_s, most_s = dialect.noop_interval_s
    if key == "set_noop_interval" and not least_s <= changed.noop_interval_s <= most_s:
        raise BadControl(value)
    if key == "max_marker_version" and value not in dialect.marker_versions:
        raise BadControl(value)
    # Recorded of 8.0.2: they exclude each other, whichever comes first.
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
"""Not of a shape: of a snapshot from disk. See `outbound.shape_run`."""
SKIP_REMOVALS = 0x200
VALUES_SHIFT = 10
"""The bits from here on are one of `Values`."""


class Values(IntEnum):
    """What becomes of the values."""

    KEEP = 0
    DROP = 1
    DROP_BUT_KEEP_DATATYPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a consumer wants of each change: the same for all streams of a connection that ask for the same."""

    strip_prefix: bool = False
    values: Values = Values.KEEP
    include_xattrs: bool = True
    include_deleted_user_xattrs: bool = True
    """Attributes of removed documents that are not the system's."""
    include_delete_times: bool = True
    expiry_opcode: bool = True
    takes_compressed: bool = False
    """Values that are stored as snappy are sent so. Others get them inflated."""
    compress: bool = False
    """Values that get smaller by it are sent as snappy."""
    sync_writes: bool = False
    """The consumer takes part in durable writes: it gets prepares, commits and aborts as such."""
    skip_removals: bool = False
    """Deletions and expirations are not sent."""
    bits: int = field(init=False, repr=False, compare=False)
    """The same as one number, for the kernels."""

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
