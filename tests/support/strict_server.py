"""A node made to speak as strictly as a 7.0.5 server does, by what stands in front of it.

Everything is passed on, in both directions, but for what a 7.0.5 server would not take: that is answered with EINVAL,
or the connection is closed, as recorded (`tests/vectors/sessions`), and noted in `faults`. What only newer servers know
is refused without a fault: a peer has to do without.

It is a checker: it comes to its own conclusions from the frames, and uses none of the node's decisions.
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
RAW, JSON = 0, 1
COLLECTIONS = 0x12
DISK = 0x02
KNOWN_MARKER_FLAGS = 0x0F
NEWER_CONTROLS = frozenset({b"flatbuffers_system_events", b"change_streams", b"max_marker_version"})
CHANGES = frozenset({Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION, Opcode.DCP_COMMIT})
PREPARES = frozenset({Opcode.DCP_PREPARE, Opcode.DCP_ABORT})
DURABLE = PREPARES | {Opcode.DCP_COMMIT}

Check = Callable[[Frame], bool]


class Refused(Exception):
    """EINVAL, and the connection stays."""


class HungUp(Exception):
    """The connection is closed without a word."""


@dataclass(slots=True)
class Snapshot:
    is_disk: bool
    keys: dict[tuple[bool, bytes], bool] = field(default_factory=dict)
    """Prepares and versions that have come, and whether each belongs to a durable write."""


@dataclass(slots=True)
class StrictConnection:
    """The rules of one connection. Both methods return whether the frame is passed on."""

    collections: bool = False
    is_consumer: bool = False
    sync_writes: bool = False
    streamed: set[int] = field(default_factory=set)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """By vbucket."""

    def check_from_peer(self, frame: Frame) -> bool:
        """A frame on its way to the node."""
        if not frame.magic.is_request:
            return True
        if frame.opcode == Opcode.DCP_OPEN:
            self._check_open(frame)
        elif frame.opcode == Opcode.DCP_CONTROL:
            return self._check_control(frame)
        elif frame.opcode == Opcode.DCP_STREAM_REQUEST:
            self.streamed.add(frame.specific)
        elif frame.opcode == Opcode.DCP_SEQNO_ACKNOWLEDGED and frame.specific not in self.streamed:
            raise HungUp(f"an acknowledgement for vbucket {frame.specific}, which was never streamed")
        elif self.is_consumer:
            self._check_stream_message(frame)
        return True

    def check_from_node(self, frame: Frame) -> bool:
        """A frame of the node's."""
        if frame.opcode == Opcode.HELLO and not frame.magic.is_request:
            granted = {int.from_bytes(frame.value[at : at + 2]) for at in range(0, len(frame.value), 2)}
            self.collections = COLLECTIONS in granted
        if self.is_consumer and frame.magic.is_request and frame.opcode == Opcode.DCP_CONTROL:
            if frame.key in NEWER_CONTROLS:
                return False
            self.sync_writes |= (frame.key, frame.value) == (b"enable_sync_writes", b"true")
        return True

    def _check_open(self, frame: Frame) -> None:
        is_producer = bool(int.from_bytes(frame.extras[4:8]) & PRODUCER)
        self.is_consumer = not is_producer
        if frame.datatype != (JSON if frame.value else RAW):
            raise Refused(f"an open with {len(frame.value)} bytes of value and datatype {frame.datatype}")
        if frame.value:
            members = json.loads(frame.value)
            if members.keys() != {"consumer_name"} or is_producer or not isinstance(members["consumer_name"], str):
                raise Refused(f"an open with the value {members}, to a {'producer' if is_producer else 'consumer'}")

    def _check_control(self, frame: Frame) -> bool:
        if frame.key == b"set_noop_interval" and not frame.value.isdigit():
            raise Refused(f"a noop interval of {frame.value!r}")
        return frame.key not in NEWER_CONTROLS

    # --- what a consumer takes ------------------------------------------------------------------------------------

    def _check_stream_message(self, frame: Frame) -> None:
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            self._begin_snapshot(frame)
        elif frame.opcode == Opcode.DCP_SYSTEM_EVENT:
            if frame.extras[12] > 1:
                raise Refused(f"a system event of version {frame.extras[12]}")
        elif frame.opcode in CHANGES | PREPARES:
            self._check_form(frame)
            self._check_key(frame, self.snapshots[frame.specific])

    def _begin_snapshot(self, frame: Frame) -> None:
        version = 1 if len(frame.extras) == 20 else 2
        if version == 2 and frame.extras != b"\0":
            raise Refused(f"a marker of version 2.{frame.extras[0]}")
        flags = int.from_bytes((frame.extras if version == 1 else frame.value)[16:20])
        if flags & ~KNOWN_MARKER_FLAGS:
            raise Refused(f"a marker with the flags {flags:#x}")
        if flags & DISK and version == 1 and self.sync_writes:
            raise HungUp("a disk marker of version 1, without the high completed seqno")
        self.snapshots[frame.specific] = Snapshot(is_disk=bool(flags & DISK))

    def _check_form(self, frame: Frame) -> None:
        extras_bytes = {Opcode.DCP_DELETION: 21 if self.collections else 18, Opcode.DCP_EXPIRATION: 20}
        if len(frame.extras) != extras_bytes.get(Opcode(frame.opcode), len(frame.extras)):
            raise Refused(f"{frame.opcode_name} with {len(frame.extras)} bytes of extras")
        if frame.opcode in (Opcode.DCP_COMMIT, Opcode.DCP_ABORT) and frame.cas:
            raise Refused(f"{frame.opcode_name} with a CAS")
        if frame.opcode in DURABLE and not self.sync_writes:
            raise Refused(f"{frame.opcode_name} for a consumer without sync writes")

    def _check_key(self, frame: Frame, snapshot: Snapshot) -> None:
        if snapshot.is_disk and frame.opcode == Opcode.DCP_COMMIT:
            raise Refused("a commit in a disk snapshot, where what was committed comes as it is")
        place, is_durable = (frame.opcode in PREPARES, frame.key), frame.opcode in DURABLE
        if place in snapshot.keys and (snapshot.is_disk or is_durable or snapshot.keys[place]):
            raise HungUp(f"{frame.key!r} twice in one snapshot")
        snapshot.keys[place] = is_durable


class StrictServer:
    """See the module. `async with StrictServer(node) as strict`, and connect to `strict.address`."""

    def __init__(self, node: Address) -> None:
        self.node = node
        self.faults: list[str] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> Address:
        assert self._server is not None
        return Address(*self._server.sockets[0].getsockname()[:2])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, peer_reader: asyncio.StreamReader, peer: asyncio.StreamWriter) -> None:
        node_reader, node = await asyncio.open_connection(self.node.host, self.node.port)
        connection = StrictConnection()
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
        """Until the reader is at its end, or the server would have closed the connection."""
        buffer = FrameBuffer()
        while data := await reader.read(1 << 16):
            buffer.receive_data(data)
            for frame in buffer.frames():
                try:
                    is_passed = check(frame)
                except HungUp as fault:
                    self.faults.append(str(fault))
                    return
                except Refused as fault:
                    self.faults.append(str(fault))
                    is_passed = False
                if is_passed:
                    to.write(frame.encode())
                else:
                    opcode = Opcode(frame.opcode)
                    back.write(ErrorResponse(opcode=opcode, opaque=frame.opaque, status=Status.EINVAL).encode())
            await to.drain()
