"""How a command that can't go on says so: one sentence on standard error, and an exit code that tells the kind.

A frame around the sentence, as rich would draw, breaks it where a log or a script reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

EXIT_INTERRUPTED = 130
"""128 and the number of the signal, as shells have it."""


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Tell what click raises, and leave."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.ClickException as error:
        click.echo(f"Error: {_sentence(error)}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("Error: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _sentence(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    return f"{message.rstrip('.')}. See {error.ctx.command_path} --help"
