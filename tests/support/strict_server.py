"""A node that is as strict as a real server, because of a checker in front of it.

Everything is forwarded, in both directions, except what that server would not accept: this gets the server's status
as its answer, or closes the connection, as recorded (`tests/vectors/sessions`) or as the server's sources say, and
is noted in `faults`. What only newer servers know is refused without a fault: a peer must manage without it.

It is a checker: it draws its own conclusions from the bytes of the frames, and uses none of the node's decisions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from headwater.client.connection_string import Address
from headwater.protocol.features import Opcode
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages.base import ErrorResponse
from headwater.protocol.status import Status

PRODUCER = 0x01
XATTR_FEATURE, SNAPPY_FEATURE, JSON_FEATURE, COLLECTIONS = 0x06, 0x0A, 0x0B, 0x12
RAW, JSON, SNAPPY, XATTR = 0, 1, 2, 4
DATATYPE_FEATURES = {JSON: JSON_FEATURE, SNAPPY: SNAPPY_FEATURE, XATTR: XATTR_FEATURE}
MEMORY, DISK, CHECKPOINT, MAY_CONTAIN_DUPLICATES = 0x01, 0x02, 0x04, 0x20
CHANGES = frozenset({Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION, Opcode.DCP_COMMIT})
REMOVALS = frozenset({Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION})
PREPARES = frozenset({Opcode.DCP_PREPARE, Opcode.DCP_ABORT})
DURABLE = PREPARES | {Opcode.DCP_COMMIT}
OF_SNAPSHOTS = CHANGES | PREPARES | {Opcode.DCP_SYSTEM_EVENT}
FROM_PRODUCERS = OF_SNAPSHOTS | {Opcode.DCP_SNAPSHOT_MARKER}
NEVER_FOR_REPLICAS = frozenset({Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_OSO_SNAPSHOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVersion:
    """What servers of this version know."""

    name: str
    marker_values: dict[int, int]
    """The version byte of a snapshot marker → the length of its value."""
    marker_flags: int
    event_version_max: int
    unknown_controls: frozenset[bytes] = frozenset()
    noop_fractions: bool


V7_0_5 = ServerVersion(
    name="7.0.5",
    marker_values={0: 36},
    marker_flags=0x0F,
    event_version_max=1,
    unknown_controls=frozenset({b"flatbuffers_system_events", b"change_streams", b"max_marker_version"}),
    noop_fractions=False,
)
V8_0_2 = ServerVersion(
    name="8.0.2", marker_values={0: 36, 2: 52}, marker_flags=0x3F, event_version_max=2, noop_fractions=True
)


class Refused(Exception):
    """The frame is answered with this status, and the connection stays open."""

    def __init__(self, reason: str, status: Status = Status.EINVAL) -> None:
        super().__init__(reason)
        self.status = status


class HungUp(Exception):
    """The connection is closed without an answer."""


@dataclass(slots=True)
class ReceivedVBucket:
    """A consumer's state of a stream."""

    seqno: int
    start: int = 0
    end: int = 0
    flags: int = 0
    checkpoint: dict[tuple[bool, bytes], bool] = field(default_factory=dict)
    """Prepares and versions of the open checkpoint, and whether each belongs to a durable write."""


@dataclass(slots=True)
class SentVBucket:
    """A producer's state of a stream."""

    seqno: int = 0
    acknowledged_seqno: int = 0


