"""Streams of configs: JSON and four newlines, again and again, whenever the cluster config has changed.

A stream never ends by itself. It ends when the client goes, when its bucket is gone, and when the node stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headwater.node.http.answers import NO_CACHE, Json, Refusal
from headwater.node.http.limits import STREAM_REPEAT_S, STREAMS_MAX
from headwater.node.http.node_view import NodeView

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
