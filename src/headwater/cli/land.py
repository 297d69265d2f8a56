"""`headwater land`: a bucket into Delta tables, and kept there."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import rich_click as click
from prometheus_client import REGISTRY, start_http_server
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.live import Live
from rich.text import Text

from headwater.cli.connection_options import connection_options, credentials, errors_told, tls_settings
from headwater.cli.log_format import FORMATS, set_up_logging
from headwater.cli.rates import tells_rate
from headwater.cli.telling import EXIT_INTERRUPTED
from headwater.client.client_settings import ClientSettings
from headwater.client.connection_string import ConnectionString
from headwater.counted import counted
from headwater.errors import InvalidInput, QueryFailed
from headwater.log_fields import LogEvent, fields
from headwater.spark.lag import progress_lag
from headwater.spark.lake.iceberg_changes import TABLE_DEFAULT, IcebergSettings
from headwater.spark.lake.lake import LakeSettings
from headwater.spark.lake.merge_plan import MERGE_FRACTION, MergeRules
from headwater.spark.lake.typed_columns import TypedColumns
from headwater.spark.landing import LandedBatch, Landing, Upkeep
from headwater.spark.landing_metrics import LandingMetrics
from headwater.spark.own_folder import OWN_FOLDER
from headwater.spark.query_errors import told_error
from headwater.spark.session import start_session

POLL_S = 0.2

logger = logging.getLogger(__name__)

_TIME = re.compile(r"(?P<number>[0-9]{1,6})(?P<unit>ms|s|m|h)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
_COLUMNS = re.compile(r"(?P<table>[\w%-]+\.[\w%-]+)=(?P<ddl>.*)", re.DOTALL)


def _parse_time(context: click.Context, parameter: click.Parameter, value: str) -> str:
    match = _TIME.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no time: write 500ms, 5s, 1m or 1h.")
    return f"{match['number']} {_UNITS[match['unit']]}"


@click.command()
@click.argument("url")
@click.option(
    "--into", required=True, metavar="DIR", help="The directory of the tables. It is made if it is not there."
)
@click.option("--once", is_flag=True, help="Land what there is now, and end.")
@click.option(
    "--every",
    default="5s",
    show_default=True,
    metavar="TIME",
    callback=_parse_time,
    help="How often a batch is landed.",
)
@click.option(
    "--collection", "collections", multiple=True, metavar="SCOPE.COLLECTION", help="Only this; repeat for more."
)
@click.option("--scope", "scopes", multiple=True, metavar="SCOPE", help="Only this scope; repeat for more.")
@click.option(
    "--columns",
    multiple=True,
    metavar="[S.C=]DDL",
    help="Typed columns, such as 'name STRING, age INT', for one table or for all. Repeat for more tables.",
)
@click.option("--infer", is_flag=True, help="Typed columns for the fields that the first documents of a table have.")
@click.option("--history", is_flag=True, help="All versions of each document, with valid_from and valid_to.")
@click.option("--xattrs", is_flag=True, help="Extended attributes, too.")
@click.option(
    "--merge-fraction",
    type=click.FloatRange(0, 10),
    default=MERGE_FRACTION,
    show_default=True,
    help="Merge when pending changes pass this part of a table.",
)
@click.option("--max-rows", type=click.IntRange(min=1), metavar="N", help="Changes of one batch at most, about.")
@click.option(
    "--partitions", type=click.IntRange(1, 10_000), default=4, show_default=True, help="Tasks that read, at least."
)
@click.option("--keep-changes", "changes_days", type=click.IntRange(min=1), metavar="DAYS", help="Fold older changes.")
@click.option(
    "--keep-files",
    "vacuum_hours",
    type=click.IntRange(min=1),
    default=7 * 24,
    show_default=True,
    metavar="HOURS",
    help="Delete files that no version of a table within this time needs.",
)
@click.option(
    "--iceberg-catalog",
    metavar="NAME|URI",
    help="Have `changes` as an Iceberg table, too: in a catalog of .pyiceberg.yaml, or at a URI.",
)
@click.option(
    "--iceberg-table", default=TABLE_DEFAULT, show_default=True, metavar="NAMESPACE.TABLE", help="What it is called."
)
@click.option("--metrics-port", type=click.IntRange(1, 65535), metavar="PORT", help="Serve metrics for Prometheus.")
@click.option("--master", default="local[*]", show_default=True, help="The Spark master, where no session is there.")
@click.option("--memory", default="2g", show_default=True, help="Of Spark's driver.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a batch.")
@click.option("-q", "--quiet", is_flag=True, help="No line with the progress.")
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    help="Log each batch to standard error, in lines for people or for programs; Spark says a few words of its own "
    "there. Nothing is logged unless told.",
)
@connection_options
@errors_told
def land(
    url: str,
    into: str,
    once: bool,
    every: str,
    metrics_port: int | None,
    master: str,
    memory: str,
    as_json: bool,
    quiet: bool,
    log_format: str | None,
    user: str | None,
    password: str | None,
    tls_ca: Path | None,
    tls_skip_verify: bool,
    **options: Any,
) -> None:
    """Land a bucket in Delta tables, and keep them equal to it.

    Under DIR there are then `changes`, every change that was ever landed, `documents/SCOPE.COLLECTION`, the live
    documents, and on demand `history/SCOPE.COLLECTION` and `rejects/SCOPE.COLLECTION`. What a failover takes back is
    undone in all of them. A run that was ended in any way is completed by the next.

    The exit code is 0 at the end of --once, 1 for a failure, 130 after Ctrl-C.

    \b
    Examples:
      headwater land couchbase://localhost/default --into /data/lake --once
      headwater land couchbase://localhost/default --into /data/lake --every 5s
      headwater land couchbase://localhost/shop --into lake \\
        --columns 'shop.orders=total DOUBLE, at TIMESTAMP'
    """
    if log_format is not None:
        set_up_logging(log_format)
    where = ConnectionString.parse(url)
    login = credentials(where, user, password)
    settings = ClientSettings.of(where, login, tls=tls_settings(tls_ca, tls_skip_verify))
    landing = Landing(
        source=_source_options(url, settings, options),
        into=into,
        lake=_lake_settings(options),
        upkeep=Upkeep(vacuum_hours=options["vacuum_hours"], changes_days=options["changes_days"]),
        iceberg=_iceberg_settings(options),
    )
    landing.prepare()
    metrics = LandingMetrics(settings.bucket)
    if metrics_port is not None:
        _serve_metrics(metrics, metrics_port)
    view = _View(metrics, as_json=as_json, quiet=quiet, logs=log_format is not None)
    spark = start_session(master=master, memory=memory, log_folder=_log_folder(into))
    try:
        code = _run(landing, spark, view, None if once else every)
        if once and code == 0:
            landing.merge_all(spark)
            view.finish()
    finally:
        # One that has died by itself has nothing to stop.
        with contextlib.suppress(Py4JError, ConnectionError):
            spark.stop()
    sys.exit(code)


def _log_folder(into: str) -> Path:
    """How Spark logs has to be told in a file on this machine."""
    return Path(mkdtemp(prefix="headwater-spark-")) if "://" in into else Path(into) / OWN_FOLDER / "spark"


def _serve_metrics(metrics: LandingMetrics, port: int) -> None:
    try:
        start_http_server(port, addr="127.0.0.1")
    except OSError as error:
        raise InvalidInput(f"port {port} can't be used for metrics: {error.strerror}", hint="Give another") from error
    REGISTRY.register(metrics)


def _source_options(url: str, settings: ClientSettings, options: dict[str, Any]) -> dict[str, str]:
    source = {"url": url, "minPartitions": str(options["partitions"]), "name": "headwater-land"}
    if settings.credentials is not None:
        source |= {"user": settings.credentials.user, "password": settings.credentials.password}
    if settings.tls is not None:
        source |= {"tlsCa": str(settings.tls.ca_file)} if settings.tls.ca_file else {}
        source |= {"tlsSkipVerify": "true"} if settings.tls.skip_verify else {}
    if options["collections"]:
        source["collections"] = ",".join(options["collections"])
    if options["scopes"]:
        source["scopes"] = ",".join(options["scopes"])
    if options["xattrs"]:
        source["xattrs"] = "true"
    if options["max_rows"] is not None:
        source["maxRowsPerTrigger"] = str(options["max_rows"])
    return source


def _lake_settings(options: dict[str, Any]) -> LakeSettings:
    columns: dict[str, TypedColumns] = {}
    for text in options["columns"]:
        match = _COLUMNS.fullmatch(text)
        table, ddl = (match["table"], match["ddl"]) if match else ("*", text)
        columns[table] = TypedColumns.from_ddl(ddl)
    rules = MergeRules(fraction=options["merge_fraction"], history=options["history"])
    return LakeSettings(merging=rules, columns=columns, infer=options["infer"])


def _iceberg_settings(options: dict[str, Any]) -> IcebergSettings | None:
    catalog = options["iceberg_catalog"]
    return None if catalog is None else IcebergSettings(catalog=catalog, table=options["iceberg_table"])


def _run(landing: Landing, spark: Any, view: _View, every: str | None) -> int:
    """Until the query ends; a query that a deep rollback has ended is followed by another."""
    interrupted = _Interruptions()
    while True:
        try:
            query = landing.start(spark, every=every, on_batch=view.on_batch)
            with view:
                while query.isActive and not interrupted:
                    view.on_progress(query)
                    time.sleep(POLL_S)
            if interrupted:
                query.stop()
                view.tell_stopped()
                return EXIT_INTERRUPTED
            failure = query.exception()
        except PySparkException as error:
            raise told_error(error) from error
        except (Py4JError, ConnectionError) as error:
            raise QueryFailed(
                "Spark has ended unexpectedly", hint="Start again: it goes on from here. Spark's log may tell why"
            ) from error
        if not view.read_again:
            if failure is not None:
                raise told_error(failure)
            return 0
        # Whether it has met that with an error or not, there is something left to be read.
        view.read_again = False


class _Interruptions:
    """Whether Ctrl-C or SIGTERM has come. The batch that is under way is left to Spark to stop."""

    def __init__(self) -> None:
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self._came = True

    def __bool__(self) -> bool:
        return self._came


class _View:
    """What is shown while it runs: a line on a terminal, or an object a batch."""

    def __init__(self, metrics: LandingMetrics, *, as_json: bool, quiet: bool, logs: bool = False) -> None:
        self.read_again = False
        self._metrics = metrics
        self._as_json = as_json
        self._console = Console(stderr=True, highlight=False)
        self._logs = logs
        self._is_live = self._console.is_terminal and not quiet and not as_json and not logs
        self._live: Live | None = None
        self._began_s = time.monotonic()

    def __enter__(self) -> _View:
        if self._is_live:
            self._live = Live(self._line(), console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_batch(self, batch: LandedBatch) -> None:
        self._metrics.on_batch(batch)
        self.read_again = batch.must_read_again
        rollbacks = len(batch.rollbacks)
        logger.info(
            "batch %d landed: %s, %s",
            *(batch.batch_id, counted(batch.rows, "change"), counted(rollbacks, "rollback")),
            extra=fields(
                event=LogEvent.BATCH_LANDED,
                batch=batch.batch_id,
                changes=batch.rows,
                rollbacks=rollbacks,
                duration_s=round(batch.took_s, 3),
            ),
        )
        if self._as_json:
            click.echo(
                json.dumps(
                    {
                        "batch": batch.batch_id,
                        "rows": batch.rows,
                        "seconds": round(batch.took_s, 3),
                        "rollbacks": len(batch.rollbacks),
                        "merges": batch.merges,
                        "collections": batch.rows_by_table,
                        "lag": self._metrics.lag,
                    }
                )
            )

    def on_progress(self, query: StreamingQuery) -> None:
        progress = query.lastProgress
        if progress is not None:
            self._metrics.lag = progress_lag(progress)
        if self._live is not None:
            self._live.update(self._line())

    def tell_stopped(self) -> None:
        sentence = "Stopped. The same command goes on from here."
        if self._logs:
            logger.info("%s", sentence, extra=fields(event=LogEvent.LANDING_STOPPED))
        else:
            click.echo(sentence, err=True)

    def finish(self) -> None:
        if not self._as_json and not self._logs:
            metrics = self._metrics
            took_s = time.monotonic() - self._began_s
            self._console.print(
                f"{counted(metrics.rows, 'change')} in {took_s:.1f} s, "
                f"{counted(metrics.batches, 'batch', plural='batches')}, "
                f"{counted(metrics.rollbacks, 'rollback')}, {counted(metrics.tables, 'table')}"
            )

    def _line(self) -> Text:
        metrics = self._metrics
        took_s = time.monotonic() - self._began_s
        rate = f"  {metrics.rows / took_s:,.0f}/s" if tells_rate(metrics.rows, took_s) else ""
        lag = "?" if metrics.lag is None else f"{metrics.lag:,}"
        return Text(
            f"{counted(metrics.rows, 'change')}{rate}  batch {metrics.batches}  lag {lag}  "
            f"rollbacks {metrics.rollbacks}  tables {metrics.tables}"
        )
