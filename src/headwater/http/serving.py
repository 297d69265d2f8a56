"""Serve an application with uvicorn, in an event loop that already runs, on sockets that the caller has bound.

By default, uvicorn takes over the signals and the logging of its process, and trusts the addresses that clients claim
(`X-Forwarded-For`), which would let any client bypass a throttle. Here it does none of this.

Connections are limited, unfinished TLS handshakes included, and slow ones can't keep others out. One too many replaces
another one, of the address that has the most: one that waits for its client (for a request, the rest of one, or an
answer to be read), the longest first; otherwise one whose request has not been answered for long. If none gives way,
the new connection goes to a reserve, which answers only health checks and the metrics (`HostCheck`): a supervisor must
not take a busy server for a dead one. A connection of the reserve always gives way to the next.

The rest is what applications share: JSON answers, refusals, checks, a page's files and sessions. A node's application
and a lake's page put `HeadLimit` and `HostCheck` before their routes. A refusal is raised where the problem is noticed,
in one of the three forms that Couchbase uses: `errors` by the name of the field, `_` for the whole; a `message`; and,
for users that do not exist, a plain string.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import mimetypes
import re
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

import h11
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.accepting import Handshake, Places, TlsAcceptor

# --- limits --------------------------------------------------------------------------------------------------------


CONNECTIONS_MAX = 576
"""Beyond this, a new connection replaces a slow one."""
RESERVED_SHARE = 9
"""One in this many places is a reserve, for health checks and metrics. Everything else gets 503 there."""
SLOW_S = 1.0
"""A request that was not answered for this long gives way if places run out."""
REQUEST_S_MAX = 10.0
"""How long a connection may take for the TLS handshake, then for the head of a request, and then for its body."""
KEEP_ALIVE_S = 60
"""How long a connection may be idle between two requests. Clients poll every few seconds."""
STOP_S_MAX = 5
"""How long requests in progress may take to finish when the server stops."""
HEAD_BYTES_MAX = 16 * 1024
"""Path and headers. The longest real one has a password in it."""
HEAD_BUFFER_BYTES_MAX = 32 * 1024
"""Beyond this, the HTTP parser refuses with an answer of its own. It is above the limit that gets ours."""
BODY_BYTES_MAX = 64 * 1024
"""The longest form names a collection."""
LOGIN_BODY_BYTES_MAX = 8 * 1024
"""A log-in on a page is a name and a password, or a token."""
SESSIONS_MAX = 256
"""The most log-ins on a page that are remembered. Beyond that, the user that has the most loses the one that was unused
for longest."""
SESSION_S = 12 * 3600.0
"""How long an unused log-in on a page lasts."""
HSTS_S = 365 * 86_400
"""How long a browser that has connected by TLS uses only TLS."""


NO_CACHE = "no-cache,no-store,must-revalidate"
IN_RESERVE = "in_reserve"
"""In the state of a request: its connection is in the reserve, for health checks and metrics only."""
GONE = "gone"
"""In the state of a request: a future that is done once its connection is gone. uvicorn does not cancel handlers."""
OWN_HEADER = "x-headwater-dashboard"
"""Only the scripts of our own pages send it."""
_TOKEN_BYTES = 32
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\])(:[0-9]+)?")
_HOST_CHARS_SHOWN = 100
_HSTS = (b"strict-transport-security", f"max-age={HSTS_S}".encode())

PageHandler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class Json(Response):
    """A JSON answer that no cache keeps."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status_code, {"Cache-Control": NO_CACHE, **(headers or {})})

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()


class Refusal(Exception):
    """Raised to answer the request with an error status."""

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

    @classmethod
    def no_bucket(cls, name: str) -> Refusal:
        return cls.errors(404, f'Bucket with name "{name}" not found')

    @classmethod
    def body_too_long(cls, bytes_max: int = BODY_BYTES_MAX) -> Refusal:
        return cls.message(413, f"A body has at most {bytes_max} bytes", Connection="close")

    def response(self) -> Response:
        return Json(self.body, self.status, headers=self.headers)


