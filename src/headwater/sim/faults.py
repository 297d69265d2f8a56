"""The faults of a busy run, and what operators do in the meantime. One table maps names to actions.

Operators form the cluster, fail nodes over, add them back and rebalance, using the production coordinator. An
operator may die in the middle of an operation, and another one repeats it. Two operators may work at the same time
without knowing of each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from headwater.client.connection_string import Address
from headwater.cluster.coordinator import Coordinator
from headwater.errors import HeadwaterError
from headwater.protocol.cluster_config import PublishedConfig
from headwater.protocol.manifest import DEFAULT_NAME, Manifest
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.sim.network import BUCKET, PORT, Process, login_of

if TYPE_CHECKING:
    from headwater.sim.consumers import AnyConsumer
    from headwater.sim.world import NodeHost, World

CALL_S_MAX = 10.0
COLLECTIONS_MAX = 3
INSIDE_LOOKS_MAX, INSIDE_LOOK_S = 40, 0.02
"""How often and how long to wait for a consumer to be in the middle of a snapshot."""


class Faults:
    """Runs random faults until it is stopped; `end` undoes those that can be undone."""

    def __init__(self, world: World, consumers: Sequence[AnyConsumer]) -> None:
        self._world = world
        self._consumers = consumers
        self._random: Random = world.random_of("faults")
        self._is_stopped = False
        self._later: list[asyncio.Task[None]] = []
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill node": self._kill_node,
            "stop node": self._stop_node,
            "settle": self._settle,
            "roll back": self._roll_back,
            "full disk": self._fill_disk,
            "slow disk": self._slow_disk,
            "hold replicas": self._hold_replicas,
            "kill consumer": self._kill_consumer,
            "cut": self._cut,
            "cut one way": self._cut_one_way,
            "reset": self._reset,
            "slow link": self._slow_link,
            "create collection": self._create_collection,
            "drop collection": self._drop_collection,
        }
        self.counts: dict[str, int] = {}

    def add(self, name: str, action: Callable[[], Awaitable[None]]) -> None:
        self._actions[name] = action

    async def run(self, until_s: float) -> None:
        plan, loop = self._world.plan, self._world.loop
        weights = {name: weight for name, weight in plan.fault_weights.items() if name in self._actions}
        while loop.time() < until_s and any(weights.values()):
            await asyncio.sleep(self._random.expovariate(1 / plan.fault_pause_s))
            name = self._random.choices(list(weights), list(weights.values()))[0]
            self.counts[name] = self.counts.get(name, 0) + 1
            await self._actions[name]()

    async def end(self) -> None:
        """Stop all faults. From now on everything works."""
        self._is_stopped = True
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)
        world = self._world
        world.network.restore()
        for host in world.hosts:
            host.disk.is_full = False
            host.disk.delay_s_max = world.plan.disk_delay_s_max
            host.start()
            self._release_replicas(host)
        for consumer in self._consumers:
            consumer.start()

    def note(self, what: str) -> None:
        self._world.trace.note("fault", what)

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        async def later() -> None:
            await asyncio.sleep(delay_s)
            action()

        self._later.append(asyncio.create_task(later()))

    async def call(self, host: NodeHost, what: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in a node's process. Returns None if the node refuses, or does not finish in time."""
        task = host.process.run(self._world.loop, what, name="call")
        done, _ = await asyncio.wait([task], timeout=CALL_S_MAX)
        if not done:
            return None
        try:
            return task.result()
        except HeadwaterError as error:
            self.note(f"{host.name} refused: {error}")
            return None

    # --- nodes and disks ------------------------------------------------------------------------------------------

    def ready_host(self) -> NodeHost | None:
        ready = [host for host in self._world.hosts if host.is_ready]
        return self._random.choice(ready) if ready else None

    async def _kill_node(self) -> None:
        host = self._random.choice(self._world.hosts)
        host.kill()
        self.after(self._random.uniform(0.05, 1.0), host.start)

    async def _stop_node(self) -> None:
        host = self.ready_host()
        if host is not None:
            await host.stop()
            self.after(self._random.uniform(0.05, 1.0), host.start)

    async def _fill_disk(self) -> None:
        disk = self._random.choice(self._world.hosts).disk
        disk.is_full = True
        self.note("a disk is full")
        self.after(self._random.uniform(0.1, 1.5), lambda: setattr(disk, "is_full", False))

    async def _slow_disk(self) -> None:
        disk = self._random.choice(self._world.hosts).disk
        disk.delay_s_max = 0.5
        self.note("a disk is slow")
        fast_s = self._world.plan.disk_delay_s_max
        self.after(self._random.uniform(0.3, 3.0), lambda: setattr(disk, "delay_s_max", fast_s))

    async def _hold_replicas(self) -> None:
        """A drill: a node stops accepting changes for its copies from other nodes."""
        host = self.ready_host()
        if host is not None:
            held = host.process.context.run(host.node.hold_replicas, BUCKET)
            self.note(f"{host.name} holds {held} copies back")
            self.after(self._random.uniform(0.2, 2.0), lambda: self._release_replicas(host))

    def _release_replicas(self, host: NodeHost) -> None:
        """Release the copies of a node. A node that has restarted holds none back."""
        if host.is_ready:
            host.process.context.run(host.node.release_replicas, BUCKET)

    async def _settle(self) -> None:
        """Make a node settle its commits into blocks, for which runs are too short otherwise.

        Only settled commits are ever compacted.
        """
        host = self.ready_host()
        if host is not None:
            service = host.node.bucket_service(BUCKET)
            host.process.context.run(service.when_at_rest, lambda: None)

    async def _roll_back(self) -> None:
        """A drill: roll back a vbucket, most often close to a consumer's offset, where errors are most likely."""
        world, random = self._world, self._random
        vbucket, to_seqno, consumer = await self._seqno_to_go_back_to()
        host = world.active_host(vbucket)
        if host is None:
            return
        if consumer is not None:
            consumer.kill()
            self.after(random.uniform(0.05, 0.5), consumer.start)
        high = host.bucket.vbuckets.high_seqno(vbucket)
        to_seqno = high - random.randrange(12) if to_seqno is None else to_seqno
        to_seqno = min(max(0, to_seqno), high)
        world.drilled.add(vbucket)
        self.note(f"vbucket {vbucket} is rolled back from {high} to {to_seqno}")
        await self.call(host, host.node.roll_back(BUCKET, VBucketId(vbucket), Seqno(to_seqno)))

    async def _seqno_to_go_back_to(self) -> tuple[int, int | None, AnyConsumer | None]:
        """Return a vbucket, and a consumer's position in it: preferably inside a snapshot, if one gets there soon."""
        random, vbuckets = self._random, self._world.plan.vbuckets
        if random.random() < 0.3:
            return random.randrange(vbuckets), None, None
        if random.random() < 0.8:
            for _ in range(INSIDE_LOOKS_MAX):
                inside = [known for known in self._consumers_offsets() if not known[1].is_complete]
                if inside:
                    vbucket, offset, consumer = random.choice(inside)
                    return vbucket, random.randrange(int(offset.seqno), int(offset.snapshot_end)), consumer
                await asyncio.sleep(INSIDE_LOOK_S)
        known = self._consumers_offsets()
        if known:
            vbucket, offset, consumer = random.choice(known)
            return vbucket, int(offset.seqno) + random.randint(-3, 2), consumer
        return random.randrange(vbuckets), None, None

    def _consumers_offsets(self) -> list[tuple[int, StreamOffset, AnyConsumer]]:
        return [
            (vbucket, offset, consumer)
            for consumer in self._consumers
            if consumer.offsets is not None
            for vbucket, offset in consumer.offsets.offsets.items()
        ]

    async def _kill_consumer(self) -> None:
        consumer = self._random.choice(self._consumers)
        consumer.kill()
        self.after(self._random.uniform(0.0, 1.5), consumer.start)

    # --- the network ----------------------------------------------------------------------------------------------

    def _two_hosts(self) -> tuple[str, str]:
        world = self._world
        node = self._random.choice(world.hosts).host
        others = [host.host for host in world.hosts if host.host != node] * 3
        others += [consumer.host for consumer in self._consumers]
        return node, self._random.choice(others)

    async def _cut(self) -> None:
        one, other = self._two_hosts()
        self.note(f"{one} and {other} are cut off from each other")
        self._world.network.cut(one, other)
        self._world.network.cut(other, one)
        self.after(self._random.uniform(0.1, 2.0), self._world.network.restore)

    async def _cut_one_way(self) -> None:
        one, other = self._random.sample(self._two_hosts(), 2)
        self.note(f"nothing gets from {one} to {other}")
        self._world.network.cut(one, other)
        self.after(self._random.uniform(0.1, 2.0), self._world.network.restore)

    async def _reset(self) -> None:
        broken = self._world.network.reset_some(self._random.choice([0.2, 1.0]))
        self.note(f"{broken} connections are reset")

    async def _slow_link(self) -> None:
        one, other = self._random.sample(self._two_hosts(), 2)
        link = self._world.network.link(one, other)
        was = link.bytes_per_s
        link.bytes_per_s = self._random.choice([5_000.0, 50_000.0])
        self.note(f"the link from {one} to {other} is slow")
        self.after(self._random.uniform(0.5, 3.0), lambda: setattr(link, "bytes_per_s", was))

    # --- collections ----------------------------------------------------------------------------------------------

    async def _create_collection(self) -> None:
        host, collections = self.ready_host(), self._world.collections
        if host is None or len(collections) >= COLLECTIONS_MAX:
            return
        name = f"c{self._random.getrandbits(32):08x}"
        manifest = await self._change_manifest(host, lambda known: known.with_collection(DEFAULT_NAME, name))
        created = None if manifest is None else manifest.find(DEFAULT_NAME, name)
        if created is not None:
            collections[int(created.id)] = name
            self.note(f"collection {created.id:x} is created")

    async def _drop_collection(self) -> None:
        host, collections = self.ready_host(), self._world.collections
        if host is None or not collections:
            return
        dropped = list(collections)[self._random.randrange(len(collections))]
        name = collections.pop(dropped)
        self.note(f"collection {dropped:x} is dropped")
        await self._change_manifest(host, lambda known: known.without_collection(DEFAULT_NAME, name))

    async def _change_manifest(self, host: NodeHost, change: Callable[[Manifest], Manifest]) -> Manifest | None:
        manifest = await self.call(host, host.node.change_manifest(BUCKET, change))
        assert manifest is None or isinstance(manifest, Manifest)
        return manifest


