"""Who asks: HTTP's basic authentication for programs, and sessions for the dashboard's page.

`app` asks here before every handler that needs a user. Nothing here decides what a user may do with a bucket, but
`may_see`, which is the dashboard's one question.

To check a password takes about ten milliseconds, by design, and clients poll. So a password that was right is
remembered for a while, as a hash with a key that lives and dies with the process. What is remembered goes with the
user: one who is removed, or has another password by now, is another value.

Checks are made in a thread, so that others are served meanwhile, and one at a time, as the throttle wants it. The
throttle is asked even where the password is remembered: a right guess among throttled ones would show itself.

A session is a random token in a cookie that scripts can't read and that other sites' pages don't get sent (`HttpOnly`,
`SameSite=Strict`). Its hash is kept here, with the user as it was at the log-in. Sessions end with the process. Cookies
are not kept apart by port, and several nodes may run on one host: the port is part of the cookie's name.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from headwater.errors import HeadwaterError
from headwater.log_fields import LogEvent
from headwater.node.auth.users import Action, User
from headwater.node.http.call import Json, Refusal, read_body
from headwater.node.http.limits import (
    LOGIN_BODY_BYTES_MAX,
    LOGIN_KNOWN_S,
    LOGINS_KNOWN_MAX,
    LOGINS_WAITING_MAX,
    SESSION_S,
    SESSIONS_MAX,
)
from headwater.node.node_state import NodeState
from headwater.protocol.sasl import USER_CHARS_MAX

OWN_HEADER = "x-headwater-dashboard"
"""Only the dashboard's page sends it."""
_CHALLENGE = 'Basic realm="Headwater", charset="UTF-8"'
_WRONG = "The user name or the password is wrong"
_KEY_BYTES = 32
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
    """Checks passwords, and remembers which it has checked."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._known: OrderedDict[bytes, _Remembered] = OrderedDict()
        """By the hash of name and password, the oldest first."""
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def user_of(self, request: Request) -> str:
        """The user who has sent the request, by basic authentication, or a refusal."""
        name, password = _basic_credentials(request)
        if not await self.check(request, name, password):
            raise _unauthorized(_WRONG)
        return name

    async def check(self, request: Request, name: str, password: str) -> bool:
        """Whether the user has this password. Raises a refusal where there are too many tries."""
        peer = request.client.host if request.client else ""
        self._check_throttle(peer, name)
        encoded = name.encode()
        digest = hmac.digest(self._key, len(encoded).to_bytes(4) + encoded + password.encode(), hashlib.sha256)
        if self._is_known(digest, name):
            return True
        if self._waiting >= LOGINS_WAITING_MAX:
            raise Refusal.message(503, "Too many log-ins at once: try again in a second", Retry_After="1")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                # Others with the same password may have been checked while this one waited, or have failed too often.
                self._check_throttle(peer, name)
                return self._is_known(digest, name) or await self._check_now(peer, name, password, digest)
        finally:
            self._waiting -= 1

    async def _check_now(self, peer: str, name: str, password: str, digest: bytes) -> bool:
        users = self._node.users
        try:
            matches = await asyncio.to_thread(users.check_password, name, password)
        except HeadwaterError:
            matches = False
        now_s = self._node.now_s()
        if not matches:
            self._node.throttle.failed(peer, name, now_s=now_s)
            message = f"log-in of {name!r} from {peer} over HTTP failed"
            self._node.log(message, event=LogEvent.LOGIN_FAILED, user=name, peer=peer)
            return False
        self._node.throttle.succeeded(peer, name)
        self._known[digest] = _Remembered(users.by_name[name], now_s + LOGIN_KNOWN_S)
        self._known.move_to_end(digest)
        if len(self._known) > LOGINS_KNOWN_MAX:
            self._known.popitem(last=False)
        return True

    def _check_throttle(self, peer: str, name: str) -> None:
        wait_s = self._node.throttle.wait_s(peer, name, now_s=self._node.now_s())
        if wait_s > 0:
            message = f"log-in of {name!r} from {peer} over HTTP refused: too many failures before it"
            self._node.log(message, event=LogEvent.LOGIN_FAILED, user=name, peer=peer)
            seconds = math.ceil(wait_s)
            raise Refusal.message(429, f"Too many failed log-ins: try again in {seconds} s", Retry_After=str(seconds))

    def _is_known(self, digest: bytes, name: str) -> bool:
        known = self._known.get(digest)
        if known is None:
            return False
        if known.until_s > self._node.now_s() and self._node.users.by_name.get(name) is known.user:
            return True
        del self._known[digest]
        return False


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
        _check_own_page(request)
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
        _check_own_page(request)
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


def _check_own_page(request: Request) -> None:
    """Refuse what does not come from the dashboard's own page.

    What changes something is asked with POST, with a header that a form of another site can't send, and from this very
    origin: cookies alone say nothing, since pages of another port on the same host are sent them, too.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if request.headers.get(OWN_HEADER) is None or origin is None or urlsplit(origin).netloc != host:
        raise Refusal.message(403, "Only the dashboard's own page may do this")


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
