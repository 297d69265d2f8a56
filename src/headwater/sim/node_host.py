"""A host with a node on it: started, stopped in order, killed, and started again from the same disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from headwater.errors import StoreFull
from headwater.node.auth.users import Users
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions
from headwater.sim.processes import Process
from headwater.store.bucket import Bucket
from headwater.store.engine import Change, MemoryEngine

if TYPE_CHECKING:
    from headwater.sim.world import World

# The disk of a simulated host: it outlives the processes on it, can be slow, and can be full.
#
# A write is atomic and durable when it returns, as LMDB's are. A crash while one is under way leaves all of it or
# nothing: the event loop lets a write take effect at one moment, somewhat before its caller hears of it.


class SimulatedDisk:
    """All that a host keeps, but for what only processes know."""

    def __init__(self, random: Random, users: Users) -> None:
        self.random = random
        self.users = users
        self.delay_s_max = 0.002
        self.is_full = False
        self.writes = 0
        self.engines: dict[str, SimulatedEngine] = {}

    def delay_s(self) -> float:
        return self.random.uniform(0.00005, self.delay_s_max)

    def before_write(self) -> None:
        if self.is_full:
            raise StoreFull("the simulated disk is full", hint="Wait for the fault to end")
        self.writes += 1


class SimulatedFolder:
    """A node's folder on a simulated disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def __call__(self, data: Path) -> SimulatedFolder:
        """There is one folder on a disk, whatever its name."""
        return self

    def make(self) -> None:
        pass

    def bucket_names(self) -> list[str]:
        return sorted(self._disk.engines)

    def open_engine(self, bucket: str) -> SimulatedEngine:
        if bucket not in self._disk.engines:
            self._disk.engines[bucket] = SimulatedEngine(self._disk)
        return self._disk.engines[bucket]

    def disk_bytes(self, bucket: str) -> int:
        return 0

    def load_users(self) -> Users:
        return self._disk.users

    def store_users(self, users: Users) -> None:
        self._disk.users = users

    def store_password(self, password: str) -> None:
        raise AssertionError("simulated nodes are given their users")

    def forget_password(self) -> None:
        raise AssertionError("no password was generated")


class SimulatedEngine(MemoryEngine):
    """The tables of a bucket, as far as their disk takes them."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__()
        self._disk = disk

    def write(self, changes: Sequence[Change]) -> None:
        self._disk.before_write()
        super().write(changes)


PORT = 11210
BUCKET = "default"
_EPOCH_NS = 1_700_000_000_000_000_000
STOP_S_MAX = 60.0
RESTART_S = 0.3


@dataclass(slots=True)
class _Running:
    process: Process
    node: Node


class NodeHost:
    """See the module."""

    def __init__(self, world: World, number: int, options: NodeOptions) -> None:
        self.name = f"node-{number}"
        self.host = options.host
        self.disk = SimulatedDisk(world.random_of(f"{self.name}/disk"), world.users)
        self.disk.delay_s_max = world.plan.disk_delay_s_max
        self.incarnations = 0
        self._world = world
        self._options = options
        self._clock_ns = _EPOCH_NS + world.random_of(f"{self.name}/clock").randrange(10**9)
        """Clocks of hosts differ."""
        self._running: _Running | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{PORT}"

    @property
    def is_up(self) -> bool:
        return self._running is not None and self._running.process.is_alive

    @property
    def is_ready(self) -> bool:
        return self.is_up and self.node.is_ready

    @property
    def node(self) -> Node:
        assert self._running is not None
        return self._running.node

    @property
    def process(self) -> Process:
        assert self._running is not None
        return self._running.process

    @property
    def bucket(self) -> Bucket:
        return self.node.bucket_service(BUCKET).bucket

    def start(self) -> None:
        """Begin to start: `is_ready` tells when that is done."""
        if self.is_up:
            return
        self.incarnations += 1
        world, name = self._world, f"{self.name}.{self.incarnations}"
        random = world.random_of(name)
        process = Process(name, self.host, random=random, disk=self.disk.delay_s)
        process.on_killed.append(lambda: world.network.close_of(process))
        environment = NodeEnvironment(
            now_ns=lambda: self._clock_ns + int(world.loop.time() * 1e9),
            now_s=world.loop.time,
            random_bytes=random.randbytes,
            open_folder=SimulatedFolder(self.disk),
            end_process=lambda: world.complain(f"{name} ended itself"),
            serves_http=False,
        )
        node = process.context.run(Node, self._options, environment)
        self._running = _Running(process, node)
        world.trace.note(name, "starts")
        process.run(world.loop, self._start(process, node), name="start")

    async def _start(self, process: Process, node: Node) -> None:
        try:
            await node.start()
        except StoreFull as error:
            self._world.trace.note(process.name, f"can't start: {error.reason}")
            # Its supervisor tries again.
            self._world.loop.call_later(RESTART_S, self.start, context=self._world.director.context)
            process.kill()
            return
        self._world.trace.note(process.name, "is ready")

    def kill(self) -> None:
        if self.is_up:
            self._world.trace.note(self.process.name, "is killed")
            self.process.kill()

    async def stop(self) -> None:
        """In order, from the process of somebody else."""
        if not self.is_ready:
            self.kill()
            return
        process = self.process
        self._world.trace.note(process.name, "stops")
        stopping = process.run(self._world.loop, self.node.stop(), name="stop")
        # Whoever waits for a node must not wait for ever if that is killed meanwhile.
        await asyncio.wait([stopping], timeout=STOP_S_MAX)
        process.kill()


def node_options(host: str, *, world: World) -> NodeOptions:
    plan = world.plan
    return NodeOptions(
        data=Path("/simulated"),
        host=host,
        port=PORT,
        insecure=True,
        buckets=(BUCKET,),
        vbuckets=plan.vbuckets,
        retention=plan.retention,
        expiry_every_s=plan.expiry_every_s,
        compact_every_s=plan.compact_every_s,
    )


def random_name(random: Random) -> str:
    return f"c{random.getrandbits(32):08x}"
