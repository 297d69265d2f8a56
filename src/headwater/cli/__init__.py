"""The command `headwater`: one file a command."""

from __future__ import annotations

import rich_click as click

from headwater import __version__
from headwater.cli.decode import decode


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headwater")
def main() -> None:
    """Couchbase's change protocol (DCP) in Python, from the wire to the lakehouse."""


main.add_command(decode)
