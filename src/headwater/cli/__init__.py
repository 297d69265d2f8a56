"""The command `headwater`: one file a command, imported when it is asked for.

A pure client has no server's libraries installed, and a command should not pay for what another one needs.
"""

from __future__ import annotations

from importlib import import_module

import rich_click as click

from headwater import __version__

COMMANDS = ("collections", "decode", "drill", "land", "load", "serve", "tail", "verify")
"""The module and the function have the command's name."""


class CommandsByName(click.RichGroup):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = import_module(f"headwater.cli.{cmd_name}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("headwater"):
                raise
            return _not_installed(cmd_name, error.name)
        command: click.Command = getattr(module, cmd_name)
        return command


def _not_installed(command: str, module: str) -> click.Command:
    """Stands for a command whose libraries are missing, and says how to get them."""
    advice = f"Needs {module}, which is not installed: pip install 'headwater[node]'"

    def refuse() -> None:
        raise click.ClickException(advice)

    return click.Command(command, help=advice, callback=refuse)


@click.group(cls=CommandsByName, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headwater")
def main() -> None:
    """Couchbase's change protocol (DCP) in Python, from the wire to the lakehouse."""
