"""One class a message, both directions, every version.

`decode_message` turns a frame into its message; a message's `encode` turns it back into the same bytes. What the
frame's bytes cannot tell by themselves, whether keys carry collection ids, comes in as `Negotiated`.
"""

from __future__ import annotations

from headwater.errors import UnknownOpcode
from headwater.protocol.features import NOTHING_NEGOTIATED, Magic, Negotiated, Opcode
from headwater.protocol.frames import Frame
from headwater.protocol.messages import (  # noqa: F401  (imported to be entered in the tables)
    dcp_changes,
    dcp_streams,
    documents,
    session,
    subdocument,
    vbuckets,
)
from headwater.protocol.messages.base import (
    REQUESTS,
    RESPONSES,
    SERVER_REQUESTS,
    ErrorResponse,
    Message,
    PlainResponse,
    Request,
    Response,
)
from headwater.protocol.status import SUCCESSFUL, Status

__all__ = [
    "REQUESTS",
    "RESPONSES",
    "SERVER_REQUESTS",
    "ErrorResponse",
    "Message",
    "PlainResponse",
    "Request",
    "Response",
    "decode_message",
]


def decode_message(frame: Frame, negotiated: Negotiated = NOTHING_NEGOTIATED) -> Message:
    """The message a frame is. A response with an error status is an `ErrorResponse`, whatever its opcode."""
    if frame.magic is Magic.SERVER_REQUEST:
        return _decode_request(SERVER_REQUESTS, frame, negotiated)
    if frame.magic.is_request:
        return _decode_request(REQUESTS, frame, negotiated)
    if frame.magic is Magic.SERVER_RESPONSE:
        # Its opcodes are numbered apart, and no server request that we know is answered.
        raise UnknownOpcode(frame.opcode)
    return _response_class(frame).from_frame(frame, negotiated)


def _decode_request(table: dict[int, type[Request]], frame: Frame, negotiated: Negotiated) -> Request:
    cls = table.get(frame.opcode)
    if cls is None:
        raise UnknownOpcode(frame.opcode)
    return cls.from_frame(frame, negotiated)


def _response_class(frame: Frame) -> type[Response]:
    if not Opcode(frame.opcode).is_known:
        raise UnknownOpcode(frame.opcode)
    status = Status(frame.specific)
    cls = RESPONSES.get(frame.opcode)
    if cls is not None and status in cls.statuses:
        return cls
    return PlainResponse if status in SUCCESSFUL else ErrorResponse
