"""An event loop whose clock jumps to the next thing that is to happen, so that nothing in a test waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 5000.0


class _JumpingSelector(selectors.DefaultSelector):
    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def virtual_clock_s() -> float:
    """The time of the loop that runs."""
    return asyncio.get_running_loop().time()


def run(call: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(call)
