"""The command `headwater`: one file a command, known by its name and one line, and imported when it is run.

A pure client has no server's libraries installed, and a command should not pay for what another one needs. The list of
all commands and completion in a shell need no more than the line that a command says about itself: it is read from the
source, where importing all modules takes seconds.
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
    """Call numbers N, where a command has no better name for them: "INTEGER RANGE" says less, in more room."""
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
        """The context is the real command's, so that it is the one which is run, explained and completed."""
        assert self.name is not None
        return load_command(self.name).make_context(info_name, args, parent=parent, **extra)


_WITH_ARROW = frozenset({"export", "land", "load", "repair", "tail", "verify"})
"""The commands that use Arrow. What may need pandas, as a worker of Spark does, is another process."""


class _NoPandas:
    """A finder of modules for which pandas is not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=name)


def _leave_out_pandas() -> None:
    """Let pyarrow find no pandas in this process.

    With the first array that it makes it imports pandas, where that is installed, to know its types when it meets them;
    that takes a quarter of a second, and no command has any for it. What it has not found, it does not look for again.
    """
    if "pyarrow" in sys.modules:
        return  # Then the process is not the command's alone.
    sys.meta_path.insert(0, _NoPandas)
    try:
        import_module("pyarrow").array([])
    finally:
        sys.meta_path.remove(_NoPandas)


@contextmanager
def _imports_kept() -> Iterator[None]:
    """Import without the garbage collector, and exclude from it what is there then, which stays until the process ends.

    Looking through all modules again and again, and once more at the end, takes a fifth of the time of a short command.
    """
    if "headwater.cli.options" in sys.modules:
        yield  # This process has loaded a command before, or does more than run one.
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.freeze)


def load_command(name: str) -> click.Command:
    """The command itself, or one that says what has to be installed for it."""
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
    """The first line of what the command says about itself."""
    spec = find_spec(f"headwater.cli.{name}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    # By its form: Python's own parser fails now and then where other threads use it, too.
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
"""What has to be installed for a command; the node's libraries by default."""
_COMPILED = frozenset({"check", "export", "kernels", "land", "load", "repair", "serve", "sim", "verify"})
"""The commands that need compiled kernels. For those of a mere client Python can run them."""


def _not_installed(command: str, module: str) -> click.Command:
    """Stands for a command whose libraries are missing, and says how to get them."""
    advice = f"Needs {module}, which is not installed. Run {install_command(_EXTRAS.get(command, 'node'))}"

    def refuse() -> None:
        raise click.ClickException(advice)

    # It takes any arguments: what is missing is reported first.
    takes_anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(command, help=advice, callback=refuse, context_settings=takes_anything)


# --- completion ---------------------------------------------------------------------------------------------------


SHELLS = ("bash", "zsh", "fish")
PROGRAM = "headwater"
VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"
"""By which a shell's script asks the program; the name is click's."""


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
"""The module and the function have the command's name."""


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
