"""`headwater repair`: rebuild what `headwater verify` reports as wrong."""

from __future__ import annotations

import json
import sys
from typing import Any

from headwater.cli import options
from headwater.cli.output import click, output_console
from headwater.cli.pipelines import CommandWithPipelines, config_option
from headwater.cli.verify import print_verification
from headwater.lake.chosen_rows import Transform, TransformFunction
from headwater.lake.lake_look import keep_verdict
from headwater.lake.location import Location
from headwater.lake.repair import AGENT, Repair, read_from_bucket
from headwater.lake.repair import repair as repair_tables
from headwater.lake.table_state import Selection
from headwater.lake.verify import compare
from headwater.landing.tasks import LocalRunner
from headwater.phrases import printable


@click.command(cls=CommandWithPipelines)
@click.argument("url", metavar="URL|NAME")
@click.argument("directory", required=False)
@config_option
@options.storage_option
@options.transform_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.connection_options
@options.errors_reported
def repair(
    url: str,
    directory: str | None,
    storage_options: dict[str, str],
    transform: TransformFunction | None,
    as_json: bool,
    login: options.LoginOptions,
) -> None:
    """Repair the tables of a landing.

    Verifies the tables in DIRECTORY, and rebuilds what is wrong: the statistics in the logs from the files,
    `documents`, `rejects` and `history` from `changes`, and vbuckets of `changes` from the bucket. Each step is one
    commit, so readers are not disturbed, and you can run an interrupted repair again. Stop the landing first: if one is
    running, the repair ends with an error.

    Data that the bucket no longer has is lost, and the command reports it: superseded versions in `changes`, and the
    corresponding versions in `history`. A damaged log can't be repaired.

    The exit code is 0 if the tables are equal afterwards, and 1 otherwise.

    With NAME, the bucket, the tables and their connection settings come from a pipeline in headwater.toml.

    \b
    Examples:
      headwater repair couchbase://localhost/default /data/lake
      headwater repair shop
    """
    if directory is None:
        raise click.UsageError("Missing argument 'DIRECTORY'.")
    settings = login.settings(url, agent=AGENT)
    location = Location.of(directory, storage_options)
    sent = None if transform is None else Transform.of(transform)
    run = LocalRunner()
    done = repair_tables(
        location,
        lambda: compare(settings, location, transform=sent, run=run, by_group=True),
        read_from_bucket(settings, sent),
        run=run,
    )
    if problem := keep_verdict(location, done.left, compared=str(Selection())):
        click.echo(f"Note: {printable(problem)}", err=True)
    if as_json:
        click.echo(json.dumps(_as_object(done)))
    else:
        _print(done)
    sys.exit(0 if done.left.is_equal else options.EXIT_FAILED)


def _as_object(done: Repair) -> dict[str, Any]:
    return {
        "equal": done.left.is_equal,
        "found": [one.sentence for one in done.found.findings],
        "done": done.done,
        "lost": done.lost,
        "left": [one.sentence for one in done.left.findings],
        "sentence": done.left.sentence,
    }


def _print(done: Repair) -> None:
    console = output_console()
    for one in done.found.findings:
        console.print(f"Found: {printable(one.sentence)}", soft_wrap=True, markup=False)
    for title, sentences in (("Repaired", done.done), ("Lost", done.lost)):
        for sentence in sentences:
            console.print(f"{title}: {printable(sentence)}", soft_wrap=True, markup=False)
    if done.found.is_equal:
        console.print("There is nothing to repair.")
    print_verification(done.left)
