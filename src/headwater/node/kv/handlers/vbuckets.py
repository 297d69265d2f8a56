"""Handlers for whole vbuckets (states, seqnos, durability, flush), and for the manifest of collections."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headwater.errors import LocalProtocolError, MalformedJson
from headwater.node.kv.context import UNBOUNDED_WORK, Context
from headwater.node.kv.documents import collection_by_id, refuse_vbucket
from headwater.node.service import BucketService
from headwater.protocol.manifest import (
    COLLECTIONS_MAX,
    DEFAULT_NAME,
    FIRST_ID,
    NAME_BYTES_MAX,
    SCOPES_MAX,
    Manifest,
    Scope,
)
from headwater.protocol.messages import vbuckets as messages
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import Flush
from headwater.protocol.numbers import DEFAULT_COLLECTION, DEFAULT_SCOPE, Seqno, VBucketId
from headwater.protocol.status import RequestRefused, Status
from headwater.store import settling
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts
from headwater.store.scan import CollectionSeqnos

_ANY_ALIVE = 0
_ALIVE = frozenset({VBucketState.ACTIVE, VBucketState.REPLICA, VBucketState.PENDING})
_CHAINS_MAX = 2
_COPIES_MAX = 4

# --- states -------------------------------------------------------------------------------------------------------


def set_vbucket(context: Context, request: messages.SetVBucket) -> PlainResponse:
    """Set the state of a vbucket, which is created if it does not exist."""
    service = context.bucket_service
    bucket = service.bucket
    if not VBucketState(request.state).is_known:
        raise RequestRefused(Status.EINVAL, f"{request.state} is not the state of a vbucket")
    if request.vbucket >= len(bucket.vbuckets):
        raise RequestRefused(Status.ERANGE, f"the bucket has {len(bucket.vbuckets)} vbuckets")
    topology = None
    if request.value:
        members = _members(request)
        # A coordinator may send the version of the config on which it decided. With another it might decide otherwise.
        if "config" in members and members["config"] != list(service.config_version):
            raise RequestRefused(Status.KEY_EEXISTS, "the node has another config by now")
        topology = _topology(request, members)
    before, kept = bucket.vbuckets.facts[request.vbucket], bucket.vbuckets.high_seqno(request.vbucket)
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
    """Record a failover, if the vbucket is active on another node in the config, or was a copy outside a cluster."""
    node = service.other_active_node(vbucket)
    was_copy = before is not None and before.state != VBucketState.ACTIVE
    is_in_cluster = service.config is not None
    if node is not None or (was_copy and not is_in_cluster):
        service.history.promoted(vbucket, kept=kept, before=before, node=node)


def _members(request: messages.SetVBucket) -> dict[str, Any]:
    try:
        members = json.loads(request.value)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(Status.EINVAL, "the value is not JSON with a topology") from error
    # kv_engine, DCP docs, "Set VBucket State Value". The last two members are newer. `next_expected_state` helps a
    # server with its cache, and makes no difference here.
    if not isinstance(members, dict) or not members.keys() & {"topology", "next_expected_state", "use_snapshot"}:
        raise RequestRefused(Status.EINVAL, "the value is not JSON with a topology")
    if "use_snapshot" in members:
        raise RequestRefused(Status.NOT_SUPPORTED, "a vbucket is not made of files; replicate it")
    if members.get("next_expected_state", "active") not in ("active", "replica", "pending", "dead"):
        raise RequestRefused(Status.EINVAL, "next_expected_state is not the state of a vbucket")
    return members


def _topology(request: messages.SetVBucket, members: dict[str, Any]) -> tuple[Any, ...] | None:
    """The replication topology: chains of node names, the active node first. Only an active vbucket has one."""
    chains = members.get("topology")
    if chains is None:
        return None
    if request.state != VBucketState.ACTIVE or not (
        isinstance(chains, list)
        and 0 < len(chains) <= _CHAINS_MAX
        and all(isinstance(chain, list) and 0 < len(chain) <= _COPIES_MAX for chain in chains)
        and all(node is None or isinstance(node, str) for chain in chains for node in chain)
    ):
        raise RequestRefused(Status.EINVAL, "a topology is a list of chains of node names, for an active vbucket")
    return tuple(chains)


def get_vbucket(context: Context, request: messages.GetVBucket) -> messages.GetVBucketResponse:
    state = context.bucket_service.bucket.vbuckets.state(request.vbucket)
    if state is None:
        refuse_vbucket(context)
    return context.reply(messages.GetVBucketResponse, state=state)


def delete_vbucket(context: Context, request: messages.DeleteVBucket) -> PlainResponse:
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
    """Drop all documents of the vbuckets that are active here."""
    if request.delay_s:
        raise RequestRefused(Status.NOT_SUPPORTED, "a flush can't be delayed")
    _check_at_rest(context)
    try:
        context.bucket_service.flush()
    except LocalProtocolError as error:
        # ep-engine gave this answer (ENGINE_ENOTSUP) while it had the command, if `flushall_enabled` was off.
        raise RequestRefused(Status.NOT_SUPPORTED, error.reason) from error
    return context.ok()


def _check_at_rest(context: Context) -> None:
    """Refuse the request while a commit or housekeeping is writing: the data can't be removed meanwhile."""
    service = context.bucket_service
    if service.bucket.is_committing or not service.is_at_rest():
        raise RequestRefused(Status.ETMPFAIL, "changes are being written at this moment; try again")


