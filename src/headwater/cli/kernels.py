"""`headwater kernels`: compile the kernels now, so that nobody waits for it later."""

from __future__ import annotations

import json
import time
from importlib import import_module

import rich_click as click

from headwater.phrases import missing_library, tell_first_compile
from headwater.protocol.kernels.machine_code import code_folder

_PARTS = {
    "client": ("headwater.client.warm_up", "headwater.transfer.warm_up", "headwater.cli.tailing.warm_up"),
    "node": ("headwater.node.warm_up", "headwater.node.dashboard.kernels"),
    "landing": ("headwater.lake.warm_up",),
}
"""The modules whose `warm_up` calls all kernels of a part once."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one line of JSON.")
def kernels(as_json: bool) -> None:
    """Compile the kernels now, and keep the machine code for later.

    Decoding, storing and streaming are compiled when they are first used on a machine, which takes a minute or so in
    all. This does it ahead: when an image is built, or before somebody waits. What is compiled already is only loaded.
    Parts whose libraries are not installed are left out. The folder is in the user's cache, or where NUMBA_CACHE_DIR
    says; copy it to machines with the same processor, Python and Headwater, and they need not compile.

    \b
    Example:
      headwater kernels
      NUMBA_CACHE_DIR=/opt/kernels headwater kernels --json
    """
    # Who has asked for it need not be told.
    tell_first_compile(None)
    began_s = time.monotonic()
    parts = [part for part, modules in _PARTS.items() if _warm_up(modules)]
    folder = code_folder()
    done = {"folder": str(folder), "parts": parts, "seconds": round(time.monotonic() - began_s, 1)}
    if as_json:
        click.echo(json.dumps(done))
    else:
        click.echo(f"compiled for {', '.join(parts)} in {done['seconds']} s: {folder}")


def _warm_up(modules: tuple[str, ...]) -> bool:
    """Whether the part's libraries are installed."""
    for name in modules:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            missing_library(error)
            return False
        module.warm_up()
    return True
