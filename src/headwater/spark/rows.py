"""Converts the client's batches to rows for Spark: changes, or documents with `mode=documents`.

Documents are the live documents of a bucket, one row each, with their fields as typed columns.

DCP sends changes. A key appears once per snapshot, but a vbucket may have several snapshots, and removals come as
deletions. So a task keeps the changes of a vbucket until all have arrived, takes the newest of each key, and drops
removals. To limit memory, it reads a few vbuckets at a time.

The columns are `scope`, `collection`, `key` and `document`, the text of a JSON document; every other column is a field
of the documents, with the type in the schema. A field that is missing, or has a value of another type, is null, by the
rules of the typed columns of a lake (`headwater.lake.typed_columns`). Without a schema, types are inferred from the
fields of some documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from headwater.client.batches import OPS
from headwater.client.blocking_client import Client
from headwater.client.changes import split_keys
from headwater.client.read_options import End
from headwater.errors import InvalidInput
from headwater.lake.change_files import COLLECTION_GONE_OPS
from headwater.lake.layout import split_texts, split_values
from headwater.lake.typed_columns import TypedColumns
from headwater.lake.variants import VARIANT, WORD_DIGITS, encode_texts
from headwater.landing.bucket_watch import PlannedBucket
from headwater.landing.planning import VBucketRange
from headwater.landing.source_options import DOCUMENT_COLUMNS, Conditions, SourceOptions, ValueForm
from headwater.landing.tasks import ShareReading, rows_chosen, rows_meeting
from headwater.protocol.values import Datatype
from headwater.spark.versions import VariantVal, to_arrow_schema

HELD_CHANGES_MAX = 100_000
"""How many changes a task reads before it returns their documents; at least those of one vbucket."""
_HELD = ["vbucket", "seqno", "op", "scope", "collection", "collection_id", "key", "value", "datatype"]
SAMPLE_DOCUMENTS = 2_000
"""How many documents are sampled to infer the fields."""
SAMPLE_CHANGES_MAX = 50_000
"""How many changes are read for the sample at most, if conditions exclude most of them."""


def inferred_schema(options: SourceOptions) -> StructType:
    """Return the columns that the options name, or all, inferred from some documents."""
    plain = [StructField(name, StringType()) for name in DOCUMENT_COLUMNS]
    fields = {field.name: field for field in plain}
    if not options.columns or not fields.keys() >= {*options.columns}:
        inferred = TypedColumns(is_inferred=True)
        found = inferred.extended(inferred.parse(_sample(options), discovers=True).wanted)
        fields |= {field.name: field for field in from_arrow_schema(found.schema) if field.name not in DOCUMENT_COLUMNS}
    for name in options.columns:
        if name not in fields:
            raise InvalidInput(
                f"none of the sampled documents has a field {name!r}",
                hint="Check its name, or give a schema with its type",
            )
    return StructType([fields[name] for name in options.columns] or [*fields.values()])


def _sample(options: SourceOptions) -> pa.Array:
    with Client(options.settings) as client:
        batches = client.read(replace(options.read, end=End.NOW, no_value=False))
        try:
            texts: list[str] = []
            looked_at = 0
            for batch in batches:
                rows = pa.table(rows_chosen(batch, options))
                texts += [text for text in _texts(rows).to_pylist() if text is not None]
                looked_at += batch.num_rows
                if len(texts) >= SAMPLE_DOCUMENTS or looked_at >= SAMPLE_CHANGES_MAX:
                    break
            return pa.array(texts[:SAMPLE_DOCUMENTS], pa.string())
        finally:
            batches.close()


def _texts(rows: pa.Table) -> pa.ChunkedArray:
    """Return the JSON documents; null for all others."""
    texts, _ = split_values(rows.column("value"), np.asarray(rows.column("datatype").to_numpy()))
    return texts


def typed_columns_of(schema: StructType) -> TypedColumns | None:
    """Return the columns of a schema that are fields of documents. Raises `InvalidInput` for an invalid schema."""
    for field in schema:
        if field.name in DOCUMENT_COLUMNS and field.dataType != StringType():
            raise InvalidInput(
                f"the column {field.name} is a string, and the schema has it as {field.dataType.simpleString()}",
                hint="Use STRING. To read a field of the documents with this name, use `document`",
            )
    ddl = ", ".join(
        f"`{field.name.replace('`', '``')}` {field.dataType.simpleString()}"
        for field in schema
        if field.name not in DOCUMENT_COLUMNS
    )
    return TypedColumns.from_ddl(ddl) if ddl else None


class DocumentRows:
    """The rows of one task."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = to_arrow_schema(schema)
        self._typed = typed_columns_of(schema)

    def read(self, ranges: Sequence[VBucketRange], bucket: PlannedBucket) -> Iterator[pa.RecordBatch]:
        # Apply conditions last: they must not hide the removal of a document.
        options = replace(self._options, where=Conditions())
        held = [*_HELD, *(name for name in sorted(self._options.where.columns) if name not in _HELD)]
        for part in _parts(ranges):
            reading = ShareReading(options=options, bucket=bucket, ranges=part, fails_on_rollback=True)
            batches = [batch.select(held) for batch in reading]
            if batches:
                for batch in live_documents(pa.Table.from_batches(batches)).to_batches():
                    yield self._convert(rows_meeting(batch, self._options.where))

    def _convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns: dict[str, pa.Array | pa.ChunkedArray] = {"key": split_keys(batch.column("key"))[0]}
        for name in ("scope", "collection"):
            columns[name] = batch.column(name).cast(pa.string())
        if "document" in self._schema.names or self._typed is not None:
            columns["document"] = _texts(pa.table(batch))
        if self._typed is not None:
            columns |= self._typed.parse(columns["document"]).columns
        table = pa.table([columns[field.name].cast(field.type) for field in self._schema], schema=self._schema)
        return table.combine_chunks().to_batches()[0] if table.num_rows else self._schema.empty_table().to_batches()[0]


