"""`python -m demo`: what `make demo` runs."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import rich_click as click

from demo.commands import PASSWORD, USER, CommandFailed
from demo.screen import Screen
from demo.shop import SCOPE, SHARES
from headwater import HeadwaterError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@click.command()
@click.option(
    "--documents",
    type=click.IntRange(min=10 * len(SHARES)),
    default=300_000,
    envvar="HEADWATER_DEMO_DOCUMENTS",
    show_envvar=True,
    show_default=True,
    help="To load.",
)
@click.option("--seed", default=1, show_default=True, help="Other documents and other writes with another seed.")
@click.option("--remove", is_flag=True, help="Leave no tables behind.")
def main(documents: int, seed: int, remove: bool) -> None:
    """Land a bucket in Delta tables while writes go on, kill a node, and compare tables and bucket in the end.

    The exit code is 0 only if they are equal.
    """
    screen = Screen()
    folder = Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    # Spark's Python side reports an interruption at length.
    logging.basicConfig(filename=folder / "demo.log")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    code, keep = EXIT_FAILED, True
    try:
        serve_again = _play(screen, folder, documents=documents, seed=seed)
        if serve_again is not None:
            code, keep = 0, not remove
            if keep:
                _print_what_next(screen, folder, serve_again)
    except KeyboardInterrupt:
        code, keep = EXIT_INTERRUPTED, False
        screen.fail("interrupted; nothing is left running")
    except (HeadwaterError, CommandFailed) as error:
        screen.fail(str(error))
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    elif code:
        screen.print(f"All logs and tables lie in {folder}")
    sys.exit(code)


def _play(screen: Screen, folder: Path, **choices: int) -> str | None:
    with screen.step("Importing libraries"):
        # Here, because it takes a while, and an interruption shows no traceback.
        from demo.scenes import Demo
    with ExitStack() as running:
        try:
            return Demo(screen, folder, **choices).play(running)
        finally:
            # Nothing may break off what puts everything away.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)


def _print_what_next(screen: Screen, folder: Path, serve_again: str) -> None:
    lake = folder / "lake"
    screen.print(f"\nThe tables lie in [bold]{lake}[/]. Three things to try:\n")
    screen.quote(
        f"""\
# the live documents of a collection
.venv/bin/python -c "import polars; print(polars.read_delta('{lake}/documents/{SCOPE}.orders'))"
# the changes that made them; those that the failover took back are void
.venv/bin/python -c "import polars; print(polars.read_delta('{lake}/changes').group_by('op', 'void').len())"
# the bucket again, with its dashboard, until Ctrl-C
.venv/bin/{serve_again} --user {USER} --password {PASSWORD}"""
    )
    screen.print(f"\nWhen you have seen enough: rm -r {folder}")


if __name__ == "__main__":
    main()
