"""kill -9 while a checkpoint is saved: afterwards there is the old one or the new one, and all of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from headwater import durable_files
from headwater.client import checkpoints as file_module
from headwater.client.checkpoints import CheckpointStore, FileCheckpoint, SqliteCheckpoint
from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.machine import FAILED, forked

SEED = 7
KILLS = 10
SAVING_S_MAX = 0.05
VBUCKETS = 1024

_SAVED = struct.Struct(">Q")

Save = Callable[[int], Awaitable[None]]
MakeStore = Callable[[Path], CheckpointStore]


def offsets_at(seqno: int) -> Offsets:
    """The same seqno in all vbuckets, so that a mixture of two saves is easy to see."""
    offset = StreamOffset(
        vbuuid=Vbuuid(2**63 + seqno), seqno=Seqno(seqno), snapshot_start=Seqno(0), snapshot_end=Seqno(seqno)
    )
    return Offsets("uuid", dict.fromkeys(map(VBucketId, range(VBUCKETS)), offset))


def loaded_seqno(store: CheckpointStore) -> int:
    """The seqno of a checkpoint, which is whole; 0 where there is none."""

    async def load() -> Offsets | None:
        try:
            return await store.load()
        finally:
            await store.close()

    found = asyncio.run(load())
    if found is None:
        return 0
    seqno = found[VBucketId(0)].seqno
    assert found == offsets_at(seqno)
    return seqno


def file_store(folder: Path) -> FileCheckpoint:
    return FileCheckpoint(folder / "checkpoint")


def sqlite_store(folder: Path) -> SqliteCheckpoint:
    return SqliteCheckpoint(folder / "checkpoint.db", name="orders")


# --- at any moment ------------------------------------------------------------------------------------------------


def save_until_killed(save: Save, *, first: int, after_s: float) -> int:
    """Save one seqno after the other in a process of its own, and kill it. Returns the last one that was saved."""
    reading, writing = os.pipe()

    async def save_for_ever() -> None:
        seqno = first
        while True:
            await save(seqno)
            os.write(writing, _SAVED.pack(seqno))
            seqno += 1

    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(save_for_ever())
        finally:
            os._exit(FAILED)
    os.close(writing)
    with os.fdopen(reading, "rb") as reports:
        saved = reports.read(_SAVED.size)
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        saved += reports.read()
    assert saved, "nothing was saved before the kill"
    last: int = _SAVED.unpack(saved[-_SAVED.size :])[0]
    return last


@pytest.mark.parametrize("make_store", [file_store, sqlite_store])
def test_killed_at_any_moment(tmp_path: Path, make_store: MakeStore) -> None:
    rng = random.Random(SEED)
    found = 0
    for _ in range(KILLS):
        store = make_store(tmp_path)
        saved = save_until_killed(
            lambda seqno, store=store: store.save(offsets_at(seqno)),
            first=found + 1,
            after_s=rng.uniform(0, SAVING_S_MAX),
        )
        found = loaded_seqno(make_store(tmp_path))
        assert found in (saved, saved + 1)
    print(f"{found} saves, {KILLS} kills")


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_every_change_counts_exactly_once(tmp_path: Path, journal: str) -> None:
    """Data and offsets in one transaction: whenever it is killed, there is the data of all changes up to the offset."""
    rng = random.Random(SEED)
    path = sqlite_store(tmp_path).path
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("CREATE TABLE orders (seqno INTEGER)")
    found = 0
    for _ in range(KILLS):
        saved = save_until_killed(insert_and_save(tmp_path), first=found + 1, after_s=rng.uniform(0, SAVING_S_MAX))
        found = loaded_seqno(sqlite_store(tmp_path))
        assert found in (saved, saved + 1)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*), max(seqno) FROM orders").fetchone() == (found, found)


def insert_and_save(folder: Path) -> Save:
    store = sqlite_store(folder)
    connections: list[sqlite3.Connection] = []

    async def save(seqno: int) -> None:
        if not connections:
            # A connection belongs to the process that has made it.
            connections.append(sqlite3.connect(store.path))
        with connections[0] as connection:
            connection.execute("INSERT INTO orders VALUES (?)", (seqno,))
            store.save_in(connection, offsets_at(seqno))

    return save


# --- at every line ------------------------------------------------------------------------------------------------

KILLED = 77


def die_at_line(number: int, *paths: str) -> Callable[..., Any]:
    """A trace function that ends the process where it comes to that many lines of some source files."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in paths:
            return None
        if event == "line":
            left -= 1
            if not left:
                os._exit(KILLED)
        return trace

    return trace


def save_dying(store: CheckpointStore, seqno: int, trace: Callable[..., Any]) -> None:
    threading.settrace(trace)
    sys.settrace(trace)
    asyncio.run(store.save(offsets_at(seqno)))
    sys.settrace(None)


@pytest.mark.parametrize(("make_store", "module"), [(file_store, file_module), (sqlite_store, file_module)])
@pytest.mark.parametrize("before", [0, 1], ids=["the first save", "a later save"])
def test_killed_at_every_line(tmp_path: Path, make_store: MakeStore, module: Any, before: int) -> None:
    seen: list[int] = []
    code, line = KILLED, 0
    while code == KILLED:
        line += 1
        folder = tmp_path / str(line)
        folder.mkdir()
        if before:
            store = make_store(folder)
            asyncio.run(store.save(offsets_at(before)))
            asyncio.run(store.close())
        trace = die_at_line(line, module.__file__, durable_files.__file__)
        code = forked(lambda: save_dying(make_store(folder), before + 1, trace))  # noqa: B023  (it is run at once)
        seen.append(loaded_seqno(make_store(folder)))
        # And the next one is not disturbed by what was left behind.
        store = make_store(folder)
        asyncio.run(store.save(offsets_at(before + 2)))
        asyncio.run(store.close())
        assert loaded_seqno(make_store(folder)) == before + 2
    assert code == 0
    assert seen == sorted(seen), "once it is saved, it stays"
    assert {*seen} == {before, before + 1}
    assert line > 20
