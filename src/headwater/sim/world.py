"""The world of one run, and the plan that a seed makes for it: hosts with nodes, the network between them, the
writes, and the complaints.

The actors (writers, consumers, faults, operators) receive the world. `run` makes them; the world knows none of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
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
from headwater.sim.network import BUCKET, PORT, Link, Process, SimulatedDisk, SimulatedFolder, SimulatedNetwork, Trace
from headwater.store.bucket import Bucket
from headwater.store.vbuckets import Retention

BUSY_S_MIN, BUSY_S_MAX = 2.0, 6.0
DRILLS_SHARE = 0.25
LANDING_SHARE = 0.2
STEPS_MAX = 400_000
"""The most steps of a run of the usual length, so that an endless run is detected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How large, busy and unlucky a run is. A seed determines it once, so that runs differ in kind.

    The weights are relative to the others of the same kind.
    """

    seed: int
    nodes: int
    replicas: int
    vbuckets: int
    busy_s: float
    """How long writes and faults continue, in simulated seconds."""
    keys_per_writer: int
    writers: int
    pipelined: int
    """How many writes a writer may have in progress at once."""
    writes: int
    """The approximate number of writes in all, if nothing delays the writers."""
    write_weights: dict[str, float] = field(hash=False)
    consumers: int
    landings: int = 0
    """Consumers that land the bucket batch by batch."""
    landing_every_s: tuple[float, ...] = (0.0, 0.1, 0.5)
    """The possible pauses between batches; each landing uses one of them."""
    hot_keys: int = 0
    """Keys that are rewritten with hardly a pause, each by its own lane."""
    hot_pause_s: float = 0.01
    """The mean pause between two writes of such a key."""
    fault_pause_s: float
    fault_weights: dict[str, float] = field(hash=False)
    retention: Retention
    compact_every_s: float
    expiry_every_s: float
    latency_s_max: float
    split_chance: float
    disk_delay_s_max: float

    @property
    def lanes(self) -> int:
        """How many writes of one writer are in progress at once."""
        return min(self.pipelined, self.keys_per_writer)

    @property
    def write_pause_s(self) -> float:
        """The mean pause between two writes of a lane."""
        return self.busy_s * self.writers * self.lanes / self.writes

    @property
    def steps_max(self) -> int:
        """The step limit of the run, in proportion to its length."""
        return int(STEPS_MAX * max(1.0, self.busy_s / BUSY_S_MAX))

    @classmethod
    def draw(cls, seed: int) -> RunPlan:
        """Return the plan of a seed. Most mix everything; some focus on one thing that a mixture rarely reaches."""
        lands = Random(f"landing/{seed}").random() < LANDING_SHARE
        return cls.landing(seed) if lands else cls._drawn(seed)

    @classmethod
    def _drawn(cls, seed: int) -> RunPlan:
        mixed = cls.mixture(seed)
        return mixed._about_drills() if Random(f"drills/{seed}").random() < DRILLS_SHARE else mixed

    @classmethod
    def landing(cls, seed: int) -> RunPlan:
        """Return the seed's plan with consumers that land, most of them under writers of hot keys.

        Only one other consumer is left, because consumers take most of the time of a run.
        """
        random = Random(f"landing plan/{seed}")
        return replace(
            cls._drawn(seed),
            consumers=1,
            landings=random.choice([1, 1, 2]),
            hot_keys=random.choice([0, 2, 4]),
            hot_pause_s=random.choice([0.01, 0.03]),
        )

    def _about_drills(self) -> RunPlan:
        """Return a plan with one node whose vbuckets are rolled back repeatedly, under consumers that are behind."""
        return replace(
            self,
            nodes=1,
            replicas=0,
            vbuckets=min(self.vbuckets, 2),
            keys_per_writer=5,
            writers=3,
            pipelined=8,
            writes=600,
            write_weights=self.write_weights | {"majority": 0.0, "persist": 0.0},
            consumers=3,
            fault_pause_s=0.4,
            fault_weights=dict.fromkeys(self.fault_weights, 0.0) | {"roll back": 3.0, "kill consumer": 1.0},
            retention=Retention(),
            compact_every_s=10.0,
        )

    @classmethod
    def mixture(cls, seed: int) -> RunPlan:
        """Return a plan in which anything may happen."""
        random = Random(f"plan/{seed}")
        nodes = random.choice([1, 1, 2, 3, 3, 4])
        replicas = 0 if nodes == 1 else random.randint(1, min(2, nodes - 1))
        forgets = random.random() < 0.4
        return cls(
            seed=seed,
            nodes=nodes,
            replicas=replicas,
            vbuckets=random.choice([1, 2, 2, 4, 8]),
            busy_s=random.uniform(BUSY_S_MIN, BUSY_S_MAX),
            keys_per_writer=random.choice([2, 5, 12]),
            writers=random.randint(1, 3),
            pipelined=random.choice([1, 1, 8]),
            writes=random.choice([150, 300, 600]),
            write_weights={
                "set": 1.0,
                "delete": random.choice([0.0, 0.2, 1.0]),
                "expire": random.choice([0.0, 0.0, 0.3]),
                "get": 0.1,
                "majority": random.choice([0.0, 0.5, 2.0]) if replicas else 0.0,
                "persist": random.choice([0.0, 0.5]) if replicas else 0.0,
            },
            consumers=random.randint(1, 3),
            fault_pause_s=random.choice([0.15, 0.4, 1.0]),
            fault_weights=_fault_weights(random, nodes) | _cluster_weights(seed, nodes),
            retention=Retention(history_s=1, history_bytes=random.choice([0, 400]), purge_age_s=1)
            if forgets
            else Retention(),
            compact_every_s=0.5 if forgets else random.choice([1.0, 10.0]),
            expiry_every_s=random.choice([0.5, 2.0]),
            latency_s_max=random.choice([0.0005, 0.005, 0.1]),
            split_chance=random.choice([0.0, 0.1, 0.6]),
            disk_delay_s_max=random.choice([0.0005, 0.002, 0.02]),
        )


def _fault_weights(random: Random, nodes: int) -> dict[str, float]:
    weights = {
        "settle": random.choice([0.5, 2.0]),
        "kill node": random.choice([0.0, 1.0, 2.0]),
        "stop node": random.choice([0.0, 0.5]),
        "roll back": random.choice([0.0, 2.0, 4.0]),
        "full disk": random.choice([0.0, 0.0, 1.0]),
        "slow disk": random.choice([0.0, 0.5]),
        "kill consumer": random.choice([0.5, 1.0]),
        "cut": random.choice([0.0, 1.0]),
        "cut one way": random.choice([0.0, 0.5]),
        "reset": random.choice([0.0, 1.0]),
        "slow link": random.choice([0.0, 0.5]),
        "create collection": random.choice([0.0, 0.5]),
        "drop collection": random.choice([0.0, 0.3]),
    }
    if nodes > 1:
        # A drill removes writes that a majority had, so most clusters have no drills.
        weights |= {"roll back": random.choice([0.0, 0.0, 1.0]), "fail over": random.choice([0.0, 1.0, 3.0])}
        weights |= {"rebalance": random.choice([0.0, 0.5])}
    return weights


def _cluster_weights(seed: int, nodes: int) -> dict[str, float]:
    """Draw the weights separately, so that the rest of a plan is the same as before these faults were added."""
    random = Random(f"cluster/{seed}")
    weights = {"two operators": random.choice([0.0, 0.0, 1.0, 2.0]), "hold replicas": random.choice([0.0, 0.0, 0.7])}
    return weights if nodes > 1 else dict.fromkeys(weights, 0.0)


# --- the world --------------------------------------------------------------------------------------------------------

_EPOCH_NS = 1_700_000_000_000_000_000
STOP_S_MAX = 60.0
RESTART_S = 0.3
USER, PASSWORD = "sim", "simulated"
COMPLAINTS_MAX = 50


@cache
def _users() -> Users:
    users = Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=SCRAM_ITERATIONS_MIN)
    return users.add(users.new_user(USER, PASSWORD, [Grant(Role.ADMIN)], salts=bytes(SALTS_BYTES)))


class World:
    """The environment of the actors. It knows none of them except its hosts."""

    def __init__(self, plan: RunPlan, *, keeps_trace: bool = False) -> None:
        self.plan = plan
        self.users = _users()
        self.trace = Trace(keeps_lines=keeps_trace)
        self.complaints: list[str] = []
        self.is_quiet = False
        """True once writes and faults have stopped, so that copies and consumers can catch up."""
        self.rows = 0
        self.writes = WriteLog()
        self.collections: dict[int, str] = {}
        """Ids and names of the existing collections, as known to the faults that change them."""
        self.failed_over: set[int] = set()
        """Vbuckets for which a failover may have removed writes that no majority had."""
        self.drilled: set[int] = set()
        """Vbuckets for which a drill may have removed any write."""
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
        """Return an actor's own random numbers, so that one more draw by an actor does not affect the others."""
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

    # --- where things are -----------------------------------------------------------------------------------------

    def active_host(self, vbucket: int) -> NodeHost | None:
        """Return the host on which the vbucket is active, or None if there is none, or more than one."""
        ready = (host for host in self.hosts if host.is_ready)
        found = [host for host in ready if host.bucket.vbuckets.states[vbucket] == VBucketState.ACTIVE]
        return found[0] if len(found) == 1 else None

    def active_bucket(self, vbucket: int) -> Bucket | None:
        host = self.active_host(vbucket)
        return None if host is None else host.bucket


