"""Everything that is in one run: hosts with nodes, writers, consumers, the network, and what was found wrong."""

from __future__ import annotations

from functools import cache
from random import Random

from headwater.client.client_settings import ClientSettings
from headwater.client.kv_connection import Timeouts
from headwater.node.auth.users import DECOY_SECRET_BYTES, SALTS_BYTES, Grant, Role, Users
from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.sasl import SCRAM_ITERATIONS_MIN, Mechanism
from headwater.sim.consumers import AnyConsumer, Consumer, Mutant
from headwater.sim.event_loop import SimulatedLoop
from headwater.sim.landing_consumer import LandingConsumer, LandingMutant
from headwater.sim.landing_judge import BucketTruth
from headwater.sim.network import Link, Network
from headwater.sim.node_host import BUCKET, PORT, NodeHost, node_options
from headwater.sim.plan import RunPlan
from headwater.sim.processes import Process
from headwater.sim.stream_tap import StreamTap
from headwater.sim.trace import Trace
from headwater.sim.write_log import WriteLog
from headwater.sim.writers import Writer

USER, PASSWORD = "sim", "simulated"
COMPLAINTS_MAX = 50
OTHER_COLLECTION_CHANCE = 0.3


@cache
def _users() -> Users:
    users = Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=SCRAM_ITERATIONS_MIN)
    return users.add(users.new_user(USER, PASSWORD, [Grant(Role.ADMIN)], salts=bytes(SALTS_BYTES)))


class Collections:
    """The collections there are, as those know them who change them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.names: dict[int, str] = {}

    def choose(self, random: Random) -> int:
        if self.ids and random.random() < OTHER_COLLECTION_CHANCE:
            return random.choice(self.ids)
        return 0


class World:
    """See the module."""

    def __init__(
        self, plan: RunPlan, *, mutant: Mutant | LandingMutant | None = None, keeps_trace: bool = False
    ) -> None:
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
        self.network = Network(self.random_of("network"), self.trace)
        self.network.new_link = self._new_link
        self.loop = SimulatedLoop(self.network, steps_max=plan.steps_max)  # type: ignore[abstract]
        self.trace.now_s = self.loop.time
        self.tap = StreamTap(self.complain)
        self.network.taps.append(self.tap)
        self.director = Process("director", "10.0.3.1", random=self.random_of("director"))
        self.hosts = [
            NodeHost(self, number, node_options(f"10.0.0.{number}", world=self)) for number in range(1, plan.nodes + 1)
        ]
        self.writers = [Writer(self, number) for number in range(1, plan.writers + 1)]
        self.writers += [Writer(self, 1, is_hot=True)] if plan.hot_keys else []
        following = mutant if isinstance(mutant, Mutant) else None
        landing = mutant if isinstance(mutant, LandingMutant) else None
        self.truth = BucketTruth(self)
        self.landings = [LandingConsumer(self, number, landing) for number in range(1, plan.landings + 1)]
        self.consumers: list[AnyConsumer] = [
            *(Consumer(self, number, following) for number in range(1, plan.consumers + 1)),
            *self.landings,
        ]

    def random_of(self, name: str) -> Random:
        """Everyone's own dice, so that one who throws once more changes nobody else's luck."""
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
