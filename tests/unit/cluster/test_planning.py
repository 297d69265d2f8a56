"""Maps of vbuckets: balanced, with no two copies on one node, and close to the map before."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cluster.planning import Copy, Row, VBucketMap, empty_map, fail_over, moves, plan
from headwater.errors import InvalidInput
from headwater.protocol.numbers import Seqno, VBucketId
from support.cases import case, each

NAMES = [f"node-{number}" for number in range(8)]
VBUCKETS = st.sampled_from([1, 2, 8, 16, 64, 128])
REPLICAS = st.integers(0, 3)
MEMBERS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=len(NAMES), unique=True)


def check_map(rows: VBucketMap, nodes: list[str], replicas: int) -> None:
    copies = min(replicas + 1, len(nodes))
    for row in rows:
        there = [node for node in row if node is not None]
        assert len(row) == replicas + 1
        assert row[:copies] == tuple(there), "there is no gap before the copies there are"
        assert len(set(there)) == copies
        assert set(there) <= set(nodes)
    actives = [sum(row[0] == node for row in rows) for node in nodes]
    others = [sum(node in row[1:] for row in rows) for node in nodes]
    assert max(actives) - min(actives) <= 1
    assert max(others) - min(others) <= 1


def built(before: VBucketMap, after: VBucketMap) -> int:
    return sum(len(move.builds) for move in moves(before, after))


@given(vbuckets=VBUCKETS, replicas=REPLICAS, steps=st.lists(MEMBERS, min_size=1, max_size=5))
def test_every_map_on_the_way_is_balanced(vbuckets: int, replicas: int, steps: list[list[str]]) -> None:
    rows = empty_map(vbuckets, replicas)
    for nodes in steps:
        rows = plan(rows, nodes, replicas=replicas)
        check_map(rows, nodes, replicas)


@given(vbuckets=VBUCKETS, replicas=REPLICAS, nodes=MEMBERS)
def test_a_balanced_map_stays_as_it_is(vbuckets: int, replicas: int, nodes: list[str]) -> None:
    rows = plan(empty_map(vbuckets, replicas), nodes, replicas=replicas)
    assert plan(rows, nodes, replicas=replicas) == rows
    assert moves(rows, rows) == []


@given(vbuckets=VBUCKETS, replicas=REPLICAS, nodes=MEMBERS.filter(lambda nodes: len(nodes) > 1))
def test_no_active_vbucket_moves_without_need(vbuckets: int, replicas: int, nodes: list[str]) -> None:
    """A node that comes gets its share, one that goes leaves its own to others, and nothing else moves."""
    fewer = nodes[:-1]
    small = plan(empty_map(vbuckets, replicas), fewer, replicas=replicas)
    large = plan(small, nodes, replicas=replicas)
    came = sum(row[0] == nodes[-1] for row in large)
    assert sum(move.is_takeover for move in moves(small, large)) == came
    again = plan(large, fewer, replicas=replicas)
    assert sum(move.is_takeover for move in moves(large, again)) == came


@each(("nodes", "replicas"), [*itertools.product(range(2, 7), range(1, 4))])
def test_few_copies_are_built_when_a_node_comes_or_goes(nodes: int, replicas: int) -> None:
    vbuckets = 1024
    small = plan(empty_map(vbuckets, replicas), NAMES[:nodes], replicas=replicas)
    large = plan(small, NAMES[: nodes + 1], replicas=replicas)
    copies = vbuckets * (min(replicas, nodes) + 1)
    share = copies / (nodes + 1)
    missing = vbuckets if replicas >= nodes else 0
    assert built(small, large) <= missing + 1.5 * share
    assert built(large, plan(large, NAMES[:nodes], replicas=replicas)) <= 1.5 * share


def test_an_active_vbucket_goes_where_a_replica_is() -> None:
    rows = plan(empty_map(64, 1), NAMES[:3], replicas=1)
    handed_over = [move for move in moves(rows, plan(rows, NAMES[:2], replicas=1)) if move.is_takeover]
    assert len(handed_over) == 21
    # The quotas leave one that can't.
    assert sum(move.target not in move.before for move in handed_over) <= 1


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_the_replicas_of_a_node_are_spread_over_the_others(nodes: int) -> None:
    """So that after a failover all that are left share its load."""
    rows = plan(empty_map(1024, 1), NAMES[:nodes], replicas=1)
    pairs = Counter(rows)
    assert len(pairs) == nodes * (nodes - 1)
    assert max(pairs.values()) - min(pairs.values()) <= 0.1 * max(pairs.values())


def test_a_move_tells_what_is_to_be_done() -> None:
    (move,) = moves((("a", "b"), ("b", "a")), (("c", "a"), ("b", "a")))
    assert (move.vbucket, move.source, move.target, move.is_takeover) == (0, "a", "c", True)
    assert (move.builds, move.drops) == (("c",), ("b",))


@pytest.mark.parametrize(("nodes", "replicas"), [([], 0), (["a"], -1), (["a"], 4)])
def test_what_can_t_be_planned(nodes: list[str], replicas: int) -> None:
    with pytest.raises(InvalidInput):
        plan(empty_map(4, 0), nodes, replicas=replicas)


# --- failover -----------------------------------------------------------------------------------------------------


def seqnos(**reached: int) -> dict[str, Copy]:
    return {node: Copy(seqno=Seqno(seqno), branches=(1,)) for node, seqno in reached.items()}


ON_OLD_BRANCH = {"b": Copy(seqno=Seqno(100), branches=(1,)), "c": Copy(seqno=Seqno(97), branches=(2, 1))}


# The most advanced copy is promoted, of equals the first, and one that is being built if it is ahead.
@case(("a", "b", "c"), seqnos(b=7, c=9), ("c", "b", None))
@case(("a", "b", "c"), seqnos(b=9, c=9), ("b", "c", None))
@case(("a", "b"), seqnos(b=1, d=2), ("d", "b"))
# A higher seqno on a branch that the others have left counts for nothing.
@case(("a", "b", "c"), ON_OLD_BRANCH, ("c", "b", None))
# A lost replica leaves a gap, and a vbucket with no copy left has no node.
@case(("b", "a", "c"), {}, ("b", "c", None))
@case(("b", "c", "a"), {}, ("b", "c", None))
@case(("a", None), {}, (None, None))
def test_what_is_left_without_a_node(row: Row, copies: dict[str, Copy], after: Row) -> None:
    assert fail_over((row,), ["a"], {VBucketId(0): copies}) == (after,)


@given(vbuckets=VBUCKETS, replicas=st.integers(1, 3), nodes=MEMBERS.filter(lambda nodes: len(nodes) > 1))
def test_after_a_failover_a_plan_mends_the_map(vbuckets: int, replicas: int, nodes: list[str]) -> None:
    rows = plan(empty_map(vbuckets, replicas), nodes, replicas=replicas)
    reached = {VBucketId(v): {node: Copy(seqno=Seqno(1)) for node in row if node} for v, row in enumerate(rows)}
    lost, left = nodes[0], nodes[1:]
    after = fail_over(rows, [lost], {v: {n: s for n, s in r.items() if n != lost} for v, r in reached.items()})
    assert all(lost not in row and row[0] is not None for row in after)
    check_map(plan(after, left, replicas=replicas), left, replicas)
