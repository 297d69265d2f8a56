"""The routes of a lake's page, who may use them, and the thread that serves it beside a landing or alone.

On the loopback address the page needs no log-in by default; on others it is served only with a token. A user enters the
token once in the page, which starts a session with a cookie, or sends it with every request as `Authorization: Bearer`.
Tokens are compared by their hashes, in constant time. Every request passes these checks, in this order: the head's
size, the host, the path, the token.

The page shows the state of the tables, and that of the landing that writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from headwater._version import __version__
from headwater.client.threads import LoopThread
from headwater.errors import HeadwaterError, InvalidInput
from headwater.findings import Level
from headwater.http import TOKEN_VARIABLE, serving
from headwater.lake.lake_look import LakeLook, LakeWatch, LandingNote, Sample, health_of_landing
from headwater.lake.layout import TableKind
from headwater.lake.location import Location
from headwater.phrases import parse_number

LOOK_EVERY_S = 2.0
STORE_LOOK_EVERY_S = 10.0
"""In an object store every look costs several requests."""
LOOK_SHARE_MAX = 0.05
"""The maximum share of time for looks. Above it they become rarer: with hundreds of tables, one takes seconds."""
PROBLEM_CHARS_MAX = 500
POINTS_MAX = 600
POINT_EVERY_S = 1.0
"""The interval of the points in the chart of the lag, which has at most `POINTS_MAX` of them."""

GetLanding = Callable[[], LandingNote | None]
"""Returns the note of a landing in this process; None while it is starting."""


@dataclass(slots=True)
class LagPoints:
    """The lag over time, as far as known. May be used from several threads."""

    _points: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, now_s: float, status: Mapping[str, Any]) -> None:
        time_ms, lag_s, age_s = int(now_s * 1000), status.get("lag_s"), status.get("documents_age_s")
        with self._lock:
            is_due = not self._points or time_ms - self._points[-1][0] >= POINT_EVERY_S * 1000
            if is_due and lag_s is not None and age_s is not None:
                self._points.append((time_ms, lag_s, age_s))

    def show(self) -> dict[str, list[float]]:
        with self._lock:
            times, lags, ages = zip(*self._points, strict=True) if self._points else ((), (), ())
        return {"time_ms": [*times], "lag_s": [*lags], "age_s": [*ages]}


class LakeState:
    """All that the page shows. The handlers call it in threads, because reading tables blocks.

    It looks again only if a request comes, and not more often than it should; all requests in between get the same
    result. A failed look is shown as a problem, beside the last successful one.
    """

    def __init__(self, shown: LakeWatch | Location, landing: GetLanding | None = None) -> None:
        """`landing` returns the note of a landing in this process; without it, the notes beside the tables are read. If
        only the location is known, there may be no tables yet."""
        self._location = shown if isinstance(shown, Location) else shown.location
        self._opened = shown if isinstance(shown, LakeWatch) else None
        self._landing = landing
        self._reading = threading.Lock()
        self._look: LakeLook | None = None
        self._next_look_s = float("-inf")
        self._problem: str | None = None
        self._points = LagPoints()
        self.every_s = LOOK_EVERY_S if self._location.is_local else STORE_LOOK_EVERY_S
        self.share_max = LOOK_SHARE_MAX

    def show(self) -> dict[str, Any]:
        """Return the state of everything as JSON."""
        with self._reading:
            if time.monotonic() >= self._next_look_s:
                self._look_again()
            look, problem, now_s = self._look, self._problem, time.time()
            shown, note = self._shown_landing(look, now_s)
            return {
                "now_ms": int(now_s * 1000),
                "uri": self._location.uri,
                "problem": problem,
                "health": health_of_landing(
                    shown["state"],
                    note,
                    lag_s=shown["lag_s"],
                    problem=problem,
                    verified=None if look is None else look.verdict,
                ).show(),
                "landing": shown,
                "lake": None if look is None else _lake_object(look, now_s),
                "lags": self._points.show(),
            }

    @property
    def _watch(self) -> LakeWatch:
        self._opened = self._opened or LakeWatch(self._location)
        return self._opened

    def _look_again(self) -> None:
        began_s = time.monotonic()
        try:
            self._look = self._watch.look()
            problem = "; ".join(self._look.unreadable)
        except (HeadwaterError, OSError) as error:
            problem = str(error)
        # If the log of a table is damaged, the message of delta-rs has many lines.
        self._problem = " ".join(problem.split())[:PROBLEM_CHARS_MAX] or None
        ended_s = time.monotonic()
        self._next_look_s = ended_s + max(self.every_s, (ended_s - began_s) / self.share_max)

    def summary(self) -> dict[str, Any]:
        """Return the state of the landing as far as it is known without reading the tables."""
        note = None if self._landing is None else self._landing()
        shown: dict[str, Any] = {"uri": self._location.uri, "state": "starting"}
        if note is None:
            return shown
        state = note.state_at(time.time())
        # The lag of an ended landing is unknown.
        times = ("lag_s", "documents_age_s") if state == "running" else ()
        numbers = {name: note.status.get(name) for name in (*times, "documents", "failures")}
        return {**shown, "state": state, "source": note.source, "failure": note.failure, **numbers}

    def tick(self) -> None:
        """Record the lag of a landing in this process, even if no request comes."""
        note = None if self._landing is None else self._landing()
        if note is not None and note.is_running:
            self._points.add(time.time(), note.status)

    def sample(self, kind: TableKind, name: str) -> Sample:
        with self._reading:
            return self._watch.sample(kind, name)

    def undone(self, batch: int) -> Sample:
        with self._reading:
            return self._watch.undone(batch)

    # --- the landing --------------------------------------------------------------------------------------------------

    def _shown_landing(self, look: LakeLook | None, now_s: float) -> tuple[dict[str, Any], LandingNote | None]:
        """Return the landing's current or last known state, and its last note."""
        if self._landing is not None:
            note = self._landing()
            state = "starting" if note is None else note.state_at(now_s)
        else:
            note = None if look is None else look.landing
            state = "unknown" if note is None else note.state_at(now_s)
        shown: dict[str, Any] = {"state": state, "lag_s": None, "documents_age_s": None, "is_bound": state != "running"}
        if note is not None:
            members = asdict(note)
            status = members.pop("status")
            shown |= {**members, "status": status}
        if note is not None and state == "running":
            # The times in the note have grown since.
            passed_s = max(0.0, now_s - note.time_s)
            for name in ("lag_s", "documents_age_s"):
                known = note.status.get(name)
                shown[name] = None if known is None else known + passed_s
            if look is not None and look.is_merged and look.time_s >= note.time_s:
                # A merge has finished since the note.
                shown["documents_age_s"] = shown["lag_s"]
            self._points.add(now_s, shown)
        elif look is not None:
            shown["lag_s"] = None if look.as_of_s is None else max(0.0, now_s - look.as_of_s)
            age_s = look.documents_as_of_s
            shown["documents_age_s"] = None if age_s is None else max(0.0, now_s - age_s)
        return shown, note


