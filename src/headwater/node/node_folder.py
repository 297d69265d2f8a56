"""What a node takes from the machine it runs on: its data folder, clocks, randomness, and its memory.

    users.json    who may do what (`auth.user_file`)
    password      the generated password of the first user, if there is one
    buckets/NAME  a bucket's engine

All that a node keeps goes through its folder, and all that it asks of the machine through its `NodeEnvironment`: the
simulation gives it others, and the node does not notice. No other module of the node opens a file.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headwater.errors import StoreError
from headwater.node.auth.user_file import load_users, store_users
from headwater.node.auth.users import Users
from headwater.protocol.numbers import Vbuuid
from headwater.store.engine import Engine
from headwater.store.lmdb_engine import LmdbEngine


class Folder(Protocol):
    """What a node asks of its folder."""

    def make(self) -> None: ...

    def bucket_names(self) -> list[str]: ...

    def open_engine(self, bucket: str) -> Engine: ...

    def disk_bytes(self, bucket: str) -> int: ...

    def load_users(self) -> Users | None: ...

    def store_users(self, users: Users) -> None: ...

    def store_password(self, password: str) -> None: ...

    def forget_password(self) -> None: ...


class NodeFolder:
    """A folder on a disk."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def make(self) -> None:
        try:
            self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(
                f"the data folder {self._data} can't be made: {error.strerror}",
                hint="Give another one, or the right to make it",
            ) from error

    # --- buckets --------------------------------------------------------------------------------------------------

    @property
    def _buckets(self) -> Path:
        return self._data / "buckets"

    def bucket_names(self) -> list[str]:
        return sorted(entry.name for entry in self._buckets.iterdir()) if self._buckets.exists() else []

    def open_engine(self, bucket: str) -> Engine:
        return LmdbEngine(self._buckets / bucket)

    def disk_bytes(self, bucket: str) -> int:
        return sum(file.stat().st_blocks * 512 for file in (self._buckets / bucket).iterdir())

    # --- users ----------------------------------------------------------------------------------------------------

    @property
    def _user_path(self) -> Path:
        return self._data / "users.json"

    def load_users(self) -> Users | None:
        return load_users(self._user_path)

    def store_users(self, users: Users) -> None:
        store_users(self._user_path, users)

    def store_password(self, password: str) -> None:
        """Keep the generated password where only its owner can read it."""
        descriptor = os.open(self._data / "password", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(password + "\n")

    def forget_password(self) -> None:
        """The password that was generated is another one by now."""
        (self._data / "password").unlink(missing_ok=True)


# --- the environment ----------------------------------------------------------------------------------------------

_VBUUID_BYTES = 6
"""Real servers use 48 bits, too."""


def _end_process() -> None:
    signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """Clocks, randomness, a folder, and what becomes of the node when it fails. The defaults are a real machine."""

    now_ns: Callable[[], int] = time.time_ns
    """The time of day."""
    now_s: Callable[[], float] = time.monotonic
    """A clock that never goes back."""
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    open_folder: Callable[[Path], Folder] = NodeFolder
    end_process: Callable[[], None] = _end_process
    """Called when the node can't go on, to have it stopped."""
    serves_http: bool = True

    def random_number(self, *, bits: int) -> int:
        return int.from_bytes(self.random_bytes(bits // 8))

    def new_vbuuid(self) -> Vbuuid:
        return Vbuuid(int.from_bytes(self.random_bytes(_VBUUID_BYTES)) | 1)


# --- memory -------------------------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MMAP_FROM_BYTES = 32 * 1024 * 1024
"""glibc's own upper bound for it."""
KEEP_BYTES = 128 * 1024 * 1024


def keep_freed_memory() -> None:
    """Have glibc keep freed memory: the node makes and drops buffers of some hundred kilobytes all the time.

    By default glibc takes such buffers from the system and gives them back at once. Every page of every buffer is then
    faulted in again, which costs more than filling it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
