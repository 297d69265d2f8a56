"""`headwater tail`: print the changes of a bucket as they come, for people, scripts and Arrow."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, cast

import rich_click as click
from click.core import ParameterSource

from headwater import __version__
from headwater.cli.interruptions import Interrupted
from headwater.cli.options import EXIT_FAILED, CommandWithOldNames, LoginOptions, connection_options, fail, table_option
from headwater.cli.tailing.formats import Encoder, EventsOnce, Format, KeyPattern, WantedRows, encoder
from headwater.cli.tailing.resuming import read_start, resume_command
from headwater.cli.tailing.tailer import Tailer
from headwater.client.blocking_client import Client
from headwater.client.connection_string import ConnectionString
from headwater.client.offsets import VBUCKETS_MAX
from headwater.client.read_options import Priority, ReadKeywords, ReadOptions, Snapshots
from headwater.client.settings import ClientSettings
from headwater.errors import BucketReplaced, CheckpointError, HeadwaterError, InvalidInput
from headwater.phrases import counted, printable

_RANGE = re.compile(r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?")


def _parse_vbuckets(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        match = _RANGE.fullmatch(value)
        if match is None or not int(match["first"]) <= int(match["last"] or match["first"]) < VBUCKETS_MAX:
            raise click.BadParameter(f"{value!r} is no vbucket: write 12, or 0-15 for a range.")
    return values


def _vbuckets(values: tuple[str, ...]) -> frozenset[int] | None:
    """None for all of them."""
    found: set[int] = set()
    for value in values:
        first, _, last = value.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found) if values else None


# --- the command --------------------------------------------------------------------------------------------------


@click.command(cls=CommandWithOldNames)
@click.argument("url")
@table_option(
    "start", metavar="OFFSETS", help="Where to start: beginning, now, a file with offsets, or offsets as JSON."
)
@table_option(
    "end",
    type=click.Choice(["now", "inf"]),
    default="inf",
    show_default=True,
    help="Where to end: with what the bucket has now, or never.",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice([choice.value for choice in Format]),
    default=Format.PRETTY.value,
    show_default=True,
    help="Lines for people, one JSON object a line, or an Arrow IPC stream.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@table_option("collections", metavar="SCOPE.COLLECTION")
@table_option("scopes", metavar="SCOPE")
@table_option("vbuckets", metavar="N|N-M", callback=_parse_vbuckets)
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="PATTERN",
    help="Only keys like this, * for any characters, ? for one; repeat for more. All changes are still received.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after N changes.")
@table_option("no_value")
@table_option("xattrs")
@table_option("history")
@table_option("snapshots", type=click.Choice([choice.value for choice in Snapshots]))
@table_option("mitigate_rollbacks")
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Go on where the last run with this file ended, and keep the offsets in it. --from is for the first run.",
)
@click.option(
    "--offsets-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the offsets to it at the end, for --from.",
)
@table_option("buffer_bytes")
@table_option("connections_per_node")
@table_option("priority", type=click.Choice([choice.value for choice in Priority]))
@table_option("compression")
@table_option("name", default="headwater-tail")
@table_option("give_up_after_s", help="Seconds that a vbucket may be out of reach before the command fails.")
@click.option(
    "-q", "--quiet", is_flag=True, help="No line with the lag. There is none either where the changes go to a pipe."
)
@connection_options
@click.pass_context
def tail(
    context: click.RichContext,
    /,
    url: str,
    start: str,
    end: str,
    format_name: str,
    as_json: bool,
    limit: int | None,
    keys: tuple[str, ...],
    checkpoint: Path | None,
    offsets_file: Path | None,
    quiet: bool,
    login: LoginOptions,
    **options: Any,
) -> None:
    """Print the changes of a bucket as they come.

    URL is couchbase://host[:port]/bucket, or couchbases:// for TLS. There is one line a change: mutations, deletions,
    expirations, collections that come and go, and rollbacks, which say that changes shown before did not happen.
    Every vbucket has an event of its own for a collection: lines for people show it once, JSON and Arrow all of
    them.

    Ctrl-C ends it, and prints the command that goes on from there. The exit code is 0 at the end of what was asked for
    and where the reader of a pipe has left, 1 for a failure, 2 for a wrong command line, 130 after Ctrl-C and 143 after
    SIGTERM.

    \b
    Examples:
      headwater tail couchbase://localhost/default
      headwater tail couchbase://localhost/default --to now --json | jq .key
      headwater tail couchbase://localhost/default --from now --key 'user::*'
      headwater tail couchbase://localhost/default --checkpoint tail.json --json
    """
    format_ = _format(context, format_name, as_json=as_json)
    try:
        tailer = Tailer(
            client=_client(url, login),
            start=read_start(start),
            options=_read_options(end, **options),
            encoder=_encoder(format_, **options),
            wanted=_wanted(format_, keys),
            limit=limit,
            checkpoint=checkpoint,
            offsets_file=offsets_file,
            quiet=quiet,
        )
    except HeadwaterError as error:
        fail(str(error))
    exit_code = _run(tailer, context)
    if tailer.interruptions.number is not None:
        # At once: a thread that waits for a server's answer would be waited for.
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _client(url: str, login: LoginOptions) -> Client:
    where = ConnectionString.parse(url)
    agent = f"headwater-tail/{__version__}"
    return Client(ClientSettings.of(where, login.credentials(where), tls=login.tls_settings, agent=agent))


def _read_options(end: str, *, vbuckets: tuple[str, ...], **others: Any) -> ReadKeywords:
    """The options of the client, checked."""
    options: Any = {"end": None if end == "inf" else end, "vbuckets": _vbuckets(vbuckets), **others}
    ReadOptions.make(**options)
    return cast(ReadKeywords, options)


def _format(context: click.RichContext, name: str, *, as_json: bool) -> Format:
    is_given = context.get_parameter_source("format_name") is ParameterSource.COMMANDLINE
    if as_json and is_given and name != Format.JSONL:
        raise click.UsageError(f"--json is not --format {name}: give one of the two.")
    return Format.JSONL if as_json else Format(name)


def _wanted(format_: Format, keys: tuple[str, ...]) -> WantedRows | None:
    """Events have no key. Programs get every one: a vbucket's offset is behind its own."""
    if keys:
        return KeyPattern(keys)
    return EventsOnce() if format_ is Format.PRETTY else None


