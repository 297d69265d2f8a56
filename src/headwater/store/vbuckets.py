"""The vbuckets of a bucket: their facts, and the numbers that change with every write as arrays for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.numbers import Cas, Seqno
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
    max_cas: np.ndarray[tuple[int], np.dtype[np.uint64]]
    deleted_revs: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The highest revision of a deleted document: a new one starts above it, since the old may have been its own."""
    superseded: np.ndarray[tuple[int], np.dtype[np.int64]]
    """How many stored changes are no longer the newest of their key. While 0, blocks can be streamed as they are."""
    window_starts: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """Where the history window began when the compaction that is under way did; one line for all its steps."""
    manifest_uids: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """The manifest that the system events of each have come to, durable or not."""

    @classmethod
    def empty(cls, count: int) -> VBuckets:
        return cls(
            facts=[None] * count,
            vbuuids=np.zeros(count, dtype=np.uint64),
            states=np.zeros(count, dtype=np.uint8),
            high_seqnos=np.zeros(count, dtype=np.uint64),
            durable_seqnos=np.zeros(count, dtype=np.uint64),
            max_cas=np.zeros(count, dtype=np.uint64),
            deleted_revs=np.zeros(count, dtype=np.uint64),
            superseded=np.zeros(count, dtype=np.int64),
            window_starts=np.zeros(count, dtype=np.uint64),
            manifest_uids=np.zeros(count, dtype=np.uint64),
        )

    def __len__(self) -> int:
        return len(self.facts)

    def exists(self, vbucket: int) -> bool:
        return 0 <= vbucket < len(self.facts) and self.facts[vbucket] is not None

    def state(self, vbucket: int) -> VBucketState | None:
        return VBucketState(int(self.states[vbucket])) if self.exists(vbucket) else None

    def set_facts(self, vbucket: int, facts: VBucketFacts | None) -> None:
        self.facts[vbucket] = facts
        self.states[vbucket] = ABSENT if facts is None else facts.state
        self.vbuuids[vbucket] = 0 if facts is None else facts.failover_log.newest.vbuuid

    def reset_numbers(self, vbucket: int) -> None:
        for array in (
            self.high_seqnos, self.durable_seqnos, self.max_cas, self.deleted_revs, self.superseded, self.window_starts,
            self.manifest_uids,
        ):  # fmt: skip
            array[vbucket] = 0

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
