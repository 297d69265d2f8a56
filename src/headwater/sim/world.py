"""The world of one run: hosts with nodes, the network between them, what was written, and what was found wrong.

The actors (writers, consumers, faults, operators) are given the world; `run` makes them, and the world knows none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.errors import StoreFull
from headwater.node.auth.users import DECOY_SECRET_BYTES, SALTS_BYTES, Grant, Role, Users
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.sasl import SCRAM_ITERATIONS_MIN, Mechanism
from headwater.sim.checkers import StreamTap, WriteLog
from headwater.sim.event_loop import SimulatedLoop
from headwater.sim.machines import Process, SimulatedDisk, SimulatedFolder, Trace
from headwater.sim.network import Link, SimulatedNetwork
from headwater.sim.plan import RunPlan
from headwater.store.bucket import Bucket

PORT = 11210
BUCKET = "default"
_EPOCH_NS = 1_700_000_000_000_000_000
STOP_S_MAX = 60.0
RESTART_S = 0.3
USER, PASSWORD = "sim", "simulated"
COMPLAINTS_MAX = 50
OTHER_COLLECTION_CHANCE = 0.3


@cache
def _users() -> Users:
    users = Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=SCRAM_ITERATIONS_MIN)
    return users.add(users.new_user(USER, PASSWORD, [Grant(Role.ADMIN)], salts=bytes(SALTS_BYTES)))


class Collections:
    """The collections that exist, as known to the faults that change them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.names: dict[int, str] = {}

    def choose(self, random: Random) -> int:
        if self.ids and random.random() < OTHER_COLLECTION_CHANCE:
            return random.choice(self.ids)
        return 0


class World:
    """What actors act on and in. It knows none of them but its hosts."""

    def __init__(self, plan: RunPlan, *, keeps_trace: bool = False) -> None:
        self.plan = plan
        self.users = _users()
        self.trace = Trace(keeps_lines=keeps_trace)
        self.complaints: list[str] = []
        self.is_quiet = False
        """No more writes and faults: what is to be equal in the end may become so."""
        self.rows = 0
        self.writes = WriteLog()
        self.collections = Collections()
        self.failed_over: set[int] = set()
        """Vbuckets of which a failover may have taken what no majority had."""
        self.drilled: set[int] = set()
        """Vbuckets of which a drill may have taken anything."""
        self.network = SimulatedNetwork(self.random_of("network"), self.trace)
        self.network.new_link = self._new_link
        self.loop = SimulatedLoop(self.network, steps_max=plan.steps_max)  # type: ignore[abstract]
        self.trace.now_s = self.loop.time
        self.tap = StreamTap(self.complain)
        self.network.taps.append(self.tap)
        self.director = Process("director", "10.0.3.1", random=self.random_of("director"))
        self.hosts = [
            NodeHost(self, number, node_options(f"10.0.0.{number}", world=self)) for number in range(1, plan.nodes + 1)
        ]

    def random_of(self, name: str) -> Random:
        """Each actor's own dice, so that one more throw of one actor changes no other's luck."""
        return Random(f"{self.plan.seed}/{name}")

    def _new_link(self) -> Link:
        plan = self.plan
        return Link(
            latency_s_min=min(0.0001, plan.latency_s_max / 2),
            latency_s_max=plan.latency_s_max,
            split_chance=plan.split_chance,
        )

    def client_settings(self) -> ClientSettings:
        hosts = ",".join(f"{host.host}:{PORT}" for host in self.hosts)
        return ClientSettings.make(
            f"couchbase://{hosts}/{BUCKET}",
            user=USER,
            password=PASSWORD,
            mechanism=Mechanism.SCRAM_SHA1,
            timeouts=Timeouts(connect_s=1.0, answer_s=4.0),
        )

    def complain(self, what: str) -> None:
        if len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.append(what)
            self.trace.note("CHECKER", what)

    def count_rows(self, rows: int) -> None:
        self.rows += rows

    # --- where things are -----------------------------------------------------------------------------------------

    def active_host(self, vbucket: int) -> NodeHost | None:
        """The host whose node has the vbucket active; None while there is none, or more than one."""
        found = [
            host for host in self.hosts if host.is_ready and host.bucket.vbuckets.states[vbucket] == VBucketState.ACTIVE
        ]
        return found[0] if len(found) == 1 else None

    def active_bucket(self, vbucket: int) -> Bucket | None:
        host = self.active_host(vbucket)
        return None if host is None else host.bucket


# --- a host -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    process: Process
    node: Node


class NodeHost:
    """A host with a node on it: started, stopped in order, killed, and started again from the same disk."""

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
        """Begin to start: `is_ready` says when that is done."""
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
        """In order. Another process calls it."""
        if not self.is_ready:
            self.kill()
            return
        process = self.process
        self._world.trace.note(process.name, "stops")
        stopping = process.run(self._world.loop, self.node.stop(), name="stop")
        # The caller must not wait for ever if the node is killed meanwhile.
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
        scrub_bytes_per_s=0,
    )
