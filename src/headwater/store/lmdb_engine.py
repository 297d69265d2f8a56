"""LMDB as the engine: ACID without a recovery of our own, and read transactions that are snapshots.

The process that opens a folder locks it. After the folder was closed in order, its file `owner` holds the inode of the
data file and the time of its last change. No copy of the folder, and no copy put over it, matches these: the system
sets the time of a change, and no program can choose it. So a copy is recognised when it is opened. Deleting `owner`
has the same effect, so the lock is on the folder.

Every transaction stores its own number in a table of this module. The number in a meta page must match the one in its
tree: otherwise a page that the disk has changed could present an older state of the data as the newest.

The node opens one engine for each bucket. This is the only module of the store that touches files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import struct
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import lmdb
import numpy as np

from headwater.durable_files import replace_file
from headwater.errors import DataDamaged, DataInUse, StoreError, StoreFull
from headwater.kernels.memory import Int64s
from headwater.store.engine import Change, PutRow, Table, View, count_block_writes, new_block_versions

MAP_BYTES = 2**42
"""Address space, not disk: the file grows as it is filled."""
VIEWS_WAIT_S = 30.0
"""How long `close` waits for open views. Scrubs and searches read for a fraction of a second at a time."""
_READERS_MAX = 512
_FILE, _LOCK_FILE, _OWNER = "data.mdb", "lock.mdb", "owner"
_LOCK_BYTES = 64 * 1024
"""The size of the file in which LMDB keeps its readers. LMDB maps it."""
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_ROOM_BYTES_MIN = 64 * 1024
_OWN_TABLE = b"engine"
_TRANSACTION = b"transaction"
_NUMBER = struct.Struct(">Q")
_LOST = -1


class LmdbEngine:
    """One LMDB environment in one folder, held by one process.

    With `read_only` nothing in the folder is changed.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._folder = folder
        self._is_read_only = read_only
        self._was_written = False
        self._views_changed = threading.Condition()
        self._open_views = 0
        self._is_closing = False
        self.block_versions: Int64s = new_block_versions()
        try:
            if not read_only:
                folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _lock_folder(folder)
        except OSError as error:
            raise _failed(error, folder) from error
        try:
            if not read_only:
                _allocate(folder / _LOCK_FILE, _LOCK_BYTES)
            found, owner = _identity(folder / _FILE), folder / _OWNER
            self.was_left_alone = found is None or (owner.exists() and found == owner.read_bytes())
            check_pages(folder / _FILE, [*(table.value.decode() for table in Table), _OWN_TABLE.decode()])
            self._environment = lmdb.open(
                str(folder), map_size=MAP_BYTES, max_dbs=len(Table) + 1, max_readers=_READERS_MAX, meminit=False,
                mode=0o700, readonly=read_only, create=not read_only, lock=not read_only,
            )  # fmt: skip
            self._tables = {table: self._environment.open_db(table.value) for table in Table}
            if not read_only:
                self._own_table = self._environment.open_db(_OWN_TABLE)
        except BaseException as error:
            self.close()
            if isinstance(error, lmdb.Error):
                raise _translated(error, folder) from error
            if isinstance(error, OSError):
                raise _failed(error, folder) from error
            raise

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._views_changed:
            if self._is_closing:
                raise StoreError(f"the data in {self._folder} is closed", hint="Try again when it is open")
            self._open_views += 1
        try:
            with self._environment.begin(buffers=True) as transaction:
                yield _LmdbView(transaction, self._tables)
        except lmdb.Error as error:
            raise _translated(error, self._folder) from error
        finally:
            with self._views_changed:
                self._open_views -= 1
                self._views_changed.notify_all()

    def write(self, changes: Sequence[Change]) -> None:
        assert not self._is_read_only
        try:
            with self._environment.begin(write=True) as transaction:
                for change in changes:
                    if isinstance(change, PutRow):
                        transaction.put(change.key, change.value, db=self._tables[change.table])
                    else:
                        transaction.delete(change.key, db=self._tables[change.table])
                transaction.put(_TRANSACTION, _NUMBER.pack(transaction.id()), db=self._own_table)
        except lmdb.Error as error:
            raise _translated(error, self._folder) from error
        self._was_written = True
        count_block_writes(self.block_versions, changes)

    def close(self) -> None:
        """Wait until no view is open, then close.

        Closing unmaps the file, and a kernel that reads its pages at that moment would crash the process. If a view is
        open for longer than `VIEWS_WAIT_S`, the file stays mapped. A second call does nothing: by then the descriptor
        of the lock may belong to another file.
        """
        if self._lock is None:
            return
        if hasattr(self, "_environment"):
            with self._views_changed:
                self._is_closing = True
                is_unread = self._views_changed.wait_for(lambda: not self._open_views, VIEWS_WAIT_S)
            if is_unread:
                self._environment.close()
            if not self._is_read_only and (self.was_left_alone or self._was_written):
                # A copy that was never opened as a bucket remains one: a start may fail before that. Data without the
                # note counts as a copy, which costs a branch and is never wrong, so a full disk is no error here.
                with suppress(OSError):
                    replace_file(self._folder / _OWNER, _identity(self._folder / _FILE) or b"", is_private=True)
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


