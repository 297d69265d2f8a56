"""A signal to any number of waiters that something has changed, of which none can miss a change."""

from __future__ import annotations

import asyncio


class Changes:
    """Counts changes. Note `count`, look at the thing, then wait for a change `after` that count.

    For one event loop: `notify` is called in the loop that waits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, count: int) -> None:
        """Return once there have been more changes than `count`."""
        while self.count <= count:
            await self._next.wait()
