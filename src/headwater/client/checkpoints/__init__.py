"""Where a reader keeps its offsets: what it asks of any store, a store that is a file, and one in SQLite.

A save to a file writes a new file beside the old one, brings it to the disk, gives it the old one's name, and brings
the folder to the disk. A rename is whole or has not happened, so a process that looks, or is killed, at any moment
finds the old offsets or the new ones. What a killed process leaves behind is a temporary file that is never read, and
that the next save replaces.

Beside the checkpoint lies a file that is locked while a reader uses it. The system releases the lock when the process
ends, however it ends, so there is nothing to clean up. It must be a file of its own: the checkpoint itself is another
file after every save. A checkpoint that can't be read must never be taken for one that is missing.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import sqlite3
import threading
import weakref
from pathlib import Path
from typing import Protocol

from headwater.client.offsets import TEXT_CHARS_MAX, Offsets
from headwater.durable_files import replace_file
from headwater.errors import CheckpointFailed, CheckpointInUse, InvalidInput, InvalidOffsets, OffsetsTooNew
from headwater.options import suggest_keywords


class CheckpointStore(Protocol):
    """A store of offsets. To write one's own, have these three methods; there is nothing to inherit from.

    * Keep what `Offsets.to_json` gives, and get it back with `Offsets.from_json`: the same offsets are the same bytes.
    * A save is all or nothing. When it returns, the offsets are where they survive a power cut. When it raises, or the
      process is killed in it, what was saved before is still there.
    * Seqnos may go back: after a rollback a vbucket continues below where it was. Never keep the higher one.
    * What is there and can't be read is an error, `CheckpointFailed`. None means that nothing was ever saved, and then
      everything is read from the beginning.
    * If two readers use the same store, one of them gets `CheckpointInUse`, best of all when it loads.
    * Don't hold up the event loop: leave what blocks to `asyncio.to_thread`.

    Calls come one after the other. Data and offsets that are saved by one transaction are what makes delivery exactly
    once; `SqliteCheckpoint.save_in` is an example of it.
    """

    async def load(self) -> Offsets | None:
        """What was saved last, or None where nothing was."""

    async def save(self, offsets: Offsets) -> None:
        """Keep these offsets for good. They are of all vbuckets that the reader has read."""

    async def close(self) -> None:
        """Let go of files and connections. What was saved stays."""


def read_offsets(text: bytes, *, what: str, to_start_over: str) -> Offsets:
    """The offsets in a text, or `CheckpointFailed`. `what` names the checkpoint, as in "the checkpoint …"."""
    try:
        return Offsets.from_json(text.decode("ascii"))
    except UnicodeDecodeError as error:
        raise damaged(what, "it is not the text of offsets", to_start_over=to_start_over) from error
    except OffsetsTooNew as error:
        raise CheckpointFailed(f"{what} can't be read: {error.reason}", hint=error.hint) from error
    except InvalidOffsets as error:
        raise damaged(what, error.reason, to_start_over=to_start_over) from error


def damaged(what: str, why: str, *, to_start_over: str) -> CheckpointFailed:
    return CheckpointFailed(
        f"{what} is damaged: {why}",
        hint=f"Restore it from a backup; to read from the beginning, {to_start_over}",
    )


_MODE = 0o666
"""Less what the user's umask takes away, as for any file. There is nothing secret in it."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@suggest_keywords
class FileCheckpoint:
    """Keeps offsets in a file, as the text of `Offsets.to_json`. The folder must be there.

    From the first load or save until `close` the file is this reader's: another one gets `CheckpointInUse`. Looking at
    it is free to all, `Offsets.from_json(path.read_text())` at any moment. To read from the beginning, remove the file.

    The folder should be on a disk of this machine. On some network file systems a rename is not whole and a lock
    is not seen by others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # A link stays a link, and a process that changes its folder keeps its checkpoint.
        self.path = Path(os.path.realpath(path))
        self._turn = threading.Lock()
        self._release: weakref.finalize[[int], FileCheckpoint] | None = None
        """Releases the lock, at the latest when this object is collected."""

    def __repr__(self) -> str:
        return f"FileCheckpoint({str(self.path)!r})"

    async def load(self) -> Offsets | None:
        """What was saved last, or None where there is no file. A file that can't be read is `CheckpointFailed`."""
        return await asyncio.to_thread(self._load)

    async def save(self, offsets: Offsets) -> None:
        """Replace the file. When this returns it is on the disk; if this fails, the old file is as it was."""
        await asyncio.to_thread(self._save, offsets)

    async def close(self) -> None:
        """Let others use the file."""
        await asyncio.to_thread(self._close)

    # --- in a thread ----------------------------------------------------------------------------------------------

    def _load(self) -> Offsets | None:
        with self._turn:
            self._hold()
            try:
                text = _read_file(self.path)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise CheckpointFailed(
                    f"the checkpoint {self.path} can't be read: {error.strerror}",
                    hint="Check that it is a file that this process may read",
                ) from error
        return read_offsets(text, what=f"the checkpoint {self.path}", to_start_over="remove it")

    def _save(self, offsets: Offsets) -> None:
        text = offsets.to_json().encode("ascii") + b"\n"
        with self._turn:
            self._hold()
            try:
                replace_file(self.path, text, unfinished=_beside(self.path, ".tmp"))
            except OSError as error:
                raise _not_written(self.path, error) from error

    def _close(self) -> None:
        with self._turn:
            if self._release is not None:
                self._release()
                self._release = None

    def _hold(self) -> None:
        if self._release is None:
            self._release = weakref.finalize(self, os.close, _lock(self.path))


