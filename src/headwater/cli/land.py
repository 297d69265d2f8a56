"""`headwater land`: land a bucket in Delta tables, and keep them in sync with it."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily
from rich.console import Console
from rich.live import Live
from rich.text import Text

from headwater import telemetry
from headwater.cli.management import find_node_page
from headwater.cli.options import (
    GivenOptions,
    LoginOptions,
    cli_option,
    connection_options,
    errors_reported,
    options_from,
    parse_time,
    read_options,
    sent_to_tasks,
    storage_option,
    task_runner,
    transform_option,
)
from headwater.cli.output import FORMATS, click, exit_code_after, set_up_logging
from headwater.cli.pipelines import CommandWithPipelines, all_option, config_option, pipeline_name
from headwater.cli.ui import token_option
from headwater.client.settings import ClientSettings
from headwater.errors import InvalidInput
from headwater.lake.catalogs import TOKEN_VARIABLE, CatalogSettings
from headwater.lake.column_rules import choose_rules
from headwater.lake.delta_log import LOG_RETENTION_DAYS
from headwater.lake.documents_merge import MergeRules
from headwater.lake.iceberg import TABLE_DEFAULT, IcebergSettings
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.lake_look import LakeWatch, LandingNote
from headwater.lake.layout import EVERY_COLLECTION, GROUP_DOCUMENTS, GROUPS_MIN, DocumentForm
from headwater.lake.typed_columns import choose_cluster_columns, choose_columns
from headwater.lake.upkeep import DEAD_BYTES_DEFAULT, VACUUM_HOURS_DEFAULT
from headwater.lake_page.app import LakeState, PageAddress, serving_page
from headwater.landing.loop import LandedBatch, LandingStatus, Upkeep
from headwater.landing.planning import MERGE_SHARE, WAIT_S_MAX, Freshness
from headwater.landing.query import Landing, LandingQuery
from headwater.landing.source_options import SOURCE_OPTIONS, source_texts
from headwater.landing.tasks import JobRunner
from headwater.log_fields import LogEvent, fields
from headwater.metric_kinds import MetricFamily, MetricKind, collect_metrics, one_number
from headwater.options import option
from headwater.phrases import counted, counted_changes, printable

METRICS_PREFIX = "headwater_land_"


def _kind(name: str, documentation: str, read: Callable[[LandingStatus], float | None]) -> MetricKind[LandingStatus]:
    return MetricKind(name, documentation, one_number(read))


METRICS = (
    _kind("rows_total", "Rows landed in changes, across all runs.", lambda status: status.rows),
    _kind("batches_total", "Batches landed, across all runs.", lambda status: status.batch + 1),
    _kind("rollbacks_total", "Rollbacks of vbuckets landed, across all runs.", lambda status: status.rollbacks),
    _kind("active", "1 while the landing is running.", lambda status: int(status.is_active)),
    _kind("tables", "Collections that have a table.", lambda status: status.tables),
    _kind("documents", "Rows of all tables of documents.", lambda status: status.documents),
    _kind("lag_seqnos", "Seqnos that the bucket has and changes does not.", lambda status: status.lag_seqnos),
    _kind("lag_seconds", "changes has everything that was written longer ago than this.", lambda status: status.lag_s),
    _kind(
        "documents_age_seconds",
        "documents has everything that was written longer ago than this.",
        lambda status: status.documents_age_s,
    ),
    _kind("pending_changes", "Changes that wait to be merged into documents.", lambda status: status.pending),
    _kind("last_batch_seconds", "Duration of the last batch, without merging.", lambda status: status.last_batch_s),
    _kind("last_merge_seconds", "Duration of the last merge of documents.", lambda status: status.last_merge_s),
    _kind("failures", "Batches that have failed in a row.", lambda status: status.failures),
    _kind(
        "tables_set_aside",
        "Tables that are set aside with a fault, and lack changes that the others have.",
        lambda status: status.tables_set_aside,
    ),
    _kind("live_bytes", "Bytes of the files in the current table versions.", lambda status: status.live_bytes),
    _kind(
        "merges_slow",
        "1 once merges take more than half of the time, or miss --fresh: --merge-on-read helps.",
        lambda status: int(status.advice is not None),
    ),
    _kind(
        "tables_unregistered",
        "Tables that the catalog lacks, or has as they were before, with --catalog.",
        lambda status: status.tables_unregistered,
    ),
    _kind("dead_bytes", "Bytes of the files that are kept for earlier versions.", lambda status: status.dead_bytes),
)
"""Read from `LandingStatus` at the moment of the scrape."""
PAGE_DOCUMENTATION = "1, with the address of the landing's own page, if --ui serves one."


METRICS_LABELS = ("bucket", "pipeline")
"""The pipeline is its name in the configuration file, or empty if the landing has none."""


@dataclass(slots=True, eq=False)
class LandingMetrics:
    """The sources of a landing's metrics."""

    bucket: str
    status: Callable[[], LandingStatus | None]
    """Returns None while there is no landing."""
    page: str | None = None
    """The address of the landing's own page."""
    pipeline: str = ""
    has_failed: Callable[[], bool] = lambda: False
    """A landing may fail before it has a status."""


