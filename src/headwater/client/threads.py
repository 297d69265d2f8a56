"""Threads with and beside event loops: a loop for callers that have none, and a thread for the few blocking calls.

The blocking client and `blocking_bucket` use `LoopThread`. Its loop keeps running while the caller is busy: it answers
noops and receives bytes, up to the flow-control window, however long the caller works on a batch. Nothing here may
keep the program from ending.
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
"""A signal that comes just before a thread waits does not wake it: an interrupt may go unnoticed for this long."""
CANCEL_S_MAX = 10.0
"""How long an interrupted call may take to end."""


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run asynchronous work for a caller in any thread, and wait for its result."""
    thread = LoopThread("headwater")
    try:
        return thread.run(work)
    finally:
        thread.close()


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self, name: str) -> None:
        self._loop = _new_loop()
        # The thread is a daemon, so that a program that forgets to close the client can end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in the loop, and return or raise its result. If interrupted, cancel it and wait for its end.

        The coroutine is created in the loop: if the caller created it and were interrupted before passing it on, it
        would never be awaited, and Python would warn.
        """
        if self.is_closed:
            raise LocalProtocolError("the client is closed", hint="Create a new client, and read before you close it")
        call = _Call(self._loop, work)
        try:
            # Inside the try block, because the interrupt may come as soon as the loop knows the call.
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
        """End the thread. Work that still runs in it is cancelled."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def abandon(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the thread after one more call, without waiting for either: the caller may be this very thread.

        Called when an object is garbage-collected, which may happen in any thread and can report no error.
        """

        async def end() -> None:
            with suppress(Exception):
                await last()
            await _cancel_others()
            self._loop.stop()

        with suppress(RuntimeError):  # it is already closed
            asyncio.run_coroutine_threadsafe(end(), self._loop)


class _Call(Generic[T]):
    """Work that one thread runs in the loop of another."""

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
        # Signal here instead of in a callback: the loop reads its sockets first, and the caller would wait for that.
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
    """Run blocking work in a thread. If this is cancelled, the thread goes on, and its result is dropped.

    The program waits at its end for threads of `asyncio.to_thread`. One that queries a silent DNS server would delay
    that until its timeout. So blocking queries that write nothing run here.
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
