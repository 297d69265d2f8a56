"""The vbuckets of a bucket: their facts, the numbers that change with every write, and the system events they store.

The numbers are arrays with one entry a vbucket, which kernels read and write. The bucket owns one `VBuckets`; others
read it, and only modules of the store write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import numpy as np

from headwater.errors import VBucketDamaged
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frame
from headwater.protocol.kernels.frame_header import SYSTEM_EVENT
from headwater.protocol.kernels.memory import AnyBytes, Bytes, i64, kernel, load_u32
from headwater.protocol.manifest import Collection, Manifest, Scope
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, ManifestUid, Seqno
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
from headwater.store.data_format import VBucketFacts

ABSENT = 0
"""The state number of a vbucket that does not exist here."""

_LOGICAL_BITS = 0xFFFF
"""A CAS is a time in nanoseconds whose low 16 bits count writes within the same tick."""


@dataclass(frozen=True, slots=True)
class VBuckets:
    """Arrays have one entry a vbucket."""

    facts: list[VBucketFacts | None]
    vbuuids: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The newest branch of each."""
    states: np.ndarray[tuple[int], np.dtype[np.uint8]]
    high_seqnos: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The last seqno given out, durable or not."""
    durable_seqnos: np.ndarray[tuple[int], np.dtype[np.uint64]]
    visible_seqnos: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The last durable change that is neither a prepare nor an abort: what clients without sync writes see."""
    completed_seqnos: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The highest seqno of a prepare that was durably committed or aborted."""
    max_cas: np.ndarray[tuple[int], np.dtype[np.uint64]]
    deleted_revs: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The highest revision of a deleted document: a new one starts above it, since the old may have been its own."""
    superseded: np.ndarray[tuple[int], np.dtype[np.int64]]
    """How many stored changes are no longer the newest of their key. While 0, blocks can be streamed as they are."""
    window_starts: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """Where the history window began when the compaction that is under way did; one line for all its steps."""
    manifest_uids: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The manifest that the system events of each have come to, durable or not."""
    event_seqnos: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The seqno of the last system event, durable or not."""
    damage: dict[int, VBucketDamaged] = field(default_factory=dict)
    """The vbuckets that are stopped because what is stored of them is damaged, and what was found. Their state is dead
    to all that serves, streams or receives; their facts have the one that they are to have."""

    @classmethod
    def empty(cls, count: int) -> VBuckets:
        return cls(
            facts=[None] * count,
            vbuuids=np.zeros(count, dtype=np.uint64),
            states=np.zeros(count, dtype=np.uint8),
            high_seqnos=np.zeros(count, dtype=np.uint64),
            durable_seqnos=np.zeros(count, dtype=np.uint64),
            visible_seqnos=np.zeros(count, dtype=np.uint64),
            completed_seqnos=np.zeros(count, dtype=np.uint64),
            max_cas=np.zeros(count, dtype=np.uint64),
            deleted_revs=np.zeros(count, dtype=np.uint64),
            superseded=np.zeros(count, dtype=np.int64),
            window_starts=np.zeros(count, dtype=np.uint64),
            manifest_uids=np.zeros(count, dtype=np.uint64),
            event_seqnos=np.zeros(count, dtype=np.uint64),
        )

    def __len__(self) -> int:
        return len(self.facts)

    def exists(self, vbucket: int) -> bool:
        return 0 <= vbucket < len(self.facts) and self.facts[vbucket] is not None

    def state(self, vbucket: int) -> VBucketState | None:
        return VBucketState(int(self.states[vbucket])) if self.exists(vbucket) else None

    def set_facts(self, vbucket: int, facts: VBucketFacts | None) -> None:
        self.facts[vbucket] = facts
        if facts is None:
            self.states[vbucket] = ABSENT
        else:
            self.states[vbucket] = VBucketState.DEAD if vbucket in self.damage else facts.state
        self.vbuuids[vbucket] = 0 if facts is None else facts.failover_log.newest.vbuuid

    def stop(self, error: VBucketDamaged) -> None:
        """What is stored of a vbucket is damaged: no client and no stream gets anything of it from now on."""
        self.damage.setdefault(error.vbucket, error)
        if self.exists(error.vbucket):
            self.states[error.vbucket] = VBucketState.DEAD

    def reset_numbers(self, vbucket: int) -> None:
        for array in (
            self.high_seqnos, self.durable_seqnos, self.visible_seqnos, self.completed_seqnos, self.max_cas,
            self.deleted_revs, self.superseded, self.window_starts, self.manifest_uids,
            self.event_seqnos,
        ):  # fmt: skip
            array[vbucket] = 0

    def on_event(self, vbucket: int, seqno: int, manifest_uid: int) -> None:
        """A system event has been stored, or read back."""
        self.event_seqnos[vbucket] = max(int(self.event_seqnos[vbucket]), seqno)
        self.manifest_uids[vbucket] = max(int(self.manifest_uids[vbucket]), manifest_uid)

    def durable_seqno(self, vbucket: int) -> Seqno:
        return Seqno(int(self.durable_seqnos[vbucket]))

    def next_seqno(self, vbucket: int) -> Seqno:
        self.high_seqnos[vbucket] += np.uint64(1)
        return Seqno(int(self.high_seqnos[vbucket]))

    def coming_cas(self, vbucket: int, now_ns: int) -> Cas:
        """The next CAS. A hybrid logical clock: the time where it has moved on, else one more than the last."""
        return Cas(max(now_ns & ~_LOGICAL_BITS, int(self.max_cas[vbucket]) + 1))

    def next_cas(self, vbucket: int, now_ns: int) -> Cas:
        """Take the next CAS."""
        cas = self.coming_cas(vbucket, now_ns)
        self.max_cas[vbucket] = cas
        return cas


