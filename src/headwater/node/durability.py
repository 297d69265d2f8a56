"""Durable writes in progress: prepared here, acknowledged by replicas, then committed and answered.

A write is decided once, by what comes first: a majority of its vbucket's copies holds the prepare (committed); its time
is over (aborted, and the writer gets that the outcome is ambiguous); its vbucket is not active here any more, or has
lost the prepare (ambiguous as well). A prepare that could not be stored has not happened, and a decision that could not
be is made again. Prepares that no client waits for, because they were found at the start, have no time that could be
over: they are committed when a majority holds them.

All levels of durability come to the same: what is streamed, and so what is acknowledged, is durable already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import CollectionId, Seqno
from headwater.protocol.status import Status
from headwater.store.bucket import Bucket
from headwater.store.prepares import PendingPrepare

# --- the replication topology of a vbucket ------------------------------------------------------------------------
#
# A chain names the nodes that have a copy, the active one first; a member whose node is missing is None and still
# counts, so that a majority of what is left can never be a majority of nothing. During a rebalance there are two
# chains, the old one and the new, and a durable write needs a majority of both.


Chain = tuple[str | None, ...]
Chains = tuple[Chain, ...]


def chains_of(topology: Sequence[Any] | None) -> Chains:
    """The chains of a stored topology that have more than the active node: those that others have a say in."""
    return tuple(tuple(chain) for chain in topology or () if len(chain) > 1)


def majority(chain: Chain) -> int:
    """How many copies are more than half of them."""
    return len(chain) // 2 + 1


def is_possible(chains: Chains) -> bool:
    """Whether there are enough nodes for a majority of each chain."""
    return all(sum(node is not None for node in chain) >= majority(chain) for chain in chains)


def satisfied_seqno(chains: Chains, acknowledged: Mapping[str, int], *, active_seqno: int) -> int:
    """Up to where a majority of each chain holds everything.

    The active node comes first in each chain. It holds what is durable there, others what they have acknowledged, which
    they have got from it; whatever else they say is not believed.
    """
    return min((_held_seqno(chain, acknowledged, active_seqno) for chain in chains), default=active_seqno)


def _held_seqno(chain: Chain, acknowledged: Mapping[str, int], active_seqno: int) -> int:
    replicas = (0 if node is None else min(acknowledged.get(node, 0), active_seqno) for node in chain[1:])
    return sorted([active_seqno, *replicas], reverse=True)[majority(chain) - 1]


TIMEOUT_S_DEFAULT = 30.0
TIMEOUT_MS_INFINITE = 0xFFFF
"""What a request would say for a write that waits for ever."""
WRITES_MAX = 10_000
"""Durable writes of a bucket at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOutcome:
    """What became of a durable write."""

    status: Status
    commit: int = 0
    """What has to be durable before the writer may be answered; 0 for nothing."""
    seqno: Seqno = Seqno(0)
    """Of the commit, where it is one."""


@dataclass(slots=True, kw_only=True, eq=False)
class SyncWrite:
    """A durable write that a client waits for."""

    prepare: PendingPrepare
    deadline_s: float
    outcome: WriteOutcome | None = None


