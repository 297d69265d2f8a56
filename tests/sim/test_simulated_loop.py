"""The simulated event loop: its clock, its order, its threads, and what it does with the dead. And the disk."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest

from headwater.errors import StoreFull
from headwater.node.auth.users import DECOY_SECRET_BYTES, Users
from headwater.sim.event_loop import START_S, SimulationFault
from headwater.sim.network import SimulatedDisk, SimulatedFolder
from headwater.store.engine import PutRow, Table


def test_nothing_waits_in_real_time(small_world):
    before_s = time.monotonic()
    small_world.run(asyncio.sleep(3600))
    assert small_world.loop.time() == pytest.approx(START_S + 3600, abs=0.01)
    assert time.monotonic() - before_s < 5


def test_timers_come_in_their_order_and_then_in_that_of_their_making(small_world):
    seen = []

    async def main():
        loop = asyncio.get_running_loop()
        for name, delay_s in (("late", 2), ("first", 1), ("second", 1)):
            loop.call_later(delay_s, seen.append, name)
        loop.call_later(0.5, seen.append, "cancelled").cancel()
        await asyncio.sleep(3)

    small_world.run(main())
    assert seen == ["first", "second", "late"]


def test_one_who_waits_actively_gets_somewhere(small_world):
    async def main():
        async with asyncio.timeout(0.01):
            while True:
                await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        small_world.run(main())


def test_a_run_in_which_nothing_can_happen_is_an_error(small_world):
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationFault, match="nothing is left"):
        small_world.run(main())


def test_a_run_with_no_end_is_an_error(small_world):
    async def main():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationFault, match="no end"):
        small_world.run(main())


def test_a_killed_process_has_no_last_word(small_world):
    said = []

    async def victim():
        try:
            said.append("begins")
            await asyncio.sleep(1)
            said.append("goes on")
        finally:
            said.append("ends")

    async def main():
        process = small_world.process("victim")
        process.run(small_world.loop, victim())
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(10)
        assert said == ["begins"]

    small_world.run(main())


@pytest.mark.parametrize(
    ("killed_after_s", "is_written", "is_reported"), [(0.5, False, False), (1.5, True, False), (2.5, True, True)]
)
def test_a_crash_leaves_a_write_undone_or_done_and_not_reported(small_world, killed_after_s, is_written, is_reported):
    disk, reported = [], []

    async def victim():
        loop = asyncio.get_running_loop()
        reported.append(await loop.run_in_executor(None, lambda: disk.append("written")))

    async def main():
        process = small_world.process("victim", disk=lambda: 1.0)
        process.run(small_world.loop, victim())
        await asyncio.sleep(killed_after_s)
        process.kill()
        await asyncio.sleep(10)

    small_world.run(main())
    assert (bool(disk), bool(reported)) == (is_written, is_reported)


def test_what_an_executor_raises_is_raised(small_world):
    async def main():
        await asyncio.get_running_loop().run_in_executor(None, int, "none")

    with pytest.raises(ValueError, match="none"):
        small_world.run(main())


def test_a_callback_that_fails_is_kept(small_world):
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    small_world.run(main())
    assert any("ZeroDivisionError" in fault for fault in small_world.loop.faults)


def test_what_is_not_simulated_is_refused(small_world):
    async def main():
        await asyncio.create_subprocess_exec("true")

    with pytest.raises(NotImplementedError):
        small_world.run(main())


def test_a_full_disk_takes_nothing_and_keeps_everything() -> None:
    disk = SimulatedDisk(Random(1), Users(decoy_secret=bytes(DECOY_SECRET_BYTES)))
    engine = SimulatedFolder(disk).open_engine("b")
    engine.write([PutRow(Table.BUCKET, b"k", b"v")])
    disk.is_full = True
    with pytest.raises(StoreFull):
        engine.write([PutRow(Table.BUCKET, b"k", b"w")])
    with engine.view() as view:
        assert bytes(view.get(Table.BUCKET, b"k")) == b"v"