@dataclass(slots=True)
class StrictConnection:
    """The rules of one connection. Both methods return whether to forward the frame."""

    version: ServerVersion = V8_0_2
    features: frozenset[int] = frozenset()
    """Granted by HELLO."""
    is_open: bool = False
    is_consumer: bool = False
    controls: dict[bytes, bytes] = field(default_factory=dict)
    received: dict[int, ReceivedVBucket] = field(default_factory=dict)
    sent: dict[int, SentVBucket] = field(default_factory=dict)

    def check_from_peer(self, frame: Frame) -> bool:
        """Check a frame that is sent to the node."""
        if not frame.magic.is_request:
            return True
        if frame.opcode == Opcode.DCP_OPEN:
            self._check_open(frame)
        elif frame.opcode == Opcode.DCP_CONTROL:
            return self._check_control(frame)
        elif frame.opcode == Opcode.DCP_STREAM_REQUEST:
            self._check_stream_request(frame)
        elif frame.opcode == Opcode.DCP_SEQNO_ACKNOWLEDGED:
            self._check_acknowledgement(frame)
        elif self.is_consumer and self._has_sync_writes and frame.opcode in NEVER_FOR_REPLICAS:
            # Without sync writes, a producer can't distinguish a replica from other consumers.
            raise Refused(f"{frame.opcode_name} for a consumer", Status.UNKNOWN_COMMAND)
        elif self.is_consumer and frame.opcode in FROM_PRODUCERS:
            self._check_stream_message(frame)
        elif frame.opcode in FROM_PRODUCERS:
            raise Refused(f"{frame.opcode_name} for a producer")
        return True

    def check_from_node(self, frame: Frame) -> bool:
        """Check a frame that the node has sent."""
        if frame.opcode == Opcode.HELLO and not frame.magic.is_request:
            self.features = frozenset(int.from_bytes(frame.value[at : at + 2]) for at in range(0, len(frame.value), 2))
        if not frame.magic.is_request:
            return True
        if frame.opcode == Opcode.DCP_CONTROL:
            if frame.key in self.version.unknown_controls:
                return False
            self.controls[frame.key] = frame.value
        elif frame.opcode == Opcode.DCP_STREAM_REQUEST:
            self.received[frame.specific] = ReceivedVBucket(seqno=int.from_bytes(frame.extras[8:16]))
        elif frame.opcode in OF_SNAPSHOTS and frame.specific in self.sent:
            self.sent[frame.specific].seqno = _seqno(frame)
        return True

    @property
    def _has_sync_writes(self) -> bool:
        return self.controls.get(b"enable_sync_writes") == b"true"

    # --- opening --------------------------------------------------------------------------------------------------

    def _check_open(self, frame: Frame) -> None:
        is_producer = bool(int.from_bytes(frame.extras[4:8]) & PRODUCER)
        if frame.datatype != (JSON if frame.value else RAW):
            raise Refused(f"an open with {len(frame.value)} bytes of value and datatype {frame.datatype}")
        if frame.value:
            members = json.loads(frame.value)
            if members.keys() != {"consumer_name"} or is_producer or not isinstance(members["consumer_name"], str):
                raise Refused(f"an open with the value {members}, to a {'producer' if is_producer else 'consumer'}")
        self.is_open, self.is_consumer = True, not is_producer

    def _check_control(self, frame: Frame) -> bool:
        key, value = frame.key, frame.value
        if not self.is_open or self.is_consumer:
            raise Refused("a control that is not for a producer")
        if key in self.version.unknown_controls:
            return False
        if key == b"set_noop_interval" and not (self.version.noop_fractions or value.isdigit()):
            raise Refused(f"a noop interval of {value!r}")
        if key == b"max_marker_version" and (value != b"2.2" or COLLECTIONS not in self.features):
            raise Refused(f"markers of version {value!r}")
        if key == b"force_value_compression" and SNAPPY_FEATURE not in self.features:
            raise Refused("compressed values without snappy")
        exclusive = {b"enable_stream_id", b"enable_sync_writes"}
        if key in exclusive and self.controls.keys() & (exclusive - {key}):
            raise Refused("stream ids and sync writes", Status.NOT_SUPPORTED)
        self.controls[key] = value
        return True

    def _check_stream_request(self, frame: Frame) -> None:
        if not self.is_open or self.is_consumer:
            raise Refused("a stream request that is not for a producer")
        if self.features & {COLLECTIONS, XATTR_FEATURE} and self.controls.get(b"enable_noop") != b"true":
            raise Refused("a stream request before noops are enabled", Status.NOT_SUPPORTED)
        self.sent[frame.specific] = SentVBucket()

    def _check_acknowledgement(self, frame: Frame) -> None:
        vbucket, seqno = frame.specific, int.from_bytes(frame.extras)
        if vbucket not in self.sent:
            raise HungUp(f"an acknowledgement for vbucket {vbucket}, which was never streamed")
        if not self._has_sync_writes:
            raise HungUp("an acknowledgement without sync writes")
        sent = self.sent[vbucket]
        # A replica that resumes acknowledges its state once, which may be beyond what this stream has sent.
        if seqno > sent.seqno and sent.seqno:
            raise HungUp(f"an acknowledgement of seqno {seqno}, which was not sent")
        if seqno <= sent.acknowledged_seqno:
            raise HungUp(f"seqno {seqno} acknowledged after {sent.acknowledged_seqno}")
        sent.acknowledged_seqno = seqno

    # --- what a consumer accepts ----------------------------------------------------------------------------------

    def _check_stream_message(self, frame: Frame) -> None:
        vbucket = self.received.get(frame.specific)
        if vbucket is None:
            raise Refused(f"{frame.opcode_name} without a stream", Status.KEY_ENOENT)
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            self._begin_snapshot(frame, vbucket)
            return
        if frame.opcode == Opcode.DCP_SYSTEM_EVENT:
            takes_flatbuffers = self.controls.get(b"flatbuffers_system_events") == b"true"
            if frame.extras[12] > (self.version.event_version_max if takes_flatbuffers else 1):
                raise Refused(f"a system event of version {frame.extras[12]}")
        else:
            self._check_form(frame)
            self._check_value(frame)
            self._check_key(frame, vbucket)
        seqno = _seqno(frame)
        if not vbucket.flags or not vbucket.seqno < seqno <= vbucket.end:
            raise Refused(f"seqno {seqno} after {vbucket.seqno} in a snapshot to {vbucket.end}", Status.ERANGE)
        vbucket.seqno = seqno

    def _begin_snapshot(self, frame: Frame, vbucket: ReceivedVBucket) -> None:
        is_v1 = len(frame.extras) == 20
        if not is_v1 and self.version.marker_values.get(frame.extras[0]) != len(frame.value):
            raise Refused(f"a marker of version 2.{frame.extras[0]} with {len(frame.value)} bytes")
        value = frame.extras if is_v1 else frame.value
        start, end, flags = (int.from_bytes(value[at:to]) for at, to in ((0, 8), (8, 16), (16, 20)))
        if flags & ~self.version.marker_flags or bool(flags & MEMORY) == bool(flags & DISK):
            raise Refused(f"a marker with the flags {flags:#x}")
        if start > end or end < vbucket.seqno:
            raise Refused(f"a snapshot from {start} to {end} after seqno {vbucket.seqno}", Status.ERANGE)
        if flags & DISK and is_v1 and self._has_sync_writes:
            raise HungUp("a disk marker of version 1, without the high completed seqno")
        if not is_v1 and len(value) == 52:
            high_prepared = int.from_bytes(value[44:52])
            if high_prepared and not (flags & DISK and start <= high_prepared <= end):
                raise Refused(f"a high prepared seqno {high_prepared} of a snapshot {start}..{end}, flags {flags:#x}")
        # A change between memory and disk starts a new checkpoint as well.
        if flags & CHECKPOINT or flags & DISK or vbucket.flags & DISK:
            vbucket.checkpoint.clear()
        vbucket.start, vbucket.end, vbucket.flags = start, end, flags

    def _check_form(self, frame: Frame) -> None:
        deletion_bytes = 21 if COLLECTIONS in self.features else 18
        extras_bytes = {
            Opcode.DCP_MUTATION: 31,
            Opcode.DCP_DELETION: deletion_bytes,
            Opcode.DCP_EXPIRATION: 20,
            Opcode.DCP_PREPARE: 31,
            Opcode.DCP_COMMIT: 16,
            Opcode.DCP_ABORT: 16,
        }[Opcode(frame.opcode)]
        if len(frame.extras) != extras_bytes:
            raise Refused(f"{frame.opcode_name} with {len(frame.extras)} bytes of extras")
        if frame.opcode in (Opcode.DCP_COMMIT, Opcode.DCP_ABORT) and frame.cas:
            raise Refused(f"{frame.opcode_name} with a CAS")
        if frame.opcode in DURABLE and not self._has_sync_writes:
            raise Refused(f"{frame.opcode_name} for a consumer without sync writes")
        if frame.opcode == Opcode.DCP_PREPARE and not 1 <= frame.extras[30] <= 3:
            raise Refused(f"a prepare of level {frame.extras[30]}")

    def _check_value(self, frame: Frame) -> None:
        for bit, feature in DATATYPE_FEATURES.items():
            if frame.datatype & bit and feature not in self.features:
                raise Refused(f"datatype {frame.datatype} without HELLO feature {feature:#x}")
        if frame.datatype & ~(JSON | SNAPPY | XATTR):
            raise Refused(f"datatype {frame.datatype}")
        if frame.datatype & SNAPPY or frame.opcode not in REMOVALS or not frame.value:
            return
        if not frame.datatype & XATTR or 4 + int.from_bytes(frame.value[:4]) != len(frame.value):
            raise Refused(f"{frame.opcode_name} with a body")

    def _check_key(self, frame: Frame, vbucket: ReceivedVBucket) -> None:
        if vbucket.flags & DISK and frame.opcode == Opcode.DCP_COMMIT:
            raise Refused("a commit in a disk snapshot, where what was committed comes as it is")
        place, is_durable = (frame.opcode in PREPARES, frame.key), frame.opcode in DURABLE
        if place in vbucket.checkpoint and not vbucket.flags & MAY_CONTAIN_DUPLICATES:
            is_replaceable = not (vbucket.flags & DISK or is_durable or vbucket.checkpoint[place])
            if not is_replaceable:
                raise HungUp(f"{frame.key!r} twice in one checkpoint")
        vbucket.checkpoint[place] = is_durable


