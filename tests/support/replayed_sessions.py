"""A recorded session, replayed against a node: each frame of the client is sent, and each of the server must arrive.

The client's bytes are sent as they were recorded, one frame at a time in the recorded order, and the node must send
each frame of the server at the same point, equal field by field. Nothing may come in between. If the node is known to
differ, a test says so by the line of the recording: `missing`, `more`, `other`, `skipped`.

These are not compared, because each server has its own (`normalised`):

* vbuuids (requests that contain a recorded one are sent with the node's), CAS values, expiry and delete times;
* whether a snapshot comes from memory or from disk, and its checkpoint flag: the server's choice, so any of the
  recorded 0x01, 0x02, 0x05 and 0x06 is valid, and what marker 2.2 says of disk snapshots counts if both are from disk;
* whether a value is compressed, if HELLO lets the server choose: the uncompressed values are compared;
* nru, a hint for a cache that the node does not have;
* the values of error answers, which are texts, or the cluster config that may come with NOT_MY_VBUCKET; but if both
  have one, they have the same datatype;
* the order of the features in a HELLO answer, and of the scopes and collections in a manifest;
* the position of a system event's fields in its FlatBuffers table: their contents are compared;
* the ids of range scans (requests that contain a recorded one are sent with the node's);
* noops, which depend on the clock.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.client.connection_string import Address
from headwater.protocol.features import Opcode
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.manifest import decode_event
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import SystemEvent
from headwater.protocol.messages.session import SaslAuth, SelectBucket
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, decompress
from support.recorded_sessions import RecordedFrame

USER, PASSWORD = "@admin", "password"
"""The credentials of the recorded logins."""
ANSWER_S_MAX = 20.0
QUIET_S = 0.02
"""How long nothing may arrive if the transcript shows nothing."""
SNAPSHOT_FLAGS = frozenset({0x01, 0x02, 0x05, 0x06})


class RawConnection:
    """A socket that sends bytes and reads frames."""

    def __init__(self, address: Address) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=ANSWER_S_MAX)
        self._frames = FrameBuffer()

    def close(self) -> None:
        with suppress(OSError):
            # Wakes a thread that is reading.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frame(self) -> Frame:
        """Return the next frame that is not a noop."""
        while (frame := self._frames.next_frame()) is None or _is_noop(frame):
            if frame is None:
                data = self._socket.recv(1 << 16)
                assert data, "the node has closed the connection"
                self._frames.receive_data(data)
        return frame

    def call(self, request: Request) -> None:
        self.send(request.encode())
        assert self.frame().specific == Status.SUCCESS

    def log_in(self) -> None:
        self.call(SaslAuth(key=b"PLAIN", value=PlainLogin(user=USER, password=PASSWORD).encode()))
        self.call(SelectBucket(key=b"default"))

    def assert_quiet(self) -> None:
        """Check that nothing more has arrived."""
        self._socket.settimeout(QUIET_S)
        try:
            self._frames.receive_data(self._socket.recv(1 << 16))
        except TimeoutError:
            pass
        finally:
            self._socket.settimeout(ANSWER_S_MAX)
        while (frame := self._frames.next_frame()) is not None:
            assert _is_noop(frame), f"unexpected {frame}"

    def is_closed_by_the_node(self) -> bool:
        try:
            while data := self._socket.recv(1 << 16):
                self._frames.receive_data(data)
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True


def _is_noop(frame: Frame) -> bool:
    return frame.magic.is_request and frame.opcode == Opcode.DCP_NOOP


@dataclass(slots=True)
class Replay:
    """One session against one node. Subclasses add what a transcript leaves out."""

    address: Address
    stack: ExitStack
    missing: frozenset[int] = frozenset()
    """The lines of frames that the node does not send."""
    more: Mapping[int, tuple[Opcode, ...]] = field(default_factory=dict)
    """What the node sends in addition, after the frame of this line."""
    other: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """The fields that differ in the frame of this line."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """The lines of requests and answers that are not replayed, each with the reason."""
    interleaved: frozenset[str] = frozenset()
    """The connections on which streams interleave with each other and with requests: only each opaque has an order."""
    early: dict[str, list[Frame]] = field(default_factory=dict)
    """By connection: frames of other opaques that arrived before the expected one."""
    closes_as_recorded: bool = True
    """Whether the node closes connections where the server did."""
    connections: dict[str, RawConnection] = field(default_factory=dict)
    vbuuids: dict[bytes, bytes] = field(default_factory=dict)
    """Recorded → the node's."""
    scan_ids: dict[bytes, bytes] = field(default_factory=dict)
    """The same for range scans."""
    request: dict[str, RecordedFrame] = field(default_factory=dict)
    """By connection: the request that waits for its answer."""
    compared: int = 0

    def play(self, frames: list[RecordedFrame]) -> None:
        frames = [frame for frame in frames if frame.line not in self.skipped]
        last_lines = {frame.connection: frame.line for frame in frames}
        for frame in frames:
            self.put_back(frame)
            if frame.is_from_server:
                self._expect(frame)
            else:
                self._send(frame)
            if frame.closes and self.closes_as_recorded:
                assert self.connections[frame.connection].is_closed_by_the_node(), str(frame)
            elif frame.line == last_lines[frame.connection]:
                # The recording ends here, so what streams that are still open send is not compared.
                self.finish_request(frame.connection)
                self.connections[frame.connection].assert_quiet()
                assert not self.early.get(frame.connection), self.early

    # --- what a transcript leaves out -----------------------------------------------------------------------------

    def put_back(self, frame: RecordedFrame) -> None:
        """Send what was sent between the shown frames, before this one."""

    def begin(self, connection: RawConnection, frame: RecordedFrame) -> None:
        """Send what was sent on a new connection before its first frame."""

    def before_sending(self, frame: RecordedFrame) -> None:
        """Let the time pass that passed before this frame."""

    def as_sent(self, frame: RecordedFrame) -> bytes:
        """Return the request with the node's vbuuid and bucket instead of the recorded ones."""
        data = bytes(frame.data)
        if data[1] == Opcode.SELECT_BUCKET:
            return SelectBucket(key=b"default", opaque=int.from_bytes(data[12:16])).encode()
        if data[1] == Opcode.DCP_STREAM_REQUEST and len(data) >= 72:
            return data[:48] + self.vbuuids.get(data[48:56], data[48:56]) + data[56:]
        if data[1] == Opcode.RANGE_SCAN_CREATE:
            return self._with_vbuuid(data)
        if data[1] in (Opcode.RANGE_SCAN_CONTINUE, Opcode.RANGE_SCAN_CANCEL):
            return data[:24] + self.scan_ids.get(data[24:40], data[24:40]) + data[40:]
        return data

    def _with_vbuuid(self, data: bytes) -> bytes:
        """Return the description of a scan with the node's vbuuid, which it contains as a decimal string."""
        members = json.loads(data[24:])
        required = members.get("snapshot_requirements")
        recorded = b"" if required is None else int(required["vb_uuid"]).to_bytes(8)
        if recorded not in self.vbuuids:
            return data
        required["vb_uuid"] = str(int.from_bytes(self.vbuuids[recorded]))
        value = json.dumps(members).encode()
        return data[:8] + len(value).to_bytes(4) + data[12:24] + value

    def answered(self, request: RecordedFrame) -> None:
        """Note that the request has got its answer."""

    def finish_request(self, name: str) -> None:
        """Note that the pending request of this connection has got its answers, if any."""

    def as_expected(self, expected: Frame, recorded: RecordedFrame, request: RecordedFrame | None) -> Frame:
        """Return the recorded frame as the node must send it. `request` is set if the frame is an answer."""
        return expected

    def is_beside(self, got: Frame, expected: Frame) -> bool:
        """Return whether the node may send a frame that the server did not send, before this one."""
        return False

    # --- playing --------------------------------------------------------------------------------------------------

    def _connection(self, frame: RecordedFrame) -> RawConnection:
        if frame.connection not in self.connections:
            connection = self.connections[frame.connection] = RawConnection(self.address)
            self.stack.callback(connection.close)
            self.begin(connection, frame)
        return self.connections[frame.connection]

    def _send(self, frame: RecordedFrame) -> None:
        assert not frame.is_cut, f"{frame} can't be played"
        connection = self._connection(frame)
        self.finish_request(frame.connection)
        if frame.connection not in self.interleaved:
            connection.assert_quiet()
        self.before_sending(frame)
        connection.send(self.as_sent(frame))
        self.request[frame.connection] = frame
        self._take_more(frame)

    def _expect(self, recorded: RecordedFrame) -> None:
        if recorded.opcode == "DCP_NOOP" or recorded.line in self.missing:
            return
        expected = decode(bytes(recorded.data))
        while self.is_beside(got := self._frame(recorded.connection, expected.opaque), expected):
            pass
        request = self.request.pop(recorded.connection) if recorded.is_response else None
        expected = self.as_expected(expected, recorded, request)
        if expected.opcode == got.opcode == Opcode.RANGE_SCAN_CREATE:
            self.scan_ids[expected.value] = got.value
        if has_failover_log(expected) and has_failover_log(got):
            for at in range(0, len(expected.value), 16):
                self.vbuuids[expected.value[at : at + 8]] = got.value[at : at + 8]
        ours, theirs = normalised(got), normalised(expected)
        if not (got.value and expected.value):
            ours["datatype of an error"] = theirs["datatype of an error"] = None
        if _is_disk_marker(got) != _is_disk_marker(expected):
            for name in ("extras", "value"):
                ours[name] = theirs[name] = None
        differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        assert differing == self.other.get(recorded.line, frozenset()), (
            f"{recorded}: {[(name, ours.get(name), theirs.get(name)) for name in differing]}"
        )
        self.compared += 1
        if request is not None:
            self.answered(request)
        self._take_more(recorded)

    def _frame(self, name: str, opaque: int) -> Frame:
        """Return the next frame, or the next of this opaque."""
        connection = self.connections[name]
        if name not in self.interleaved:
            return connection.frame()
        early = self.early.setdefault(name, [])
        known = next((frame for frame in early if frame.opaque == opaque), None)
        if known is not None:
            early.remove(known)
            return known
        while (frame := connection.frame()).opaque != opaque:
            early.append(frame)
        return frame

    def _take_more(self, recorded: RecordedFrame) -> None:
        for opcode in self.more.get(recorded.line, ()):
            assert self.connections[recorded.connection].frame().opcode == opcode, str(recorded)


