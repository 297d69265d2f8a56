"""Where `headwater load` takes its documents from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from enum import StrEnum
from pathlib import PurePath

from headwater.client.csv_rows import CsvRows
from headwater.client.json_lines import JsonLines
from headwater.client.key_template import KeyTemplate
from headwater.client.table_documents import ParquetRows, TableDocuments
from headwater.errors import InvalidInput

_PARQUET_MAGIC = b"PAR1"
_TAB = "\t"


class FileFormat(StrEnum):
    """Of a file with documents."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


_BY_ENDING = {
    ".csv": FileFormat.CSV,
    ".tsv": FileFormat.CSV,
    ".parquet": FileFormat.PARQUET,
}

FileSource = JsonLines | TableDocuments


def open_source(
    file: io.BufferedReader,
    template: KeyTemplate,
    *,
    format_: FileFormat | None,
    delimiter: str | None,
    texts: Sequence[str],
) -> FileSource:
    """The documents of a file. Its format is told by the end of its name, or by its first bytes, unless it is given."""
    format_ = format_ or _format_of(file)
    if format_ is not FileFormat.CSV and (delimiter is not None or texts):
        raise InvalidInput(f"--delimiter and --text are for CSV, and this is {format_}", hint="Leave them out")
    match format_:
        case FileFormat.JSONL:
            return JsonLines(file, template)
        case FileFormat.CSV:
            if delimiter is None:
                delimiter = _TAB if _ending(file) == ".tsv" else ","
            return TableDocuments(CsvRows(file, delimiter=delimiter, texts=texts), template)
        case FileFormat.PARQUET:
            if not file.seekable():
                raise InvalidInput(
                    "Parquet can't be read from a pipe", hint="Give the file itself: it ends in its index"
                )
            return TableDocuments(ParquetRows(file), template)


def _format_of(file: io.BufferedReader) -> FileFormat:
    by_ending = _BY_ENDING.get(_ending(file))
    if by_ending is not None:
        return by_ending
    peek = getattr(file, "peek", None)
    if peek is not None and file.seekable() and peek(len(_PARQUET_MAGIC)).startswith(_PARQUET_MAGIC):
        return FileFormat.PARQUET
    return FileFormat.JSONL


def _ending(file: io.BufferedReader) -> str:
    return PurePath(str(getattr(file, "name", ""))).suffix.lower()
