"""Spark: the `dcp` data source, and the pipeline that lands a bucket in Delta tables.

from headwater import spark as headwater_spark

headwater_spark.register(spark)
spark.readStream.format("dcp").option("url", "couchbase://host/bucket").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["land", "register"]


def register(spark: SparkSession) -> None:
    """Make `format("dcp")` known to a session, and give its executors the compiled kernels.

    Where the package is installed Spark finds the source by itself; an executor that is new then compiles in its first
    task, and a server of Spark Connect shows the option `password` in its pages.
    """
    from headwater.spark.connect_session import hide_password
    from headwater.spark.shipped_kernels import ship_kernels
    from headwater.spark.source import DcpDataSource

    spark.dataSource.register(DcpDataSource)
    ship_kernels(spark)
    hide_password(spark)


def land(spark: SparkSession, url: str, into: str, **options: Any) -> StreamingQuery:
    """Land a bucket in Delta tables: `land(spark, "couchbase://host/bucket", "/lake", user=…, password=…)`.

    The options are those of `headwater.spark.landing.land`. Returns the running query.
    """
    from headwater.spark import landing

    return landing.land(spark, url, into, **options)