# --- the system events of a vbucket -------------------------------------------------------------------------------
#
# The bucket has one manifest, and an active vbucket stores every change of it as system events. A copy gets them with
# its stream, so it may be behind the bucket's manifest, and ahead of it, too.


def encode_stored_event(event: Event) -> EncodedEvent:
    """An event as it is stored: packed, unless only the other form holds all of it."""
    needs_flatbuffers = isinstance(event, CollectionModified) or (
        isinstance(event, CollectionCreated) and bool(event.history or event.metered or event.flush_uid)
    )
    return encode_event(event, as_flatbuffers=needs_flatbuffers)


def is_flush(event: Event) -> TypeGuard[CollectionCreated]:
    """Whether an event voids what its collection held before."""
    return isinstance(event, CollectionCreated) and not isinstance(event, CollectionModified) and event.flush_uid != 0


def events_in(run: Bytes) -> Iterator[tuple[Seqno, Event]]:
    """The system events of a stored run, each with its seqno."""
    at = _next_event(run, 0)
    while at < len(run):
        decoded = decode_frame(run[at:].data)
        assert decoded is not None, "stored frames are whole"
        message = decode_message(decoded[0], WITH_COLLECTIONS)
        assert isinstance(message, SystemEvent)
        yield message.seqno, decode_event(message)
        at = _next_event(run, at + decoded[1])


def manifest_of_runs(runs: Iterable[Bytes]) -> Manifest:
    """The manifest that the events of a vbucket's runs add up to."""
    manifest = Manifest()
    for run in runs:
        for _, event in events_in(run):
            manifest = _after_event(manifest, event)
    return manifest


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
        uid=ManifestUid(max(manifest.uid, event.manifest_uid)),
        scopes=tuple(scopes[number] for number in sorted(scopes)),
        ids_used=ids_used,
    )  # fmt: skip


def _collections_after(scope: Scope, event: CollectionCreated | CollectionDropped) -> tuple[Collection, ...]:
    collections = {collection.id: collection for collection in scope.collections}
    if isinstance(event, CollectionDropped):
        collections.pop(event.collection_id, None)
    else:
        collections[event.collection_id] = Collection(
            id=event.collection_id, name=event.name, max_ttl_s=event.max_ttl_s, history=event.history,
            metered=event.metered, flush_uid=event.flush_uid,
        )  # fmt: skip
    return tuple(collections[number] for number in sorted(collections))


@kernel
def _next_event(run: AnyBytes, at: int) -> int:
    """Where the first system event at or behind `at` starts; the run's length where there is none."""
    at = i64(at)
    while at < len(run) and run[at + 1] != SYSTEM_EVENT:
        at += 24 + i64(load_u32(run, at + 8))
    return at
