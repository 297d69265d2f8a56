"""What may end a command from outside, heeded where nothing is half done: signals, and a reader that is gone.

A signal that comes while changes are being written waits until they are out, so that the offsets say exactly what
has been written. It does not wait for ever: a reader that takes nothing from a pipe would hold the command there.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

GRACE_S = 2.0
"""How long a write may go on after the first signal."""
REPEAT_S = 0.05

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP has come. A command ends as after Ctrl-C, with the exit code of this signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code_after(error: BaseException) -> int:
    """128 and the number of the signal that raised it, as shells have it."""
    return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """Raise `Ended` for an ending signal that would else end the process at once, with nothing cleaned up."""
    process = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            raise Ended(number)
        # A process that was forked since, such as a worker of a pool, ends as if there were no handler.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    # Only the main thread may set handlers. What is ignored, as under nohup, stays ignored.
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in ENDING_SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


class Interrupted(BaseException):
    """A signal has come, and now is the time to heed it. Like KeyboardInterrupt, it is no error."""


class Interruptions:
    """Turns ending signals into `Interrupted`, inside `allowed` only."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        """The signal that has come."""
        self._reader_is_gone = False
        self._is_allowed = False
        self._is_over = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal, as shells have it."""
        assert self.number is not None
        return 128 + self.number

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Here a signal may interrupt; one that has come before does so at once."""
        self._is_allowed = True
        try:
            self._heed()
            yield
        finally:
            self._is_allowed = False

    def hurry(self) -> None:
        """What comes now is not waited for longer than the grace, where a signal has come."""
        if self.number is not None:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _heed(self) -> None:
        if self.number is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted
        if self._reader_is_gone:
            raise BrokenPipeError

    def watch_reader(self, file: int) -> None:
        """Raise `BrokenPipeError` in `allowed` when no process is left that reads from a pipe.

        A write would raise it, too, but it may be long until there is one: `| head -1` should end at once.
        """
        # Its signal may come late, and must not end what comes after this.
        self._previous[signal.SIGALRM] = signal.SIG_IGN
        threading.Thread(target=self._wait_for_reader, args=(file,), name="headwater-reader-watch", daemon=True).start()

    def _wait_for_reader(self, file: int) -> None:
        poll = select.poll()
        poll.register(file, 0)  # errors of a file are reported without being asked for
        poll.poll()
        self._reader_is_gone = True
        # A signal that comes just before the main thread begins to wait would be seen after its wait only.
        while not self._is_over.wait(REPEAT_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def __enter__(self) -> Self:
        for number in ENDING_SIGNALS:
            # What a shell or nohup has set to be ignored stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._is_over.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self.number is None
        self.number = self.number or signal.Signals(number)
        if self._is_allowed or not is_first:
            self._heed()
        self.hurry()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None or self._is_allowed:
            self._heed()
