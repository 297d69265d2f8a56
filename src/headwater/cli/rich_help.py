"""click, as all commands use it: with pages of help in columns and colours where rich-click is installed.

It comes with the extra `cli`. A mere client has click alone, whose pages say the same.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich_click as click
    from rich_click import RichCommand, RichGroup
else:
    try:
        import rich_click as click
    except ModuleNotFoundError:
        import click
    RichCommand = getattr(click, "RichCommand", click.Command)
    RichGroup = getattr(click, "RichGroup", click.Group)

if layout := getattr(click, "rich_click", None):
    # An option and what it takes in one column, so that nothing is cut on a terminal of 60 columns.
    layout.OPTIONS_TABLE_COLUMN_TYPES = ["opt_all_metavar", "help"]
    layout.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"
    layout.OPTIONS_TABLE_HELP_SECTIONS = ["help", "range", "required", "default", "envvar", "deprecated"]

__all__ = ["RichCommand", "RichGroup", "click"]
