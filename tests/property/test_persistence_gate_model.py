"""The persistence gate against a model of a vbucket's copies.

The model knows of no failover log when it judges: every change ever written is a number of its own, a copy is the list
of changes it holds, and the consumer has a list of changes that it was sent. A copy has persisted what the consumer has
up to a seqno if what it has on disk starts with the same changes. The nodes answer as the protocol says, by their
failover logs. Answers arrive late; nodes crash, come back, are promoted and are left out of the map. Whatever happens,
a seqno may be released only if each required copy had persisted it since its earlier answers became void; and when all
copies have caught up, everything is released.

Histories are drawn from a seed and not step by step: faults of a gate take several things that happen in a row, and
even chances find those far more often.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client import delivery
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.delivery import PersistenceGate
from headwater.errors import KeyNotFound, TemporaryFailure
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status

NODES = tuple(Address(f"node{number}", 11210) for number in range(4))
VB = VBucketId(0)
STEPS = 20


# --- the nodes ----------------------------------------------------------------------------------------------------


@dataclass
class Copy:
    """A node's copy of the vbucket."""

    log: FailoverLog
    changes: list[int] = field(default_factory=list)
    persisted: int = 0

    def keep(self, count: int) -> None:
        """Lose what lies above."""
        del self.changes[count:]
        self.persisted = min(self.persisted, count)

    def observe(self, request: ObserveSeqno) -> ObserveSeqnoResponse | None:
        """What the node answers; None where it does not know the branch."""
        newest = self.log.newest.vbuuid
        shared = self.log.branch_end(request.vbuuid, high_seqno=SEQNO_MAX)
        if shared is None:
            return None
        is_older = request.vbuuid != newest
        return ObserveSeqnoResponse(
            vbucket=VB,
            vbuuid=newest,
            persisted_seqno=Seqno(self.persisted),
            current_seqno=Seqno(len(self.changes)),
            old_vbuuid=request.vbuuid if is_older else None,
            last_received_seqno=shared if is_older else None,
        )