# --- the file -----------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        # One more than allowed is enough to be refused for.
        return file.read(TEXT_CHARS_MAX + 2)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


# --- the lock -----------------------------------------------------------------------------------------------------


def _lock(path: Path) -> int:
    """Lock the checkpoint for this reader, and raise at once what would fail the first save."""
    lock_path = _beside(path, ".lock")
    try:
        number = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _MODE)
    except FileNotFoundError as error:
        raise CheckpointFailed(
            f"there is no folder {path.parent} to keep a checkpoint in", hint="Create the folder, or check the path"
        ) from error
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise CheckpointInUse(
                f"another reader uses the checkpoint {path}", hint="Stop it, or give this one its own file"
            ) from error
        raise CheckpointFailed(
            f"the checkpoint {path} can't be locked: {error.strerror}", hint="Use a folder on a disk of this machine"
        ) from error
    return number


# --- what went wrong ----------------------------------------------------------------------------------------------


def _not_written(path: Path, error: OSError) -> CheckpointFailed:
    is_full = error.errno in _NO_ROOM
    hint = "Free disk space" if is_full else f"Check that files can be created and replaced in {path.parent}"
    return CheckpointFailed(
        f"the checkpoint {path} can't be written: {error.strerror}",
        hint=f"{hint}; the last saved state is unchanged",
    )


# --- in SQLite --------------------------------------------------------------------------------------------------------
#
# A checkpoint is one row, with the text of all its offsets:
#
#     headwater_checkpoints (name TEXT PRIMARY KEY, revision INTEGER, writer TEXT, offsets TEXT)
#
# One row and not one for each vbucket, because then a save needs to know nothing of the saves before it: if the caller
# rolls a transaction back, no memory of what has been written is wrong afterwards.
#
# `revision` counts the saves and `writer` names the object that made the last one. A reader may save where its own save
# was the last, or where no other reader has saved since it first looked. So of two readers on one checkpoint the second
# to save is refused; if it saves its data in the same transaction, nothing is written twice.

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


@suggest_keywords
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
            raise InvalidInput("an in-memory database can't hold a checkpoint", hint="Give the path of a file")
        if not (0 < len(name) <= NAME_CHARS_MAX and name.isprintable()):
            raise InvalidInput(
                f"{name[:NAME_CHARS_MAX]!r} is not a valid name for a checkpoint",
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
        """Load what was saved last, at once and by the caller's connection.

        Args:
            connection: A connection to the same database.

        Returns:
            The offsets, or None where none were saved by this name.

        Raises:
            CheckpointFailed: The connection is to another database, or what is there can't be read.
        """
        try:
            self._check_database(connection)
            return self._read(connection)
        except sqlite3.Error as error:
            raise self._failed("read", error) from error

    def save_in(self, connection: sqlite3.Connection, offsets: Offsets) -> None:
        """Save in the caller's transaction, which the caller commits, or rolls back if this raises.

        Args:
            connection: A connection to this database, with a transaction that is open, or opens by itself as Python's
                do by default.
            offsets: Behind the data that the same transaction writes.

        Raises:
            CheckpointInUse: Another reader has saved since this one first looked.
            CheckpointFailed: There is no transaction, or the database can't be written.
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
                hint="Roll back, stop one of the two, or give this one its own name",
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
            hint=f"{hint}; the last saved state is unchanged" if done == "written" else hint,
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
            "the connection has no open transaction",
            hint="Execute BEGIN, write the data, call save_in, and execute COMMIT, so that data and offsets are saved "
            "together",
        )