def _encoder(format_: Format, *, no_value: bool, xattrs: bool, **_: Any) -> Encoder:
    if format_ is Format.ARROW and sys.stdout.isatty():
        raise InvalidInput(
            "Arrow is no text for a terminal", hint="Send it to a file (> changes.arrows) or a program (| program)"
        )
    return encoder(format_, no_value=no_value, xattrs=xattrs)


# --- the end ------------------------------------------------------------------------------------------------------


def _run(tailer: Tailer, context: click.RichContext) -> int:
    """Returns the exit code, and prints the reason if it is not 0."""
    try:
        tailer.run()
    except BrokenPipeError:
        # The reader of our output has seen enough (`| head`).
        tailer.output.abandon()
        return 0
    except Interrupted:
        what = "Interrupted" if tailer.interruptions.number is signal.SIGINT else "Ended"
        _print_how_to_go_on(f"{what} after {counted(tailer.written, 'change')}.", tailer, context)
        return tailer.interruptions.exit_code
    except HeadwaterError as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        if tailer.written and not isinstance(error, CheckpointError | BucketReplaced):
            _print_how_to_go_on(f"{counted(tailer.written, 'change')} came before that.", tailer, context)
        return EXIT_FAILED
    return 0


def _print_how_to_go_on(what: str, tailer: Tailer, context: click.RichContext) -> None:
    if tailer.offsets is None:
        return
    command = resume_command(context, tailer.offsets, is_terminal=sys.stderr.isatty())
    click.echo(f"{what} To go on from there:\n  {printable(command)}", err=True)
