"""Who asks: HTTP's basic authentication against the node's users.

To check a password takes about ten milliseconds, by design, and clients poll. So a password that was right is
remembered for a while, as a hash with a key that lives and dies with the process. What is remembered goes with the
user: one who is removed, or has another password by now, is another value.

Checks are made in a thread, so that others are served meanwhile, and one at a time, as the throttle wants it. The
throttle is asked even where the password is remembered: a right guess among throttled ones would tell itself apart.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.routing import BaseRoute

from headwater.errors import HeadwaterError
from headwater.log_fields import LogEvent
from headwater.node.auth.users import User
from headwater.node.http.call import LOGIN_KNOWN_S, LOGINS_KNOWN_MAX, LOGINS_WAITING_MAX, NodeView, Refusal
from headwater.protocol.sasl import USER_CHARS_MAX

_CHALLENGE = 'Basic realm="Headwater", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class _Known:
    user: User
    until_s: float


class Logins:
    """Checks who asks, and remembers whom it has checked."""

    def __init__(self, node: NodeView, *, key: bytes) -> None:
        self._node = node
        self._key = key
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """By the hash of name and password, the oldest first."""
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._known)

    async def user_of(self, request: Request) -> str:
        """The user who has sent the request, or a refusal."""
        name, password = _credentials(request)
        await self.check(request.client.host if request.client else "", name, password)
        return name

    async def check(self, peer: str, name: str, password: str) -> None:
        """Raise a refusal unless the user has this password. `peer` is the address that it came from."""
        self._check_throttle(peer, name)
        digest = self._digest(name, password)
        if self._is_known(digest, name):
            return
        if self._waiting >= LOGINS_WAITING_MAX:
            raise Refusal.message(503, "Too many log-ins at once: try again in a second", Retry_After="1")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                await self._check(peer, name, password, digest)
        finally:
            self._waiting -= 1

    async def _check(self, peer: str, name: str, password: str, digest: bytes) -> None:
        # Others with the same password may have been checked while this one waited, or have failed too often.
        self._check_throttle(peer, name)
        if self._is_known(digest, name):
            return
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
            raise _unauthorized("The user name or the password is wrong")
        self._node.throttle.succeeded(peer, name)
        self._known[digest] = _Known(users.by_name[name], now_s + LOGIN_KNOWN_S)
        self._known.move_to_end(digest)
        if len(self._known) > LOGINS_KNOWN_MAX:
            self._known.popitem(last=False)

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

    def _digest(self, name: str, password: str) -> bytes:
        encoded = name.encode()
        return hmac.digest(self._key, len(encoded).to_bytes(4) + encoded + password.encode(), hashlib.sha256)


def _credentials(request: Request) -> tuple[str, str]:
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


# What else may be served on the node's HTTP port: routes from outside, which bring their own rules for who may ask.
#
# The node does not know what they are. Whoever starts the node hands them in (`cli.serve` does so with the dashboard).


class Extension(Protocol):
    """Routes, and what has to run beside them."""

    @property
    def home(self) -> str:
        """The path that a browser is sent to from `/`."""
        ...

    @property
    def routes(self) -> Sequence[BaseRoute]: ...

    def prepare(self) -> None:
        """Do beforehand what takes long. Called in a thread, before `start`."""
        ...

    def start(self) -> None:
        """The node serves from now on. Called in its event loop."""
        ...

    def close(self) -> None:
        """The node stops: end what would never end by itself."""
        ...


MakeExtension = Callable[[Logins], Extension]
