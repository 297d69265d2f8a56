"""What has happened to the vbuckets of a bucket on this node, and what was lost by it.

A branch of history begins where two copies could have gone different ways. What the old branch had beyond that point is
lost, and no single place knows how much it was. So a branch is entered with what its vbucket keeps, and what is learned
of the old branch, then or later, is held against that:

* what its active node last said of itself, asked by the dashboard (`heard`);
* the snapshot that the copy was in the middle of: its end is a change that the active one had;
* where returning copies say they are, when they ask for a stream and have to roll back (`asked`).

All of that is evidence for at least so much, and never for nothing: where there is none, the loss is unknown. Where a
consumer says it is counts up to that evidence. Anyone who may read streams can say anything, so what is beyond it is
shown as a claim and counted as no loss.

Handlers and drills report what they do here; nothing is waited for. The dashboard shows it, and has what has changed
stored with the bucket's next commit (`take_rows`), an event a row.
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
"""Events that are remembered, here and on disk."""
DETAILED_EVENTS_MAX = 16
"""The newest of them that remember every vbucket: a row of 1,024 takes 40 kB."""
EVENT_VBUCKETS_MAX = 8
"""Vbuckets that an event names; the others are counted."""
GATHER_MS = 10_000
"""The same happens to vbuckets one after the other. What follows within this time is the same event."""
CLAIMED_MAX = 100_000_000
"""Changes of one vbucket that a consumer or a copy can say were lost. What is beyond that is no offset of a reader."""
_GOING_ON_MAX = 8
"""How many of the last events may still go on."""
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
    """Vbuckets were taken over from another node, with all they had."""
    RESTART = "restart"
    """The node was not stopped in order, or its data is a copy."""
    DRILL = "drill"
    """An admin had changes taken back."""
    TAKEN_BACK = "taken-back"
    """Copies here had changes that their active ones do not have, and gave them up."""
    FLUSH = "flush"
    ANSWERED = "answered-rollback"
    """Consumers had to roll back that came from no branch that is remembered here."""
    STATE = "state"
    NODE = "node"
    """The cluster was formed or has other nodes, or one of them does not answer, or answers again."""


LOSING = frozenset({Kind.FAILOVER, Kind.RESTART, Kind.DRILL})
"""Those after which changes are gone that had been made. What a copy gives up was lost before."""

_MINOR = frozenset({Kind.NODE, Kind.STATE, Kind.ANSWERED})
"""Those that are forgotten first."""

_LEARNING = frozenset({Kind.FAILOVER, Kind.RESTART})
"""Those whose loss is not known exactly when they happen."""


@dataclass(slots=True, kw_only=True)
class Branch:
    """A branch of a vbucket, and what is known of the one before."""

    vbuuid: int
    kept_seqno: int
    """The last change that the vbucket had when the branch began."""
    known_seqno: int | None
    """The last one that it is known to have had on the branch before; None where nothing is known."""
    claimed_seqno: int = 0
    """The last one that a consumer says it has of the branch before."""

    @property
    def lost(self) -> int:
        return 0 if self.known_seqno is None else max(0, self.known_seqno - self.kept_seqno)

    @property
    def claimed(self) -> int:
        return max(0, self.claimed_seqno - max(self.kept_seqno, self.known_seqno or 0))


@dataclass(slots=True, kw_only=True)
class Event:
    """Something that happened to some vbuckets at the same time. It changes when more is learned of it."""

    number: int
    time_ms: int
    kind: Kind
    node: str | None = None
    """The other node that it is about."""
    text: str = ""
    heard_ms: int | None = None
    """When that node last said what it had."""
    last_ms: int = 0
    """When it went on; a later occurrence is another event."""
    revision: int = 0
    """Rises with every change, over all events."""
    vbuckets: list[int] = field(default_factory=list)
    """The first few."""
    count: int = 0
    lost_changes: int = 0
    """That are known of."""
    lost_vbuckets: int = 0
    unknown_vbuckets: int = 0
    """Vbuckets of whose branch before nothing is known."""
    claimed_changes: int = 0
    """That consumers say they had, beyond what is known."""
    states: dict[str, int] = field(default_factory=dict)
    """How many vbuckets went from which state to which."""
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
        # What it got after that no node can know.
        return f"{words}, {max(0, self.time_ms - self.heard_ms) / 1000:.0f} s after it was last heard"


def loss_sentence(*, changes: int, vbuckets: int, unknown: int, is_exact: bool = False) -> str:
    """What is known to be lost, in words. Evidence says *at least*, and the lack of it says nothing."""
    if changes == 0:
        return "what was lost is unknown" if unknown else "no lost change is known"
    words = f"{'' if is_exact else 'at least '}{counted(changes, 'change')} of {counted(vbuckets, 'vbucket')} lost"
    return f"{words}, of {unknown:,} more it is unknown" if unknown else words


@dataclass(slots=True, kw_only=True)
class HistoryTotals:
    """What all events have added up to, those included that are not remembered. They never go down."""

    lost_changes: int = 0
    lost_vbuckets: int = 0
    """Vbuckets that have lost changes, each time that they did."""
    unknown_vbuckets: int = 0
    """Of the events that are not remembered: vbuckets of which it is unknown what they lost."""
    rolled_back: int = 0
    """Vbuckets that have lost changes, or given them up as copies, each time that they did."""
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
        """By event and vbucket, of the newest events."""
        self._moved: dict[int, set[int]] = {}
        """The vbuckets of the newest event about states."""
        self._unsaved: set[int] = set()
        self._active_seqnos: Numbers = np.full(len(bucket.vbuckets), _UNKNOWN, dtype=np.int64)
        self._heard_ms: Numbers = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        """What the active vbuckets of other nodes last had, and when."""
        self._formed_ms: int | None = None
        """When the bucket got into its cluster, where that was since the node started."""
        self._load()
        if not bucket.was_stopped_in_order:
            active = bucket.vbuckets.active()
            seqnos = bucket.vbuckets.durable_seqnos
            self._enter_branches(Kind.RESTART, {vbucket: (int(seqnos[vbucket]),) * 2 for vbucket in active})

    # --- what happens ---------------------------------------------------------------------------------------------

    def promoted(self, vbucket: VBucketId, *, kept: Seqno, before: VBucketFacts | None, node: str | None) -> None:
        """A copy became active in place of the one on `node`. `kept` and `before` are from before that."""
        heard = int(self._active_seqnos[vbucket])
        self._active_seqnos[vbucket] = _UNKNOWN
        known = None if heard == _UNKNOWN else heard
        if before is not None and before.snapshot_end_seqno > kept:
            known = max(known or 0, before.snapshot_end_seqno)
        event = self._enter_branches(Kind.FAILOVER, {vbucket: (kept, known)}, node=node)
        if heard != _UNKNOWN:
            event.heard_ms = int(self._heard_ms[vbucket])

    def taken_over(self, vbucket: VBucketId, *, node: str | None) -> None:
        """The old active one has sent everything before it gave the vbucket up (Takeover, in kv_engine's docs)."""
        high = self._bucket.vbuckets.high_seqno(vbucket)
        self._enter_branches(Kind.HANDOVER, {vbucket: (high, high)}, node=node)

    def rolled_back(self, vbucket: VBucketId, *, kept: Seqno, had: Seqno, is_drill: bool) -> None:
        self._enter_branches(Kind.DRILL if is_drill else Kind.TAKEN_BACK, {vbucket: (kept, had)})

    def flushed(self, vbuckets: Sequence[int]) -> None:
        self._gathered(Kind.FLUSH, vbuckets)

    def changed_states(self, before: str, after: str, vbuckets: Sequence[int]) -> None:
        """Enter changed states. A rebalance moves vbuckets through several states, one by one: it is one event."""
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
        """The bucket is on other nodes than `before`; None for a bucket that was in no cluster.

        Args:
            before: The names of the nodes that the cluster had.
            after: Those that it has now.
            has_vbuckets: Whether this node got vbuckets with its first config, as it does where the cluster is formed.
        """
        if before is None:
            what = "the cluster was formed of" if has_vbuckets else "this node joined the cluster, which has"
            self.noted_node(f"{what} {counted(len(after), 'node')}: {', '.join(after)}", node="")
            # Its vbuckets become what the config says, which is no news beside this.
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
        """Another node has said what it has. What is active there is the measure for the copies here."""
        active = np.flatnonzero(states == VBucketState.ACTIVE)
        self._active_seqnos[active] = seqnos[active]
        self._heard_ms[active] = self._now_ms()

    def asked(self, vbucket: VBucketId, *, vbuuid: Vbuuid, seqno: Seqno, by_node: bool = False) -> None:
        """A consumer that had to roll back says it has all changes up to `seqno` of a branch; or a copy, `by_node`."""
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
        """The branch at which the history of a holder of `vbuuid` ended."""
        facts = self._bucket.vbuckets.facts[vbucket]
        entries = () if facts is None else facts.failover_log.entries
        ended = next((newer.vbuuid for newer, older in pairwise(entries) if older.vbuuid == vbuuid), None)
        for event in reversed(self.events):
            branch = self._branches.get(event.number, {}).get(vbucket)
            if branch is not None and branch.vbuuid == ended:
                return event, branch
        return None

    def _learn(self, event: Event, branch: Branch, seqno: int, *, by_node: bool) -> None:
        # A consumer that has no more than what was kept is sent back for another reason, and knows nothing of a loss.
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

    # --- what is asked for ----------------------------------------------------------------------------------------

    def after(self, revision: int) -> list[Event]:
        """The events that are new or have changed since, oldest first."""
        return [event for event in self.events if event.revision > revision]

    @property
    def unknown_vbuckets(self) -> int:
        """How many vbuckets were promoted of which it is still unknown what they lost."""
        return self.totals.unknown_vbuckets + sum(event.unknown_vbuckets for event in self.events)

    def branches_of(self, number: int) -> Mapping[int, Branch] | None:
        """By vbucket; None where the event does not remember them."""
        return self._branches.get(number)

    def newest_failovers(self) -> dict[int, Branch]:
        """Of each vbucket that was promoted here: its newest branch, while that is the one it is on."""
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
        """A new event, or one that still goes on, also while others do. A vbucket has one branch in an event."""
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
        """`found` has for each vbucket the last seqno that it keeps, and the last one known of the branch before."""
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
        """What has changed since the last call, to be stored with the next commit."""
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
        """What was stored. A row that can't be read is left out: it is of the past, and the documents are all there."""
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
