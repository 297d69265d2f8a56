"""Events: what happened to vbuckets, seen by what has changed since the last look.

A new branch in the failover log is a failover, or a start after a crash; where it begins below what the vbucket had,
changes were rolled back. Events live in memory: the failover logs themselves are what is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headwater.dashboard.limits import EVENT_VBUCKETS_MAX, EVENTS_MAX
from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.bucket import Bucket
from headwater.store.vbuckets import ABSENT

_STATE_NAMES = {ABSENT: "absent", **{int(state): state.name.lower() for state in VBucketState}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to some vbuckets at the same time."""

    number: int
    time_ms: int
    kind: str
    """`state`, `branch`, `rollback`, `answered-rollback` or `node`."""
    text: str
    vbuckets: tuple[int, ...]
    """The first few of them."""
    count: int


class VBucketWatch:
    """Compares the vbuckets of a bucket with what they were."""

    def __init__(self, bucket: Bucket, *, now_ms: Callable[[], int]) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.rolled_back_total = 0
        """Vbuckets that were taken back."""
        self._now_ms = now_ms
        self._number = 0
        self._states = bucket.vbuckets.states.copy()
        self._vbuuids = bucket.vbuckets.vbuuids.copy()
        self._durable = bucket.vbuckets.durable_seqnos.copy()
        self._answered = 0

    def look(self, bucket: Bucket, *, answered_rollbacks: int) -> None:
        numbers = bucket.vbuckets
        self._look_at_states(numbers.states)
        self._look_at_branches(bucket)
        if answered_rollbacks > self._answered:
            told = answered_rollbacks - self._answered
            words = "1 stream request was" if told == 1 else f"{told} stream requests were"
            self._add("answered-rollback", f"{words} answered with a rollback", [], count=told)
        self._states, self._vbuuids = numbers.states.copy(), numbers.vbuuids.copy()
        self._durable, self._answered = numbers.durable_seqnos.copy(), answered_rollbacks

    def note_node(self, text: str) -> None:
        """Another node of the cluster has gone, or is back."""
        self._add("node", text, [])

    def after(self, number: int) -> list[Event]:
        """The events behind this one, oldest first."""
        return [event for event in self.events if event.number > number]

    def _look_at_states(self, states: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        changed = np.flatnonzero(states != self._states)
        for before, after in sorted({(int(self._states[vbucket]), int(states[vbucket])) for vbucket in changed}):
            vbuckets = changed[(self._states[changed] == before) & (states[changed] == after)].tolist()
            self._add("state", f"{_STATE_NAMES.get(before, '?')} → {_STATE_NAMES.get(after, '?')}", vbuckets)

    def _look_at_branches(self, bucket: Bucket) -> None:
        numbers = bucket.vbuckets
        # A vbucket that has come or gone has no branch that others could have followed.
        changed = np.flatnonzero((numbers.vbuuids != self._vbuuids) & (numbers.vbuuids != 0) & (self._vbuuids != 0))
        rolled_back, branched, lost = [], [], 0
        for vbucket in changed.tolist():
            facts = numbers.facts[vbucket]
            if facts is None:
                continue
            kept, had = facts.failover_log.newest.seqno, int(self._durable[vbucket])
            if facts.state == VBucketState.ACTIVE != self._states[vbucket]:
                # A copy in the middle of a snapshot begins its branch where that began, and keeps what it has.
                kept = Seqno(int(numbers.durable_seqnos[vbucket]))
            if kept < had:
                rolled_back.append(vbucket)
                lost += had - kept
            else:
                branched.append(vbucket)
        if branched:
            self._add("branch", "a new branch of history began, and nothing was lost", branched)
        if rolled_back:
            self.rolled_back_total += len(rolled_back)
            words = "1 seqno is" if lost == 1 else f"{lost} seqnos are"
            self._add("rollback", f"rolled back, {words} of a history that did not happen", rolled_back)

    def _add(self, kind: str, text: str, vbuckets: list[int], *, count: int | None = None) -> None:
        self._number += 1
        self.events.append(
            Event(
                number=self._number,
                time_ms=self._now_ms(),
                kind=kind,
                text=text,
                vbuckets=tuple(vbuckets[:EVENT_VBUCKETS_MAX]),
                count=len(vbuckets) if count is None else count,
            )
        )
