"""Sessions of Spark Connect: the program is here, and Spark is a server elsewhere.

The source and the pipeline work there as they do anywhere. One thing is different: what a server is asked to do, it
shows in its pages as it came, options included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REDACTION = "spark.sql.redaction.string.regex"
_PASSWORD = r'(?i)key:\s*"password"\s*value:\s*"(?:[^"\\]|\\.)*"'
"""The option in the text of a request."""


def is_remote(spark: SparkSession) -> bool:
    """Whether it is a session of Spark Connect. Its classes can't be imported where gRPC is not installed."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def hide_password(spark: SparkSession) -> None:
    """Let a server leave the option `password` out of what it shows. Other sessions do that by themselves."""
    if not is_remote(spark):
        return
    pattern = spark.conf.get(_REDACTION, None) or ""
    if _PASSWORD not in pattern:
        spark.conf.set(_REDACTION, f"{pattern}|{_PASSWORD}" if pattern else _PASSWORD)
