"""`headwater verify`: compare a bucket with the tables of its landing."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.table import Table

from headwater.cli import options
from headwater.cli.output import click, output_console
from headwater.cli.pipelines import CommandWithPipelines, all_option, config_option, pipeline_name
from headwater.lake.chosen_rows import TransformFunction
from headwater.lake.lake_look import keep_verdict
from headwater.lake.location import Location
from headwater.lake.table_state import Selection
from headwater.lake.verify import AGENT, Limits, Verification, compare
from headwater.phrases import printable


@click.command(cls=CommandWithPipelines)
@click.argument("url", metavar="URL|NAME")
@click.argument("directory", required=False)
@config_option
@all_option
@options.storage_option
@options.read_options("verify")
@options.transform_option
@click.option("--master", metavar="URL", help="Run on the executors of this Spark master instead of this process.")
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
    type=options.parse_time,
    help="Fail with exit code 3 if a change has been pending for longer than this, such as 60s or 5m.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.connection_options
@options.errors_reported
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
    login: options.LoginOptions,
) -> None:
    """Compare a bucket with the tables of its landing.

    Every document of URL that the tables in DIRECTORY have reached must be the same in both: collection, key, value,
    flags, expiry, CAS, revision, seqno and, if they were landed, extended attributes. Newer changes are pending, which
    is not a fault unless `--max-pending` or `--max-age` is exceeded: the bucket may be written to in the meantime. The
    command checks every column of `documents`, `changes`, `history` and `rejects`, reads every file completely, and
    compares the logs with the files.

    The command stores the verdict in the lake's folder `_headwater`, for `headwater ui`.

    The exit code is 0 only if nothing differs, and 1 otherwise. Each fault is then reported with the document or the
    file, and its table; `headwater repair` repairs it. The exit code is 3 if nothing differs but the tables are too far
    behind. Tables into which no landing has ever succeeded are not equal.

    With NAME, the bucket, the tables and their connection settings come from a pipeline in headwater.toml. With --all,
    all pipelines of the file are verified one after the other; the exit code is 1 if one of them is not equal.

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
    settings = login.settings(url, agent=AGENT)
    location = Location.of(directory, storage_options)
    sent = None if transform is None else options.sent_to_tasks(transform, master)
    with options.task_runner(AGENT, master=master) as run:
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
        named = {"pipeline": name} if (name := pipeline_name()) else {}
        click.echo(json.dumps(named | _as_object(found)))
    else:
        print_verification(found)
    sys.exit(options.EXIT_FAILED if not found.is_equal else options.EXIT_BEHIND if found.is_behind else 0)


_FINDING_MEMBERS = ("kind", "table", "what", "column", "vbucket", "seqno", "file", "sentence")


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
        "findings": [{name: getattr(one, name) for name in _FINDING_MEMBERS} for one in found.findings],
        "rolled_back": found.rolled_back,
        "sentence": found.sentence,
    }


def print_verification(found: Verification) -> None:
    console = output_console()
    console.print(_table(found))
    shown: dict[tuple[str, str], int] = {}
    for one in found.findings:
        # A key may contain control characters, which must not reach the terminal.
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
