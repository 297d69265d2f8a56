"""A loop in a thread: results, errors, interrupts, and what is left when it is closed."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from headwater.client.loop_thread import LoopThread
from headwater.errors import LocalProtocolError


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def failing() -> None:
    raise LookupError("nothing there")


def test_what_is_run_returns_or_raises() -> None:
    thread = LoopThread("test")
    assert thread.run(answer()) == 42
    with pytest.raises(LookupError):
        thread.run(failing())
    thread.close()


def test_after_its_end_nothing_is_run() -> None:
    thread = LoopThread("test")
    thread.close()
    assert thread.is_closed
    assert "test" not in {other.name for other in threading.enumerate()}
    with pytest.raises(LocalProtocolError):
        thread.run(answer())


def test_an_interrupted_call_is_cancelled_and_over_before_the_caller_goes_on() -> None:
    thread = LoopThread("test")
    steps: list[str] = []

    async def wait() -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            steps.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt):
        thread.run(wait())
    assert steps == ["cleaned up"]
    assert thread.run(answer()) == 42
    thread.close()


def test_who_waits_in_another_thread_is_set_free_by_the_end() -> None:
    thread = LoopThread("test")
    begun, freed = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.sleep(60)

    def block() -> None:
        with pytest.raises(asyncio.CancelledError):
            thread.run(wait())
        freed.set()

    blocked = threading.Thread(target=block)
    blocked.start()
    assert begun.wait(10)
    thread.close()
    blocked.join()
    assert freed.is_set()
