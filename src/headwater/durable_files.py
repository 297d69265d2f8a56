"""Files that are replaced as a whole: a reader, or a crash at any moment, finds the old content or the new one.

The lowest layer, next to `errors`. Used by what keeps a small file on the local disk: checkpoints, users, notes of a
node, offsets of `headwater tail`, exported files. It raises `OSError` as it comes: the caller knows what the file is
and what to say. It must never leave a half-written file under the name that is read.
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
"""What a file system that has no hard links answers."""


def replace_file(path: Path, data: bytes, *, is_private: bool = False, unfinished: Path | None = None) -> None:
    """Replace a file, or make it. When this returns, the content survives a power cut; if it raises, the old file is
    as it was.

    The content is written to `unfinished` first, which is a new name for each call by default. A caller that is the
    only writer gives a fixed name, so that what a crash leaves behind is removed by the next call. A file that
    `is_private` can be read by its owner alone, whatever the umask.
    """
    unfinished = unfinished or path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished)
    try:
        _write_durably(unfinished, data, is_private=is_private)
        os.replace(unfinished, path)
    except BaseException:
        # It would do no harm, and it would take up room that may be missing already.
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    sync_folder(path.parent)


def create_file(path: Path, data: bytes) -> None:
    """Make a file that is not there, whole and durably. Raises `FileExistsError` where it is: of several writers of
    one name, one succeeds."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_durably(unfinished, data)
        try:
            os.link(unfinished, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without links: of two writers one succeeds here as well, but a crash leaves half a file.
            _write_durably(path, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
    sync_folder(path.parent)


def _write_durably(path: Path, data: bytes, *, is_private: bool = False) -> None:
    # Always a new file: in a folder that others can write to, a link may lie in wait under this name.
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
        # A file system that can't do this for folders says so in this way, and has no better one.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(number)
