"""Where a reader keeps its offsets: what it asks of any store, and the store that is a file.

A save writes a new file beside the old one, brings it to the disk, gives it the old one's name, and brings the folder
to the disk. A rename is whole or has not happened, so a process that looks, or is killed, at any moment finds the old
offsets or the new ones. What a killed process leaves behind is a temporary file that is never read, and that the next
save replaces.

Beside the checkpoint lies a file that is locked while a reader uses it. The system releases the lock when the process
ends, however it ends, so there is nothing to clean up. It must be a file of its own: the checkpoint itself is another
file after every save. A checkpoint that can't be read must never be taken for one that is missing.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import weakref
from pathlib import Path
from typing import Protocol

from headwater.client.offsets import TEXT_CHARS_MAX, Offsets
from headwater.client.options import names_keywords
from headwater.durable_files import replace_file
from headwater.errors import CheckpointFailed, CheckpointInUse, InvalidOffsets, OffsetsTooNew


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
        hint=f"Bring it back from a backup; to read from the beginning, {to_start_over}",
    )


_MODE = 0o666
"""Less what the user's umask takes away, as for any file. There is nothing secret in it."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@names_keywords
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
                    hint="Check that it is a file that the user of this process may read",
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
            f"there is no folder {path.parent} to keep a checkpoint in", hint="Make the folder, or check the path"
        ) from error
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise CheckpointInUse(
                f"another reader uses the checkpoint {path}", hint="Stop it, or give this one a file of its own"
            ) from error
        raise CheckpointFailed(
            f"the checkpoint {path} can't be locked: {error.strerror}", hint="Use a folder on a disk of this machine"
        ) from error
    return number


# --- what went wrong ----------------------------------------------------------------------------------------------


def _not_written(path: Path, error: OSError) -> CheckpointFailed:
    is_full = error.errno in _NO_ROOM
    hint = "Free disk space" if is_full else f"Check that files can be made and replaced in {path.parent}"
    return CheckpointFailed(
        f"the checkpoint {path} can't be written: {error.strerror}",
        hint=f"{hint}; what was saved before is as it was",
    )