def _parts(ranges: Sequence[VBucketRange]) -> Iterator[tuple[VBucketRange, ...]]:
    part: list[VBucketRange] = []
    changes = 0
    for it in ranges:
        if part and changes + it.changes > HELD_CHANGES_MAX:
            yield tuple(part)
            part, changes = [], 0
        part.append(it)
        changes += it.changes
    if part:
        yield tuple(part)


def live_documents(changes: pa.Table) -> pa.Table:
    """Return the documents that all changes of some vbuckets, in order, leave behind."""
    ops = changes.unify_dictionaries().column("op").combine_chunks()
    is_of = {op: pc.equal(ops, op) for op in (*OPS[:3], *COLLECTION_GONE_OPS)}
    is_document = pc.or_(pc.or_(is_of["mutation"], is_of["deletion"]), is_of["expiration"])
    rows = pa.table(
        {
            "id": changes.column("collection_id"),
            "key": changes.column("key"),
            "row": pa.array(np.arange(changes.num_rows)),
        }
    ).filter(is_document)
    newest = rows.group_by(["id", "key"], use_threads=False).aggregate([("row", "max")]).column("row_max")
    newest = newest.filter(is_of["mutation"].take(newest))
    found = changes if len(newest) == changes.num_rows else changes.take(newest.take(pc.sort_indices(newest)))
    for gone in changes.filter(pc.or_(*(is_of[op] for op in COLLECTION_GONE_OPS))).to_pylist():
        is_gone = pc.and_(
            pc.and_(pc.equal(found["collection_id"], gone["collection_id"]), pc.less(found["seqno"], gone["seqno"])),
            pc.equal(found["vbucket"], gone["vbucket"]),
        )
        found = found.filter(pc.invert(is_gone))
    return found


# --- changes ----------------------------------------------------------------------------------------------------------


class SparkRows:
    """Converts the client's batches to exactly the schema that Spark expects."""

    def __init__(self, options: SourceOptions, arrow_schema: pa.Schema) -> None:
        self._value_form = options.value_form
        self._schema = arrow_schema

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {}
        if self._has("key", "key_bytes"):
            columns["key"], columns["key_bytes"] = split_keys(batch.column("key"))
        if self._value_form is not ValueForm.BINARY and self._has("value", "value_bytes"):
            columns["value"], columns["value_bytes"] = self._values(batch)
        return pa.RecordBatch.from_arrays(
            [
                columns[field.name] if field.name in columns else _as_type(batch.column(field.name), field.type)
                for field in self._schema
            ],
            schema=self._schema,
        )

    def _has(self, *names: str) -> bool:
        return any(name in self._schema.names for name in names)

    def _values(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Return the values in the requested form, and the bytes of those that don't have it."""
        values = batch.column("value")
        if self._value_form is ValueForm.STRING:
            return split_texts(values)
        is_json = pc.not_equal(pc.bit_wise_and(batch.column("datatype"), int(Datatype.JSON)), 0)
        return parse_variants(values, is_json)


_VARIANT_FIELDS = [
    pa.field("value", pa.binary(), nullable=False),
    pa.field("metadata", pa.binary(), nullable=False, metadata={"variant": "true"}),
]


def parse_variants(texts: pa.Array, is_document: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Parse the marked JSON texts of a binary column to variants. Returns these, and the bytes of all others."""
    wanted = pc.and_(is_document, texts.is_valid()).to_numpy(zero_copy_only=False)
    values, dictionaries, is_parsed = encode_texts(texts, wanted, WORD_DIGITS)
    left = np.flatnonzero(wanted & ~is_parsed).tolist()
    by_spark = [(row, *parsed) for row in left if (parsed := _parse_by_spark(texts[row].as_py())) is not None]
    if by_spark:
        rows, their_values, their_dictionaries = zip(*by_spark, strict=True)
        is_theirs = np.zeros(len(texts), dtype=np.bool_)
        is_theirs[[*rows]] = True
        is_parsed |= is_theirs
        values = pc.replace_with_mask(values, pa.array(is_theirs), pa.array(their_values, pa.binary()))
        dictionaries = pc.replace_with_mask(
            dictionaries, pa.array(is_theirs), pa.array(their_dictionaries, pa.binary())
        )
    variants = pa.StructArray.from_arrays([values, dictionaries], fields=_VARIANT_FIELDS, mask=pa.array(~is_parsed))
    if is_parsed.all():
        return variants, pa.nulls(len(texts), pa.binary())
    return variants, pc.if_else(pa.array(is_parsed), pa.scalar(None, texts.type), texts)


def as_spark_variants(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert the variants of a table of documents to Spark's Arrow form, which has its own order of the parts."""
    at = batch.schema.get_field_index("document")
    if VariantVal is None or at < 0 or batch.schema.field(at).type != VARIANT:
        return batch
    column = batch.column(at)
    dictionaries, values = (column.field(name) for name in ("metadata", "value"))
    variants = pa.StructArray.from_arrays([values, dictionaries], fields=_VARIANT_FIELDS, mask=column.is_null())
    return batch.set_column(at, "document", variants)


def _parse_by_spark(text: bytes) -> tuple[bytes, bytes] | None:
    try:
        parsed = VariantVal.parseJson(text.decode())
    except Exception:  # text that Spark's parser rejects stays as bytes
        return None
    return parsed.value, parsed.metadata


def _as_type(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if column.type == wanted:
        return column
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    if pa.types.is_uint64(column.type):
        return column.view(wanted)
    return column.cast(wanted)
