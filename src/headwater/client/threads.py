"""Threads beside event loops: a loop for callers that have none, and a thread for the little that blocks.

`LoopThread` is behind the blocking client and `blocking_bucket`. Its loop keeps running while the caller is busy: noops
are answered and bytes received, up to the flow-control window, however long the caller takes with a batch. Nothing here
may keep the program from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from headwater.errors import LocalProtocolError

T = TypeVar("T")

INTERRUPT_S_MAX = 0.5
"""A signal that comes just before a thread begins to wait does not wake it: so long may an interrupt go unnoticed."""
CANCEL_S_MAX = 10.0
"""How long an interrupted call may take to come to its end."""


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run asynchronous work for a caller that may be in any thread, and wait for it."""
    thread = LoopThread("headwater")
    try:
        return thread.run(work)
    finally:
        thread.close()


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = _new_loop()
        # A program that forgets to close the client must still be able to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run it in the loop and wait for what it returns or raises. Interrupted, it is cancelled, and waited for.

        Its coroutine is made in the loop: one made by the caller would never be awaited if the interrupt came between
        the two, and Python warns of that.
        """
        if self.is_closed:
            raise LocalProtocolError("the client is closed", hint="Create a new client, and read before you close it")
        call = _Call(self._loop, work)
        try:
            # In here, too: the interrupt may come as soon as the loop knows of the call.
            self._loop.call_soon_threadsafe(call.start)
            while not call.ended.wait(INTERRUPT_S_MAX):
                pass
        except BaseException:
            self._loop.call_soon_threadsafe(call.cancel)
            call.ended.wait(CANCEL_S_MAX)
            raise
        return call.result()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """End the thread. Whatever still runs in it is cancelled."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def abandon(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the thread after one more call, and wait for neither: the caller may be this very thread.

        Garbage is collected in any thread, and an object that is collected can't report an error to a caller.
        """

        async def end() -> None:
            with suppress(Exception):
                await last()
            await _cancel_others()
            self._loop.stop()

        with suppress(RuntimeError):  # it is closed already
            asyncio.run_coroutine_threadsafe(end(), self._loop)


class _Call(Generic[T]):
    """Work that one thread has given to the loop of another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.ended = threading.Event()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._outcome: Future[T] = Future()

    def start(self) -> None:
        self._task = self._loop.create_task(self._do())
        self._task.add_done_callback(self._end_cancelled)

    async def _do(self) -> None:
        try:
            self._outcome.set_result(await self._work())
        except BaseException as error:
            self._outcome.set_exception(error)
        # Now, and not when the loop calls back: it reads its sockets first, and the caller would wait for that.
        self.ended.set()

    def _end_cancelled(self, _: asyncio.Task[None]) -> None:
        if not self._outcome.done():  # cancelled before its first step
            self._outcome.set_exception(asyncio.CancelledError())
            self.ended.set()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.ended.set()  # interrupted before the loop has started it

    def result(self) -> T:
        return self._outcome.result()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """What blocking work returns or raises. Cancelled, the thread is left to itself, and its result is dropped.

    The threads of `asyncio.to_thread` are waited for when the program ends. One that asks a silent DNS server would
    hold the end up for as long as it may ask. So what only asks, and writes nothing, is done here.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="headwater-asking", daemon=True).start()
    return await asyncio.wrap_future(outcome)
