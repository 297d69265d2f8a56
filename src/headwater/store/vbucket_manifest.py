"""The collections that a vbucket itself has heard of: what its stored system events add up to.

The bucket has one manifest, and an active vbucket tells every change of it as system events. A copy gets them with the
stream, so it may be behind the bucket's manifest, and ahead of it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frame
from headwater.protocol.kernels.frame_header import SYSTEM_EVENT
from headwater.protocol.kernels.memory import Bytes, i64, kernel, load_u32
from headwater.protocol.manifest import Collection, Manifest, Scope
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_system_event import SystemEvent
from headwater.protocol.numbers import ManifestUid, ScopeId
from headwater.protocol.system_events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    EncodedEvent,
    Event,
    ScopeCreated,
    ScopeDropped,
    decode_event,
    encode_event,
)

if TYPE_CHECKING:
    from headwater.store.bucket import Bucket


def encode_stored_event(event: Event) -> EncodedEvent:
    """An event as it is stored: packed, unless only the other form holds all of it."""
    needs_flatbuffers = isinstance(event, CollectionModified) or (
        isinstance(event, CollectionCreated) and event.history
    )
    return encode_event(event, as_flatbuffers=needs_flatbuffers)


def events_in(run: Bytes) -> Iterator[Event]:
    """The system events of a stored run."""
    at = _next_event(run, 0)
    while at < len(run):
        decoded = decode_frame(run[at:].data)
        assert decoded is not None, "stored frames are whole"
        message = decode_message(decoded[0], WITH_COLLECTIONS)
        assert isinstance(message, SystemEvent)
        yield decode_event(message)
        at = _next_event(run, at + decoded[1])


def manifest_uid_after(uid: int, run: Bytes) -> int:
    """The manifest that a vbucket is at after a run, where it was at `uid` before."""
    return max((event.manifest_uid for event in events_in(run)), default=uid)


def vbucket_manifest(bucket: Bucket, vbucket: int) -> Manifest:
    """The manifest that the events of a vbucket add up to, those included that are not durable yet."""
    manifest = Manifest()
    for run in _all_runs(bucket, vbucket):
        for event in events_in(run):
            manifest = _after_event(manifest, event)
    return manifest


def _all_runs(bucket: Bucket, vbucket: int) -> Iterator[Bytes]:
    yield from bucket.runs(vbucket)
    if bucket.in_flight is not None:
        yield bucket.in_flight.run(vbucket)
    yield from bucket.pending.runs(vbucket)


def _after_event(manifest: Manifest, event: Event) -> Manifest:
    scopes = {scope.id: scope for scope in manifest.scopes}
    ids_used = manifest.ids_used
    if isinstance(event, ScopeCreated):
        scopes[event.scope_id] = Scope(id=event.scope_id, name=event.name)
        ids_used = max(ids_used, event.scope_id)
    elif isinstance(event, ScopeDropped):
        scopes.pop(event.scope_id, None)
    elif event.scope_id in scopes:
        scope = scopes[event.scope_id]
        scopes[event.scope_id] = replace(scope, collections=_collections_after(scope, event))
        ids_used = max(ids_used, event.collection_id)
    return Manifest(
        uid=ManifestUid(max(manifest.uid, event.manifest_uid)), scopes=_by_id(scopes), ids_used=ids_used
    )  # fmt: skip


def _collections_after(scope: Scope, event: CollectionCreated | CollectionDropped) -> tuple[Collection, ...]:
    collections = {collection.id: collection for collection in scope.collections}
    if isinstance(event, CollectionDropped):
        collections.pop(event.collection_id, None)
    else:
        collections[event.collection_id] = Collection(
            id=event.collection_id, name=event.name, max_ttl_s=event.max_ttl_s, history=event.history
        )
    return tuple(collections[number] for number in sorted(collections))


def _by_id(scopes: dict[ScopeId, Scope]) -> tuple[Scope, ...]:
    return tuple(scopes[number] for number in sorted(scopes))


@kernel
def _next_event(run: Bytes, at: int) -> int:
    """Where the first system event at or behind `at` starts; the run's length where there is none."""
    at = i64(at)
    while at < len(run) and run[at + 1] != SYSTEM_EVENT:
        at += 24 + i64(load_u32(run, at + 8))
    return at
