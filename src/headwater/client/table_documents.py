"""Documents from tables: a CSV or a Parquet file, a JSON object for every row.

Rows are counted from 1, a header not counted. A row that can't be used ends the reading, after the documents before it
have been given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headwater.client.exported_form import KEY_MEMBER
from headwater.client.key_template import KeyTemplate
from headwater.client.set_frames import Documents
from headwater.client.table_json import objects_of
from headwater.errors import InvalidDocument, InvalidInput
from headwater.protocol.limits import VALUE_BYTES_MAX

BATCH_ROWS_MAX = 4096
BATCH_BYTES = 4 * 1024 * 1024
"""About: by the mean size of a row."""

COLUMNS_MAX = 10_000
_LINE = re.compile(r"^line (?=\d)")


class Rows(Protocol):
    """The rows of a file as JSON objects, some at a time."""

    @property
    def bytes_read(self) -> int:
        """Of the file, for who shows the progress."""

    def objects(self) -> Iterator[pa.Array]: ...


class TableDocuments:
    """The documents of a table, batch by batch."""

    def __init__(self, rows: Rows, template: KeyTemplate) -> None:
        self._rows = rows
        self._template = template
        self._given = 0

    @property
    def bytes_read(self) -> int:
        return self._rows.bytes_read

    def batches(self) -> Iterator[Documents]:
        """Raises `InvalidDocument` at the first row that can't be used; those before it have been given by then."""
        for texts in self._rows.objects():
            documents, problem = self._documents(texts)
            if len(documents):
                yield documents
            if problem is not None:
                raise problem

    def _documents(self, texts: pa.Array) -> tuple[Documents, InvalidDocument | None]:
        _, offsets, data = texts.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
        content = np.frombuffer(b"" if data is None else data, dtype=np.uint8)
        starts, ends = ends[:-1], ends[1:]
        fit = _fitting(starts, ends)
        numbers = np.arange(self._given + 1, self._given + 1 + fit, dtype=np.int64)
        self._given += len(texts)
        keys, key_ends, problem = self._template.build(content, starts[:fit], ends[:fit], numbers)
        if problem is not None:
            problem = problem.retold(_LINE.sub("row ", problem.reason))
        elif fit < len(texts):
            problem = InvalidDocument(
                f"row {self._given - len(texts) + fit + 1}: the document would be longer than {VALUE_BYTES_MAX} bytes",
                hint="Split it, or leave columns out",
            )
        good = len(key_ends)
        documents = Documents(
            keys=keys, key_ends=key_ends, values=content, value_starts=starts[:good], value_ends=ends[:good]
        )
        return documents, problem


def _fitting(starts: Any, ends: Any) -> int:
    """How many rows there are before the first that is too large for a document."""
    large = np.flatnonzero(ends - starts > VALUE_BYTES_MAX)
    return int(large[0]) if len(large) else len(ends)


def check_columns(names: list[str]) -> None:
    """A document can't have two members of one name."""
    if len(names) > COLUMNS_MAX:
        raise InvalidInput(f"the file has more than {COLUMNS_MAX} columns", hint="Check that it is what you mean")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"the file has two columns {twice!r}", hint="Give each column a name of its own")


class ParquetRows:
    """The rows of a Parquet file. It is read page by page, so that its row groups may be of any size."""

    def __init__(self, file: Any, *, maybe_exported: bool = False) -> None:
        """A file that may be an exported one is, if its first column has the keys."""
        self._file = file
        try:
            self._parquet = pq.ParquetFile(file, buffer_size=1024 * 1024, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(
                f"the file is no Parquet file that can be read: {_first_line(error)}",
                hint="Check the file, or give --format",
            ) from error
        names = self._parquet.schema_arrow.names
        check_columns(names)
        self.is_exported = maybe_exported and names[:1] == [KEY_MEMBER]

    @property
    def bytes_read(self) -> int:
        return int(self._file.tell())

    def objects(self) -> Iterator[pa.Array]:
        given = 0
        try:
            for batch in self._parquet.iter_batches(batch_size=self._batch_rows()):
                yield objects_of(batch, keyed=self.is_exported)
                given += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InvalidDocument(
                f"behind row {given} the file can't be read: {_first_line(error)}", hint="Make the file again"
            ) from error

    def _batch_rows(self) -> int:
        metadata = self._parquet.metadata
        data_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        mean = max(1, int(data_bytes) // max(1, int(metadata.num_rows)))
        return max(1, min(BATCH_ROWS_MAX, BATCH_BYTES // mean))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(". ")
