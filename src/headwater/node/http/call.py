"""What a handler gets and returns: a `Call` with the node and the request, JSON answers, refusals, streams of configs.

Every handler of `pools`, `buckets`, `users` and the dashboard takes a `Call`, which `app` makes once it has checked the
user. Answers and refusals come from `headwater.http.serving`, and can be imported from here. If clients look for words
in refusals ("Scope with name … is not found"), the words are Couchbase's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headwater.accepting import Places
from headwater.http.serving import (
    LOGIN_BODY_BYTES_MAX,
    NO_CACHE,
    Json,
    PageSessions,
    Refusal,
    check_own_page,
    read_body,
    while_connected,
)
from headwater.log_fields import LogEvent
from headwater.node.auth.login_checks import LoginAttempt, LoginOutcome
from headwater.node.auth.users import Action, User
from headwater.node.service import BucketService
from headwater.phrases import parse_number
from headwater.protocol.sasl import USER_CHARS_MAX
from headwater.store.bucket import Bucket

if TYPE_CHECKING:
    from headwater.node.node_state import NodeState

__all__ = ["Call", "ConfigStreams", "Json", "Refusal", "read_body"]

FORM_FIELDS_MAX = 16
STREAMS_MAX = 256
"""The most streams of configs at a time. Beyond that, one stream of the user that has the most ends."""
STREAM_REPEAT_S = 60.0
"""A stream repeats the config after this time, so that the node notices clients that are gone."""
_NAME_CHARS_SHOWN = 64


# --- answers that take long -----------------------------------------------------------------------------------------


class LongAnswer:
    """An answer in progress."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.is_over = False
        """The answer has to end: another user has taken its place."""


class LongAnswers:
    """Long answers in progress, by user. When places run out, the user that has the most gives up one."""

    def __init__(self, on_over: Callable[[], None] = lambda: None) -> None:
        """`on_over` wakes waiting answers after one of them is over."""
        self._places: Places[LongAnswer] = Places()
        self._on_over = on_over

    def __len__(self) -> int:
        return len(self._places)

    def has_room(self, user: str, *, most: int) -> bool:
        """Whether the user may have one more."""
        return len(self) < most or self._places.first_to_go(user) is not None

    @contextmanager
    def place(self, user: str, *, most: int) -> Iterator[LongAnswer]:
        """Hold a place while the answer is in progress. If there is no room, the answer is over at once."""
        answer = LongAnswer(user)
        if len(self) < most:
            self._places.add(answer, owner=user)
        elif (oldest := self._places.first_to_go(user)) is not None:
            self._places.discard(oldest, owner=oldest.user)
            self._places.add(answer, owner=user)
            oldest.is_over = True
            self._on_over()
        else:
            answer.is_over = True
        try:
            yield answer
        finally:
            self._places.discard(answer, owner=user)


class ConfigStreams:
    """Sends the cluster config as JSON and four newlines, first at once and then whenever it has changed.

    A stream ends only if the client leaves, its bucket is gone, another user takes its place, or the node stops.
    """

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._is_closed = False
        self.open = LongAnswers(node.config_changes.notify)
        self.manifest_waits: Counter[str] = Counter()
        """For each user, how many requests wait for a manifest."""

    def stream(self, request: Request, user: str, render: Callable[[], bytes]) -> Response:
        """Answer with a stream. `render` returns the current JSON, and raises a refusal once there is none."""
        if self._is_closed or not self.open.has_room(user, most=STREAMS_MAX):
            raise Refusal.message(503, f"The node stops, or has {STREAMS_MAX} streams: ask for the config by itself")
        # If the first config can't be rendered, the answer says why; later the stream could only end.
        first = render()
        if request.method == "HEAD":
            return Json(first)
        return StreamingResponse(
            self._configs(user, render), media_type="application/json", headers={"Cache-Control": NO_CACHE}
        )

    def close(self) -> None:
        """End all streams, and refuse new ones."""
        self._is_closed = True
        self._node.config_changes.notify()

    async def _configs(self, user: str, render: Callable[[], bytes]) -> AsyncIterator[bytes]:
        changes = self._node.config_changes
        with self.open.place(user, most=STREAMS_MAX) as place:
            while not self._is_closed and not place.is_over:
                seen = changes.count
                try:
                    yield render() + b"\n\n\n\n"
                except Refusal:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(STREAM_REPEAT_S):
                        await changes.after(seen)