def _seqno(frame: Frame) -> int:
    """Return the seqno of a change. In commits and aborts, the seqno of the prepare comes first."""
    at = 8 if frame.opcode in (Opcode.DCP_COMMIT, Opcode.DCP_ABORT) else 0
    return int.from_bytes(frame.extras[at : at + 8])


Check = Callable[[Frame], bool]


class StrictServer:
    """The server that the module describes. Use `async with StrictServer(node) as strict`, and `strict.address`."""

    def __init__(self, node: Address, version: ServerVersion = V8_0_2) -> None:
        self.node = node
        self.version = version
        self.faults: list[str] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> Address:
        return Address(*self._server.sockets[0].getsockname()[:2])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, peer_reader: asyncio.StreamReader, peer: asyncio.StreamWriter) -> None:
        node_reader, node = await asyncio.open_connection(self.node.host, self.node.port)
        connection = StrictConnection(self.version)
        ways = [
            asyncio.create_task(self._pass(peer_reader, node, peer, connection.check_from_peer)),
            asyncio.create_task(self._pass(node_reader, peer, node, connection.check_from_node)),
        ]
        self._tasks.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for writer in (peer, node):
            writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter, check: Check
    ) -> None:
        """Forward until the reader ends, or the server would have closed the connection."""
        buffer = FrameBuffer()
        while data := await reader.read(1 << 16):
            buffer.receive_data(data)
            for frame in buffer.frames():
                try:
                    status = None if check(frame) else Status.EINVAL
                except HungUp as fault:
                    self.faults.append(str(fault))
                    return
                except Refused as fault:
                    self.faults.append(str(fault))
                    status = fault.status
                if status is None:
                    to.write(frame.encode())
                else:
                    opcode = Opcode(frame.opcode)
                    back.write(ErrorResponse(opcode=opcode, opaque=frame.opaque, status=status).encode())
            await to.drain()
