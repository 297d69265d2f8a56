"""Who asks: HTTP's basic authentication for programs, and sessions for the dashboard's page.

`app` asks here before every handler that needs a user. Nothing here decides what a user may do with a bucket, but
`may_see`, which is the dashboard's one question.

Passwords are checked by the node's `auth.login_checks`, which slows down guessing and remembers for a while what was
right: clients poll.

A session is a random token in a cookie that scripts can't read and that other sites' pages don't get sent (`HttpOnly`,
`SameSite=Strict`). Its hash is kept here, with the user as it was at the log-in. Sessions end with the process. Cookies
are not kept apart by port, and several nodes may run on one host: the port is part of the cookie's name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from headwater.http.limits import LOGIN_BODY_BYTES_MAX, SESSION_S, SESSIONS_MAX
from headwater.http.requests import check_own_page
from headwater.log_fields import LogEvent
from headwater.node.auth.login_checks import LoginAttempt, LoginOutcome
from headwater.node.auth.users import Action, User
from headwater.node.http.call import Json, Refusal, read_body
from headwater.node.node_state import NodeState
from headwater.protocol.sasl import USER_CHARS_MAX

_CHALLENGE = 'Basic realm="Headwater", charset="UTF-8"'
_WRONG = "The user name or the password is wrong"
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A user as it was when it logged in, and until when that counts."""

    user: User
    until_s: float


def may_see(node: NodeState, user: str, bucket: str) -> bool:
    """Whether the user may read the bucket's documents and changes. False where there is no such user."""
    users = node.users
    return users.may(user, Action.READ, bucket) and users.may(user, Action.STREAM, bucket)


# --- passwords ----------------------------------------------------------------------------------------------------


class Logins:
    """Who sends a request, by basic authentication; and the answers to log-ins that fail."""

    def __init__(self, node: NodeState) -> None:
        self._node = node

    async def user_of(self, request: Request) -> str:
        """The user who has sent the request, or a refusal."""
        name, password = _basic_credentials(request)
        if not await self.check(request, name, password):
            raise _unauthorized(_WRONG)
        return name

    async def check(self, request: Request, name: str, password: str) -> bool:
        """Whether the user has this password. Raises a refusal where there are too many tries."""
        peer = request.client.host if request.client else ""
        verdict = await self._node.login_checks.check(LoginAttempt(peer=peer, user=name, password=password))
        if verdict.outcome is LoginOutcome.RIGHT:
            return True
        seconds = math.ceil(verdict.wait_s)
        if verdict.outcome is LoginOutcome.BUSY:
            raise Refusal.message(503, f"Too many log-ins at once: try again in {seconds} s", Retry_After=str(seconds))
        if verdict.outcome is LoginOutcome.THROTTLED:
            self._log(peer, name, "refused: too many failures before it")
            raise Refusal.message(429, f"Too many failed log-ins: try again in {seconds} s", Retry_After=str(seconds))
        self._log(peer, name, "failed")
        return False

    def _log(self, peer: str, name: str, what: str) -> None:
        message = f"log-in of {name!r} from {peer} over HTTP {what}"
        self._node.log(message, event=LogEvent.LOGIN_FAILED, user=name, peer=peer)


def _basic_credentials(request: Request) -> tuple[str, str]:
    header = request.headers.get("authorization")
    if header is None:
        raise _unauthorized("Log in with the name and password of a user of this node")
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        raise _unauthorized("Log in with HTTP's basic authentication")
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise _unauthorized("The credentials are not base64 of UTF-8") from error
    if not colon or not 0 < len(name) <= USER_CHARS_MAX:
        raise _unauthorized(f"The credentials are not a name of 1 to {USER_CHARS_MAX} characters and a password")
    return name, password


def _unauthorized(message: str) -> Refusal:
    return Refusal.message(401, message, WWW_Authenticate=_CHALLENGE)


# --- sessions -----------------------------------------------------------------------------------------------------


class Sessions:
    """Who has logged in on the page, and the handlers for that."""

    def __init__(self, node: NodeState, logins: Logins, *, path: str) -> None:
        self._node = node
        self._logins = logins
        self._path = path
        self._known: OrderedDict[bytes, _Remembered] = OrderedDict()
        """By the hash of the token, the one that was used longest ago first."""

    def user_of(self, request: Request) -> str | None:
        """The user of the session, which lasts longer by this; None where there is none."""
        token = request.cookies.get(_cookie_name(request))
        if token is None:
            return None
        digest = _digest(token)
        session = self._known.pop(digest, None)
        now_s = self._node.now_s()
        if session is None or session.until_s <= now_s:
            return None
        name = session.user.name
        if self._node.users.by_name.get(name) is not session.user:
            # Removed, or with another password or other rights by now: logged out.
            return None
        self._known[digest] = _Remembered(session.user, now_s + SESSION_S)
        return name

    def may_see(self, request: Request, bucket: str) -> bool:
        """Whether there is a session, of a user who may see the bucket."""
        user = self.user_of(request)
        return user is not None and may_see(self._node, user, bucket)

    async def log_in(self, request: Request) -> Response:
        check_own_page(request)
        name, password = _page_credentials(await read_body(request, bytes_max=LOGIN_BODY_BYTES_MAX))
        if not await self._logins.check(request, name, password):
            # Without the challenge: a browser that saw it would ask with a window of its own.
            raise Refusal.message(401, _WRONG)
        response = Response(status_code=204)
        user = self._node.users.by_name.get(name)
        if user is None:
            return response
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._known[_digest(token)] = _Remembered(user, self._node.now_s() + SESSION_S)
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
        return response

    async def log_out(self, request: Request) -> Response:
        check_own_page(request)
        response = Response(status_code=204)
        token = request.cookies.get(_cookie_name(request))
        if token is not None:
            self._known.pop(_digest(token), None)
        response.delete_cookie(_cookie_name(request), path=self._path, httponly=True, samesite="strict")
        return response

    async def show(self, request: Request) -> Response:
        """Who is logged in. That no user is, is an answer like any other."""
        user = self.user_of(request)
        if user is None:
            return Json({"user": None, "buckets": [], "version": ""})
        buckets = [name for name in sorted(self._node.bucket_names()) if may_see(self._node, user, name)]
        return Json({"user": user, "buckets": buckets, "version": self._node.server_version})


def _page_credentials(body: bytes) -> tuple[str, str]:
    try:
        members = json.loads(body)
        name, password = members["user"], members["password"]
        # JSON can say half a character, which has no bytes that could be compared.
        fits = 0 < len(name) <= USER_CHARS_MAX and bool(name.encode() + password.encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fits = False
    if not fits:
        raise Refusal.message(400, "A log-in is an object with the name of a user and its password")
    return name, password


def _cookie_name(request: Request) -> str:
    server = request.scope.get("server")
    return f"headwater-{server[1] if server else 0}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
