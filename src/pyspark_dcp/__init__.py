"""Spark looks for data sources in every top-level module whose name begins with `pyspark_`, and finds `dcp` here."""

from headwater.spark.source import DcpDataSource as DefaultSource

__all__ = ["DefaultSource"]
