"""Answers of the dashboard: what all of them carry, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOT_KEPT = {**SECURITY_HEADERS, "Cache-Control": "no-store"}


class Refused(Exception):
    """The request is answered with an error status and a message for people."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def response(self) -> Response:
        return as_json({"message": self.message}, self.status)


def as_json(content: Any, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(content, separators=(",", ":")).encode()
    return Response(body, status, {**NOT_KEPT, **(headers or {})}, media_type="application/json")
