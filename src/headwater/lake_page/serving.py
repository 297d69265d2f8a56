"""The page in a thread of its own, beside a landing or alone, and where it may listen."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from headwater.client.threads import LoopThread
from headwater.errors import InvalidInput
from headwater.http.requests import TOKEN_VARIABLE
from headwater.http.serving import AppServer
from headwater.lake_page.app import GetMetrics, page_app
from headwater.lake_page.state import POINT_EVERY_S, LakeState

TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 256
LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):)?(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """Where the page is served, and the token that it needs."""

    host: str
    port: int
    token: str | None = None

    @classmethod
    def make(cls, text: str, token: str | None) -> PageAddress:
        """What a user gives: `8080`, or `host:8080`. Raises `InvalidInput` for what would not be safe."""
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
def serving_page(state: LakeState, address: PageAddress, *, metrics: GetMetrics | None = None) -> Iterator[str]:
    """Serve the page while the block lasts. Gives its address."""
    bound = _bind(address)
    # A user who knows the token may come by any name, such as that of a proxy.
    app = page_app(state, token=address.token, metrics=metrics, any_host=address.token is not None)
    server = AppServer(app)
    thread = LoopThread("headwater page")
    try:
        ticking = thread.run(_start(server, bound, state))
        yield f"http://{_named(address.host)}:{bound.getsockname()[1]}/ui/"
        thread.run(_stop(server, ticking))
    finally:
        thread.close()


def _named(host: str) -> str:
    """The host as a browser asks for it. All addresses of this machine are none."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _bind(address: PageAddress) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise InvalidInput(
            f"the page can't be served at {address.host}:{address.port}: {error.strerror or error}",
            hint="Give another port; 0 takes any that is free",
        ) from error


async def _start(server: AppServer, bound: socket.socket, state: LakeState) -> asyncio.Task[None]:
    await server.listen(bound)
    return asyncio.create_task(_tick_forever(state))


async def _tick_forever(state: LakeState) -> None:
    while True:
        state.tick()
        await asyncio.sleep(POINT_EVERY_S)


async def _stop(server: AppServer, ticking: asyncio.Task[None]) -> None:
    ticking.cancel()
    await server.stop()
