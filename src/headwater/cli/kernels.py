"""`headwater kernels`: compile the kernels ahead of time, so that no command has to wait for it."""

from __future__ import annotations

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

from headwater.cli.output import click
from headwater.kernels.machine_code import KERNEL_MODULES, code_folder, compile_kernels
from headwater.phrases import missing_library, report_first_compile

PARTS = {
    "client": ("headwater.protocol", "headwater.client", "headwater.transfer", "headwater.lake.json_fields"),
    "node": ("headwater.store", "headwater.node"),
    "landing": ("headwater.lake",),
    "Spark": ("headwater.spark",),
}
"""The packages whose kernels a part uses, in addition to those of the parts above it."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON.")
def kernels(as_json: bool) -> None:
    """Compile the kernels and keep the machine code for later runs.

    Headwater compiles its kernels for decoding, storing and streaming when they are first used on a machine, which
    takes up to a minute in all. This command compiles them ahead of time, for example when you build an image. Kernels
    that are already compiled are only loaded. Kernels whose libraries are not installed are skipped. The folder is in
    the user's cache, or in NUMBA_CACHE_DIR. You can copy it to machines with the same processor, Python and Headwater,
    which then need not compile.

    \b
    Example:
      headwater kernels
      NUMBA_CACHE_DIR=/opt/kernels headwater kernels --json
    """
    # The user has requested the compilation, so it needs no notice.
    report_first_compile(None)
    began_s = time.monotonic()
    parts = []
    if not any(code_folder().iterdir()):
        _compile_side_by_side()
    for part, packages in PARTS.items():
        try:
            compile_kernels(*packages)
        except ModuleNotFoundError as error:
            # Raises if the missing module is one of Headwater's own.
            missing_library(error)
        else:
            parts.append(part)
    folder = code_folder()
    done = {"folder": str(folder), "parts": parts, "seconds": round(time.monotonic() - began_s, 1)}
    if as_json:
        click.echo(json.dumps(done))
    else:
        click.echo(f"compiled for {', '.join(parts)} in {done['seconds']} s: {folder}")


def _compile_side_by_side() -> None:
    """Compile all modules on all cores. Each process compiles the few kernels that they share."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_module, KERNEL_MODULES))


def _compile_module(name: str) -> None:
    report_first_compile(None)
    # The parent process reports a library that is not installed.
    with suppress(ModuleNotFoundError):
        compile_kernels(name)
