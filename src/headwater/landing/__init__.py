"""The landing: a bucket into Delta tables, batch by batch, exactly. Nothing here needs Spark.

    import headwater.landing

    headwater.landing.land("couchbase://host/bucket", "/lake", user=…, password=…).awaitTermination()

`query` is what a caller starts, `loop` does the work, `planning` says what a batch reads, `tasks` is what a task does,
and a *runner* runs the tasks: in this process (`tasks.LocalRunner`), or on the executors of Spark (`headwater.spark`).

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
"""By module, what is loaded from it when it is first used."""

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
        into: The directory of the tables, or where it is in an object store.
        every: How often a batch is landed, such as "5 seconds", until the query is stopped. By default it lands what
            the bucket has now, and ends.
        storage_options: Options of the object store that `into` is in, as delta-rs calls them.
        columns: Typed columns for all tables, or by `scope.collection`: as SQL writes them, or "infer", which is what
            a new table gets, or "none".
        on_mismatch: Where a value goes that is of another type than its inferred column: "column" for a column of texts
            beside it, or "reject", which is what a new table does; given the same way.
        include_columns, exclude_columns: Patterns of the fields that get inferred columns, or that get none, such as
            "total,addr_*"; given the same way.
        rename_columns: Other names for inferred columns, such as "custId AS customer_id, addr_* AS address_*"; given
            the same way.
        cluster_by: Columns that documents are sorted by before their keys, such as "city,since"; given the same way.
        lake, fresh, upkeep: How documents are merged, how fresh they are kept, and how long old files are.
        groups: How many parts tables are cut into; by default as many as the documents need.
        iceberg: A catalog that gets the tables as Iceberg tables, too.
        catalog: Where all tables are registered, and stay so: `unity://HOST:PORT/CATALOG`, `unitys://HOST/CATALOG`,
            `glue://`, or `spark` for the catalog of the session.
        schema: The schema of the catalog that gets them; by default one with the bucket's name.
        transform: A function from Arrow batch to Arrow batch that all changes go through in the tasks, before they are
            written. It may change the columns `value`, `datatype` and `xattrs`, and nothing else.
        consistent: Every version of the documents is a state that the bucket had. The server must keep history.
        on_batch: Called after each batch.
        runner: Where the tasks run; by default in threads of this process, one for each processor, and with
            `headwater.spark.land` on the executors of the session.

    Returns:
        The query, which runs in a thread.

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
        scopes, collections: What is compared; by default all that was landed.
        storage_options: Options of the object store that `into` is in.
        transform: The transform of the landing, if it had one.
        max_pending, max_age: With more changes pending, or one for longer (`"60s"`), the result `is_behind`.
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
    """The state of the tables in a directory: rows, ages, what has happened, the last verdict.

    Args:
        into: The directory that was landed into.
        storage_options: Options of the object store that it is in.

    Returns:
        The state, which a notebook shows as a table.

    Raises:
        HeadwaterError: There are no tables, or they can't be read.
    """
    from headwater.lake.lake_look import look_at_lake
    from headwater.lake.location import Location

    return look_at_lake(Location.of(into, storage_options))
