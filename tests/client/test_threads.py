"""Threads of the client at the end of a process."""

from __future__ import annotations

from support.forked_program import run_program

ENDS_AT_ONCE = """
import asyncio, time
from headwater.client.threads import in_daemon_thread

async def main():
    await asyncio.wait_for(in_daemon_thread(lambda: time.sleep(600)), 0.01)

asyncio.run(main())
"""


def test_the_program_does_not_wait_for_it() -> None:
    ended = run_program("-c", ENDS_AT_ONCE, timeout=60)
    assert "TimeoutError" in ended.stderr