# --- the call -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request by a user who may make it."""

    node: NodeState
    streams: ConfigStreams
    request: Request
    user: str
    needs: Action | None = None
    """The right that the request needs, on the bucket of the path if there is one."""

    @property
    def is_allowed(self) -> bool:
        """Whether the user exists and has that right."""
        users = self.node.users
        if self.needs is None:
            return self.user in users.by_name
        return users.may(self.user, self.needs, self.request.path_params.get("bucket"))

    def path(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value

    @property
    def bucket(self) -> Bucket:
        """The bucket of the path, which must exist."""
        name = self.path("bucket")
        bucket = self.node.bucket(name)
        if bucket is None:
            raise Refusal.no_bucket(name)
        return bucket

    @property
    def service(self) -> BucketService:
        """The service of the bucket of the path, which sessions use as well."""
        return self.node.bucket_service(self.path("bucket"))

    def stream(self, render: Callable[[], bytes]) -> Response:
        """Answer with a stream of configs, which ends when the user loses the right to it."""

        def render_if_allowed() -> bytes:
            if not self.is_allowed:
                raise Refusal.message(403, "The user may not see this any more")
            return render()

        return self.streams.stream(self.request, self.user, render_if_allowed)

    # --- what a request says --------------------------------------------------------------------------------------

    def query(self, name: str, *, chars_max: int) -> str:
        value = self.request.query_params.get(name, "")
        if len(value) > chars_max:
            raise Refusal.message(400, f"{name} has at most {chars_max} characters")
        return value

    def number(self, name: str, *, smallest: int, largest: int, default: int | None = None) -> int | None:
        """A number of the query, or the default if it is missing."""
        text = self.request.query_params.get(name, "")
        if not text:
            return default
        number = parse_number(text, largest)
        if number is None or number < smallest:
            raise Refusal.message(400, f"{name} is a number from {smallest} to {largest}")
        return number

    async def form(self, *allowed: str) -> dict[str, str]:
        """The fields of the body. Refuses a field that is not allowed, or that occurs twice."""
        try:
            text = (await read_body(self.request)).decode()
            fields = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=FORM_FIELDS_MAX)
        except ValueError as error:
            raise Refusal.errors(400, f"The body is no form of at most {FORM_FIELDS_MAX} fields in UTF-8") from error
        form: dict[str, str] = {}
        for name, value in fields:
            if name not in allowed:
                raise Refusal.errors(400, "There is no such field", field=name[:_NAME_CHARS_SHOWN])
            if name in form:
                raise Refusal.errors(400, "The field is there twice", field=name)
            form[name] = value
        return form


# --- who asks: log-ins and sessions --------------------------------------------------------------------------------
# `app` asks here before every handler that needs a user. This part does not decide what a user may do with a bucket,
# except for `may_see`, which serves the dashboard.
#
# The node's `auth.login_checks` checks passwords. It slows down guessing, and caches correct passwords for a while,
# because clients poll.


_CHALLENGE = 'Basic realm="Headwater", charset="UTF-8"'
_WRONG = "The user name or the password is wrong"


def may_see(node: NodeState, user: str, bucket: str) -> bool:
    """Whether the user may read the bucket's documents and changes. False if there is no such user."""
    users = node.users
    return users.may(user, Action.READ, bucket) and users.may(user, Action.STREAM, bucket)


# --- passwords ----------------------------------------------------------------------------------------------------


class Logins:
    """Finds the user of a request by basic authentication, and refuses log-ins that fail."""

    def __init__(self, node: NodeState) -> None:
        self._node = node

    async def user_of(self, request: Request) -> str:
        """The user who has sent the request. Raises a refusal if the log-in fails."""
        name, password = _basic_credentials(request)
        if not await self.check(request, name, password):
            raise _unauthorized(_WRONG)
        return name

    async def check(self, request: Request, name: str, password: str) -> bool:
        """Whether the user has this password. Raises a refusal if there were too many attempts."""
        peer = request.client.host if request.client else ""
        attempt = LoginAttempt(peer=peer, user=name, password=password)
        verdict = await while_connected(request, self._node.login_checks.check(attempt))
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
    except ValueError as error:
        raise _unauthorized("The credentials are not base64 of UTF-8") from error
    if not colon or not 0 < len(name) <= USER_CHARS_MAX:
        raise _unauthorized(f"The credentials are not a name of 1 to {USER_CHARS_MAX} characters and a password")
    return name, password


def _unauthorized(message: str) -> Refusal:
    return Refusal.message(401, message, WWW_Authenticate=_CHALLENGE)


# --- sessions -----------------------------------------------------------------------------------------------------


class Sessions:
    """The sessions of users who have logged in on the page, and the handlers to log in and out."""

    def __init__(self, node: NodeState, logins: Logins, *, path: str) -> None:
        self._node = node
        self._logins = logins
        self._sessions: PageSessions[User] = PageSessions("headwater", path=path, now_s=node.now_s)
        """Each session keeps the user as it was at the log-in."""
        self.log_out = self._sessions.log_out

    def user_of(self, request: Request) -> str | None:
        """The user of the session, whose life this extends; None if there is no session."""
        user = self._sessions.value_of(request, is_valid=self._is_as_it_was)
        return None if user is None else user.name

    def _is_as_it_was(self, user: User) -> bool:
        """Whether the user was not removed, and has the same password and the same rights."""
        return self._node.users.by_name.get(user.name) is user

    def may_see(self, request: Request, bucket: str) -> bool:
        """Whether the request has a session of a user who may see the bucket."""
        user = self.user_of(request)
        return user is not None and may_see(self._node, user, bucket)

    async def log_in(self, request: Request) -> Response:
        check_own_page(request)
        name, password = _page_credentials(await read_body(request, bytes_max=LOGIN_BODY_BYTES_MAX))
        if not await self._logins.check(request, name, password):
            # Without the challenge: a browser that gets one opens a log-in window of its own.
            raise Refusal.message(401, _WRONG)
        response = Response(status_code=204)
        user = self._node.users.by_name.get(name)
        if user is None:
            return response
        self._sessions.begin(request, response, user, owner=name)
        return response

    async def show(self, request: Request) -> Response:
        """Show which user is logged in, if any."""
        user = self.user_of(request)
        if user is None:
            return Json({"user": None, "buckets": [], "version": ""})
        buckets = [name for name in sorted(self._node.bucket_names()) if may_see(self._node, user, name)]
        return Json({"user": user, "buckets": buckets, "version": self._node.server_version})


def _page_credentials(body: bytes) -> tuple[str, str]:
    try:
        members = json.loads(body)
        name, password = members["user"], members["password"]
        # JSON can contain half of a surrogate pair, which has no bytes to compare.
        fits = 0 < len(name) <= USER_CHARS_MAX and bool(name.encode() + password.encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fits = False
    if not fits:
        raise Refusal.message(400, "A log-in is an object with the name of a user and its password")
    return name, password
