"""Durable writes in progress: prepared here, acknowledged by replicas, then committed and answered.

A write is decided once, by whichever comes first: a majority of its vbucket's copies holds the prepare (committed); it
times out (aborted, and the writer is answered that the outcome is ambiguous); its vbucket is no longer active here, or
has lost the prepare (also ambiguous). If a prepare could not be stored, the write has not happened. If a decision could
not be stored, it is made again. Prepares that were found at the start have no waiting client and no timeout: they are
committed once a majority holds them.

All durability levels have the same effect: a change is streamed, and so acknowledged, only after it is durable.
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
# A chain names the nodes that have a copy, the active one first. A member whose node is missing is None and still
# counts towards the length of the chain, so that losing nodes never makes a majority smaller. During a rebalance there
# are two chains, the old one and the new, and a durable write needs a majority of both.


Chain = tuple[str | None, ...]
Chains = tuple[Chain, ...]


def chains_of(topology: Sequence[Any] | None) -> Chains:
    """The chains of a stored topology that have replicas, whose acknowledgements a durable write needs."""
    return tuple(tuple(chain) for chain in topology or () if len(chain) > 1)


def majority(chain: Chain) -> int:
    """The smallest number of copies that is more than half of a chain."""
    return len(chain) // 2 + 1


def is_possible(chains: Chains) -> bool:
    """Whether there are enough nodes for a majority of each chain."""
    return all(sum(node is not None for node in chain) >= majority(chain) for chain in chains)


def satisfied_seqno(chains: Chains, acknowledged: Mapping[str, int], *, active_seqno: int) -> int:
    """The seqno up to which a majority of each chain holds all changes.

    The active node, first in each chain, holds what is durable there. A replica holds what it has acknowledged, but
    never more than the active node, from which it receives everything: higher acknowledgements are cut to that.
    """
    return min((_held_seqno(chain, acknowledged, active_seqno) for chain in chains), default=active_seqno)


def _held_seqno(chain: Chain, acknowledged: Mapping[str, int], active_seqno: int) -> int:
    replicas = (0 if node is None else min(acknowledged.get(node, 0), active_seqno) for node in chain[1:])
    return sorted([active_seqno, *replicas], reverse=True)[majority(chain) - 1]


TIMEOUT_S_DEFAULT = 30.0
TIMEOUT_MS_INFINITE = 0xFFFF
"""The timeout of a request that waits forever."""
WRITES_MAX = 10_000
"""The most undecided durable writes of a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOutcome:
    """The outcome of a durable write."""

    status: Status
    commit: int = 0
    """The commit that has to be durable before the writer may be answered; 0 for none."""
    seqno: Seqno = Seqno(0)
    """The seqno of the committed change, if the write was committed."""


@dataclass(slots=True, kw_only=True, eq=False)
class SyncWrite:
    """A durable write that a client waits for."""

    prepare: PendingPrepare
    deadline_s: float
    outcome: WriteOutcome | None = None


