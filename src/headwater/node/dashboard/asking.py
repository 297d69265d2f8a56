"""Answers of the dashboard: what all of them carry, and refusals."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from headwater.node.dashboard.samples import BucketSampler
from headwater.node.dashboard.source import SESSION_S, SESSIONS_MAX, NodeSource

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


# Sessions: who has logged in on the page.
#
# A session is a random token in a cookie that scripts can't read and that other sites' pages don't get sent
# (`HttpOnly`, `SameSite=Strict`). Here its hash is kept, with the user as it was at the log-in: one who is removed, or
# has another password by now, is logged out. Sessions live and die with the process.
#
# Cookies are not kept apart by port, and several nodes may run on one host: the port is part of the cookie's name.


_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Session:
    name: str
    user: object
    until_s: float


class Sessions:
    """See the module."""

    def __init__(self, source: NodeSource, *, path: str) -> None:
        self._source = source
        self._path = path
        self._known: OrderedDict[bytes, _Session] = OrderedDict()
        """By the hash of the token, the one that was used longest ago first."""

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, request: Request, response: Response, name: str) -> None:
        """Remember that this user has logged in, and give the browser the token."""
        user = self._source.user(name)
        if user is None:
            return
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._known[_digest(token)] = _Session(name, user, self._source.now_s() + SESSION_S)
        if len(self._known) > SESSIONS_MAX:
            self._known.popitem(last=False)
        response.set_cookie(
            _cookie_name(request),
            token,
            path=self._path,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )

    def user_of(self, request: Request) -> str | None:
        """The user of the session, which lasts longer by this; None where there is none."""
        token = request.cookies.get(_cookie_name(request))
        if token is None:
            return None
        digest = _digest(token)
        session = self._known.pop(digest, None)
        now_s = self._source.now_s()
        if session is None or session.until_s <= now_s or self._source.user(session.name) is not session.user:
            return None
        self._known[digest] = _Session(session.name, session.user, now_s + SESSION_S)
        return session.name

    def end(self, request: Request, response: Response) -> None:
        token = request.cookies.get(_cookie_name(request))
        if token is not None:
            self._known.pop(_digest(token), None)
        response.delete_cookie(_cookie_name(request), path=self._path, httponly=True, samesite="strict")


def _cookie_name(request: Request) -> str:
    server = request.scope.get("server")
    return f"headwater-{server[1] if server else 0}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


# Who may ask the dashboard for what: the session, the bucket, and where a request comes from.
#
# What changes something is asked with POST, with a header that a form of another site can't send, and from this very
# origin: cookies alone say nothing, since pages of another port on the same host are sent them, too.


OWN_HEADER = "x-headwater-dashboard"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request by a user, for a bucket that the user may see."""

    request: Request
    user: str
    sampler: BucketSampler

    def query(self, name: str, *, chars_max: int) -> str:
        value = self.request.query_params.get(name, "")
        if len(value) > chars_max:
            raise Refused(400, f"{name} has at most {chars_max} characters")
        return value

    def number(self, name: str, *, smallest: int, largest: int, default: int | None = None) -> int | None:
        text = self.request.query_params.get(name, "")
        if not text:
            return default
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else -1
        if not smallest <= number <= largest:
            raise Refused(400, f"{name} is a number from {smallest} to {largest}")
        return number


def answering(handle: Handler) -> Handler:
    """Turn a refusal into the answer that it stands for."""

    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except Refused as refused:
            return refused.response()

    return answer


def for_bucket(
    source: NodeSource,
    sessions: Sessions,
    find: Callable[[str], BucketSampler | None],
    handle: Callable[[Asked], Awaitable[Response]],
) -> Handler:
    """A handler for users who have logged in and may see the bucket of the path."""

    async def checked(request: Request) -> Response:
        user = logged_in(sessions, request)
        name = request.path_params["bucket"]
        sampler = find(name) if source.may_see(user, name) else None
        if sampler is None:
            # Whether there is one is nothing for those who may not see it.
            raise Refused(403, f"You may not see a bucket {name!r}")
        return await handle(Asked(request=request, user=user, sampler=sampler))

    return answering(checked)


def logged_in(sessions: Sessions, request: Request) -> str:
    user = sessions.user_of(request)
    if user is None:
        raise Refused(401, "Log in first")
    return user


def check_own_page(request: Request) -> None:
    """Refuse what does not come from the dashboard's own page."""
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if request.headers.get(OWN_HEADER) is None or origin is None or urlsplit(origin).netloc != host:
        raise Refused(403, "Only the dashboard's own page may do this")
