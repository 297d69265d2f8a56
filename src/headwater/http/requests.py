"""What applications share: answers in JSON, refusals, the checks before any handler, a page's files and sessions.

A node's application and a lake's page put `HeadLimit` and `HostCheck` before their routes. A refusal is raised
wherever it is noticed, in one of the three forms that Couchbase gives them: `errors` by the name of the field, `_` for
the whole; a `message`; and, for users that do not exist, a mere string.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mimetypes
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.accepting import Places

# --- limits --------------------------------------------------------------------------------------------------------


CONNECTIONS_MAX = 576
"""Beyond that a connection takes the place of a slow one."""
RESERVED_SHARE = 9
"""One in so many of these places is a reserve, for questions whether the server lives. All else gets 503 there."""
SLOW_S = 1.0
"""A request that was not answered for this long gives way where places run out."""
REQUEST_S_MAX = 10.0
"""How long a connection may take for the TLS handshake, to send the head of a request, and then the body of it."""
KEEP_ALIVE_S = 60
"""How long a connection may rest between two requests. Clients poll every few seconds."""
STOP_S_MAX = 5
"""How long requests under way may take to end when the server stops."""
HEAD_BYTES_MAX = 16 * 1024
"""Path and headers. The longest real one has a password in it."""
HEAD_BUFFER_BYTES_MAX = 32 * 1024
"""Where the HTTP parser gives up, with an answer of its own: above what gets ours."""
BODY_BYTES_MAX = 64 * 1024
"""The longest form there is names a collection."""
LOGIN_BODY_BYTES_MAX = 8 * 1024
"""A log-in on a page is a name and a password, or a token."""
SESSIONS_MAX = 256
"""Log-ins on a page that are remembered at a time. Beyond that one of the user that has the most is forgotten, the one
that was used longest ago."""
SESSION_S = 12 * 3600.0
"""How long a log-in on a page lasts that is not used."""
HSTS_S = 365 * 86_400
"""For how long a browser that has come by TLS comes back by TLS only."""


NO_CACHE = "no-cache,no-store,must-revalidate"
IN_RESERVE = "in_reserve"
"""In the state of a request: it has come by a connection that is there for the health of the server only."""
GONE = "gone"
"""In the state of a request: a future that is done once its connection is gone. uvicorn cancels no handler then."""
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
    """Wait for something that may take long, and give it up when the client goes.

    Raises:
        Refusal: the client has gone, and no one reads the answer.
    """
    waiting: asyncio.Future[Any] = asyncio.ensure_future(wanted)
    gone = request.scope.get("state", {}).get(GONE)  # Other servers, as in tests, say nothing of it.
    try:
        await asyncio.wait((waiting, gone) if gone else (waiting,), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Refusal.message(499, "The connection ended before the answer was there")
        result: T = waiting.result()
        return result
    finally:
        waiting.cancel()


def check_own_page(request: Request) -> None:
    """Refuse what does not come from our own page.

    What changes something is asked with POST, with a header that a form of another site can't send, and from this very
    origin: cookies alone say nothing, since pages of another port on the same host are sent them, too.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if request.headers.get(OWN_HEADER) is None or origin is None or origin.partition("://")[2] != host:
        raise Refusal.message(403, "Only the page itself may do this. A proxy before it has to pass the Host header on")


# --- before the handler -----------------------------------------------------------------------------------------------


class HeadLimit:
    """Refuses what is too long before anything looks at it."""

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
        # The parser has made sure that it is a number.
        return Refusal.body_too_long() if int(announced) > BODY_BYTES_MAX else None


class HostCheck:
    """Refuses requests for other hosts, and all but the health of the server on connections of the reserve.

    A page of another site can have its own name lead to this server (DNS rebinding), and a browser then takes the
    server for that site. The name stands in the request, so requests for unknown names are refused. An address can't
    be rebound, and supervisors ask by any name.
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
        """`what` is served, `hosts` are the names that requests may be for, beside addresses and this machine's own;
        None for all. Where one is refused, the `hint` says what to do. `health` are the paths of supervisors, which ask
        by any name, and `watched` other paths that are answered in the reserve."""
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
        # For this machine's own name the promise would hold for all its ports, whatever listens there.
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
"""What every answer of a page carries, unless it says otherwise itself."""
_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}
"""A file's name has the hash of its content, so that another content is another file."""


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

    A session is a random token in a cookie that scripts can't read and that other sites' pages don't get sent
    (`HttpOnly`, `SameSite=Strict`). Its hash is kept here. Sessions end with the process. Cookies are not kept apart by
    port, and several pages may be served on one host: the port is part of the cookie's name.
    """

    def __init__(self, name: str, *, path: str, now_s: Callable[[], float]) -> None:
        self._name = name
        self._path = path
        self._now_s = now_s
        self._known: dict[bytes, tuple[T, float, str]] = {}
        """By the hash of the token: the value, until when it counts, and whose session it is."""
        self._places: Places[bytes] = Places()
        """The same, by owner, the one that was used longest ago first."""

    def value_of(self, request: Request, *, is_valid: Callable[[T], bool]) -> T | None:
        """The value of the session, which lasts longer by this; None where there is none. An invalid one ends."""
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
        """Begin a session. If there are too many, one of the owner that has the most ends."""
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
    """Tokens are kept and compared by this."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class PageFiles:
    """The files that `web/` was built into, in the folder `assets` of a package."""

    def __init__(self, package: str) -> None:
        self._files = {entry.name: entry.read_bytes() for entry in files(package).joinpath("assets").iterdir()}

    async def show_page(self, request: Request) -> Response:
        return Response(self._files["index.html"], media_type="text/html")

    async def show_file(self, request: Request) -> Response:
        """A file of the page by its name, and nothing else."""
        name = request.path_params["name"]
        content = self._files.get(name)
        if content is None:
            raise Refusal.message(404, "The page has no such file: load it again")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(content, headers=_FOREVER, media_type=kind)
