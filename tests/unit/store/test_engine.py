"""Engines: the same suite over both, and what is LMDB's alone: the lock on the folder, and errors in sentences."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from headwater.errors import DataDamaged, DataInUse, StoreError, StoreFull
from headwater.store import lmdb_engine
from headwater.store.engine import DeleteRow, Engine, MemoryEngine, PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
from support.cases import case_apart

TABLE = Table.BLOCKS


@pytest.fixture(params=["lmdb", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine: Engine = LmdbEngine(tmp_path / "data") if request.param == "lmdb" else MemoryEngine()
    yield engine
    engine.close()


def rows(engine: Engine, start: bytes = b"", end: bytes = b"\xff" * 16, table: Table = TABLE) -> list[tuple[str, str]]:
    with engine.view() as view:
        return [(key.decode(), bytes(value).decode()) for key, value in view.scan(table, start, end)]


def fill(engine: Engine, names: str = "aceg") -> None:
    engine.write([PutRow(TABLE, name.encode(), name.upper().encode()) for name in reversed(names)])


def test_what_is_put_is_got(engine: Engine) -> None:
    large = os.urandom(1_000_000)
    engine.write([PutRow(TABLE, b"k", b"v"), PutRow(TABLE, b"empty", b""), PutRow(TABLE, b"large", memoryview(large))])
    with engine.view() as view:
        assert view.get(TABLE, b"k") == b"v"
        assert view.get(TABLE, b"empty") == b""
        assert view.get(TABLE, b"large") == large
        assert view.get(TABLE, b"none") is None


def test_tables_are_apart(engine: Engine) -> None:
    engine.write([PutRow(table, b"k", table.value) for table in Table])
    with engine.view() as view:
        assert [bytes(view.get(table, b"k") or b"") for table in Table] == [table.value for table in Table]
    engine.write([DeleteRow(Table.JOURNAL, b"k")])
    assert [bool(rows(engine, table=table)) for table in Table] == [table != Table.JOURNAL for table in Table]


def test_changes_are_made_in_their_order(engine: Engine) -> None:
    engine.write(
        [PutRow(TABLE, b"k", b"1"), DeleteRow(TABLE, b"k"), PutRow(TABLE, b"k", b"2"), PutRow(TABLE, b"k", b"3")]
    )
    assert rows(engine) == [("k", "3")]
    engine.write([DeleteRow(TABLE, b"k"), PutRow(TABLE, b"k", b"4"), DeleteRow(TABLE, b"k"), DeleteRow(TABLE, b"none")])
    engine.write([])
    assert rows(engine) == []
    with engine.view() as view:
        assert view.last_before(TABLE, b"\xff") is None


@case_apart(b"", b"\xff", "aceg")
@case_apart(b"a", b"g", "ace")
@case_apart(b"b", b"f", "ce")
@case_apart(b"c", b"c", "")
@case_apart(b"c", b"c\0", "c")
@case_apart(b"g", b"b", "")
@case_apart(b"h", b"\xff", "")
@case_apart(b"", b"a", "")
def test_a_scan_has_its_bounds(engine: Engine, start: bytes, end: bytes, expected: str) -> None:
    fill(engine)
    assert "".join(key for key, _ in rows(engine, start, end)) == expected


@pytest.mark.parametrize(("end", "expected"), [(b"\xff", "g"), (b"g", "e"), (b"d", "c"), (b"b", "a"), (b"a", None)])
def test_the_last_row_before_a_key(engine: Engine, end: bytes, expected: str | None) -> None:
    fill(engine)
    with engine.view() as view:
        last = view.last_before(TABLE, end)
        assert (None if last is None else (last[0].decode(), bytes(last[1]).decode())) == (
            None if expected is None else (expected, expected.upper())
        )


def test_a_view_does_not_change_while_writes_go_on(engine: Engine) -> None:
    fill(engine)
    with engine.view() as view:
        scan = view.scan(TABLE, b"", b"\xff")
        assert bytes(next(scan)[0]) == b"a"
        engine.write([DeleteRow(TABLE, b"c"), PutRow(TABLE, b"b", b"B"), PutRow(TABLE, b"e", b"changed")])
        assert [(key, bytes(value)) for key, value in scan] == [(b"c", b"C"), (b"e", b"E"), (b"g", b"G")]
        assert view.get(TABLE, b"b") is None
        last = view.last_before(TABLE, b"d")
        assert last[0] == b"c"
    assert rows(engine) == [("a", "A"), ("b", "B"), ("e", "changed"), ("g", "G")]


def test_values_of_a_view_stay_while_pages_are_used_again(engine: Engine) -> None:
    engine.write([PutRow(TABLE, b"k", b"1" * 100_000)])
    with engine.view() as view:
        value = view.get(TABLE, b"k")
        for number in range(20):
            engine.write([PutRow(TABLE, b"k", b"%d" % (number % 10) * 100_000)])
        assert value == b"1" * 100_000


def test_writes_from_another_thread(engine: Engine) -> None:
    """Commits are written beside the event loop."""
    with engine.view() as view:
        writer = threading.Thread(target=fill, args=(engine,))
        writer.start()
        writer.join()
        assert list(view.scan(TABLE, b"", b"\xff")) == []
    assert len(rows(engine)) == 4


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    engine = LmdbEngine(tmp_path)
    fill(engine)
    with pytest.raises(StoreError, match="can't be used"):
        engine.write([PutRow(TABLE, b"a", b"changed"), PutRow(TABLE, b"x" * 1000, b"a key that is too long")])
    with pytest.raises(AttributeError):
        engine.write([PutRow(TABLE, b"a", b"changed"), PutRow(TABLE, b"b", b"changed"), "no change"])
    assert rows(engine) == [(name, name.upper()) for name in "aceg"]
    engine.close()


def test_data_is_there_after_closing(tmp_path: Path) -> None:
    engine = LmdbEngine(tmp_path / "some" / "where")
    fill(engine)
    engine.close()
    engine.close()
    again = LmdbEngine(tmp_path / "some" / "where")
    assert len(rows(again)) == 4
    again.close()


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        LmdbEngine(tmp_path).close()
    finally:
        os.umask(previous)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"data.mdb": 0o600, "lock.mdb": 0o600, "owner": 0o600}


def test_a_second_close_does_not_close_what_is_not_its_own(tmp_path: Path) -> None:
    engine = LmdbEngine(tmp_path / "data")
    engine.close()
    with (tmp_path / "other").open("w") as other:
        engine.close()
        other.write("still open")


def closed_engine(folder: Path, **rows: bytes) -> None:
    engine = LmdbEngine(folder)
    engine.write([PutRow(TABLE, key.encode(), value) for key, value in rows.items()])
    engine.close()


def left_alone(folder: Path) -> bool:
    engine = LmdbEngine(folder)
    engine.close()
    return engine.was_left_alone


def test_data_that_was_closed_is_left_alone(tmp_path: Path) -> None:
    closed_engine(tmp_path / "data", a=b"1")
    assert left_alone(tmp_path / "data")
    assert left_alone(tmp_path / "data"), "to look at it changes nothing"
    (tmp_path / "data").rename(tmp_path / "renamed")
    assert left_alone(tmp_path / "renamed")


def test_new_rights_count_as_a_change(tmp_path: Path) -> None:
    """It costs a branch that was not needed: the time of a change does not show what was changed."""
    closed_engine(tmp_path / "data", a=b"1")
    (tmp_path / "data" / "data.mdb").chmod(0o640)
    assert not left_alone(tmp_path / "data")


def check_is_held(folder: Path) -> None:
    with pytest.raises(DataInUse) as raised:
        LmdbEngine(folder)
    assert raised.value.reason == f"another process uses the data in {folder}"
    assert raised.value.hint == "Stop it, or give this one its own folder"


def test_a_second_open_in_the_same_process_is_refused(tmp_path: Path) -> None:
    engine = LmdbEngine(tmp_path)
    check_is_held(tmp_path)
    fill(engine)
    engine.close()
    LmdbEngine(tmp_path).close()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"can't be used: .*exists"):
        LmdbEngine(tmp_path / "file")


def test_a_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").mkdir()
    with pytest.raises(StoreError, match="can't be used"):
        LmdbEngine(tmp_path)
    (tmp_path / "data.mdb").rmdir()
    LmdbEngine(tmp_path).close()


def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(os.urandom(100_000))
    with pytest.raises(DataDamaged, match="is damaged"):
        LmdbEngine(tmp_path)
    (tmp_path / "data.mdb").unlink()
    LmdbEngine(tmp_path).close()


@case_apart(lmdb.DiskError("mdb_txn_commit: No space left on device"), StoreFull)
@case_apart(lmdb.Error("mdb_txn_commit: File too large"), StoreFull)
@case_apart(lmdb.Error("mdb_txn_commit: Disk quota exceeded"), StoreFull)
@case_apart(lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached"), StoreFull)
@case_apart(lmdb.ReadersFullError("MDB_READERS_FULL: Environment maxreaders limit reached"), StoreError)
@case_apart(lmdb.Error("mdb_txn_commit: Input/output error"), StoreError)
@case_apart(lmdb.Error("/a folder with space/: Permission denied"), StoreError)
@case_apart(lmdb.CorruptedError("mdb_get: MDB_CORRUPTED: Located page was wrong type"), DataDamaged)
@case_apart(lmdb.InvalidError("MDB_INVALID: File is not an LMDB file"), DataDamaged)
@case_apart(lmdb.PageNotFoundError("MDB_PAGE_NOTFOUND: Requested page not found"), DataDamaged)
@case_apart(lmdb.VersionMismatchError("MDB_VERSION_MISMATCH"), DataDamaged)
def test_errors_are_ours(tmp_path: Path, error: lmdb.Error, expected: type[StoreError]) -> None:
    translated = lmdb_engine._translated(error, tmp_path)
    assert type(translated) is expected
    assert str(tmp_path) in translated.reason
    assert translated.hint


def test_an_input_output_error_on_a_full_disk_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What LMDB says when the system wrote a part only (`tests/faults/test_disk_full.py` has the real thing)."""
    error = lmdb.Error("mdb_txn_commit: Input/output error")
    monkeypatch.setattr(lmdb_engine, "_has_room", lambda folder: False)
    assert type(lmdb_engine._translated(error, tmp_path)) is StoreFull


def test_views_after_closing_raise_our_errors(tmp_path: Path) -> None:
    engine = LmdbEngine(tmp_path)
    engine.close()
    with pytest.raises(StoreError), engine.view():
        pass
    with pytest.raises(StoreError):
        engine.write([PutRow(TABLE, b"k", b"v")])
