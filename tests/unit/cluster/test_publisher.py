"""Publishing: nobody waits for ever, whatever becomes of a change or of a node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headwater.cluster import nodes as module
from headwater.cluster.coordinator import FoundCluster, in_force
from headwater.cluster.nodes import Publisher
from headwater.errors import HeadwaterError, InvalidInput, Overtaken
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig

NODES = tuple(NodeAddress(host="127.0.0.1", kv_port=port) for port in (1000, 2000))
CONFIG = PublishedConfig(revision=1, bucket="b", uuid="0", nodes=NODES, rows=((0,), (1,)))


class Port:
    """Stands for a node: takes a config that is newer. One that is deaf answers never, one that is far away late."""

    def __init__(self, *, is_deaf: bool = False, far_from: str | None = None) -> None:
        self.taken: list[PublishedConfig] = [CONFIG]
        self._is_deaf = is_deaf
        self._far_from = far_from

    async def config(self) -> PublishedConfig | None:
        await asyncio.sleep(0)
        return self.taken[-1]

    async def publish(self, config: PublishedConfig) -> None:
        if self._is_deaf:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01 if config.coordinator == self._far_from else 0)
        if config.version <= self.taken[-1].version and config != self.taken[-1]:
            raise Overtaken("a node", revision=self.taken[-1].revision)
        self.taken.append(config)


def publisher_of(ports: dict[str, Port], config: PublishedConfig = CONFIG) -> Publisher:
    return Publisher(config, lambda name: ports[name], seen=[CONFIG])


def a_cluster() -> dict[str, Port]:
    return {node.kv_address: Port() for node in NODES}


def between_two() -> dict[str, Port]:
    """Each of two coordinators is first at one of the nodes."""
    return {node.kv_address: Port(far_from=far) for node, far in zip(NODES, ("one", "other"), strict=True)}


def broken(config: PublishedConfig) -> PublishedConfig:
    raise KeyError("no such node")


async def test_a_change_that_fails_leaves_nobody_waiting() -> None:
    ports = a_cluster()
    publisher = publisher_of(ports)
    first = publisher.publish(lambda config: config)
    results = await asyncio.gather(
        first, publisher.publish(broken), publisher.publish(lambda config: config), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), KeyError, KeyError]
    await publisher.publish(lambda config: replace(config, settled=True))
    assert all(port.taken[-1].settled for port in ports.values())


async def test_a_lost_node_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOST_S_MAX", 0.01)
    ports = {NODES[0].kv_address: Port(), NODES[1].kv_address: Port(is_deaf=True)}
    publisher = publisher_of(ports)
    publisher.may_miss(frozenset({NODES[1].kv_address}))
    await publisher.publish(lambda config: config)
    assert [config.revision for config in ports[NODES[0].kv_address].taken] == [1, 2]


async def test_a_change_may_raise_the_revision_beyond_the_next() -> None:
    """A node that joins has clients that know a higher one."""
    ports = a_cluster()
    publisher = publisher_of(ports)
    await publisher.publish(lambda config: replace(config, revision=70))
    await publisher.publish(lambda config: config)
    assert [[config.revision for config in port.taken] for port in ports.values()] == [[1, 71, 72]] * 2


# --- two at a time ------------------------------------------------------------------------------------------------


def by(coordinator: str) -> PublishedConfig:
    return replace(CONFIG, coordinator=coordinator)


async def test_nothing_is_sent_to_anybody_once_a_node_has_another_s_config() -> None:
    ports = a_cluster()
    ours, theirs = publisher_of(ports), by("theirs")
    ports[NODES[1].kv_address].taken.append(replace(theirs, revision=2))
    with pytest.raises(Overtaken, match=r"has its config 2.*cluster status"):
        await ours.publish(lambda config: config)
    assert [len(port.taken) for port in ports.values()] == [1, 2]


async def test_two_that_publish_at_the_same_moment_never_both_succeed() -> None:
    """Every node tells both that nothing has changed. Then each is first at one of the nodes."""
    ports = between_two()
    publishers = [publisher_of(ports, by(name)) for name in ("one", "other")]
    changed = [publisher.publish(lambda config: config) for publisher in publishers]
    results = await asyncio.gather(*changed, return_exceptions=True)
    assert [type(result) for result in results] == [Overtaken, Overtaken]
    assert [port.taken[-1].coordinator for port in ports.values()] == ["other", "one"]
    # The next one finds both, and replaces both.
    seen = [port.taken[-1] for port in ports.values()]
    healer = Publisher(by("third"), lambda name: ports[name], seen=seen)
    await healer.publish(lambda config: replace(config, revision=2))
    assert [port.taken[-1] for port in ports.values()] == [healer.config] * 2


async def test_one_that_was_overtaken_stays_so() -> None:
    """Its next revision would be high enough to be taken, and would undo what the other one has done."""
    ports = a_cluster()
    ours = publisher_of(ports, by("ours"))
    ports[NODES[0].kv_address].taken.append(replace(by("theirs"), revision=2))
    results = await asyncio.gather(*(ours.publish(lambda config: config) for _ in range(3)), return_exceptions=True)
    results += await asyncio.gather(ours.publish(lambda config: config), return_exceptions=True)
    assert [type(result) for result in results] == [Overtaken] * 4


async def test_a_node_that_leaves_does_not_keep_what_another_has_told_it_alone() -> None:
    ports = a_cluster()
    stays, leaves = ports.values()
    ours = publisher_of(ports, by("ours"))
    ours.may_miss(frozenset({NODES[1].kv_address}))
    leaves.taken.append(replace(by("theirs"), revision=7))
    await ours.publish(lambda config: config)
    assert stays.taken[-1] == leaves.taken[-1] == ours.config
    assert ours.config.revision == 8


async def test_two_that_give_up_each_other_s_node_do_not_both_go_on() -> None:
    ports = between_two()
    publishers = [publisher_of(ports, by(name)) for name in ("one", "other")]
    for publisher, lost in zip(publishers, NODES, strict=True):
        publisher.may_miss(frozenset({lost.kv_address}))
    results = await asyncio.gather(
        *(publisher.publish(lambda config: config) for publisher in publishers), return_exceptions=True
    )
    assert sum(isinstance(result, Overtaken) for result in results) >= 1


async def test_a_node_that_has_forgotten_the_cluster_is_told_nothing() -> None:
    """Its vbuckets are empty, and it would be the active one of them."""

    class Forgetful(Port):
        async def config(self) -> PublishedConfig | None:
            return None

    ports = {**a_cluster(), NODES[1].kv_address: Forgetful()}
    with pytest.raises(HeadwaterError, match="another data folder"):
        await publisher_of(ports).publish(lambda config: config)
    assert [len(port.taken) for port in ports.values()] == [1, 1]


# --- which config counts when nodes have different ones ---------------------------------------------------------------

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
