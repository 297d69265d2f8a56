"""The handler of `stat`: groups of statistics. It sends one response per statistic and an empty one at the end.

To add a group, write a generator of names and values and add it to one of the tables.
Names are those of Couchbase if it has the same statistic. Seqnos are durable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwater.node.auth.users import Action
from headwater.node.kv.context import Context
from headwater.node.kv.documents import Target, refuse_vbucket
from headwater.node.producer.statistics import ConnectionStatistics, connection_statistics
from headwater.node.service import ConsumerView
from headwater.phrases import parse_number
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import Stat
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.status import RequestRefused, Status
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts
from headwater.store.receiving import whole_seqno

Statistics = Iterator[tuple[str, object]]

_NANOSECONDS = 10**9
_VBUCKET_NAMED_MAX = 99_999
"""Python would parse more digits slowly, or refuse them."""


def stat(context: Context, request: Stat) -> list[PlainResponse]:
    """The statistics of the group that the key names. A vbucket may follow the name."""
    name, _, argument = request.key.decode(errors="replace").partition(" ")
    bucket = context.bucket_service.bucket
    statistics: Statistics
    if name in _OF_DOCUMENTS and argument:
        statistics = _of_document(context, request.key.partition(b" ")[2], is_checked=_OF_DOCUMENTS[name])
    elif name == "dcp":
        statistics = _dcp(context, argument or None)
    elif name in _BY_VBUCKET:
        number = parse_number(argument, _VBUCKET_NAMED_MAX)
        if argument and (number is None or not bucket.vbuckets.exists(number)):
            refuse_vbucket(context)
        statistics = (
            statistic
            for vbucket, facts in enumerate(bucket.vbuckets.facts)
            if facts is not None and (not argument or vbucket == number)
            for statistic in _BY_VBUCKET[name](bucket, VBucketId(vbucket), facts)
        )
    elif name in _GROUPS and not argument:
        statistics = _GROUPS[name](context, bucket)
    elif name in context.bucket_service.node_statistics:
        if not context.session.may(Action.NODE):
            raise RequestRefused(Status.EACCESS)
        statistics = iter(context.bucket_service.node_statistics[name](argument))
    elif name in OFFERED_GROUPS and not argument:
        statistics = iter(context.bucket_service.statistics.get(name, tuple)())
    else:
        raise RequestRefused(Status.KEY_ENOENT)
    responses = [context.ok(str(value).encode(), key=key.encode()) for key, value in statistics]
    return [*responses, context.ok()]


# --- of the bucket ------------------------------------------------------------------------------------------------


def _general(context: Context, bucket: Bucket) -> Statistics:
    service = context.service
    existing = [(VBucketId(vbucket), facts.state) for vbucket, facts in enumerate(bucket.vbuckets.facts) if facts]
    documents = {vbucket: bucket.live_documents(vbucket) for vbucket, _ in existing}
    yield "version", service.server_version
    yield "time", bucket.environment.now_s()
    yield "uptime", (service.now_ns() - service.started_ns) // _NANOSECONDS
    yield "curr_items", sum(documents[vbucket] for vbucket, state in existing if state == VBucketState.ACTIVE)
    yield "curr_items_tot", sum(documents.values())
    for wanted in VBucketState:
        yield f"vb_{wanted.name.lower()}_num", sum(1 for _, state in existing if state == wanted)
    yield "ep_bucket_uuid", bucket.facts.uuid
    yield "ep_max_vbuckets", len(bucket.vbuckets)
    yield "ep_queue_size", bucket.pending_changes
    yield "ep_durable_commit", bucket.durable_commit
    yield "ep_unsettled_commits", bucket.young_commits
    yield "ep_locked_items", len(context.bucket_service.locks)


def _uuid(context: Context, bucket: Bucket) -> Statistics:
    yield "uuid", bucket.facts.uuid


def _collections(context: Context, bucket: Bucket) -> Statistics:
    manifest = bucket.manifest
    yield "manifest_uid", f"{manifest.uid:x}"
    for scope in manifest.scopes:
        yield f"0x{scope.id:x}:name", scope.name
        for collection in scope.collections:
            prefix = f"0x{scope.id:x}:0x{collection.id:x}"
            yield f"{prefix}:name", collection.name
            yield f"{prefix}:scope_name", scope.name
            if collection.max_ttl_s is not None:
                yield f"{prefix}:maxTTL", collection.max_ttl_s


def _nodes_login(context: Context, bucket: Bucket) -> Statistics:
    """The credentials between the cluster's nodes, for nodes and for full admins, who may publish others."""
    service = context.bucket_service
    if not context.session.may(Action.NODE):
        raise RequestRefused(Status.EACCESS)
    login = service.nodes_login
    if login is not None:
        yield "user", login.user
        yield "password", login.password


