"""Who asks: HTTP's basic authentication for programs, and sessions for the dashboard's page.

`app` asks here before every handler that needs a user. Nothing here decides what a user may do with a bucket, but
`may_see`, which is the dashboard's one question.

Passwords are checked by the node's `auth.login_checks`, which slows down guessing and remembers for a while what was
right: clients poll.
"""

from __future__ import annotations

import base64
import binascii
import json
import math

from starlette.requests import Request
from starlette.responses import Response

from headwater.http.limits import LOGIN_BODY_BYTES_MAX
from headwater.http.requests import PageSessions, check_own_page
from headwater.log_fields import LogEvent
from headwater.node.auth.login_checks import LoginAttempt, LoginOutcome
from headwater.node.auth.users import Action, User
from headwater.node.http.call import Json, Refusal, read_body
from headwater.node.node_state import NodeState
from headwater.protocol.sasl import USER_CHARS_MAX

_CHALLENGE = 'Basic realm="Headwater", charset="UTF-8"'
_WRONG = "The user name or the password is wrong"


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
        self._sessions: PageSessions[User] = PageSessions("headwater", path=path, now_s=node.now_s)
        """Each with the user as it was at the log-in."""
        self.log_out = self._sessions.log_out

    def user_of(self, request: Request) -> str | None:
        """The user of the session, which lasts longer by this; None where there is none."""
        user = self._sessions.value_of(request, is_valid=self._is_as_it_was)
        return None if user is None else user.name

    def _is_as_it_was(self, user: User) -> bool:
        """Not removed, or with another password or other rights by now."""
        return self._node.users.by_name.get(user.name) is user

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
        self._sessions.begin(request, response, user)
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
