"""The recorded sessions with real servers, played against a real node: the same requests get the same answers.

The client's bytes are sent as they were recorded, one frame at a time in the recorded order, and each frame the server
sent has to come from the node at the same point, equal field by field. Nothing may come in between.

What the transcripts leave out is put back (`_left_out`): their opaques have gaps, and the streams that follow show what
was written there. The session of 4.6.5 also leaves out logins, which that server did not need.

What is not compared, because it is the server's own (`_normalised`):

* vbuuids (requests that carry a recorded one are sent with the node's), CAS values, and times: expiry and delete times;
* whether a snapshot comes from memory or from disk, and its checkpoint flag: the server's choice, so any of the
  recorded 0x01, 0x02, 0x05 and 0x06 will do;
* where the snapshot of two updates of one key starts that were deduplicated: 7.0.5 left out the seqno of the first, the
  node starts at the seqno after the last one, as `protocol.md` has it;
* nru, a hint for a cache that the node does not have;
* the values and datatypes of error answers: texts, and the cluster config that may come with NOT_MY_VBUCKET;
* the order of the features in a HELLO answer;
* noops, which come by the clock.

4.6.5 differs from 7.0.5, and `protocol.md` says to follow the latter: where the same request has another status in the
session of 7.0.5, that is the one expected, also where 4.6.5 closed the connection instead of answering. One more
difference shows in the recordings: after an expiration, 7.0.5 starts the revisions of new documents one higher.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from headwater.client.connection_string import Address
from headwater.protocol.features import Opcode
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import Open, VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.session import SaslAuth, SelectBucket
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.status import Status
from support.node_process import NodeProcess
from support.recorded_sessions import RecordedFrame, read_session

USER, PASSWORD = "@admin", "password"
"""As in the recorded logins."""
ANSWER_S_MAX = 20.0
QUIET_S = 0.02
"""How long nothing may come where the transcript shows nothing."""
EXPIRY_S = 2.2
"""A document with an expiry of 1 s has expired after that, whatever the fraction of the second it was written at."""
SNAPSHOT_FLAGS = frozenset({0x01, 0x02, 0x05, 0x06})
DEDUPLICATED = {(17, 18): 18}
"""Where 7.0.5 starts a snapshot in which the change at its start is deduplicated."""
FIRST_SEQNO_AFTER_EXPIRATION = 14
"""On vbucket 0 of the sessions."""


class RawConnection:
    """A socket that sends bytes and reads frames."""

    def __init__(self, address: Address) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=ANSWER_S_MAX)
        self._frames = FrameBuffer()

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frame(self) -> Frame:
        """The next frame that is not a noop."""
        while (frame := self._frames.next_frame()) is None or _is_noop(frame):
            if frame is None:
                data = self._socket.recv(1 << 16)
                assert data, "the node has closed the connection"
                self._frames.receive_data(data)
        return frame

    def call(self, request: Request) -> None:
        self.send(request.encode())
        assert self.frame().specific == Status.SUCCESS

    def assert_quiet(self) -> None:
        """Nothing more has come."""
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


# --- what the transcripts leave out -------------------------------------------------------------------------------


def _left_out(version: str, frame: RecordedFrame) -> list[Request]:
    """What the front-end connection sent between the shown frames: before this one. Each group goes in one write."""
    is_marker = frame.opcode == "DCP_SNAPSHOT_MARKER"
    if frame.text == "SET key-0":
        # GET_ALL_VB_SEQNOS shows 16 vbuckets, of which two are seen to be set.
        return [SetVBucket(vbucket=VBucketId(vbucket), state=VBucketState.ACTIVE) for vbucket in range(2, 16)]
    if frame.text == "overwrite key-1":
        return [_set(f"key-{n}", b'{"n":%d}' % n, flags=0xCAFE0000 + n) for n in range(1, 5)]
    if frame.text == "GET_ALL_VB_SEQNOS":
        return [_set(f"v1-{n}", b"x" * 10, vbucket=1) for n in range(3)]
    if version == "7.0.5" and is_marker and frame.fields["end"] == "18":
        # "two updates of the same key back to back": here they were deduplicated.
        return [_set("dd", b"1"), _set("dd", b"2")]
    if version == "4.6.5" and is_marker and frame.fields["end"] in ("17", "18"):
        # And here they were not.
        return [_set("dd", b"1" if frame.fields["end"] == "17" else b"2")]
    return []


def _set(key: str, value: bytes, *, flags: int = 0, vbucket: int = 0) -> Set:
    return Set(vbucket=VBucketId(vbucket), key=key.encode(), value=value, flags=flags)


# --- comparing ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replay:
    """One session against one node."""

    version: str
    address: Address
    stack: ExitStack
    connections: dict[str, RawConnection] = field(default_factory=dict)
    vbuuids: dict[bytes, bytes] = field(default_factory=dict)
    """Recorded → the node's."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Request → the status that 7.0.5 answered."""
    request: dict[str, RecordedFrame] = field(default_factory=dict)
    """By connection: the request that waits for its answer."""

    def play(self, frames: list[RecordedFrame]) -> None:
        last_lines = {frame.connection: frame.line for frame in frames}
        for frame in frames:
            self._put_back(frame)
            if frame.is_from_server:
                self._expect(frame)
            else:
                self._send(frame)
            if frame.line == last_lines[frame.connection]:
                # The recorder has looked no further, so what comes of streams that are still open is not compared.
                self._finish_request(frame.connection)
                self.connections[frame.connection].assert_quiet()

    def _connection(self, frame: RecordedFrame) -> RawConnection:
        if frame.connection not in self.connections:
            connection = RawConnection(self.address)
            self.stack.callback(connection.close)
            self.connections[frame.connection] = connection
            if self.version == "4.6.5":
                self._log_in(connection, frame)
        return self.connections[frame.connection]

    def _log_in(self, connection: RawConnection, frame: RecordedFrame) -> None:
        """What the session of 4.6.5 does not show: logins, and the open after a reconnect."""
        connection.call(SaslAuth(key=b"PLAIN", value=PlainLogin(user=USER, password=PASSWORD).encode()))
        connection.call(SelectBucket(key=b"default"))
        if "#" in frame.connection and frame.opcode == "DCP_STREAM_REQ" and frame.text != "STREAM_REQ before DCP_OPEN":
            connection.call(Open(key=b"reconnected"))

    def _put_back(self, frame: RecordedFrame) -> None:
        requests = _left_out(self.version, frame)
        if requests:
            front = [connection for name, connection in self.connections.items() if name.startswith("fe#")][-1]
            front.send(b"".join(request.encode() for request in requests))
            for _ in requests:
                assert front.frame().specific == Status.SUCCESS

    def _send(self, frame: RecordedFrame) -> None:
        assert not frame.is_cut, f"{frame} can't be played"
        connection = self._connection(frame)
        self._finish_request(frame.connection)
        connection.assert_quiet()
        if frame.opcode == "GET" and frame.text != "GET exp-2 after its expiry":
            time.sleep(EXPIRY_S)
        connection.send(self._with_our_vbuuid(bytes(frame.data)))
        self.request[frame.connection] = frame

    def _with_our_vbuuid(self, data: bytes) -> bytes:
        if data[1] != Opcode.DCP_STREAM_REQUEST or len(data) < 72:
            return data
        return data[:48] + self.vbuuids.get(data[48:56], data[48:56]) + data[56:]

    def _finish_request(self, name: str) -> None:
        """4.6.5 has closed the connection instead of answering: 7.0.5 has answered."""
        request = self.request.pop(name, None)
        if request is not None and self.version == "4.6.5" and request.text in self.statuses:
            assert self.connections[name].frame().specific == self.statuses[request.text], str(request)

    def _expect(self, recorded: RecordedFrame) -> None:
        if recorded.opcode == "DCP_NOOP":
            return
        expected = _decode(bytes(recorded.data))
        got = self.connections[recorded.connection].frame()
        if recorded.is_response:
            expected = self._as_7_0_5_answers(expected, self.request.pop(recorded.connection))
        self._learn_vbuuids(expected, got)
        assert _normalised(got) == _normalised(self._with_7_0_5_revisions(expected)), str(recorded)

    def _as_7_0_5_answers(self, expected: Frame, request: RecordedFrame) -> Frame:
        if self.version == "4.6.5" and request.text in self.statuses:
            status = self.statuses[request.text]
            return expected if expected.specific == status else replace(expected, specific=status, value=b"")
        return expected

    def _learn_vbuuids(self, expected: Frame, got: Frame) -> None:
        if _has_failover_log(expected) and _has_failover_log(got):
            for at in range(0, len(expected.value), 16):
                self.vbuuids[expected.value[at : at + 8]] = got.value[at : at + 8]

    def _with_7_0_5_revisions(self, frame: Frame) -> Frame:
        is_change = frame.magic.is_request and frame.opcode in (Opcode.DCP_MUTATION, Opcode.DCP_DELETION)
        if self.version != "4.6.5" or not is_change or frame.specific != 0:
            return frame
        if int.from_bytes(frame.extras[:8]) < FIRST_SEQNO_AFTER_EXPIRATION:
            return frame
        revision = int.from_bytes(frame.extras[8:16]) + 1
        return replace(frame, extras=frame.extras[:8] + revision.to_bytes(8) + frame.extras[16:])