def _lock_folder(folder: Path) -> int:
    """Lock a folder for this process. The lock ends with the process, however that ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
        raise DataInUse(
            f"another process uses the data in {folder}", hint="Stop it, or give this one its own folder"
        ) from error
    return descriptor


def is_unfinished(folder: Path) -> bool:
    """Whether creating an engine was interrupted before it had data. The disk may be too full now to open it."""
    data = folder / _FILE
    has_data = data.exists() and data.stat().st_size > 0
    return folder.is_dir() and not has_data and {file.name for file in folder.iterdir()} <= {_FILE, _LOCK_FILE}


def _allocate(file: Path, size_bytes: int) -> None:
    """Give a file its blocks before it is mapped: touching a page that the disk has no room for ends the process.

    A file that has its blocks needs no more room, so a node that was killed can start on a full disk.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _identity(file: Path) -> bytes | None:
    """Return the inode of a file and when it was last changed; None if there is no file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_ino} {status.st_ctime_ns}".encode()


def _translated(error: lmdb.Error, folder: Path) -> StoreError:
    text = str(error)
    is_cut_short = os.strerror(errno.EIO) in text and not _has_room(folder)
    if isinstance(error, lmdb.MapFullError) or any(reason in text for reason in _NO_ROOM) or is_cut_short:
        return _full(folder)
    if isinstance(error, lmdb.CorruptedError | lmdb.InvalidError | lmdb.PageNotFoundError | lmdb.VersionMismatchError):
        return DataDamaged(f"the data in {folder} is damaged: {text}", hint="Restore it from a backup or a replica")
    return _unusable(folder, text)


def _failed(error: OSError, folder: Path) -> StoreError:
    text = error.strerror or str(error)
    return _full(folder) if text in _NO_ROOM else _unusable(folder, text)


def _full(folder: Path) -> StoreFull:
    return StoreFull(
        f"the disk is full: no space for the data in {folder}", hint="Free disk space; the node resumes by itself"
    )


def _unusable(folder: Path, reason: str) -> StoreError:
    return StoreError(
        f"the data in {folder} can't be used: {reason}", hint="Check the folder's permissions and the disk"
    )


def _has_room(folder: Path) -> bool:
    """Whether the file could have grown. LMDB reports an I/O error if the system wrote only a part of the data, which
    happens on a disk that is just getting full."""
    disk = os.statvfs(folder)
    size_bytes_max = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size_bytes = (folder / _FILE).stat().st_size if (folder / _FILE).exists() else 0
    may_grow = size_bytes_max == resource.RLIM_INFINITY or size_bytes + _ROOM_BYTES_MIN <= size_bytes_max
    return may_grow and disk.f_bavail * disk.f_frsize >= _ROOM_BYTES_MIN


# --- the pages of the file, checked before LMDB itself follows them -----------------------------------------------
#
# LMDB trusts its file. It maps the file into memory and follows page numbers and offsets, so a file that was cut or
# overwritten causes not an error but SIGBUS, SIGSEGV, or wrong rows. The trees are small, since nearly everything is
# in values with pages of their own, so walking them takes little time compared with reading the data afterwards. The
# file's size alone is not enough: sound files can be shorter than their meta page says, if the last pages were taken
# and freed within one transaction.
#
# `lmdb.verify` has the same purpose, but version 3.0.0 reports a value that was overwritten by a shorter one within
# one transaction as damage. No walk can see damage inside values: their checksums do.
#
# Pages of LMDB 0.9, little-endian:
#
#     0   page number, 8 bytes        10  flags            12  end of the list of nodes, or, over 4 bytes,
#     8   unused                      14  start of nodes       the number of pages that a large value takes
#     16  the list of nodes: where in the page each one starts. On a meta page: `_META`
#
# A node has the length of its data in 4 bytes, flags, the length of its key, key and data. In a branch the length of
# the data and the flags are together the number of the page below.


_META = struct.Struct("<QHHI IIQQ 48s48s QQ")
_TREE = struct.Struct("<IHHQQQQQ")
_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _LARGE, _IS_META = 0x01, 0x02, 0x04, 0x08
_LARGE_VALUE, _SUBTREE = 0x01, 0x02
_FREE_FLAGS = 0x08
"""The flag of the tree of free pages: its keys are integers."""
_FREE, _MAIN = "the free list", "the list of tables"
_NO_ROOT = 2**64 - 1
_METAS = 2
_PAGE_BYTES_MAX = 0x10000
_DEPTH_MAX = 32
_SHORT_PAGES_MAX = 2**20
"""How many pages a sound file may lack at its end: those that one transaction took and freed again."""


def check_pages(path: Path, tables: Collection[str]) -> None:
    """Raise `DataDamaged` if LMDB can't read a file safely. A file that does not exist yet is sound.

    `tables` are those that are to be opened. If one is missing and there is one with an unknown name, the table has
    lost its name, and would be created again, empty.
    """
    if lmdb.version()[:2] != (0, 9) or sys.byteorder != "little" or sys.maxsize < 2**32:
        return  # Other builds have other pages.
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with path.open("rb") as file:
            found = _File(file, path.stat().st_size).check()
        if found - set(tables) and set(tables) - found:
            raise _Damage("a table has lost its name")
    except (_Damage, struct.error) as error:
        raise DataDamaged(
            f"the data in {path.parent} is damaged: {error}", hint="Restore it from a backup or a replica"
        ) from error


class _Damage(Exception):
    """The damage that was found, for `check_pages` to report."""


@dataclass(slots=True)
class _Tree:
    """A tree as its record describes it, and what the walk has found of it."""

    name: str
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    large_pages: int
    entries: int
    root: int
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("branch", "leaf", "large", "entries"), 0))
    last_key: bytes = b""
    floor: bytes = b""
    """The key of the branch that leads to the next leaf: no key there is below it."""

    @classmethod
    def decode(cls, name: str, record: bytes) -> _Tree:
        return cls(name, *_TREE.unpack(record)[1:])

    @property
    def is_free_list(self) -> bool:
        return self.name == _FREE

    def check_branch(self, key: bytes) -> None:
        """Check that all keys before a branch are below its key."""
        self.floor = self._in_order(key)
        if self.floor <= self.last_key:
            raise _Damage(f"the branches of {self.name} are not in order")

    def check_key(self, key: bytes) -> None:
        """Check that keys rise over all leaves."""
        ordered = self._in_order(key)
        if ordered <= self.last_key or ordered < self.floor:
            raise _Damage(f"the keys of {self.name} are not in order")
        self.last_key = ordered

    def _in_order(self, key: bytes) -> bytes:
        """Return a key in the form that compares as bytes. Keys of the free list are integers."""
        if not key or (self.is_free_list and len(key) != 8):
            raise _Damage(f"a key of {self.name} has {len(key)} bytes")
        return key[::-1] if self.is_free_list else key

    def check_counts(self) -> None:
        if tuple(self.found.values()) != (self.branch_pages, self.leaf_pages, self.large_pages, self.entries):
            raise _Damage(f"{self.name} does not hold what it should")


class _File:
    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._page_bytes = _PAGE_BYTES_MAX
        self._last_page = 0
        self._used = np.zeros(0, dtype=np.bool_)
        self._free_lists: list[bytes] = []
        self._names: set[str] = set()
        self._mains: list[tuple[int, _Tree]] = []
        """The transaction number of each meta page, and its tree of tables."""

    def check(self) -> set[str]:
        """Check the file. Returns the names of the tables if it is sound."""
        free, main = self._newest_trees()
        self._check_numbers()
        self._used = np.zeros(self._last_page + 1, dtype=np.bool_)
        for tree in (free, main):
            self._walk(tree)
        self._check_free_lists()
        return self._names

    # --- meta pages -----------------------------------------------------------------------------------------------

    def _newest_trees(self) -> tuple[_Tree, _Tree]:
        """Return the roots of the newest transaction. Transactions use the two meta pages in turn."""
        metas = []
        for number in range(_METAS):
            fields = _META.unpack(self._read(number * self._page_bytes if number else 0, _META.size))
            page, _, flags, _, magic, version, _, _, free, main, last_page, transaction = fields
            page_bytes = _TREE.unpack(free)[0]
            if (page, flags, magic, version) != (number, _IS_META, _MAGIC, _VERSION):
                raise _Damage(f"meta page {number} is not one")
            if number and page_bytes != self._page_bytes:
                raise _Damage("the meta pages disagree about the size of pages")
            if not 512 <= page_bytes <= _PAGE_BYTES_MAX or page_bytes & (page_bytes - 1):
                raise _Damage(f"meta page {number} has pages of {page_bytes} bytes")
            self._page_bytes = page_bytes
            metas.append((transaction, last_page, _Tree.decode(_FREE, free), _Tree.decode(_MAIN, main)))
        if any(metas[number][0] % _METAS != number for number in range(_METAS) if metas[number][0]) or (
            abs(metas[0][0] - metas[1][0]) > 1
        ):
            raise _Damage("the meta pages do not follow each other")
        self._mains = [(transaction, main) for transaction, _, _, main in metas]
        _, self._last_page, free_tree, main_tree = max(metas, key=lambda meta: meta[0])
        if not _METAS - 1 <= self._last_page <= self._size_bytes // self._page_bytes + _SHORT_PAGES_MAX:
            raise _Damage(f"the last page is {self._last_page} in a file of {self._size_bytes} bytes")
        return free_tree, main_tree

    def _check_numbers(self) -> None:
        """Check that each meta page has the number of the transaction whose tree it leads to.

        The tree of the older one is still whole: LMDB reuses no page of it before the next transaction has begun. A
        compacted copy (`mdb_copy -c`) counts from 0 again.
        """
        is_compacted = [transaction for transaction, _ in self._mains] == [0, 1]
        for transaction, main in self._mains:
            number = self._stored_number(main)
            if number not in (None, transaction) and (number == _LOST or not is_compacted):
                raise _Damage(f"the meta page of transaction {transaction} leads to the data of another one")

    def _stored_number(self, main: _Tree) -> int | None:
        """Return the number that a transaction stored; `_LOST` if its row has lost its key, None if there is none."""
        try:
            record = self._find(main, _OWN_TABLE)
            table = None if record is None else _Tree.decode("", record)
            if table is None or not table.entries:
                return None
            stored = self._find(table, _TRANSACTION)
            return _LOST if stored is None else int(_NUMBER.unpack(stored)[0])
        except (_Damage, struct.error):
            return None  # The walk finds damage in the newest tree; in the older one it does no harm.

    def _find(self, tree: _Tree, key: bytes) -> bytes | None:
        """Return the value of a key, if its page holds it."""
        number = tree.root
        for level in range(tree.depth):
            page = self._read(number * self._page_bytes, self._page_bytes)
            nodes = list(self._nodes(page, number))
            keys = [page[at + _NODE.size : at + _NODE.size + node[3]] for at, node in nodes]
            if level == tree.depth - 1:
                if key not in keys:
                    return None
                at, (low, high, _, key_bytes) = nodes[keys.index(key)]
                value_at = at + _NODE.size + key_bytes
                return page[value_at : value_at + (low | high << 16)]
            below = max(index for index in range(len(keys)) if index == 0 or keys[index] <= key)
            low, high, flags, _ = nodes[below][1]
            number = low | high << 16 | flags << 32
        return None

    # --- trees ----------------------------------------------------------------------------------------------------

    def _walk(self, tree: _Tree) -> None:
        if tree.flags != (_FREE_FLAGS if tree.is_free_list else 0) or tree.depth > _DEPTH_MAX:
            raise _Damage(f"{tree.name} is of no known kind")
        if tree.root != _NO_ROOT:
            self._walk_page(tree, tree.root, level=1)
        elif tree.depth:
            raise _Damage(f"{tree.name} has lost its root")
        tree.check_counts()

    def _walk_page(self, tree: _Tree, number: int, *, level: int) -> None:
        self._take(number, 1)
        page = self._read(number * self._page_bytes, self._page_bytes)
        is_leaf = level == tree.depth
        stored_number, _, flags, _, _ = _PAGE.unpack_from(page)
        if stored_number != number or flags != (_LEAF if is_leaf else _BRANCH) or level > tree.depth:
            raise _Damage(f"page {number} is not what {tree.name} expects")
        tree.found["leaf" if is_leaf else "branch"] += 1
        for index, (at, (low, high, node_flags, key_bytes)) in enumerate(self._nodes(page, number)):
            key_at = at + _NODE.size
            key = page[key_at : key_at + key_bytes]
            if is_leaf:
                tree.check_key(key)
                self._check_value(tree, page[key_at + key_bytes :], low | high << 16, node_flags, key)
                continue
            if index:  # LMDB does not read the key of a page's first branch.
                tree.check_branch(key)
            self._walk_page(tree, low | high << 16 | node_flags << 32, level=level + 1)

    def _nodes(self, page: bytes, number: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        list_end, nodes_start = _PAGE.unpack_from(page)[3:]
        if not _PAGE.size < list_end <= nodes_start <= self._page_bytes or list_end % 2:
            raise _Damage(f"page {number} has no sound list of nodes")
        starts = struct.unpack_from(f"<{(list_end - _PAGE.size) // 2}H", page, _PAGE.size)
        if min(starts) != nodes_start:
            raise _Damage(f"the nodes of page {number} do not begin where it says")
        for at in starts:
            if at > self._page_bytes - _NODE.size:
                raise _Damage(f"a node of page {number} lies outside it")
            node = _NODE.unpack_from(page, at)
            if at + _NODE.size + node[3] > self._page_bytes:
                raise _Damage(f"a key of page {number} runs beyond it")
            yield at, node

    # --- values ---------------------------------------------------------------------------------------------------

    def _check_value(self, tree: _Tree, rest: bytes, value_bytes: int, flags: int, key: bytes) -> None:
        """Check a value. `rest` is the page from the value, or its page number, on."""
        tree.found["entries"] += 1
        if flags not in (0, _LARGE_VALUE, _SUBTREE) or (flags == _SUBTREE) != (tree.name == _MAIN):
            raise _Damage(f"a row of {tree.name} is of no known kind")
        if flags == _LARGE_VALUE:
            first = int.from_bytes(rest[:8], "little")
            pages = self._take_large(first, value_bytes)
            tree.found["large"] += pages
            value = self._read(first * self._page_bytes + _PAGE.size, value_bytes) if tree.is_free_list else b""
        else:
            value = rest[:value_bytes]
            if len(value) != value_bytes:
                raise _Damage(f"a value of {tree.name} runs beyond its page")
        if flags == _SUBTREE:
            name = key.decode(errors="replace")
            self._names.add(name)
            self._walk(_Tree.decode(f"table {name}", value))
        if tree.is_free_list:
            self._free_lists.append(value)

    def _take_large(self, first: int, value_bytes: int) -> int:
        """Take the pages of a large value. One that was overwritten by a shorter one keeps more pages than it needs."""
        needed = -(-(_PAGE.size + value_bytes) // self._page_bytes)
        self._take(first, 1)
        number, _, flags, pages_low, pages_high = _PAGE.unpack(self._read(first * self._page_bytes, _PAGE.size))
        pages: int = pages_low | pages_high << 16
        if number != first or flags != _LARGE or pages < needed:
            raise _Damage(f"page {first} does not begin the value that it should")
        self._take(first + 1, pages - 1)
        if (first + needed) * self._page_bytes > self._size_bytes:
            raise _Damage("the file is cut off")
        return pages

    # --- pages ----------------------------------------------------------------------------------------------------

    def _take(self, first: int, count: int) -> None:
        """Mark pages as used. Every page has only one use."""
        if not _METAS <= first <= first + count <= self._last_page + 1 or self._used[first : first + count].any():
            raise _Damage(f"page {first} is used twice, or is beyond the last")
        self._used[first : first + count] = True

    def _check_free_lists(self) -> None:
        """Check that no page is both free and in use: it would be overwritten some day."""
        for encoded in self._free_lists:
            numbers = np.frombuffer(encoded[: len(encoded) // 8 * 8], dtype="<u8")
            if not len(numbers) or numbers[0] != len(numbers) - 1:
                raise _Damage("a list of free pages has another length than it says")
            pages = numbers[1:]
            if len(pages) and (pages.min() < _METAS or pages.max() > self._last_page or self._used[pages].any()):
                raise _Damage("a page is both free and in use")
            if (pages[1:] >= pages[:-1]).any():
                raise _Damage("a list of free pages is not in order")
            self._used[pages] = True

    def _read(self, at: int, size: int) -> bytes:
        # A damaged page number may be larger than any file's length.
        if at + size > self._size_bytes:
            raise _Damage("the file is cut off")
        self._file.seek(at)
        return self._file.read(size)
