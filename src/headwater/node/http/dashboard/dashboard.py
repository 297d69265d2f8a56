"""The dashboard of a node: the ticks that feed it, and the handlers of its page, its live feed and its metrics.

`app` has the routes and checks who asks; `server` starts and closes it with the node. Once a second a `BucketSampler`
takes the numbers of each bucket, and viewers and scrapes are given what the last tick has taken. The dashboard only
reads the node: no handler here changes anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import count

from starlette.requests import Request
from starlette.responses import Response

from headwater.http.requests import Json, PageFiles
from headwater.log_fields import LogEvent, fields
from headwater.node.http.call import Call
from headwater.node.http.dashboard.browser import BucketBrowser
from headwater.node.http.dashboard.health import Examined, health_of
from headwater.node.http.dashboard.landing import Landings
from headwater.node.http.dashboard.live_feed import LiveFeed
from headwater.node.http.dashboard.metrics import metrics_text
from headwater.node.http.dashboard.samples import BucketSampler
from headwater.node.http.limits import PEERS_IDLE_TICKS, PEERS_S_MAX, TICK_S, TICK_S_MAX, TICK_SHARE_MAX
from headwater.node.http.logins import Logins, Sessions, may_see
from headwater.node.node_state import NodeState

logger = logging.getLogger(__name__)


class Dashboard:
    """All that the page shows. `start` and `close` are called in the node's event loop."""

    def __init__(
        self,
        node: NodeState,
        logins: Logins,
        sessions: Sessions,
        *,
        open_metrics: bool = False,
        landing_urls: Sequence[str] = (),
    ) -> None:
        self._node = node
        self._logins = logins
        self._sessions = sessions
        self._open_metrics = open_metrics
        self._samplers: dict[str, BucketSampler] = {}
        self._landings = Landings(landing_urls)
        self._feed = LiveFeed(node, self._landings)
        self.browser = BucketBrowser(self._samplers)
        self.files = PageFiles(__package__)
        self._tasks: list[asyncio.Task[None]] = []

    # --- ticks ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take numbers: the node serves from now on."""
        for name in self._node.bucket_names():
            self.watch(name)
        self._tasks = [asyncio.create_task(self._tick_forever()), asyncio.create_task(self._landings.watch())]

    def watch(self, bucket: str) -> None:
        self._samplers[bucket] = BucketSampler(self._node, bucket)

    async def forget(self, bucket: str) -> None:
        """A bucket is dropped. When this returns, nothing here reads it any more."""
        sampler = self._samplers.pop(bucket, None)
        if sampler is not None:
            sampler.cluster.close()
        self._feed.ticks.notify()
        await self.browser.finish_searches()

    def close(self) -> None:
        """End what would never end by itself: the node stops."""
        self._feed.close()
        for task in self._tasks:
            task.cancel()
        for sampler in self._samplers.values():
            sampler.cluster.close()
            sampler.keep_events()

    async def _tick_forever(self) -> None:
        took_s = 0.0
        for tick in count():
            # With so many streams that a look at them takes long, it is taken less often. What counts is the work: on a
            # machine that is busy with other things everything takes long.
            await asyncio.sleep(min(TICK_S_MAX, max(TICK_S, took_s / TICK_SHARE_MAX)))
            began_s = time.thread_time()
            try:
                for sampler in list(self._samplers.values()):
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

    # --- handlers -------------------------------------------------------------------------------------------------

    async def stream_live(self, call: Call) -> Response:
        name = call.path("bucket")
        sampler = self._samplers[name]

        def still_allowed() -> bool:
            # The bucket may have been dropped, and another one made with its name.
            return self._samplers.get(name) is sampler and self._sessions.may_see(call.request, name)

        return self._feed.stream(sampler, still_allowed)

    async def show_health(self, call: Call) -> Response:
        """The verdict that is on top of every page."""
        examined = Examined.of(self._node, self._samplers[call.path("bucket")], self._landings)
        return Json(health_of(examined).show())

    async def show_metrics(self, request: Request) -> Response:
        samplers = list(self._samplers.values())
        if not self._open_metrics:
            user = await self._logins.user_of(request)
            samplers = [sampler for sampler in samplers if may_see(self._node, user, sampler.name)]
        text, content_type = metrics_text(self._node, samplers, accept=request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})
