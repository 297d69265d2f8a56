"""The routes of a lake's page, and who may use them.

On the loopback address the page needs no log-in by default; `serving` listens elsewhere only with a token. It is given
once, in the page, and is a session in a cookie from then on, or with every request as `Authorization: Bearer`. Tokens
are compared by their hashes, in constant time. Every request passes, in this order: the head's size, the host, the
path, the token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from headwater._version import __version__
from headwater.errors import HeadwaterError
from headwater.http.limits import LOGIN_BODY_BYTES_MAX
from headwater.http.requests import (
    Doorkeeper,
    HeadLimit,
    Json,
    PageFiles,
    PageHandler,
    PageSessions,
    Refusal,
    check_own_page,
    digest_of,
    read_body,
    with_page_headers,
)
from headwater.lake.layout import TableKind
from headwater.lake_page.state import LakeState

PAGE = "/ui"
_HEALTH = "/health"
READS_MAX = 8
"""Requests that read tables at a time; one does, and the others wait for it."""
LOGINS_MAX = 8
WRONG_TOKEN_S = 0.5
"""How long the answer to a wrong token takes, and how many of them may wait for theirs."""
NAME_CHARS_MAX = 600
BATCH_MAX = 2**53

GetMetrics = Callable[[], tuple[bytes, str]]
"""The text for Prometheus, and its content type."""
T = TypeVar("T")


def page_app(
    state: LakeState, *, token: str | None = None, metrics: GetMetrics | None = None, any_host: bool = False
) -> Starlette:
    """The application. With a `token`, nothing but the page itself is shown without it; `any_host` lets requests be for
    any name, which is safe only with a token."""
    assert token is not None or not any_host, "without a token, pages of other sites could be led here"
    sessions = _Sessions(token)
    reads = _Reads()
    files = PageFiles(__package__)

    async def root(request: Request) -> Response:
        return RedirectResponse(f"{PAGE}/", status_code=303)

    async def health(request: Request) -> Response:
        return Json({"status": "ok"})

    async def show_session(request: Request) -> Response:
        is_in = sessions.is_in(request)
        return Json({"needs_token": token is not None, "is_in": is_in, "version": __version__ if is_in else ""})

    async def show_state(request: Request) -> Response:
        return Json(await reads.run(state.show))

    async def show_sample(request: Request) -> Response:
        kind, name = request.query_params.get("kind", ""), request.query_params.get("name", "")
        if kind not in {*TableKind} or len(name) > NAME_CHARS_MAX:
            raise Refusal.message(400, f"kind is one of {', '.join(TableKind)}, name that of a collection")
        return Json(asdict(await reads.run(lambda: state.sample(TableKind(kind), name))))

    async def show_undone(request: Request) -> Response:
        text = request.query_params.get("batch", "")
        if not (text.isascii() and text.isdecimal() and len(text) < 17 and int(text) <= BATCH_MAX):
            raise Refusal.message(400, "batch is the number of a batch")
        return Json(asdict(await reads.run(lambda: state.undone(int(text)))))

    async def show_metrics(request: Request) -> Response:
        if metrics is None:
            raise Refusal.message(404, "A lake at rest has no metrics: the landing has")
        text, content_type = metrics()
        return Response(text, headers={"Content-Type": content_type})

    def guarded(handle: PageHandler) -> PageHandler:
        async def checked(request: Request) -> Response:
            if not sessions.is_in(request):
                raise Refusal.message(401, "Give the token first", WWW_Authenticate="Bearer")
            return await handle(request)

        return with_page_headers(checked)

    open_routes = {
        "/": root,
        _HEALTH: health,
        PAGE: files.show_page,
        f"{PAGE}/": files.show_page,
        f"{PAGE}/assets/{{name}}": files.show_file,
        f"{PAGE}/api/session": show_session,
    }
    guarded_routes = {
        f"{PAGE}/api/state": show_state,
        f"{PAGE}/api/sample": show_sample,
        f"{PAGE}/api/undone": show_undone,
        "/metrics": show_metrics,
    }
    changes = {f"{PAGE}/api/login": sessions.log_in, f"{PAGE}/api/logout": sessions.log_out}
    return Starlette(
        routes=[
            *(Route(path, with_page_headers(handle)) for path, handle in open_routes.items()),
            *(Route(path, guarded(handle)) for path, handle in guarded_routes.items()),
            *(Route(path, with_page_headers(handle), methods=["POST"]) for path, handle in changes.items()),
        ],
        middleware=[
            Middleware(HeadLimit),
            Middleware(
                Doorkeeper,
                what="page",
                hosts=None if any_host else (),
                hint="ask for an address, or for localhost",
                health=(_HEALTH,),
            ),
        ],
        exception_handlers={HTTPException: _refuse_route, Exception: _own_up},
    )


class _Reads:
    """Reading tables in threads, some requests at a time."""

    def __init__(self) -> None:
        self._under_way = 0

    async def run(self, read: Callable[[], T]) -> T:
        if self._under_way >= READS_MAX:
            raise Refusal.message(503, "Too many requests at once: try again in a second", Retry_After="1")
        self._under_way += 1
        try:
            return await asyncio.to_thread(read)
        except (HeadwaterError, OSError, ValueError) as error:
            # A file may be deleted by the landing's upkeep between two looks, or be damaged.
            raise Refusal.message(503, f"The tables can't be read now: {error}", Retry_After="1") from error
        finally:
            self._under_way -= 1


# --- the token --------------------------------------------------------------------------------------------------------


class _Sessions:
    """Who has given the token."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else digest_of(token)
        self._sessions: PageSessions[bool] = PageSessions("headwater-lake", path=PAGE, now_s=time.monotonic)
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
        return self._digest is not None and hmac.compare_digest(digest_of(given), self._digest)

    async def log_in(self, request: Request) -> Response:
        check_own_page(request)
        token = _given_token(await read_body(request, bytes_max=LOGIN_BODY_BYTES_MAX))
        response = Response(status_code=204)
        if self._digest is None:
            return response
        if not self._is_right(token):
            await self._slow_down()
            raise Refusal.message(401, "The token is wrong")
        self._sessions.begin(request, response, True)
        return response

    async def _slow_down(self) -> None:
        """Guessing a token of 16 characters is hopeless; this is so that it does not cost us anything either."""
        if self._wrong >= LOGINS_MAX:
            raise Refusal.message(429, "Too many wrong tokens: try again in a second", Retry_After="1")
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
        raise Refusal.message(400, "A log-in is an object with the token")
    return str(token)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "There is nothing here: begin at /ui/" if error.status_code == 404 else error.detail
    return Json({"message": message}, error.status_code, headers=error.headers)


async def _own_up(request: Request, error: Exception) -> Response:
    """The error itself goes on to the server, which logs it."""
    return Json({"message": "The page has met an error of its own: its log has more"}, 500)