# --- a host -----------------------------------------------------------------------------------------------------------


class NodeHost:
    """A host with a node on it, which can be started, stopped cleanly, killed, and restarted from the same disk."""

    def __init__(self, world: World, number: int, options: NodeOptions) -> None:
        self.name = f"node-{number}"
        self.host = options.host
        self.disk = SimulatedDisk(world.random_of(f"{self.name}/disk"), world.users)
        self.disk.delay_s_max = world.plan.disk_delay_s_max
        self.incarnations = 0
        self._world = world
        self._options = options
        self._clock_ns = _EPOCH_NS + world.random_of(f"{self.name}/clock").randrange(10**9)
        """The clocks of hosts differ."""
        self.process: Process
        self.node: Node
        """Both are set by each `start`."""

    @property
    def address(self) -> str:
        return f"{self.host}:{PORT}"

    @property
    def is_up(self) -> bool:
        return self.incarnations > 0 and self.process.is_alive

    @property
    def is_ready(self) -> bool:
        return self.is_up and self.node.is_ready

    @property
    def bucket(self) -> Bucket:
        return self.node.bucket_service(BUCKET).bucket

    def start(self) -> None:
        """Begin to start the node: `is_ready` becomes true when it has started."""
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
        self.process, self.node = process, node
        world.trace.note(name, "starts")
        process.run(world.loop, self._start(process, node), name="start")

    async def _start(self, process: Process, node: Node) -> None:
        try:
            await node.start()
        except StoreFull as error:
            self._world.trace.note(process.name, f"can't start: {error.reason}")
            # Its supervisor restarts it.
            self._world.loop.call_later(RESTART_S, self.start, context=self._world.director.context)
            process.kill()
            return
        self._world.trace.note(process.name, "is ready")

    def kill(self) -> None:
        if self.is_up:
            self._world.trace.note(self.process.name, "is killed")
            self.process.kill()

    async def stop(self) -> None:
        """Stop the node cleanly. The caller is another process."""
        if not self.is_ready:
            self.kill()
            return
        process = self.process
        self._world.trace.note(process.name, "stops")
        stopping = process.run(self._world.loop, self.node.stop(), name="stop")
        # With a timeout: the caller must not wait forever if the node is killed in the meantime.
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
