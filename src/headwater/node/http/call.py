"""What a handler gets: the node, the request, who asks, and the bucket that the path names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Unpack
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from headwater.log_fields import Fields
from headwater.node.auth.accounts import LoginThrottle
from headwater.node.auth.users import Action, Users
from headwater.node.failover_drill import RolledBack
from headwater.node.producer.connection import ProducerConnection
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Seqno, VBucketId

# Answers: JSON, and the refusals in the forms that Couchbase gives them.
#
# A refusal is raised, wherever it is noticed. Three forms: `errors` by the name of the field, `_` for the whole; a
# `message`; and, for users that are not there, a mere string. Where clients look for words in them ("Scope with name …
# is not found"), the words are Couchbase's.


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


# The bounds of the HTTP side, in one place.


CONNECTIONS_MAX = 512
"""Beyond that a request is answered with 503."""

REQUEST_S_MAX = 10.0
"""How long a connection may take to send the head of a request, and then the body of it."""

KEEP_ALIVE_S = 60
"""How long a connection may rest between two requests. Clients poll every few seconds."""

STOP_S_MAX = 5
"""How long requests under way may take to end when the node stops."""

HEAD_BYTES_MAX = 16 * 1024
"""Path and headers. The longest real one has a password in it."""

HEAD_BUFFER_BYTES_MAX = 32 * 1024
"""Where the HTTP parser gives up, with an answer of its own: above what gets ours."""

BODY_BYTES_MAX = 64 * 1024
"""The longest form there is names a collection."""

FORM_FIELDS_MAX = 16

STREAMS_MAX = 256
"""Streams of configs that are open at a time."""

STREAM_REPEAT_S = 60.0
"""A stream says the config again after this time, so that a client that is gone is noticed."""

ENSURE_S_DEFAULT = 30.0
ENSURE_S_MAX = 300.0
"""How long a request may wait for a manifest."""

LOGINS_KNOWN_MAX = 1_024
LOGIN_KNOWN_S = 60.0
"""How many checked passwords are remembered, as keyed hashes, and how long."""

LOGINS_WAITING_MAX = 64
"""Passwords are checked one at a time; this many may wait for that."""


# A signal to any number of waiters that something has changed, of which none can miss a change.


class Changes:
    """Counts changes. Note `count`, look at the thing, then wait for a change `after` that count.

    For one event loop: `notify` is called in the loop that waits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, count: int) -> None:
        """Return once there have been more changes than `count`."""
        while self.count <= count:
            await self._next.wait()


# What the HTTP side needs of a node. Whoever runs the node implements `NodeView`.


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """A bucket as it is now."""

    name: str
    uuid: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUsage:
    """What a bucket holds and takes."""

    items: int
    disk_bytes: int
    memory_bytes: int
    memory_quota_bytes: int


class NodeView(Protocol):
    """The node as the routes see it. Everything is called in the event loop that runs the HTTP side."""

    @property
    def users(self) -> Users: ...

    def is_node_user(self, name: str) -> bool:
        """Whether this is whom the other nodes of a cluster log in as."""
        ...

    async def change_users(self, change: Callable[[Users], Users]) -> None:
        """Put what `change` makes of the users into force, other nodes' left out, and return once that is durable.

        `change` is called once, in a thread. What it raises is raised here; a `StoreError` says that the users are as
        they were, and so does a `LocalProtocolError` where there would be no admin left.
        """
        ...

    @property
    def throttle(self) -> LoginThrottle:
        """The one that the key-value side uses, too: guesses count wherever they are made."""
        ...

    @property
    def server_version(self) -> str:
        """Such as `7.6.0-0-headwater`. Clients decide by its first three numbers what they may use."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether every bucket is open and served. Until then, and while the node stops, little else is asked here."""
        ...

    @property
    def why_not_ready(self) -> str:
        """What the node does instead, such as `it opens bucket 'travel', 1 of 2`."""
        ...

    @property
    def config_changes(self) -> Changes:
        """To be notified when a cluster config has changed."""
        ...

    def now_s(self) -> float:
        """The throttle's clock, which never goes back."""
        ...

    def uptime_s(self) -> float: ...

    def log(self, message: str, **about: Unpack[Fields]) -> None: ...

    def bucket_names(self) -> Iterable[str]: ...

    def bucket(self, name: str) -> BucketView | None: ...

    def usage(self, bucket: str) -> BucketUsage: ...

    def cluster_config(self, bucket: str | None) -> bytes:
        """The cluster config for a bucket, or for the node, as the key-value side gives it (`cluster_config`)."""
        ...

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Put what `change` makes of the manifest into force, and return it once it is durable.

        `change` is called once, and nothing else happens between that and the new manifest being in force. What it
        raises is raised here; a `StoreError` says that the manifest is as it was.
        """
        ...

    async def wait_for_manifest(self, bucket: str, uid: int) -> None:
        """Return once a manifest with this uid or a higher one is durable. The wait may be cancelled."""
        ...

    def producer_connections(self, bucket: str) -> list[ProducerConnection]:
        """The connections that get changes of a bucket."""
        ...

    async def roll_back(self, bucket: str, vbucket: VBucketId, to_seqno: Seqno) -> RolledBack:
        """Do a failover drill. `InvalidInput` says that it can't be done so, a `StoreError` that it was not done."""
        ...

    def hold_replicas(self, bucket: str) -> int:
        """Let the copies on this node fall behind until they are released. Returns how many there are."""
        ...

    def release_replicas(self, bucket: str) -> int: ...


