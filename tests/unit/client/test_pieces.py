"""Runs on disk."""

from __future__ import annotations

import io

import pytest

from headwater.client.pieces import ChangeRun, Spool
from headwater.errors import StoreFull
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid


def run(data: bytes) -> ChangeRun:
    return ChangeRun(
        vbucket=VBucketId(1), vbuuid=Vbuuid(2), snapshot_start=Seqno(3), snapshot_end=Seqno(4), rows=1, data=data
    )


def test_runs_come_back_as_they_were_and_the_file_goes_with_the_last() -> None:
    file = io.BytesIO()
    spool = Spool(lambda: file)
    spooled = [spool.put(run(data)) for data in (b"one", b"", b"three")]
    assert [item.load() for item in spooled[:2]] == [run(b"one"), run(b"")]
    assert not file.closed
    spooled[2].drop()
    assert file.closed
    assert spool.is_closed


class FullDisk(io.BytesIO):
    def write(self, data: object) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_says_what_to_do() -> None:
    with pytest.raises(StoreFull, match="No space left on device") as caught:
        Spool(FullDisk).put(run(b"data"))
    assert "TMPDIR" in str(caught.value)


def test_no_folder_for_temporary_files_says_what_to_do() -> None:
    def no_folder() -> io.BytesIO:
        raise FileNotFoundError(2, "No usable temporary directory found")

    with pytest.raises(StoreFull, match="No usable temporary directory"):
        Spool(no_folder)
