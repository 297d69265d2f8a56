"""The gate that holds changes until all copies have persisted them: what it releases, what it asks, what it forgets."""

from __future__ import annotations

import io
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

import pytest

from headwater.client import delivery
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.delivery import REFUSED_PAUSE_S_MAX, Delivery, PersistenceGate, PersistenceHold
from headwater.client.pieces import ChangeRun, Piece, RollbackPiece
from headwater.client.vbucket_stream import StreamItem
from headwater.errors import AccessDenied, KeyNotFound, NotMyVBucket, StatusError, TemporaryFailure, UnexpectedMessage
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status
from support.cases import case

A, B, C, D, E = NODES = tuple(Address(f"node{number}", 11210) for number in range(5))
VB = VBucketId(0)
OLD, NEW = Vbuuid(0xAA), Vbuuid(0xBB)
ALL_REACHABLE = frozenset(NODES)


def cluster_map(*rows: Sequence[int], revision: int = 1, nodes: tuple[Address, ...] = NODES) -> ClusterMap:
    return ClusterMap(
        epoch=1,
        revision=revision,
        bucket="travel",
        uuid="abc",
        nodes=nodes,
        vbucket_nodes=tuple(tuple(row) for row in rows),
    )


@pytest.fixture(autouse=True)
def a_second_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "INTERVAL_S", 1.0)


def gate_over(*row: int, **options: Any) -> PersistenceGate:
    return PersistenceGate(cluster_map(row), **options)


def waiting_gate(*row: int) -> PersistenceGate:
    """Seqno 10 waits, and all copies were asked at second 0."""
    gate = gate_over(*row)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    return gate


def observed(
    persisted: int, *, vbuuid: Vbuuid = OLD, old: Vbuuid | None = None, last: int | None = None, vbucket: int = VB
) -> ObserveSeqnoResponse:
    return ObserveSeqnoResponse(
        vbucket=VBucketId(vbucket),
        vbuuid=vbuuid,
        persisted_seqno=Seqno(persisted),
        current_seqno=Seqno(persisted + 5),
        old_vbuuid=old,
        last_received_seqno=None if last is None else Seqno(last),
    )


def asked(gate: PersistenceGate, now_s: float, reachable: Container[Address] = ALL_REACHABLE) -> list[Address]:
    return [node for node, _ in gate.requests_due(now_s, reachable)]


def request_for(vbuuid: Vbuuid = OLD, vbucket: int = VB) -> ObserveSeqno:
    # A connection numbers what it sends by itself.
    return ObserveSeqno(vbucket=VBucketId(vbucket), vbuuid=vbuuid, opaque=4711)


def answer(gate: PersistenceGate, node: Address, persisted: int, **reported: Any) -> bool:
    return gate.on_observed(node, request_for(), observed(persisted, **reported))


def refuse(gate: PersistenceGate, node: Address, error: StatusError) -> None:
    gate.on_refused(node, request_for(), error)


UNKNOWN_BRANCH = KeyNotFound(Status.KEY_ENOENT)


@case((0,), (9,), True, 9)
@case((0, 1, 2), (9, 4, 7), True, 4)
@case((0, 1, 2), (3, 4, 7), True, 3)
# A missing replica holds if it is meant to, and a missing active node always does.
@case((0, -1), (9,), True, 0)
@case((0, -1), (9,), False, 9)
@case((0, 1, -1), (9, 9), True, 0)
@case((0, 1, -1), (9, 9), False, 9)
@case((-1, 1), (0, 9), True, 0)
@case((-1, 1), (0, 9), False, 0)
def test_a_change_is_released_once_persisted(
    row: tuple[int, ...], persisted: tuple[int, ...], holds: bool, released: int
) -> None:
    gate = gate_over(*row, missing_replicas_hold=holds)
    gate.wants(VB, OLD, Seqno(9))
    for node in asked(gate, 0):
        answer(gate, node, persisted[NODES.index(node)])
    assert gate.released_seqno(VB) == released


def test_on_one_node_missing_replicas_never_hold() -> None:
    gate = PersistenceGate(cluster_map((0, -1), nodes=(A,)), missing_replicas_hold=True)
    gate.wants(VB, OLD, Seqno(9))
    for node in asked(gate, 0):
        answer(gate, node, 9)
    assert gate.released_seqno(VB) == 9


def test_a_vbucket_that_the_map_does_not_have_is_held() -> None:
    gate = gate_over(0, missing_replicas_hold=False)
    gate.wants(VBucketId(5), OLD, Seqno(1))
    assert gate.requests_due(0, ALL_REACHABLE) == []
    assert gate.released_seqno(VBucketId(5)) == 0


