"""The input of `headwater load`: a file, standard input, or a folder with one file per collection.

`open_source` returns the documents of a file of any format, in batches for the loader. A file that `headwater
export` has written is recognized by its first bytes.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from headwater.errors import InvalidInput
from headwater.transfer.key_template import KeyTemplate

if TYPE_CHECKING:
    from headwater.transfer.json_lines import ByteReader, ExportedDocuments, JsonLines
    from headwater.transfer.tables import CsvRows, ParquetRows, TableDocuments

    FileSource = JsonLines | TableDocuments | ExportedDocuments

KEY_TEMPLATE = "doc::{#}"
"""The default for files that are not exports."""

_PARQUET_MAGIC = b"PAR1"
_TAB = "\t"
_LOOK_BYTES = 256
"""How many bytes of a file, besides white space, are checked for the start of an export."""


class FileFormat(StrEnum):
    """The format of a file with documents."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


BY_ENDING = {
    ".jsonl": FileFormat.JSONL,
    ".csv": FileFormat.CSV,
    ".tsv": FileFormat.CSV,
    ".parquet": FileFormat.PARQUET,
}


def open_source(
    file: io.BufferedReader,
    template: KeyTemplate | None,
    *,
    format_: FileFormat | None,
    delimiter: str | None,
    texts: Sequence[str],
    expiry: int | None = None,
) -> FileSource:
    """Return the documents of a file. Its format is `format_`, or that of its extension or first bytes.

    Without a key template, a file that `headwater export` has written is recognized by its first bytes, and its
    documents are restored as they were; `expiry` replaces theirs.
    """
    # Arrow's functions, CSV and Parquet take long to import, and generated documents need none of them.
    from headwater.transfer.json_lines import NUMBERED, ExportedDocuments, JsonLines, begins_an_export

    format_ = format_ or _format_of(file)
    if format_ is not FileFormat.CSV and (delimiter is not None or texts):
        raise InvalidInput(f"--delimiter and --text are for CSV, and this is {format_}", hint="Leave them out")
    otherwise = template or KeyTemplate.parse(KEY_TEMPLATE)
    if format_ is FileFormat.JSONL:
        if template is not None:
            return JsonLines(file, template)
        replayed = _Replayed(file)
        if begins_an_export(replayed.start):
            return ExportedDocuments(JsonLines(replayed, NUMBERED), unit="line", expiry=expiry)
        return JsonLines(replayed, otherwise)
    from headwater.transfer.tables import TableDocuments

    rows = _rows(file, format_, delimiter=delimiter, texts=texts, maybe_exported=template is None)
    if rows.is_exported:
        return ExportedDocuments(TableDocuments(rows, NUMBERED), unit="row", expiry=expiry)
    return TableDocuments(rows, otherwise)


def _rows(
    file: io.BufferedReader,
    format_: FileFormat,
    *,
    delimiter: str | None,
    texts: Sequence[str],
    maybe_exported: bool,
) -> CsvRows | ParquetRows:
    from headwater.transfer.tables import CsvRows, ParquetRows

    if format_ is FileFormat.CSV:
        if delimiter is None:
            delimiter = _TAB if _ending(file) == ".tsv" else ","
        return CsvRows(file, delimiter=delimiter, texts=texts, maybe_exported=maybe_exported)
    if not file.seekable():
        raise InvalidInput("Parquet can't be read from a pipe", hint="Give the file itself: the index is at its end")
    return ParquetRows(file, maybe_exported=maybe_exported)


def _format_of(file: io.BufferedReader) -> FileFormat:
    by_ending = BY_ENDING.get(_ending(file))
    if by_ending is not None:
        return by_ending
    peek = getattr(file, "peek", None)
    if peek is not None and file.seekable() and peek(len(_PARQUET_MAGIC)).startswith(_PARQUET_MAGIC):
        return FileFormat.PARQUET
    return FileFormat.JSONL


def _ending(file: io.BufferedReader) -> str:
    return PurePath(str(getattr(file, "name", ""))).suffix.lower()


class _Replayed:
    """A file whose beginning was already read: a pipe can be read only once."""

    def __init__(self, file: ByteReader) -> None:
        self._file = file
        self.start = b""
        while len(self.start.lstrip()) < _LOOK_BYTES and b"\n" not in self.start.lstrip():
            more = file.read1(_LOOK_BYTES)
            if not more:
                break
            self.start += more
        self._rest = self.start

    def read1(self, size: int, /) -> bytes:
        if not self._rest:
            return self._file.read1(size)
        given, self._rest = self._rest[:size], self._rest[size:]
        return given


_HINT = "Give the folder that `headwater export` has written, or a file"


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """An open file, and the collections to distribute its documents over; if empty, the default collection."""

    file: io.BufferedReader
    collections: tuple[str, ...]
    path: Path | None = None
    """The path, if it is one of several files."""

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Name the file in an error, if there are several."""
        try:
            yield
        except InvalidInput as error:
            if self.path is None:
                raise
            raise error.reworded(f"{self.path}: {error.reason}") from error

    @property
    def size_bytes(self) -> int | None:
        """The size of a regular file; None for a pipe."""
        try:
            status = os.fstat(self.file.fileno())
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None


def files_in(folder: Path, format_: FileFormat | None) -> dict[str, Path]:
    """Return the files in an export's folder by collection: `SCOPE.COLLECTION.jsonl`. `format_` selects one format."""
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
    """Open the files, one at a time."""
    for collection, path in files.items():
        with path.open("rb") as file:
            yield LoadedFile(file, (collection,), path)
