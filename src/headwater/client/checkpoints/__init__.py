"""Stores for a reader's offsets: the protocol of a store, a store in a file, and one in SQLite.

A save writes a new file beside the old one, syncs it, renames it over the old one, and syncs the folder. A rename is
atomic, so a process that reads the file, or is killed, at any moment finds either the old offsets or the new ones. A
killed process may leave a temporary file, which is never read, and which the next save replaces.

A reader locks a separate file beside the checkpoint while it uses it. The system releases the lock when the process
ends, however it ends, so there is nothing to clean up. The lock needs its own file, because every save replaces the
checkpoint's file. A checkpoint that can't be read must never be treated as missing.
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
    """A store of offsets. Your own store needs only these three methods, and no base class.

    * Store the text of `Offsets.to_json`, and decode it with `Offsets.from_json`. Equal offsets give equal texts.
    * A save is atomic. When it returns, the offsets survive a power cut. When it raises, or the process is killed
      during it, the offsets that were saved before remain.
    * Seqnos may go back: after a rollback a vbucket continues below its old seqno. Never keep the higher one.
    * Data that exists but can't be read is an error, `CheckpointFailed`. None means that nothing was ever saved, and
      the reader then starts from the beginning.
    * If two readers use the same store, one of them gets `CheckpointInUse`, preferably when it loads.
    * Don't block the event loop: run blocking code with `asyncio.to_thread`.

    Calls come one after the other. To process each change exactly once, save data and offsets in one transaction;
    `SqliteCheckpoint.save_in` is an example.
    """

    async def load(self) -> Offsets | None:
        """Return the offsets that were saved last, or None if nothing was saved."""

    async def save(self, offsets: Offsets) -> None:
        """Store these offsets durably. They include all vbuckets that the reader has read."""

    async def close(self) -> None:
        """Close files and connections. Saved offsets remain."""


def read_offsets(text: bytes, *, what: str, to_start_over: str) -> Offsets:
    """Decode offsets, or raise `CheckpointFailed`. `what` names the checkpoint in the error, as in "the checkpoint
    …"."""
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
"""The umask applies, as for any file. The content is not secret."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@suggest_keywords
class FileCheckpoint:
    """Keeps offsets in a file, as the text of `Offsets.to_json`. The folder must exist.

    From the first load or save until `close`, this reader owns the file: another one gets `CheckpointInUse`. Anyone
    may look at it with `Offsets.from_json(path.read_text())`. To read from the beginning, remove the file.

    The folder should be on a local disk. On some network file systems, renames are not atomic and other machines do
    not see locks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Resolve the path once: a symbolic link stays one, and the process may change its working directory.
        self.path = Path(os.path.realpath(path))
        self._turn = threading.Lock()
        self._release: weakref.finalize[[int], FileCheckpoint] | None = None
        """Releases the lock, at the latest when this object is garbage-collected."""

    def __repr__(self) -> str:
        return f"FileCheckpoint({str(self.path)!r})"

    async def load(self) -> Offsets | None:
        """Return the offsets saved last, or None if there is no file. Raises `CheckpointFailed` if it can't be read."""
        return await asyncio.to_thread(self._load)

    async def save(self, offsets: Offsets) -> None:
        """Replace the file. When this returns, the offsets are on disk; if it raises, the old file is unchanged."""
        await asyncio.to_thread(self._save, offsets)

    async def close(self) -> None:
        """Release the file for other readers."""
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
        # Read one more than allowed, so that too long a text is refused.
        return file.read(TEXT_CHARS_MAX + 2)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


# --- the lock -----------------------------------------------------------------------------------------------------


def _lock(path: Path) -> int:
    """Lock the checkpoint for this reader. Errors that would fail the first save are raised now."""
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
# A checkpoint is one row that contains the text of all its offsets:
#
#     headwater_checkpoints (name TEXT PRIMARY KEY, revision INTEGER, writer TEXT, offsets TEXT)
#
# One row instead of one per vbucket, so that a save does not depend on earlier saves: if the caller rolls a
# transaction back, no memory of what was written becomes wrong.
#
# `revision` counts the saves and `writer` identifies the object that made the last one. A reader may save if the last
# save was its own, or if no other reader has saved since it first looked. So of two readers of one checkpoint, the
# second to save is refused; if it saves its data in the same transaction, nothing is written twice.

BUSY_S_MAX = 30.0
"""How long to wait while another process writes to the database."""
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
    """Keeps offsets in an SQLite database, which may contain other tables, and other checkpoints under other names.

    If the results of the changes are written to the same database, `save_in` saves the offsets in the transaction that
    writes them. Then both are saved or neither, and every change counts exactly once, whenever the process is killed:

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
        """The revision at the first look. If the caller rolls back, the table may have it again."""
        self._connection: sqlite3.Connection | None = None
        self._turn = threading.Lock()
        """Guards `_connection`."""

    def __repr__(self) -> str:
        return f"SqliteCheckpoint({self.path!r}, name={self.name!r})"

    async def load(self) -> Offsets | None:
        """Return the offsets last saved under this name, or None. Raises `CheckpointFailed` if they can't be read."""
        return await asyncio.to_thread(self._load)

    async def save(self, offsets: Offsets) -> None:
        """Save in a separate transaction. When this returns, the offsets are on disk."""
        await asyncio.to_thread(self._save, offsets)

    def load_from(self, connection: sqlite3.Connection) -> Offsets | None:
        """Load the offsets that were saved last, synchronously and over the caller's connection.

        Args:
            connection: A connection to the same database.

        Returns:
            The offsets, or None if none were saved under this name.

        Raises:
            CheckpointFailed: The connection is to another database, or the checkpoint can't be read.
        """
        try:
            self._check_database(connection)
            return self._read(connection)
        except sqlite3.Error as error:
            raise self._failed("read", error) from error

    def save_in(self, connection: sqlite3.Connection, offsets: Offsets) -> None:
        """Save in the caller's transaction, which the caller commits, or rolls back if this raises.

        Args:
            connection: A connection to this database, with a transaction that is open, or that Python opens by itself,
                as it does by default.
            offsets: The offsets after the data that the same transaction writes.

        Raises:
            CheckpointInUse: Another reader has saved since this one first looked.
            CheckpointFailed: There is no transaction, or the database can't be written.
        """
        # Don't take `_turn`: a save in a thread may hold it and wait for the end of this very transaction.
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
            # Calls come from one thread at a time, but not always from the same one.
            connection = sqlite3.connect(self.path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False)
            try:
                # EXTRA also syncs the folder before a save returns.
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.execute(_CREATE)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    # --- with any connection --------------------------------------------------------------------------------------

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
    """Return a cursor that returns tuples, whatever row factory the caller has set."""
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
