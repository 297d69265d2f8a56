"""A checkpoint in an SQLite database, and with it the way to deliver exactly once.

A checkpoint is one row, with the text of all its offsets:

    headwater_checkpoints (name TEXT PRIMARY KEY, revision INTEGER, writer TEXT, offsets TEXT)

One row and not one for each vbucket, because then a save needs to know nothing of the saves before it: if the caller
rolls a transaction back, no memory of what has been written is wrong afterwards.

`revision` counts the saves and `writer` names the object that made the last one. A reader may save where its own save
was the last, or where no other reader has saved since it first looked. So of two readers on one checkpoint the second
to save is refused; if it saves its data in the same transaction, nothing is written twice.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading

from headwater.client.checkpoints.file import read_offsets
from headwater.client.offsets import Offsets
from headwater.client.options import names_keywords
from headwater.errors import CheckpointFailed, CheckpointInUse, InvalidInput

BUSY_S_MAX = 30.0
"""How long to wait for another process that writes to the database."""
NAME_CHARS_MAX = 200

_CREATE = """
CREATE TABLE IF NOT EXISTS main.headwater_checkpoints
(name TEXT PRIMARY KEY, revision INTEGER NOT NULL, writer TEXT NOT NULL, offsets TEXT NOT NULL)
"""
_LOAD = "SELECT revision, CAST(offsets AS BLOB) FROM main.headwater_checkpoints WHERE name = ?"
_LOOK = "SELECT revision FROM main.headwater_checkpoints WHERE name = ?"
_SAVE = """
INSERT INTO main.headwater_checkpoints AS saved (name, revision, writer, offsets) VALUES (:name, 1, :writer, :offsets)
ON CONFLICT (name) DO UPDATE SET revision = saved.revision + 1, writer = :writer, offsets = :offsets
WHERE saved.writer = :writer OR saved.revision = :seen
"""

_NEVER_SAVED = 0

_HINTS = {
    sqlite3.SQLITE_BUSY: "Another connection is writing to the database: end its transaction, and try again",
    sqlite3.SQLITE_LOCKED: "Another connection is writing to the database: end its transaction, and try again",
    sqlite3.SQLITE_FULL: "Free disk space",
    sqlite3.SQLITE_IOERR: "Check the disk and the space on it",
    sqlite3.SQLITE_READONLY: "Check that the user of this process may write to the database and its folder",
    sqlite3.SQLITE_CANTOPEN: "Check the path, and that the user of this process may write to the folder",
    sqlite3.SQLITE_CORRUPT: "The database is damaged: bring it back from a backup",
    sqlite3.SQLITE_NOTADB: "This file is no SQLite database: check the path",
}


@names_keywords
class SqliteCheckpoint:
    """Keeps offsets in an SQLite database, which may hold other tables and other checkpoints, by their names.

    If what is made of the changes goes into the same database, `save_in` saves the offsets in the transaction that
    writes it. Then either both are there or neither is, and every change counts exactly once, whenever the process is
    killed:

        reading = client.batches(start=checkpoint.load_from(connection) or "beginning")
        for batch in reading:
            with connection:
                connection.executemany("INSERT …", rows_of(batch))
                checkpoint.save_in(connection, reading.offsets)
    """

    def __init__(self, path: str | os.PathLike[str], *, name: str) -> None:
        if os.fspath(path) in ("", ":memory:"):
            raise InvalidInput("a database in memory keeps no checkpoint", hint="Give the path of a file")
        if not (0 < len(name) <= NAME_CHARS_MAX and name.isprintable()):
            raise InvalidInput(
                f"{name[:NAME_CHARS_MAX]!r} is no name for a checkpoint",
                hint=f"Use 1 to {NAME_CHARS_MAX} printable characters",
            )
        self.path = os.path.realpath(path)
        self.name = name
        self._writer = secrets.token_hex(8)
        self._seen: int | None = None
        """The revision at the first look; after a rollback of the caller's it may be the one in the table again."""
        self._connection: sqlite3.Connection | None = None
        self._turn = threading.Lock()
        """For the connection of our own."""

    def __repr__(self) -> str:
        return f"SqliteCheckpoint({self.path!r}, name={self.name!r})"

    async def load(self) -> Offsets | None:
        """What was saved last by this name, or None. What can't be read is `CheckpointFailed`."""
        return await asyncio.to_thread(self._load)

    async def save(self, offsets: Offsets) -> None:
        """Save in a transaction of its own. When this returns it is on the disk."""
        await asyncio.to_thread(self._save, offsets)

    def load_from(self, connection: sqlite3.Connection) -> Offsets | None:
        """As `load`, at once and by the caller's connection."""
        try:
            self._check_database(connection)
            return self._read(connection)
        except sqlite3.Error as error:
            raise self._failed("read", error) from error

    def save_in(self, connection: sqlite3.Connection, offsets: Offsets) -> None:
        """Save in the caller's transaction, which the caller commits, or rolls back if this raises.

        The connection is to this database, and its transaction is open, or opens by itself as Python's do by default.
        """
        # There is no turn to wait for: a save in a thread may itself be waiting for the end of this transaction.
        try:
            _check_transaction(connection)
            self._check_database(connection)
            self._write(connection, offsets)
        except sqlite3.Error as error:
            raise self._failed("written", error) from error

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    # --- in a thread ----------------------------------------------------------------------------------------------

    def _load(self) -> Offsets | None:
        with self._turn:
            try:
                return self._read(self._opened())
            except sqlite3.Error as error:
                raise self._failed("read", error) from error

    def _save(self, offsets: Offsets) -> None:
        with self._turn:
            try:
                connection = self._opened()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    self._write(connection, offsets)
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._failed("written", error) from error

    def _close(self) -> None:
        with self._turn:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            # Calls come from one thread at a time, and not always from the same.
            connection = sqlite3.connect(self.path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False)
            try:
                # The folder, too, must be on the disk before a save returns.
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.execute(_CREATE)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    # --- by any connection ----------------------------------------------------------------------------------------

    def _read(self, connection: sqlite3.Connection) -> Offsets | None:
        cursor = _plain_cursor(connection)
        cursor.execute(_CREATE)
        found = cursor.execute(_LOAD, (self.name,)).fetchone()
        if found is None:
            self._seen = _NEVER_SAVED
            return None
        self._seen, text = found
        return read_offsets(
            text,
            what=f"the checkpoint {self.name!r} in {self.path}",
            to_start_over="delete its row in headwater_checkpoints",
        )

    def _write(self, connection: sqlite3.Connection, offsets: Offsets) -> None:
        cursor = _plain_cursor(connection)
        cursor.execute(_CREATE)
        if self._seen is None:
            found = cursor.execute(_LOOK, (self.name,)).fetchone()
            self._seen = _NEVER_SAVED if found is None else found[0]
        values = {"name": self.name, "writer": self._writer, "offsets": offsets.to_json(), "seen": self._seen}
        if cursor.execute(_SAVE, values).rowcount != 1:
            raise CheckpointInUse(
                f"another reader has saved the checkpoint {self.name!r} in {self.path}",
                hint="Roll back, stop one of the two, or give this one a name of its own",
            )

    def _check_database(self, connection: sqlite3.Connection) -> None:
        listed = _plain_cursor(connection).execute("PRAGMA database_list")
        file = next(os.fsdecode(file) for _, schema, file in listed if os.fsdecode(schema) == "main")
        if not file or os.path.realpath(file) != self.path:
            raise CheckpointFailed(
                f"the connection is to the database {file or 'in memory'}, and the checkpoint is in {self.path}",
                hint="Give the same path to both",
            )

    def _failed(self, done: str, error: sqlite3.Error) -> CheckpointFailed:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        hint = _HINTS.get(code, "See what SQLite says")
        return CheckpointFailed(
            f"the checkpoint {self.name!r} in {self.path} can't be {done}: {error}",
            hint=f"{hint}; what was saved before is as it was" if done == "written" else hint,
        )


def _plain_cursor(connection: sqlite3.Connection) -> sqlite3.Cursor:
    """One that gives tuples, whatever form for rows the caller has chosen."""
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor


def _check_transaction(connection: sqlite3.Connection) -> None:
    commits_each = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
    if commits_each and not connection.in_transaction:
        raise CheckpointFailed(
            "the connection has no transaction that data and offsets could be saved in together",
            hint="Execute BEGIN, write the data, call save_in, and execute COMMIT",
        )
