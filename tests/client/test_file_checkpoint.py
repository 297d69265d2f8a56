"""A checkpoint's file and processes that are killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headwater.client.checkpoints import CheckpointStore, FileCheckpoint
from headwater.errors import CheckpointInUse
from support.checkpoint_samples import offsets_at, run
from support.forked_program import start_program


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.checkpoint"


def save(path: Path, seqno: int) -> None:
    store: CheckpointStore = FileCheckpoint(path)
    run(store.save(offsets_at(seqno)))
    run(store.close())


SAVE_AND_WAIT = """
import asyncio, sys
from headwater.client.checkpoints import FileCheckpoint
store = FileCheckpoint(sys.argv[1])
asyncio.run(store.load())
print("holds it", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_when_it_loads(path: Path) -> None:
    """And not when it has done its work and comes to save."""
    save(path, 7)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start_program("-c", SAVE_AND_WAIT, str(path), **pipes) as other:
        assert other.stdout.readline() == "holds it\n"
        with pytest.raises(CheckpointInUse) as raised:
            run(FileCheckpoint(path).load())
        assert str(path) in raised.value.reason
        assert raised.value.hint
        with pytest.raises(CheckpointInUse):
            run(FileCheckpoint(path).save(offsets_at(8)))
        # The lock of a process that is killed goes with it.
        other.kill()
    assert run(FileCheckpoint(path).load()) == offsets_at(7)
