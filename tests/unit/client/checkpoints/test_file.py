"""A checkpoint in a file: whole or not there, never two readers, and never a fresh start by accident."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest

from headwater.client.checkpoints import CheckpointStore, FileCheckpoint
from headwater.client.offsets import TEXT_CHARS_MAX, Offsets
from headwater.errors import CheckpointFailed, CheckpointInUse
from support.checkpoint_samples import offsets_at, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.checkpoint"


def save(path: Path, seqno: int) -> None:
    store: CheckpointStore = FileCheckpoint(path)
    run(store.save(offsets_at(seqno)))
    run(store.close())


def test_what_was_saved_last_is_loaded(path: Path) -> None:
    store = FileCheckpoint(str(path))
    assert run(store.load()) is None
    assert not path.exists()
    for seqno in (5, 9, 3):
        run(store.save(offsets_at(seqno)))
        assert run(store.load()) == offsets_at(seqno)
    run(store.close())
    assert run(FileCheckpoint(path).load()) == offsets_at(3)


def test_the_file_is_the_text_of_the_offsets(path: Path) -> None:
    save(path, 7)
    assert path.read_text() == offsets_at(7).to_json() + "\n"


def test_no_other_files_are_left_but_the_lock(path: Path) -> None:
    save(path, 7)
    save(path, 8)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["orders.checkpoint", "orders.checkpoint.lock"]


def test_everybody_may_look_while_it_is_in_use(path: Path) -> None:
    store = FileCheckpoint(path)
    run(store.save(offsets_at(7)))
    assert Offsets.from_json(path.read_text()) == offsets_at(7)
    run(store.close())


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    save(link, 7)
    assert link.is_symlink()
    assert Offsets.from_json(path.read_text()) == offsets_at(7)


def test_a_change_of_folder_keeps_the_checkpoint(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    store = FileCheckpoint(path.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run(store.save(offsets_at(7)))
    run(store.close())
    assert path.exists()


def test_it_has_the_rights_that_the_user_gives_to_new_files(path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(path, 7)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_everything_is_on_the_disk_in_the_right_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may keep of later steps what it takes of earlier ones, unless these are on the disk by then."""
    save(path, 1)
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(number: int) -> None:
        steps.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{number}'))}")
        real_fsync(number)

    def replace(old: Path, new: Path) -> None:
        assert old.read_text() == offsets_at(2).to_json() + "\n"
        steps.append(f"replace {new.name} by {old.name}")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(path, 2)
    name = path.name
    assert steps == [f"fsync {name}.tmp", f"replace {name} by {name}.tmp", f"fsync {path.parent.name}"]


def test_files_are_written_while_the_event_loop_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_go_on = threading.Event(), threading.Event()
    real_fsync = os.fsync

    def slow_fsync(number: int) -> None:
        reached.set()
        assert may_go_on.wait(30)
        real_fsync(number)

    monkeypatch.setattr(os, "fsync", slow_fsync)

    async def save_slowly() -> None:
        store = FileCheckpoint(path)
        saving = asyncio.create_task(store.save(offsets_at(7)))
        while not reached.is_set():
            await asyncio.sleep(0)
        may_go_on.set()
        await saving
        await store.close()

    run(save_slowly())
    assert Offsets.from_json(path.read_text()) == offsets_at(7)


def test_two_readers_in_one_process_are_two_readers(path: Path) -> None:
    first, second = FileCheckpoint(path), FileCheckpoint(path)
    run(first.load())
    with pytest.raises(CheckpointInUse):
        run(second.load())
    run(first.close())
    run(first.close())
    assert run(second.load()) is None
    with pytest.raises(CheckpointInUse):
        run(first.save(offsets_at(1)))
    run(second.close())


def test_one_that_was_forgotten_holds_nothing(path: Path) -> None:
    run(FileCheckpoint(path).load())
    gc.collect()
    save(path, 7)


@pytest.mark.parametrize(
    "damage",
    [b"", b"\n", b"{}", b"\0" * 200, b"\xff\xfe", b'{"version":1', b" " * (TEXT_CHARS_MAX + 1)],
    ids=lambda value: repr(value[:12]),
)
def test_a_damaged_file_is_an_error_and_stays(path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    store = FileCheckpoint(path)
    with pytest.raises(CheckpointFailed) as raised:
        run(store.load())
    assert f"the checkpoint {path} is damaged" in raised.value.reason
    assert "remove it" in raised.value.hint
    assert path.read_bytes() == damage
    run(store.close())


def test_a_file_that_was_cut_anywhere_and_one_of_a_newer_version(path: Path) -> None:
    store = FileCheckpoint(path)
    path.write_text('{"version":2,"parts":[]}')
    with pytest.raises(CheckpointFailed, match="version 2") as raised:
        run(store.load())
    assert "newer" in raised.value.hint
    text = offsets_at(7, vbuckets=3).to_json().encode()
    for length in range(len(text)):
        path.write_bytes(text[:length])
        with pytest.raises(CheckpointFailed):
            run(store.load())
    run(store.close())


def test_what_a_killed_process_leaves_behind_does_no_harm(path: Path) -> None:
    save(path, 7)
    leftover = path.with_name(f"{path.name}.tmp")
    leftover.write_bytes(b"half of a")
    store = FileCheckpoint(path)
    assert run(store.load()) == offsets_at(7)
    run(store.save(offsets_at(8)))
    assert run(store.load()) == offsets_at(8)
    assert not leftover.exists()
    run(store.close())


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    path.with_name(f"{path.name}.tmp").symlink_to(treasure)
    save(path, 7)
    assert treasure.read_text() == "gold"
    assert not path.is_symlink()


def test_no_folder(tmp_path: Path) -> None:
    store = FileCheckpoint(tmp_path / "nowhere" / "checkpoint")
    for call in (store.load(), store.save(offsets_at(1))):
        with pytest.raises(CheckpointFailed) as raised:
            run(call)
        assert f"there is no folder {tmp_path / 'nowhere'}" in raised.value.reason
        assert raised.value.hint


def test_a_folder_in_its_place(path: Path) -> None:
    path.mkdir()
    (path / "kept").touch()
    store = FileCheckpoint(path)
    with pytest.raises(CheckpointFailed, match="can't be read"):
        run(store.load())
    with pytest.raises(CheckpointFailed, match="can't be written"):
        run(store.save(offsets_at(1)))
    assert [entry.name for entry in path.iterdir()] == ["kept"]
    assert not path.with_name(f"{path.name}.tmp").exists()
    run(store.close())


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_step_that_fails_leaves_the_old_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    store = FileCheckpoint(path)
    run(store.save(offsets_at(7)))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, step, fail)
        with pytest.raises(CheckpointFailed) as raised:
            run(store.save(offsets_at(8)))
    assert "Input/output error" in raised.value.reason
    assert "is unchanged" in raised.value.hint
    assert run(store.load()) == offsets_at(7)
    assert not path.with_name(f"{path.name}.tmp").exists()
    run(store.save(offsets_at(9)))
    assert run(store.load()) == offsets_at(9)
    run(store.close())