# --- comparing ----------------------------------------------------------------------------------------------------


def decode(data: bytes) -> Frame:
    buffer = FrameBuffer()
    buffer.receive_data(data)
    frame = buffer.next_frame()
    assert frame is not None
    return frame


def has_failover_log(frame: Frame) -> bool:
    opcodes = (Opcode.DCP_STREAM_REQUEST, Opcode.DCP_GET_FAILOVER_LOG, Opcode.GET_FAILOVER_LOG)
    return not frame.magic.is_request and frame.opcode in opcodes and frame.specific == Status.SUCCESS


def _is_disk_marker(frame: Frame) -> bool:
    """Return whether this is a marker 2.2: memory snapshots have none."""
    return frame.magic.is_request and frame.opcode == Opcode.DCP_SNAPSHOT_MARKER and frame.extras == b"\x02"


def normalised(frame: Frame) -> dict[str, Any]:
    """Return the fields that must be equal."""
    if frame.datatype & Datatype.SNAPPY:
        frame = replace(frame, value=decompress(frame.value), datatype=frame.datatype & ~Datatype.SNAPPY)
    fields: dict[str, Any] = {
        "magic": frame.magic, "opcode": Opcode(frame.opcode),
        "status or vbucket": frame.specific if frame.magic.is_request else Status(frame.specific),
        "opaque": frame.opaque, "has a CAS": frame.cas != 0, "datatype": frame.datatype, "extras": frame.extras,
        "key": frame.key, "value": frame.value,
    }  # fmt: skip
    if frame.magic.is_request:
        return fields | _normalised_request(frame)
    if has_failover_log(frame):
        return fields | {"value": [frame.value[at : at + 8] for at in range(8, len(frame.value), 16)]}
    if frame.specific not in (Status.SUCCESS, Status.ROLLBACK, Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE):
        return fields | {"value": None, "datatype": None, "datatype of an error": frame.datatype}
    if frame.opcode == Opcode.HELLO:
        return fields | {"value": sorted(frame.value[at : at + 2] for at in range(0, len(frame.value), 2))}
    if frame.opcode == Opcode.COLLECTIONS_GET_MANIFEST:
        return fields | {"value": sorted(json.dumps(json.loads(frame.value), sort_keys=True))}
    if frame.opcode == Opcode.RANGE_SCAN_CREATE:
        return fields | {"value": len(frame.value)}
    if frame.opcode == Opcode.RANGE_SCAN_CONTINUE:
        message = decode_message(frame)
        return fields | {"value": (message.keys, [replace(document, cas=0) for document in message.documents])}
    return fields


