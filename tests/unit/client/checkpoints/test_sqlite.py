"""A checkpoint in an SQLite database: alone, in the caller's transaction, and against another reader."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headwater.client import checkpoints
from headwater.client.checkpoints import NAME_CHARS_MAX, CheckpointStore, SqliteCheckpoint
from headwater.errors import CheckpointFailed, CheckpointInUse, InvalidInput
from support.checkpoint_samples import offsets_at, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.db"


@pytest.fixture
def caller(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of the caller's, with a table of its data."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        yield connection


def saved(path: Path, name: str = "orders") -> object:
    """What any other reader would load."""
    store = SqliteCheckpoint(path, name=name)
    try:
        return run(store.load())
    finally:
        run(store.close())


def save(path: Path, seqno: int, name: str = "orders") -> None:
    store: CheckpointStore = SqliteCheckpoint(path, name=name)
    run(store.save(offsets_at(seqno)))
    run(store.close())


def count(connection: sqlite3.Connection) -> int:
    found: int = connection.execute("SELECT count(*) FROM orders").fetchone()[0]
    return found


def test_what_was_saved_last_is_loaded(path: Path) -> None:
    store = SqliteCheckpoint(str(path), name="orders")
    assert run(store.load()) is None
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (3,), "commits are on the disk"
    for seqno in (5, 9, 3):
        run(store.save(offsets_at(seqno)))
        assert run(store.load()) == offsets_at(seqno)
    run(store.close())
    run(store.close())
    assert saved(path) == offsets_at(3)
    assert run(store.load()) == offsets_at(3)
    run(store.close())


def test_names_are_apart(path: Path) -> None:
    save(path, 1, "one")
    save(path, 2, "two")
    assert saved(path, "one") == offsets_at(1)
    assert saved(path, "two") == offsets_at(2)
    assert saved(path, "ONE") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", "orders"),
        (":memory:", "orders"),
        *(("a.db", n) for n in ("", "x" * (NAME_CHARS_MAX + 1), "a\0b", "\ud800")),
    ],
)
def test_what_keeps_nothing_and_names_that_are_none(path: str, name: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        SqliteCheckpoint(path, name=name)
    assert raised.value.hint


def test_data_and_offsets_are_committed_together(path: Path, caller: sqlite3.Connection) -> None:
    save(path, 5)
    store = SqliteCheckpoint(path, name="orders")
    with caller:
        caller.execute("INSERT INTO orders VALUES (1)")
        store.save_in(caller, offsets_at(7))
        assert saved(path) == offsets_at(5)
    assert saved(path) == offsets_at(7)


def test_data_and_offsets_are_rolled_back_together(path: Path, caller: sqlite3.Connection) -> None:
    store = SqliteCheckpoint(path, name="orders")
    assert run(store.load()) is None
    run(store.close())
    for seqno in (5, 6, 7):
        for is_first in (True, False):
            caller.execute(f"INSERT INTO orders VALUES ({seqno})")
            store.save_in(caller, offsets_at(seqno))
            # The transaction that is rolled back may be the first of all, or a later one.
            if is_first:
                caller.rollback()
            else:
                caller.commit()
        assert saved(path) == offsets_at(seqno)
    assert count(caller) == 3


def test_the_caller_can_load_by_its_connection_too(path: Path, caller: sqlite3.Connection) -> None:
    store = SqliteCheckpoint(path, name="orders")
    assert store.load_from(caller) is None
    store.save_in(caller, offsets_at(7))
    assert caller.in_transaction, "it was the first of it"
    assert saved(path) is None
    caller.commit()
    assert store.load_from(caller) == offsets_at(7)
    assert not caller.in_transaction


def test_saves_of_both_kinds_take_turns(path: Path, caller: sqlite3.Connection) -> None:
    store = SqliteCheckpoint(path, name="orders")
    for seqno in range(0, 10, 2):
        run(store.save(offsets_at(seqno)))
        with caller:
            store.save_in(caller, offsets_at(seqno + 1))
    run(store.close())
    assert saved(path) == offsets_at(9)


def test_a_save_that_waits_for_the_caller_does_not_hold_up_the_caller(path: Path, caller: sqlite3.Connection) -> None:
    store = SqliteCheckpoint(path, name="orders")

    async def save_in_both_ways() -> None:
        assert await store.load() is None
        caller.execute("BEGIN IMMEDIATE")
        saving = asyncio.create_task(store.save(offsets_at(6)))
        await asyncio.sleep(0.2)
        store.save_in(caller, offsets_at(5))
        caller.commit()
        await saving
        await store.close()

    run(save_in_both_ways())
    assert saved(path) == offsets_at(6)


@pytest.mark.parametrize("rows", [sqlite3.Row, lambda cursor, row: {"row": row}])
@pytest.mark.parametrize("text", [str, bytes])
def test_the_caller_may_have_own_forms(path: Path, caller: sqlite3.Connection, rows: object, text: object) -> None:
    save(path, 3)
    caller.row_factory = rows
    caller.text_factory = text
    store = SqliteCheckpoint(path, name="orders")
    assert store.load_from(caller) == offsets_at(3)
    with caller:
        store.save_in(caller, offsets_at(7))
    assert saved(path) == offsets_at(7)


def test_every_statement_for_itself_is_no_transaction(path: Path, caller: sqlite3.Connection) -> None:
    caller.isolation_level = None
    store = SqliteCheckpoint(path, name="orders")
    with pytest.raises(CheckpointFailed, match="no open transaction") as raised:
        store.save_in(caller, offsets_at(7))
    assert "BEGIN" in raised.value.hint
    assert saved(path) is None
    caller.execute("BEGIN")
    caller.execute("INSERT INTO orders VALUES (1)")
    store.save_in(caller, offsets_at(7))
    caller.execute("COMMIT")
    assert saved(path) == offsets_at(7)


def test_a_connection_to_another_database_is_refused(path: Path, tmp_path: Path) -> None:
    save(path, 3)
    store = SqliteCheckpoint(path, name="orders")
    for other in (str(tmp_path / "other.db"), ":memory:"):
        with closing(sqlite3.connect(other)) as connection:
            with pytest.raises(CheckpointFailed, match="the connection is to the database") as raised:
                store.save_in(connection, offsets_at(7))
            assert raised.value.hint
            with pytest.raises(CheckpointFailed):
                store.load_from(connection)
    assert saved(path) == offsets_at(3)
    link = tmp_path / "link.db"  # another name of the same one
    link.symlink_to(path)
    with closing(sqlite3.connect(link)) as connection, connection:
        store.save_in(connection, offsets_at(7))
    assert saved(path) == offsets_at(7)


def test_the_second_to_save_is_refused_and_its_data_with_it(path: Path, caller: sqlite3.Connection) -> None:
    save(path, 5)
    first, second = SqliteCheckpoint(path, name="orders"), SqliteCheckpoint(path, name="orders")
    assert run(first.load()) == run(second.load()) == offsets_at(5)
    run(first.save(offsets_at(6)))
    caller.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(CheckpointInUse) as raised:
        second.save_in(caller, offsets_at(6))
    assert "Roll back" in raised.value.hint
    caller.rollback()
    with pytest.raises(CheckpointInUse):
        run(second.save(offsets_at(7)))
    assert count(caller) == 0
    run(first.save(offsets_at(8)))
    assert saved(path) == offsets_at(8)
    for store in (first, second):
        run(store.close())


@pytest.mark.parametrize("is_first_ever", [True, False])
def test_a_reader_that_another_has_taken_over_from_is_refused(path: Path, is_first_ever: bool) -> None:
    if not is_first_ever:
        save(path, 5)
    old, new, late = (SqliteCheckpoint(path, name="orders") for _ in range(3))
    run(old.load())
    run(late.load())
    run(old.save(offsets_at(6)))
    with pytest.raises(CheckpointInUse):
        run(late.save(offsets_at(6)))  # what the owner has saved since would be read twice
    assert run(new.load()) == offsets_at(6)
    run(new.save(offsets_at(7)))
    with pytest.raises(CheckpointInUse):
        run(old.save(offsets_at(8)))
    # It may load again, and go on from there: then it is the new one.
    assert run(old.load()) == offsets_at(7)
    run(old.save(offsets_at(8)))
    with pytest.raises(CheckpointInUse):
        run(new.save(offsets_at(9)))
    for store in (old, new, late):
        run(store.close())


def test_a_writer_that_stays_is_reported(
    path: Path, caller: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(path, 5)
    monkeypatch.setattr(checkpoints, "BUSY_S_MAX", 0.05)
    store = SqliteCheckpoint(path, name="orders")
    caller.execute("BEGIN IMMEDIATE")
    assert run(store.load()) == offsets_at(5)
    with pytest.raises(CheckpointFailed, match="locked") as raised:
        run(store.save(offsets_at(6)))
    assert "end its transaction" in raised.value.hint
    caller.rollback()
    run(store.save(offsets_at(6)))
    assert saved(path) == offsets_at(6)
    run(store.close())


@pytest.mark.parametrize("damage", ["", "{}", "é", '{"version":1'])
def test_a_damaged_row_is_an_error(path: Path, damage: str) -> None:
    save(path, 5)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE headwater_checkpoints SET offsets = ?", (damage,))
    store = SqliteCheckpoint(path, name="orders")
    with pytest.raises(CheckpointFailed) as raised:
        run(store.load())
    assert "is damaged" in raised.value.reason
    assert "headwater_checkpoints" in raised.value.hint
    run(store.close())


@pytest.mark.parametrize("damage", ["not a database", "cut", "zeros in the middle"])
def test_a_damaged_database_is_an_error(path: Path, damage: str) -> None:
    store = SqliteCheckpoint(path, name="orders")
    run(store.save(offsets_at(5, vbuckets=1024)))
    run(store.close())
    good = path.read_bytes()
    if damage == "not a database":
        path.write_bytes(b"something else entirely, and long enough" * 100)
    elif damage == "cut":
        path.write_bytes(good[: len(good) // 2])
    else:
        path.write_bytes(good[:4096] + bytes(4096 * 3) + good[4096 * 4 :])
    with pytest.raises(CheckpointFailed) as raised:
        run(store.load())
    assert raised.value.hint
    with pytest.raises(CheckpointFailed):
        run(store.save(offsets_at(6)))
    run(store.close())


def test_no_folder(tmp_path: Path) -> None:
    store = SqliteCheckpoint(tmp_path / "nowhere" / "orders.db", name="orders")
    with pytest.raises(CheckpointFailed, match="can't be read") as raised:
        run(store.load())
    assert "Check the path" in raised.value.hint
    with pytest.raises(CheckpointFailed, match="can't be written"):
        run(store.save(offsets_at(1)))


def test_a_connection_that_only_reads(path: Path) -> None:
    save(path, 5)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        store = SqliteCheckpoint(path, name="orders")
        assert store.load_from(connection) == offsets_at(5)
        with pytest.raises(CheckpointFailed, match="readonly") as raised:
            store.save_in(connection, offsets_at(6))
        assert "may write" in raised.value.hint
    with pytest.raises(CheckpointFailed, match="closed"):
        store.save_in(connection, offsets_at(6))
    assert saved(path) == offsets_at(5)


def test_the_database_of_the_caller_is_left_in_peace(path: Path, caller: sqlite3.Connection) -> None:
    """Its journal mode and its tables are its own. The row has the text of the offsets."""
    save(path, 5)
    assert caller.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    tables = caller.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1").fetchall()
    assert tables == [("headwater_checkpoints",), ("orders",)]
    assert sorted(os.listdir(path.parent)) == ["orders.db"]
    rows = caller.execute("SELECT name, revision, offsets FROM headwater_checkpoints").fetchall()
    assert rows == [("orders", 1, offsets_at(5).to_json())]
