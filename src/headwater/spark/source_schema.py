"""The columns that Spark sees.

Spark has no unsigned integers: what may exceed 63 bits (vbuuids, and by their type seqnos, revisions and CAS) keeps its
64 bits and is read as signed.
"""

from __future__ import annotations

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from headwater.spark.source_options import SourceOptions, ValueForm

_VALUE_TYPES: dict[ValueForm, DataType] = {
    ValueForm.BINARY: BinaryType(),
    ValueForm.STRING: StringType(),
    ValueForm.VARIANT: VariantType(),
}


def spark_schema(options: SourceOptions) -> StructType:
    fields = [
        StructField("vbucket", IntegerType(), nullable=False),
        StructField("vbuuid", LongType(), nullable=False),
        StructField("seqno", LongType(), nullable=False),
        StructField("rev", LongType(), nullable=False),
        StructField("op", StringType(), nullable=False),
        StructField("scope", StringType()),
        StructField("collection", StringType()),
        StructField("collection_id", LongType()),
        StructField("key", StringType()),
        StructField("key_bytes", BinaryType()),
        StructField("value", _VALUE_TYPES[options.value_form]),
        StructField("datatype", ShortType(), nullable=False),
        StructField("flags", LongType(), nullable=False),
        StructField("expiry", LongType(), nullable=False),
        StructField("cas", LongType(), nullable=False),
        StructField("changed_at", TimestampType()),
        StructField("snapshot_start", LongType(), nullable=False),
        StructField("snapshot_end", LongType(), nullable=False),
    ]
    if options.value_form is not ValueForm.BINARY:
        fields.append(StructField("value_bytes", BinaryType()))
    if options.read.xattrs:
        fields.append(StructField("xattrs", MapType(StringType(), BinaryType())))
    return StructType(fields)
