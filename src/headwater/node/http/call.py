"""What a handler gets and gives: a `Call` with the node and the request, answers in JSON, refusals, streams of configs.

Every handler of `pools`, `buckets`, `users` and the dashboard takes a `Call`, which `app` makes once it has checked who
asks. Answers and refusals are those of `headwater.http.requests`, and can be imported from here. Where clients look for
words in refusals ("Scope with name … is not found"), the words are Couchbase's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headwater.http.requests import NO_CACHE, Json, Refusal, read_body
from headwater.node.auth.users import Action
from headwater.node.http.limits import FORM_FIELDS_MAX, STREAM_REPEAT_S, STREAMS_MAX
from headwater.node.node_state import NodeState
from headwater.store.bucket import Bucket

__all__ = ["Call", "ConfigStreams", "Json", "Refusal", "read_body"]

_NAME_CHARS_SHOWN = 64


# --- streams of configs -------------------------------------------------------------------------------------------


class ConfigStreams:
    """JSON and four newlines, again and again, whenever the cluster config has changed.

    A stream never ends by itself. It ends when the client goes, when its bucket is gone, and when the node stops.
    """

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._is_closed = False
        self.open = 0

    def stream(self, request: Request, render: Callable[[], bytes]) -> Response:
        """Answer with a stream. `render` makes the JSON of the moment, and raises a refusal once there is none."""
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

    async def _configs(self, render: Callable[[], bytes]) -> AsyncIterator[bytes]:
        changes = self._node.config_changes
        self.open += 1
        try:
            while not self._is_closed:
                seen = changes.count
                yield render() + b"\n\n\n\n"
                try:
                    async with asyncio.timeout(STREAM_REPEAT_S):
                        await changes.after(seen)
                except TimeoutError:
                    continue
        except Refusal:
            return
        finally:
            self.open -= 1


# --- the call -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request by a user who may make it."""

    node: NodeState
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

    def stream(self, render: Callable[[], bytes]) -> Response:
        """Answer with a stream of configs, which ends with the user's right to it."""

        def render_if_allowed() -> bytes:
            if not self.is_allowed:
                raise Refusal.message(403, "The user may not see this any more")
            return render()

        return self.streams.stream(self.request, render_if_allowed)

    # --- what a request says --------------------------------------------------------------------------------------

    def query(self, name: str, *, chars_max: int) -> str:
        value = self.request.query_params.get(name, "")
        if len(value) > chars_max:
            raise Refusal.message(400, f"{name} has at most {chars_max} characters")
        return value

    def number(self, name: str, *, smallest: int, largest: int, default: int | None = None) -> int | None:
        """A number of the query; the default where there is none."""
        text = self.request.query_params.get(name, "")
        if not text:
            return default
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else -1
        if not smallest <= number <= largest:
            raise Refusal.message(400, f"{name} is a number from {smallest} to {largest}")
        return number

    async def form(self, *allowed: str) -> dict[str, str]:
        """The fields of the body. A field that is not allowed, or that is there twice, is refused."""
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
