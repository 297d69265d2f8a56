"""The command `headwater`. Each subcommand is one file; it is listed by name and summary, and imported only when used.

A client-only installation lacks the server's libraries, and a command should not pay for libraries that another one
needs. The command list and shell completion need only each command's summary line. It is read from the source file,
because importing all modules takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from click import types
from click.shell_completion import get_completion_class

from headwater import __version__
from headwater.cli.output import RichCommand, RichGroup, click, errors_in_one_sentence
from headwater.phrases import COMPILING, did_you_mean, install_command, missing_library, report_first_compile

NUMBER = "N"
_NUMBERS = (types.IntParamType, types.FloatParamType)


def name_numbers(command: click.Command) -> click.Command:
    """Show numbers as N in help texts, unless a command names them: "INTEGER RANGE" says less and takes more space."""
    if isinstance(command, click.Group):
        for below in command.commands.values():
            name_numbers(below)
    for parameter in command.params:
        if parameter.metavar is None and isinstance(parameter.type, _NUMBERS):
            parameter.metavar = NUMBER
    return command


class LazyCommand(RichCommand):
    """Stands for the command `name` of the module `headwater.cli.name`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, help=summary_of(name))

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> Any:
        """Return the real command's context, so that click runs, documents and completes the real command."""
        assert self.name is not None
        return load_command(self.name).make_context(info_name, args, parent=parent, **extra)


_WITH_ARROW = frozenset({"export", "land", "load", "repair", "tail", "verify"})
"""The commands that use Arrow. Code that may need pandas, such as a Spark worker, runs in another process."""


class _NoPandas:
    """A module finder that makes pandas look as if it were not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=name)


def _leave_out_pandas() -> None:
    """Keep pyarrow from importing pandas in this process.

    When pyarrow creates its first array, it imports pandas, if installed, to recognize pandas types later. The
    import takes a quarter of a second, and no command passes pandas types. pyarrow does not retry a failed import.
    """
    if "pyarrow" in sys.modules:
        return  # The process has other users besides the command.
    sys.meta_path.insert(0, _NoPandas)
    try:
        import_module("pyarrow").array([])
    finally:
        sys.meta_path.remove(_NoPandas)


@contextmanager
def _imports_kept() -> Iterator[None]:
    """Import with the garbage collector off, and exempt the imported objects from it: they live until the process ends.

    Scanning all modules repeatedly, and once more at exit, takes a fifth of a short command's time.
    """
    if "headwater.cli.options" in sys.modules:
        yield  # This process has already loaded a command, or does more than run one.
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.freeze)


def load_command(name: str) -> click.Command:
    """Return the command itself, or a stand-in that reports which package to install."""
    if name in _COMPILED and find_spec("llvmlite") is None:
        return _not_installed(name, "numba")
    try:
        with _imports_kept():
            if name in _WITH_ARROW:
                _leave_out_pandas()
            module = import_module(f"headwater.cli.{name}")
    except ModuleNotFoundError as error:
        return _not_installed(name, missing_library(error))
    return name_numbers(getattr(module, name))


def summary_of(name: str) -> str:
    """Return the first line of the command's docstring."""
    spec = find_spec(f"headwater.cli.{name}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    # Found with a regular expression: Python's own parser occasionally fails while other threads use it.
    found = re.search(rf'^def {name}\(.*?\n?\) -> None:\n    """(?P<summary>.*)$', source, re.MULTILINE | re.DOTALL)
    assert found is not None, f"headwater.cli.{name} has no command {name}"
    return found["summary"].partition("\n")[0].removesuffix('"""')


_EXTRAS = {
    "decode": "cli",
    "export": "fast",
    "kernels": "fast",
    "land": "lake",
    "load": "fast",
    "repair": "lake",
    "ui": "lake",
    "verify": "lake",
}
"""The extra to install for a command; by default that of the node."""
_COMPILED = frozenset({"check", "export", "kernels", "land", "load", "repair", "serve", "sim", "verify"})
"""The commands that need compiled kernels. Client-only commands can run their kernels in plain Python."""


def _not_installed(command: str, module: str) -> click.Command:
    """Return a stand-in for a command whose libraries are missing. It reports how to install them."""
    advice = f"Needs {module}, which is not installed. Run {install_command(_EXTRAS.get(command, 'node'))}"

    def refuse() -> None:
        raise click.ClickException(advice)

    # Accept any arguments, so that the missing library is reported first.
    takes_anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(command, help=advice, callback=refuse, context_settings=takes_anything)


# --- completion ---------------------------------------------------------------------------------------------------


SHELLS = ("bash", "zsh", "fish")
PROGRAM = "headwater"
VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"
"""The variable in which a shell's completion script passes its request. click defines the name."""


def _print_script(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:
        return
    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(context.command, {}, PROGRAM, VARIABLE)
    click.echo(script.source_template % script.source_vars())
    context.exit()


completion_option = click.option(
    "--completion",
    type=click.Choice(SHELLS),
    expose_value=False,
    is_eager=True,
    callback=_print_script,
    help="Print the script for completion in a shell.",
)


COMMANDS = (
    "buckets", "check", "cluster", "collections", "decode", "doctor", "drill", "export", "health", "judge", "kernels",
    "land", "load", "repair", "replicate", "serve", "sim", "tail", "ui", "users", "verify",
)  # fmt: skip
"""The module and the function are named after the command."""


class CommandsByName(RichGroup):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return LazyCommand(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        nearest = get_close_matches(args[0], COMMANDS, n=1) if args[0] not in COMMANDS else []
        if nearest:
            ctx.fail(f"No such command {args[0]!r}. {did_you_mean(nearest[0])}")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> Any:
        with errors_in_one_sentence():
            return super().make_context(info_name, args, parent=parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with errors_in_one_sentence():
            return super().invoke(ctx)


@click.group(cls=CommandsByName, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headwater")
@completion_option
def main() -> None:
    """Couchbase's change protocol (DCP) in Python, from the wire to the lakehouse.

    The exit code is 0 for success, 1 for a failure, which one sentence on standard error explains, 2 for a wrong
    command line, 130 after Ctrl-C and 143 after SIGTERM. Some commands have more: see their --help.

    \b
    Examples:
      headwater serve --data /tmp/demo --user me --password secret
      headwater load couchbase://127.0.0.1/default --generate 1000
      headwater tail couchbase://127.0.0.1/default
      headwater --completion bash > headwater-completion.bash
    """
    report_first_compile(lambda: click.echo(COMPILING, err=True))
