"""Sessions: who has logged in on the page.

A session is a random token in a cookie that scripts can't read and that other sites' pages don't get sent
(`HttpOnly`, `SameSite=Strict`). Here its hash is kept, with the user as it was at the log-in: one who is removed, or
has another password by now, is logged out. Sessions live and die with the process.

Cookies are not kept apart by port, and several nodes may run on one host: the port is part of the cookie's name.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from headwater.dashboard.limits import SESSION_S, SESSIONS_MAX
from headwater.dashboard.source import NodeSource

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