def _range_scans(context: Context, bucket: Bucket) -> Statistics:
    """The running scans. Each may hold a view of the data, whose space in the file can't be reused meanwhile."""
    now_s = context.service.now_s()
    for scan_id, running in context.bucket_service.range_scans.running.items():
        prefix = f"vb_{running.vbucket}:{scan_id.hex()}"
        yield f"{prefix}:vbuuid", running.vbuuid
        yield f"{prefix}:collection", f"0x{running.scan.wanted.collection:x}"
        yield f"{prefix}:key_value", "key" if running.scan.wanted.keys_only else "value"
        yield f"{prefix}:seconds_left", max(0, int(running.until_s - now_s))


def _lost(context: Context, bucket: Bucket) -> Statistics:
    """For each vbucket that was promoted here: the last seqno that it kept, and the last one known before."""
    for vbucket, branch in context.bucket_service.history.newest_failovers().items():
        yield f"vb_{vbucket}", f"{branch.kept_seqno} {'' if branch.known_seqno is None else branch.known_seqno}"


OFFERED_GROUPS = frozenset({"replication", "headwater-vbuckets"})
"""Groups that other parts of the node provide (`BucketService.statistics`): the copies it keeps, and lists of all
vbuckets for other nodes that show the cluster. They are empty if no part provides them."""
_GROUPS: dict[str, Callable[[Context, Bucket], Statistics]] = {
    "": _general,
    "uuid": _uuid,
    "collections": _collections,
    "range-scans": _range_scans,
    "headwater-login": _nodes_login,
    "headwater-lost": _lost,
}

# --- of one document ----------------------------------------------------------------------------------------------

_OF_DOCUMENTS = {"key": False, "vkey": True}
"""The groups of one document, and whether they compare the stored document with its entry in the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The document that the argument of `stat key` names, in the form of a `DocumentRequest`."""

    vbucket: VBucketId
    collection_id: CollectionId | None
    key: bytes


def _of_document(context: Context, argument: bytes, *, is_checked: bool) -> Statistics:
    """The statistics of one document."""
    service = context.bucket_service
    bucket = service.bucket
    asked = _asked_document(bucket.manifest, argument)
    state = bucket.vbuckets.state(asked.vbucket)
    if state is None:
        refuse_vbucket(context)
    target = Target.of(context, asked, state=state)
    entry = target.live_or_refuse()
    document = target.read(entry)
    # If writes are acknowledged only when durable, this answer waits for that, too, so the document is never dirty.
    yield "key_is_dirty", _shown(not service.ack_when_durable and bucket.commit_of(entry) > bucket.durable_commit)
    yield "key_exptime", document.expiry
    yield "key_flags", document.flags
    yield "key_cas", document.cas
    yield "key_vb_state", state.name.lower()
    if is_checked:
        is_valid = (document.seqno, document.cas, document.key) == (entry.seqno, entry.cas, asked.key)
        yield "key_valid", "valid" if is_valid else "this_is_a_bug"


