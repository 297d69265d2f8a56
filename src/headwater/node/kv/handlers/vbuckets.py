"""Handlers about vbuckets as wholes: their states, their seqnos, their durability; and the flush of them all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from headwater.node.kv.context import Context
from headwater.node.kv.documents import collection_by_id, refuse_vbucket
from headwater.node.service import BucketService, RequestRefused
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import Flush
from headwater.protocol.messages.vbuckets import (
    DeleteVBucket,
    GetAllVbSeqnos,
    GetAllVbSeqnosResponse,
    GetVBucket,
    GetVBucketResponse,
    SeqnoPersistence,
    SetVBucket,
    VBucketSeqno,
)
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.store import settling
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts
from headwater.store.scan import collection_high_seqnos

_ANY_ALIVE = 0
_ALIVE = frozenset({VBucketState.ACTIVE, VBucketState.REPLICA, VBucketState.PENDING})
_CHAINS_MAX = 2
_COPIES_MAX = 4

# --- states -------------------------------------------------------------------------------------------------------


def set_vbucket(context: Context, request: SetVBucket) -> PlainResponse:
    """Give a vbucket a state, making it where it does not exist."""
    service = context.bucket_service
    bucket = service.bucket
    if not VBucketState(request.state).is_known:
        raise RequestRefused(Status.EINVAL, f"{request.state} is not the state of a vbucket")
    if request.vbucket >= len(bucket.vbuckets):
        raise RequestRefused(Status.ERANGE, f"the bucket has {len(bucket.vbuckets)} vbuckets")
    topology = None
    if request.value:
        members = _members(request)
        _check_config(service, members)
        topology = _topology(request, members)
    before, kept = bucket.vbuckets.facts[request.vbucket], Seqno(int(bucket.vbuckets.high_seqnos[request.vbucket]))
    commit = bucket.set_vbucket_state(request.vbucket, request.state)
    if request.state == VBucketState.ACTIVE:
        _note_promotion(service, request.vbucket, before, kept)
    facts = bucket.vbuckets.facts[request.vbucket]
    assert facts is not None, "it has just been given a state"
    if facts.topology != topology:
        commit = bucket.set_vbucket_facts(request.vbucket, replace(facts, topology=topology))
    service.on_change()
    service.sync_writes.evaluate(request.vbucket)
    context.wait_for(commit)
    return context.ok()


def _note_promotion(service: BucketService, vbucket: VBucketId, before: VBucketFacts | None, kept: Seqno) -> None:
    """A vbucket that is active on another node by the config, and is made active here, is failed over."""
    node = service.other_active_node(vbucket)
    was_copy = before is not None and before.state != VBucketState.ACTIVE
    is_in_cluster = service.config is not None
    if node is not None or (was_copy and not is_in_cluster):
        service.history.promoted(vbucket, kept=kept, before=before, node=node)


def _members(request: SetVBucket) -> dict[str, Any]:
    try:
        members = json.loads(request.value)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(Status.EINVAL, "the value is not JSON with a topology") from error
    # kv_engine, DCP docs, "Set VBucket State Value": the last two are newer. The state that a vbucket will have helps
    # a server with its cache, and makes no difference here.
    if not isinstance(members, dict) or not members.keys() & {"topology", "next_expected_state", "use_snapshot"}:
        raise RequestRefused(Status.EINVAL, "the value is not JSON with a topology")
    if "use_snapshot" in members:
        raise RequestRefused(Status.NOT_SUPPORTED, "a vbucket is not made of files; replicate it")
    if members.get("next_expected_state", "active") not in ("active", "replica", "pending", "dead"):
        raise RequestRefused(Status.EINVAL, "next_expected_state is not the state of a vbucket")
    return members


def _check_config(service: BucketService, members: dict[str, Any]) -> None:
    """Who coordinates a cluster may say by which config it decides. By another one it might have decided otherwise."""
    if "config" in members and members["config"] != list(service.config_version):
        raise RequestRefused(Status.KEY_EEXISTS, "the node has another config by now")


def _topology(request: SetVBucket, members: dict[str, Any]) -> tuple[Any, ...] | None:
    """The replication topology: chains of node names, the active one first. Only an active vbucket has one."""
    chains = members.get("topology")
    if chains is None:
        return None
    if request.state != VBucketState.ACTIVE or not _is_topology(chains):
        raise RequestRefused(Status.EINVAL, "a topology is a list of chains of node names, for an active vbucket")
    return tuple(chains)


def _is_topology(chains: Any) -> bool:
    return (
        isinstance(chains, list)
        and 0 < len(chains) <= _CHAINS_MAX
        and all(isinstance(chain, list) and 0 < len(chain) <= _COPIES_MAX for chain in chains)
        and all(node is None or isinstance(node, str) for chain in chains for node in chain)
    )


def get_vbucket(context: Context, request: GetVBucket) -> GetVBucketResponse:
    state = context.bucket_service.bucket.vbuckets.state(request.vbucket)
    if state is None:
        refuse_vbucket(context)
    return context.reply(GetVBucketResponse, state=state)


def delete_vbucket(context: Context, request: DeleteVBucket) -> PlainResponse:
    """Remove a vbucket with all its data."""
    service = context.bucket_service
    if not service.bucket.vbuckets.exists(request.vbucket):
        refuse_vbucket(context)
    _check_at_rest(context)
    settling.remove_vbucket(service.bucket, request.vbucket)
    service.forget_locks({request.vbucket})
    service.sync_writes.evaluate(request.vbucket)
    return context.ok()


def flush(context: Context, request: Flush) -> PlainResponse:
    """Drop all documents of the bucket."""
    if request.delay_s:
        raise RequestRefused(Status.NOT_SUPPORTED, "a flush can't be delayed")
    service = context.bucket_service
    _check_at_rest(context)
    settling.flush(service.bucket)
    service.history.flushed([at for at, facts in enumerate(service.bucket.vbuckets.facts) if facts is not None])
    service.locks.clear()
    service.sync_writes.evaluate_all()
    return context.ok()


def _check_at_rest(context: Context) -> None:
    """What a commit or house-keeping is writing at this moment can't be taken away under its hands."""
    service = context.bucket_service
    if service.bucket.in_flight is not None or not service.is_at_rest():
        raise RequestRefused(Status.ETMPFAIL, "changes are being written at this moment; try again")


