"""Spark: the `dcp` data source, and the pipeline that lands a bucket in Delta tables.

    import headwater.spark

    headwater.spark.register(spark)
    spark.readStream.format("dcp").option("url", "couchbase://host/bucket").load()

What `__all__` names is public; the modules below may change. PySpark is imported when something is called that needs
it: the command line and the tables without Spark import modules of this package, too.
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
"""By module, what is loaded from it when it is first used."""

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
    """Make `format("dcp")` known to a session, let its workers run this Python, and give them the compiled kernels.

    If `PYSPARK_PYTHON` names a Python with this package, Spark also finds the source without it; but then each new
    executor compiles in its first task, and a server of Spark Connect shows the option `password` in its pages.

    Raises:
        InvalidInput: The workers run a Python without this package, or PySpark is older than 4.0.
    """
    from headwater.spark.executors import prepare_workers
    from headwater.spark.versions import need_sources, register_source

    need_sources()
    from headwater.spark.source import DcpDataSource

    prepare_workers(spark)  # first: a source that is registered stays with the Python of that moment
    register_source(spark, DcpDataSource)


def _on_executors(function: Callable[P, T]) -> Callable[Concatenate[SparkSession, P], T]:
    """The same function with a session before its other arguments, whose executors run the tasks."""
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