def _lake_object(look: LakeLook, now_s: float) -> dict[str, Any]:
    members = asdict(look)
    del members["landing"]
    return {**members, "looked_ago_s": max(0.0, now_s - look.time_s)}


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = "/ui"
_HEALTH = "/health"
READS_MAX = 8
"""How many requests may read tables at a time; one reads, and the others wait for it."""
LOGINS_MAX = 8
WRONG_TOKEN_S = 0.5
"""The delay of the answer to a wrong token. At most `LOGINS_MAX` requests may wait for theirs."""
NAME_CHARS_MAX = 600
BATCH_MAX = 2**53
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 256
LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):)?(?P<port>[0-9]{1,5})")

GetMetrics = Callable[[], tuple[bytes, str]]
"""Returns the text for Prometheus, and its content type."""
T = TypeVar("T")


Lakes = Mapping[str, LakeState]
"""By the names of their pipelines."""


def page_app(
    shown: LakeState | Lakes, *, token: str | None = None, metrics: GetMetrics | None = None, any_host: bool = False
) -> Starlette:
    """Return the application, for one lake or for those of several pipelines. With a `token`, only the page itself is
    shown without it; `any_host` permits requests for any host name, which is safe only with a token."""
    lakes: Lakes = {"": shown} if isinstance(shown, LakeState) else shown
    assert token is not None or not any_host, "without a token, pages of other sites could be led here"
    names = list(filter(None, lakes))
    sessions = _Sessions(token)
    reads = _Reads()
    files = serving.PageFiles(__package__)

    async def show_session(request: Request) -> Response:
        is_in = sessions.is_in(request)
        facts = {"version": __version__, "pipelines": names} if is_in else {"version": "", "pipelines": []}
        return serving.Json({"needs_token": token is not None, "is_in": is_in, **facts})

    async def show_pipelines(request: Request) -> Response:
        return serving.Json([{"name": name, **state.summary()} for name, state in lakes.items()])

    async def show_state(request: Request) -> Response:
        return serving.Json(await reads.run(_asked(lakes, request).show))

    async def show_health(request: Request) -> Response:
        """Return the verdict on every landing here, and the worst of them."""
        shown = {name: (await reads.run(state.show))["health"] for name, state in lakes.items()}
        worst = min(shown.values(), key=lambda verdict: [*Level].index(verdict["level"]))
        return serving.Json({**{name: worst[name] for name in ("level", "text", "do")}, "pipelines": shown})

    async def show_sample(request: Request) -> Response:
        kind, name = request.query_params.get("kind", ""), request.query_params.get("name", "")
        if kind not in {*TableKind} or len(name) > NAME_CHARS_MAX:
            raise serving.Refusal.message(400, f"kind is one of {', '.join(TableKind)}, name that of a collection")
        state = _asked(lakes, request)
        return serving.Json(asdict(await reads.run(lambda: state.sample(TableKind(kind), name))))

    async def show_undone(request: Request) -> Response:
        batch = parse_number(request.query_params.get("batch", ""), BATCH_MAX)
        if batch is None:
            raise serving.Refusal.message(400, "batch is the number of a batch")
        state = _asked(lakes, request)
        return serving.Json(asdict(await reads.run(lambda: state.undone(batch))))

    async def show_metrics(request: Request) -> Response:
        if metrics is None:
            raise serving.Refusal.message(404, "A lake at rest has no metrics: the landing has")
        text, content_type = metrics()
        return Response(text, headers={"Content-Type": content_type})

    def guarded(handle: serving.PageHandler) -> serving.PageHandler:
        async def checked(request: Request) -> Response:
            if not sessions.is_in(request):
                raise serving.Refusal.message(401, "Give the token first", WWW_Authenticate="Bearer")
            return await handle(request)

        return serving.with_page_headers(checked)

    open_routes = {
        "/": _show_root,
        _HEALTH: _show_alive,
        PAGE: files.show_page,
        f"{PAGE}/": files.show_page,
        f"{PAGE}/assets/{{name}}": files.show_file,
        f"{PAGE}/api/session": show_session,
    }
    guarded_routes = {
        f"{PAGE}/api/pipelines": show_pipelines,
        f"{PAGE}/api/state": show_state,
        f"{PAGE}/api/health": show_health,
        f"{PAGE}/api/sample": show_sample,
        f"{PAGE}/api/undone": show_undone,
        "/metrics": show_metrics,
    }
    changes = {f"{PAGE}/api/login": sessions.log_in, f"{PAGE}/api/logout": sessions.log_out}
    return Starlette(
        routes=[
            *(Route(path, serving.with_page_headers(handle)) for path, handle in open_routes.items()),
            *(Route(path, guarded(handle)) for path, handle in guarded_routes.items()),
            *(Route(path, serving.with_page_headers(handle), methods=["POST"]) for path, handle in changes.items()),
        ],
        middleware=[
            Middleware(serving.HeadLimit),
            Middleware(
                serving.HostCheck,
                what="page",
                hosts=None if any_host else (),
                hint="ask for an address, or for localhost",
                health=(_HEALTH,),
                watched=("/metrics",),
            ),
        ],
        exception_handlers={HTTPException: _refuse_route, Exception: _report_failure},
    )