@dataclass(slots=True, kw_only=True)
class _Acknowledged:
    """Up to where nodes have acknowledged, on one branch of a vbucket's history."""

    vbuuid: int
    seqnos: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SyncWrites:
    """The durable writes of a bucket."""

    bucket: Bucket
    on_change: Callable[[], None] = lambda: None
    """Called when there is something to commit."""
    has_news: bool = False
    """A write was decided without a commit: no commit will wake its connection to answer."""
    _acknowledged: dict[int, _Acknowledged] = field(default_factory=dict)
    """By vbucket."""
    _waiting: dict[int, dict[bytes, SyncWrite]] = field(default_factory=dict)
    """Vbucket → key → the write that is undecided."""
    _deciding: list[SyncWrite] = field(default_factory=list)
    """Writes whose commit or abort is not durable yet."""

    # --- beginning ------------------------------------------------------------------------------------------------

    def chains(self, vbucket: int) -> Chains:
        """The chains that have a say in the durable writes of a vbucket; none where its only copy is here."""
        facts = self.bucket.vbuckets.facts[vbucket]
        return () if facts is None else chains_of(facts.topology)

    @property
    def is_full(self) -> bool:
        return sum(len(writes) for writes in self._waiting.values()) >= WRITES_MAX

    def begin(self, prepare: PendingPrepare, *, deadline_s: float) -> SyncWrite:
        """Wait for a majority to hold a prepare."""
        write = SyncWrite(prepare=prepare, deadline_s=deadline_s)
        writes = self._waiting.setdefault(prepare.vbucket, {})
        older = writes.get(prepare.encoded_key)
        if older is not None:
            # It would have been in the way, if its prepare had not been taken back with the vbucket.
            self._lose(older, Status.SYNC_WRITE_AMBIGUOUS)
        writes[prepare.encoded_key] = write
        return write

    def in_the_way(self, vbucket: int, collection_id: CollectionId, key: bytes) -> Status | None:
        """The status for a write of a key that has an undecided prepare; None where it has none."""
        prepare = self.bucket.prepares.find(vbucket, collection_id, key)
        if prepare is None:
            return None
        write = self._waiting.get(vbucket, {}).get(prepare.encoded_key)
        is_own = write is not None and write.prepare.is_same(prepare)
        return Status.SYNC_WRITE_IN_PROGRESS if is_own else Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS

    # --- what replicas say ----------------------------------------------------------------------------------------

    def acknowledge(self, vbucket: int, node: str, seqno: Seqno) -> None:
        """A replica holds everything up to a seqno, durably."""
        if self.bucket.vbuckets.state(vbucket) != VBucketState.ACTIVE:
            return
        known = self._known(vbucket)
        known[node] = max(known.get(node, 0), seqno)
        self._decide_held(vbucket)

    def begin_stream(self, vbucket: int, node: str, start_seqno: Seqno) -> None:
        """A replica asks for what comes after a seqno: whatever it has acknowledged beyond, it has lost."""
        known = self._known(vbucket)
        if known.get(node, 0) > start_seqno:
            known[node] = start_seqno

    def _known(self, vbucket: int) -> dict[str, int]:
        """What nodes have acknowledged of a vbucket. What they said of another branch means nothing for this one."""
        vbuuid = int(self.bucket.vbuckets.vbuuids[vbucket])
        known = self._acknowledged.get(vbucket)
        if known is None or known.vbuuid != vbuuid:
            known = self._acknowledged[vbucket] = _Acknowledged(vbuuid=vbuuid)
        return known.seqnos

    # --- deciding -------------------------------------------------------------------------------------------------

    def evaluate(self, vbucket: int) -> None:
        """Decide what can be decided of a vbucket: something about it has changed. Looks at all that is undecided."""
        if self.bucket.vbuckets.state(vbucket) != VBucketState.ACTIVE:
            self._acknowledged.pop(vbucket, None)
            self._give_up(vbucket)
            return
        self._forget_lost(vbucket)
        for prepare in self.bucket.prepares.of(vbucket):
            if self._is_dropped(prepare):
                self._abort(prepare)
        self._decide_held(vbucket)

    def _decide_held(self, vbucket: int) -> None:
        """Decide what a majority holds: the oldest. No others are looked at, since acknowledgements are many."""
        if not self.bucket.prepares.counts[vbucket]:
            return
        for prepare in self.bucket.prepares.up_to(vbucket, self.satisfied_seqno(vbucket)):
            if self._is_dropped(prepare):
                self._abort(prepare)
            else:
                self._commit(prepare)

    def _is_dropped(self, prepare: PendingPrepare) -> bool:
        return self.bucket.manifest.collection_by_id(prepare.collection_id) is None

    def satisfied_seqno(self, vbucket: int) -> int:
        """Up to where a majority of a vbucket's copies holds everything."""
        return satisfied_seqno(
            self.chains(vbucket),
            self._known(vbucket),
            active_seqno=self.bucket.vbuckets.durable_seqno(vbucket),
        )

    def _commit(self, prepare: PendingPrepare) -> None:
        written = self.bucket.commit_prepare(prepare)
        self._decide(prepare, WriteOutcome(status=Status.SUCCESS, commit=written.commit, seqno=written.seqno))

    def _abort(self, prepare: PendingPrepare) -> None:
        commit = self.bucket.abort_prepare(prepare)
        self._decide(prepare, WriteOutcome(status=Status.SYNC_WRITE_AMBIGUOUS, commit=commit))

    def _decide(self, prepare: PendingPrepare, outcome: WriteOutcome) -> None:
        writes = self._waiting.get(prepare.vbucket, {})
        write = writes.get(prepare.encoded_key)
        if write is not None and write.prepare.is_same(prepare):
            del writes[prepare.encoded_key]
            write.outcome = outcome
            self._deciding.append(write)
        self.on_change()

    def _give_up(self, vbucket: int) -> None:
        """The vbucket is not active here: what becomes of its prepares is decided elsewhere."""
        for write in self._waiting.pop(vbucket, {}).values():
            self._lose(write, Status.SYNC_WRITE_AMBIGUOUS)

    def _forget_lost(self, vbucket: int) -> None:
        """Prepares that are not there any more were taken back with the vbucket."""
        writes = self._waiting.get(vbucket, {})
        for key, write in list(writes.items()):
            if not self._is_prepared(write):
                del writes[key]
                self._lose(write, Status.SYNC_WRITE_AMBIGUOUS)

    def _is_prepared(self, write: SyncWrite) -> bool:
        """Whether the prepare of a write is there, undecided: that of another write of the key is not it."""
        prepare = write.prepare
        return prepare.is_same(self.bucket.prepares.find(prepare.vbucket, prepare.collection_id, prepare.key))

    def _lose(self, write: SyncWrite, status: Status) -> None:
        """Nothing more will become of a write here."""
        write.outcome = WriteOutcome(status=status)
        self.has_news = True

    # --- time and commits -----------------------------------------------------------------------------------------

    def evaluate_all(self) -> None:
        for vbucket in sorted({*self.bucket.prepares.vbuckets(), *self._waiting}):
            self.evaluate(vbucket)

    def tick(self, now_s: float) -> None:
        """Abort what has run out of time, and look at prepares that no client waits for."""
        self.evaluate_all()
        late = [write for writes in self._waiting.values() for write in writes.values() if write.deadline_s <= now_s]
        for write in late:
            self._abort(write.prepare)
        self._waiting = {vbucket: writes for vbucket, writes in self._waiting.items() if writes}

    def on_durable(self) -> None:
        """A commit is durable: what was decided by it stays decided, and vbuckets with one copy may have a majority."""
        self._deciding = [write for write in self._deciding if self._is_pending(write)]
        for vbucket in list(self._waiting):
            if not self.chains(vbucket) and self.bucket.vbuckets.state(vbucket) == VBucketState.ACTIVE:
                self._decide_held(vbucket)

    def on_void(self) -> None:
        """What was not durable is taken back. A decision is made again; a prepare that is gone has not happened.

        A key may have several writes: one that was decided, and another that was let in before the decision was
        durable. The prepare which is there decides whose turn it is. Where the commit of another bucket
        failed, nothing was taken back here, and what is pending will be durable yet.
        """
        waiting = [write for writes in self._waiting.values() for write in writes.values()]
        taken_back = [write for write in self._deciding if not self._is_pending(write)]
        self._deciding = [write for write in self._deciding if self._is_pending(write)]
        self._waiting = {}
        for write in (*taken_back, *waiting):
            if self._is_prepared(write):
                write.outcome = None
                self._waiting.setdefault(write.prepare.vbucket, {})[write.prepare.encoded_key] = write
            else:
                self._lose(write, Status.ETMPFAIL)
        for vbucket in list(self._waiting):
            self.evaluate(vbucket)

    def _is_pending(self, write: SyncWrite) -> bool:
        """Whether the decision of a write waits for a commit."""
        return write.outcome is not None and write.outcome.commit > self.bucket.durable_commit
