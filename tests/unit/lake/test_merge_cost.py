"""What merges write, and what they leave to later ones: with files written again, and with deletion vectors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from deltalake import DeltaTable, QueryBuilder

from headwater.lake import commits
from headwater.lake.change_rows import Fold
from headwater.lake.commits import merge
from headwater.lake.data_files import DataFile
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.upkeep import DEAD_SHARE
from support.lake_model import SmallLake, check_documents, verify_model

NAME = "_default._default"
DOCUMENTS = f"documents/{NAME}"
both_modes = pytest.mark.parametrize("on_read", [False, True], ids=["copy-on-write", "merge-on-read"])


def settings(on_read: bool | None, *, history: bool = False) -> LakeSettings:
    return LakeSettings(merging=MergeRules(on_read=on_read, history=history), infer=False)


def text(seed: int) -> bytes:
    """A document that can't be compressed by much."""
    return b'{"text": "%s"}' % random.Random(seed).randbytes(60).hex().encode()


def fill(small: SmallLake, count: int = 2000) -> None:
    for number in range(count):
        small.write(0, f"key-{number:04}", value=text(number))
    small.land()


def check(small: SmallLake) -> None:
    check_documents(small.rows(DOCUMENTS), small.bucket.sent_documents())
    assert verify_model(small.lake, small.bucket).findings.first() == ()


def files(small: SmallLake) -> list[DataFile]:
    documents = small.lake.tables[NAME].documents
    assert documents is not None
    return documents.log.files()


def written(small: SmallLake) -> list[int]:
    """The sizes of all files of documents that were ever written."""
    return [path.stat().st_size for path in (small.directory / DOCUMENTS).rglob("*.parquet")]


@both_modes
def test_a_hot_document_has_a_large_file_written_again_once_or_never(tmp_path: Path, on_read: bool) -> None:
    small = SmallLake(tmp_path, vbuckets=1, groups=1, settings=settings(on_read))
    fill(small)
    for turn in range(20):
        small.write(0, "key-0777", f"new-{turn}", value=text(turn))
        small.land()
    check(small)
    assert sum(size > 64 * 1024 for size in written(small)) == (1 if on_read else 2)


def test_random_updates_write_a_multiple_of_what_has_changed(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, vbuckets=1, groups=1, settings=settings(True))
    fill(small, 1000)
    before, changed = sum(written(small)), 0
    chosen = random.Random(1)
    for turn in range(15):
        keys = [f"key-{number:04}" for number in chosen.sample(range(1000), 100)]
        small.write(0, *keys, value=text(turn))
        small.land(merges=False)
        known = {file.path for file in files(small)}
        merge(small.lake)
        changed += sum(file.size_bytes for file in files(small) if file.path not in known and file.rows == 100)
        assert all(file.rows - file.live_rows <= DEAD_SHARE * file.rows for file in files(small))
    check(small)
    assert sum(written(small)) - before < 8 * changed
    assert len(files(small)) < 20


def test_a_merge_with_vectors_reads_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in files of a first landing, of merges and of joins: rows are found by the index that each file has."""
    small = SmallLake(tmp_path, vbuckets=1, groups=1, settings=settings(True))
    fill(small, 500)
    for turn in range(20):
        small.write(0, f"key-{turn:04}", "key-0077", f"new-{turn}", value=text(turn))
        small.land()
    assert len(files(small)) < 10, "some were joined"
    small.write(0, "key-0001", "new-3", "key-0499", value=text(1))
    small.land(merges=False)
    monkeypatch.setattr(Fold, "match_rows", lambda *_: pytest.fail("keys were read"))
    merge(small.lake)
    check(small)


@pytest.mark.usefixtures("large_tables")
def test_a_merge_leaves_to_later_ones_what_it_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "JOIN_BYTES", 1)
    monkeypatch.setattr(commits, "_JOIN_RATIO", 0)
    small = SmallLake(tmp_path, settings=settings(True))
    for vbucket in range(4):
        for number in range(100):
            small.write(vbucket, f"key-{number}")
    small.land()
    worn = []
    for _ in range(3):
        for vbucket in range(4):
            small.write(vbucket, *(f"key-{number}" for number in range(30)))
        small.land()
        worn.append(sum(file.vector is not None for file in files(small)))
    check(small)
    assert worn[0] == 1, "one of the two files was written again, and the other waits"


@both_modes
def test_a_lake_is_switched_and_readers_go_on(tmp_path: Path, on_read: bool) -> None:
    small = SmallLake(tmp_path, settings=settings(on_read, history=True))
    for vbucket in range(4):
        small.write(vbucket, *(f"key-{number}" for number in range(50)))
    small.land()
    earlier = DeltaTable(tmp_path / DOCUMENTS)
    for turn, mode in enumerate((on_read, not on_read, None, on_read)):
        small.reopen(settings(mode, history=True))
        for vbucket in range(4):
            small.write(vbucket, f"key-{turn}", "key-7", value=b'{"n": 2}')
        small.land()
        check(small)
        table = small.lake.tables[NAME]
        is_on = on_read if mode == on_read else not on_read
        for one in (table.documents, table.history):
            assert one is not None
            assert one.is_merged_on_read == is_on
            assert any(file.vector is not None for file in one.log.files()) == is_on, (one.kind, mode)
    rows = QueryBuilder().register("t", earlier).execute("SELECT count(*) AS n FROM t").read_all()
    assert rows["n"].to_pylist() == [200]
