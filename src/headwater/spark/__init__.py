"""Spark: the `dcp` data source, and the pipeline that lands a bucket in Delta tables.

    import headwater.spark

    headwater.spark.register(spark)
    spark.readStream.format("dcp").option("url", "couchbase://host/bucket").load()

What `__all__` names is public; the modules below may change. PySpark is imported when something is called that needs
it: the command line and the tables without Spark import modules of this package, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from headwater.client.options import CONNECT_KEYWORDS, FRAME_KEYWORDS, LANDING_KEYWORDS, takes_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from headwater.client.settings import ConnectKeywords
    from headwater.lake.documents_merge import MergeRules
    from headwater.lake.iceberg_changes import IcebergSettings
    from headwater.lake.lake import LakeSettings
    from headwater.lake.lake_look import LakeLook
    from headwater.lake.transform import TransformFunction
    from headwater.lake.typed_columns import TypedColumns
    from headwater.lake.verify import Verification
    from headwater.spark.frames import Apply, ChangeBatch
    from headwater.spark.freshness import Freshness
    from headwater.spark.landing import Landing, LandingQuery
    from headwater.spark.landing_loop import LandedBatch, LandingStatus, Upkeep
    from headwater.spark.query_errors import query_error
    from headwater.spark.session import start_session
    from headwater.spark.source import LagListener
    from headwater.spark.source_options import FrameKeywords, SourceKeywords

_HOMES = {
    "headwater.lake.documents_merge": ("MergeRules",),
    "headwater.lake.iceberg_changes": ("IcebergSettings",),
    "headwater.lake.lake": ("LakeSettings",),
    "headwater.lake.lake_look": ("LakeLook",),
    "headwater.lake.typed_columns": ("TypedColumns",),
    "headwater.lake.verify": ("Verification",),
    "headwater.spark.frames": ("ChangeBatch",),
    "headwater.spark.freshness": ("Freshness",),
    "headwater.spark.landing": ("Landing", "LandingQuery"),
    "headwater.spark.landing_loop": ("LandedBatch", "LandingStatus", "Upkeep"),
    "headwater.spark.query_errors": ("query_error",),
    "headwater.spark.session": ("start_session",),
    "headwater.spark.source": ("LagListener",),
    "headwater.spark.source_options": ("FrameKeywords", "SourceKeywords"),
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
    "Landing",
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


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def register(spark: SparkSession) -> None:
    """Make `format("dcp")` known to a session, let its workers run this Python, and give them the compiled kernels.

    Where the package is installed, and `PYSPARK_PYTHON` names its Python, Spark finds the source by itself; an executor
    that is new then compiles in its first task, and a server of Spark Connect shows the option `password` in its pages.
    """
    from headwater.spark.executors import prepare_workers
    from headwater.spark.session import hide_password
    from headwater.spark.source import DcpDataSource

    prepare_workers(spark)  # first: a source that is registered stays with the Python of that moment
    spark.dataSource.register(DcpDataSource)
    hide_password(spark)


@takes_options(FRAME_KEYWORDS)
def read(
    spark: SparkSession, url: str, *, schema: StructType | str | None = None, **source: Unpack[FrameKeywords]
) -> DataFrame:
    """The changes of a bucket as a frame: `read(spark, "couchbase://host/bucket", collections=["shop.orders"],
    columns=["key", "value"], where="op = 'mutation'")`. With `mode="documents"`, its documents.

    The keywords are options of the `dcp` source, in Python's spelling. `where` may be any condition of SQL: what the
    source can't apply itself, Spark does. `schema` is for the fields of documents.
    """
    from headwater.spark import frames

    return frames.read(spark, url, schema, source)


@takes_options(LANDING_KEYWORDS)
def land(
    spark: SparkSession,
    url: str,
    into: str,
    *,
    every: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    columns: str | Mapping[str, str] | None = None,
    cluster_by: str | Mapping[str, str] | None = None,
    lake: LakeSettings | None = None,
    fresh: Freshness | None = None,
    upkeep: Upkeep | None = None,
    groups: int | None = None,
    iceberg: IcebergSettings | None = None,
    transform: TransformFunction | None = None,
    consistent: bool = False,
    on_batch: Callable[[LandedBatch], None] | None = None,
    **source: Unpack[SourceKeywords],
) -> LandingQuery:
    """Land a bucket in Delta tables: `land(spark, "couchbase://host/bucket", "/lake", user=…, password=…)`.

    Lands what the bucket has now and ends; with `every`, such as "5 seconds", goes on until it is stopped. The further
    keywords are options of the `dcp` source, in Python's spelling. `storage_options` are those of an object store, as
    delta-rs calls them, `groups` into how many parts tables are cut. `columns` are typed columns for all tables, or
    by `scope.collection`: as SQL writes them, or "infer", which is what a new table gets, or "none". `cluster_by`,
    given the same way, are columns that documents are sorted by before their keys, such as "city,since". `transform` is
    a function from Arrow batch to Arrow batch that all changes go through in the tasks, before they are written: it may
    change the columns `value`, `datatype` and `xattrs`, and nothing else. With `consistent`, every version of the
    documents is a state that the bucket had, which takes a server that keeps history. Returns the running query.
    """
    from headwater.lake.lake import LakeSettings
    from headwater.lake.layout import EVERY_COLLECTION
    from headwater.lake.typed_columns import choose_cluster_columns, choose_columns
    from headwater.spark.freshness import Freshness
    from headwater.spark.landing import Landing
    from headwater.spark.landing_loop import Upkeep
    from headwater.spark.source_options import source_texts

    given: dict[str, Any] = {}
    for name, said, choose in (
        ("columns", columns, choose_columns),
        ("cluster_by", cluster_by, choose_cluster_columns),
    ):
        if said is not None:
            texts = {EVERY_COLLECTION: said} if isinstance(said, str) else said
            given[name] = {table: choose(text) for table, text in texts.items()}
    landing = Landing(
        source=source_texts(url, source, beside=_LAND_KEYWORDS),
        into=into,
        storage_options=storage_options or {},
        lake=replace(lake or LakeSettings(), **given),
        fresh=fresh or Freshness(),
        upkeep=upkeep or Upkeep(),
        groups=groups,
        iceberg=iceberg,
        transform=transform,
        consistent=consistent,
    )
    return landing.start(spark, every=every, on_batch=on_batch)


_LAND_KEYWORDS = (
    *("every", "storage_options", "columns", "cluster_by", "lake", "fresh", "upkeep", "groups", "iceberg"),
    *("transform", "consistent", "on_batch"),
)
_VERIFY_KEYWORDS = ("scopes", "collections", "storage_options", "transform", "max_pending", "max_age")


@takes_options(CONNECT_KEYWORDS)
def verify(
    spark: SparkSession,
    url: str,
    into: str,
    *,
    scopes: Iterable[str] = (),
    collections: Iterable[str] = (),
    storage_options: Mapping[str, str] | None = None,
    transform: TransformFunction | None = None,
    max_pending: int | None = None,
    max_age: str | None = None,
    **settings: Unpack[ConnectKeywords],
) -> Verification:
    """Compare a bucket with the tables in a directory, on the executors of a session.

    `scopes` and `collections` choose what is compared; without them, all that was landed. `transform` is that of the
    landing, if it had one. With more changes pending than `max_pending`, or one for longer than `max_age` (`"60s"`),
    the result `is_behind`. The further keywords are those of `headwater.connect`.
    """
    from headwater.client.options import check_keywords, parse_interval_s
    from headwater.client.settings import ClientSettings, ConnectKeywords
    from headwater.lake.location import Location
    from headwater.lake.notes import keep_verdict
    from headwater.lake.table_state import Selection
    from headwater.lake.verify import AGENT, Limits, compare
    from headwater.spark.executors import shippable, spark_runner

    check_keywords("verify", settings, {*ConnectKeywords.__annotations__, *_VERIFY_KEYWORDS})
    settings.setdefault("agent", AGENT)
    connection = ClientSettings.make(url, **settings)
    location = Location.of(into, storage_options)
    scopes, collections = tuple(scopes), tuple(collections)
    found = compare(
        connection,
        location,
        scopes=scopes,
        collections=collections,
        transform=None if transform is None else shippable(transform),
        limits=Limits(pending_max=max_pending, age_s_max=None if max_age is None else parse_interval_s(max_age)),
        run=spark_runner(spark, AGENT),
    )
    if problem := keep_verdict(location, found, compared=str(Selection.of(scopes, collections))):
        logging.getLogger(__name__).warning("%s", problem)
    return found


def look(into: str, *, storage_options: Mapping[str, str] | None = None) -> LakeLook:
    """How the tables in a directory stand: rows, ages, what has happened, the last verdict. Needs no session, and shows
    itself as a table in a notebook."""
    from headwater.lake.lake_look import look_at_lake
    from headwater.lake.location import Location

    return look_at_lake(Location.of(into, storage_options))


def documents(
    spark: SparkSession,
    into: str,
    collection: str,
    *,
    batch: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The documents of a collection (`scope.collection`) as of the last batch, merged or not, read by executors.

    With `batch`, as of that batch: frames of several collections as of one batch belong together.
    """
    from headwater.spark import frames

    return frames.documents(spark, into, collection, batch=batch, storage_options=storage_options)


def apply_changes(
    apply: Apply,
    *,
    places: str | Callable[[], str | None],
    storage_options: Mapping[str, str] | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` on a stream of `dcp`: it calls `apply(changes, batch)` with no change twice and the
    rollbacks first. `places` is a folder, or returns what the sink has stored of `batch.places`."""
    from headwater.spark import frames

    return frames.apply_changes(apply, places=places, storage_options=storage_options)
