"""What a producer answers to a stream request: the value of the request, the checks in their order, the bounds.

`admit_stream` decides about a request; the node's producer calls it. It gets everything as values and returns
`Accepted`, `StreamRefusal` with a status, or `RollbackDemand`. It opens no stream and sends nothing.

The checks run in the order of a real server, because the order decides which status a request with several faults
gets. Sources are cited by title: the seeds "Stream Request", "Stream Request Value" and "Add Stream", and kv_engine's
docs/dcp/documentation ("DCP docs"). Where recorded servers differ, the dialect decides.

A `Dialect` holds, as data, what servers of one version decide differently. A node speaks as one version (`headwater
serve --speaks-as`). If two versions were recorded to answer one request differently, the code that decides reads a
field of its dialect. What all versions do alike is not in it. The recordings are in `tests/vectors/sessions`: those of
7.0.5 define "7.0", those of 8.0.2 define "8.0".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from headwater.errors import LocalProtocolError, MalformedJson
from headwater.protocol import numbers
from headwater.protocol.failover_log import ConsumerPoint, FailoverLog, RollbackDemand, decide_rollback
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamFlags, StreamRequest, VBucketState
from headwater.protocol.status import Status

_ALL_STREAM_FLAGS = StreamFlags(0xFFFFFFFF)
_ALL_OPEN_FLAGS = OpenFlags(0xFFFFFFFF & ~int(OpenFlags.NOTIFIER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The version that a node speaks as. Values named in the docstrings of the fields are those of 8.0.2."""

    server_version: str
    """The version that the node reports in VERSION and over HTTP, without its build."""

    # Open connection.
    open_flags: OpenFlags
    """Others are EINVAL: 0x02, 0x10, 0x80 and 0x400 were. 0x200 is newer than 8.0.2 (MB-26074), and accepted."""
    name_bytes_max: int
    """A name of 201 bytes was accepted; no key may be longer than 250 bytes."""

    # Control.
    noop_interval_s: tuple[float, float]
    """Minimum and maximum: 0.05 was refused, 100000 was accepted, and 0.1 is what the engine itself asks for."""
    lenient_controls: frozenset[str]
    """Any value but `true` switches these off."""
    only_true_controls: frozenset[str]
    """These can't be switched off: `false` is EINVAL."""
    marker_versions: tuple[str, ...]
    """The values of `max_marker_version`. 8.0.2 accepts only 2.2."""
    unsupported_controls: frozenset[str]
    """These are NOT_SUPPORTED; other unknown keys are EINVAL."""

    # Stream request.
    stream_flags: StreamFlags
    """Others are EINVAL. 0x08, which 8.0.2 refuses, is in the seed "Add Stream", and is accepted."""
    value_keys: frozenset[str] | None
    """A value with none of these is EINVAL; None accepts any object."""
    judges_uid: bool
    """A `uid` that is ahead of the manifest is MANIFEST_IS_AHEAD, and a bad one EINVAL. 8.0.2 ignores it."""
    streams_no_collections: bool
    """`"collections":[]` opens a stream that ends at once; otherwise it is EINVAL."""
    filters_with_sync_writes: bool
    """A filter is accepted on a connection with sync writes. 8.0.2: NOT_SUPPORTED."""
    streams_pending: bool
    """A pending vbucket is streamed. 8.0.2: NOT_MY_VBUCKET."""
    from_latest_checks_vbuuid: bool
    """FROM_LATEST with a vbuuid that is not in the failover log is answered with a rollback to 0."""

    # What is streamed.
    hides_completed_prepares: bool
    """Prepares that are committed or aborted are left out of disk snapshots (durability, section 2; kv_engine,
    backfill_disk.cc, `BySeqnoDiskCallback::skipItem`). 7.0.5 sends them."""

    # Other messages.
    answers_misplaced: bool
    """Whether a producer answers a message meant for a consumer with EINVAL. 7.0.5 closes the connection."""
    refuses_older_manifest_as_unappliable: bool
    """Whether an older manifest is refused with CANNOT_APPLY_MANIFEST; otherwise with ERANGE."""