async def read_body(request: Request, *, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(REQUEST_S_MAX):
            async for chunk in request.stream():
                body += chunk
                if len(body) > bytes_max:
                    raise Refusal.body_too_long(bytes_max)
    except TimeoutError as error:
        raise Refusal.message(408, f"The body did not come within {REQUEST_S_MAX:.0f} s", Connection="close") from error
    except ClientDisconnect as error:
        raise Refusal.message(400, "The connection ended before the body did") from error
    return bytes(body)


async def while_connected(request: Request, wanted: Coroutine[Any, Any, T]) -> T:
    """Wait for something that may take long, and cancel it if the client leaves.

    Raises:
        Refusal: The client has gone, and no one reads the answer.
    """
    waiting: asyncio.Future[Any] = asyncio.ensure_future(wanted)
    gone = request.scope.get("state", {}).get(GONE)  # Other servers, as in tests, do not set it.
    try:
        await asyncio.wait((waiting, gone) if gone else (waiting,), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Refusal.message(499, "The connection ended before the answer was there")
        result: T = waiting.result()
        return result
    finally:
        waiting.cancel()


def check_own_page(request: Request) -> None:
    """Refuse a request that does not come from our own page.

    A change must be a POST with a header that a form of another site can't send, and must come from this very origin:
    cookies alone prove nothing, since pages of another port on the same host are sent them, too.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if request.headers.get(OWN_HEADER) is None or origin is None or origin.partition("://")[2] != host:
        raise Refusal.message(403, "Only the page itself may do this. A proxy before it has to pass the Host header on")


# --- before the handler -----------------------------------------------------------------------------------------------


class HeadLimit:
    """Refuses requests that are too long, before anything else reads them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        head_bytes = len(scope["path"].encode(errors="replace")) + len(scope["query_string"])
        head_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
        if head_bytes > HEAD_BYTES_MAX:
            return Refusal.message(431, f"Path and headers have at most {HEAD_BYTES_MAX} bytes", Connection="close")
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        # The parser has checked that it is a number.
        return Refusal.body_too_long() if int(announced) > BODY_BYTES_MAX else None


class HostCheck:
    """Refuses requests for other hosts, and all but health checks and metrics on connections of the reserve.

    A page of another site can make its own name resolve to this server (DNS rebinding), and a browser then takes the
    server for that site. The request has that name, so requests for unknown names are refused. An address can't be
    rebound, and supervisors may use any name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        what: str,
        hosts: Collection[str] | None,
        hint: str,
        is_tls_only: bool = False,
        health: Collection[str] = (),
        watched: Collection[str] = (),
    ) -> None:
        """`what` names what is served. `hosts` are the names that requests may be for, in addition to addresses and
        this machine's own name; None allows all. `hint` says what to do about a refusal. `health` are the paths of
        supervisors, which may use any name, and `watched` other paths that are answered in the reserve."""
        self._app = app
        self._what = what
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._hint = hint
        self._is_tls_only = is_tls_only
        self._health = frozenset(health)
        self._watched = frozenset(watched)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._health:
            await self._app(scope, receive, send)
            return
        host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        parsed = _HOST.fullmatch(host)
        name = parsed[1].strip("[]").lower() if parsed else ""
        refusal = None
        if scope.get("state", {}).get(IN_RESERVE) and scope["path"] not in self._watched:
            text = f"The {self._what} has too many connections: try again in a second"
            refusal = Refusal.message(503, text, Retry_After="1")
        elif self._hosts is not None and not (name in self._hosts or _is_local_name(name) or _is_address(name)):
            text = f"This {self._what} is not known as {host[:_HOST_CHARS_SHOWN]!r}: {self._hint}"
            refusal = Refusal.message(421, text)
        app = self._app if refusal is None else refusal.response()
        # For this machine's own name, the promise to use TLS would apply to all its ports, whatever listens there.
        is_promised = self._is_tls_only and scope["scheme"] == "https" and not _is_local_name(name)
        await app(scope, receive, _with_header(send, _HSTS) if is_promised else send)


def _is_local_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _with_header(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], header]}
        await send(message)

    return send_with_header


# --- a built page -----------------------------------------------------------------------------------------------------


_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every answer of a page, unless the answer sets them itself."""
_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}
"""A file's name contains the hash of its content, so that other content has another name."""


def with_page_headers(handle: PageHandler) -> PageHandler:
    async def answer(request: Request) -> Response:
        try:
            response = await handle(request)
        except Refusal as refusal:
            response = refusal.response()
        for name, value in _PAGE_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return answer


class PageSessions(Generic[T]):
    """The log-ins on a page, each with a value that the application keeps for it.

    A session is a random token in a cookie that scripts can't read and that other sites' pages don't send (`HttpOnly`,
    `SameSite=Strict`). Only its hash is kept here. Sessions end with the process. Browsers do not separate cookies by
    port, and several pages may be served on one host, so the port is part of the cookie's name.
    """

    def __init__(self, name: str, *, path: str, now_s: Callable[[], float]) -> None:
        self._name = name
        self._path = path
        self._now_s = now_s
        self._known: dict[bytes, tuple[T, float, str]] = {}
        """By the hash of the token: the value, when the session ends, and its owner."""
        self._places: Places[bytes] = Places()
        """The same hashes by owner, the least recently used first."""

    def value_of(self, request: Request, *, is_valid: Callable[[T], bool]) -> T | None:
        """The value of the session, whose life this extends; None if there is none. An invalid session ends."""
        token = request.cookies.get(self._cookie_name(request))
        found = None if token is None else self._forget(digest_of(token))
        if token is None or found is None or found[1] <= self._now_s() or not is_valid(found[0]):
            return None
        self._keep(digest_of(token), found[0], owner=found[2])
        return found[0]

    def _keep(self, digest: bytes, value: T, *, owner: str) -> None:
        self._known[digest] = value, self._now_s() + SESSION_S, owner
        self._places.add(digest, owner=owner)

    def _forget(self, digest: bytes) -> tuple[T, float, str] | None:
        found = self._known.pop(digest, None)
        if found is not None:
            self._places.discard(digest, owner=found[2])
        return found

    def begin(self, request: Request, response: Response, value: T, *, owner: str = "") -> None:
        """Begin a session. If there are too many, end one of the owner that has the most."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._keep(digest_of(token), value, owner=owner)
        if len(self._places) > SESSIONS_MAX:
            self._forget(next(iter(next(self._places.owners()))))
        response.set_cookie(
            self._cookie_name(request),
            token,
            path=self._path,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )

    async def log_out(self, request: Request) -> Response:
        check_own_page(request)
        response = Response(status_code=204)
        token = request.cookies.get(self._cookie_name(request))
        if token is not None:
            self._forget(digest_of(token))
        response.delete_cookie(self._cookie_name(request), path=self._path, httponly=True, samesite="strict")
        return response

    def _cookie_name(self, request: Request) -> str:
        server = request.scope.get("server")
        return f"{self._name}-{server[1] if server else 0}"


def digest_of(token: str) -> bytes:
    """The hash by which tokens are kept and compared."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class PageFiles:
    """The files that `web/` was built into, in the folder `assets` of a package."""

    def __init__(self, package: str) -> None:
        self._files = {entry.name: entry.read_bytes() for entry in files(package).joinpath("assets").iterdir()}

    async def show_page(self, request: Request) -> Response:
        return Response(self._files["index.html"], media_type="text/html")

    async def show_file(self, request: Request) -> Response:
        """Serve a file of the page by its name, and nothing else."""
        name = request.path_params["name"]
        content = self._files.get(name)
        if content is None:
            raise Refusal.message(404, "The page has no such file: load it again")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(content, headers=_FOREVER, media_type=kind)


# --- the server -------------------------------------------------------------------------------------------------------


_BACKLOG = 128
"""Connections that the system accepts before the server does. The server accepts all of them in one iteration of the
event loop, while other connections wait."""


class AppServer:
    """Serves an application on any number of sockets."""

    def __init__(self, app: ASGIApp, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self._app = app
        self._running: list[tuple[_Server, asyncio.Task[None]]] = []
        self._visitors = _Visitors(connections_max)

    async def listen(self, bound: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        """Serve on a bound socket from now on. The server closes the socket."""
        config = uvicorn.Config(
            self._app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S_MAX,
            h11_max_incomplete_event_size=HEAD_BUFFER_BYTES_MAX,
            backlog=_BACKLOG,
        )
        server = _Server(config, self._visitors, tls)
        task = asyncio.create_task(server.serve(sockets=[bound]), name="headwater http")
        started = asyncio.create_task(server.is_started.wait())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            started.cancel()
            bound.close()
            await task
        self._running.append((server, task))

    async def stop(self) -> None:
        """Let requests in progress finish, and close the sockets. The application ends what never ends by itself."""
        for server, _ in self._running:
            server.close_acceptor()
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._running))
        self._running.clear()


class _Visitors:
    """The connections of all sockets of a server. Decides which one gives way."""

    def __init__(self, connections_max: int) -> None:
        self._places: Places[_Connection | Handshake] = Places()
        self._reserve: dict[_Connection, None] = {}
        """Connections beyond the places, oldest first."""
        self._reserved = max(1, connections_max // RESERVED_SHARE)
        self._most = connections_max - self._reserved

    def admit(self, visitor: _Connection | Handshake) -> bool:
        """Give a place to a connection, if need be that of another one. Returns False if none gives way."""
        if len(self._places) >= self._most:
            slow = self._first_to_go(asyncio.get_running_loop().time())
            if slow is None:
                return False
            self.leave(slow)
            slow.abort()
        self._places.add(visitor, owner=visitor.address)
        return True

    def admit_to_reserve(self, connection: _Connection) -> None:
        while len(self._reserve) >= self._reserved:
            oldest = next(iter(self._reserve))
            self.leave(oldest)
            oldest.abort()
        self._reserve[connection] = None

    def leave(self, visitor: _Connection | Handshake) -> None:
        self._places.discard(visitor, owner=visitor.address)
        if isinstance(visitor, _Connection):
            self._reserve.pop(visitor, None)

    def renew(self, connection: _Connection) -> None:
        """The connection begins to wait for something else, so it becomes the newest of its address."""
        if connection not in self._reserve:
            self._places.add(connection, owner=connection.address)

    def _first_to_go(self, now_s: float) -> _Connection | Handshake | None:
        for visitors in self._places.owners():
            for visitor in visitors:
                if isinstance(visitor, Handshake) or visitor.waits_for_client:
                    return visitor
            for visitor in visitors:
                if isinstance(visitor, _Connection) and visitor.is_slow(now_s):
                    return visitor
        return None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, visitors: _Visitors, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.is_started = asyncio.Event()
        self._visitors = visitors
        self._acceptor: TlsAcceptor | None = None
        if tls is not None:
            self._acceptor = TlsAcceptor(
                tls,
                lambda below: self._make_connection(),
                handshake_s=REQUEST_S_MAX,
                admit=visitors.admit,
                leave=visitors.leave,
            )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        make_protocol = self._make_connection if self._acceptor is None else self._acceptor.open_protocol
        for bound in sockets or []:
            server = await asyncio.get_running_loop().create_server(
                make_protocol, sock=bound, backlog=self.config.backlog
            )
            self.servers.append(server)
        self.is_started.set()

    def _make_connection(self) -> asyncio.Protocol:
        return _Connection(
            self._visitors, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def close_acceptor(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()


class _Connection(H11Protocol):
    """A connection that gives way to others while it is slow, and is closed if it sends no complete request.

    uvicorn's own timer covers the idle time between requests, and every byte stops it. This one runs from the first
    byte of a request, or from the start of the connection, until the head of the request is complete.
    """

    def __init__(self, visitors: _Visitors, **parts: Any) -> None:
        super().__init__(**parts)
        self._visitors = visitors
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_since_s = self.loop.time()
        self._gone: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        self.app_state = {**self.app_state, GONE: self._gone}
        if not self._visitors.admit(self):
            self.app_state[IN_RESERVE] = True
            self._visitors.admit_to_reserve(self)

    @property
    def waits_for_client(self) -> bool:
        """Whether it waits for a request, for the rest of one, or for the client to read an answer."""
        return self._is_idle or self.flow.write_paused or self.cycle.more_body

    def is_slow(self, now_s: float) -> bool:
        """Whether a request has not been answered for long. Streams count as answered: they have a limit by user."""
        return not self._is_idle and not self.cycle.response_started and now_s - self._waits_since_s > SLOW_S

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._deadline is None and (before is None or before.response_complete):
            self._expect_request()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
            self._renew()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._renew()

    def _renew(self) -> None:
        """A request or its answer is complete."""
        self._waits_since_s = self.loop.time()
        if not self.transport.is_closing():
            self._visitors.renew(self)

    def send_400_response(self, msg: str) -> None:
        # uvicorn also answers malformed bytes if their request has an answer, or a handler that will answer, and h11
        # refuses a second answer.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitors.leave(self)
        self._unset_keepalive_if_required()  # If the connection broke, uvicorn leaves the timer, which holds it.
        self._stop_waiting()
        if not self._gone.done():
            self._gone.set_result(None)
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S_MAX, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