def _decode(data: bytes) -> Frame:
    buffer = FrameBuffer()
    buffer.receive_data(data)
    frame = buffer.next_frame()
    assert frame is not None
    return frame


def _has_failover_log(frame: Frame) -> bool:
    opcodes = (Opcode.DCP_STREAM_REQUEST, Opcode.DCP_GET_FAILOVER_LOG)
    return not frame.magic.is_request and frame.opcode in opcodes and frame.specific == Status.SUCCESS


def _normalised(frame: Frame) -> dict[str, Any]:
    """The fields that have to be equal."""
    fields: dict[str, Any] = {
        "magic": frame.magic,
        "opcode": Opcode(frame.opcode),
        "status or vbucket": frame.specific if frame.magic.is_request else Status(frame.specific),
        "opaque": frame.opaque,
        "has a CAS": frame.cas != 0,
        "datatype": frame.datatype,
        "extras": frame.extras,
        "key": frame.key,
        "value": frame.value,
    }
    if frame.magic.is_request:
        return fields | _normalised_request(frame)
    if _has_failover_log(frame):
        return fields | {"value": [frame.value[at : at + 8] for at in range(8, len(frame.value), 16)]}
    if frame.opcode == Opcode.HELLO:
        return fields | {"value": sorted(frame.value[at : at + 2] for at in range(0, len(frame.value), 2))}
    if frame.specific not in (Status.SUCCESS, Status.ROLLBACK):
        return fields | {"value": None, "datatype": None}
    return fields


