"""What the tests of the simulation share: processes on a simulated loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from headwater.sim.event_loop import SimulatedLoop
from headwater.sim.network import Process, SimulatedNetwork, Trace


class SmallWorld:
    """A loop, a network, and processes on hosts of their own."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.network = SimulatedNetwork(Random(1), self.trace)
        self.loop = SimulatedLoop(self.network, steps_max=100_000)
        self.trace.now_s = self.loop.time

    def process(self, host: str, *, disk: Callable[[], float] | None = None) -> Process:
        process = Process(host, host, random=Random(host), disk=disk)
        process.on_killed.append(lambda: self.network.close_of(process))
        return process

    def run(self, main: Coroutine[Any, Any, Any], *, host: str = "main") -> Any:
        return self.loop.run_until_complete(self.process(host).run(self.loop, main))


@pytest.fixture
def small_world() -> Any:
    world = SmallWorld()
    yield world
    world.loop.close()
