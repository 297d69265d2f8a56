"""A checkpoint that can't be written: the disk is full, or the folder may not be written to. The old one stays.

As in `test_disk_full.py`, the kernel refuses to let files grow, in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.client.checkpoints import CheckpointStore, FileCheckpoint, SqliteCheckpoint
from headwater.client.offsets import Offsets
from headwater.errors import CheckpointFailed
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.machine import forked

NOBODY = 65534

MakeStore = Callable[[Path], CheckpointStore]


def offsets_at(seqno: int, *, vbuckets: int = 1024) -> Offsets:
    offset = StreamOffset(vbuuid=Vbuuid(2**63), seqno=Seqno(seqno), snapshot_end=Seqno(seqno))
    return Offsets("uuid", dict.fromkeys(map(VBucketId, range(vbuckets)), offset))


def file_store(folder: Path) -> FileCheckpoint:
    return FileCheckpoint(folder / "checkpoint")


def sqlite_store(folder: Path) -> SqliteCheckpoint:
    return SqliteCheckpoint(folder / "checkpoint.db", name="orders")


def limit_files(size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def fill(store: CheckpointStore, *, room_bytes: int) -> None:
    async def save_and_fail() -> None:
        await store.save(offsets_at(1))
        limit_files(room_bytes)
        for _ in range(3):
            with pytest.raises(CheckpointFailed) as raised:
                await store.save(offsets_at(2))
            assert "space" in raised.value.hint
            assert "is unchanged" in raised.value.hint
            assert await store.load() == offsets_at(1)
        limit_files(resource.RLIM_INFINITY)
        await store.save(offsets_at(3))
        assert await store.load() == offsets_at(3)
        limit_files(room_bytes)
        with pytest.raises(CheckpointFailed):
            await store.save(offsets_at(4))

    asyncio.run(save_and_fail())


@pytest.mark.parametrize("make_store", [file_store, sqlite_store])
@pytest.mark.parametrize("room_bytes", [0, 1, 512, 4096, 20_000, 30_000])
def test_no_room(tmp_path: Path, make_store: MakeStore, room_bytes: int) -> None:
    assert forked(lambda: fill(make_store(tmp_path), room_bytes=room_bytes)) == 0
    store = make_store(tmp_path)
    assert asyncio.run(store.load()) == offsets_at(3)
    asyncio.run(store.close())
    assert not (tmp_path / "checkpoint.tmp").exists()


@pytest.mark.parametrize("make_store", [file_store, sqlite_store])
def test_no_room_for_the_first(tmp_path: Path, make_store: MakeStore) -> None:
    def fail() -> None:
        limit_files(4096)
        with pytest.raises(CheckpointFailed):
            asyncio.run(make_store(tmp_path).save(offsets_at(1)))

    assert forked(fail) == 0
    store = make_store(tmp_path)
    assert asyncio.run(store.load()) is None
    asyncio.run(store.close())


# --- a folder that may not be written to --------------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that everybody can get to. Those of pytest are their user's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def as_nobody() -> None:
    """Nothing is forbidden to root."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def test_a_folder_that_can_only_be_read(open_folder: Path) -> None:
    path = file_store(open_folder).path
    path.write_text(offsets_at(1).to_json())
    open_folder.chmod(0o555)

    def fail() -> None:
        as_nobody()
        for call in (file_store(open_folder).load(), file_store(open_folder).save(offsets_at(2))):
            with pytest.raises(CheckpointFailed, match="Permission denied") as raised:
                asyncio.run(call)
            assert str(open_folder) in raised.value.hint

    assert forked(fail) == 0
    assert Offsets.from_json(path.read_text()) == offsets_at(1)


def test_a_database_that_can_only_be_read(open_folder: Path) -> None:
    store = sqlite_store(open_folder)
    asyncio.run(store.save(offsets_at(1)))
    asyncio.run(store.close())
    Path(store.path).chmod(0o444)
    open_folder.chmod(0o555)

    def fail() -> None:
        as_nobody()
        assert asyncio.run(store.load()) == offsets_at(1)
        with pytest.raises(CheckpointFailed, match="readonly") as raised:
            asyncio.run(store.save(offsets_at(2)))
        assert "may write" in raised.value.hint

    assert forked(fail) == 0
    assert asyncio.run(store.load()) == offsets_at(1)
    asyncio.run(store.close())
