"""LMDB as the engine: ACID with no recovery of ours, and read transactions that are snapshots.

The file `owner` is locked by the process that has the folder. When it is closed in order, it is left with which file
the data was and when that file was last changed. No copy of the folder and no copy laid over it fits that: the system
sets the time of a change, and lets nobody choose it. So whoever opens the data can tell.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from headwater.errors import DataDamaged, DataInUse, StoreError, StoreFull
from headwater.store.engine import Change, Put, Table, View
from headwater.store.lmdb_pages import check_pages

MAP_BYTES = 2**42
"""Address space, not disk: the file grows as it is filled."""
_READERS_MAX = 512
_FILE = "data.mdb"
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_ROOM_BYTES_MIN = 64 * 1024
_IDENTITY_BYTES_MAX = 128


class LmdbEngine:
    """One LMDB environment in one folder, held by one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._was_written = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _hold(folder)
        except OSError as error:
            raise _unusable(folder, error.strerror or str(error)) from error
        try:
            found = _identity(folder / _FILE)
            self.was_left_alone = found is None or found == os.pread(self._lock, _IDENTITY_BYTES_MAX, 0)
            check_pages(folder / _FILE, [table.value.decode() for table in Table])
            self._environment = lmdb.open(
                str(folder), map_size=MAP_BYTES, max_dbs=len(Table), max_readers=_READERS_MAX, meminit=False, mode=0o700
            )
            self._tables = {table: self._environment.open_db(table.value) for table in Table}
        except BaseException as error:
            self.close()
            if isinstance(error, lmdb.Error):
                raise _translated(error, folder) from error
            if isinstance(error, OSError):
                raise _unusable(folder, error.strerror or str(error)) from error
            raise

    @contextmanager
    def view(self) -> Iterator[View]:
        try:
            with self._environment.begin(buffers=True) as transaction:
                yield _LmdbView(transaction, self._tables)
        except lmdb.Error as error:
            raise _translated(error, self._folder) from error

    def write(self, changes: Sequence[Change]) -> None:
        self._was_written = True
        try:
            with self._environment.begin(write=True) as transaction:
                for change in changes:
                    if isinstance(change, Put):
                        transaction.put(change.key, change.value, db=self._tables[change.table])
                    else:
                        transaction.delete(change.key, db=self._tables[change.table])
        except lmdb.Error as error:
            raise _translated(error, self._folder) from error

    def close(self) -> None:
        """Does nothing the second time: by then the number of the lock may be another file's."""
        if self._lock is None:
            return
        if hasattr(self, "_environment"):
            self._environment.close()
            if self.was_left_alone or self._was_written:
                # A copy that nobody has opened as a bucket stays one: a start may be given up before that.
                _note_identity(self._lock, self._folder / _FILE)
        os.close(self._lock)
        self._lock = None


class _LmdbView:
    def __init__(self, transaction: Any, tables: dict[Table, Any]) -> None:
        self._transaction = transaction
        self._tables = tables

    def get(self, table: Table, key: bytes) -> memoryview | None:
        value: memoryview | None = self._transaction.get(key, db=self._tables[table])
        return value

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, memoryview]]:
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            found = cursor.set_range(start)
            while found and (key := bytes(cursor.key())) < end:
                yield key, cursor.value()
                found = cursor.next()

    def last_before(self, table: Table, end: bytes) -> tuple[bytes, memoryview] | None:
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            found = cursor.prev() if cursor.set_range(end) else cursor.last()
            return (bytes(cursor.key()), cursor.value()) if found else None


def _hold(folder: Path) -> int:
    """Lock the folder for this process; the lock goes with the process, however it ends."""
    descriptor = os.open(folder / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise DataInUse(
            f"another process holds the data in {folder}", hint="Stop it, or give this one a folder of its own"
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _identity(file: Path) -> bytes | None:
    """Which file it is, and when it was last changed; None where there is none."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_ino} {status.st_ctime_ns}".encode()


def _note_identity(lock: int, file: Path) -> None:
    # Data without the note is taken for a copy, which costs a branch and is never wrong: a full disk is no fault here.
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, _identity(file) or b"", 0)
        os.fsync(lock)


def _translated(error: lmdb.Error, folder: Path) -> StoreError:
    text = str(error)
    is_cut_short = os.strerror(errno.EIO) in text and not _has_room(folder)
    if isinstance(error, lmdb.MapFullError) or any(reason in text for reason in _NO_ROOM) or is_cut_short:
        return StoreFull(
            f"no room is left for the data in {folder}", hint="Free disk space; the node goes on by itself"
        )
    if isinstance(error, lmdb.CorruptedError | lmdb.InvalidError | lmdb.PageNotFoundError | lmdb.VersionMismatchError):
        return DataDamaged(f"the data in {folder} is damaged: {text}", hint="Restore it from a backup or a replica")
    return _unusable(folder, text)


def _unusable(folder: Path, reason: str) -> StoreError:
    return StoreError(
        f"the data in {folder} can't be used: {reason}", hint="Check the folder's permissions and the disk"
    )


def _has_room(folder: Path) -> bool:
    """Whether the file could have grown. LMDB calls it an I/O error when the system wrote a part of what it gave it,
    which is what happens on a disk that is just getting full."""
    disk = os.statvfs(folder)
    size_bytes_max = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size_bytes = (folder / _FILE).stat().st_size if (folder / _FILE).exists() else 0
    may_grow = size_bytes_max == resource.RLIM_INFINITY or size_bytes + _ROOM_BYTES_MIN <= size_bytes_max
    return may_grow and disk.f_bavail * disk.f_frsize >= _ROOM_BYTES_MIN
