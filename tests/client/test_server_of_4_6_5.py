"""A client and a server of 4.6.5, which answers with the frames of its recorded session with the user of a bucket."""

from __future__ import annotations

import socket

import pytest

from headwater import blocking
from headwater.errors import NotSupported
from headwater.protocol.features import Opcode
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages.base import ErrorResponse, PlainResponse
from headwater.protocol.messages.dcp_streams import StreamEnd
from headwater.protocol.messages.session import Hello, HelloResponse
from headwater.protocol.numbers import VBucketId
from headwater.protocol.status import Status
from support.fake_servers import serving
from support.recorded_sessions import RecordedFrame, read_session

SESSION = read_session("4.6.5-user")
GRANTED = {0x01, 0x03, 0x04}
KNOWN_CONTROLS = {b"enable_noop", b"set_noop_interval", b"connection_buffer_size", b"supports_cursor_dropping"}


def recorded(text: str, *, section: str = "2.") -> list[RecordedFrame]:
    """What the server sent behind the request of this text, up to the next request on that connection."""
    at = next(
        at for at, frame in enumerate(SESSION) if frame.text.startswith(text) and frame.section.startswith(section)
    )
    connection, answers = SESSION[at].connection, []
    for frame in SESSION[at + 1 :]:
        if frame.connection == connection and not frame.is_from_server:
            break
        if frame.connection == connection:
            answers.append(frame)
    assert answers
    return answers


class RecordedServer:
    """Answers every connection. What it does not know ends the connection, as it did."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.stream_flags: set[int] = set()
        self.port = 0

    def talk(self, sock: socket.socket) -> None:
        frames = FrameBuffer()
        while data := sock.recv(1 << 16):
            frames.receive_data(data)
            for frame in frames.frames():
                if not frame.magic.is_request:
                    continue
                self.seen.append(frame.opcode_name)
                if frame.opcode == Opcode.DCP_STREAM_REQUEST:
                    self.stream_flags.add(int.from_bytes(frame.extras[:4]))
                answer = self._answer(frame)
                if answer is None:
                    return
                sock.sendall(answer)

    def _answer(self, frame: Frame) -> bytes | None:
        match frame.opcode:
            case Opcode.HELLO:
                features = Hello.from_frame(frame).features
                granted = tuple(feature for feature in features if feature in GRANTED)
                return HelloResponse(opaque=frame.opaque, features=granted).encode()
            case Opcode.SASL_LIST_MECHS:
                return PlainResponse(opcode=Opcode.SASL_LIST_MECHS, opaque=frame.opaque, value=b"PLAIN").encode()
            case Opcode.SASL_AUTH:
                assert frame.value == b"\0b46\0password"
                return self._play(frame, recorded("SASL PLAIN", section="0."))
            case Opcode.GET_CLUSTER_CONFIG:
                config = recorded("GET_CLUSTER_CONFIG")[0].data[24:].replace(b"11210", str(self.port).encode())
                return PlainResponse(opcode=Opcode.GET_CLUSTER_CONFIG, opaque=frame.opaque, value=config).encode()
            case Opcode.GET_ALL_VB_SEQNOS:
                return self._play(frame, recorded("GET_ALL_VB_SEQNOS of active vbuckets on the DCP connection"))
            case Opcode.DCP_OPEN:
                return self._play(frame, recorded("OPEN flags=0x1 PRODUCER"))
            case Opcode.DCP_CONTROL if frame.key in KNOWN_CONTROLS:
                return PlainResponse(opcode=Opcode.DCP_CONTROL, opaque=frame.opaque).encode()
            case Opcode.DCP_CONTROL:
                status = Status(int.from_bytes(recorded("CONTROL enable_expiry_opcode=true")[0].data[6:8]))
                return ErrorResponse(opcode=Opcode.DCP_CONTROL, opaque=frame.opaque, status=status).encode()
            case Opcode.DCP_STREAM_REQUEST if frame.specific == 0:
                end = StreamEnd(vbucket=VBucketId(0), opaque=frame.opaque).encode()
                return self._play(frame, recorded("STREAM_REQ vb=0 [0,infinity]")) + end
            case Opcode.DCP_STREAM_REQUEST:
                return self._play(frame, recorded("STREAM_REQ vb=1 [0,0]"))
            case Opcode.DCP_BUFFER_ACK:
                return b""
            case _:
                return None

    def _play(self, request: Frame, answers: list[RecordedFrame]) -> bytes:
        """The recorded frames under the opaque of this request."""
        opaque = request.opaque.to_bytes(4)
        return b"".join(bytes(frame.data[:12]) + opaque + bytes(frame.data[16:]) for frame in answers)


def test_the_user_of_a_bucket_reads_it() -> None:
    server = RecordedServer()
    with serving(server.talk) as address:
        server.port = address.port
        with blocking.connect(f"couchbase://{address}/b46", user="b46", password="password") as client:
            batches = client.batches(end="now")
            rows = [row for batch in batches for row in batch.to_pylist()]
            assert {vbucket: offset.seqno for vbucket, offset in batches.offsets.offsets.items()} == {0: 3, 1: 0}
    assert [(row["op"], row["key"], row["seqno"]) for row in rows] == [
        ("mutation", "doc-0", 1),
        ("deletion", "doc-1", 3),
    ]
    assert server.stream_flags == {0}, "flags that it does not know"
    assert "SELECT_BUCKET" not in server.seen
    assert "GET_ERROR_MAP" not in server.seen


def test_a_bucket_without_history_says_that_its_storage_has_none() -> None:
    server = RecordedServer()
    with serving(server.talk) as address:
        server.port = address.port
        client = blocking.connect(f"couchbase://{address}/b46", user="b46", password="password")
        with client, pytest.raises(NotSupported, match="only Magma buckets"):
            next(client.batches(history=True))
