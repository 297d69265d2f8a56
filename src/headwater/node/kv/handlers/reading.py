"""Handlers that read a document or its metadata, and that tell how far a vbucket is durable."""

from __future__ import annotations

from headwater.node.kv.access import live_or_refuse, newest, place_of, refuse_vbucket
from headwater.node.kv.context import Context, Refused
from headwater.node.kv.locks import shown_cas
from headwater.node.kv.values import body_of
from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.messages.documents import Get, GetMeta, GetMetaResponse, GetReplica, GetResponse
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno
from headwater.protocol.status import Status

_META_WITH_DATATYPE = 2


def get(context: Context, request: Get) -> GetResponse:
    return _get(context, request)


def get_with_key(context: Context, request: Get) -> GetResponse:
    return _get(context, request, with_key=True)


def get_replica(context: Context, request: GetReplica) -> GetResponse:
    return _get(context, request, state=VBucketState.REPLICA)


def _get(
    context: Context, request: Get, *, state: VBucketState = VBucketState.ACTIVE, with_key: bool = False
) -> GetResponse:
    place = place_of(context, request, state=state)
    entry = live_or_refuse(context, place)
    document = place.read(entry)
    return context.reply(
        GetResponse,
        cas=shown_cas(place, entry),
        datatype=context.session.datatype_for_peer(document.datatype),
        flags=document.flags,
        collection_id=request.collection_id if with_key else None,
        key=request.key if with_key else b"",
        value=body_of(document),
    )


def get_meta(context: Context, request: GetMeta) -> GetMetaResponse:
    """The metadata of a document or of its tombstone."""
    if request.version is not None and request.version > _META_WITH_DATATYPE:
        raise Refused(Status.EINVAL, f"version {request.version} of the metadata is not known")
    place = place_of(context, request)
    entry = newest(context, place)
    if entry is None:
        raise Refused(Status.KEY_ENOENT)
    document = place.read(entry)
    return context.reply(
        GetMetaResponse,
        cas=shown_cas(place, entry),
        deleted=int(document.is_deleted),
        flags=document.flags,
        # A tombstone has the time of its deletion where a document has its expiry.
        expiry=document.delete_time if document.is_deleted else document.expiry,
        rev_seqno=document.rev_seqno,
        document_datatype=int(document.datatype) if request.version == _META_WITH_DATATYPE else None,
    )


def observe_seqno(context: Context, request: ObserveSeqno) -> ObserveSeqnoResponse:
    """How far the vbucket is durable, on the branch of history that the client knows."""
    vbuckets = context.bucket_service.bucket.vbuckets
    facts = vbuckets.facts[request.vbucket] if vbuckets.exists(request.vbucket) else None
    if facts is None or facts.state == VBucketState.DEAD:
        refuse_vbucket(context)
    durable = Seqno(int(vbuckets.durable_seqnos[request.vbucket]))
    newest_vbuuid = facts.failover_log.newest.vbuuid
    shared = facts.failover_log.branch_end(request.vbuuid, high_seqno=durable)
    if shared is None:
        raise Refused(Status.KEY_ENOENT)
    is_older = request.vbuuid != newest_vbuuid
    return context.reply(
        ObserveSeqnoResponse,
        vbucket=request.vbucket,
        vbuuid=newest_vbuuid,
        persisted_seqno=durable,
        current_seqno=durable,
        old_vbuuid=request.vbuuid if is_older else None,
        last_received_seqno=shared if is_older else None,
    )
