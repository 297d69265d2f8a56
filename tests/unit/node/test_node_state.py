"""The signal of a node's state that something has changed."""

from __future__ import annotations

import asyncio

from headwater.node.commit_loop import ChangeSignal


async def test_no_change_is_missed() -> None:
    changes = ChangeSignal()
    seen = changes.count
    changes.notify()
    await asyncio.wait_for(changes.after(seen), 1)
    waiting = [asyncio.create_task(changes.after(changes.count)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    changes.notify()
    await asyncio.wait_for(asyncio.gather(*waiting), 1)
