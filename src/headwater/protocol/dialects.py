"""What servers of different versions judge differently, as data: one `Dialect` for each version a node may speak as.

A node speaks as one version (`headwater serve --speaks-as`). Where two versions were recorded to answer one request
differently, the code that judges it reads a field of its dialect. What all versions do alike is not in here. The source
is the recordings in `tests/vectors/sessions`: those of 7.0.5 decide for "7.0", those of 8.0.2 for "8.0".
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.protocol.messages.dcp_streams import OpenFlags, StreamFlags
from headwater.protocol.numbers import CONNECTION_NAME_BYTES_MAX, KEY_BYTES_MAX

_ALL_STREAM_FLAGS = StreamFlags(0xFFFFFFFF)
_ALL_OPEN_FLAGS = OpenFlags(0xFFFFFFFF & ~int(OpenFlags.NOTIFIER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The version that a node speaks as. The values named in a docstring are those of 8.0.2."""

    server_version: str
    """What it calls itself in VERSION and over HTTP, without its build."""

    # Open connection.
    open_flags: OpenFlags
    """Others are EINVAL: 0x02, 0x10, 0x80 and 0x400 were. 0x200 is newer than 8.0.2 (MB-26074), and taken."""
    name_bytes_max: int
    """A name of 201 bytes was taken; a longer key than 250 bytes is none."""

    # Control.
    noop_interval_s: tuple[float, float]
    """The least and the most: 0.05 was refused, 100000 was taken, and 0.1 is what the engine itself asks for."""
    lenient_controls: frozenset[str]
    """Any value but `true` switches these off."""
    only_true_controls: frozenset[str]
    """These can't be switched off: `false` is EINVAL."""
    marker_versions: tuple[str, ...]
    """The values of `max_marker_version`. 8.0.2 takes 2.2 alone."""
    unsupported_controls: frozenset[str]
    """NOT_SUPPORTED, where other unknown keys are EINVAL."""

    # Stream request.
    stream_flags: StreamFlags
    """Others are EINVAL. 0x08, which 8.0.2 refuses, is in the seed "Add Stream", and stays."""
    value_keys: frozenset[str] | None
    """A value with none of these is EINVAL; None where any object will do."""
    judges_uid: bool
    """A `uid` that is ahead of the manifest is MANIFEST_IS_AHEAD, and a bad one EINVAL. 8.0.2 does not read it."""
    streams_no_collections: bool
    """`"collections":[]` is a stream that ends at once, and not EINVAL."""
    filters_with_sync_writes: bool
    """A filter is taken on a connection with sync writes. 8.0.2: NOT_SUPPORTED."""
    streams_pending: bool
    """A pending vbucket is streamed. 8.0.2: NOT_MY_VBUCKET."""
    from_latest_checks_vbuuid: bool
    """FROM_LATEST with a vbuuid that is not in the failover log is a rollback to 0."""

    # What is streamed.
    hides_completed_prepares: bool
    """Prepares that are committed or aborted are left out of disk snapshots (durability, section 2; kv_engine,
    backfill_disk.cc, `BySeqnoDiskCallback::skipItem`). 7.0.5 sends them."""

    # Other messages.
    answers_misplaced: bool
    """A message for a consumer that is sent to a producer is answered with EINVAL. 7.0.5 closes the connection."""
    refuses_older_manifest_as_unappliable: bool
    """An older manifest is CANNOT_APPLY_MANIFEST, and not ERANGE."""


_7_0 = Dialect(
    server_version="7.0.5",
    open_flags=_ALL_OPEN_FLAGS,
    name_bytes_max=CONNECTION_NAME_BYTES_MAX,
    noop_interval_s=(0.0, 10800.0),
    lenient_controls=frozenset(),
    only_true_controls=frozenset({"enable_stream_id"}),
    marker_versions=("1.0", "2.0", "2.2"),
    unsupported_controls=frozenset(),
    stream_flags=_ALL_STREAM_FLAGS,
    value_keys=None,
    judges_uid=True,
    streams_no_collections=False,
    filters_with_sync_writes=True,
    streams_pending=True,
    from_latest_checks_vbuuid=False,
    hides_completed_prepares=False,
    answers_misplaced=False,
    refuses_older_manifest_as_unappliable=False,
)
_8_0 = Dialect(
    server_version="8.0.2",
    open_flags=(
        OpenFlags.PRODUCER
        | OpenFlags.INCLUDE_XATTRS
        | OpenFlags.NO_VALUE
        | OpenFlags.INCLUDE_DELETE_TIMES
        | OpenFlags.NO_VALUE_WITH_UNDERLYING_DATATYPE
        | OpenFlags.INCLUDE_DELETED_USER_XATTRS
        | OpenFlags.SKIP_DELETES_IN_INITIAL_BACKFILL
    ),
    name_bytes_max=KEY_BYTES_MAX,
    noop_interval_s=(0.1, 2.0**31),
    lenient_controls=frozenset({"enable_noop", "supports_cursor_dropping", "supports_cursor_dropping_vulcan"}),
    only_true_controls=frozenset(
        {
            "enable_stream_id",
            "enable_sync_writes",
            "include_deleted_user_xattrs",
            "v7_dcp_status_codes",
            "flatbuffers_system_events",
            "change_streams",
            "enable_out_of_order_snapshots",
        }
    ),
    marker_versions=("2.2",),
    unsupported_controls=frozenset({"stream_buffer_size"}),
    stream_flags=StreamFlags(0xFF),
    value_keys=frozenset({"uid", "sid", "scope", "collections", "purge_seqno"}),
    judges_uid=False,
    streams_no_collections=True,
    filters_with_sync_writes=False,
    streams_pending=False,
    from_latest_checks_vbuuid=True,
    hides_completed_prepares=True,
    answers_misplaced=True,
    refuses_older_manifest_as_unappliable=True,
)

DIALECTS: dict[str, Dialect] = {"7.0": _7_0, "8.0": _8_0}
"""By the name that the option gives them, oldest first."""
NEWEST = _8_0
