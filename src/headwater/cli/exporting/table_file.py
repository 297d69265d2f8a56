"""Documents in columns: CSV and Parquet files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from headwater.cli.exporting.column_survey import ColumnSurvey
from headwater.cli.exporting.json_lines_file import are_json
from headwater.cli.exporting.left_out import LeftOut
from headwater.cli.exporting.spool import key_texts
from headwater.client.exported_form import KEY_MEMBER
from headwater.client.table_json import JSON_TEXT
from headwater.spark.lake.typed_columns import TypedColumns

_TEXT = pa.large_string()


def survey(batches: Iterable[pa.RecordBatch]) -> ColumnSurvey:
    """Look at all documents for the columns they make."""
    found = ColumnSurvey()
    for batch in batches:
        good = pa.array(are_json(batch))
        texts = batch.column("value").filter(good).cast(_TEXT)
        texts = texts.filter(pc.match_substring_regex(texts, r"^\s*\{"))
        if len(texts):
            found.note(texts)
    return found


class TableFile:
    """Writes batches of live documents to a CSV or a Parquet file."""

    def __init__(
        self,
        file: BinaryIO,
        left_out: LeftOut,
        columns: TypedColumns | None,
        *,
        nested: Collection[str],
        with_key: bool,
        is_parquet: bool,
    ) -> None:
        """`nested` are columns of JSON text, which a Parquet file tells from others."""
        self._left_out = left_out
        self._columns = columns
        self._with_key = with_key
        fields = [pa.field(KEY_MEMBER, pa.string(), nullable=False)] if with_key else []
        for field in columns.schema if columns is not None else ():
            fields.append(field.with_metadata(JSON_TEXT) if field.name in nested else field)
        self._schema = pa.schema(fields)
        self._writer: Any = (
            pq.ParquetWriter(file, self._schema, compression="zstd")
            if is_parquet
            else pa_csv.CSVWriter(file, self._schema)
        )

    def write(self, batch: pa.RecordBatch) -> int:
        """Returns how many documents were put in."""
        if self._with_key:
            _, are_texts = key_texts(batch.column("key"))
            batch = self._only(batch, are_texts, "the key is not UTF-8")
        batch = self._only(batch, pa.array(are_json(batch)), "it is not JSON")
        texts = batch.column("value").cast(pa.string())
        is_object = pc.match_substring_regex(texts, r"^\s*\{")
        batch, texts = self._only(batch, is_object, "it is JSON, but no object"), texts.filter(is_object)
        columns: dict[str, Any] = {}
        if self._columns is not None:
            parsed = self._columns.parse(texts)
            columns = dict(parsed.columns)
            self._note_misfits(batch, parsed.reasons)
            fits = pc.is_null(parsed.reasons)
            batch = batch.filter(fits.combine_chunks())
            columns = {name: column.filter(fits) for name, column in columns.items()}
        if self._with_key:
            columns[KEY_MEMBER] = batch.column("key").cast(pa.string())
        table = pa.table([columns[name] for name in self._schema.names], schema=self._schema)
        self._writer.write_table(table)
        return int(batch.num_rows)

    def end(self) -> None:
        self._writer.close()

    def _only(self, batch: pa.RecordBatch, good: pa.Array, reason: str) -> pa.RecordBatch:
        if pc.all(good).as_py() is not False:
            return batch
        self._left_out.note(reason, batch.column("key").filter(pc.invert(good)))
        return batch.filter(good)

    def _note_misfits(self, batch: pa.RecordBatch, reasons: pa.ChunkedArray) -> None:
        for reason in pc.unique(pc.drop_null(reasons)).to_pylist():
            marks = pc.fill_null(pc.equal(reasons, reason), False).combine_chunks()
            self._left_out.note(reason, batch.column("key").filter(marks))