def _asked_document(manifest: Manifest, argument: bytes) -> _Asked:
    """Parse `KEY VBUCKET`, followed by a collection if it is not the default one: `scope.name`, or its id in hex."""
    words = argument.rsplit(b" ", 2)
    collection: CollectionId | None = None
    if len(words) == 3 and not words[2].isdigit():
        collection = _named_collection(manifest, words.pop().decode(errors="replace"))
    else:
        words = argument.rsplit(b" ", 1)
    vbucket = parse_number(words[-1].decode(errors="replace"), _VBUCKET_NAMED_MAX)
    if len(words) != 2 or not words[0] or vbucket is None:
        raise RequestRefused(Status.EINVAL, "name the key and its vbucket, and behind them a collection if need be")
    return _Asked(vbucket=VBucketId(vbucket), collection_id=collection, key=words[0])


def _named_collection(manifest: Manifest, name: str) -> CollectionId:
    for scope, collection in manifest.collections():
        if name in (f"{scope.name}.{collection.name}", f"0x{collection.id:x}"):
            return collection.id
    raise RequestRefused(Status.UNKNOWN_COLLECTION, manifest_uid=f"{manifest.uid:x}")


# --- of DCP connections -------------------------------------------------------------------------------------------


def _dcp(context: Context, name: str | None) -> Statistics:
    """All connections that send or receive changes, or the named one. Times of creation count from the node's start."""
    service = context.service
    bucket, now_s = context.bucket_service, service.now_s()
    uptime_s = (service.now_ns() - service.started_ns) / _NANOSECONDS
    sending = connection_statistics(bucket.producer_connections(), now_s=now_s, name=name)
    for connection in sending:
        yield from _of_connection(connection, created_s=max(0.0, uptime_s - connection.open_s))
    received = bucket.consumer_views(now_s=now_s, name=name)
    for consumer in received:
        yield from _of_consumer(consumer, created_s=max(0.0, uptime_s - consumer.open_s))
    yield "ep_dcp_count", len(sending) + len(received)
    yield "ep_dcp_producer_count", len(sending)
    yield "ep_dcp_total_bytes", sum(connection.total_bytes_sent for connection in sending)


def _of_connection(connection: ConnectionStatistics, *, created_s: float) -> Statistics:
    prefix = f"eq_dcpq:{connection.name}"
    yield f"{prefix}:created", int(created_s)
    yield f"{prefix}:flow_control", "enabled" if connection.max_buffer_bytes else "disabled"
    yield f"{prefix}:noop_tx_interval", f"{connection.noop_interval_s:g}"
    for name in _OF_CONNECTIONS:
        yield f"{prefix}:{name}", _shown(getattr(connection, name))
    for stream in connection.streams or ():
        sid = "" if stream.stream_id is None else f"_sid_{stream.stream_id}"
        for name in _OF_STREAMS:
            yield f"{prefix}:stream_{stream.vbucket}{sid}_{name}", getattr(stream, name)


_OF_CONNECTIONS = (
    "type", "total_bytes_sent", "total_acked_bytes", "unacked_bytes", "max_buffer_bytes", "noop_enabled", "noop_wait",
    "collections_enabled", "priority", "num_streams", "backlog_items",
)  # fmt: skip
_OF_STREAMS = (
    "state", "opaque", "start_seqno", "end_seqno", "last_sent_seqno", "backlog_items", "frames_sent", "bytes_sent",
)  # fmt: skip
"""Statistics with the same name as their field."""


