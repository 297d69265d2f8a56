"""The operators of a simulated cluster: they make it, fail nodes over, take them back and rebalance, with the
production coordinator. An operator may die in the middle of its work, and another one does it again. Two may be at work
at the same time, and know nothing of each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headwater.client.connection_string import Address
from headwater.cluster.coordinator import Coordinator
from headwater.errors import HeadwaterError
from headwater.protocol.cluster_config import PublishedConfig
from headwater.sim.faults import Faults
from headwater.sim.machines import Process
from headwater.sim.world import BUCKET, PORT, NodeHost, World
from headwater.sim.writers import login_of

OPERATION_S_MAX = 40.0
RECOVERIES_MAX = 25
RECOVERY_PAUSE_S = 0.5
DEATH_CHANCE = 0.15
LATER_S_MAX = (0.0, 0.01, 0.5)
"""How much later than the first of two operators the second one may begin."""

Work = Callable[[Coordinator], Awaitable[Any]]


class Operators:
    """One operation at a time is what operators agree on, and do not always keep to."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults
        self._random = world.random_of("operators")
        self._operations = 0
        self._is_whole = True
        """No node was failed over since the last rebalance, so all copies are where they should be."""
        faults.add("fail over", self._fail_over)
        faults.add("rebalance", self._rebalance)
        faults.add("two operators", self._two_at_a_time)

    async def make_cluster(self) -> None:
        made = await self._operate("init", lambda coordinator: coordinator.init(replicas=self._world.plan.replicas))
        if made is None:
            self._world.complain("the cluster could not be made")

    async def recover(self) -> None:
        """All nodes run: take back those that were left out, and put every copy where it belongs."""
        for _ in range(RECOVERIES_MAX):
            if await self._operate("recover", self._take_back_and_rebalance) is not None:
                return
            await asyncio.sleep(RECOVERY_PAUSE_S)
        self._world.complain("the cluster could not be made whole again")

    async def _take_back_and_rebalance(self, coordinator: Coordinator) -> Any:
        status = await coordinator.status()
        members = {node.name for node in status.nodes}
        for host in self._world.hosts:
            if host.address not in members:
                await coordinator.add(Address(host.host, PORT), force=True)
        return await coordinator.rebalance()

    # --- faults ---------------------------------------------------------------------------------------------------

    async def _fail_over(self) -> None:
        """Fail a node over; where that has been done, make the cluster whole before it is done again.

        A second one before all copies are back may lose what a majority had, in any cluster.
        """
        if not self._is_whole:
            await self._rebalance()
            return
        host = await self._give_up_a_host()
        await self._operate("failover", lambda coordinator: coordinator.failover([host.address]))
        self._faults.after(self._random.uniform(0.1, 3.0), host.start)

    async def _give_up_a_host(self) -> NodeHost:
        """One that is dead, or lives and is believed to be dead."""
        host = self._random.choice(self._world.hosts)
        await self._let_copies_fall_behind(host)
        if self._random.random() < 0.7:
            host.kill()
        self._faults.note(f"{host.name} is failed over")
        self._world.failed_over.update(range(self._world.plan.vbuckets))
        self._is_whole = False
        return host

    async def _let_copies_fall_behind(self, host: NodeHost) -> None:
        """A failover takes something back only if the copies have not got all of it."""
        if self._random.random() < 0.4:
            return
        for other in self._world.hosts:
            if other is not host:
                self._world.network.cut(host.host, other.host)
        await asyncio.sleep(self._random.uniform(0.1, 2.0))
        self._faults.after(self._random.uniform(0.0, 1.0), self._world.network.restore)

    async def _rebalance(self) -> None:
        if await self._operate("rebalance", self._take_back_and_rebalance, may_die=True) is not None:
            self._is_whole = True

    async def _two_at_a_time(self) -> None:
        """Both rebalance, or one or both fail over the same node: two of them may lose what a majority had."""
        works: list[tuple[str, Work]] = [("rebalance", self._take_back_and_rebalance)] * 2
        if self._is_whole and self._random.random() < 0.7:
            lost = await self._give_up_a_host()
            for at in self._random.choice([(0,), (1,), (0, 1)]):
                works[at] = ("failover", lambda coordinator: coordinator.failover([lost.address]))
            self._faults.after(self._random.uniform(0.1, 3.0), lost.start)
        later_s = self._random.uniform(0.0, self._random.choice(LATER_S_MAX))
        first = asyncio.create_task(self._operate(*works[0], may_die=True))
        await asyncio.sleep(later_s)
        done = [await self._operate(*works[1], may_die=True), await first]
        if not any(name == "failover" for name, _ in works) and done != [None, None]:
            self._is_whole = True

    # --- one operation --------------------------------------------------------------------------------------------

    async def _operate(self, name: str, work: Work, *, may_die: bool = False) -> Any:
        """Do something in a process of its own. None where it was refused, took too long or died."""
        world = self._world
        self._operations += 1
        process = Process(f"operator.{self._operations}", "10.0.4.1", random=world.random_of(f"op/{self._operations}"))
        process.on_killed.append(lambda: world.network.close_of(process))
        world.trace.note(process.name, name)
        task = process.run(world.loop, self._work(process, work))
        dies = may_die and self._random.random() < DEATH_CHANCE
        await asyncio.wait([task], timeout=self._random.uniform(0.0, 0.5) if dies else OPERATION_S_MAX)
        if not task.done():
            world.trace.note(process.name, "is killed")
            process.kill()
            return None
        process.kill()
        if isinstance(task.exception(), HeadwaterError | TimeoutError):
            world.trace.note(process.name, f"failed: {task.exception()}")
            return None
        world.trace.note(process.name, "is done")
        return task.result()

    async def _work(self, process: Process, work: Work) -> Any:
        seeds = [Address(host.host, PORT) for host in self._world.hosts]
        coordinator = Coordinator(seeds, login_of(self._world.client_settings(), process.random))
        try:
            return await work(coordinator)
        finally:
            coordinator.close()


def config_of(host: NodeHost) -> PublishedConfig | None:
    """The config that a node acts by."""
    return host.node.membership(BUCKET).config
