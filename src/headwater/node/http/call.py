"""What a handler gets: the node, the request, who asks, and the bucket that the path names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headwater.node.auth.users import Action
from headwater.node.http.answers import Refusal, no_bucket
from headwater.node.http.config_streams import ConfigStreams
from headwater.node.http.limits import BODY_BYTES_MAX, FORM_FIELDS_MAX, REQUEST_S_MAX
from headwater.node.http.node_view import BucketView, NodeView

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
