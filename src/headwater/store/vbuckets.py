"""The vbuckets of a bucket: their facts, the numbers that change with every write, and the system events they store.

The numbers are arrays with one entry per vbucket, which kernels read and write. The bucket owns one `VBucketNumbers`,
which only modules of the store write to. Others read `Bucket.vbuckets`, a read-only view of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from headwater.errors import VBucketDamaged
from headwater.kernels.memory import AnyBytes, Bytes, Column, i64, kernel, load_u32
from headwater.options import MIB, option
from headwater.protocol.kernels.frame_runs import SYSTEM_EVENT
from headwater.protocol.manifest import (
    Collection,
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    Event,
    Manifest,
    Scope,
    ScopeCreated,
    ScopeDropped,
    decode_event,
    encode_event,
)
from headwater.protocol.messages.dcp_changes import SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, ManifestUid, Seqno, VBucketId
from headwater.store.data_format import VBucketFacts, decode_stored

ABSENT = 0
"""The state number of a vbucket that does not exist here."""

RECEIVING_STATES = frozenset({VBucketState.REPLICA, VBucketState.PENDING})
"""The states in which a vbucket receives what another node has written."""

_NO_CAS = Cas(0)
_LOGICAL_BITS = 0xFFFF
"""A CAS is a time in nanoseconds whose low 16 bits count writes within the same tick."""


@dataclass(frozen=True, slots=True)
class VBuckets:
    """A read-only view of the vbuckets. Arrays have one entry per vbucket."""

    facts: Sequence[VBucketFacts | None]
    vbuuids: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The vbuuid of the newest branch of each."""
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
    """The highest revision of a deleted document. A new document starts above it, as it may be that one again."""
    superseded: np.ndarray[tuple[int], np.dtype[np.int64]]
    """How many stored changes are no longer the newest of their key. While 0, blocks can be streamed as they are."""
    window_starts: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """Where the history window began at the first step of the current compaction; it holds for all its steps."""
    manifest_uids: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The uid of the manifest that each vbucket's system events have reached, durable or not."""
    event_seqnos: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The seqno of the last system event, durable or not."""
    dropped_seqnos: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The seqno of the last event that dropped collections, until compaction has dropped their documents; else 0."""
    damage: Mapping[int, VBucketDamaged] = field(default_factory=dict)
    """The vbuckets that are stopped because their stored data is damaged, and what was found. Their state is dead for
    everything that serves, streams or receives; their facts keep the state that they are meant to have."""

    def __len__(self) -> int:
        return len(self.facts)

    def exists(self, vbucket: int) -> bool:
        return 0 <= vbucket < len(self.facts) and self.facts[vbucket] is not None

    def facts_of(self, vbucket: int) -> VBucketFacts | None:
        """Return `facts[vbucket]`, or None if the bucket has no such vbucket."""
        return self.facts[vbucket] if 0 <= vbucket < len(self.facts) else None

    def state(self, vbucket: int) -> VBucketState | None:
        return VBucketState(int(self.states[vbucket])) if self.exists(vbucket) else None

    def high_seqno(self, vbucket: int) -> Seqno:
        return Seqno(int(self.high_seqnos[vbucket]))

    def durable_seqno(self, vbucket: int) -> Seqno:
        return Seqno(int(self.durable_seqnos[vbucket]))

    def active(self) -> list[int]:
        return np.flatnonzero(self.states == VBucketState.ACTIVE).tolist()


def raise_to(numbers: Column, vbucket: int, number: int) -> None:
    """Set a vbucket's number, unless it is higher already."""
    numbers[vbucket] = max(int(numbers[vbucket]), number)


_ARRAYS = tuple(one.name for one in fields(VBuckets) if one.name not in ("facts", "damage"))


