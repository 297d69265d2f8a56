"""Blocking work beside a loop: it is waited for while it is wanted, and by nobody afterwards."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headwater.client.threads import in_daemon_thread


def test_what_it_returns_and_raises() -> None:
    assert asyncio.run(in_daemon_thread(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(lambda: 1 // 0))


def test_the_loop_goes_on_meanwhile() -> None:
    async def story() -> None:
        go_on = threading.Event()
        work = asyncio.create_task(in_daemon_thread(lambda: go_on.wait(60)))
        await asyncio.sleep(0)
        assert not work.done()
        go_on.set()
        assert await work

    asyncio.run(story())


def test_a_result_that_nobody_wants_any_more_is_dropped() -> None:
    async def story() -> None:
        go_on, ended = threading.Event(), threading.Event()
        work = asyncio.create_task(in_daemon_thread(lambda: (go_on.wait(60), ended.set())))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        go_on.set()
        while not ended.is_set():
            await asyncio.sleep(0.01)

    asyncio.run(story())
