"""`headwater verify`: is the table the bucket?"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import rich_click as click
from rich.table import Table

from headwater.cli.options import (
    EXIT_BEHIND,
    EXIT_FAILED,
    LoginOptions,
    connection_options,
    errors_reported,
    parse_time,
    storage_option,
    table_option,
    transform_option,
)
from headwater.cli.output import output_console
from headwater.cli.pipelines import CommandWithPipelines, config_option
from headwater.client.connection_string import ConnectionString
from headwater.client.settings import ClientSettings
from headwater.lake.lake import Runner, run_in_threads
from headwater.lake.location import Location
from headwater.lake.notes import keep_verdict
from headwater.lake.table_state import Selection
from headwater.lake.transform import Transform, TransformFunction
from headwater.lake.verify import AGENT, Limits, Verification, compare
from headwater.phrases import printable


@click.command(cls=CommandWithPipelines)
@click.argument("url", metavar="URL|NAME")
@click.argument("directory", required=False)
@config_option
@storage_option
@table_option("collections", metavar="SCOPE.COLLECTION")
@table_option("scopes", metavar="SCOPE")
@transform_option
@click.option("--master", metavar="URL", help="Run on the executors of this Spark master, and not in this process.")
@click.option(
    "--max-pending",
    "pending_max",
    metavar="N",
    type=click.IntRange(min=0),
    help="Fail with exit code 3 if more changes than this are pending.",
)
@click.option(
    "--max-age",
    "age_s_max",
    metavar="TIME",
    callback=parse_time,
    help="Fail with exit code 3 if a change has been pending for longer than this, such as 60s or 5m.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
@errors_reported
def verify(
    url: str,
    directory: str | None,
    storage_options: dict[str, str],
    collections: tuple[str, ...],
    scopes: tuple[str, ...],
    transform: TransformFunction | None,
    master: str | None,
    pending_max: int | None,
    age_s_max: float | None,
    as_json: bool,
    login: LoginOptions,
) -> None:
    """Compare a bucket with the tables that it was landed in.

    Every document of URL that the tables in DIRECTORY have reached must be in them as it is in the bucket: collection,
    key, value, flags, expiry, CAS, revision, seqno and, where they were landed, extended attributes. What is newer is
    pending, and no fault unless `--max-pending` or `--max-age` says so: the bucket may be written to meanwhile. Every
    column of `documents`, `changes`, `history` and `rejects` is judged, every file is read completely, and so is what
    the logs say of the files.

    The verdict is noted in the lake's folder `_headwater`, where `headwater ui` finds it.

    The exit code is 0 only if nothing differs, and 1 otherwise. Then each fault is named: the document or the file, and
    its table; `headwater repair` repairs it. It is 3 if nothing differs and the tables are too far behind. Tables that
    no landing has ever succeeded to fill are not equal.

    With NAME, the bucket, the tables and how to reach them are those of a pipeline in headwater.toml.

    \b
    Examples:
      headwater verify couchbase://localhost/default /data/lake
      headwater verify couchbase://localhost/default /data/lake --json
      headwater verify couchbase://localhost/default /data/lake \\
        --master 'local[*]'
      headwater verify shop --max-age 5m
    """
    if directory is None:
        raise click.UsageError("Missing argument 'DIRECTORY'.")
    where = ConnectionString.parse(url)
    settings = ClientSettings.of(where, login.credentials(where), tls=login.tls_settings, agent=AGENT)
    location = Location.of(directory, storage_options)
    sent = None if transform is None else _sent_to_tasks(transform, master)
    with _runner(master) as run:
        found = compare(
            settings,
            location,
            scopes=scopes,
            collections=collections,
            transform=sent,
            limits=Limits(pending_max=pending_max, age_s_max=age_s_max),
            run=run,
        )
    if problem := keep_verdict(location, found, compared=str(Selection.of(scopes, collections))):
        click.echo(f"Note: {printable(problem)}", err=True)
    if as_json:
        click.echo(json.dumps(_as_object(found)))
    else:
        print_verification(found)
    sys.exit(EXIT_FAILED if not found.is_equal else EXIT_BEHIND if found.is_behind else 0)


def _sent_to_tasks(function: TransformFunction, master: str | None) -> Transform:
    if master is None:
        return Transform.of(function)
    from headwater.spark.executors import shippable

    return shippable(function)


@contextlib.contextmanager
def _runner(master: str | None) -> Iterator[Runner]:
    """Where the work is done. Spark takes seconds to start, and is not loaded unless it is asked for."""
    if master is None:
        yield run_in_threads
        return
    from pyspark.errors import PySparkException

    from headwater.spark.executors import spark_runner
    from headwater.spark.query_errors import query_error
    from headwater.spark.session import spark_logs, start_session

    with spark_logs() as folder:
        spark = start_session(master=master, log_folder=folder)
        try:
            yield spark_runner(spark, AGENT)
        except PySparkException as error:
            raise query_error(error) from error
        finally:
            spark.stop()


def _as_object(found: Verification) -> dict[str, Any]:
    return {
        "equal": found.is_equal,
        "behind": found.is_behind,
        "landed": found.landed,
        "pending": found.pending,
        "waiting_s": found.waiting_s,
        "differing": found.differing,
        "collections": {
            one.name: {"landed": one.landed, "pending": one.pending, "differing": one.differing}
            for one in found.collections
        },
        "counts": [{"kind": kind, "table": table, "count": count} for (kind, table), count in found.counts.items()],
        "findings": [
            {
                "kind": one.kind,
                "table": one.table,
                "what": one.what,
                "column": one.column,
                "vbucket": one.vbucket,
                "seqno": one.seqno,
                "file": one.file,
                "sentence": one.sentence,
            }
            for one in found.findings
        ],
        "rolled_back": found.rolled_back,
        "sentence": found.sentence,
    }


def print_verification(found: Verification) -> None:
    console = output_console()
    console.print(_table(found))
    shown: dict[tuple[str, str], int] = {}
    for one in found.findings:
        # A key may hold anything, and a terminal obeys none of it.
        console.print(printable(one.sentence), soft_wrap=True, markup=False)
        shown[one.kind, one.table] = shown.get((one.kind, one.table), 0) + 1
    for (kind, table), count in found.counts.items():
        if count > (seen := shown.get((kind, table), 0)):
            console.print(f"{table}: {count - seen:,} more of the kind '{kind}'", soft_wrap=True, markup=False)
    style = "bold red" if not found.is_equal else "yellow" if found.is_behind else "green"
    console.print(f"[{style}]{found.sentence}[/]", soft_wrap=True)


def _table(found: Verification) -> Table:
    table = Table("collection", show_footer=len(found.collections) > 1)
    table.columns[0].footer = "total"
    for header, total in (("landed", found.landed), ("pending", found.pending), ("differing", found.differing)):
        table.add_column(header, justify="right", footer=f"{total:,}")
    for one in found.collections:
        style = "bold red" if one.differing else None
        table.add_row(one.name, f"{one.landed:,}", f"{one.pending:,}", f"{one.differing:,}", style=style)
    return table
