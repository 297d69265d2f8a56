"""How a command that can't go on says so: one sentence on standard error, and an exit code that tells the kind.

A frame around the sentence, as rich would draw, breaks it where a log or a script reads it.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

EXIT_INTERRUPTED = 130
"""128 and the number of the signal, as shells have it."""


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Tell what click raises and what goes wrong with standard output, and leave."""
    try:
        with _output_written():
            yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.ClickException as error:
        click.echo(f"Error: {_sentence(error)}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Error: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _sentence(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    possibilities = getattr(error, "possibilities", None)
    if possibilities:
        # click shows three of them, and those behind the first have little to do with what was meant.
        message = f"{error.message} {did_you_mean(possibilities[0])}"
    end = "" if message.endswith("?") else "."
    return f"{message.rstrip('.')}{end} See {error.ctx.command_path} --help"


def did_you_mean(name: str) -> str:
    return f"Did you mean {name}?"


# --- standard output ----------------------------------------------------------------------------------------------


@contextmanager
def _output_written() -> Iterator[None]:
    """A reader that has seen enough (`| head`) is no error, and a full disk is one that is told."""
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        _abandon_output()
        sys.exit(0)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _abandon_output()
        raise click.ClickException(f"standard output can't be written to: {error.strerror}") from error


def _reader_is_gone() -> bool:
    """Whether it is our own output that is broken, and not a connection."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # what is wrong with a file is told without being asked for
    except (io.UnsupportedOperation, ValueError):
        return False
    return bool(poll.poll(0))


def _abandon_output() -> None:
    """The stream still holds text that the interpreter would write on its way out, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
