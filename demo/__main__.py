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
from demo.shop import COLLECTIONS, SCOPE
from demo.telling import Teller
from headwater.errors import HeadwaterError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@click.command()
@click.option(
    "--documents", type=click.IntRange(min=len(COLLECTIONS)), default=300_000, show_default=True, help="To load."
)
@click.option("--drills", type=click.IntRange(1, 100), default=6, show_default=True, help="Vbuckets to roll back.")
@click.option("--seed", default=1, show_default=True, help="Other documents and other writes with another seed.")
@click.option("--remove", is_flag=True, help="Leave no tables behind.")
def main(documents: int, drills: int, seed: int, remove: bool) -> None:
    """Land a bucket in Delta tables while writes go on, through a rollback, and compare the two in the end.

    The exit code is 0 only if they are equal.
    """
    teller = Teller()
    folder = Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    # Spark's Python side tells of an interruption at length.
    logging.basicConfig(filename=folder / "demo.log")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    code, keep = EXIT_FAILED, True
    try:
        if _play(teller, folder, documents=documents // len(COLLECTIONS), drills=drills, seed=seed):
            code, keep = 0, not remove
    except KeyboardInterrupt:
        code, keep = EXIT_INTERRUPTED, False
        teller.fail("interrupted; nothing is left running")
    except (HeadwaterError, CommandFailed) as error:
        teller.fail(str(error))
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    elif code == 0:
        _tell_what_next(teller, folder)
    else:
        teller.tell(f"What there is of logs and tables lies in {folder}")
    sys.exit(code)


def _play(teller: Teller, folder: Path, **choices: int) -> bool:
    with teller.step("Importing libraries"):
        # Here, because it takes a while, and whoever breaks it off sees no traceback.
        from demo.scenes import Demo
    with ExitStack() as running:
        try:
            return Demo(teller, folder, **choices).play(running)
        finally:
            # Nothing may break off what puts everything away.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)


def _tell_what_next(teller: Teller, folder: Path) -> None:
    login = f"--user {USER} --password {PASSWORD}"
    lake = folder / "lake"
    teller.tell(f"\nThe tables lie in [bold]{lake}[/]. Yours now:\n")
    teller.quote(
        f"""\
.venv/bin/python -c "import polars; print(polars.read_delta('{lake}/documents/{SCOPE}.orders'))"
.venv/bin/python -c "import polars; print(polars.read_delta('{lake}/changes').group_by('op', 'void').len())"
.venv/bin/headwater serve --data {folder}/node {login}    # the bucket again; then, elsewhere:
.venv/bin/headwater tail couchbase://127.0.0.1/default --from beginning --to now {login} | head
rm -r {folder}"""
    )


if __name__ == "__main__":
    main()
