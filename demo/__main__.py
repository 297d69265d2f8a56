"""`python -m demo`: what `make demo` runs."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from demo.commands import PASSWORD, USER, CommandFailed
from demo.screen import Screen
from demo.shop import COLLECTION
from demo.story import README, written_into
from headwater import HeadwaterError

if TYPE_CHECKING:
    from demo.scenes import Played

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@click.command()
@click.option(
    "--documents",
    type=click.IntRange(min=100),
    default=20_000,
    envvar="HEADWATER_DEMO_DOCUMENTS",
    show_envvar=True,
    show_default=True,
    help="To load.",
)
@click.option("--seed", default=1, show_default=True, help="Other documents and other writes with another seed.")
@click.option("--remove", is_flag=True, help="Leave no tables behind.")
@click.option("--readme", is_flag=True, help="Write what was seen of the order into README.md.")
def main(documents: int, seed: int, remove: bool, readme: bool) -> None:
    """Follow one order of a shop: into the bucket, into a table, and back when a node dies that alone had its payment.

    The exit code is 0 only if the table equals the bucket in the end.
    """
    screen = Screen()
    folder = Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    # Spark's Python side reports an interruption at length.
    logging.basicConfig(filename=folder / "demo.log")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    code, keep = EXIT_FAILED, True
    try:
        played = _play(screen, folder, documents=documents, seed=seed)
        if played is not None:
            code, keep = 0, not remove
            if keep:
                _print_what_next(screen, folder, played)
            if readme:
                README.write_text(written_into(README.read_text(), played.story))
            if keep and sys.stdin.isatty():
                _serve_page(screen, folder / "lake")
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


def _play(screen: Screen, folder: Path, **choices: int) -> Played | None:
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


def _print_what_next(screen: Screen, folder: Path, played: Played) -> None:
    lake = folder / "lake"
    screen.print(f"\nThe tables lie in [bold]{lake}[/]. To look further:\n")
    screen.quote(
        f"""\
# the page of this landing, at any time: its batches, what was taken back, its tables
.venv/bin/headwater ui {lake}
# the orders by their status
.venv/bin/python -c "import polars; print(polars.read_delta('{lake}/documents/{COLLECTION}').group_by('status').len())"
# the bucket again, with its dashboard, until Ctrl-C
.venv/bin/{played.serve_again} --user {USER} --password {PASSWORD}"""
    )
    screen.print(f"\nWhen you have seen enough: rm -r {folder}")


def _serve_page(screen: Screen, lake: Path) -> None:
    """Where a person sits before it, the page is there at once."""
    command = [sys.executable, "-m", "headwater", "ui", str(lake), "--listen", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as page:
        assert page.stderr is not None
        screen.print(f"\n{page.stderr.readline().strip()}\nIt is there until you press Enter.")
        sys.stdin.readline()
        page.terminate()


if __name__ == "__main__":
    main()
