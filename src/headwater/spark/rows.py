"""How the batches of the client become the columns that Spark sees (`source_schema`)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import VariantVal

from headwater.protocol.datatype import Datatype
from headwater.spark.lake.schemas import split_keys
from headwater.spark.source_options import SourceOptions, ValueForm


class SparkRows:
    """Turns the client's batches into what Spark expects, which is one schema exactly."""

    def __init__(self, options: SourceOptions, arrow_schema: pa.Schema) -> None:
        self._value_form = options.value_form
        self._schema = arrow_schema

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys, key_bytes = split_keys(batch.column("key"))
        columns: dict[str, pa.Array] = {"key": keys, "key_bytes": key_bytes}
        if self._value_form is not ValueForm.BINARY:
            columns["value"], columns["value_bytes"] = self._values(batch)
        return pa.RecordBatch.from_arrays(
            [
                columns[field.name] if field.name in columns else _as_type(batch.column(field.name), field.type)
                for field in self._schema
            ],
            schema=self._schema,
        )

    def _values(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """The values that have the wanted form, and the bytes of those that don't."""
        values = batch.column("value")
        if self._value_form is ValueForm.STRING:
            return split_texts(values)
        is_json = pc.not_equal(pc.bit_wise_and(batch.column("datatype"), int(Datatype.JSON)), 0)
        return _variants(values, is_json, self._schema.field("value").type)


def split_texts(values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Values as text, and the bytes of those that are none."""
    try:
        return values.cast(pa.string()), pa.nulls(len(values), pa.binary())
    except pa.ArrowInvalid:
        texts = [_text_or_none(value) for value in values.to_pylist()]
        text_column = pa.array(texts, pa.string())
        others = pc.if_else(pc.is_null(text_column), values, pa.scalar(None, pa.binary()))
        return text_column, others


def _text_or_none(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _variants(values: pa.Array, is_json: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """Parsed by Spark's own Python code, one value at a time: `parse_json` on text, in SQL, is faster."""
    parsed: list[dict[str, bytes] | None] = []
    others: list[bytes | None] = []
    for value, is_document in zip(values.to_pylist(), is_json.to_pylist(), strict=True):
        variant = _variant_or_none(value) if is_document and value is not None else None
        parsed.append(None if variant is None else {"value": variant.value, "metadata": variant.metadata})
        others.append(value if variant is None else None)
    return pa.array(parsed, wanted), pa.array(others, pa.binary())


def _variant_or_none(value: bytes) -> VariantVal | None:
    try:
        parsed: VariantVal = VariantVal.parseJson(value.decode())
    except Exception:  # whatever the parser of Spark does not like is kept as bytes
        return None
    return parsed


def _as_type(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if column.type == wanted:
        return column
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    if pa.types.is_uint64(column.type):
        return column.view(wanted)
    return column.cast(wanted)
