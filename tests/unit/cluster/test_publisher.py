"""Publishing: nobody waits for ever, whatever becomes of a change or of a node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headwater.cluster import publisher as module
from headwater.cluster.publisher import Publisher
from headwater.errors import HeadwaterError, Overtaken
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
    return Publisher(config, lambda name: ports[name], seen=[CONFIG])  # type: ignore[arg-type, return-value]


def a_cluster() -> dict[str, Port]:
    return {node.kv_address: Port() for node in NODES}


def between_two() -> dict[str, Port]:
    """Each of two coordinators is first at one of the nodes."""
    return {node.kv_address: Port(far_from=far) for node, far in zip(NODES, ("one", "other"), strict=True)}


def broken(config: PublishedConfig) -> PublishedConfig:
    raise KeyError("no such node")


def test_a_change_that_fails_leaves_nobody_waiting() -> None:
    async def story() -> None:
        ports = a_cluster()
        publisher = publisher_of(ports)
        first = publisher.publish(lambda config: config)
        results = await asyncio.gather(
            first, publisher.publish(broken), publisher.publish(lambda config: config), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), KeyError, KeyError]
        await publisher.publish(lambda config: replace(config, settled=True))
        assert all(port.taken[-1].settled for port in ports.values())

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_lost_node_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(module, "LOST_S_MAX", 0.01)
        ports = {NODES[0].kv_address: Port(), NODES[1].kv_address: Port(is_deaf=True)}
        publisher = publisher_of(ports)
        publisher.may_miss(frozenset({NODES[1].kv_address}))
        await publisher.publish(lambda config: config)
        assert [config.revision for config in ports[NODES[0].kv_address].taken] == [1, 2]

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_change_may_raise_the_revision_beyond_the_next() -> None:
    """A node that joins has clients that know a higher one."""

    async def story() -> None:
        ports = a_cluster()
        publisher = publisher_of(ports)
        await publisher.publish(lambda config: replace(config, revision=70))
        await publisher.publish(lambda config: config)
        assert [[config.revision for config in port.taken] for port in ports.values()] == [[1, 71, 72]] * 2

    asyncio.run(asyncio.wait_for(story(), 5))


# --- two at a time ------------------------------------------------------------------------------------------------


def by(coordinator: str) -> PublishedConfig:
    return replace(CONFIG, coordinator=coordinator)


def test_nothing_is_sent_to_anybody_once_a_node_has_another_s_config() -> None:
    async def story() -> None:
        ports = a_cluster()
        ours, theirs = publisher_of(ports), by("theirs")
        ports[NODES[1].kv_address].taken.append(replace(theirs, revision=2))
        with pytest.raises(Overtaken, match=r"has its config 2.*cluster status"):
            await ours.publish(lambda config: config)
        assert [len(port.taken) for port in ports.values()] == [1, 2]

    asyncio.run(asyncio.wait_for(story(), 5))


def test_two_that_publish_at_the_same_moment_never_both_succeed() -> None:
    """Every node tells both that nothing has changed. Then each is first at one of the nodes."""

    async def story() -> None:
        ports = between_two()
        publishers = [publisher_of(ports, by(name)) for name in ("one", "other")]
        changed = [publisher.publish(lambda config: config) for publisher in publishers]
        results = await asyncio.gather(*changed, return_exceptions=True)
        assert [type(result) for result in results] == [Overtaken, Overtaken]
        assert [port.taken[-1].coordinator for port in ports.values()] == ["other", "one"]
        # The next one finds both, and replaces both.
        seen = [port.taken[-1] for port in ports.values()]
        healer = Publisher(by("third"), lambda name: ports[name], seen=seen)  # type: ignore[arg-type, return-value]
        await healer.publish(lambda config: replace(config, revision=2))
        assert [port.taken[-1] for port in ports.values()] == [healer.config] * 2

    asyncio.run(asyncio.wait_for(story(), 5))


def test_one_that_was_overtaken_stays_so() -> None:
    """Its next revision would be high enough to be taken, and would undo what the other one has done."""

    async def story() -> None:
        ports = a_cluster()
        ours = publisher_of(ports, by("ours"))
        ports[NODES[0].kv_address].taken.append(replace(by("theirs"), revision=2))
        results = await asyncio.gather(*(ours.publish(lambda config: config) for _ in range(3)), return_exceptions=True)
        results += await asyncio.gather(ours.publish(lambda config: config), return_exceptions=True)
        assert [type(result) for result in results] == [Overtaken] * 4

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_node_that_leaves_does_not_keep_what_another_has_told_it_alone() -> None:
    async def story() -> None:
        ports = a_cluster()
        stays, leaves = ports.values()
        ours = publisher_of(ports, by("ours"))
        ours.may_miss(frozenset({NODES[1].kv_address}))
        leaves.taken.append(replace(by("theirs"), revision=7))
        await ours.publish(lambda config: config)
        assert stays.taken[-1] == leaves.taken[-1] == ours.config
        assert ours.config.revision == 8

    asyncio.run(asyncio.wait_for(story(), 5))


def test_two_that_give_up_each_other_s_node_do_not_both_go_on() -> None:
    async def story() -> None:
        ports = between_two()
        publishers = [publisher_of(ports, by(name)) for name in ("one", "other")]
        for publisher, lost in zip(publishers, NODES, strict=True):
            publisher.may_miss(frozenset({lost.kv_address}))
        results = await asyncio.gather(
            *(publisher.publish(lambda config: config) for publisher in publishers), return_exceptions=True
        )
        assert sum(isinstance(result, Overtaken) for result in results) >= 1

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_node_that_has_forgotten_the_cluster_is_told_nothing() -> None:
    """Its vbuckets are empty, and it would be the active one of them."""

    class Forgetful(Port):
        async def config(self) -> PublishedConfig | None:
            return None

    async def story() -> None:
        ports = {**a_cluster(), NODES[1].kv_address: Forgetful()}
        with pytest.raises(HeadwaterError, match="another data folder"):
            await publisher_of(ports).publish(lambda config: config)
        assert [len(port.taken) for port in ports.values()] == [1, 1]

    asyncio.run(asyncio.wait_for(story(), 5))