def _normalised_request(frame: Frame) -> dict[str, Any]:
    extras = frame.extras
    if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
        flags = int.from_bytes(extras[16:20])
        start, end = int.from_bytes(extras[:8]), int.from_bytes(extras[8:16])
        return {"extras": (DEDUPLICATED.get((start, end), start), end, flags in SNAPSHOT_FLAGS)}
    if frame.opcode == Opcode.DCP_MUTATION:
        has_expiry = extras[20:24] != bytes(4)
        return {"extras": (extras[:20], has_expiry, extras[24:30], len(extras))}
    if frame.opcode in (Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION):
        has_time = len(extras) > 18 and extras[16:20] != bytes(4)
        return {"extras": (extras[:16], has_time, extras[20:], len(extras))}
    return {}


# --- the sessions -------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path / "data", "--bare", user=USER, password=PASSWORD) as node:
        yield node.start()
    assert "Traceback" not in node.log(), node.log()


def test_the_session_of_7_0_5_gets_the_same_answers(bare_node: NodeProcess) -> None:
    with ExitStack() as stack:
        replay = Replay("7.0.5", bare_node.address, stack)
        replay.play(read_session("7.0.5"))
        # The third connection has taken the name of the second.
        assert replay.connections["dcp#2"].is_closed_by_the_node()


def test_the_session_of_4_6_5_gets_the_answers_of_7_0_5(bare_node: NodeProcess) -> None:
    with ExitStack() as stack:
        replay = Replay("4.6.5", bare_node.address, stack, statuses=_statuses_of_7_0_5())
        replay.play(read_session("4.6.5"))


def _statuses_of_7_0_5() -> dict[str, int]:
    """Request → status, of requests that stand under their own name in both sessions."""
    statuses: dict[str, int] = {}
    requests: dict[str, RecordedFrame] = {}
    for frame in read_session("7.0.5"):
        if not frame.is_from_server:
            requests[frame.connection] = frame
        elif frame.is_response and frame.connection in requests:
            statuses[requests.pop(frame.connection).text] = int(frame.fields["status"], 16)
    return statuses