# --- seqnos -------------------------------------------------------------------------------------------------------


def get_all_vb_seqnos(context: Context, request: GetAllVbSeqnos) -> GetAllVbSeqnosResponse:
    """The durable high seqnos of vbuckets, of one collection in them where that is asked for.

    As recorded from a 7.0.5 server, prepares and aborts count for one collection, for DCP connections with sync writes,
    and for clients without collections. All others get the last seqno that they can see.

    Every write that was acknowledged before the request counts: a peer that reads up to these seqnos has it. So where
    writes are acknowledged before they are durable, the answer waits until they are.
    """
    service = context.bucket_service
    bucket = service.bucket
    vbuckets = _in_state(bucket, request.state or _ANY_ALIVE)
    if request.collection is None:
        session = context.session
        with_prepares = session.dcp is not None and session.dcp.controls.sync_writes
        is_all = with_prepares or not session.negotiated.collections
        numbers = bucket.vbuckets.durable_seqnos if is_all else bucket.vbuckets.visible_seqnos
        if not service.ack_when_durable:
            numbers = bucket.vbuckets.high_seqnos if is_all else bucket.accepted_visible_seqnos()
            context.wait_for(bucket.last_commit)
        seqnos = numbers[vbuckets].tolist()
    else:
        if not context.session.negotiated.collections:
            raise RequestRefused(Status.EINVAL, "a client that asks for a collection negotiates collections first")
        collection = collection_by_id(context, request.collection)
        seqnos = collection_high_seqnos(bucket, vbuckets, collection.id)
    entries = (
        VBucketSeqno(vbucket=vbucket, seqno=Seqno(seqno)) for vbucket, seqno in zip(vbuckets, seqnos, strict=True)
    )
    return context.reply(GetAllVbSeqnosResponse, seqnos=tuple(entries))


def _in_state(bucket: Bucket, wanted: int) -> list[VBucketId]:
    if wanted != _ANY_ALIVE and not VBucketState(wanted).is_known:
        raise RequestRefused(Status.EINVAL, f"{wanted} is not the state of a vbucket")
    states = _ALIVE if wanted == _ANY_ALIVE else {wanted}
    # A vbucket that is damaged counts as dead: a seqno of it would be taken for all that there is.
    return [VBucketId(vbucket) for vbucket, state in enumerate(bucket.vbuckets.states.tolist()) if state in states]


def seqno_persistence(context: Context, request: SeqnoPersistence) -> PlainResponse:
    """Answer once a seqno is durable."""
    bucket = context.bucket_service.bucket
    if not bucket.vbuckets.exists(request.vbucket):
        refuse_vbucket(context)
    if request.seqno > bucket.vbuckets.high_seqnos[request.vbucket]:
        raise RequestRefused(Status.ETMPFAIL, "no change has this seqno yet")
    if request.seqno > bucket.vbuckets.durable_seqnos[request.vbucket]:
        is_pending = bucket.pending.find(request.vbucket, request.seqno) is not None
        commit = bucket.pending if is_pending or bucket.in_flight is None else bucket.in_flight
        context.wait_for(commit.number)
    return context.ok()
