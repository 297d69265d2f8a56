"""Fixtures for tests of all kinds."""

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

# Every run tries other examples, so a few per run suffice; `make soak` tries many. No deadline: machines differ.
settings.register_profile("every-run", max_examples=25, deadline=None)
settings.register_profile("soak", max_examples=800, deadline=None)
settings.load_profile("every-run")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the collected tests from garbage collection, as they live to the end and need not be scanned each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


ASYNC_S_MAX = 120.0
"""How long a coroutine test may take: far longer than any needs, so that a hanging test reports where it hangs."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in its own event loop, made by its module's `LOOP_FACTORY` if it has one.

    Such a loop has its own clock, so the test's time on it is not limited.
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
    gc.unfreeze()  # Libraries look for leaked objects when the interpreter ends


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Start real nodes, in a folder of the test unless another one is given. They are stopped when the test ends.

    A node that has met an internal error has a traceback in its log, and fails the test.
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
    # Imported here, because few tests need the SDK.
    from headwater import telemetry
    from support.traces import Traces

    kept = Traces()
    monkeypatch.setattr(telemetry, "_tracer", lambda: kept.provider.get_tracer(telemetry.SCOPE))
    yield kept
    kept.provider.shutdown()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process from which the nodes of a `HeadwaterNode` are forked, so that they start fast."""
    with Nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made
