"""`headwater --completion SHELL`: the script that lets a shell complete commands, options and choices."""

from __future__ import annotations

import rich_click as click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "headwater"
VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"
"""By which a shell's script asks the program; the name is click's."""


def _print_script(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:
        return
    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(context.command, {}, PROGRAM, VARIABLE)
    click.echo(script.source_template % script.source_vars())
    context.exit()


completion_option = click.option(
    "--completion",
    type=click.Choice(SHELLS),
    expose_value=False,
    is_eager=True,
    callback=_print_script,
    help="Print the script for completion in a shell.",
)