def _normalised_request(frame: Frame) -> dict[str, Any]:
    extras = frame.extras
    if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
        # In version 1 the extras have all fields, in version 2 the value has them.
        marker = extras if len(extras) == 20 else frame.value
        flags = int.from_bytes(marker[16:20])
        start, end = int.from_bytes(marker[:8]), int.from_bytes(marker[8:16])
        return {
            "extras": len(extras),
            "start": start,
            "end": end,
            "flags": flags in SNAPSHOT_FLAGS,
            "value": marker[20:],
        }
    if frame.opcode == Opcode.DCP_SYSTEM_EVENT:
        message = decode_message(frame)
        assert isinstance(message, SystemEvent)
        return {"value": decode_event(message)}
    if frame.opcode == Opcode.DCP_MUTATION:
        has_expiry = extras[20:24] != bytes(4)
        return {"extras": (extras[:8], extras[16:20], has_expiry, extras[24:30], len(extras)), "revision": extras[8:16]}
    if frame.opcode == Opcode.DCP_PREPARE:
        has_expiry = extras[20:24] != bytes(4)
        return {"extras": (extras[:8], extras[16:20], has_expiry, extras[24:28], extras[29:]), "revision": extras[8:16]}
    if frame.opcode in (Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION):
        has_time = len(extras) > 18 and extras[16:20] != bytes(4)
        return {"extras": (extras[:8], has_time, extras[20:], len(extras)), "revision": extras[8:16]}
    return {}
