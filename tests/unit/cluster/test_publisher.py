"""Publishing: nobody waits for ever, whatever becomes of a change or of a node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headwater.cluster import publisher as module
from headwater.cluster.publisher import Publisher
from headwater.node.cluster_config import NodeAddress
from headwater.node.published_config import PublishedConfig

NODES = tuple(NodeAddress(host="127.0.0.1", kv_port=port) for port in (1000, 2000))
CONFIG = PublishedConfig(revision=1, bucket="b", uuid="0", nodes=NODES, rows=((0,), (1,)))


class Port:
    """Stands for a node. One that is deaf answers never."""

    def __init__(self, *, is_deaf: bool = False) -> None:
        self.taken: list[PublishedConfig] = []
        self._is_deaf = is_deaf

    async def publish(self, config: PublishedConfig) -> None:
        if self._is_deaf:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.taken.append(config)


def broken(config: PublishedConfig) -> PublishedConfig:
    raise KeyError("no such node")


def test_a_change_that_fails_leaves_nobody_waiting() -> None:
    async def story() -> None:
        port = Port()
        publisher = Publisher(CONFIG, lambda name: port)  # type: ignore[arg-type, return-value]
        first = publisher.publish(lambda config: config)
        results = await asyncio.gather(
            first, publisher.publish(broken), publisher.publish(lambda config: config), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), KeyError, KeyError]
        await publisher.publish(lambda config: replace(config, settled=True))
        assert port.taken[-1].settled

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_lost_node_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(module, "LOST_S_MAX", 0.01)
        ports = {NODES[0].kv_address: Port(), NODES[1].kv_address: Port(is_deaf=True)}
        publisher = Publisher(CONFIG, lambda name: ports[name])  # type: ignore[arg-type, return-value]
        publisher.may_miss(frozenset({NODES[1].kv_address}))
        await publisher.publish(lambda config: config)
        assert [config.revision for config in ports[NODES[0].kv_address].taken] == [2]

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_change_may_raise_the_revision_beyond_the_next() -> None:
    """A node that joins has clients that know a higher one."""

    async def story() -> None:
        port = Port()
        publisher = Publisher(CONFIG, lambda name: port)  # type: ignore[arg-type, return-value]
        await publisher.publish(lambda config: replace(config, revision=70))
        await publisher.publish(lambda config: config)
        assert {config.revision for config in port.taken} == {71, 72}

    asyncio.run(asyncio.wait_for(story(), 5))
