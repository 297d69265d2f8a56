"""The differences between PySpark versions, from 3.5 to 4.3. No other module checks the version.

| version | what came with it |
|---|---|
| 4.0 | Python data sources, and so `format("dcp")`; VARIANT |
| 4.1 | filters that Spark hands to a source |
| 4.2 | limits and `Trigger.AvailableNow` for Python streams; `latestOffset` is given the start of its batch |

Landings, `verify` and `documents` need none of it. If a version lacks a class, the name is None, or a class that does
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from pyspark.errors import PySparkException
from pyspark.sql.pandas import types as pandas_types
from pyspark.sql.types import StructType

from headwater.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

VERSION = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
HAS_SOURCES, HAS_FILTERS, HAS_LIMITS = VERSION >= (4, 0), VERSION >= (4, 1), VERSION >= (4, 2)

if TYPE_CHECKING or HAS_LIMITS:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:

    class SupportsTriggerAvailableNow:
        """A stream that can end with the data that is available now."""

    ReadAllAvailable = ReadLimit = ReadMaxBytes = ReadMaxRows = None

if TYPE_CHECKING or HAS_SOURCES:
    from pyspark.sql.types import VariantType, VariantVal
else:
    VariantType = VariantVal = None

__all__ = [
    "HAS_FILTERS",
    "HAS_LIMITS",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "VariantType",
    "VariantVal",
    "need_sources",
    "register_source",
    "to_arrow_schema",
]


def need_sources() -> None:
    """Raises `InvalidInput` if this PySpark has no Python data sources."""
    if not HAS_SOURCES:
        raise InvalidInput(
            f'format("dcp") needs PySpark 4.0 or newer, and this is {pyspark.__version__}',
            hint="Install a newer PySpark. Landings, `verify` and `headwater.spark.documents` work with this one",
        )


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a data source with a session. Spark 4.0 refuses a known one, later versions replace it."""
    try:
        spark.dataSource.register(source)
    except PySparkException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """Convert a Spark schema to Arrow's, with times in UTC."""
    zone: dict[str, Any] = {"timezone": "UTC"} if HAS_LIMITS else {}
    return pandas_types.to_arrow_schema(schema, **zone)
