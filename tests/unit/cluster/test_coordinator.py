"""Which config counts when nodes have different ones."""

from __future__ import annotations

import pytest

from headwater.cluster.coordinator import FoundCluster, in_force
from headwater.errors import InvalidInput
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig

A, B, C = ("127.0.0.1:1000", "127.0.0.1:2000", "127.0.0.1:3000")


def config(revision: int, *members: str, by: str = "") -> PublishedConfig:
    nodes = tuple(NodeAddress(host="127.0.0.1", kv_port=int(name.split(":")[1])) for name in members)
    return PublishedConfig(revision=revision, bucket="b", uuid="0", nodes=nodes, rows=((0,),), coordinator=by)


def test_the_higher_revision_counts() -> None:
    old, new = config(1, A, B), config(2, A, B)
    assert in_force({A: old, B: new}) == new
    assert FoundCluster(config=new, by_node={A: old, B: new}).disagreeing == (), "the other one will hear of it"


def test_of_two_of_one_revision_any_counts_and_the_same_whoever_looks() -> None:
    one, other = config(2, A, B, C, by="1"), config(2, A, B, C, by="2")
    chosen = in_force({A: one, B: one, C: other})
    assert chosen == in_force({C: other, B: one, A: one}) == other
    assert FoundCluster(config=chosen, by_node={A: one, B: one, C: other}).disagreeing == (A, B)


@pytest.mark.parametrize("revision_of_lost", [2, 3])
def test_what_a_lost_node_was_told_alone_does_not_bring_it_back(revision_of_lost: int) -> None:
    """A failover has left it out; meanwhile another command got its config to that node and to no other."""
    without, alone = config(2, A, B), config(revision_of_lost, A, B, C, by="z")
    assert in_force({C: alone, A: without, B: without}) == without


def test_a_node_that_was_to_join_and_is_the_only_one_told_is_no_member() -> None:
    before, wider = config(1, A, B), config(2, A, B, C)
    found = {A: before, B: before, C: wider}
    assert in_force(found) == before
    assert FoundCluster(config=before, by_node=found).highest_revision == 2


def test_a_node_that_can_t_be_asked_has_no_say() -> None:
    old, new = config(1, A, B, C), config(2, A, B)
    assert in_force({A: new, C: old}) == new


@pytest.mark.parametrize("revisions", [(2, 2), (2, 3), (3, 2)])
def test_two_halves_that_go_on_without_each_other_are_not_one_cluster(revisions: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match="without the other"):
        in_force({A: config(revisions[0], A), B: config(revisions[1], B, by="z")})
