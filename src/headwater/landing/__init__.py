"""The landing: copies a bucket into Delta tables, batch by batch, exactly once. Nothing here needs Spark.

    import headwater.landing

    headwater.landing.land("couchbase://host/bucket", "/lake", user=…, password=…).awaitTermination()

A caller starts a `query`, `loop` does the work, `planning` decides what a batch reads, `tasks` reads it, and a
*runner* runs the tasks: in this process (`tasks.LocalRunner`), or on Spark's executors (`headwater.spark`).

What `__all__` names is public; the modules below may change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Unpack

from headwater.client.settings import CONNECT_KEYWORDS
from headwater.landing.source_options import LANDING_KEYWORDS
from headwater.lazy_names import lazy_names
from headwater.options import list_keywords

if TYPE_CHECKING:
    from headwater.client.settings import ConnectKeywords
    from headwater.lake.chosen_rows import Transform, TransformFunction
    from headwater.lake.documents_merge import MergeRules
    from headwater.lake.iceberg import IcebergSettings
    from headwater.lake.lake import LakeSettings
    from headwater.lake.lake_look import LakeLook
    from headwater.lake.typed_columns import TypedColumns
    from headwater.lake.verify import Verification
    from headwater.landing.landed_documents import documents
    from headwater.landing.loop import LandedBatch, LandingStatus, Upkeep
    from headwater.landing.planning import Freshness
    from headwater.landing.query import LandingQuery
    from headwater.landing.source_options import SourceKeywords
    from headwater.landing.tasks import JobRunner, LocalRunner

_HOMES = {
    "headwater.lake.documents_merge": ("MergeRules",),
    "headwater.lake.iceberg": ("IcebergSettings",),
    "headwater.lake.lake": ("LakeSettings",),
    "headwater.lake.lake_look": ("LakeLook",),
    "headwater.lake.typed_columns": ("TypedColumns",),
    "headwater.lake.verify": ("Verification",),
    "headwater.landing.landed_documents": ("documents",),
    "headwater.landing.planning": ("Freshness",),
    "headwater.landing.loop": ("LandedBatch", "LandingStatus", "Upkeep"),
    "headwater.landing.query": ("LandingQuery",),
    "headwater.landing.tasks": ("JobRunner", "LocalRunner"),
    "headwater.landing.source_options": ("SourceKeywords",),
}
"""For each module, the names that are loaded from it on first use."""

__all__ = [
    "Freshness",
    "IcebergSettings",
    "JobRunner",
    "LakeLook",
    "LakeSettings",
    "LandedBatch",
    "LandingQuery",
    "LandingStatus",
    "LocalRunner",
    "MergeRules",
    "SourceKeywords",
    "TypedColumns",
    "Upkeep",
    "Verification",
    "documents",
    "land",
    "look",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)


@list_keywords(LANDING_KEYWORDS)
def land(
    url: str,
    into: str,
    *,
    every: str | float | None = None,
    storage_options: Mapping[str, str] | None = None,
    columns: str | Mapping[str, str] | None = None,
    on_mismatch: str | Mapping[str, str] | None = None,
    include_columns: str | Mapping[str, str] | None = None,
    exclude_columns: str | Mapping[str, str] | None = None,
    rename_columns: str | Mapping[str, str] | None = None,
    cluster_by: str | Mapping[str, str] | None = None,
    lake: LakeSettings | None = None,
    fresh: Freshness | None = None,
    upkeep: Upkeep | None = None,
    groups: int | None = None,
    iceberg: IcebergSettings | None = None,
    catalog: str | None = None,
    schema: str | None = None,
    transform: TransformFunction | Transform | None = None,
    consistent: bool = False,
    on_batch: Callable[[LandedBatch], None] | None = None,
    runner: JobRunner | None = None,
    **source: Unpack[SourceKeywords],
) -> LandingQuery:
    """Land a bucket in Delta tables: `land("couchbase://host/bucket", "/lake", user=…, password=…)`.

    Args:
        url: The connection string, with the bucket.
        into: The directory of the tables, local or in an object store.
        every: The interval between batches, such as "5 seconds", until the query is stopped. By default, the query
            lands what the bucket has now, and ends.
        storage_options: Options of the object store that contains `into`, with delta-rs's names.
        columns: Typed columns for all tables, or by `scope.collection`: a list as in SQL, "infer" (the default for new
            tables), or "none".
        on_mismatch: Where to put a value that does not have the type of its inferred column: "column" for an extra
            text column, or "reject" (the default for new tables); for all tables, or by collection.
        include_columns, exclude_columns: Patterns of fields that get inferred columns, or that get none, such as
            "total,addr_*"; likewise.
        rename_columns: Other names for inferred columns, such as "custId AS customer_id, addr_* AS address_*";
            likewise.
        cluster_by: Columns by which documents are sorted before their keys, such as "city,since"; likewise.
        lake, fresh, upkeep: How to merge documents, how fresh to keep them, and how long to keep old files.
        groups: The number of parts of each table; by default as many as the documents need.
        iceberg: A catalog in which to publish the tables as Iceberg tables, too.
        catalog: Where to register all tables, and keep them registered: `unity://HOST:PORT/CATALOG`,
            `unitys://HOST/CATALOG`, `glue://`, or `spark` for the catalog of the session.
        schema: The catalog's schema for the tables; by default one with the bucket's name.
        transform: A function from Arrow batch to Arrow batch that the tasks apply to all changes before they write
            them. It may change only the columns `value`, `datatype` and `xattrs`.
        consistent: Make every version of the documents a state that the bucket had. The server must keep history.
        on_batch: Called after each batch.
        runner: Where the tasks run; by default in threads of this process, one per processor, and with
            `headwater.spark.land` on the executors of the session.

    Returns:
        The running query. It has its own thread.

    Raises:
        HeadwaterError: The bucket, the directory or an option can't be used.
        TypeError: There is no such keyword.
    """
    from headwater.lake.catalogs import CatalogSettings
    from headwater.lake.chosen_rows import Transform
    from headwater.lake.column_rules import choose_rules
    from headwater.lake.lake import LakeSettings
    from headwater.lake.layout import EVERY_COLLECTION
    from headwater.lake.typed_columns import choose_cluster_columns, choose_columns
    from headwater.landing.loop import Upkeep
    from headwater.landing.planning import Freshness
    from headwater.landing.query import Landing
    from headwater.landing.source_options import source_texts
    from headwater.landing.tasks import LocalRunner

    def by_table(said: str | Mapping[str, str] | None) -> Mapping[str, str]:
        return {EVERY_COLLECTION: said} if isinstance(said, str) else said or {}

    given: dict[str, Any] = {}
    for name, said, choose in (
        ("columns", columns, choose_columns),
        ("cluster_by", cluster_by, choose_cluster_columns),
    ):
        if said is not None:
            given[name] = {table: choose(text) for table, text in by_table(said).items()}
    rules = choose_rules(
        on_mismatch=by_table(on_mismatch),
        include=by_table(include_columns),
        exclude=by_table(exclude_columns),
        rename=by_table(rename_columns),
    )
    given |= {"rules": rules} if rules else {}
    landing = Landing(
        source=source_texts(url, source, beside=signature(land).parameters),
        into=into,
        storage_options=storage_options or {},
        lake=replace(lake or LakeSettings(), **given),
        fresh=fresh or Freshness(),
        upkeep=upkeep or Upkeep(),
        groups=groups,
        iceberg=iceberg,
        catalog=CatalogSettings.of(catalog, schema),
        transform=Transform.of(transform) if callable(transform) else transform,
        consistent=consistent,
    )
    return landing.start(runner or LocalRunner(), every=every, on_batch=on_batch)


@list_keywords(CONNECT_KEYWORDS)
def verify(
    url: str,
    into: str,
    *,
    scopes: Iterable[str] = (),
    collections: Iterable[str] = (),
    storage_options: Mapping[str, str] | None = None,
    transform: TransformFunction | Transform | None = None,
    max_pending: int | None = None,
    max_age: str | None = None,
    runner: JobRunner | None = None,
    **settings: Unpack[ConnectKeywords],
) -> Verification:
    """Compare a bucket with the tables in a directory.

    Args:
        url: The connection string, with the bucket.
        into: The directory that was landed into.
        scopes, collections: What to compare; by default everything that was landed.
        storage_options: Options of the object store that contains `into`.
        transform: The transform of the landing, if it had one.
        max_pending, max_age: The result `is_behind` if more changes are pending, or one for longer (`"60s"`).
        runner: Where the tasks run; by default in threads of this process, and with `headwater.spark.verify` on the
            executors of the session.

    Returns:
        What was compared, what is pending, and what differs.

    Raises:
        HeadwaterError: The bucket or the tables can't be read.
    """
    from headwater.client.settings import ClientSettings
    from headwater.lake.chosen_rows import Transform
    from headwater.lake.lake_look import keep_verdict
    from headwater.lake.location import Location
    from headwater.lake.table_state import Selection
    from headwater.lake.verify import AGENT, Limits, compare
    from headwater.landing.tasks import LocalRunner
    from headwater.options import check_keywords, parse_interval_s

    check_keywords("verify", settings, signature(verify).parameters)
    settings.setdefault("agent", AGENT)
    location = Location.of(into, storage_options)
    scopes, collections = tuple(scopes), tuple(collections)
    found = compare(
        ClientSettings.make(url, **settings),
        location,
        scopes=scopes,
        collections=collections,
        transform=Transform.of(transform) if callable(transform) else transform,
        limits=Limits(pending_max=max_pending, age_s_max=None if max_age is None else parse_interval_s(max_age)),
        run=runner or LocalRunner(),
    )
    if problem := keep_verdict(location, found, compared=str(Selection.of(scopes, collections))):
        logging.getLogger(__name__).warning("%s", problem)
    return found


def look(into: str, *, storage_options: Mapping[str, str] | None = None) -> LakeLook:
    """Return the state of the tables in a directory: rows, ages, events, and the last verdict of `verify`.

    Args:
        into: The directory that was landed into.
        storage_options: Options of the object store that contains `into`.

    Returns:
        The state, which a notebook shows as a table.

    Raises:
        HeadwaterError: There are no tables, or they can't be read.
    """
    from headwater.lake.lake_look import look_at_lake
    from headwater.lake.location import Location

    return look_at_lake(Location.of(into, storage_options))
