"""The dashboard of a node: its routes, and the ticks that feed it."""

from __future__ import annotations

import asyncio
import json
import logging
import mimetypes
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from headwater.log_fields import LogEvent, fields
from headwater.node.dashboard.asking import (
    NOT_KEPT,
    SECURITY_HEADERS,
    Asked,
    Refused,
    Sessions,
    answering,
    as_json,
    check_own_page,
    for_bucket,
)
from headwater.node.dashboard.browsing import BucketViews
from headwater.node.dashboard.landing import Landings
from headwater.node.dashboard.live_feed import LiveFeed
from headwater.node.dashboard.metrics import metrics_text
from headwater.node.dashboard.samples import BucketSampler
from headwater.node.dashboard.source import (
    LOGIN_BODY_BYTES_MAX,
    LOGIN_BODY_S_MAX,
    PEERS_IDLE_TICKS,
    PEERS_S_MAX,
    TICK_S,
    TICK_S_MAX,
    TICK_SHARE_MAX,
    NodeSource,
)
from headwater.protocol.sasl import USER_CHARS_MAX

# The page itself: what `web/` was built into, kept in memory.


_PAGE = "index.html"
_FOREVER = {**SECURITY_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
"""A file's name has the hash of its content, so that another content is another file."""


class PageFiles:
    """Serves the files of the page by name, and nothing else."""

    def __init__(self) -> None:
        self._files = {
            entry.name: entry.read_bytes() for entry in files("headwater.node.dashboard").joinpath("assets").iterdir()
        }

    async def show_page(self, request: Request) -> Response:
        return Response(self._files[_PAGE], headers=NOT_KEPT, media_type="text/html")

    async def show_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = self._files.get(name)
        if content is None:
            raise Refused(404, "The page has no such file: load it anew")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(content, headers=_FOREVER, media_type=kind)


logger = logging.getLogger(__name__)

HOME = "/ui/"
_API = "/ui/api"
_OF_BUCKET = f"{_API}/buckets/{{bucket}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    open_metrics: bool = False
    """Whether `/metrics` needs no log-in."""
    landing_urls: tuple[str, ...] = ()
    """Where landings show their metrics."""


class Dashboard:
    """See the module. The node's HTTP side serves the routes."""

    def __init__(self, source: NodeSource, settings: DashboardSettings | None = None) -> None:
        self._source = source
        self._settings = settings or DashboardSettings()
        self._samplers: dict[str, BucketSampler] = {}
        self._sessions = Sessions(source, path="/ui")
        self._landings = Landings(self._settings.landing_urls)
        self._feed = LiveFeed(source, self._landings)
        self._views = BucketViews(source)
        self._files = PageFiles()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def home(self) -> str:
        return HOME

    @property
    def routes(self) -> Sequence[BaseRoute]:
        views = self._views
        of_bucket: dict[str, Callable[[Asked], Awaitable[Response]]] = {
            "live": self._live,
            "changes": views.show_changes,
            "documents": views.show_documents,
            "document": views.show_document,
            "vbuckets/{vbucket}": views.show_vbucket,
            "branches": views.show_branches,
            "streams": views.show_streams,
        }
        return [
            Route("/ui", self._files.show_page),
            Route(HOME, self._files.show_page),
            Route("/ui/assets/{name}", answering(self._files.show_file)),
            Route(f"{_API}/login", answering(self._log_in), methods=["POST"]),
            Route(f"{_API}/logout", answering(self._log_out), methods=["POST"]),
            Route(f"{_API}/session", answering(self._show_session)),
            *(
                Route(f"{_OF_BUCKET}/{path}", for_bucket(self._source, self._sessions, self._samplers.get, handle))
                for path, handle in of_bucket.items()
            ),
            Route("/metrics", answering(self._show_metrics)),
        ]

    # --- time -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Nothing to do: the node compiles the kernels of its store."""

    def start(self) -> None:
        self._find_buckets()
        self._tasks = [asyncio.create_task(self._tick_forever()), asyncio.create_task(self._landings.watch())]

    def close(self) -> None:
        self._feed.ticks.close()
        for task in self._tasks:
            task.cancel()
        for sampler in self._samplers.values():
            sampler.cluster.close()

    async def _tick_forever(self) -> None:
        took_s = 0.0
        for tick in count():
            # With so many streams that a look at them takes long, it is taken less often. What counts is the work: on a
            # machine that is busy with other things everything takes long.
            await asyncio.sleep(min(TICK_S_MAX, max(TICK_S, took_s / TICK_SHARE_MAX)))
            began_s = time.thread_time()
            try:
                self._find_buckets()
                for sampler in self._samplers.values():
                    sampler.sample()
                    if self._feed.viewers or tick % PEERS_IDLE_TICKS == 0:
                        sampler.cluster.ask()
            except Exception:
                # The node goes on without its dashboard, and the next tick may be better.
                about = fields(event=LogEvent.DASHBOARD_FAILED)
                logger.exception("the dashboard could not take the numbers of the node", extra=about)
            took_s = time.thread_time() - began_s
            clusters = [sampler.cluster for sampler in self._samplers.values()]
            await asyncio.gather(*(cluster.wait_for_answers(within_s=PEERS_S_MAX) for cluster in clusters))
            self._feed.ticks.notify()

    def _find_buckets(self) -> None:
        for name in self._source.bucket_names():
            if name not in self._samplers:
                self._samplers[name] = BucketSampler(self._source, name)

    # --- sessions -------------------------------------------------------------------------------------------------

    async def _log_in(self, request: Request) -> Response:
        check_own_page(request)
        name, password = _credentials(await _body(request))
        await self._source.log_in(request.client.host if request.client else "", name, password)
        response = Response(status_code=204, headers=NOT_KEPT)
        self._sessions.begin(request, response, name)
        return response

    async def _log_out(self, request: Request) -> Response:
        check_own_page(request)
        response = Response(status_code=204, headers=NOT_KEPT)
        self._sessions.end(request, response)
        return response

    async def _show_session(self, request: Request) -> Response:
        """Who is logged in. That nobody is, is an answer like any other."""
        user = self._sessions.user_of(request)
        if user is None:
            return as_json({"user": None, "buckets": [], "version": ""})
        buckets = [name for name in sorted(self._samplers) if self._source.may_see(user, name)]
        return as_json({"user": user, "buckets": buckets, "version": self._source.version})

    # --- numbers --------------------------------------------------------------------------------------------------

    async def _live(self, asked: Asked) -> Response:
        name = asked.sampler.name

        def still_allowed() -> bool:
            user = self._sessions.user_of(asked.request)
            return user is not None and self._source.may_see(user, name)

        return self._feed.stream(asked, still_allowed)

    async def _show_metrics(self, request: Request) -> Response:
        samplers = list(self._samplers.values())
        if not self._settings.open_metrics:
            user = await self._source.user_of(request)
            samplers = [sampler for sampler in samplers if self._source.may_see(user, sampler.name)]
        text, content_type = metrics_text(self._source, samplers, accept=request.headers.get("accept", ""))
        return Response(text, headers={**NOT_KEPT, "Content-Type": content_type})


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(LOGIN_BODY_S_MAX):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LOGIN_BODY_BYTES_MAX:
                    raise Refused(413, f"A log-in has at most {LOGIN_BODY_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise Refused(408, f"The log-in did not come within {LOGIN_BODY_S_MAX:.0f} s") from error
    except ClientDisconnect as error:
        raise Refused(400, "The connection ended before the body did") from error
    return bytes(body)


def _credentials(body: bytes) -> tuple[str, str]:
    try:
        told = json.loads(body)
        name, password = told["user"], told["password"]
        # JSON can say half a character, which has no bytes that could be compared.
        fits = 0 < len(name) <= USER_CHARS_MAX and bool(name.encode() + password.encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fits = False
    if not fits:
        raise Refused(400, "A log-in is an object with the name of a user and its password")
    return name, password
