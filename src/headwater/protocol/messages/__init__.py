"""One class per message, for both directions and every version.

`decode_message` turns a frame into its message; a message's `encode` turns it back into the same bytes. `Negotiated`
says what the frame's bytes do not: whether keys carry collection ids. `refused_request` turns an error response into
the error that a caller of the client sees.
"""

from __future__ import annotations

from headwater.errors import StatusError, UnknownOpcode, status_error
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
from headwater.protocol.numbers import KEY_BYTES_MAX
from headwater.protocol.status import SUCCESSFUL, Status

__all__ = [
    "REQUESTS", "RESPONSES", "SERVER_REQUESTS", "ErrorResponse", "Message", "PlainResponse", "Request", "Response",
    "decode_message", "key_text", "refused", "refused_request",
]  # fmt: skip


def decode_message(frame: Frame, negotiated: Negotiated = NOTHING_NEGOTIATED) -> Message:
    """Return the message in a frame; an `ErrorResponse` if the status is an error. Raises `RemoteProtocolError`."""
    if frame.magic.is_request:
        table = SERVER_REQUESTS if frame.magic is Magic.SERVER_REQUEST else REQUESTS
        request = table.get(frame.opcode)
        if request is None:
            raise UnknownOpcode(frame.opcode)
        return request.from_frame(frame, negotiated)
    # Server responses have opcodes of their own, and no server request that we know is answered.
    if frame.magic is Magic.SERVER_RESPONSE or not Opcode(frame.opcode).is_known:
        raise UnknownOpcode(frame.opcode)
    status = Status(frame.specific)
    response = RESPONSES.get(frame.opcode)
    if response is None or status not in response.statuses:
        response = PlainResponse if status in SUCCESSFUL else ErrorResponse
    return response.from_frame(frame, negotiated)


# --- refusals in words: which request, of which key, by which status, and the server's own message --------------------


def refused_request(request: Request, answer: ErrorResponse) -> StatusError:
    """Return the error for an error response to a request."""
    key: bytes = getattr(request, "key", b"")
    what = f"{type(request).__name__} of {key_text(key)}" if key else type(request).__name__
    # The body of NOT_MY_VBUCKET is a whole cluster map.
    context = "" if answer.status == Status.NOT_MY_VBUCKET else answer.context
    return refused(what, status=answer.status, key=key, context=context)


def refused(what: str, *, status: int, key: bytes = b"", context: str = "") -> StatusError:
    """Return the error for a status, with what it was the answer to."""
    error = status_error(
        status, f"the server refused {what}: {Status(status).name}{f' ({context})' if context else ''}"
    )
    if status == Status.EINVAL and len(key) > KEY_BYTES_MAX:
        # Servers have no separate status for this.
        return type(error)(
            status, error.reason, hint=f"A key has at most {KEY_BYTES_MAX} bytes, and this one has {len(key)}"
        )
    return error


def key_text(key: bytes) -> str:
    """Return a key for display, cut if it is longer than any key may be."""
    shown = key[:KEY_BYTES_MAX].decode(errors="backslashreplace")
    return f"{shown!r}{'…' if len(key) > KEY_BYTES_MAX else ''}"
