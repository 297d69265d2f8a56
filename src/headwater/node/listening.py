"""Finding the port to listen on: the one that was asked for, the usual one, or a free one."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from headwater.errors import LocalProtocolError


async def usual_or_free(host: str, asked: int | None, usual: int, listen: Callable[[int], Awaitable[int]]) -> int:
    """Listen on the port asked for; where none was, on the usual one, or on a free one if that is taken."""
    try:
        return await listen(usual if asked is None else asked)
    except OSError as error:
        if asked is not None or error.errno != errno.EADDRINUSE:
            raise LocalProtocolError(
                f"can't listen on port {usual if asked is None else asked} of {host}: {error.strerror or error}",
                hint="Choose another port, or 0 for a free one, and an address of this machine",
            ) from error
        return await listen(0)


async def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that connections wait at, before anybody serves it."""
    loop = asyncio.get_running_loop()
    family, kind, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound
