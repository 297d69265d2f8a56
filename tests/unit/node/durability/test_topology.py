"""Chains of nodes, majorities of them, and up to where a majority holds everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.node.durability import Chain, chains_of, is_possible, majority, satisfied_seqno


@pytest.mark.parametrize(
    ("topology", "chains"),
    [
        (None, ()),
        ((), ()),
        ((["a"],), ()),
        ((["a", "b"],), (("a", "b"),)),
        ((["a", None],), (("a", None),)),
        ((["a", "b"], ["a"]), (("a", "b"),)),
        ((["a", "b"], ["c", "d", None]), (("a", "b"), ("c", "d", None))),
    ],
)
def test_only_chains_with_copies_have_a_say(topology: object, chains: object) -> None:
    assert chains_of(topology) == chains  # type: ignore[arg-type]


@pytest.mark.parametrize(("copies", "needed"), [(2, 2), (3, 2), (4, 3)])
def test_a_majority_is_more_than_half(copies: int, needed: int) -> None:
    assert majority(tuple("abcd"[:copies])) == needed


@pytest.mark.parametrize(
    ("chains", "possible"),
    [
        ((), True),
        ((("a", "b"),), True),
        ((("a", None),), False),
        ((("a", "b", None),), True),
        ((("a", None, None),), False),
        ((("a", "b", None, None),), False),
        ((("a", "b"), ("a", None)), False),
    ],
)
def test_a_missing_node_counts_as_a_copy_that_does_not_answer(chains: tuple[Chain, ...], possible: bool) -> None:
    assert is_possible(chains) is possible


@pytest.mark.parametrize(
    ("chains", "acknowledged", "held"),
    [
        ((), {}, 10),
        ((("a", "b"),), {}, 0),
        ((("a", "b"),), {"b": 7}, 7),
        ((("a", "b"),), {"b": 99}, 10),
        ((("a", "b"),), {"stranger": 9}, 0),
        ((("a", "b", "c"),), {"b": 4, "c": 6}, 6),
        ((("a", "b", "c"),), {"b": 99, "c": 99}, 10),
        ((("a", "b", None),), {"b": 4}, 4),
        ((("a", "b", "c", "d"),), {"b": 4, "c": 6, "d": 2}, 4),
        ((("a", "b"), ("a", "c")), {"b": 8, "c": 3}, 3),
    ],
)
def test_what_a_majority_holds(chains: tuple[Chain, ...], acknowledged: dict[str, int], held: int) -> None:
    assert satisfied_seqno(chains, acknowledged, active_seqno=10) == held


NODES = ["a", "b", "c", "d"]
any_chain = st.lists(st.sampled_from([*NODES[1:], None]), min_size=1, max_size=3).map(
    lambda replicas: ("a", *dict.fromkeys(replicas))
)


@given(
    st.lists(any_chain, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(NODES[1:]), st.integers(0, 20)),
    st.integers(0, 20),
)
def test_any_minority_may_be_lost(chains: list[Chain], acknowledged: dict[str, int], active: int) -> None:
    """Whichever copies of a chain are lost, if fewer than a majority: one that is left holds what was satisfied."""
    held = satisfied_seqno(tuple(chains), acknowledged, active_seqno=active)
    for chain in chains:
        copies = [active, *(0 if node is None else acknowledged.get(node, 0) for node in chain[1:])]
        for survivors in itertools.combinations(copies, len(copies) - majority(chain) + 1):
            assert max(survivors) >= held, chain
