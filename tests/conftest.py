"""Fixtures that tests of all kinds may use."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from headwater.testing.nursery import Nursery
from support.node_process import NodeProcess, StartNode

if TYPE_CHECKING:
    from support.traces import Traces

# Every run tries other examples, so that few are enough for one; `make soak` tries many. No deadline: machines differ.
settings.register_profile("every-run", max_examples=25, deadline=None)
settings.register_profile("soak", max_examples=800, deadline=None)
settings.load_profile("every-run")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests that were collected stay to the end, so that the garbage collector need not look at them each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


ASYNC_S_MAX = 120.0
"""How long a test that is a coroutine may take: far beyond what any takes, so that one which hangs says where."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own: that of its module's `LOOP_FACTORY`, if any.

    Such a loop has a time of its own, so nothing limits how much of it the test takes.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    loop_factory = getattr(pyfuncitem.module, "LOOP_FACTORY", None)

    async def run() -> None:
        async with asyncio.timeout(None if loop_factory else ASYNC_S_MAX):
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    return True


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look for what they have leaked when the interpreter ends


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Starts real nodes, on a folder of the test unless another is given. They are gone when the test ends.

    A node that has met an error of its own shows it in its log as a traceback, and fails the test.
    """
    nodes: list[NodeProcess] = []

    with ExitStack() as stack:

        def start(*options: str, data: Path | None = None, fresh: bool = False) -> NodeProcess:
            node = stack.enter_context(NodeProcess(data or tmp_path / f"data-{len(nodes)}", *options, fresh=fresh))
            nodes.append(node)
            return node.start()

        yield start
    for node in nodes:
        assert "Traceback" not in node.log(), node.log()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """What this process records with OpenTelemetry."""
    # Few tests need the SDK.
    from headwater import telemetry
    from support.traces import Traces

    kept = Traces()
    monkeypatch.setattr(telemetry, "_tracer", lambda: kept.provider.get_tracer(telemetry.SCOPE))
    yield kept
    kept.provider.shutdown()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where the nodes of a `HeadwaterNode` start fast: one process, from which they are forked."""
    with Nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made