@case(observed(100), 100)
# It has gone on to a new branch at 80, or at 120, which it has not reached yet.
@case(observed(100, vbuuid=NEW, old=OLD, last=80), 80)
@case(observed(100, vbuuid=NEW, old=OLD, last=120), 100)
# Answers that are about other branches.
@case(observed(100, vbuuid=NEW), 0)
@case(observed(100, vbuuid=NEW, old=Vbuuid(0xCC), last=80), 0)
def test_only_the_shared_part_of_a_branch_counts(reported: ObserveSeqnoResponse, counts: int) -> None:
    gate = gate_over(0)
    gate.wants(VB, OLD, Seqno(130))
    asked(gate, 0)
    gate.on_observed(A, request_for(), reported)
    assert gate.released_seqno(VB) == counts


def test_the_branch_that_was_read_is_the_one_that_is_asked_for() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    assert {request.vbuuid for _, request in gate.requests_due(0, ALL_REACHABLE)} == {OLD}
    answer(gate, A, 10)
    answer(gate, B, 10)
    gate.wants(VB, NEW, Seqno(11))
    assert gate.released_seqno(VB) == 10
    assert gate.requests_due(1, ALL_REACHABLE) == [(node, ObserveSeqno(vbucket=VB, vbuuid=NEW)) for node in (A, B)]


def test_only_vbuckets_that_wait_are_asked_about() -> None:
    gate = PersistenceGate(cluster_map((0,), (1,), (2,)))
    assert gate.requests_due(0, ALL_REACHABLE) == []
    gate.wants(VBucketId(1), OLD, Seqno(3))
    assert gate.requests_due(0, ALL_REACHABLE) == [(B, ObserveSeqno(vbucket=VBucketId(1), vbuuid=OLD))]
    gate.on_observed(B, request_for(vbucket=1), observed(3, vbucket=1))
    assert gate.requests_due(10, ALL_REACHABLE) == []
    gate.wants(VBucketId(1), OLD, Seqno(3))
    assert gate.requests_due(20, ALL_REACHABLE) == []


def test_copies_that_have_told_enough_are_not_asked_again() -> None:
    gate = waiting_gate(0, 1)
    answer(gate, A, 10)
    answer(gate, B, 9)
    assert gate.nodes_waited_for == {B}
    assert asked(gate, 1) == [B]
    answer(gate, B, 12)
    gate.wants(VB, OLD, Seqno(11))
    assert asked(gate, 2) == [A]


def test_a_copy_is_asked_once_an_interval_and_not_while_an_answer_is_due() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    assert asked(gate, 5) == [A, B]
    answer(gate, A, 1)
    gate.wants(VB, OLD, Seqno(20))
    assert asked(gate, 5.9) == []
    assert asked(gate, 6) == [A]
    answer(gate, A, 20)
    answer(gate, B, 20)
    gate.wants(VB, OLD, Seqno(21))
    assert asked(gate, 6.9) == []
    assert asked(gate, 7) == [A, B]


def test_what_is_asked_at_once_is_bounded_and_nobody_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "REQUESTS_AT_ONCE_MAX", 6)
    gate = PersistenceGate(cluster_map(*[(0, 1)] * 10))
    for vbucket in range(10):
        gate.wants(VBucketId(vbucket), OLD, Seqno(1))
    seen: list[int] = []
    for _ in range(4):
        requests = gate.requests_due(0, ALL_REACHABLE)
        assert len(requests) <= 6
        seen += [request.vbucket for _, request in requests]
    assert sorted(seen) == sorted(2 * list(range(10)))


def test_nodes_out_of_reach_are_not_asked_and_hold() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    assert asked(gate, 0, {A}) == [A]
    answer(gate, A, 10)
    assert asked(gate, 1, {A}) == []
    assert gate.released_seqno(VB) == 0
    assert gate.nodes_waited_for == {B}
    assert asked(gate, 2) == [B]
    assert answer(gate, B, 10)


def test_a_vbucket_keeps_its_pace_when_it_was_forgotten_in_between() -> None:
    gate = waiting_gate(0)
    answer(gate, A, 1)
    gate.on_rollback(VB)
    gate.wants(VB, OLD, Seqno(5))
    assert asked(gate, 0.5) == [A]
    answer(gate, A, 2)
    # The turn that was settled before the rollback is no turn of what waits now.
    assert asked(gate, 1) == []
    assert asked(gate, 1.5) == [A]


