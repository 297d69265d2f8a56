"""Looks at every DCP stream on the simulated network, frame by frame, with the typed codec.

* A change lies inside the snapshot that was announced last, and seqnos rise from one change to the next.
* A snapshot begins where the stream has come to, and does not end before it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_snapshot import SnapshotMarker
from headwater.protocol.messages.dcp_stream import StreamRequest
from headwater.protocol.opcodes import Magic, Opcode
from headwater.protocol.status import Status
from headwater.sim.network import Tap

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
