"""What `headwater load` is given: a file, standard input, or a folder with a file for each collection."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headwater.cli.loading.sources import BY_ENDING, FileFormat
from headwater.errors import InvalidInput

_HINT = "Give the folder that `headwater export` has written, or a file"


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """An open file, and the collections that its documents are dealt out over; none for the default one."""

    file: io.BufferedReader
    collections: tuple[str, ...]
    path: Path | None = None
    """Where it is one of several."""

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Say which of several files an error is about."""
        try:
            yield
        except InvalidInput as error:
            if self.path is None:
                raise
            raise error.retold(f"{self.path}: {error.reason}") from error

    @property
    def size_bytes(self) -> int | None:
        """The size of a regular file; None for a pipe."""
        try:
            status = os.fstat(self.file.fileno())
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None


class FileOrFolder(click.File):
    """An open file, or the path of a folder."""

    name = "file"

    def __init__(self) -> None:
        super().__init__("rb")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value != "-" and Path(value).is_dir():
            return Path(value)
        return super().convert(value, param, ctx)


def files_in(folder: Path, format_: FileFormat | None) -> dict[str, Path]:
    """The files that an export has put there by collection, of one format if told: `SCOPE.COLLECTION.jsonl`."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        kind = BY_ENDING.get(path.suffix.lower())
        if path.name.startswith(".") or (format_ is not None and kind is not format_):
            continue
        if kind is None or path.stem.count(".") != 1 or not path.is_file():
            raise InvalidInput(f"{path} is not called as the file of a collection", hint=_HINT)
        if path.stem in found:
            raise InvalidInput(
                f"{folder} has two files of {path.stem}, {found[path.stem].name} and {path.name}",
                hint="Choose with --format",
            )
        found[path.stem] = path
    if not found:
        raise InvalidInput(f"there is no file of a collection in {folder}", hint=_HINT)
    return found


def opened(files: dict[str, Path]) -> Iterator[LoadedFile]:
    """One at a time."""
    for collection, path in files.items():
        with path.open("rb") as file:
            yield LoadedFile(file, (collection,), path)
