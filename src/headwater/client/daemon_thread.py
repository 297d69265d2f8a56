"""Blocking work beside an event loop that nobody waits for once it is not wanted any more.

The threads of `asyncio.to_thread` are waited for when the program ends. One that asks a silent server would hold the
end up for as long as it may ask: Ctrl-C would take half a minute. So what only asks, and writes nothing, is done here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

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
