"""Files that are replaced as a whole: a reader, or a crash at any moment, finds the old content or the new one.

The lowest layer, next to `errors`. It writes small files on the local disk: checkpoints, users, a node's notes, offsets
of `headwater tail`, exported files. It lets every `OSError` pass: the caller knows what the file is for and what to
report. The name that is read must never belong to a half-written file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_PRIVATE, _ANY = 0o600, 0o666
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
"""The errors of a file system that has no hard links."""


def replace_file(path: Path, data: bytes, *, is_private: bool = False, unfinished: Path | None = None) -> None:
    """Replace or create a file. Once this returns, the content survives a power cut. If writing fails, the old file is
    unchanged.

    The content is first written to `unfinished`, by default a new name for each call. A caller that is the only writer
    passes a fixed name, so that the next call removes what a crash leaves behind. Only the owner can read a file that
    `is_private`, whatever the umask.
    """
    unfinished = unfinished or path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished)
    try:
        _write_durably(unfinished, data, is_private=is_private)
        os.replace(unfinished, path)
    except BaseException:
        # The unfinished file does no harm, but takes up space that may already be short.
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    sync_folder(path.parent)


def create_file(path: Path, data: bytes) -> None:
    """Create a file, whole and durable. Raises `FileExistsError` if it exists: if several processes write the same
    name, one succeeds."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_durably(unfinished, data)
        try:
            os.link(unfinished, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without links: here too only one of two writers succeeds, but a crash leaves half a file.
            _write_durably(path, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
    sync_folder(path.parent)


def _write_durably(path: Path, data: bytes, *, is_private: bool = False) -> None:
    # Always create a new file: in a folder that others can write to, a link may be planted under this name.
    with os.fdopen(os.open(path, _NEW_FILE, _PRIVATE if is_private else _ANY), "wb") as file:
        if is_private:
            os.fchmod(file.fileno(), _PRIVATE)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        # This is how a file system reports that it can't sync folders. It offers nothing better.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(number)