# --- operators --------------------------------------------------------------------------------------------------------

OPERATION_S_MAX = 40.0
RECOVERIES_MAX = 25
RECOVERY_PAUSE_S = 0.5
DEATH_CHANCE = 0.15
LATER_S_MAX = (0.0, 0.01, 0.5)
"""The longest delay between the starts of two concurrent operators."""

Work = Callable[[Coordinator], Awaitable[Any]]


class Operators:
    """Operators are supposed to run one operation at a time, but do not always do so."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults
        self._random = world.random_of("operators")
        self._operations = 0
        self._is_whole = True
        """Whether no node was failed over since the last rebalance, so that all copies are where they should be."""
        faults.add("fail over", self._fail_over)
        faults.add("rebalance", self._rebalance)
        faults.add("two operators", self._two_at_a_time)

    async def make_cluster(self) -> None:
        made = await self._operate("init", lambda coordinator: coordinator.init(replicas=self._world.plan.replicas))
        if made is None:
            self._world.complain("the cluster could not be made")

    async def recover(self) -> None:
        """With all nodes running, add back those that were left out, and put every copy where it belongs."""
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
        """Fail a node over, or rebalance if the cluster is not whole since the last failover.

        A second failover before all copies are restored may lose writes that a majority had, in any cluster.
        """
        if not self._is_whole:
            await self._rebalance()
            return
        host = await self._give_up_a_host()
        await self._operate("failover", lambda coordinator: coordinator.failover([host.address]))
        self._faults.after(self._random.uniform(0.1, 3.0), host.start)

    async def _give_up_a_host(self) -> NodeHost:
        """Choose a host to fail over: one that is dead, or one that is alive but believed to be dead."""
        host = self._random.choice(self._world.hosts)
        await self._let_copies_fall_behind(host)
        if self._random.random() < 0.7:
            host.kill()
        self._faults.note(f"{host.name} is failed over")
        self._world.failed_over.update(range(self._world.plan.vbuckets))
        self._is_whole = False
        return host

    async def _let_copies_fall_behind(self, host: NodeHost) -> None:
        """Cut links, so that copies miss changes: only then does a failover take something back."""
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
        """Run two: both rebalance, or one or both fail over one node, as failing over two may lose majority writes."""
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
        """Run an operation in its own process. Returns None if it was refused, took too long or died."""
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
    """Return the config that a node uses."""
    return host.node.membership(BUCKET).config
