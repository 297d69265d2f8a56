"""What a server has said no to, in words: which request, of which key, by which status, and what it says itself."""

from __future__ import annotations

from headwater.errors import StatusError, status_error
from headwater.protocol.messages import ErrorResponse, Request
from headwater.protocol.numbers import KEY_BYTES_MAX
from headwater.protocol.status import Status


def refused_request(request: Request, answer: ErrorResponse) -> StatusError:
    """The error that the answer to a request is."""
    key: bytes = getattr(request, "key", b"")
    what = f"{type(request).__name__} of {key_text(key)}" if key else type(request).__name__
    # There it is a whole cluster map.
    context = "" if answer.status == Status.NOT_MY_VBUCKET else answer.context
    return refused(what, status=answer.status, key=key, context=context)


def refused(what: str, *, status: int, key: bytes = b"", context: str = "") -> StatusError:
    """The error for a status, with what it was the answer to."""
    error = status_error(
        status, f"the server refused {what}: {Status(status).name}{f' ({context})' if context else ''}"
    )
    if status == Status.EINVAL and len(key) > KEY_BYTES_MAX:
        # Servers have no word of their own for it.
        return type(error)(
            status, error.reason, hint=f"A key has at most {KEY_BYTES_MAX} bytes, and this one has {len(key)}"
        )
    return error


def key_text(key: bytes) -> str:
    """A key as it is shown, its beginning where it is longer than any key may be."""
    shown = key[:KEY_BYTES_MAX].decode(errors="backslashreplace")
    return f"{shown!r}{'…' if len(key) > KEY_BYTES_MAX else ''}"
