"""Spark: the `dcp` data source, and the pipeline that lands a bucket in Delta tables.

from headwater import spark as headwater_spark

headwater_spark.register(spark)
spark.readStream.format("dcp").option("url", "couchbase://host/bucket").load()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.spark.frames import Apply
    from headwater.spark.landing import LandingQuery
    from headwater.spark.verification import Verification

__all__ = ["apply_changes", "documents", "land", "register", "verify"]


def register(spark: SparkSession) -> None:
    """Make `format("dcp")` known to a session, and give its executors the compiled kernels.

    Where the package is installed Spark finds the source by itself; an executor that is new then compiles in its first
    task, and a server of Spark Connect shows the option `password` in its pages.
    """
    from headwater.spark.executors import ship_kernels
    from headwater.spark.session import hide_password
    from headwater.spark.source import DcpDataSource

    spark.dataSource.register(DcpDataSource)
    ship_kernels(spark)
    hide_password(spark)


def land(spark: SparkSession, url: str, into: str, **options: Any) -> LandingQuery:
    """Land a bucket in Delta tables: `land(spark, "couchbase://host/bucket", "/lake", user=…, password=…)`.

    The options are those of `headwater.spark.landing.land`. Returns the running query.
    """
    from headwater.spark import landing

    return landing.land(spark, url, into, **options)


def verify(spark: SparkSession, url: str, into: str, **options: Any) -> Verification:
    """Compare a bucket with the tables in a directory, on the executors of a session.

    The options are those of `headwater.spark.verification.verify`: `user`, `password`, `tls`, `scopes`, `collections`.
    """
    from headwater.spark import verification

    return verification.verify(spark, url, into, **options)


def documents(spark: SparkSession, into: str, collection: str) -> DataFrame:
    """The documents of a collection (`scope.collection`) as of the last batch, merged or not, read by executors."""
    from headwater.spark import frames

    return frames.documents(spark, into, collection)


def apply_changes(apply: Apply, *, places: str | Callable[[], str | None]) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` on a stream of `dcp`: it calls `apply(changes, batch)` with no change twice and the
    rollbacks first. `places` is a folder, or returns what the sink has stored of `batch.places`."""
    from headwater.spark import frames

    return frames.apply_changes(apply, places=places)
