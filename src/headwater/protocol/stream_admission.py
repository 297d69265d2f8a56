"""Stream admission: what a producer answers to a stream request.

The checks run in the order of a real server, because the order decides which status a request with several faults
gets. All that is known comes in as values; the outcome is `Accepted`, `Refused` with a status, or `Rollback`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from headwater.errors import MalformedJson
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.limits import STREAMS_PER_VBUCKET_MAX
from headwater.protocol.messages.dcp_stream import StreamFlags, StreamRequest, VBucketState
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId, Seqno
from headwater.protocol.rollback import ConsumerPoint, Rollback, decide_rollback
from headwater.protocol.status import Status
from headwater.protocol.stream_request_value import StreamRequestValue

_KEPT_VALUES_MAX = 16
_KEPT_VALUE_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFacts:
    """What the connection has negotiated, and the streams it has on the request's vbucket."""

    collections: bool = False
    include_xattrs: bool = False
    noop_enabled: bool = False
    stream_id_enabled: bool = False
    open_stream_ids: frozenset[int | None] = frozenset()
    """The sids of the streams open on this vbucket; None stands for a stream without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketFacts:
    """What the producer knows of the vbucket."""

    state: VBucketState
    high_seqno: Seqno
    purge_seqno: Seqno = Seqno(0)
    failover_log: FailoverLog
    manifest_uid: ManifestUid = ManifestUid(0)
    collections: Mapping[CollectionId, ScopeId] = field(default_factory=lambda: {CollectionId(0): ScopeId(0)})
    """The collections that exist, with their scopes."""
    scopes: frozenset[ScopeId] = frozenset({ScopeId(0)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The stream may be opened, with these bounds and filters."""

    start_seqno: Seqno
    end_seqno: Seqno
    snapshot_start_seqno: Seqno
    stream_id: int | None
    collections: tuple[CollectionId, ...] | None
    scope: ScopeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    status: Status
    reason: str


Admission = Accepted | Refused | Rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    request: StreamRequest
    value: StreamRequestValue
    connection: ConnectionFacts
    vbucket: VBucketFacts


def admit_stream(request: StreamRequest, *, connection: ConnectionFacts, vbucket: VBucketFacts | None) -> Admission:
    """The producer's answer. `vbucket` is None where it does not exist here."""
    try:
        is_short = len(request.value) <= _KEPT_VALUE_BYTES_MAX
        value = _known_value(request.value) if is_short else StreamRequestValue.decode(request.value)
    except MalformedJson as error:
        return Refused(status=Status.EINVAL, reason=error.reason)
    if vbucket is None:
        return Refused(status=Status.NOT_MY_VBUCKET, reason="the vbucket does not exist on this node")
    case = _Case(request=request, value=value, connection=connection, vbucket=vbucket)
    for check in _CHECKS:
        refusal = check(case)
        if refusal is not None:
            return refusal
    return _decide_start(case)


@lru_cache(_KEPT_VALUES_MAX)
def _known_value(value: bytes) -> StreamRequestValue:
    """Consumers ask for a thousand streams with the same value."""
    return StreamRequestValue.decode(value)


def _check_noop(case: _Case) -> Refused | None:
    needs_noop = case.connection.include_xattrs or case.connection.collections or case.request.value
    if needs_noop and not case.connection.noop_enabled:
        return Refused(status=Status.NOT_SUPPORTED, reason="xattrs and collections need noop enabled on the connection")
    return None


def _check_state(case: _Case) -> Refused | None:
    if case.vbucket.state == VBucketState.DEAD:
        return Refused(status=Status.NOT_MY_VBUCKET, reason="the vbucket is dead")
    if StreamFlags.ACTIVE_ONLY in case.request.flags and case.vbucket.state != VBucketState.ACTIVE:
        return Refused(status=Status.NOT_MY_VBUCKET, reason="the vbucket is not active")
    return None


def _check_range(case: _Case) -> Refused | None:
    request = case.request
    if request.start_seqno > request.end_seqno:
        return Refused(status=Status.ERANGE, reason="the start seqno exceeds the end seqno")
    if not request.snapshot_start_seqno <= request.start_seqno <= request.snapshot_end_seqno:
        return Refused(status=Status.ERANGE, reason="the start seqno lies outside its snapshot")
    return None


def _check_stream_id(case: _Case) -> Refused | None:
    sid, enabled = case.value.sid, case.connection.stream_id_enabled
    if sid is not None and not enabled:
        return Refused(status=Status.DCP_STREAMID_INVALID, reason="a sid was given, but enable_stream_id is off")
    if sid is None and enabled:
        return Refused(status=Status.DCP_STREAMID_INVALID, reason="enable_stream_id is on, but no sid was given")
    if sid == 0:
        return Refused(status=Status.DCP_STREAMID_INVALID, reason="sid 0 is reserved")
    return None


def _check_open_streams(case: _Case) -> Refused | None:
    open_ids = case.connection.open_stream_ids
    if case.value.sid in open_ids:
        return Refused(status=Status.KEY_EEXISTS, reason="the stream is already open on this connection")
    if len(open_ids) >= STREAMS_PER_VBUCKET_MAX:
        return Refused(status=Status.ENOMEM, reason=f"{STREAMS_PER_VBUCKET_MAX} streams are open on this vbucket")
    return None


def _check_manifest(case: _Case) -> Refused | None:
    if case.value.uid is not None and case.value.uid > case.vbucket.manifest_uid:
        return Refused(
            status=Status.MANIFEST_IS_AHEAD,
            reason=f"the vbucket is at manifest {case.vbucket.manifest_uid:x}, not {case.value.uid:x}",
        )
    return None


def _check_filter(case: _Case) -> Refused | None:
    value, vbucket = case.value, case.vbucket
    if value.is_filtered and not case.connection.collections:
        return Refused(status=Status.EINVAL, reason="a filter needs collections negotiated on the connection")
    for collection in value.collections or ():
        if collection not in vbucket.collections:
            return Refused(status=Status.UNKNOWN_COLLECTION, reason=f"collection {collection:x} is unknown")
    if value.scope is not None and value.scope not in vbucket.scopes:
        return Refused(status=Status.UNKNOWN_SCOPE, reason=f"scope {value.scope:x} is unknown")
    return None


_CHECKS: tuple[Callable[[_Case], Refused | None], ...] = (
    _check_noop,
    _check_state,
    _check_range,
    _check_stream_id,
    # Before the filter: a collection may be unknown only because the vbucket has not seen its manifest yet, and that
    # is worth another try.
    _check_manifest,
    _check_filter,
    _check_open_streams,
)


def _decide_start(case: _Case) -> Accepted | Rollback:
    request, vbucket = case.request, case.vbucket
    if StreamFlags.FROM_LATEST in request.flags:
        # The consumer wants what comes from now on, so what it may have had before does not matter.
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


def _accept(case: _Case, *, start: Seqno, snapshot_start: Seqno) -> Accepted:
    request, high = case.request, case.vbucket.high_seqno
    # "Latest" and "disk only" end at what is there when the stream is created (seed 002).
    end = request.end_seqno
    if StreamFlags.DISK_ONLY in request.flags:
        end = min(end, high)
    if StreamFlags.LATEST in request.flags:
        end = high
    return Accepted(
        start_seqno=start,
        end_seqno=Seqno(max(end, start)),
        snapshot_start_seqno=snapshot_start,
        stream_id=case.value.sid,
        collections=case.value.collections,
        scope=case.value.scope,
    )
