"""Many requests over one blocking connection, sent without waiting for the answers to those before.

A server that brings every write to the disk does so for all that have come until then. Asked one by one, it would have
to do it for each: a thousand writes in seconds instead of milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headwater.client.handshake import ANSWER_BYTES_MAX
from headwater.client.kv_connection import RECEIVE_BYTES, KvConnection, broken, closed
from headwater.errors import StatusError, UnexpectedMessage
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages import ErrorResponse, Request, Response, decode_message
from headwater.protocol.opcodes import Magic
from headwater.protocol.refusals import refused_request

WINDOW_REQUESTS = 128
"""What may be sent and not answered. They are small, and must fit into the buffers between us and the server: while we
send, nobody takes its answers."""


def answers_to(connection: KvConnection, requests: Sequence[Request]) -> Iterator[Response | StatusError]:
    """The answers in the order of the requests; a refusal is an answer, too.

    Raises `ConnectionFailed` or `RemoteProtocolError` in the middle, and then the connection is of no further use.
    """
    frames = FrameBuffer(body_bytes_max=ANSWER_BYTES_MAX)
    for start in range(0, len(requests), WINDOW_REQUESTS):
        window = [
            replace(request, opaque=opaque)
            for opaque, request in enumerate(requests[start : start + WINDOW_REQUESTS], start)
        ]
        try:
            connection.sock.sendall(b"".join(request.encode() for request in window))
        except OSError as error:
            raise broken(connection.address, error, waited_s=connection.sock.gettimeout() or 0.0) from error
        for request in window:
            yield _answer(connection, request, _next_frame(connection, frames))


def _next_frame(connection: KvConnection, frames: FrameBuffer) -> Frame:
    while (frame := frames.next_frame()) is None:
        try:
            data = connection.sock.recv(RECEIVE_BYTES)
        except OSError as error:
            raise broken(connection.address, error, waited_s=connection.sock.gettimeout() or 0.0) from error
        if not data:
            raise closed(connection.address)
        frames.receive_data(data)
    # What a server says of its own accord is of no use here.
    return frame if frame.magic is not Magic.SERVER_REQUEST else _next_frame(connection, frames)


def _answer(connection: KvConnection, request: Request, frame: Frame) -> Response | StatusError:
    if frame.magic.is_request or (frame.opcode, frame.opaque) != (request.opcode, request.opaque):
        raise UnexpectedMessage(f"{frame.opcode_name}, where the answer to {type(request).__name__} was due")
    answer = decode_message(frame, connection.outcome.negotiated)
    assert isinstance(answer, Response)
    return refused_request(request, answer) if isinstance(answer, ErrorResponse) else answer