@dataclass(slots=True, kw_only=True)
class _Acknowledged:
    """The seqnos that nodes have acknowledged, on one branch of a vbucket's history."""

    vbuuid: int
    seqnos: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SyncWrites:
    """The durable writes of a bucket."""

    bucket: Bucket
    on_change: Callable[[], None] = lambda: None
    """Called when there is something to commit."""
    has_news: bool = False
    """Whether a write was decided without a commit, so that no commit will wake its connection to answer."""
    _acknowledged: dict[int, _Acknowledged] = field(default_factory=dict)
    """By vbucket."""
    _waiting: dict[int, dict[bytes, SyncWrite]] = field(default_factory=dict)
    """Undecided writes, by vbucket and key."""
    _deciding: list[SyncWrite] = field(default_factory=list)
    """Writes whose commit or abort is not durable yet."""

    # --- beginning ------------------------------------------------------------------------------------------------

    def chains(self, vbucket: int) -> Chains:
        """The chains that durable writes of a vbucket need a majority of; empty if its only copy is here."""
        facts = self.bucket.vbuckets.facts[vbucket]
        return () if facts is None else chains_of(facts.topology)

    @property
    def is_full(self) -> bool:
        return sum(len(writes) for writes in self._waiting.values()) >= WRITES_MAX

    def begin(self, prepare: PendingPrepare, *, deadline_s: float) -> SyncWrite:
        """Begin to wait until a majority holds a prepare."""
        write = SyncWrite(prepare=prepare, deadline_s=deadline_s)
        writes = self._waiting.setdefault(prepare.vbucket, {})
        older = writes.get(prepare.encoded_key)
        if older is not None:
            # The older write's prepare must have been lost with a rollback: otherwise this write would be refused.
            self._lose(older, Status.SYNC_WRITE_AMBIGUOUS)
        writes[prepare.encoded_key] = write
        return write

    def in_the_way(self, vbucket: int, collection_id: CollectionId, key: bytes) -> Status | None:
        """The status that refuses a write because its key has an undecided prepare; None if it has none."""
        prepare = self.bucket.prepares.find(vbucket, collection_id, key)
        if prepare is None:
            return None
        write = self._waiting.get(vbucket, {}).get(prepare.encoded_key)
        is_own = write is not None and write.prepare.is_same(prepare)
        return Status.SYNC_WRITE_IN_PROGRESS if is_own else Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS

    # --- acknowledgements of replicas -----------------------------------------------------------------------------

    def acknowledge(self, vbucket: int, node: str, seqno: Seqno) -> None:
        """Note that a replica holds everything up to a seqno durably."""
        if self.bucket.vbuckets.state(vbucket) != VBucketState.ACTIVE:
            return
        known = self._known(vbucket)
        known[node] = max(known.get(node, 0), seqno)
        self._decide_held(vbucket)

    def begin_stream(self, vbucket: int, node: str, start_seqno: Seqno) -> None:
        """A replica asks for the changes after a seqno: it has lost what it had acknowledged beyond that."""
        known = self._known(vbucket)
        if known.get(node, 0) > start_seqno:
            known[node] = start_seqno

    def _known(self, vbucket: int) -> dict[str, int]:
        """Acknowledged seqnos of a vbucket by node. Those of another branch mean nothing for the current one."""
        vbuuid = int(self.bucket.vbuckets.vbuuids[vbucket])
        known = self._acknowledged.get(vbucket)
        if known is None or known.vbuuid != vbuuid:
            known = self._acknowledged[vbucket] = _Acknowledged(vbuuid=vbuuid)
        return known.seqnos

    # --- deciding -------------------------------------------------------------------------------------------------

    def evaluate(self, vbucket: int) -> None:
        """Check all undecided writes of a vbucket after its state, topology or history has changed."""
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
        """Decide the prepares that a majority holds, which are the oldest. The rest are skipped: acks are frequent."""
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
        """The seqno up to which a majority of a vbucket's copies holds all changes."""
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
        """Answer all writers of a vbucket that is not active here: another node decides its prepares."""
        for write in self._waiting.pop(vbucket, {}).values():
            self._lose(write, Status.SYNC_WRITE_AMBIGUOUS)

    def _forget_lost(self, vbucket: int) -> None:
        """Answer writers whose prepares no longer exist, because a rollback of the vbucket removed them."""
        writes = self._waiting.get(vbucket, {})
        for key, write in list(writes.items()):
            if not self._is_prepared(write):
                del writes[key]
                self._lose(write, Status.SYNC_WRITE_AMBIGUOUS)

    def _is_prepared(self, write: SyncWrite) -> bool:
        """Whether the write's own prepare exists undecided; a prepare of another write of the key does not count."""
        prepare = write.prepare
        return prepare.is_same(self.bucket.prepares.find(prepare.vbucket, prepare.collection_id, prepare.key))

    def _lose(self, write: SyncWrite, status: Status) -> None:
        """End a write with a status; no commit follows."""
        write.outcome = WriteOutcome(status=status)
        self.has_news = True

    # --- time and commits -----------------------------------------------------------------------------------------

    def evaluate_all(self) -> None:
        for vbucket in sorted({*self.bucket.prepares.vbuckets(), *self._waiting}):
            self.evaluate(vbucket)

    def tick(self, now_s: float) -> None:
        """Decide what can be decided, then abort the writes that have timed out."""
        self.evaluate_all()
        late = [write for writes in self._waiting.values() for write in writes.values() if write.deadline_s <= now_s]
        for write in late:
            self._abort(write.prepare)
        self._waiting = {vbucket: writes for vbucket, writes in self._waiting.items() if writes}

    def on_durable(self) -> None:
        """A commit is durable: its decisions are final, and it may give vbuckets with one copy their majority."""
        self._deciding = [write for write in self._deciding if self._is_pending(write)]
        for vbucket in list(self._waiting):
            if not self.chains(vbucket) and self.bucket.vbuckets.state(vbucket) == VBucketState.ACTIVE:
                self._decide_held(vbucket)

    def on_void(self) -> None:
        """A commit failed, so changes that were not durable were taken back: repeat decisions, fail lost prepares.

        A key may have two writes: one that was decided, and another that was accepted before that decision was
        durable. The prepare that now exists determines which of them is undecided again. If the commit of another
        bucket failed, nothing was taken back here, and what is pending will still become durable.
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