def test_after_a_rollback_nothing_is_known_and_nothing_waits() -> None:
    gate = waiting_gate(0, 1)
    answer(gate, A, 10)
    gate.on_rollback(VB)
    assert gate.released_seqno(VB) == 0
    assert asked(gate, 5) == []
    # Even where the branch is the same, what B was asked before the rollback says nothing about what came after it.
    gate.wants(VB, OLD, Seqno(10))
    assert asked(gate, 6) == [A]
    assert not answer(gate, B, 10)
    assert not answer(gate, A, 10)
    assert asked(gate, 7) == [B]
    assert answer(gate, B, 10)


def test_only_what_was_wanted_is_released() -> None:
    gate = waiting_gate(0, 1)
    answer(gate, A, 50)
    answer(gate, B, 40)
    assert gate.released_seqno(VB) == 10
    gate.wants(VB, OLD, Seqno(30))
    assert gate.released_seqno(VB) == 30
    gate.on_disconnected(B)
    gate.wants(VB, OLD, Seqno(35))
    assert gate.released_seqno(VB) == 30
    assert asked(gate, 1) == [B]


def test_an_answer_that_nobody_waits_for_is_let_pass() -> None:
    gate = gate_over(0)
    assert not answer(gate, A, 10)
    refuse(gate, A, UNKNOWN_BRANCH)
    gate.wants(VB, OLD, Seqno(10))
    assert not answer(gate, A, 10)
    assert gate.released_seqno(VB) == 0
    assert asked(gate, 0) == [A]


def test_an_answer_about_another_vbucket_is_an_error() -> None:
    gate = waiting_gate(0)
    with pytest.raises(UnexpectedMessage, match="vbucket 3, when 0 was asked"):
        gate.on_observed(A, request_for(), observed(10, vbucket=3))
    assert gate.released_seqno(VB) == 0


@pytest.mark.parametrize(
    "error", [UNKNOWN_BRANCH, TemporaryFailure(Status.ETMPFAIL), NotMyVBucket(Status.NOT_MY_VBUCKET)]
)
def test_a_refusal_holds_and_is_asked_again_after_longer_and_longer(error: StatusError) -> None:
    gate = waiting_gate(0, 1)
    answer(gate, A, 8)
    answer(gate, B, 8)
    assert gate.released_seqno(VB) == 8
    times_s = []
    for now_s in range(1, 40):
        for node in asked(gate, now_s):
            if node == A:
                answer(gate, A, 10)
            else:
                times_s.append(now_s)
                refuse(gate, B, error)
                assert gate.released_seqno(VB) == 8
    pauses = [later - sooner for sooner, later in pairwise(times_s)]
    assert pauses[:2] == [2, 4]
    assert set(pauses[2:]) == {REFUSED_PAUSE_S_MAX}
    assert asked(gate, 100) == [B]
    assert answer(gate, B, 10)
    # It is asked as often as the others again, and the next refusal is the first one.
    gate.wants(VB, OLD, Seqno(11))
    assert gate.released_seqno(VB) == 10
    assert asked(gate, 101) == [A, B]
    answer(gate, A, 11)
    refuse(gate, B, error)
    assert asked(gate, 102) == []
    assert asked(gate, 103) == [B]


def test_a_refusal_that_does_not_pass_is_raised() -> None:
    gate = waiting_gate(0)
    with pytest.raises(AccessDenied):
        refuse(gate, A, AccessDenied(Status.EACCESS))


def test_it_says_what_a_vbucket_waits_for() -> None:
    gate = gate_over(0, 1, 2, 3, -1)
    assert gate.why_held(VB) is None
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 10)
    answer(gate, B, 7)
    refuse(gate, C, UNKNOWN_BRANCH)
    assert gate.why_held(VB) == (
        "vbucket 0 waits for seqno 10 to be persisted: node1:11210 has persisted 7, node2:11210 refuses to answer, "
        "node3:11210 has not answered yet, there are 4 of the 5 copies that must have it"
    )
    gate.on_cluster_map(cluster_map((-1,), revision=2))
    assert "no node has it active" in str(gate.why_held(VB))
    gate.on_cluster_map(cluster_map((0,), revision=3))
    asked(gate, 9)
    answer(gate, A, 10)  # what it was asked under the first map was answered before
    assert gate.why_held(VB) is None


