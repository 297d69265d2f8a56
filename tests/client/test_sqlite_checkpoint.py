"""Several processes with one SQLite checkpoint."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from headwater.client.checkpoints.sqlite import SqliteCheckpoint
from support import node_process
from support.checkpoint_samples import offsets_at, run
from support.forked_program import start_program


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.db"


def saved(path: Path, name: str = "orders") -> object:
    """What any other reader would load."""
    store = SqliteCheckpoint(path, name=name)
    try:
        return run(store.load())
    finally:
        run(store.close())


SAVE_MANY = """
import asyncio, sqlite3, sys
sys.path[:0] = sys.argv[3:]
from support.checkpoint_samples import offsets_at
from headwater.client.checkpoints.sqlite import SqliteCheckpoint
store = SqliteCheckpoint(sys.argv[1], name=sys.argv[2])
async def save_all():
    for seqno in range(1, 51):
        await store.save(offsets_at(seqno))
    await store.close()
asyncio.run(save_all())
"""


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_many_processes_at_once(path: Path, journal: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
    names = [f"reader {number}" for number in range(3)]
    folders = [str(Path(node_process.__file__).parents[1])]
    processes = [
        start_program("-c", SAVE_MANY, str(path), name, *folders, stderr=subprocess.PIPE, text=True) for name in names
    ]
    for process in processes:
        _, complaint = process.communicate(timeout=120)
        assert process.returncode == 0, complaint
    for name in names:
        assert saved(path, name) == offsets_at(50)
