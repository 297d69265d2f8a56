"""A loop in a thread: results, errors, interrupts, and what is left when it is closed."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine

import pytest

from headwater.client.threads import LoopThread, in_daemon_thread
from headwater.errors import LocalProtocolError


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def failing() -> None:
    raise LookupError("nothing there")


def test_what_is_run_returns_or_raises() -> None:
    thread = LoopThread("test")
    assert thread.run(answer) == 42
    with pytest.raises(LookupError):
        thread.run(failing)
    thread.close()


def test_an_interrupt_before_the_call_leaves_no_coroutine_that_nobody_awaits() -> None:
    thread = LoopThread("test")
    makers: list[str] = []

    def make() -> Coroutine[None, None, int]:
        makers.append(threading.current_thread().name)
        return answer()

    assert thread.run(make) == 42
    assert makers == ["test"]
    thread.close()


def test_after_its_end_nothing_is_run() -> None:
    thread = LoopThread("test")
    thread.close()
    assert thread.is_closed
    assert "test" not in {other.name for other in threading.enumerate()}
    with pytest.raises(LocalProtocolError):
        thread.run(answer)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_interrupt_while_the_loop_is_told_cancels_the_call(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the loop has heard of the call by then or not, the caller goes on when it is over."""
    thread = LoopThread("test")
    loop = thread._loop

    class Interrupted:
        """The loop, with an interrupt in the middle of the first call."""

        def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
            monkeypatch.undo()
            if is_told:
                loop.call_soon_threadsafe(callback)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(loop, name)

    monkeypatch.setattr(thread, "_loop", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        thread.run(lambda: asyncio.sleep(60))
    assert thread.run(_others) == 0
    thread.close()


async def _others() -> int:
    return len(asyncio.all_tasks() - {asyncio.current_task()})


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
        thread.run(wait)
    assert steps == ["cleaned up"]
    assert thread.run(answer) == 42
    thread.close()


def test_the_caller_goes_on_before_the_loop_does_something_else() -> None:
    thread = LoopThread("test")
    has_returned, seen = threading.Event(), []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(lambda: seen.append(has_returned.wait(10)))

    thread.run(work)
    has_returned.set()
    thread.close()
    assert seen == [True]


def test_who_waits_in_another_thread_is_set_free_by_the_end() -> None:
    thread = LoopThread("test")
    begun, freed = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.sleep(60)

    def block() -> None:
        with pytest.raises(asyncio.CancelledError):
            thread.run(wait)
        freed.set()

    blocked = threading.Thread(target=block)
    blocked.start()
    assert begun.wait(10)
    thread.close()
    blocked.join()
    assert freed.is_set()


# --- blocking work beside a loop: it is waited for while it is wanted, and by nobody afterwards -----------------------


def test_what_it_returns_and_raises() -> None:
    assert asyncio.run(in_daemon_thread(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(lambda: 1 // 0))


async def test_the_loop_goes_on_meanwhile() -> None:
    go_on = threading.Event()
    work = asyncio.create_task(in_daemon_thread(lambda: go_on.wait(60)))
    await asyncio.sleep(0)
    assert not work.done()
    go_on.set()
    assert await work


async def test_a_result_that_nobody_wants_any_more_is_dropped() -> None:
    go_on, ended = threading.Event(), threading.Event()
    work = asyncio.create_task(in_daemon_thread(lambda: (go_on.wait(60), ended.set())))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    go_on.set()
    while not ended.is_set():
        await asyncio.sleep(0.01)