def test_it_finds_what_gets_no_further() -> None:
    gate = gate_over(0, 1)
    assert gate.stalled(100, after_s=10) is None
    gate.wants(VB, OLD, Seqno(10))
    assert gate.stalled(100, after_s=10) is None
    asked(gate, 100)
    asked(gate, 105)
    assert gate.stalled(110, after_s=10) is None
    assert gate.stalled(110.5, after_s=10) == VB
    answer(gate, A, 10)
    assert gate.stalled(110.5, after_s=10) == VB
    answer(gate, B, 3)
    assert gate.stalled(110.5, after_s=10) is None
    asked(gate, 111)
    gate.wants(VB, OLD, Seqno(12))
    assert gate.stalled(121.5, after_s=10) == VB
    answer(gate, B, 12)
    asked(gate, 122)
    answer(gate, A, 12)
    assert gate.stalled(1000, after_s=10) is None
    # The time that nothing has waited does not count.
    gate.wants(VB, OLD, Seqno(13))
    asked(gate, 1000)
    assert gate.stalled(1005, after_s=10) is None


# --- what waits for the gate --------------------------------------------------------------------------------------


def change(seqno: int, end: int | None = None, branch: Vbuuid = OLD) -> StreamItem:
    end_seqno = Seqno(seqno if end is None else end)
    offset = StreamOffset(vbuuid=branch, seqno=Seqno(seqno), snapshot_start=Seqno(0), snapshot_end=end_seqno)
    piece = ChangeRun(
        vbucket=VB, vbuuid=branch, snapshot_start=Seqno(0), snapshot_end=end_seqno, rows=1, data=b"%d" % seqno
    )
    return StreamItem(vbucket=VB, piece=piece, offset=offset)


def rollback(seqno: int, from_seqno: int) -> StreamItem:
    kept = Seqno(seqno)
    piece = RollbackPiece(vbucket=VB, seqno=kept, from_seqno=Seqno(from_seqno), old_vbuuid=OLD, new_vbuuid=NEW)
    return StreamItem(vbucket=VB, piece=piece, offset=StreamOffset.whole(NEW, kept))


class World:
    def __init__(self, *, whole_snapshots: bool = False) -> None:
        self.delivery = Delivery(release=lambda link, count: None, held_bytes_max=1 << 20, open_spool=io.BytesIO)
        self.delivery.offsets[VB] = StreamOffset()
        self.hold = PersistenceHold(gate_over(0), self.delivery, whole_snapshots=whole_snapshots)
        self.now_s = 0.0

    def persisted(self, seqno: int, branch: Vbuuid = OLD) -> None:
        """The node answers everything that it is asked now."""
        self.now_s += 1
        for address, request in self.hold.gate.requests_due(self.now_s, {A}):
            self.hold.on_answer(address, request, observed(seqno, vbuuid=branch), None)

    def taken(self) -> list[int | str]:
        return [_shown(piece) for piece in self.delivery.take(1 << 20).pieces]


def _shown(piece: Piece) -> int | str:
    if isinstance(piece, RollbackPiece):
        return f"back to {piece.seqno}"
    assert isinstance(piece, ChangeRun)
    return int(bytes(piece.data))


def test_nothing_goes_before_it_is_persisted() -> None:
    world = World()
    world.hold.put([change(1), change(2), change(3)])
    assert world.taken() == []
    assert not world.hold.is_empty
    world.persisted(2)
    assert world.taken() == [1, 2]
    world.persisted(3)
    assert world.taken() == [3]
    assert world.hold.is_empty


def test_a_snapshot_that_is_to_come_whole_goes_as_a_whole() -> None:
    world = World(whole_snapshots=True)
    world.hold.put([change(1, end=3), change(2, end=3), change(3, end=3)])
    world.persisted(2)
    assert world.taken() == []
    world.persisted(3)
    assert world.taken() == [1, 2, 3]


def test_what_nobody_has_seen_is_rolled_back_in_silence_and_the_rest_waits_on() -> None:
    world = World()
    world.hold.put([change(1), change(2), rollback(1, 2)])
    assert world.taken() == []
    world.persisted(1)
    assert world.taken() == [1]
    world.hold.put([change(2, branch=NEW)])
    assert world.taken() == []
    world.persisted(2, NEW)
    assert world.taken() == [2]
    world.hold.put([rollback(1, 2)])
    assert world.taken() == ["back to 1"], "it was handed out"


@pytest.mark.parametrize("whole_snapshots", [False, True])
def test_a_vbucket_that_is_left_leaves_nothing(whole_snapshots: bool) -> None:
    world = World(whole_snapshots=whole_snapshots)
    world.hold.put([change(1)])
    world.hold.close_vbucket(VB)
    assert world.hold.is_empty
    assert world.hold.gate.nodes_waited_for == set()