class LandingCollector:
    """Exposes the landings of this process to Prometheus and OpenTelemetry. Unknown values are omitted."""

    def __init__(self, *landings: LandingMetrics) -> None:
        self._landings = landings

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metric families without samples."""
        yield from (kind.family(METRICS_PREFIX, METRICS_LABELS) for kind in METRICS)
        yield self._pages()

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the families with samples, for `prometheus_client.REGISTRY.register`."""
        statuses = [(one, one.status()) for one in self._landings]
        known = [((one.bucket, one.pipeline), status) for one, status in statuses if status is not None]
        for family in collect_metrics(METRICS, known, prefix=METRICS_PREFIX, labels=METRICS_LABELS):
            if family.name == f"{METRICS_PREFIX}active":
                for one, status in statuses:
                    if status is None and one.has_failed():
                        family.add_metric((one.bucket, one.pipeline), 0)
            yield family
        pages = self._pages()
        for one in self._landings:
            if one.page is not None:
                pages.add_metric((one.bucket, one.pipeline, one.page), 1)
        yield pages

    @staticmethod
    def _pages() -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{METRICS_PREFIX}page_info", PAGE_DOCUMENTATION, labels=(*METRICS_LABELS, "url"))


POLL_S = 0.2

logger = logging.getLogger(__name__)

