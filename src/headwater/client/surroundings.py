"""What a client takes from the machine it runs on, but for the event loop: the defaults are a real machine.

The clock is the event loop's own. So a client runs in a simulation by being started on a simulated loop and given
surroundings that draw all that is random from one seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, TypeVar

from headwater.client.bootstrap import BucketView, look_at_bucket
from headwater.client.pieces import OpenSpool
from headwater.client.settings import ClientSettings

# Blocking work beside an event loop that nobody waits for once it is not wanted any more.
#
# The threads of `asyncio.to_thread` are waited for when the program ends. One that asks a silent server would hold the
# end up for as long as it may ask: Ctrl-C would take half a minute. So what only asks, and writes nothing, is done
# here.


T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """What it returns or raises. Cancelled, the thread is left to itself, and its result is dropped."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            tell = partial(_succeed, outcome, work())
        except BaseException as error:
            tell = partial(_fail, outcome, error)
        with suppress(RuntimeError):  # the loop is closed, and nobody wants to know
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=run, name="headwater-asking", daemon=True).start()
    return await outcome


def _succeed(outcome: asyncio.Future[T], result: T) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _fail(outcome: asyncio.Future[T], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)


async def _look(settings: ClientSettings) -> BucketView:
    return await in_daemon_thread(partial(look_at_bucket, settings))


def _open_spool() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="headwater-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSurroundings:
    look: Callable[[ClientSettings], Awaitable[BucketView]] = _look
    """One look at the bucket, over a connection of its own."""
    random: Callable[[], float] = random.random
    random_bytes: Callable[[int], bytes] = os.urandom
    open_spool: OpenSpool = _open_spool
