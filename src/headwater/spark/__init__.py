"""For Spark: the `dcp` data source, and the pipeline that lands a bucket in Delta tables.

    import headwater.spark

    headwater.spark.register(spark)
    spark.readStream.format("dcp").option("url", "couchbase://host/bucket").load()

What `__all__` names is public; the modules below may change. PySpark is imported only when a call needs it, because
the command line and landings without Spark also import modules of this package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from headwater import landing
from headwater.lazy_names import lazy_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.landing import (
        Freshness,
        IcebergSettings,
        LakeLook,
        LakeSettings,
        LandedBatch,
        LandingQuery,
        LandingStatus,
        MergeRules,
        SourceKeywords,
        TypedColumns,
        Upkeep,
        Verification,
        look,
    )
    from headwater.landing.source_options import FrameKeywords
    from headwater.spark.frames import ChangeBatch, apply_changes, documents, read
    from headwater.spark.query_errors import query_error
    from headwater.spark.session import start_session
    from headwater.spark.source import LagListener

_HOMES = {
    "headwater.landing": (
        *("Freshness", "IcebergSettings", "LakeLook", "LakeSettings", "LandedBatch", "LandingQuery", "LandingStatus"),
        *("MergeRules", "SourceKeywords", "TypedColumns", "Upkeep", "Verification", "look"),
    ),
    "headwater.landing.source_options": ("FrameKeywords",),
    "headwater.spark.frames": ("ChangeBatch", "apply_changes", "documents", "read"),
    "headwater.spark.query_errors": ("query_error",),
    "headwater.spark.session": ("start_session",),
    "headwater.spark.source": ("LagListener",),
}
"""For each module, the names that are loaded from it on first use."""

__all__ = [
    "ChangeBatch",
    "FrameKeywords",
    "Freshness",
    "IcebergSettings",
    "LagListener",
    "LakeLook",
    "LakeSettings",
    "LandedBatch",
    "LandingQuery",
    "LandingStatus",
    "MergeRules",
    "SourceKeywords",
    "TypedColumns",
    "Upkeep",
    "Verification",
    "apply_changes",
    "documents",
    "land",
    "look",
    "query_error",
    "read",
    "register",
    "start_session",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)

P = ParamSpec("P")
T = TypeVar("T")


def register(spark: SparkSession) -> None:
    """Register `format("dcp")` with a session, make its workers run this Python, and send them the compiled kernels.

    If `PYSPARK_PYTHON` is a Python with this package, Spark finds the source without this call; but then each executor
    compiles the kernels in its first task, and Spark Connect servers show the option `password` in their pages.

    Raises:
        InvalidInput: The workers run a Python without this package, or PySpark is older than 4.0.
    """
    from headwater.spark.executors import prepare_workers
    from headwater.spark.versions import need_sources, register_source

    need_sources()
    from headwater.spark.source import DcpDataSource

    prepare_workers(spark)  # first: a registered source keeps the Python of that moment
    register_source(spark, DcpDataSource)


def _on_executors(function: Callable[P, T]) -> Callable[Concatenate[SparkSession, P], T]:
    """Return the same function with a session as its first argument, whose executors run the tasks."""
    name, parameters = function.__name__, inspect.signature(function).parameters

    @wraps(function)
    def on_executors(spark: SparkSession, *args: P.args, **keywords: P.kwargs) -> T:
        from headwater.spark.executors import SparkRunner, shippable

        if callable(transform := keywords.get("transform")):
            keywords["transform"] = shippable(transform)
        into = keywords["into"] if "into" in keywords else args[1] if len(args) > 1 else ""
        keywords.setdefault("runner", SparkRunner(spark, f"headwater {name} {into}"))
        return function(*args, **keywords)

    session = inspect.Parameter("spark", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="SparkSession")
    own = [session, *(parameter for parameter in parameters.values() if parameter.name != "runner")]
    on_executors.__module__ = __name__
    on_executors.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    described = inspect.getdoc(function) or ""
    on_executors.__doc__ = f"{name}(spark, …), on the executors of a session. {described}"
    return cast("Callable[Concatenate[SparkSession, P], T]", on_executors)


land = _on_executors(landing.land)
verify = _on_executors(landing.verify)
