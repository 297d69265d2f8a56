"""Files that appear when they are whole: written under another name, brought to the disk, and renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from headwater.errors import InvalidInput, StoreFull

SUFFIXES = (".jsonl", ".csv", ".parquet")


class OutputFiles:
    """A folder for what is being written, next to where it belongs. It is gone in the end, whatever happens."""

    def __init__(self, into: Path, *, overwrite: bool) -> None:
        self.is_file = into.is_file() or (into.suffix.lower() in SUFFIXES and not into.is_dir())
        self._into = into
        self._overwrite = overwrite
        self._target = into.parent if self.is_file else into
        self._work: Path | None = None
        self._whole: list[tuple[Path, Path]] = []

    def __enter__(self) -> Self:
        if self.is_file:
            self._check(self._into)
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            self._work = Path(tempfile.mkdtemp(prefix=".headwater-export-", dir=self._target))
        except OSError as error:
            raise InvalidInput(
                f"{self._target} can't be written to: {error.strerror}", hint="Check the path and the rights"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)

    @property
    def work(self) -> Path:
        assert self._work is not None
        return self._work

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A new file, called `name` in a directory. It is at its place after `publish`."""
        place = self._into if self.is_file else self._into / name
        self._check(place)
        path = self.work / f"new-{len(self._whole)}"
        try:
            with path.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreFull(
                f"{place} can't be written: {error.strerror or error}", hint="Check the disk and the space on it"
            ) from error
        self._whole.append((path, place))

    def publish(self) -> list[Path]:
        """Put all files where they belong."""
        for path, place in self._whole:
            path.replace(place)
        with contextlib.suppress(OSError):
            folder = os.open(self._target, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return [place for _, place in self._whole]

    def _check(self, place: Path) -> None:
        if place.exists() and not self._overwrite:
            raise InvalidInput(f"{place} is there already", hint="Give another place, or --overwrite")
