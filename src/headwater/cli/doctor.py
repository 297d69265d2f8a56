"""`headwater doctor`: can this machine run a node, read that bucket and write that lake?

The checks are a table in `doctor_checks`, in the order in which a user meets what they look at.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import rich_click as click
from rich.table import Column, Table
from rich.text import Text

from headwater.cli.doctor_checks import CHECKS, HTTP_PORT, KV_PORT, Asked, Check, Found, State
from headwater.cli.options import EXIT_FAILED, LoginOptions, connection_options, errors_reported, storage_option
from headwater.cli.output import output_console
from headwater.cli.pipelines import CommandWithPipelines, config_option
from headwater.client.connection_string import ConnectionString
from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.phrases import counted, printable

TIMEOUTS = Timeouts(connect_s=5.0, answer_s=10.0)
STYLES = {State.WARNING: "yellow", State.FAILED: "bold red", State.UNKNOWN: "yellow", State.SKIPPED: "dim"}


def examine(asked: Asked, checks: tuple[Check, ...] = CHECKS) -> dict[str, Found]:
    """What all checks find, by name."""
    found: dict[str, Found] = {}
    for check in checks:
        if check.after is not None and found[check.after].state is State.FAILED:
            found[check.name] = Found(State.UNKNOWN, f"the check of {check.after} failed, and comes first")
        else:
            found[check.name] = check.look(asked)
    return found


@click.command(cls=CommandWithPipelines)
@click.argument("url", metavar="[URL|NAME]", required=False)
@click.argument("directory", required=False)
@config_option
@storage_option
@click.option("--data", type=click.Path(path_type=Path), metavar="DIR", help="The data folder of a node to be started.")
@click.option("--host", help="The address that it is to listen on. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(1, 65535), help=f"Its key-value port. [default: {KV_PORT}]")
@click.option("--http-port", type=click.IntRange(1, 65535), help=f"Its HTTP port. [default: {HTTP_PORT}]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
@errors_reported
def doctor(
    url: str | None,
    directory: str | None,
    storage_options: dict[str, str],
    data: Path | None,
    host: str | None,
    port: int | None,
    http_port: int | None,
    as_json: bool,
    login: LoginOptions,
) -> None:
    """Check what Headwater needs on this machine, and say what to do.

    Looks at Python and its libraries, the kernels and Java; without URL, or with options about a node, at its ports and
    its data folder. With URL it connects to the bucket, logs in, and asks whether this user may stream it; with
    DIRECTORY, the place of a landing's tables, whether they can be written and are this bucket's. Nothing is changed.

    Each check is ok, warning, failed, unknown (it can't be seen from here) or skipped (not asked for, or not
    installed). The exit code is 1 where a check has failed, and 0 otherwise.

    With NAME, the bucket and the tables are those of a pipeline in headwater.toml.

    \b
    Examples:
      headwater doctor
      headwater doctor couchbase://localhost/default /data/lake
      headwater doctor shop --json
    """
    settings = None
    if url is not None:
        where = ConnectionString.parse(url)
        settings = ClientSettings.of(where, login.credentials(where), tls=login.tls_settings, timeouts=TIMEOUTS)
    asked = Asked(
        settings=settings,
        directory=directory,
        storage_options=storage_options,
        is_about_node=url is None or any(one is not None for one in (data, host, port, http_port)),
        data=data,
        host=host or "127.0.0.1",
        port=port or KV_PORT,
        http_port=http_port or HTTP_PORT,
    )
    found = examine(asked)
    failed = [name for name, one in found.items() if one.state is State.FAILED]
    if as_json:
        rows = [{"check": name, "state": one.state, "found": one.says, "do": one.do} for name, one in found.items()]
        click.echo(json.dumps({"ok": not failed, "checks": rows}))
    else:
        _print(found, failed)
    sys.exit(EXIT_FAILED if failed else 0)


def _print(found: Mapping[str, Found], failed: list[str]) -> None:
    table = Table("check", "state", Column("found", overflow="fold"))
    advice: dict[str, list[str]] = {}
    for name, one in found.items():
        # What servers and file names say may hold anything, and a terminal obeys none of it.
        table.add_row(name, one.state, Text(printable(one.says)), style=STYLES.get(one.state))
        if one.do:
            advice.setdefault(printable(one.do), []).append(name)
    console = output_console()
    console.print(table)
    # Not in the table: a command that is broken over lines can't be copied.
    for do, names in advice.items():
        console.print(f"{', '.join(names)}: {do}", soft_wrap=True, markup=False)
    verdict = f"{counted(len(failed), 'check')} failed: {', '.join(failed)}." if failed else "No check failed."
    console.print(verdict, style="bold red" if failed else "green", soft_wrap=True)