async def _show_root(request: Request) -> Response:
    return RedirectResponse(f"{PAGE}/", status_code=303)


async def _show_alive(request: Request) -> Response:
    return serving.Json({"status": "ok"})


def _asked(lakes: Lakes, request: Request) -> LakeState:
    """Return the lake that a request is for."""
    found = lakes.get(request.query_params.get("pipeline", ""))
    if found is None:
        raise serving.Refusal.message(
            404, f"pipeline is one of {', '.join(lakes)}" if any(lakes) else "There is one lake"
        )
    return found


class _Reads:
    """Reads tables in threads, for a limited number of requests at a time."""

    def __init__(self) -> None:
        self._under_way = 0

    async def run(self, read: Callable[[], T]) -> T:
        if self._under_way >= READS_MAX:
            raise serving.Refusal.message(503, "Too many requests at once: try again in a second", Retry_After="1")
        self._under_way += 1
        try:
            return await asyncio.to_thread(read)
        except (HeadwaterError, OSError, ValueError) as error:
            # The landing's upkeep may delete a file between two looks, or a file may be damaged.
            raise serving.Refusal.message(503, f"The tables can't be read now: {error}", Retry_After="1") from error
        finally:
            self._under_way -= 1


# --- the token --------------------------------------------------------------------------------------------------------


