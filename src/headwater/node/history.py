"""What has happened to the vbuckets of a bucket on this node, and which changes were lost.

A new branch of history begins where two copies may have diverged. The changes of the old branch beyond that point are
lost, and no single node knows how many there were. So a branch is recorded with the last seqno that its vbucket kept.
What is learned of the old branch, then or later, is compared with that:

* the high seqno that the old active node last reported when the dashboard asked it (`heard`);
* the snapshot that the copy was in the middle of: the old active node had the change at its end;
* the seqno of a returning copy that asks for a stream and has to roll back (`asked`).

Each of these proves a minimum loss, and none can prove that nothing was lost: without any, the loss is unknown. The
seqno that a consumer claims proves nothing, since anyone who may read streams can claim any: what lies beyond the
evidence is shown as a claim and not counted as lost.

Handlers and drills report here what they do, and wait for nothing. The dashboard shows the events, and stores those
that have changed with the bucket's next commit (`take_rows`), one row per event.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from headwater.phrases import counted
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts

EVENTS_MAX = 200
"""How many events are kept, in memory and on disk."""
DETAILED_EVENTS_MAX = 16
"""How many of the newest events keep details of every vbucket: a row with 1,024 of them takes 40 kB."""
EVENT_VBUCKETS_MAX = 8
"""Vbuckets that an event names; the others are counted."""
GATHER_MS = 10_000
"""Vbuckets are changed one after the other. The same change within this time belongs to the same event."""
CLAIMED_MAX = 100_000_000
"""The most changes of one vbucket that a consumer or a copy can report as lost. A higher seqno is ignored."""
_GOING_ON_MAX = 8
"""How many of the last events may still be extended."""
_TOTALS = b"history"
_EVENT = b"history/%08d"
_FIRST_EVENT, _LAST_EVENT = b"history/", b"history0"
_UNKNOWN = -1
_NANOSECONDS_PER_MS = 1_000_000

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


class Kind(StrEnum):
    """What an event is about."""

    FAILOVER = "failover"
    """Copies were promoted in place of a node that is gone."""
    HANDOVER = "handover"
    """Vbuckets were taken over from another node, with all their changes."""
    RESTART = "restart"
    """The node was not stopped in order, or its data is a copy."""
    DRILL = "drill"
    """An admin rolled vbuckets back."""
    TAKEN_BACK = "taken-back"
    """Copies here gave up changes that their active copies do not have."""
    FLUSH = "flush"
    ANSWERED = "answered-rollback"
    """Consumers had to roll back from branches that are not recorded here."""
    STATE = "state"
    NODE = "node"
    """The cluster was formed, its nodes changed, or a node stopped or resumed answering."""


LOSING = frozenset({Kind.FAILOVER, Kind.RESTART, Kind.DRILL})
"""Events that lose changes. What a copy gives up (`TAKEN_BACK`) was lost by an earlier event."""

_MINOR = frozenset({Kind.NODE, Kind.STATE, Kind.ANSWERED})
"""Events that are forgotten first."""

_LEARNING = frozenset({Kind.FAILOVER, Kind.RESTART})
"""Events whose exact loss is not known when they happen."""


@dataclass(slots=True, kw_only=True)
class Branch:
    """A branch of a vbucket, and what is known of the previous branch."""

    vbuuid: int
    kept_seqno: int
    """The last change that the vbucket had when the branch began."""
    known_seqno: int | None
    """The last change that the previous branch is known to have had; None if nothing is known."""
    claimed_seqno: int = 0
    """The highest seqno of the previous branch that a consumer claims to have."""

    @property
    def lost(self) -> int:
        return 0 if self.known_seqno is None else max(0, self.known_seqno - self.kept_seqno)

    @property
    def claimed(self) -> int:
        return max(0, self.claimed_seqno - max(self.kept_seqno, self.known_seqno or 0))


@dataclass(slots=True, kw_only=True)
class Event:
    """Something that happened to some vbuckets at the same time. It is updated when more is learned about it."""

    number: int
    time_ms: int
    kind: Kind
    node: str | None = None
    """The other node involved."""
    text: str = ""
    heard_ms: int | None = None
    """When that node last reported its seqnos."""
    last_ms: int = 0
    """When it was last extended. An occurrence more than `GATHER_MS` later is a new event."""
    revision: int = 0
    """Rises with every change to any event."""
    vbuckets: list[int] = field(default_factory=list)
    """The first few."""
    count: int = 0
    lost_changes: int = 0
    """Changes known to be lost."""
    lost_vbuckets: int = 0
    unknown_vbuckets: int = 0
    """Vbuckets with an unknown loss: nothing is known of their previous branch."""
    claimed_changes: int = 0
    """Changes that consumers claim to have had, beyond those known to be lost."""
    states: dict[str, int] = field(default_factory=dict)
    """How many vbuckets changed state, by the change, such as `replica → active`."""
    answers: int = 0
    """How often consumers had to roll back because of it."""

    def sentence(self) -> str:
        """The event as people read it."""
        vbuckets = counted(self.count, "vbucket")
        match self.kind:
            case Kind.FAILOVER:
                words = f"failover of {self.node or 'another node'}: {vbuckets} promoted, {self._loss()}"
            case Kind.HANDOVER:
                words = f"{vbuckets} taken over{f' from {self.node}' if self.node else ''}, with all changes"
            case Kind.RESTART:
                lost = (
                    self._loss()
                    if self.lost_changes
                    else "only what was not durable, or is newer than the copy, is lost"
                )
                words = f"started after a crash, or from a copy of the data: {vbuckets} began a branch, {lost}"
            case Kind.DRILL:
                words = f"drill: {vbuckets} rolled back, {self._loss()}"
            case Kind.TAKEN_BACK:
                copies = counted(self.count, "copy", plural="copies")
                words = f"{copies} gave up {counted(self.lost_changes, 'change')} that the active copies do not have"
            case Kind.FLUSH:
                words = f"flushed: {vbuckets} began again, empty"
            case Kind.ANSWERED:
                words = f"{counted(self.answers, 'stream request')} answered with a rollback"
            case Kind.STATE:
                changes = (f"{count:,} {change}" for change, count in self.states.items())
                words = f"vbuckets changed their state: {', '.join(changes)}"
            case Kind.NODE:
                words = self.text
        if self.claimed_changes:
            words += f", consumers claim to have had {counted(self.claimed_changes, 'change')} more"
        if self.answers and self.kind is not Kind.ANSWERED:
            words += f"; consumers rolled back {counted(self.answers, 'time')}"
        return words

    def _loss(self) -> str:
        words = loss_sentence(
            changes=self.lost_changes,
            vbuckets=self.lost_vbuckets,
            unknown=self.unknown_vbuckets,
            is_exact=self.kind is Kind.DRILL,
        )
        if self.heard_ms is None or self.lost_changes or self.unknown_vbuckets:
            return words
        # No node can know what it received after that.
        return f"{words}, {max(0, self.time_ms - self.heard_ms) / 1000:.0f} s after it was last heard"


def loss_sentence(*, changes: int, vbuckets: int, unknown: int, is_exact: bool = False) -> str:
    """Describe the known loss. Evidence proves a minimum ("at least"); without evidence the loss is unknown."""
    if changes == 0:
        return "what was lost is unknown" if unknown else "no lost change is known"
    words = f"{'' if is_exact else 'at least '}{counted(changes, 'change')} of {counted(vbuckets, 'vbucket')} lost"
    return f"{words}, of {unknown:,} more it is unknown" if unknown else words


@dataclass(slots=True, kw_only=True)
class HistoryTotals:
    """Totals over all events, including those that were forgotten. They never decrease."""

    lost_changes: int = 0
    lost_vbuckets: int = 0
    """How often vbuckets have lost changes."""
    unknown_vbuckets: int = 0
    """Vbuckets with an unknown loss, in the events that were forgotten."""
    rolled_back: int = 0
    """How often vbuckets have lost changes, or given them up as copies."""
    answers: int = 0
    """How often consumers had to roll back."""


class BucketHistory:
    """The events of one bucket on this node."""

    def __init__(self, bucket: Bucket) -> None:
        self.events: list[Event] = []
        """Oldest first."""
        self.totals = HistoryTotals()
        self.revision = 0
        self._bucket = bucket
        self._branches: dict[int, dict[int, Branch]] = {}
        """The branches of the newest events, by event number and vbucket."""
        self._moved: dict[int, set[int]] = {}
        """All vbuckets of the newest `STATE` event, by its number."""
        self._unsaved: set[int] = set()
        self._active_seqnos: Numbers = np.full(len(bucket.vbuckets), _UNKNOWN, dtype=np.int64)
        self._heard_ms: Numbers = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        """The high seqnos that other nodes last reported for their active vbuckets, and when."""
        self._formed_ms: int | None = None
        """When the bucket joined its cluster, if that was since the node started."""
        self._load()
        if not bucket.was_stopped_in_order:
            active = bucket.vbuckets.active()
            seqnos = bucket.vbuckets.durable_seqnos
            self._enter_branches(Kind.RESTART, {vbucket: (int(seqnos[vbucket]),) * 2 for vbucket in active})

    # --- what happens ---------------------------------------------------------------------------------------------

    def promoted(self, vbucket: VBucketId, *, kept: Seqno, before: VBucketFacts | None, node: str | None) -> None:
        """A copy became active in place of the one on `node`. `kept` and `before` are of the time before that."""
        heard = int(self._active_seqnos[vbucket])
        self._active_seqnos[vbucket] = _UNKNOWN
        known = None if heard == _UNKNOWN else heard
        if before is not None and before.snapshot_end_seqno > kept:
            known = max(known or 0, before.snapshot_end_seqno)
        event = self._enter_branches(Kind.FAILOVER, {vbucket: (kept, known)}, node=node)
        if heard != _UNKNOWN:
            event.heard_ms = int(self._heard_ms[vbucket])

    def taken_over(self, vbucket: VBucketId, *, node: str | None) -> None:
        """The old active node has sent everything before giving the vbucket up (Takeover, in kv_engine's docs)."""
        high = self._bucket.vbuckets.high_seqno(vbucket)
        self._enter_branches(Kind.HANDOVER, {vbucket: (high, high)}, node=node)

    def rolled_back(self, vbucket: VBucketId, *, kept: Seqno, had: Seqno, is_drill: bool) -> None:
        self._enter_branches(Kind.DRILL if is_drill else Kind.TAKEN_BACK, {vbucket: (kept, had)})

    def flushed(self, vbuckets: Sequence[int]) -> None:
        self._gathered(Kind.FLUSH, vbuckets)

    def changed_states(self, before: str, after: str, vbuckets: Sequence[int]) -> None:
        """Record state changes. A rebalance takes vbuckets through several states one by one, which is one event."""
        if self._formed_ms is not None and self._now_ms() - self._formed_ms <= GATHER_MS:
            return
        event = self._gathered(Kind.STATE, ())
        change = f"{before} → {after}"
        event.states[change] = event.states.get(change, 0) + len(vbuckets)
        moved = self._moved.setdefault(event.number, set())
        moved.update(vbuckets)
        self._moved = {event.number: moved}
        event.count, event.vbuckets = len(moved), sorted(moved)[:EVENT_VBUCKETS_MAX]

    def changed_nodes(self, before: Collection[str] | None, after: Sequence[str], *, has_vbuckets: bool) -> None:
        """Record the nodes that joined and left the bucket's cluster.

        Args:
            before: The names of the nodes that the cluster had; None if the bucket was in no cluster.
            after: The names of the nodes that it has now.
            has_vbuckets: Whether the first config gave this node vbuckets, as it does when the cluster is formed.
        """
        if before is None:
            what = "the cluster was formed of" if has_vbuckets else "this node joined the cluster, which has"
            self.noted_node(f"{what} {counted(len(after), 'node')}: {', '.join(after)}", node="")
            # `changed_states` ignores the state changes that follow from the first config: this event covers them.
            self._formed_ms = self._now_ms()
            return
        for joined in [name for name in after if name not in before]:
            self.noted_node(f"node {joined} joined the cluster", node=joined)
        for left in [name for name in before if name not in after]:
            self.noted_node(f"node {left} is out of the cluster", node=left)

    def noted_node(self, text: str, *, node: str) -> None:
        self._gathered(Kind.NODE, (), text=text, node=node)

    # --- what is learned ------------------------------------------------------------------------------------------

    def heard(self, *, states: Numbers, seqnos: Numbers) -> None:
        """Note the high seqnos of another node's active vbuckets. The copies here are compared with them later."""
        active = np.flatnonzero(states == VBucketState.ACTIVE)
        self._active_seqnos[active] = seqnos[active]
        self._heard_ms[active] = self._now_ms()

    def asked(self, vbucket: VBucketId, *, vbuuid: Vbuuid, seqno: Seqno, by_node: bool = False) -> None:
        """A consumer, or with `by_node` a copy, had to roll back. It claims all changes of a branch up to `seqno`."""
        self.totals.answers += not by_node
        self._unsaved.add(0)
        found = self._branch_after(vbucket, vbuuid)
        if found is None:
            event = self._gathered(Kind.ANSWERED, ())
        else:
            event, branch = found
            if event.kind in _LEARNING:
                self._learn(event, branch, seqno, by_node=by_node)
        event.answers += not by_node or event.kind is Kind.ANSWERED
        self._touch(event)

    def _branch_after(self, vbucket: VBucketId, vbuuid: Vbuuid) -> tuple[Event, Branch] | None:
        """The branch that ended the one of `vbuuid`, and its event. None if it is not recorded."""
        facts = self._bucket.vbuckets.facts[vbucket]
        entries = () if facts is None else facts.failover_log.entries
        ended = next((newer.vbuuid for newer, older in pairwise(entries) if older.vbuuid == vbuuid), None)
        for event in reversed(self.events):
            branch = self._branches.get(event.number, {}).get(vbucket)
            if branch is not None and branch.vbuuid == ended:
                return event, branch
        return None

    def _learn(self, event: Event, branch: Branch, seqno: int, *, by_node: bool) -> None:
        # A consumer that has no more than what was kept rolls back for another reason, and proves no loss.
        if not branch.kept_seqno < seqno <= branch.kept_seqno + CLAIMED_MAX:
            return
        lost, claimed = branch.lost, branch.claimed
        if by_node:
            event.unknown_vbuckets -= branch.known_seqno is None
            branch.known_seqno = max(branch.known_seqno or 0, seqno)
        else:
            branch.claimed_seqno = max(branch.claimed_seqno, seqno)
        event.claimed_changes += branch.claimed - claimed
        self._count_lost(event, lost, branch.lost)

    def _count_lost(self, event: Event, before: int, after: int) -> None:
        is_first = before == 0 < after
        event.lost_changes += after - before
        event.lost_vbuckets += is_first
        self.totals.rolled_back += is_first
        if event.kind in LOSING:
            self.totals.lost_changes += after - before
            self.totals.lost_vbuckets += is_first

    # --- reading --------------------------------------------------------------------------------------------------

    def after(self, revision: int) -> list[Event]:
        """The events that are new or have changed since a revision, oldest first."""
        return [event for event in self.events if event.revision > revision]

    @property
    def unknown_vbuckets(self) -> int:
        """How many promoted vbuckets have a loss that is still unknown."""
        return self.totals.unknown_vbuckets + sum(event.unknown_vbuckets for event in self.events)

    def branches_of(self, number: int) -> Mapping[int, Branch] | None:
        """The branches of an event by vbucket; None if they were forgotten, or the event has none."""
        return self._branches.get(number)

    def newest_failovers(self) -> dict[int, Branch]:
        """The current branch of each vbucket for which that branch began with a promotion here."""
        found: dict[int, Branch] = {}
        for event in self.events:
            if event.kind is Kind.FAILOVER:
                found |= self._branches.get(event.number, {})
        vbuuids = self._bucket.vbuckets.vbuuids
        return {vbucket: branch for vbucket, branch in found.items() if branch.vbuuid == vbuuids[vbucket]}

    # --- events ---------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return self._bucket.environment.now_ns() // _NANOSECONDS_PER_MS

    def _gathered(self, kind: Kind, vbuckets: Collection[int], *, node: str | None = None, text: str = "") -> Event:
        """Extend a recent event of the same kind, node and text that has no branch of these vbuckets, or add one."""
        now_ms, wanted = self._now_ms(), (kind, node, text)
        lately = [one for one in self.events[-_GOING_ON_MAX:] if now_ms - one.last_ms <= GATHER_MS]
        event = next((one for one in reversed(lately) if (one.kind, one.node, one.text) == wanted), None)
        if event is None or not self._branches.get(event.number, {}).keys().isdisjoint(vbuckets):
            number = self.events[-1].number + 1 if self.events else 1
            event = Event(number=number, time_ms=now_ms, kind=kind, node=node, text=text)
            self.events.append(event)
            self._forget_old()
        event.last_ms = now_ms
        for vbucket in vbuckets:
            event.count += 1
            if len(event.vbuckets) < EVENT_VBUCKETS_MAX:
                event.vbuckets.append(vbucket)
        self._touch(event)
        return event

    def _enter_branches(
        self, kind: Kind, found: Mapping[int, tuple[int, int | None]], *, node: str | None = None
    ) -> Event:
        """`found` has for each vbucket the last seqno that it keeps, and the last one known of the previous branch."""
        event = self._gathered(kind, found.keys(), node=node)
        branches = self._branches.setdefault(event.number, {})
        for vbucket, (kept, known) in found.items():
            vbuuid = int(self._bucket.vbuckets.vbuuids[vbucket])
            branches[vbucket] = branch = Branch(vbuuid=vbuuid, kept_seqno=kept, known_seqno=known)
            event.unknown_vbuckets += known is None
            self._count_lost(event, 0, branch.lost)
        return event

    def _forget_old(self) -> None:
        while len(self.events) > EVENTS_MAX:
            oldest = next((one for one in self.events[:-1] if one.kind in _MINOR), self.events[0])
            self.events.remove(oldest)
            self.totals.unknown_vbuckets += oldest.unknown_vbuckets
            self._branches.pop(oldest.number, None)
            self._unsaved.add(oldest.number)
        for number in sorted(self._branches)[: -DETAILED_EVENTS_MAX + 1]:
            del self._branches[number]
            self._unsaved.add(number)

    def _touch(self, event: Event) -> None:
        self.revision += 1
        event.revision = self.revision
        self._unsaved |= {0, event.number}

    # --- on disk --------------------------------------------------------------------------------------------------

    @property
    def is_unsaved(self) -> bool:
        return bool(self._unsaved)

    def take_rows(self) -> dict[bytes, bytes | None]:
        """The rows that have changed since the last call, to store with the next commit. None deletes a row."""
        unsaved, self._unsaved = self._unsaved, set()
        if not unsaved:
            return {}
        by_number = {event.number: event for event in self.events}
        rows: dict[bytes, bytes | None] = {_TOTALS: json.dumps(asdict(self.totals)).encode()}
        for number in sorted(unsaved - {0}):
            event = by_number.get(number)
            rows[_EVENT % number] = None if event is None else self._row(event)
        return rows

    def _row(self, event: Event) -> bytes:
        members: dict[str, Any] = asdict(event)
        del members["revision"]
        branches = self._branches.get(event.number)
        if branches is not None:
            members["branches"] = {
                vbucket: [branch.vbuuid, branch.kept_seqno, branch.known_seqno, branch.claimed_seqno]
                for vbucket, branch in branches.items()
            }
        return json.dumps(members).encode()

    def _load(self) -> None:
        """Load the stored events. Skip rows that can't be read: they describe the past, and no document needs them."""
        try:
            self.totals = HistoryTotals(**json.loads(self._bucket.stored_row(_TOTALS) or b"{}"))
        except (ValueError, TypeError):
            self.totals = HistoryTotals()
        for row in self._bucket.stored_rows(_FIRST_EVENT, _LAST_EVENT)[-EVENTS_MAX:]:
            try:
                members = json.loads(row)
                branches = members.pop("branches", None)
                event = Event(**{**members, "kind": Kind(members["kind"])})
                if branches is not None:
                    self._branches[event.number] = {
                        int(vbucket): Branch(vbuuid=of, kept_seqno=kept, known_seqno=known, claimed_seqno=sum(claimed))
                        for vbucket, (of, kept, known, *claimed) in branches.items()
                    }
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            self.revision += 1
            event.revision = self.revision
            self.events.append(event)