def _of_consumer(consumer: ConsumerView, *, created_s: float) -> Statistics:
    prefix = f"eq_dcpq:{consumer.name}"
    yield f"{prefix}:type", "consumer"
    yield f"{prefix}:created", int(created_s)
    yield f"{prefix}:peer", consumer.peer
    yield f"{prefix}:supports_ack", _shown(consumer.buffer_bytes_max > 0)
    yield f"{prefix}:total_received_bytes", consumer.received_bytes
    yield f"{prefix}:total_received_changes", consumer.received_changes
    yield f"{prefix}:total_acked_bytes", consumer.acked_bytes
    yield f"{prefix}:unacked_bytes", consumer.unacked_bytes
    yield f"{prefix}:max_buffer_bytes", consumer.buffer_bytes_max
    yield f"{prefix}:held", _shown(consumer.is_held)
    yield f"{prefix}:held_bytes", consumer.held_bytes
    yield f"{prefix}:num_streams", len(consumer.vbuckets)
    for stream in consumer.streams or ():
        of_stream = f"{prefix}:stream_{stream.vbucket}"
        yield f"{of_stream}_state", stream.state
        yield f"{of_stream}_opaque", stream.opaque
        yield f"{of_stream}_flags", stream.flags
        yield f"{of_stream}_last_received_seqno", stream.received_seqno
        yield f"{of_stream}_received_changes", stream.received_changes
        yield f"{of_stream}_in_snapshot", _shown(stream.is_inside_snapshot)
        yield f"{of_stream}_cur_snapshot_start", stream.snapshot_start_seqno
        yield f"{of_stream}_cur_snapshot_end", stream.snapshot_end_seqno


def _shown(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


# --- by vbucket ---------------------------------------------------------------------------------------------------


def _state(bucket: Bucket, vbucket: VBucketId, facts: VBucketFacts) -> Statistics:
    state = bucket.vbuckets.state(vbucket) or facts.state
    yield f"vb_{vbucket}", state.name.lower()


def _details(bucket: Bucket, vbucket: VBucketId, facts: VBucketFacts) -> Statistics:
    yield from _state(bucket, vbucket, facts)
    if vbucket in bucket.vbuckets.damage:
        yield f"vb_{vbucket}:damage", bucket.vbuckets.damage[vbucket].reason
    yield f"vb_{vbucket}:num_items", bucket.live_documents(vbucket)
    yield f"vb_{vbucket}:num_tombstones", bucket.tombstones(vbucket)
    yield f"vb_{vbucket}:high_seqno", bucket.vbuckets.durable_seqnos[vbucket]
    yield f"vb_{vbucket}:purge_seqno", facts.purge_seqno
    yield f"vb_{vbucket}:uuid", facts.failover_log.newest.vbuuid
    yield f"vb_{vbucket}:max_cas", bucket.vbuckets.max_cas[vbucket]


def _seqnos(bucket: Bucket, vbucket: VBucketId, facts: VBucketFacts) -> Statistics:
    durable = bucket.vbuckets.durable_seqnos[vbucket]
    is_replica = facts.state == VBucketState.REPLICA
    for name in ("high_seqno", "abs_high_seqno", "last_persisted_seqno"):
        yield f"vb_{vbucket}:{name}", durable
    yield f"vb_{vbucket}:purge_seqno", facts.purge_seqno
    yield f"vb_{vbucket}:uuid", facts.failover_log.newest.vbuuid
    yield f"vb_{vbucket}:last_persisted_snap_start", facts.snapshot_start_seqno if is_replica else durable
    yield f"vb_{vbucket}:last_persisted_snap_end", facts.snapshot_end_seqno if is_replica else durable


def _copy(bucket: Bucket, vbucket: VBucketId, facts: VBucketFacts) -> Statistics:
    """What decides which of two copies is more advanced, in one line: state, seqno, branches of its history.

    The seqno is the last one up to which the copy is whole. The branches are those up to that seqno: later ones are
    only names from the failover log of its active copy. A damaged copy is left out: no other must be made from it.
    """
    if vbucket in bucket.vbuckets.damage:
        return
    seqno = whole_seqno(bucket, vbucket)
    branches = ",".join(str(entry.vbuuid) for entry in facts.failover_log.truncate(seqno).entries)
    yield f"vb_{vbucket}", f"{facts.state.name.lower()} {seqno} {branches}"


_BY_VBUCKET: dict[str, Callable[[Bucket, VBucketId, VBucketFacts], Statistics]] = {
    "vbucket": _state,
    "vbucket-details": _details,
    "vbucket-seqno": _seqnos,
    "headwater-copies": _copy,
}
