"""What a node uses of the machine it runs on: its data folder, clocks, randomness and memory.

    node.json     the node's identity, apart from its buckets and users (`NodeIdentity`)
    users.json    the users and their roles (`auth.accounts`)
    password      the generated password of the first user, if it was generated
    buckets/NAME  a bucket's engine; `.dropped-…` beside it is a bucket whose files are being removed

A node stores everything through its folder, and uses the machine only through its `NodeEnvironment`, so that the
simulation can replace both. No other module of the node opens a file.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headwater.durable_files import replace_file, sync_folder
from headwater.errors import DataDamaged, LocalProtocolError, StoreError, StoreFull
from headwater.node.auth.accounts import UserFolder, load_users, store_users
from headwater.node.auth.users import Users
from headwater.protocol.cluster_config import NodeAddress
from headwater.protocol.numbers import Vbuuid
from headwater.store.engine import Engine
from headwater.store.lmdb_engine import LmdbEngine, is_unfinished

_DROPPED = ".dropped-"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The identity of a node, apart from its buckets and users. The ids are random, and stay the same over restarts."""

    uuid: str
    cluster_uuid: str
    """The id of the node's own cluster, in which it is alone. A cluster that it joins has another."""
    cluster_name: str = ""
    quotas_mb: Mapping[str, int] = field(default_factory=dict)
    """The memory quotas that were set, by their names in REST."""
    dropped: frozenset[str] = frozenset()
    """Buckets that were dropped. `--bucket` does not create them again, and the start removes what is left of them."""
    nodes: tuple[NodeAddress, ...] = ()
    """The other nodes of a cluster whose last bucket was dropped, on which the next bucket is created as well. While
    there is a bucket, its config names them."""

    def encode(self) -> bytes:
        members: dict[str, Any] = {**asdict(self), "version": 1, "dropped": sorted(self.dropped)}
        return json.dumps(members, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> NodeIdentity:
        try:
            members = json.loads(data)
            return cls(
                uuid=str(members["uuid"]),
                cluster_uuid=str(members["cluster_uuid"]),
                cluster_name=str(members["cluster_name"]),
                quotas_mb={str(name): int(quota) for name, quota in members["quotas_mb"].items()},
                dropped=frozenset(map(str, members["dropped"])),
                nodes=tuple(NodeAddress(**node) for node in members["nodes"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LocalProtocolError) as error:
            raise DataDamaged(
                f"node.json in the data folder is damaged: {error!r}",
                hint="Restore it from a backup; without it, the node gets a new identity",
            ) from error


class Folder(UserFolder, Protocol):
    """The data folder as a node uses it."""

    def make(self) -> None: ...

    def bucket_names(self) -> list[str]: ...

    def open_engine(self, bucket: str) -> Engine: ...

    def disk_bytes(self, bucket: str) -> int: ...

    def remove_bucket(self, bucket: str) -> None:
        """Remove a bucket whose engine is closed. If a crash interrupts this, `remove_dropped` completes it."""
        ...

    def remove_dropped(self) -> None: ...

    def load_identity(self) -> NodeIdentity | None: ...

    def store_identity(self, identity: NodeIdentity) -> None: ...


class NodeFolder:
    """A folder on a disk."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def make(self) -> None:
        try:
            self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(
                f"the data folder {self._data} can't be created: {error.strerror}",
                hint="Give another one, or permission to create it",
            ) from error

    # --- buckets --------------------------------------------------------------------------------------------------

    @property
    def _buckets(self) -> Path:
        return self._data / "buckets"

    def bucket_names(self) -> list[str]:
        # No bucket's name begins with a dot (`options`).
        folders = self._buckets.iterdir() if self._buckets.exists() else ()
        return sorted(
            folder.name for folder in folders if not folder.name.startswith(".") and not is_unfinished(folder)
        )

    def open_engine(self, bucket: str) -> Engine:
        return LmdbEngine(self._buckets / bucket)

    def disk_bytes(self, bucket: str) -> int:
        return sum(file.stat().st_blocks * 512 for file in (self._buckets / bucket).iterdir())

    def remove_bucket(self, bucket: str) -> None:
        # One rename removes the bucket as a whole: a crash never leaves a part of its files under its name.
        if not (self._buckets / bucket).exists():
            return
        dropped = self._buckets / f"{_DROPPED}{bucket}-{secrets.token_hex(4)}"
        try:
            (self._buckets / bucket).rename(dropped)
            sync_folder(self._buckets)
            shutil.rmtree(dropped)
        except OSError as error:
            raise StoreError(
                f"the files of bucket {bucket} can't be removed: {error.strerror}",
                hint="Check the folder's permissions and the disk; the next start will retry",
            ) from error

    def remove_dropped(self) -> None:
        for entry in self._buckets.glob("*"):
            if entry.name.startswith(_DROPPED) or is_unfinished(entry):
                shutil.rmtree(entry, ignore_errors=True)

    # --- what the node is -----------------------------------------------------------------------------------------

    @property
    def _identity_path(self) -> Path:
        return self._data / "node.json"

    def load_identity(self) -> NodeIdentity | None:
        try:
            return NodeIdentity.decode(self._identity_path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"{self._identity_path} can't be read: {error.strerror}", hint="Check the folder's permissions"
            ) from error

    def store_identity(self, identity: NodeIdentity) -> None:
        try:
            replace_file(self._identity_path, identity.encode())
        except OSError as error:
            kind = StoreFull if error.errno in _NO_ROOM else StoreError
            raise kind(
                f"{self._identity_path} can't be written: {error.strerror}",
                hint="Check the folder's permissions and free space; nothing has changed",
            ) from error

    # --- users ----------------------------------------------------------------------------------------------------

    @property
    def _user_path(self) -> Path:
        return self._data / "users.json"

    def load_users(self) -> Users | None:
        return load_users(self._user_path)

    def store_users(self, users: Users) -> None:
        store_users(self._user_path, users)

    def store_password(self, password: str) -> None:
        """Store the generated password in a file that only its owner can read."""
        descriptor = os.open(self._data / "password", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(password + "\n")

    def forget_password(self) -> None:
        """Remove the stored password, because it was changed."""
        (self._data / "password").unlink(missing_ok=True)


# --- the environment ----------------------------------------------------------------------------------------------

_VBUUID_BYTES = 6
"""Couchbase uses 48 bits, too."""


def _end_process() -> None:
    signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """Clocks, randomness, the folder, and how to end the process. The defaults are those of a real machine."""

    now_ns: Callable[[], int] = time.time_ns
    """The wall clock, in nanoseconds since 1970."""
    now_s: Callable[[], float] = time.monotonic
    """A monotonic clock."""
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    open_folder: Callable[[Path], Folder] = NodeFolder
    end_process: Callable[[], None] = _end_process
    """Called to stop the process when the node can't continue."""
    serves_http: bool = True

    def random_number(self, *, bits: int) -> int:
        return int.from_bytes(self.random_bytes(bits // 8))

    def new_vbuuid(self) -> Vbuuid:
        return Vbuuid(int.from_bytes(self.random_bytes(_VBUUID_BYTES)) | 1)


# --- memory -------------------------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MMAP_FROM_BYTES = 8 * 1024 * 1024
"""Larger buffers belong to single large documents. They go back to the system as soon as they are freed."""
KEEP_BYTES = 128 * 1024 * 1024


def raise_open_files_limit() -> int:
    """Raise the limit of open files to what the system allows, and return it.

    The soft limit is 1,024 on most systems, for programs that use `select`. A node that has reached it can accept no
    connection, not even for a health check.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # for example if a system-wide bound per process is below the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if raised == resource.RLIM_INFINITY else raised


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: the node allocates and frees buffers of some hundred kilobytes all the time.

    By default glibc maps such buffers from the system and returns them immediately. Every page of every buffer is then
    faulted in again, which costs more than filling it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)


def give_back_freed_memory() -> None:
    """Make glibc return all freed memory to the system. Call it when the node is idle after much work."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)
