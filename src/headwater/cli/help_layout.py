"""How --help looks: an option and what it takes in one column, so that nothing is cut on a terminal of 60 columns."""

from __future__ import annotations

import click
from rich_click import rich_click as layout

layout.OPTIONS_TABLE_COLUMN_TYPES = ["opt_all_metavar", "help"]
layout.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"
layout.OPTIONS_TABLE_HELP_SECTIONS = ["help", "range", "required", "default", "envvar", "deprecated"]

NUMBER = "N"
_NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


def name_numbers(command: click.Command) -> click.Command:
    """Call numbers N, where a command has no better name for them: "INTEGER RANGE" says less, in more room."""
    if isinstance(command, click.Group):
        for below in command.commands.values():
            name_numbers(below)
    for parameter in command.params:
        if parameter.metavar is None and isinstance(parameter.type, _NUMBERS):
            parameter.metavar = NUMBER
    return command
