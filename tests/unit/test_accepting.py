"""Connections that come while their server closes."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from headwater.accepting import close_servers


class TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
async def test_a_connection_accepted_just_before_is_served(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    server = await asyncio.get_running_loop().create_server(TurnedAway, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as late:
        # The first turn of the loop accepts it, and the second would hand it on.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await close_servers([server])
        await asyncio.sleep(0.01)
        # What is left open warns when it is collected, and a warning fails a test.
        gc.collect()
        late.settimeout(5)
        assert late.recv(1) == b""