_7_0 = Dialect(
    server_version="7.0.5",
    open_flags=_ALL_OPEN_FLAGS,
    name_bytes_max=numbers.CONNECTION_NAME_BYTES_MAX,
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
    name_bytes_max=numbers.KEY_BYTES_MAX,
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
"""By the name that the option uses, oldest first."""
NEWEST = _8_0


# --- stream requests --------------------------------------------------------------------------------------------------


# --- the JSON value of a stream request: filters, stream id, and what the consumer has seen ---------------------------
#
# Stream Request Value, "Key Definition": collection and scope ids and the manifest uid are base-16 strings with no 0x,
# the sid is a number. Its "Validation": unknown keys are no error. `purge_seqno`, a base-10 string, and `cts` are newer
# and from the DCP docs, "Stream Request Value".

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
T = TypeVar("T")
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransferOptions:
    free_memory_bytes: int = 0
    all_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequestValue:
    """What a stream request's value may say. Admission checks a sid out of its range, and an empty `collections`."""

    uid: numbers.ManifestUid | None = None
    sid: int | None = None
    collections: tuple[numbers.CollectionId, ...] | None = None
    scope: numbers.ScopeId | None = None
    purge_seqno: numbers.Seqno | None = None
    cache_transfer: CacheTransferOptions | None = None

    @property
    def is_filtered(self) -> bool:
        return self.collections is not None or self.scope is not None

    def encode(self) -> bytes:
        if self.collections is not None and self.scope is not None:
            raise LocalProtocolError("a stream filters by collections or by scope, not by both")
        members: dict[str, Any] = {}
        if self.uid is not None:
            members["uid"] = f"{self.uid:x}"
        if self.sid is not None:
            members["sid"] = self.sid
        if self.collections is not None:
            members["collections"] = [f"{collection:x}" for collection in self.collections]
        if self.scope is not None:
            members["scope"] = f"{self.scope:x}"
        if self.purge_seqno is not None:
            members["purge_seqno"] = str(self.purge_seqno)
        if self.cache_transfer is not None:
            members["cts"] = {
                "free_memory": self.cache_transfer.free_memory_bytes,
                "all_keys": self.cache_transfer.all_keys,
            }
        return json.dumps(members, separators=(",", ":")).encode() if members else b""

    @classmethod
    def decode(cls, value: bytes, dialect: Dialect | None = None) -> StreamRequestValue:
        """Decode a value. Raises `MalformedJson` (EINVAL) for any fault. Without a dialect the specification rules."""
        if not value:
            return cls()
        if len(value) > numbers.STREAM_REQUEST_VALUE_BYTES_MAX:
            raise MalformedJson(f"a stream request value exceeds {numbers.STREAM_REQUEST_VALUE_BYTES_MAX} bytes")
        try:
            members = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise MalformedJson(f"the stream request value is not JSON: {error}") from error
        if not isinstance(members, dict):
            raise MalformedJson("the stream request value is not a JSON object")
        keys = dialect.value_keys if dialect is not None else None
        if keys is not None and not members.keys() & keys:
            raise MalformedJson(f"the stream request value has none of {', '.join(sorted(keys))}")
        # Stream Request Value, "Validation": it fails with `Invalid` if both are defined.
        if "collections" in members and "scope" in members:
            raise MalformedJson("collections and scope exclude each other")
        return cls(
            uid=_take(members, "uid", _uid) if dialect is None or dialect.judges_uid else None,
            sid=_take(members, "sid", _sid),
            collections=_take(members, "collections", _collections),
            scope=_take(members, "scope", _scope),
            purge_seqno=_take(members, "purge_seqno", _purge_seqno),
            cache_transfer=_take(members, "cts", _cache_transfer),
        )


def _take(members: dict[str, Any], name: str, convert: Callable[[object], T]) -> T | None:
    return convert(members[name]) if name in members else None


def _uid(value: object) -> numbers.ManifestUid:
    return numbers.ManifestUid(_hex(value, "uid", _U64_MAX))


def _sid(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedJson(f"sid must be an integer up to {numbers.STREAM_ID_MAX}")
    return value


def _collections(value: object) -> tuple[numbers.CollectionId, ...]:
    if not isinstance(value, list):
        raise MalformedJson("collections must be an array of ids")
    return tuple(numbers.CollectionId(_hex(member, "a collection id", _U32_MAX)) for member in value)


def _scope(value: object) -> numbers.ScopeId:
    return numbers.ScopeId(_hex(value, "scope", _U32_MAX))


def _purge_seqno(value: object) -> numbers.Seqno:
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 20:
        raise MalformedJson("purge_seqno must be a base-10 string")
    if int(value) > _U64_MAX:
        raise MalformedJson("purge_seqno exceeds 64 bits")
    return numbers.Seqno(int(value))


def _cache_transfer(value: object) -> CacheTransferOptions:
    if not isinstance(value, dict):
        raise MalformedJson("cts must be an object")
    free_memory, all_keys = value.get("free_memory", 0), value.get("all_keys", False)
    if not isinstance(free_memory, int) or isinstance(free_memory, bool):
        raise MalformedJson("cts.free_memory must be an integer")
    if not 0 <= free_memory <= _U64_MAX:
        raise MalformedJson("cts.free_memory must fit 64 bits, unsigned")
    if not isinstance(all_keys, bool):
        raise MalformedJson("cts.all_keys must be a boolean")
    return CacheTransferOptions(free_memory_bytes=free_memory, all_keys=all_keys)


def _hex(value: object, name: str, maximum: int) -> int:
    if not isinstance(value, str) or not value or not _HEX.issuperset(value) or len(value) > 16:
        raise MalformedJson(f"{name} must be a base-16 string with no 0x")
    number = int(value, 16)
    if number > maximum:
        raise MalformedJson(f"{name} {value} is too large")
    return number


# --- admission --------------------------------------------------------------------------------------------------------

_KEPT_VALUES_MAX = 16
_KEPT_VALUE_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFacts:
    """What the connection has negotiated, and the streams it has on the request's vbucket."""

    collections: bool = False
    include_xattrs: bool = False
    noop_enabled: bool = False
    stream_id_enabled: bool = False
    sync_writes: bool = False
    open_stream_ids: frozenset[int | None] = frozenset()
    """The sids of the streams open on this vbucket; None stands for a stream without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedVBucket:
    """What the producer knows of the vbucket."""

    state: VBucketState
    high_seqno: numbers.Seqno
    purge_seqno: numbers.Seqno = numbers.Seqno(0)
    failover_log: FailoverLog
    manifest_uid: numbers.ManifestUid = numbers.ManifestUid(0)
    collections: Mapping[numbers.CollectionId, numbers.ScopeId] = field(
        default_factory=lambda: {numbers.CollectionId(0): numbers.ScopeId(0)}
    )
    """The collections that exist, with their scopes."""
    scopes: frozenset[numbers.ScopeId] = frozenset({numbers.ScopeId(0)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The stream may be opened, with these bounds and filters."""

    start_seqno: numbers.Seqno
    end_seqno: numbers.Seqno
    snapshot_start_seqno: numbers.Seqno
    stream_id: int | None
    collections: tuple[numbers.CollectionId, ...] | None
    scope: numbers.ScopeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRefusal:
    status: Status
    reason: str


Admission = Accepted | StreamRefusal | RollbackDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    request: StreamRequest
    value: StreamRequestValue
    connection: ConnectionFacts
    vbucket: RequestedVBucket
    dialect: Dialect


def admit_stream(
    request: StreamRequest,
    *,
    connection: ConnectionFacts,
    vbucket: RequestedVBucket | None,
    dialect: Dialect = NEWEST,
) -> Admission:
    """Return the producer's answer. `vbucket` is None if it does not exist here."""
    if int(request.flags) & ~int(dialect.stream_flags):
        return StreamRefusal(status=Status.EINVAL, reason=f"the flags 0x{request.flags:x} are not all known")
    # Recorded of 7.0.5 and 8.0.2: a value that is not JSON is EINVAL, and the connection stays open.
    try:
        is_short = len(request.value) <= _KEPT_VALUE_BYTES_MAX
        decode = _known_value if is_short else StreamRequestValue.decode
        value = decode(request.value, dialect)
        if value.collections == () and not dialect.streams_no_collections:
            raise MalformedJson("collections must be an array of at least one id")
    except MalformedJson as error:
        return StreamRefusal(status=Status.EINVAL, reason=error.reason)
    if vbucket is None:
        return StreamRefusal(status=Status.NOT_MY_VBUCKET, reason="the vbucket does not exist on this node")
    case = _Case(request=request, value=value, connection=connection, vbucket=vbucket, dialect=dialect)
    for check in _CHECKS:
        refusal = check(case)
        if refusal is not None:
            return refusal
    return _decide_start(case)


@lru_cache(_KEPT_VALUES_MAX)
def _known_value(value: bytes, dialect: Dialect) -> StreamRequestValue:
    """Decode a value, cached because consumers request a thousand streams with the same one."""
    return StreamRequestValue.decode(value, dialect)


def _check_noop(case: _Case) -> StreamRefusal | None:
    # DCP docs, "Dead Connections" and "Control": newer features insist on noops; recorded of 7.0.5 as NOT_SUPPORTED.
    needs_noop = case.connection.include_xattrs or case.connection.collections or case.request.value
    if needs_noop and not case.connection.noop_enabled:
        reason = "xattrs and collections need noop enabled on the connection"
        return StreamRefusal(status=Status.NOT_SUPPORTED, reason=reason)
    return None


def _check_state(case: _Case) -> StreamRefusal | None:
    # Stream Request, error 0x07. A dead vbucket counts as missing.
    state = case.vbucket.state
    if state == VBucketState.DEAD or (state == VBucketState.PENDING and not case.dialect.streams_pending):
        return StreamRefusal(status=Status.NOT_MY_VBUCKET, reason=f"the vbucket is {state.name.lower()}")
    # Add Stream, flag 0x10: "If the vbucket is not active, the request fails".
    if StreamFlags.ACTIVE_ONLY in case.request.flags and case.vbucket.state != VBucketState.ACTIVE:
        return StreamRefusal(status=Status.NOT_MY_VBUCKET, reason="the vbucket is not active")
    return None


def _check_range(case: _Case) -> StreamRefusal | None:
    # Stream Request, error 0x22. Equal start and end are accepted (recorded: OK, then stream-end at once), and a start
    # beyond the high seqno is left to the rollback decision.
    request = case.request
    if request.start_seqno > request.end_seqno:
        return StreamRefusal(status=Status.ERANGE, reason="the start seqno exceeds the end seqno")
    if not request.snapshot_start_seqno <= request.start_seqno <= request.snapshot_end_seqno:
        return StreamRefusal(status=Status.ERANGE, reason="the start seqno lies outside its snapshot")
    return None


def _check_stream_id(case: _Case) -> StreamRefusal | None:
    # Stream Request, error 0x8d, and Stream Request Value, "Validation" of `sid`.
    sid, enabled = case.value.sid, case.connection.stream_id_enabled
    if sid is not None and not enabled:
        return StreamRefusal(status=Status.DCP_STREAMID_INVALID, reason="a sid was given, but enable_stream_id is off")
    if sid is None and enabled:
        return StreamRefusal(status=Status.DCP_STREAMID_INVALID, reason="enable_stream_id is on, but no sid was given")
    if sid == 0:
        return StreamRefusal(status=Status.DCP_STREAMID_INVALID, reason="sid 0 is reserved")
    if sid is not None and not 0 <= sid <= numbers.STREAM_ID_MAX:
        return StreamRefusal(status=Status.EINVAL, reason=f"a sid is a number up to {numbers.STREAM_ID_MAX}")
    return None


def _check_open_streams(case: _Case) -> StreamRefusal | None:
    # Stream Request, error 0x02; Stream Request Value, "Validation" of `sid`: it fails if the sid is in use, or if
    # there are too many.
    open_ids = case.connection.open_stream_ids
    if case.value.sid in open_ids:
        return StreamRefusal(status=Status.KEY_EEXISTS, reason="the stream is already open on this connection")
    if len(open_ids) >= numbers.STREAMS_PER_VBUCKET_MAX:
        return StreamRefusal(
            status=Status.ENOMEM, reason=f"{numbers.STREAMS_PER_VBUCKET_MAX} streams are open on this vbucket"
        )
    return None


def _check_manifest(case: _Case) -> StreamRefusal | None:
    # Stream Request, error 0x8b: "The client should briefly pause and then retry".
    if case.value.uid is not None and case.value.uid > case.vbucket.manifest_uid:
        return StreamRefusal(
            status=Status.MANIFEST_IS_AHEAD,
            reason=f"the vbucket is at manifest {case.vbucket.manifest_uid:x}, not {case.value.uid:x}",
        )
    return None


def _check_filter(case: _Case) -> StreamRefusal | None:
    value, vbucket = case.value, case.vbucket
    if value.is_filtered and not case.connection.collections:
        return StreamRefusal(status=Status.EINVAL, reason="a filter needs collections negotiated on the connection")
    if value.is_filtered and case.connection.sync_writes and not case.dialect.filters_with_sync_writes:
        return StreamRefusal(status=Status.NOT_SUPPORTED, reason="a stream with sync writes has no filter")
    # Recorded of 7.0.5: a filter on an unknown collection is 0x88, with the vbucket's manifest uid beside it.
    for collection in value.collections or ():
        if collection not in vbucket.collections:
            return StreamRefusal(status=Status.UNKNOWN_COLLECTION, reason=f"collection {collection:x} is unknown")
    if value.scope is not None and value.scope not in vbucket.scopes:
        return StreamRefusal(status=Status.UNKNOWN_SCOPE, reason=f"scope {value.scope:x} is unknown")
    return None


_CHECKS: tuple[Callable[[_Case], StreamRefusal | None], ...] = (
    _check_noop,
    _check_state,
    _check_range,
    _check_stream_id,
    # Before the filter: a collection may be unknown only because the vbucket has not seen its manifest yet, and then
    # the client should retry.
    _check_manifest,
    _check_filter,
    _check_open_streams,
)


def _decide_start(case: _Case) -> Accepted | RollbackDemand:
    request, vbucket = case.request, case.vbucket
    if StreamFlags.FROM_LATEST in request.flags:
        # DCP docs, Add Stream, flag 0x40: the consumer wants what comes from now on, whatever it may have had before.
        is_known = request.vbuuid == 0 or vbucket.failover_log.knows(request.vbuuid)
        if case.dialect.from_latest_checks_vbuuid and not is_known:
            return RollbackDemand(to_seqno=numbers.Seqno(0), reason="the vbuuid is not in the failover log")
        return _accept(case, start=vbucket.high_seqno, snapshot_start=vbucket.high_seqno)
    rollback = decide_rollback(
        ConsumerPoint(
            vbuuid=request.vbuuid,
            start_seqno=request.start_seqno,
            snapshot_start_seqno=request.snapshot_start_seqno,
            snapshot_end_seqno=request.snapshot_end_seqno,
            purge_seqno=case.value.purge_seqno,
        ),
        failover_log=vbucket.failover_log,
        high_seqno=vbucket.high_seqno,
        purge_seqno=vbucket.purge_seqno,
        strict_vbuuid=StreamFlags.STRICT_VBUUID in request.flags,
        ignore_purged_tombstones=StreamFlags.IGNORE_PURGED_TOMBSTONES in request.flags,
    )
    if rollback is not None:
        return rollback
    return _accept(case, start=request.start_seqno, snapshot_start=request.snapshot_start_seqno)


def _accept(case: _Case, *, start: numbers.Seqno, snapshot_start: numbers.Seqno) -> Accepted:
    request, high = case.request, case.vbucket.high_seqno
    # Add Stream, flags 0x02 and 0x04: "Disk Only" ends at the end seqno or the last item on disk when the stream is
    # created, "Latest" overwrites the end seqno with the high seqno.
    end = request.end_seqno
    if StreamFlags.DISK_ONLY in request.flags:
        end = min(end, high)
    if StreamFlags.LATEST in request.flags:
        end = high
    if case.value.collections == ():
        end = start
    return Accepted(
        start_seqno=start,
        end_seqno=numbers.Seqno(max(end, start)),
        snapshot_start_seqno=snapshot_start,
        stream_id=case.value.sid,
        # A stream of no collections sends nothing, and ends at its start.
        collections=case.value.collections or None,
        scope=case.value.scope,
    )