# --- seqnos -------------------------------------------------------------------------------------------------------


def get_all_vb_seqnos(context: Context, request: messages.GetAllVbSeqnos) -> messages.GetAllVbSeqnosResponse:
    """The durable high seqnos of vbuckets, or of one collection in them if the request names it.

    As recorded from a 7.0.5 server, prepares and aborts count for one collection, for DCP connections with sync writes,
    and for clients without collections. All others get the last seqno that they can see.

    A peer that reads up to these seqnos has every write that was acknowledged before the request. So if writes are
    acknowledged before they are durable, the answer waits until they are.
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
        walk = CollectionSeqnos.of(bucket, vbuckets, collection.id)
        seqnos = context.work(walk.high_seqnos, cost=UNBOUNDED_WORK, key=(collection.id, vbuckets))
    entries = (
        messages.VBucketSeqno(vbucket=vbucket, seqno=Seqno(seqno))
        for vbucket, seqno in zip(vbuckets, seqnos, strict=True)
    )
    return context.reply(messages.GetAllVbSeqnosResponse, seqnos=tuple(entries))


def _in_state(bucket: Bucket, wanted: int) -> list[VBucketId]:
    if wanted != _ANY_ALIVE and not VBucketState(wanted).is_known:
        raise RequestRefused(Status.EINVAL, f"{wanted} is not the state of a vbucket")
    states = _ALIVE if wanted == _ANY_ALIVE else {wanted}
    # A damaged vbucket counts as dead: clients would believe that it has no changes beyond its seqno.
    return [VBucketId(vbucket) for vbucket, state in enumerate(bucket.vbuckets.states.tolist()) if state in states]


def seqno_persistence(context: Context, request: messages.SeqnoPersistence) -> PlainResponse:
    """Answer once a seqno is durable."""
    bucket = context.bucket_service.bucket
    if not bucket.vbuckets.exists(request.vbucket):
        refuse_vbucket(context)
    if request.seqno > bucket.vbuckets.high_seqnos[request.vbucket]:
        raise RequestRefused(Status.ETMPFAIL, "no change has this seqno yet")
    if request.seqno > bucket.vbuckets.durable_seqnos[request.vbucket]:
        context.wait_for(bucket.commit_of_seqno(request.vbucket, request.seqno))
    return context.ok()


# --- collections ---------------------------------------------------------------------------------------------------


_PATH_BYTES_MAX = 2 * NAME_BYTES_MAX + 1
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_%-]{{0,{NAME_BYTES_MAX - 1}}}")

# --- the manifest -------------------------------------------------------------------------------------------------


def get_manifest(context: Context, request: messages.GetCollectionsManifest) -> PlainResponse:
    return context.ok(_manifest_to_show(context).encode(), datatype=context.session.json_datatype)


def _manifest_to_show(context: Context) -> Manifest:
    service = context.bucket_service
    if service.ack_when_durable:
        context.wait_for(service.manifest_commit)
    return context.service.users.visible(context.session.user or "", service.name, service.bucket.manifest)


def set_manifest(context: Context, request: messages.SetCollectionsManifest) -> PlainResponse:
    """Apply a newer manifest. The current one changes nothing."""
    service = context.bucket_service
    current = service.bucket.manifest
    manifest = _decoded(request.value)
    if manifest.uid < current.uid:
        unappliable = context.service.dialect.refuses_older_manifest_as_unappliable
        status = Status.CANNOT_APPLY_MANIFEST if unappliable else Status.ERANGE
        raise RequestRefused(status, f"the manifest has uid {manifest.uid:x}, the bucket has {current.uid:x}")
    if manifest.uid == current.uid:
        if current.events_to(manifest):
            raise RequestRefused(Status.CANNOT_APPLY_MANIFEST, "a manifest that differs has a higher uid")
        return context.ok()
    _check_successor(current, manifest)
    ids_used = max(current.ids_used, manifest.ids_used)
    context.wait_for(service.set_manifest(replace(manifest, ids_used=ids_used)))
    return context.ok()


def _decoded(value: bytes) -> Manifest:
    try:
        manifest = Manifest.decode(value)
    except MalformedJson as error:
        raise RequestRefused(Status.EINVAL, error.reason) from error
    collections = [collection for _, collection in manifest.collections()]
    if len(manifest.scopes) > SCOPES_MAX or len(collections) > COLLECTIONS_MAX:
        raise RequestRefused(
            Status.EINVAL, f"a bucket has at most {SCOPES_MAX} scopes and {COLLECTIONS_MAX} collections"
        )
    _check_names((scope.id, scope.name) for scope in manifest.scopes)
    for scope in manifest.scopes:
        _check_names((collection.id, collection.name) for collection in scope.collections)
    default = manifest.collection_by_id(DEFAULT_COLLECTION)
    if default is not None and default[0].id != DEFAULT_SCOPE:
        raise RequestRefused(Status.EINVAL, "the default collection is in the default scope")
    return manifest


def _check_names(entries: Iterable[tuple[int, str]]) -> None:
    """Check ids and names of the scopes of a manifest, or of the collections of a scope."""
    names = set()
    for number, name in entries:
        if not _NAME.fullmatch(name) or name in names:
            raise RequestRefused(Status.EINVAL, f"{name!r} is not a name, or stands twice")
        if (number == DEFAULT_COLLECTION) != (name == DEFAULT_NAME) or 0 < number < FIRST_ID:
            raise RequestRefused(Status.EINVAL, f"{name!r} can't have the id {number:x}")
        names.add(name)


def _check_successor(current: Manifest, newer: Manifest) -> None:
    """Check that no scope or collection changes its name, no collection its scope, and that no flush is reverted."""
    names = {scope.id: scope.name for scope in newer.scopes}
    for scope in current.scopes:
        if names.get(scope.id, scope.name) != scope.name:
            raise RequestRefused(Status.CANNOT_APPLY_MANIFEST, f"scope {scope.id:x} changes its name")
    for scope, collection in current.collections():
        found = newer.collection_by_id(collection.id)
        if found is not None and (found[0].id, found[1].name) != (scope.id, collection.name):
            raise RequestRefused(
                Status.CANNOT_APPLY_MANIFEST, f"collection {collection.id:x} changes its name or scope"
            )
        if found is not None and found[1].flush_uid < collection.flush_uid:
            raise RequestRefused(
                Status.CANNOT_APPLY_MANIFEST, f"collection {collection.id:x} was flushed by {collection.flush_uid:x}"
            )


# --- ids by names -------------------------------------------------------------------------------------------------


def get_collection_id(context: Context, request: messages.GetCollectionId) -> messages.GetCollectionIdResponse:
    """The id of `scope.collection`. An empty name means the default one."""
    names = _names(request)
    if len(names) != 2:
        raise RequestRefused(Status.EINVAL, "the path of a collection is scope.collection")
    manifest = _manifest_to_show(context)
    collection = _scope(manifest, names[0]).collection(names[1])
    if collection is None:
        raise RequestRefused(Status.UNKNOWN_COLLECTION, manifest_uid=f"{manifest.uid:x}")
    return context.reply(messages.GetCollectionIdResponse, manifest_uid=manifest.uid, id=collection.id)


def get_scope_id(context: Context, request: messages.GetScopeId) -> messages.GetCollectionIdResponse:
    """The id of `scope`. For `scope.collection`, only the scope counts."""
    names = _names(request)
    if len(names) > 2:
        raise RequestRefused(Status.EINVAL, "the path of a scope is scope or scope.collection")
    manifest = _manifest_to_show(context)
    return context.reply(messages.GetCollectionIdResponse, manifest_uid=manifest.uid, id=_scope(manifest, names[0]).id)


def _names(request: messages.GetCollectionId) -> list[str]:
    path = (request.value or request.key)[: _PATH_BYTES_MAX + 1].decode(errors="replace")
    names = [name or DEFAULT_NAME for name in path.split(".")]
    if len(path) > _PATH_BYTES_MAX or not all(_NAME.fullmatch(name) for name in names):
        raise RequestRefused(Status.EINVAL, f"{path!r} is not a path of a scope or collection")
    return names


def _scope(manifest: Manifest, name: str) -> Scope:
    scope = manifest.scope(name)
    if scope is None:
        raise RequestRefused(Status.UNKNOWN_SCOPE, manifest_uid=f"{manifest.uid:x}")
    return scope