_OF_TABLE = re.compile(r"(?P<table>[\w%-]+\.[\w%-]+)=(?P<text>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where a landing runs, and what it prints."""

    metrics_port: int | None = option("Serve metrics for Prometheus on this port.", least=1, most=65535, metavar="PORT")
    page_at: str | None = option(
        "Serve the page of the landing and its metrics. Without HOST, only on this machine.",
        cli_name="--ui",
        metavar="[HOST:]PORT",
    )
    runs_on: str = option(
        "Run the tasks on Spark, which scales to many machines, or in threads of this process, which needs no Java.",
        "spark",
        cli_name="--runner",
        cli_type=click.Choice(["spark", "local"]),
    )
    master: str = option("The Spark master, for --runner spark.", "local[*]")
    memory: str = option("Memory for the Spark driver, for --runner spark.", "2g")
    as_json: bool = option("Print one JSON object per batch.", False, cli_name="--json")
    quiet: bool = option("Do not show progress.", False, cli_also=("-q",))
    log_format: str | None = option(
        "Log each batch to standard error, as text or JSON. By default, nothing is logged.",
        cli_type=click.Choice(FORMATS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """How often a landing lands, and how its tables look."""

    once: bool = option("Land what the bucket has now, and exit.", False)
    every: float = option("How often to land a batch.", "5s", cli_type=parse_time, metavar="TIME")
    columns: tuple[str, ...] = option(
        "Fixed typed columns, such as 'name STRING, age INT', for one table or for all. `infer` switches an existing "
        "table to the default: a column for each field of its documents. Repeat for more tables.",
        metavar="[S.C=]DDL",
    )
    no_columns: bool = option("Do not create typed columns, except for tables named by --columns.", False)
    on_mismatch: tuple[str, ...] = option(
        "What happens to a value of another type than its inferred column. `column`: it goes to a column of texts "
        "beside it, such as `total__string`. `reject`: it is null, and `rejects` lists it. For one table or for all. "
        "By default, existing tables keep their rule, and new ones reject. A change of the rule parses all documents "
        "again.",
        metavar="[S.C=]column|reject",
    )
    include_columns: tuple[str, ...] = option(
        "Infer columns only for fields with these names, such as 'total,addr_*', in one table or in all. A table "
        "remembers these rules; a change of them parses all of its documents again. '' removes the rule.",
        metavar="[S.C=]PATTERNS",
    )
    exclude_columns: tuple[str, ...] = option(
        "Infer no columns for fields with these names, such as 'internal_*'. They stay in `document`.",
        metavar="[S.C=]PATTERNS",
    )
    rename_columns: tuple[str, ...] = option(
        "Give inferred columns other names than their fields: 'custId AS customer_id, addr_* AS address_*'.",
        metavar="[S.C=]RENAMES",
    )
    cluster_by: tuple[str, ...] = option(
        "Sort `documents` by these columns and then by key, for one table or for all, so that queries on them read "
        "less. Applies to files written from now on; `key` restores the order by key. Repeat for more tables.",
        metavar="[S.C=]NAMES",
    )
    document: str | None = option(
        "What the column `document` of new tables is: the text of the JSON, or a variant, which engines that know the "
        "type query without parsing it. By default, existing tables keep their form, and new ones have `string`.",
        cli_type=click.Choice([form.value for form in DocumentForm]),
    )
    on_read: bool | None = option(
        "Mark superseded rows of `documents` and `history` in deletion vectors, so that a merge writes only what "
        "changed; or rewrite the files that hold them, so that any engine can read the tables. By default, existing "
        "tables keep their mode, and new ones have no vectors. Either option switches existing tables.",
        cli_name="--merge-on-read/--copy-on-write",
    )
    history: bool = option("Also keep all versions of each document, with valid_from and valid_to.", False)
    change_feed: bool | None = option(
        "Whether `documents` records the row changes of each merge, as Delta's change data feed. By default, existing "
        "tables keep their setting, and new ones have no feed.",
        cli_name="--change-feed/--no-change-feed",
    )
    consistent: bool = option(
        "Make every version of `documents` a state that the bucket had at one moment. The server must keep history.",
        False,
    )
    wait_s_max: float = option(
        "Merge a change into `documents` within this time, if the machine can keep up.",
        f"{WAIT_S_MAX:.0f}s",
        cli_name="--fresh",
        cli_type=parse_time,
        metavar="TIME",
    )
    merge_share: float = option(
        "The share of time that merging into `documents` may take, as long as no change waits longer than --fresh.",
        MERGE_SHARE,
        cli_type=click.FloatRange(0, 1),
    )
    changes_days: int | None = option(
        "Fold changes that are older than this.", least=1, cli_name="--keep-changes", metavar="DAYS"
    )
    files_s: float = option(
        "Delete files once no table version of this period needs them: whole hours, such as 168h.",
        f"{VACUUM_HOURS_DEFAULT}h",
        cli_name="--keep-files",
        cli_type=parse_time,
        metavar="TIME",
    )
    dead_bytes: str = option(
        "Delete such files earlier, oldest first, if a table has more of them than this: a multiple of the live table, "
        "or a size such as 10GB. Files of the last two minutes are kept.",
        DEAD_BYTES_DEFAULT,
        metavar="Nx|SIZE",
    )
    log_days: int = option(
        "Delete entries of the tables' logs that are older than this.",
        LOG_RETENTION_DAYS,
        least=1,
        cli_name="--keep-log",
        metavar="DAYS",
    )
    groups: int | None = option(
        "Number of groups of new tables: each is a task of a merge, which holds the keys of its group in memory. By "
        f"default {GROUPS_MIN}, or one for every {GROUP_DOCUMENTS:,} documents in the bucket, and more as the tables "
        "grow.",
        least=1,
    )
    iceberg_catalog: str | None = option(
        "Also publish `changes` and `documents` as Iceberg tables: in a catalog of .pyiceberg.yaml, or at a URI.",
        metavar="NAME|URI",
    )
    iceberg_table: str = option(
        "The Iceberg name of `changes`. Documents are in the same namespace, as documents_SCOPE_COLLECTION.",
        TABLE_DEFAULT,
        metavar="NAMESPACE.TABLE",
    )
    catalog: str | None = option(
        "Register all tables in a catalog, and keep them registered: unity://HOST:PORT/CATALOG, unitys://HOST/CATALOG "
        f"with TLS, glue://, or spark for the catalog of the Spark session. {TOKEN_VARIABLE} has the token for Unity "
        "Catalog.",
        metavar="CATALOG",
    )
    schema: str | None = option(
        "The schema of the catalog, or the database of Glue, that gets the tables. By default, the bucket's name.",
        metavar="NAME",
    )


@click.command(cls=CommandWithPipelines)
@click.argument("url", metavar="URL|NAME…")
@config_option
@all_option
@click.option(
    "--into",
    required=True,
    metavar="DIR|URI",
    help="Where to put the tables: a directory, which is created if needed, or s3://, gs://, abfss://.",
)
@storage_option
@read_options("land")
@cli_option(SOURCE_OPTIONS["where"], default=None, show_default=False)
@cli_option(SOURCE_OPTIONS["system"])
@cli_option(SOURCE_OPTIONS["max_rows_per_trigger"])
@cli_option(SOURCE_OPTIONS["min_partitions"], default=4)
@transform_option
@token_option
@options_from(TableOptions, RunOptions)
@connection_options
@errors_reported
def land(
    url: str,
    into: str,
    storage_options: dict[str, str],
    ui_token: str | None,
    login: LoginOptions,
    given: GivenOptions,
    **source: Any,
) -> None:
    """Land a bucket in Delta tables, and keep them in sync with it.

    DIR then contains `changes` with every landed change, `documents/SCOPE.COLLECTION` with the live documents, and, if
    needed, `history/SCOPE.COLLECTION` and `rejects/SCOPE.COLLECTION`. If a failover takes changes back, the landing
    undoes them in all tables. However a run ends, the next one continues its work.

    With NAME, the URL and the options come from a pipeline in headwater.toml. Options on the command line take
    precedence, and --no-FLAG, such as --no-history, turns off a flag that the file turns on.

    With several NAMEs or --all, one process lands several pipelines, with one page and one port for metrics. If one
    fails, the others continue; the exit code is 1 at the end.

    A fault in one table does not stop the others: the landing sets the table aside, reports the reason, and retries it
    later.

    The exit code is 0 at the end of --once, 1 for a failure or if a table is set aside, 130 after Ctrl-C and 143 after
    SIGTERM.

    \b
    Examples:
      headwater land couchbase://localhost/default --into /data/lake --once
      headwater land couchbase://localhost/default --into /data/lake --every 5s
      headwater land couchbase://localhost/default --into lake --runner local
      headwater land couchbase://localhost/shop --into lake \\
        --columns 'shop.orders=total DOUBLE, at TIMESTAMP'
      headwater land couchbase://localhost/default --into lake \\
        --where "type = 'order' AND total > 10"
      headwater land shop --once
      headwater land --all --ui 8080
    """
    run, tables = given.make(RunOptions), given.make(TableOptions)
    if run.log_format is not None:
        set_up_logging(run.log_format)
    settings = login.settings(url)
    spark_master = run.master if run.runs_on == "spark" else None
    landing = landing_of(url, settings, into, storage_options, spark_master, tables, source)
    address = None if run.page_at is None else PageAddress.make(run.page_at, ui_token or None)
    # Before the start of Spark, which takes seconds.
    lake = landing.prepare()
    view = View(as_json=run.as_json, quiet=run.quiet, logs=run.log_format is not None)
    metrics = LandingMetrics(settings.bucket, view.status, pipeline=pipeline_name())
    collector = LandingCollector(metrics)
    serve_metrics(collector, run.metrics_port)
    with contextlib.ExitStack() as stack:
        if address is not None:
            state = LakeState(LakeWatch(lake.location), landing=view.note)
            view.page = metrics.page = stack.enter_context(
                serving_page(state, address, metrics=lambda: metrics_text(collector))
            )
            click.echo(f"The landing is shown at {view.page}", err=True)
        view.find_node_page = lambda: find_node_page(url, settings.credentials, settings.tls_context())
        runner = stack.enter_context(task_runner(f"headwater land {into}", master=spark_master, memory=run.memory))
        code = _run(landing, lake, runner, view, None if tables.once else tables.every)
    sys.exit(code)


def landing_of(
    url: str,
    settings: ClientSettings,
    into: str,
    storage_options: dict[str, str],
    spark_master: str | None,
    tables: TableOptions,
    source: dict[str, Any],
) -> Landing:
    """Return the landing that the options of the command describe."""
    catalog, iceberg = CatalogSettings.of(tables.catalog, tables.schema), tables.iceberg_catalog
    if catalog is not None:
        catalog.check_runner(has_session=spark_master is not None)
    return Landing(
        source=_source_options(url, settings, source),
        into=into,
        storage_options=storage_options,
        lake=_lake_settings(tables),
        fresh=Freshness(wait_s_max=tables.wait_s_max, merge_share=tables.merge_share),
        upkeep=Upkeep(
            files_hours=int(tables.files_s // 3600),
            dead_bytes=tables.dead_bytes,
            changes_days=tables.changes_days,
            log_days=tables.log_days,
        ),
        groups=tables.groups,
        iceberg=None if iceberg is None else IcebergSettings(catalog=iceberg, table=tables.iceberg_table),
        catalog=catalog,
        transform=None if source["transform"] is None else sent_to_tasks(source["transform"], spark_master),
        consistent=tables.consistent,
    )


@land.runs_several
def _land_several(pipelines: Mapping[str, click.Context]) -> None:
    from headwater.cli.land_several import land_several

    land_several(pipelines)


def metrics_text(collector: LandingCollector) -> tuple[bytes, str]:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry), CONTENT_TYPE_LATEST


def serve_metrics(collector: LandingCollector, port: int | None) -> None:
    """Serve the metrics to Prometheus, if there is a port, and to OpenTelemetry."""
    if port is not None:
        try:
            start_http_server(port, addr="127.0.0.1")
        except OSError as error:
            raise InvalidInput(
                f"port {port} can't be used for metrics: {error.strerror}", hint="Give another"
            ) from error
        REGISTRY.register(collector)
    telemetry.observe(collector)


def _source_options(url: str, settings: ClientSettings, options: dict[str, Any]) -> dict[str, str]:
    """Return the options of the command line as options of the source."""
    keywords: dict[str, Any] = {"name": "headwater-land", "min_partitions": options["min_partitions"]}
    if settings.credentials is not None:
        keywords |= {"user": settings.credentials.user, "password": settings.credentials.password}
    keywords["tls"] = settings.tls
    for name in ("collections", "scopes", "xattrs", "max_rows_per_trigger", "where", "system"):
        keywords[name] = options[name] or None
    return source_texts(url, keywords)


def _lake_settings(tables: TableOptions) -> LakeSettings:
    columns = {table: choose_columns(text) for table, text in _by_table(tables.columns)}
    cluster_by = {table: choose_cluster_columns(text) for table, text in _by_table(tables.cluster_by)}
    said = {"on_mismatch": dict(_by_table(tables.on_mismatch))}
    for name in ("include", "exclude", "rename"):
        texts = said[name] = {}
        for table, text in _by_table(getattr(tables, f"{name}_columns")):
            texts[table] = f"{texts[table]}, {text}" if table in texts else text
    if tables.no_columns and EVERY_COLLECTION in columns:
        raise InvalidInput("--no-columns and --columns for all tables contradict each other", hint="Give one of them")
    merging = MergeRules(history=tables.history, on_read=tables.on_read, change_feed=tables.change_feed)
    return LakeSettings(
        merging=merging,
        columns=columns,
        rules=choose_rules(**said),
        infer=not tables.no_columns,
        cluster_by=cluster_by,
        document=tables.document,
    )


def _by_table(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each value with its table, as in `shop.orders=total DOUBLE`, or with the name for all tables."""
    for text in texts:
        match = _OF_TABLE.fullmatch(text)
        yield (match["table"], match["text"]) if match else (EVERY_COLLECTION, text)


def _run(landing: Landing, lake: Lake, runner: JobRunner, view: View, every_s: float | None) -> int:
    query = landing.start(runner, every=every_s, on_batch=view.on_batch, lake=lake)
    try:
        with view.following(query):
            while query.isActive:
                time.sleep(POLL_S)
                view.refresh()
    except KeyboardInterrupt as error:
        # A batch that is not committed by now has no effect.
        query.stop()
        view.say_stopped()
        return exit_code_after(error)
    query.awaitTermination()
    view.finish()
    return 0


class View:
    """Shows the progress of a landing: a line on a terminal, or one JSON object per batch.

    Views of several pipelines share a `console`, print their pipeline's name, and leave status lines to the caller.
    """

    def __init__(
        self, *, as_json: bool, quiet: bool, logs: bool = False, pipeline: str = "", console: Console | None = None
    ) -> None:
        self._as_json = as_json
        self._pipeline = pipeline
        self._console = console or Console(stderr=True, highlight=False)
        self._logs = logs
        self._speaks = not quiet and not as_json and not logs
        self._is_live = self._console.is_terminal and self._speaks and console is None
        self._said_aside: set[str] = set()
        """The tables that were reported as set aside."""
        self._said: set[str] = set()
        """The advice and failures that were printed."""
        self.query: LandingQuery | None = None
        self._live: Live | None = None
        self._began_s = time.monotonic()
        self._changes = self._system_events = 0
        self._rollbacks = 0
        """Of this run only."""
        self.page: str | None = None
        """The address of the landing's own page."""
        self.find_node_page: Callable[[], str | None] | None = None
        """Finds the dashboard of the node that the landing reads from."""

    def status(self) -> LandingStatus | None:
        """Return the status for the metrics, or None before there is a landing."""
        return None if self.query is None else self.query.landing_status

    def note(self) -> LandingNote | None:
        """Return the note for the page, or None before there is a landing."""
        return None if self.query is None else self.query.note

    @contextlib.contextmanager
    def following(self, query: LandingQuery) -> Iterator[None]:
        self.query = query
        if (find := self.find_node_page) is not None:
            # This opens a connection, so it runs in a thread of its own and delays nothing.
            looking = threading.Thread(
                target=lambda: query.say_where(page=self.page, node_page=find()), name="headwater pages", daemon=True
            )
            looking.start()
        if self._is_live:
            self._live = Live(status_line(query.landing_status), console=self._console, transient=True)
            self._live.start()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def refresh(self) -> None:
        status = self.status()
        if status is None:
            return
        if self._live is not None:
            self._live.update(status_line(status))
        self._say_set_aside(status)
        for sentence in (status.advice, status.catalog_failure):
            if sentence is not None and sentence not in self._said and self._speaks:
                self._say(f"{sentence[0].upper()}{sentence[1:].rstrip('.')}.")
                self._said.add(sentence)

    def _say_set_aside(self, status: LandingStatus) -> None:
        """Print each table that is set aside, once, above the status line if any. The log reports it separately."""
        names = {table.name for table in status.set_aside}
        if self._speaks:
            for table in status.set_aside:
                if table.name not in self._said_aside:
                    self._say(f"{table.name} is set aside: {table.reason}. {table.hint}.")
        self._said_aside = names

    def _say(self, sentence: str) -> None:
        named = f"{self._pipeline}: {sentence}" if self._pipeline else sentence
        self._console.print(printable(named), markup=False, soft_wrap=self._live is None or bool(self._pipeline))

    def on_batch(self, batch: LandedBatch) -> None:
        self._changes += batch.changes
        self._system_events += batch.system_events
        self._rollbacks += len(batch.rollbacks)
        if self._as_json:
            named = {"pipeline": self._pipeline} if self._pipeline else {}
            click.echo(json.dumps({**named, **batch_object(batch)}))

    def say_failed(self, failure: BaseException) -> None:
        """Report that one of several pipelines has failed."""
        sentence = f"{self._pipeline}: {failure}"
        if self._logs:
            about = fields(event=LogEvent.LANDING_FAILED, pipeline=self._pipeline, error=type(failure).__name__)
            logger.error("%s", sentence, extra=about)
        else:
            self._console.print(printable(f"Error: {sentence}"), markup=False, soft_wrap=True)

    def say_stopped(self) -> None:
        sentence = "Stopped. The same command resumes from here."
        if self._logs:
            logger.info("%s", sentence, extra=fields(event=LogEvent.LANDING_STOPPED))
        else:
            click.echo(sentence, err=True)

    def finish(self) -> None:
        """Print what --once has landed, and what the tables hold."""
        status = self.status()
        if status is not None and not self._as_json and not self._logs:
            took_s = time.monotonic() - self._began_s
            landed = counted_changes(self._changes, self._system_events)
            self._say(
                f"{landed} landed in {took_s:.1f} s, {counted(self._rollbacks, 'rollback')}; "
                f"{counted(status.documents, 'document')} in {counted(status.tables, 'table')}"
            )


def batch_object(batch: LandedBatch) -> dict[str, Any]:
    """Return the object that `--json` prints for a batch."""
    status = batch.status
    return {
        "batch": batch.batch_id,
        "rows": batch.rows,
        "changes": batch.changes,
        "system_events": batch.system_events,
        "seconds": round(batch.took_s, 3),
        "rollbacks": len(batch.rollbacks),
        "merges": batch.merges,
        "collections": dict(batch.rows_by_table),
        "lag": status.lag_seqnos,
        "lag_seconds": _rounded(status.lag_s),
        "documents_age_seconds": _rounded(status.documents_age_s),
        "documents": status.documents,
        "total_rows": status.rows,
        "total_rollbacks": status.rollbacks,
        "set_aside": {table.name: table.reason for table in status.set_aside},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def status_line(status: LandingStatus) -> Text:
    """Return the status line for a terminal."""
    unregistered = status.tables_unregistered or 0
    lag = "unknown" if status.lag_seqnos is None else counted(status.lag_seqnos, "seqno")
    if status.failure is not None:
        return Text(f"{status.doing}  batch {status.batch:,}  {status.failure}")
    return Text(
        f"{status.doing}  batch {status.batch:,}  {counted(status.documents, 'document')}  "
        f"lag {lag}, {_age(status.lag_s)}  documents {_age(status.documents_age_s)} behind"
        + (f"  {_megabytes(status.live_bytes)} live, {_megabytes(status.dead_bytes)} dead" if status.dead_bytes else "")
        + (f"  {counted(status.rollbacks, 'rollback')}" if status.rollbacks else "")
        + (f"  {counted(status.tables_set_aside, 'table')} set aside" if status.tables_set_aside else "")
        + (f"  {counted(unregistered, 'table')} not in the catalog" if status.catalog_failure else "")
        + ("  merges are slow: see --merge-on-read" if status.advice else "")
    )


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.1f} MB"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "unknown time"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
