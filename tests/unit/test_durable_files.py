from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headwater.durable_files import replace_file


def test_a_file_is_made_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(path, b"old")
    replace_file(path, b"new", unfinished=tmp_path / "state.tmp")
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "state"
    replace_file(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no room"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_what_a_crash_left_under_a_fixed_name_is_not_followed(tmp_path: Path) -> None:
    path, treasure = tmp_path / "state", tmp_path / "treasure"
    treasure.write_bytes(b"gold")
    (tmp_path / "state.tmp").symlink_to(treasure)
    replace_file(path, b"new", unfinished=tmp_path / "state.tmp")
    assert path.read_bytes() == b"new"
    assert treasure.read_bytes() == b"gold"


def test_a_file_system_that_cannot_sync_folders_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(number: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{number}"):
            raise OSError(errno.EINVAL, "not for folders")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "state", b"new")
    assert (tmp_path / "state").read_bytes() == b"new"
