"""The gate that holds changes until all copies have persisted them: what it releases, what it asks, what it forgets."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

import pytest

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.persistence_gate import REFUSED_PAUSE_S_MAX, Copies, PersistenceGate, persisted_on_branch
from headwater.errors import AccessDenied, KeyNotFound, NotMyVBucket, StatusError, TemporaryFailure, UnexpectedMessage
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from support.cases import each

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


def gate_over(*row: int, interval_s: float = 1.0, **options: Any) -> PersistenceGate:
    return PersistenceGate(cluster_map(row), interval_s=interval_s, **options)


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


def test_nothing_is_released_before_anything_is_known() -> None:
    gate = gate_over(0)
    assert gate.released_seqno(VB) == 0
    gate.wants(VB, OLD, Seqno(7))
    assert gate.released_seqno(VB) == 0
    assert gate.waiting == [VB]


def test_without_replicas_the_active_node_decides() -> None:
    gate = gate_over(2)
    gate.wants(VB, OLD, Seqno(7))
    assert asked(gate, 0) == [C]
    assert answer(gate, C, 5)
    assert gate.released_seqno(VB) == 5
    assert gate.waiting == [VB]
    assert asked(gate, 1) == [C]
    assert answer(gate, C, 7)
    assert gate.released_seqno(VB) == 7
    assert gate.waiting == []


def test_all_copies_must_have_persisted_it() -> None:
    gate = gate_over(0, 1, 2)
    gate.wants(VB, OLD, Seqno(100))
    assert asked(gate, 0) == [A, B, C]
    assert not answer(gate, A, 100)
    assert not answer(gate, C, 90)
    assert gate.released_seqno(VB) == 0
    assert answer(gate, B, 95)
    assert gate.released_seqno(VB) == 90


@pytest.mark.parametrize(
    ("active", "replicas", "by_all", "by_majority"),
    [
        (9, (), 9, 9),
        (9, (4,), 4, 4),
        (9, (4, 7), 4, 7),
        (3, (4, 7), 3, 3),
        (9, (4, 7, 5), 4, 5),
        (9, (4, 7, 5, 1), 1, 5),
    ],
)
def test_a_majority_has_the_active_node_among_it(
    active: int, replicas: tuple[int, ...], by_all: int, by_majority: int
) -> None:
    for copies, expected in ((Copies.ALL, by_all), (Copies.MAJORITY, by_majority)):
        gate = gate_over(*range(len(replicas) + 1), copies=copies)
        gate.wants(VB, OLD, Seqno(9))
        asked(gate, 0)
        for node, persisted in zip(NODES, (active, *replicas), strict=False):
            answer(gate, node, persisted)
        assert gate.released_seqno(VB) == expected


@each(
    ("row", "copies", "holds", "released"),
    [
        ((0, -1), Copies.ALL, True, 0),
        ((0, -1), Copies.ALL, False, 9),
        ((0, -1, -1), Copies.ALL, False, 9),
        ((0, 1, -1), Copies.ALL, True, 0),
        ((0, 1, -1), Copies.ALL, False, 9),
        ((0, -1), Copies.MAJORITY, True, 0),
        ((0, -1), Copies.MAJORITY, False, 9),
        ((0, 1, -1), Copies.MAJORITY, True, 9),
        ((-1, 1), Copies.ALL, True, 0),
        ((-1, 1), Copies.ALL, False, 0),
        ((-1, 1, 2), Copies.MAJORITY, False, 0),
        ((-1,), Copies.ALL, False, 0),
    ],
)
def test_replicas_that_are_missing_hold_if_they_are_meant_to_and_a_missing_active_node_always_does(
    row: tuple[int, ...], copies: Copies, holds: bool, released: int
) -> None:
    gate = gate_over(*row, copies=copies, missing_replicas_hold=holds)
    gate.wants(VB, OLD, Seqno(9))
    for node in asked(gate, 0):
        answer(gate, node, 9)
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


@pytest.mark.parametrize(
    ("reported", "counts"),
    [
        (observed(100), 100),
        # It has gone on to a new branch at 80, or at 120, which it has not reached yet.
        (observed(100, vbuuid=NEW, old=OLD, last=80), 80),
        (observed(100, vbuuid=NEW, old=OLD, last=120), 100),
        # Answers that are about other branches.
        (observed(100, vbuuid=NEW), 0),
        (observed(100, vbuuid=NEW, old=Vbuuid(0xCC), last=80), 0),
    ],
)
def test_only_the_shared_part_of_a_branch_counts(reported: ObserveSeqnoResponse, counts: int) -> None:
    assert persisted_on_branch(OLD, reported) == counts
    gate = gate_over(0)
    gate.wants(VB, OLD, Seqno(130))
    asked(gate, 0)
    gate.on_observed(A, request_for(), reported)
    assert gate.released_seqno(VB) == counts


def test_changes_of_a_branch_that_did_not_happen_stay_held_when_all_copies_agree_on_the_new_one() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(120))
    asked(gate, 0)
    for node in (A, B):
        answer(gate, node, 500, vbuuid=NEW, old=OLD, last=100)
    assert gate.released_seqno(VB) == 100
    assert gate.waiting == [VB]


def test_the_branch_that_was_read_is_the_one_that_is_asked_for() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    assert {request.vbuuid for _, request in gate.requests_due(0, ALL_REACHABLE)} == {OLD}
    answer(gate, A, 10)
    answer(gate, B, 10)
    gate.wants(VB, NEW, Seqno(11))
    assert gate.released_seqno(VB) == 10
    assert gate.requests_due(1, ALL_REACHABLE) == [(node, ObserveSeqno(vbucket=VB, vbuuid=NEW)) for node in (A, B)]


def test_an_answer_about_the_branch_before_does_not_count_for_the_new_one() -> None:
    gate = gate_over(0)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    gate.wants(VB, NEW, Seqno(11))
    # A is not asked twice at a time, so its next answer is the old one.
    assert asked(gate, 1) == []
    assert not answer(gate, A, 50)
    assert gate.released_seqno(VB) == 0
    assert asked(gate, 2) == [A]
    assert gate.on_observed(A, request_for(NEW), observed(11, vbuuid=NEW))
    assert gate.released_seqno(VB) == 11


def test_after_a_rollback_nothing_is_known_and_nothing_waits() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 10)
    gate.on_rollback(VB)
    assert gate.released_seqno(VB) == 0
    assert gate.waiting == []
    assert asked(gate, 5) == []
    # Even where the branch is the same, what B was asked before the rollback says nothing about what came after it.
    gate.wants(VB, OLD, Seqno(10))
    assert asked(gate, 6) == [A]
    assert not answer(gate, B, 10)
    assert not answer(gate, A, 10)
    assert asked(gate, 7) == [B]
    assert answer(gate, B, 10)


def test_only_vbuckets_that_wait_are_asked_about() -> None:
    gate = PersistenceGate(cluster_map((0,), (1,), (2,)), interval_s=1)
    assert gate.requests_due(0, ALL_REACHABLE) == []
    assert gate.next_due_s is None
    gate.wants(VBucketId(1), OLD, Seqno(3))
    assert gate.requests_due(0, ALL_REACHABLE) == [(B, ObserveSeqno(vbucket=VBucketId(1), vbuuid=OLD))]
    gate.on_observed(B, request_for(vbucket=1), observed(3, vbucket=1))
    assert gate.requests_due(10, ALL_REACHABLE) == []
    gate.wants(VBucketId(1), OLD, Seqno(3))
    assert gate.requests_due(20, ALL_REACHABLE) == []


def test_copies_that_have_told_enough_are_not_asked_again() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
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
    assert gate.next_due_s == 6
    assert asked(gate, 5.9) == []
    assert asked(gate, 6) == [A]
    answer(gate, A, 20)
    answer(gate, B, 20)
    gate.wants(VB, OLD, Seqno(21))
    assert asked(gate, 6.9) == []
    assert asked(gate, 7) == [A, B]


def test_what_is_asked_at_once_is_bounded_and_nobody_is_forgotten() -> None:
    gate = PersistenceGate(cluster_map(*[(0, 1)] * 10), interval_s=1, requests_at_once_max=6)
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
    gate = gate_over(0)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 1)
    gate.on_rollback(VB)
    gate.wants(VB, OLD, Seqno(5))
    assert asked(gate, 0.5) == [A]
    answer(gate, A, 2)
    # The turn that was settled before the rollback is no turn of what waits now.
    assert asked(gate, 1) == []
    assert asked(gate, 1.5) == [A]


def test_a_newer_answer_counts_even_where_it_is_lower() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 7)
    answer(gate, B, 9)
    assert gate.released_seqno(VB) == 7
    asked(gate, 1)
    answer(gate, B, 5)
    assert not answer(gate, A, 10)
    # What was released may be gone to the caller, so it stays.
    assert gate.released_seqno(VB) == 7


def test_only_what_was_wanted_is_released() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 50)
    answer(gate, B, 40)
    assert gate.released_seqno(VB) == 10
    gate.wants(VB, OLD, Seqno(30))
    assert gate.released_seqno(VB) == 30
    assert gate.waiting == []
    gate.on_disconnected(B)
    gate.wants(VB, OLD, Seqno(35))
    assert gate.released_seqno(VB) == 30
    assert asked(gate, 1) == [B]


def test_an_answer_that_nobody_waits_for_is_let_pass() -> None:
    gate = gate_over(0)
    assert not answer(gate, A, 10)
    gate.wants(VB, OLD, Seqno(10))
    assert not answer(gate, A, 10)
    assert gate.released_seqno(VB) == 0


def test_an_answer_about_another_vbucket_is_an_error() -> None:
    gate = gate_over(0)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    with pytest.raises(UnexpectedMessage, match="vbucket 3, when 0 was asked"):
        gate.on_observed(A, request_for(), observed(10, vbucket=3))
    assert gate.released_seqno(VB) == 0


@pytest.mark.parametrize(
    "error", [UNKNOWN_BRANCH, TemporaryFailure(Status.ETMPFAIL), NotMyVBucket(Status.NOT_MY_VBUCKET)]
)
def test_a_refusal_holds_and_is_asked_again_after_longer_and_longer(error: StatusError) -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
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


def test_what_a_node_said_before_it_refused_does_not_count() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 3)
    answer(gate, B, 5)
    asked(gate, 1)
    refuse(gate, B, UNKNOWN_BRANCH)
    assert not answer(gate, A, 10)
    assert gate.released_seqno(VB) == 3


def test_a_refusal_that_does_not_pass_is_raised() -> None:
    gate = gate_over(0)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    with pytest.raises(AccessDenied):
        refuse(gate, A, AccessDenied(Status.EACCESS))


def test_a_refusal_that_nobody_waits_for_is_let_pass() -> None:
    gate = gate_over(0)
    refuse(gate, A, UNKNOWN_BRANCH)
    gate.wants(VB, OLD, Seqno(10))
    assert asked(gate, 0) == [A]


def test_a_node_that_was_away_has_to_tell_again() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, B, 10)
    gate.on_disconnected(B)
    assert not answer(gate, A, 10)
    assert asked(gate, 1) == [B]
    gate.on_disconnected(B)
    assert not answer(gate, B, 10)
    assert asked(gate, 2) == [B]
    assert answer(gate, B, 9)
    assert gate.released_seqno(VB) == 9


def test_a_new_map_makes_all_answers_void() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 10)
    gate.on_cluster_map(cluster_map((0, 1), revision=2))
    # B answers what it was asked under the old map, and is asked again; so is A, though it had said enough.
    assert not answer(gate, B, 10)
    assert asked(gate, 1) == [A, B]
    assert not answer(gate, A, 10)
    assert answer(gate, B, 10)


def test_the_same_map_again_changes_nothing() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    answer(gate, A, 10)
    gate.on_cluster_map(cluster_map((0, 1)))
    assert answer(gate, B, 10)


def test_the_copies_of_the_new_map_decide() -> None:
    gate = gate_over(0, 1)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    # Node 0 of this map is another one than before.
    gate.on_cluster_map(cluster_map((1, 0), revision=2, nodes=(C, A)))
    assert not answer(gate, A, 10)
    assert asked(gate, 1) == [A, C]
    assert not answer(gate, B, 10)
    assert not answer(gate, C, 10)
    assert answer(gate, A, 7)
    assert gate.released_seqno(VB) == 7


def test_what_was_released_under_the_map_before_stays_released_and_no_more() -> None:
    gate = gate_over(0)
    gate.wants(VB, OLD, Seqno(10))
    asked(gate, 0)
    assert answer(gate, A, 20)
    gate.on_cluster_map(cluster_map((0, 1), revision=2))
    assert gate.released_seqno(VB) == 10
    assert asked(gate, 5) == []
    gate.wants(VB, OLD, Seqno(15))
    assert gate.released_seqno(VB) == 10
    assert asked(gate, 6) == [A, B]


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
    assert gate.waiting == []
    assert gate.stalled(1000, after_s=10) is None
    # The time that nothing has waited does not count.
    gate.wants(VB, OLD, Seqno(13))
    asked(gate, 1000)
    assert gate.stalled(1005, after_s=10) is None