def common(left: list[int], right: list[int]) -> int:
    """How many changes two histories have in common."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


# --- the world ----------------------------------------------------------------------------------------------------


class Answers(Enum):
    """Whose answers arrive before anything else happens."""

    ALL = auto()
    ACTIVE = auto()
    REPLICAS = auto()
    BUSY = auto()
    """All arrive, and those of the replicas are refusals."""


Ask = tuple[Address, ObserveSeqno, ObserveSeqnoResponse | None]


class World:
    """A vbucket, its copies, and a consumer with a gate."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.holds = self.maybe()
        self.row: list[Address | None] = list(NODES[: random.randint(1, 4)])
        self.copies = {node: Copy(log=FailoverLog.start(Vbuuid(1))) for node in NODES}
        self.active = NODES[0]
        self.last_change = 0
        self.last_vbuuid = 1
        self.revision = 0
        self.known_row = list(self.row)
        self.gate = PersistenceGate(self.cluster_map(), missing_replicas_hold=self.holds)
        self.now_s = 0.0
        self.under_way: list[Ask] = []
        self.branch = Vbuuid(1)
        """The branch that the consumer is on."""
        self.read: list[int] = []
        """The changes that the consumer has been sent."""
        self.best: dict[Address, int] = {}
        """How much of them each copy had persisted at best, since what it said before became void."""
        self.released = 0

    def maybe(self) -> bool:
        return self.random.random() < 0.5

    def step(self) -> None:
        """Something happens; the consumer may be sent what is new, and may ask for what is persisted."""
        self.random.choice(
            [self.write, self.replicate, self.crash, self.promote, self.wipe, self.move_replica]
        )()  # fmt: skip
        self.judge()
        if self.maybe():
            self.stream()
        if self.maybe():
            lost = self.random.choice(NODES) if self.random.random() < 0.3 else None
            self.exchange(self.random.choice([Answers.ALL, Answers.ALL, *Answers]), lost)

    def cluster_map(self) -> ClusterMap:
        row = tuple(-1 if node is None else NODES.index(node) for node in self.row)
        return ClusterMap(epoch=1, revision=self.revision, bucket="b", uuid="u", nodes=NODES, vbucket_nodes=(row,))

    def some_node(self) -> Address:
        """One of those that have a copy, often the active one."""
        place = self.random.choice([0, 0, 0, 1, 1, 2, 3])
        return (self.row[place] if place < len(self.row) else None) or self.active

    # --- the cluster ----------------------------------------------------------------------------------------------

    def write(self) -> None:
        self._write(self.random.randint(1, 3), is_persisted=self.maybe())

    def replicate(self) -> None:
        self._replicate(self.some_node(), self.random.choice([1, 1000]), is_persisted=self.maybe())

    def crash(self) -> None:
        """What was in memory only is lost, or even more. A copy that was active begins a branch, and is written to."""
        node = self.some_node()
        copy = self.copies[node]
        copy.keep(copy.persisted if self.maybe() else self.random.randint(0, copy.persisted))
        self.lose(node)
        if node == self.active:
            self._branch(copy, copy.persisted)
            self._write(self.random.randint(0, 3), is_persisted=True)

    def promote(self) -> None:
        """A copy becomes active. Its branch may begin below what it has: where its snapshot began."""
        self.active = self.some_node()
        copy = self.copies[self.active]
        self._branch(copy, max(copy.persisted - self.random.randint(0, 2), 0))
        self._write(self.random.randint(0, 3), is_persisted=True)
        others = [node for node in self.row if node not in (self.active, None)]
        # The old active node becomes a replica, or is failed over.
        self.row = ([self.active, *others] + [None] * 4)[: len(self.row)]
        if self.maybe():
            self.learn_map()

    def wipe(self) -> None:
        """A replica is taken off the vbucket, and put back empty before anybody has looked."""
        node = self.some_node()
        if node != self.active:
            self.copies[node] = Copy(log=self.copies[self.active].log)
            self.learn_map()

    def move_replica(self) -> None:
        place = self.random.randint(1, 3)
        node = self.random.choice([None, *NODES])
        if node not in self.row and place < len(self.row):
            self.row[place] = node
        self.learn_map()

    def _write(self, count: int, *, is_persisted: bool) -> None:
        copy = self.copies[self.active]
        for _ in range(count):
            self.last_change += 1
            copy.changes.append(self.last_change)
        if is_persisted:
            copy.persisted = len(copy.changes)

    def _replicate(self, node: Address, count: int, *, is_persisted: bool) -> None:
        """A replica connects to the active node, takes over its failover log, rolls back if it has to, and follows."""
        source, copy = self.copies[self.active], self.copies[node]
        copy.keep(common(copy.changes, source.changes))
        copy.log = source.log
        copy.changes += source.changes[len(copy.changes) : len(copy.changes) + count]
        if is_persisted:
            copy.persisted = len(copy.changes)

    def _branch(self, copy: Copy, at_seqno: int) -> None:
        self.last_vbuuid += 1
        copy.log = copy.log.branch(Vbuuid(self.last_vbuuid), at_seqno=Seqno(at_seqno))

    # --- the consumer ---------------------------------------------------------------------------------------------

    def learn_map(self) -> None:
        self.revision += 1
        self.known_row = list(self.row)
        self.gate.on_cluster_map(self.cluster_map())
        self.best = {}

    def stream(self) -> None:
        """The consumer connects to the active node if it has moved on, and is sent what it lacks."""
        source = self.copies[self.active]
        if source.log.newest.vbuuid != self.branch:
            shared = source.log.branch_end(self.branch, high_seqno=SEQNO_MAX) or 0
            if shared < len(self.read):
                self.read = source.changes[: min(self.released, common(self.read, source.changes))]
                self.gate.on_rollback(VB)
                self.released = 0
            self.branch = source.log.newest.vbuuid
            self.best = {}
        self.read += source.changes[len(self.read) :]
        self.gate.wants(VB, self.branch, Seqno(len(self.read)))
        self.judge()

    def exchange(self, answers: Answers, lost: Address | None) -> None:
        """What was asked before is answered; then everybody is asked, and some answer before anything else happens."""
        self.answer(self.under_way)
        if lost is not None:
            self.lose(lost)
        for _ in range(3):
            self.now_s += 6.0
            for node, request in self.gate.requests_due(self.now_s, set(NODES) - {lost}):
                self.under_way.append((node, request, self.copies[node].observe(request)))
        of_active = [ask for ask in self.under_way if ask[0] == self.active]
        of_replicas = [ask for ask in self.under_way if ask[0] != self.active]
        if answers is not Answers.REPLICAS:
            self.answer(of_active)
        if answers is not Answers.ACTIVE:
            self.answer(of_replicas, are_busy=answers is Answers.BUSY)
        if answers is Answers.ALL and lost is None:
            self.judge_progress()

    def answer(self, asks: list[Ask], *, are_busy: bool = False) -> None:
        for ask in list(asks):
            self.under_way.remove(ask)
            node, request, answer = ask
            if are_busy:
                self.gate.on_refused(node, request, TemporaryFailure(Status.ETMPFAIL))
                self.best.pop(node, None)
            elif answer is None:
                self.gate.on_refused(node, request, KeyNotFound(Status.KEY_ENOENT))
            else:
                self.gate.on_observed(node, request, answer)
            self.judge()

    def lose(self, node: Address) -> None:
        self.gate.on_disconnected(node)
        self.under_way = [ask for ask in self.under_way if ask[0] != node]
        self.best.pop(node, None)

    # --- the judgement --------------------------------------------------------------------------------------------

    def judge(self) -> None:
        for node, copy in self.copies.items():
            persisted = common(copy.changes[: copy.persisted], self.read)
            self.best[node] = max(persisted, self.best.get(node, 0))
        released = self.gate.released_seqno(VB)
        assert self.released <= released <= len(self.read)
        if released > self.released:
            assert released <= self.allowed(self.best)
        self.released = released

    def judge_progress(self) -> None:
        """Everybody has answered. Where nobody has gone on to another branch, nothing that is safe is held back."""
        known = [node for node in self.known_row if node is not None]
        if self.read and all(self.copies[node].log.newest.vbuuid == self.branch for node in known):
            on_disk = {node: common(copy.changes[: copy.persisted], self.read) for node, copy in self.copies.items()}
            assert self.gate.released_seqno(VB) >= self.allowed(on_disk)

    def allowed(self, persisted: dict[Address, int]) -> int:
        """The highest seqno that may be released, by what each copy has persisted."""
        active, *replicas = self.known_row
        present = [node for node in replicas if node is not None]
        needed = len(replicas) if self.holds else len(present)
        if active is None or len(present) < needed:
            return 0
        return min(persisted[node] for node in (active, *present))

    def catch_up(self) -> None:
        """All copies are there, and have persisted everything."""
        spare = [node for node in NODES if node not in self.row]
        self.row = [self.active, *(node or spare.pop() for node in self.row[1:])]
        for node in NODES:
            self._replicate(node, 1000, is_persisted=True)
        self.learn_map()
        self.stream()
        for lost in (self.active, None, None):
            self.exchange(Answers.ALL, lost)


@given(seed=st.integers(0, 2**64 - 1))
def test_only_what_is_safe_is_released_and_in_the_end_everything(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "INTERVAL_S", 1.0)
        patch.setattr(delivery, "REQUESTS_AT_ONCE_MAX", 2)
        world = World(Random(seed))
        for _ in range(STEPS):
            world.step()
        world.catch_up()
        assert world.gate.released_seqno(VB) == len(world.read)
        assert world.gate.nodes_waited_for == set()
