"""The command `headwater`: one file a command, imported when it is asked for.

A pure client has no server's libraries installed, and a command should not pay for what another one needs.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import rich_click as click

from headwater import __version__
from headwater.cli.lazy_command import LazyCommand, completion_option
from headwater.cli.output import errors_in_one_sentence
from headwater.phrases import COMPILING, did_you_mean, report_first_compile

COMMANDS = (
    "buckets",
    "check",
    "cluster",
    "collections",
    "decode",
    "doctor",
    "drill",
    "export",
    "kernels",
    "land",
    "load",
    "repair",
    "replicate",
    "serve",
    "sim",
    "tail",
    "ui",
    "users",
    "verify",
)
"""The module and the function have the command's name."""


class CommandsByName(click.RichGroup):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return LazyCommand(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        nearest = get_close_matches(args[0], COMMANDS, n=1) if args[0] not in COMMANDS else []
        if nearest:
            ctx.fail(f"No such command {args[0]!r}. {did_you_mean(nearest[0])}")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> Any:
        with errors_in_one_sentence():
            return super().make_context(info_name, args, parent=parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with errors_in_one_sentence():
            return super().invoke(ctx)


@click.group(cls=CommandsByName, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headwater")
@completion_option
def main() -> None:
    """Couchbase's change protocol (DCP) in Python, from the wire to the lakehouse.

    The exit code is 0 for success, 1 for a failure, which one sentence on standard error explains, 2 for a wrong
    command line, 130 after Ctrl-C and 143 after SIGTERM. Some commands have more: see their --help.

    \b
    Examples:
      headwater serve --data /tmp/demo --user me --password secret
      headwater load couchbase://127.0.0.1/default --generate 1000
      headwater tail couchbase://127.0.0.1/default
      headwater --completion bash > headwater-completion.bash
    """
    report_first_compile(lambda: click.echo(COMPILING, err=True))