@dataclass(frozen=True, slots=True)
class VBucketNumbers(VBuckets):
    """The vbuckets, for modules of the store to write to."""

    facts: list[VBucketFacts | None]
    damage: dict[int, VBucketDamaged] = field(default_factory=dict)

    @classmethod
    def empty(cls, count: int) -> VBucketNumbers:
        dtypes = {"states": np.uint8, "superseded": np.int64}
        arrays: dict[str, Any] = {name: np.zeros(count, dtype=dtypes.get(name, np.uint64)) for name in _ARRAYS}
        return cls(facts=[None] * count, **arrays)

    def read_only(self) -> VBuckets:
        """Return a view that shows every change of these numbers."""
        arrays: dict[str, Any] = {name: getattr(self, name).view() for name in _ARRAYS}
        for array in arrays.values():
            array.flags.writeable = False
        return VBuckets(facts=self.facts, damage=MappingProxyType(self.damage), **arrays)

    def set_facts(self, vbucket: int, facts: VBucketFacts | None) -> None:
        self.facts[vbucket] = facts
        if facts is None:
            self.states[vbucket] = ABSENT
        else:
            self.states[vbucket] = VBucketState.DEAD if vbucket in self.damage else facts.state
        self.vbuuids[vbucket] = 0 if facts is None else facts.failover_log.newest.vbuuid

    def stop(self, error: VBucketDamaged) -> None:
        """Mark a vbucket as damaged, so that clients and streams get nothing of it."""
        self.damage.setdefault(error.vbucket, error)
        if self.exists(error.vbucket):
            self.states[error.vbucket] = VBucketState.DEAD

    def reset_numbers(self, vbucket: int) -> None:
        """Reset all numbers of a vbucket, but not its state and branch, which follow from its facts."""
        for name in _ARRAYS:
            if name not in ("vbuuids", "states"):
                getattr(self, name)[vbucket] = 0

    def on_event(self, vbucket: int, seqno: int, event: Event, *, manifest_uid: int) -> None:
        """Note a system event that has been stored, or read back."""
        raise_to(self.event_seqnos, vbucket, seqno)
        raise_to(self.manifest_uids, vbucket, manifest_uid)
        if isinstance(event, CollectionDropped | ScopeDropped):
            raise_to(self.dropped_seqnos, vbucket, seqno)

    def next_seqno(self, vbucket: int) -> Seqno:
        self.high_seqnos[vbucket] += np.uint64(1)
        return Seqno(int(self.high_seqnos[vbucket]))

    def coming_cas(self, vbucket: int, now_ns: int) -> Cas:
        """Return the next CAS of a hybrid logical clock: the time if it has advanced, else one more than the last."""
        return Cas(max(now_ns & ~_LOGICAL_BITS, int(self.max_cas[vbucket]) + 1))

    def next_cas(self, vbucket: int, now_ns: int) -> Cas:
        """Take the next CAS."""
        cas = self.coming_cas(vbucket, now_ns)
        self.max_cas[vbucket] = cas
        return cas


# --- the system events of a vbucket -------------------------------------------------------------------------------
#
# The bucket has one manifest, and an active vbucket stores every change of it as system events. A copy gets them with
# its stream, so it may be behind the bucket's manifest, or ahead of it.


def stored_event(event: Event, vbucket: int, seqno: Seqno, *, cas: Cas = _NO_CAS) -> SystemEvent:
    """Return an event as it is stored: packed, unless only FlatBuffers can hold all of it."""
    needs_flatbuffers = isinstance(event, CollectionModified) or (
        isinstance(event, CollectionCreated) and bool(event.history or event.metered or event.flush_uid)
    )
    encoded = encode_event(event, as_flatbuffers=needs_flatbuffers)
    return SystemEvent(
        vbucket=VBucketId(vbucket), cas=cas, seqno=seqno, event=encoded.event, version=encoded.version,
        key=encoded.key, value=encoded.value,
    )  # fmt: skip


def is_flush(event: Event) -> TypeGuard[CollectionCreated]:
    """Whether an event voids what its collection held before."""
    return isinstance(event, CollectionCreated) and not isinstance(event, CollectionModified) and event.flush_uid != 0


def events_in(run: Bytes) -> Iterator[tuple[Seqno, Event]]:
    """Yield the system events of a stored run, each with its seqno."""
    at = _next_event(run, 0)
    while at < len(run):
        end = at + 24 + int.from_bytes(run[at + 8 : at + 12])
        message = decode_stored(run[at:end].data)
        assert isinstance(message, SystemEvent)
        yield message.seqno, decode_event(message)
        at = _next_event(run, end)


def manifest_of_runs(runs: Iterable[Bytes]) -> Manifest:
    """Return the manifest that the events of a vbucket's runs add up to."""
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
    """Return where the first system event at or after `at` starts; the run's length if there is none."""
    at = i64(at)
    while at < len(run) and run[at + 1] != SYSTEM_EVENT:
        at += 24 + i64(load_u32(run, at + 8))
    return at


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept beyond the newest version of each key."""

    history_s: int = option("How long to keep superseded versions.", 3600, cli_name="--history-seconds")
    history_bytes: int = option("How much of them a vbucket keeps. The limit that is reached first applies.", 16 * MIB)
    purge_age_s: int = option("How long to keep deletions.", 3 * 24 * 3600, cli_name="--purge-age-seconds")
