"""Answers: JSON, and the refusals in the forms that Couchbase gives them.

A refusal is raised, wherever it is noticed. Three forms: `errors` by the name of the field, `_` for the whole; a
`message`; and, for users that are not there, a mere string. Where clients look for words in them ("Scope with name … is
not found"), the words are Couchbase's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

NO_CACHE = "no-cache,no-store,must-revalidate"


class Json(Response):
    """A JSON answer that nobody keeps."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status_code, {"Cache-Control": NO_CACHE, **(headers or {})})

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()


class Refusal(Exception):
    """The request is answered with an error status."""

    def __init__(self, status: int, body: dict[str, Any] | str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body
        self.headers = headers

    @classmethod
    def message(cls, status: int, message: str, **headers: str) -> Refusal:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status, {"message": message}, headers=named)

    @classmethod
    def errors(cls, status: int, message: str, *, field: str = "_") -> Refusal:
        return cls(status, {"errors": {field: message}})

    def response(self) -> Response:
        return Json(self.body, self.status, headers=self.headers)


def forbidden(*permissions: str) -> Refusal:
    words = "Forbidden. User needs the following permissions"
    return Refusal(403, {"message": words, "permissions": list(permissions)})


def no_bucket(name: str) -> Refusal:
    return Refusal.errors(404, f'Bucket with name "{name}" not found')
