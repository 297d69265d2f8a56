"""Who may ask the dashboard for what: the session, the bucket, and where a request comes from.

What changes something is asked with POST, with a header that a form of another site can't send, and from this very
origin: cookies alone say nothing, since pages of another port on the same host are sent them, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from headwater.dashboard.answers import Refused
from headwater.dashboard.samples import BucketSampler
from headwater.dashboard.sessions import Sessions
from headwater.dashboard.source import NodeSource

OWN_HEADER = "x-headwater-dashboard"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request by a user, for a bucket that the user may see."""

    request: Request
    user: str
    sampler: BucketSampler

    def query(self, name: str, *, chars_max: int) -> str:
        value = self.request.query_params.get(name, "")
        if len(value) > chars_max:
            raise Refused(400, f"{name} has at most {chars_max} characters")
        return value

    def number(self, name: str, *, smallest: int, largest: int, default: int | None = None) -> int | None:
        text = self.request.query_params.get(name, "")
        if not text:
            return default
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else -1
        if not smallest <= number <= largest:
            raise Refused(400, f"{name} is a number from {smallest} to {largest}")
        return number


def answering(handle: Handler) -> Handler:
    """Turn a refusal into the answer that it stands for."""

    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except Refused as refused:
            return refused.response()

    return answer


def for_bucket(
    source: NodeSource,
    sessions: Sessions,
    find: Callable[[str], BucketSampler | None],
    handle: Callable[[Asked], Awaitable[Response]],
) -> Handler:
    """A handler for users who have logged in and may see the bucket of the path."""

    async def checked(request: Request) -> Response:
        user = logged_in(sessions, request)
        name = request.path_params["bucket"]
        sampler = find(name) if source.may_see(user, name) else None
        if sampler is None:
            # Whether there is one is nothing for those who may not see it.
            raise Refused(403, f"You may not see a bucket {name!r}")
        return await handle(Asked(request=request, user=user, sampler=sampler))

    return answering(checked)


def logged_in(sessions: Sessions, request: Request) -> str:
    user = sessions.user_of(request)
    if user is None:
        raise Refused(401, "Log in first")
    return user


def check_own_page(request: Request) -> None:
    """Refuse what does not come from the dashboard's own page."""
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if request.headers.get(OWN_HEADER) is None or origin is None or urlsplit(origin).netloc != host:
        raise Refused(403, "Only the dashboard's own page may do this")
