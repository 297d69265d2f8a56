"""Everything that is in one run: hosts with nodes, writers, consumers, the network, and what was found wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.node.auth.users import DECOY_SECRET_BYTES, SALTS_BYTES, Grant, Role, Users
from headwater.protocol.features import WITH_COLLECTIONS, Magic, Opcode
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import SnapshotMarker
from headwater.protocol.messages.dcp_streams import StreamRequest, VBucketState
from headwater.protocol.sasl import SCRAM_ITERATIONS_MIN, Mechanism
from headwater.protocol.status import Status
from headwater.sim.checkers import WriteLog
from headwater.sim.consumers import AnyConsumer, Consumer, Mutant
from headwater.sim.event_loop import SimulatedLoop
from headwater.sim.landing_consumer import LandingConsumer, LandingMutant
from headwater.sim.landing_judge import BucketTruth
from headwater.sim.network import Link, Network, Tap
from headwater.sim.node_host import BUCKET, PORT, NodeHost, node_options
from headwater.sim.plan import RunPlan
from headwater.sim.processes import Process, Trace
from headwater.sim.writers import Writer

# Looks at every DCP stream on the simulated network, frame by frame, with the typed codec.
#
# * A change lies inside the snapshot that was announced last, and seqnos rise from one change to the next.
# * A snapshot begins where the stream has come to, and does not end before it begins.


_CHANGES = frozenset(
    {
        Opcode.DCP_MUTATION,
        Opcode.DCP_DELETION,
        Opcode.DCP_EXPIRATION,
        Opcode.DCP_SYSTEM_EVENT,
        Opcode.DCP_PREPARE,
        Opcode.DCP_COMMIT,
        Opcode.DCP_ABORT,
        Opcode.DCP_SEQNO_ADVANCED,
    }
)
_STREAM = _CHANGES | {Opcode.DCP_SNAPSHOT_MARKER}


@dataclass(slots=True)
class _Stream:
    seqno: int
    snapshot: tuple[int, int] | None = None


@dataclass(slots=True)
class _Connection:
    name: str
    from_server: FrameBuffer = field(default_factory=FrameBuffer)
    from_client: FrameBuffer = field(default_factory=FrameBuffer)
    asked: dict[int, StreamRequest] = field(default_factory=dict)
    streams: dict[int, _Stream] = field(default_factory=dict)
    is_dcp: bool = False
    is_lost: bool = False


class StreamTap(Tap):
    """See the module. Complaints go to `complain`."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self.changes = 0
        self._complain = complain
        self._connections: dict[int, _Connection] = {}

    def connected(self, connection: int, *, client: str, server: str) -> None:
        self._connections[connection] = _Connection(f"{server} to {client}")

    def closed(self, connection: int) -> None:
        self._connections.pop(connection, None)

    def written(self, connection: int, data: bytes, *, by_server: bool) -> None:
        known = self._connections.get(connection)
        if known is None or known.is_lost:
            return
        buffer = known.from_server if by_server else known.from_client
        buffer.receive_data(data)
        try:
            for frame in buffer.frames():
                self._look(known, frame, by_server=by_server)
        except AssertionError as error:
            known.is_lost = True
            self._complain(f"{known.name}: {error}")

    def _look(self, connection: _Connection, frame: Frame, *, by_server: bool) -> None:
        opcode = frame.opcode
        if frame.magic in (Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE):
            return
        if opcode == Opcode.DCP_STREAM_REQUEST:
            self._look_at_request(connection, frame)
        elif frame.magic.is_request and by_server and opcode in _STREAM:
            self._look_at_change(connection, frame)
        elif frame.magic.is_request and by_server and opcode == Opcode.DCP_STREAM_END:
            connection.streams.pop(frame.opaque, None)

    def _look_at_request(self, connection: _Connection, frame: Frame) -> None:
        if frame.magic.is_request:
            request = decode_message(frame, WITH_COLLECTIONS)
            assert isinstance(request, StreamRequest)
            connection.asked[frame.opaque] = request
        elif frame.specific == Status.SUCCESS and frame.opaque in connection.asked:
            connection.streams[frame.opaque] = _Stream(int(connection.asked[frame.opaque].start_seqno))

    def _look_at_change(self, connection: _Connection, frame: Frame) -> None:
        stream = connection.streams.get(frame.opaque)
        if stream is None:
            return
        message = decode_message(frame, WITH_COLLECTIONS)
        if isinstance(message, SnapshotMarker):
            start, end = int(message.start_seqno), int(message.end_seqno)
            assert max(start, stream.seqno) <= end, f"the snapshot {start} to {end} at seqno {stream.seqno}"
            stream.snapshot = (start, end)
            return
        self.changes += 1
        seqno = int(getattr(message, "seqno", 0) or getattr(message, "commit_seqno", 0) or message.abort_seqno)  # type: ignore[attr-defined]
        name = type(message).__name__
        assert seqno > stream.seqno, f"{name} {seqno} comes after {stream.seqno} in vbucket {frame.specific}"
        assert stream.snapshot is not None, f"{name} {seqno} comes before any snapshot"
        start, end = stream.snapshot
        assert start <= seqno <= end, f"{name} {seqno} is outside its snapshot, {start} to {end}"
        stream.seqno = seqno


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