# Streams of configs: JSON and four newlines, again and again, whenever the cluster config has changed.
#
# A stream never ends by itself. It ends when the client goes, when its bucket is gone, and when the node stops.


END_OF_CONFIG = b"\n\n\n\n"

Render = Callable[[], bytes]
"""Makes the JSON of the moment. It raises a refusal where there is none any more."""


class ConfigStreams:
    """The streams of a node."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._is_closed = False
        self.open = 0

    def stream(self, request: Request, render: Render) -> Response:
        if self._is_closed or self.open >= STREAMS_MAX:
            raise Refusal.message(503, f"The node stops, or has {STREAMS_MAX} streams: ask for the config by itself")
        # What is wrong with the first config is an answer of its own; later it would be no more than an end.
        first = render()
        if request.method == "HEAD":
            return Json(first)
        return StreamingResponse(
            self._configs(render), media_type="application/json", headers={"Cache-Control": NO_CACHE}
        )

    def close(self) -> None:
        """End all streams, and begin no more."""
        self._is_closed = True
        self._node.config_changes.notify()

    async def _configs(self, render: Render) -> AsyncIterator[bytes]:
        changes = self._node.config_changes
        self.open += 1
        try:
            while not self._is_closed:
                seen = changes.count
                yield render() + END_OF_CONFIG
                await self._change_after(seen)
        except Refusal:
            return
        finally:
            self.open -= 1

    async def _change_after(self, seen: int) -> None:
        try:
            async with asyncio.timeout(STREAM_REPEAT_S):
                await self._node.config_changes.after(seen)
        except TimeoutError:
            return


_NAME_CHARS_SHOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request by a user who may make it."""

    node: NodeView
    streams: ConfigStreams
    request: Request
    user: str
    needs: Action | None = None
    """The right that the user has, on the bucket of the path if there is one."""

    @property
    def is_allowed(self) -> bool:
        """Whether there is such a user, with that right."""
        users = self.node.users
        if self.needs is None:
            return self.user in users.by_name
        return users.may(self.user, self.needs, self.request.path_params.get("bucket"))

    def stream(self, render: Callable[[], bytes]) -> Response:
        """Answer with a stream of configs, which ends with the user's right to it."""

        def render_if_allowed() -> bytes:
            if not self.is_allowed:
                raise Refusal.message(403, "The user may not see this any more")
            return render()

        return self.streams.stream(self.request, render_if_allowed)

    def path(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value

    @property
    def bucket(self) -> BucketView:
        """The bucket of the path, which must exist."""
        name = self.path("bucket")
        bucket = self.node.bucket(name)
        if bucket is None:
            raise no_bucket(name)
        return bucket

    async def form(self, *allowed: str) -> dict[str, str]:
        """The fields of the body. A field that is not allowed, or that is there twice, is refused."""
        try:
            text = (await self._body()).decode()
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

    async def _body(self) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                async for chunk in self.request.stream():
                    body += chunk
                    if len(body) > BODY_BYTES_MAX:
                        raise body_too_long()
        except TimeoutError as error:
            raise Refusal.message(
                408, f"The body did not come within {REQUEST_S_MAX:.0f} s", Connection="close"
            ) from error
        except ClientDisconnect as error:
            raise Refusal.message(400, "The connection ended before the body did") from error
        return bytes(body)


def body_too_long() -> Refusal:
    return Refusal.message(413, f"A body has at most {BODY_BYTES_MAX} bytes", Connection="close")
