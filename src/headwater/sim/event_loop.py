"""An event loop with a simulated clock: nothing waits in real time, and the same run is the same every time.

What is ready runs in the order in which it became ready, as asyncio promises. When nothing is ready the clock jumps to
the next timer. Every callback takes a little of the simulated time, so that an active wait ends.
Threads are simulated as well: what is given to an executor happens at once, at a moment that the disk decides.

What the production code does not use is not here, and raises `NotImplementedError` as asyncio has it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import socket
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from headwater.errors import HeadwaterError
from headwater.sim.network import CURRENT, Process, SimulatedNetwork, SimulatedServer

T = TypeVar("T")

CALLBACK_S = 5e-6
"""The simulated time that every callback takes."""
START_S = 1000.0
TASKS_KEPT_MIN = 10_000
"""Tasks that are over without a fault are let go when there are so many, and then whenever they have doubled."""
_CLOSINGS_MAX = 20


class SimulationFault(Exception):
    """The simulation itself can't go on: nothing is left to happen, or there is no end to it."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """See the module. The network's part of a loop is done by `network`."""

    def __init__(self, network: SimulatedNetwork, *, steps_max: int) -> None:
        """`steps_max` limits the steps, so that an endless run is detected."""
        self.network = network
        self.steps = 0
        self.faults: list[str] = []
        """Failures in callbacks and tasks of live processes. Each one is a bug."""
        self._steps_max = steps_max
        self._now_s = START_S
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._tasks: list[tuple[asyncio.Task[Any], Process | None]] = []
        self._tasks_looked_through = TASKS_KEPT_MIN
        self._is_over = False
        self._is_stopping = False
        self._disks: dict[Any, float] = {}
        """Executor → when it will have done what it was given."""
        network.loop = self

    # --- the clock ------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context or copy_context())
        if not self._is_over:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context or copy_context())
        if not self._is_over:
            heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is dropped when it is due."""

    # --- running --------------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:  # type: ignore[override]
        main = asyncio.ensure_future(future, loop=self)
        events._set_running_loop(self)
        try:
            while not main.done():
                self._step()
        finally:
            events._set_running_loop(None)
        return main.result()

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self._steps_max:
            raise SimulationFault(f"no end after {self._steps_max} steps, at {self._now_s:.3f} s")
        ready, timers = self._ready, self._timers
        while timers and (timers[0][0] <= self._now_s or not ready):
            when, _, timer = heapq.heappop(timers)
            if not timer._cancelled:
                self._now_s = max(self._now_s, when)
                ready.append(timer)
        if not ready:
            raise SimulationFault(f"nothing is left to happen, at {self._now_s:.3f} s")
        handle = ready.popleft()
        process = handle._context.get(CURRENT)  # type: ignore[attr-defined]
        if handle._cancelled or (process is not None and not process.is_alive):
            return
        self._now_s += CALLBACK_S
        handle._run()

    def is_running(self) -> bool:
        return not self._is_over

    def is_closed(self) -> bool:
        return self._is_over

    def get_debug(self) -> bool:
        return False

    def close(self) -> None:
        """The end of the run. Coroutines that still wait are closed by hand, lest Python does it at some other time."""
        self._is_over = True
        self._ready.clear()
        self._timers.clear()
        events._set_running_loop(self)
        try:
            for task, _ in self._tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task._log_traceback = False
                if not task.done():
                    _close(task)
        finally:
            events._set_running_loop(None)
        self._tasks.clear()

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass

    # --- tasks ----------------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        context = context or copy_context()
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append((task, context.get(CURRENT)))
        # Not at the end: `close` goes through the list, and what it closes may make tasks that have to be closed, too.
        if len(self._tasks) > self._tasks_looked_through and not self._is_over:
            # A long run makes millions. Those that wait are kept, also of processes that were killed: if Python let go
            # of one, that would be the last word which a killed process must not have.
            self._tasks = [
                (known, process) for known, process in self._tasks if not known.done() or known._log_traceback
            ]
            self._tasks_looked_through = max(TASKS_KEPT_MIN, 2 * len(self._tasks))
        return task

    def failed_tasks(self) -> list[str]:
        """Tasks of processes that live which have failed by a fault of ours, and whose error no one has looked at.

        What the network does to them may not have been looked at yet: the code that gathers results does so in the end.
        """
        return [
            f"{process} {task.get_coro().__qualname__}: {task._exception!r}"  # type: ignore[union-attr]
            for task, process in self._tasks
            if task.done()
            and task._log_traceback
            and not isinstance(task._exception, HeadwaterError | OSError)
            and (process is None or process.is_alive)
        ]

    def get_exception_handler(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # What is found by the garbage collector comes at any time, and would differ from run to run.
        if "handle" in context or "transport" in context:
            self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    # --- threads --------------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """One after the other in an executor, each at a moment of its own.

        It takes effect shortly before the caller is notified, so a crash in between leaves a write that is not known.
        """
        process = CURRENT.get()
        future: asyncio.Future[T] = self.create_future()
        before_s, after_s = (0.0, 0.0) if process is None else (process.disk_delay(), process.disk_delay())
        starts_s = max(self._now_s, self._disks.get(executor, 0.0))
        self._disks[executor] = starts_s + before_s + after_s

        def report(error: Exception | None, result: T | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def take_effect() -> None:
            try:
                result, error = func(*args), None
            except Exception as failure:
                result, error = None, failure
            self.call_later(after_s, report, error, result)

        self.call_at(starts_s + before_s, take_effect)
        return future

    # --- the network ----------------------------------------------------------------------------------------------

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **options: Any
    ) -> SimulatedServer:
        assert options.get("ssl") is None, "TLS is not simulated"
        return self.network.listen(protocol_factory, host, port)

    def remove_reader(self, fd: Any) -> bool:
        return False

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **options: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        if options.get("ssl") is not None:
            # A node that does not speak TLS closes on the first byte of a handshake, which is no magic.
            raise ConnectionResetError(104, "Connection reset by peer")
        return await self.network.connect(protocol_factory, host, port)


def _close(task: asyncio.Task[Any]) -> None:
    coroutine = task.get_coro()
    for _ in range(_CLOSINGS_MAX):
        try:
            coroutine.close()
            return
        except RuntimeError:
            continue  # it waits for something else, on its way out
        except BaseException:
            return
