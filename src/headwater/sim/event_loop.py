"""An event loop with a simulated clock: nothing waits in real time, and equal runs take equal steps.

Ready callbacks run in the order in which they became ready, as asyncio promises. If none is ready, the clock jumps to
the next timer. Every callback takes a little simulated time, so that busy waiting ends. Threads are simulated as
well: a call in an executor takes effect all at once, at a moment that the disk determines.

Methods that the production code does not use are missing, and raise `NotImplementedError` as in asyncio's base class.
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
"""Drop tasks that ended without a fault once there are this many tasks, and then whenever their number doubles."""
_CLOSINGS_MAX = 20


class SimulationFault(Exception):
    """The simulation can't continue: there is nothing left to run, or it does not end."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The loop that the module describes. `network` does the work of its network methods."""

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
        """By executor: when it will have finished its calls."""
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
        """Do nothing: a cancelled timer is dropped when it is due."""

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
        """End the run. Closes coroutines that still wait, so that Python does not do so at an arbitrary time."""
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
        # Not at the end: `close` iterates over the list, and closing a task may create tasks that must be closed, too.
        if len(self._tasks) > self._tasks_looked_through and not self._is_over:
            # A long run creates millions of tasks. Waiting ones are kept, even those of killed processes: if Python
            # collected such a task, it would run code of a killed process, which must not happen.
            self._tasks = [
                (known, process) for known, process in self._tasks if not known.done() or known._log_traceback
            ]
            self._tasks_looked_through = max(TASKS_KEPT_MIN, 2 * len(self._tasks))
        return task

    def failed_tasks(self) -> list[str]:
        """Return the tasks of live processes that failed because of a bug, and whose error was never retrieved.

        Network errors don't count: the code that gathers results may still retrieve them later.
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
        # Errors that the garbage collector finds are ignored: they occur at arbitrary times, which differ between runs.
        if "handle" in context or "transport" in context:
            self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    # --- threads --------------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run the calls of an executor one after the other, each at its own moment.

        A call takes effect shortly before its caller is notified: a crash in between leaves a write of unknown outcome.
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
            # A plain node closes the connection at the first byte of a TLS handshake, which is not a valid magic.
            raise ConnectionResetError(104, "Connection reset by peer")
        return await self.network.connect(protocol_factory, host, port)


def _close(task: asyncio.Task[Any]) -> None:
    coroutine = task.get_coro()
    for _ in range(_CLOSINGS_MAX):
        try:
            coroutine.close()
            return
        except RuntimeError:
            continue  # The coroutine waits for something else while it ends.
        except BaseException:
            return