class _Sessions:
    """The browser sessions that have presented the token."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else serving.digest_of(token)
        self._sessions: serving.PageSessions[bool] = serving.PageSessions(
            "headwater-lake", path=PAGE, now_s=time.monotonic
        )
        self.log_out = self._sessions.log_out
        self._wrong = 0

    def is_in(self, request: Request) -> bool:
        """Whether the token was given, or none is needed."""
        if self._digest is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_right(given.strip()):
            return True
        return self._sessions.value_of(request, is_valid=bool) is not None

    def _is_right(self, given: str) -> bool:
        return self._digest is not None and hmac.compare_digest(serving.digest_of(given), self._digest)

    async def log_in(self, request: Request) -> Response:
        serving.check_own_page(request)
        token = _given_token(await serving.read_body(request, bytes_max=serving.LOGIN_BODY_BYTES_MAX))
        response = Response(status_code=204)
        if self._digest is None:
            return response
        if not self._is_right(token):
            await self._slow_down()
            raise serving.Refusal.message(401, "The token is wrong")
        self._sessions.begin(request, response, True)
        return response

    async def _slow_down(self) -> None:
        """Delay the answer. Guessing 16 characters is hopeless; this keeps attempts from costing anything."""
        if self._wrong >= LOGINS_MAX:
            raise serving.Refusal.message(429, "Too many wrong tokens: try again in a second", Retry_After="1")
        self._wrong += 1
        try:
            await asyncio.sleep(WRONG_TOKEN_S)
        finally:
            self._wrong -= 1


def _given_token(body: bytes) -> str:
    try:
        token = json.loads(body)["token"]
        fits = isinstance(token, str) and bool(token.encode())
    except (ValueError, KeyError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise serving.Refusal.message(400, "A log-in is an object with the token")
    return str(token)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "There is nothing here: begin at /ui/" if error.status_code == 404 else error.detail
    return serving.Json({"message": message}, error.status_code, headers=error.headers)


async def _report_failure(request: Request, error: Exception) -> Response:
    """Answer without the error itself: the server logs that."""
    return serving.Json({"message": "The page has met an error of its own: its log has more"}, 500)


# --- serving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """Where the page is served, and the token that it needs."""

    host: str
    port: int
    token: str | None = None

    @classmethod
    def make(cls, text: str, token: str | None) -> PageAddress:
        """Parse what a user gives: `8080`, or `host:8080`. Raises `InvalidInput` for an unsafe address."""
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise InvalidInput(f"{text!r} is no address of a page", hint="Give a port, such as 8080, or HOST:PORT")
        host = (match["host"] or LOOPBACK).strip("[]")
        if token is not None and not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
            raise InvalidInput(
                f"the token has {len(token)} characters",
                hint=f"Give {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX}, such as the output of `openssl rand -hex 16`",
            )
        if token is None and not _is_loopback(host):
            raise InvalidInput(
                f"without a token the page is not served at {host}: others could read the tables there",
                hint=f"Set {TOKEN_VARIABLE} to the output of `openssl rand -hex 16`, or give a port alone",
            )
        return cls(host=host, port=int(match["port"]), token=token)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def serving_page(shown: LakeState | Lakes, address: PageAddress, *, metrics: GetMetrics | None = None) -> Iterator[str]:
    """Serve the page in its own thread while the block runs. Yields its address."""
    bound = _bind(address)
    # A user who knows the token may use any host name, such as that of a proxy.
    server = serving.AppServer(
        page_app(shown, token=address.token, metrics=metrics, any_host=address.token is not None)
    )

    async def tick_forever() -> None:
        while True:
            for state in [shown] if isinstance(shown, LakeState) else shown.values():
                state.tick()
            await asyncio.sleep(POINT_EVERY_S)

    async def start() -> asyncio.Task[None]:
        await server.listen(bound)
        return asyncio.create_task(tick_forever())

    async def stop() -> None:
        ticking.cancel()
        await server.stop()

    thread = LoopThread("headwater page")
    try:
        ticking = thread.run(start)
        # A browser can't use the address that stands for all addresses.
        host = socket.gethostname() if address.host in ("0.0.0.0", "::") else address.host
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}/ui/"
        thread.run(stop)
    finally:
        thread.close()


def _bind(address: PageAddress) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise InvalidInput(
            f"the page can't be served at {address.host}:{address.port}: {error.strerror or error}",
            hint="Give another port; 0 takes any that is free",
        ) from error
