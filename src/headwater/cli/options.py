"""The options that several commands share, and the objects made from them: the login and the TLS settings.

The shared options are built from the fields of `ReadOptions`, `ConnectOptions` and `SourceOptions`, so nothing
about them is written twice. A password must never be printed, nor appear in a `repr`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ssl
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

from click.core import ParameterSource

from headwater.cli.output import click
from headwater.client.connection_string import ConnectionString
from headwater.client.read_options import READ_OPTIONS
from headwater.client.settings import (
    CONNECT_OPTIONS,
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    ClientSettings,
    ConnectOptions,
    TlsSettings,
)
from headwater.errors import HeadwaterError, InvalidInput
from headwater.options import Kind, Option, options_of, parse_bytes, parse_interval_s, write_bytes
from headwater.phrases import install_command, missing_library, printable
from headwater.protocol.sasl import Credentials

if TYPE_CHECKING:
    from headwater.lake.chosen_rows import Transform, TransformFunction
    from headwater.landing.tasks import JobRunner

EXIT_FAILED = 1
EXIT_WARNING, EXIT_CRITICAL = 3, 4
"""For `health` and `cluster status`. click uses 2 for an invalid command line."""
EXIT_BEHIND = 3
"""For `verify`: the tables are equal as far as they have landed, but further behind than permitted."""

_HINT = f"Give --user and --password, or set {USER_VARIABLE} and {PASSWORD_VARIABLE}"


def parse_time(value: str) -> float:
    """Parse the value of an option that takes a time. Returns seconds."""
    try:
        return parse_interval_s(value)
    except InvalidInput as error:
        raise click.BadParameter(f"{value!r} is no time: write 500ms, 5s, 1m or 1h.") from error


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON.")
"""For commands that send a request to a node and print its answer."""

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

# --- options of a command -----------------------------------------------------------------------------------------


# click 8.3 and older do not make ParamType generic in the converted type.
if TYPE_CHECKING:
    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType


class _BytesType(_IntType):
    """A number of bytes, such as 64K or 16M."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError:
            self.fail(f"{value!r} is no size: write a number of bytes, or 64K or 16M.", param, ctx)


def cli_option(option: Option, **others: Any) -> Callable[[F], F]:
    """Return an option of a command. `others` override the settings passed to click."""
    kind = option.kind if option.cli_type is None or option.kind is Kind.NAMES else Kind.TEXT
    bytes_note = "Units such as 64K and 16M work." if kind is Kind.BYTES else ""
    words = " ".join(filter(None, (option.help, bytes_note, option.cli_note))).replace("`", "")
    settings: dict[str, Any] = {"help": words, "metavar": option.metavar}
    # click would accept a member of an enumeration by its name rather than its value.
    default = str(option.default) if isinstance(option.default, StrEnum) else option.default
    match kind:
        case Kind.FLAG if option.choices is None:
            settings |= {"is_flag": True} | ({"default": None} if default is None else {})
        case Kind.BYTES:
            settings |= {"type": _BytesType(), "metavar": "BYTES"}
            default = write_bytes(option.default)
        case Kind.WHOLE:
            least, most = (None if limit is None else int(limit) for limit in (option.least, option.most))
            limited = int if least is most is None else click.IntRange(least, most)
            settings |= {"type": limited, "metavar": option.metavar or _number_name(option)}
        case Kind.NUMBER:
            settings |= {"type": click.FloatRange(min=option.least), "metavar": _number_name(option)}
        case Kind.FILE:
            settings |= {"type": click.Path(exists=True, dir_okay=False, path_type=Path), "metavar": "FILE"}
        case Kind.NAMES:
            settings["multiple"] = True
    if option.cli_type is not None:
        settings["type"] = option.cli_type
    if option.choices is not None:
        settings["type"] = click.Choice([str(choice) for choice in option.choices])
        if isinstance(option.choices, Mapping):
            default = next((name for name, value in option.choices.items() if value == option.default), None)
    if default not in (None, ()) and default is not False:
        settings |= {"default": default, "show_default": True}
    elif option.default_words is not None and not option.spark:
        settings["show_default"] = option.default_words
    if option.variable is not None:
        settings |= {"envvar": option.variable, "show_envvar": True}
    return click.option(option.on_command_line, *option.cli_also, option.name, **settings | others)


def _number_name(option: Option) -> str:
    return "S" if option.name.endswith("_s") else "N"


def read_options(command: str, **others: Mapping[str, Any]) -> Callable[[F], F]:
    """Give a command those read options that list it. `others` override the settings passed to click, by option."""

    def decorate(function: F) -> F:
        for name, option in reversed(READ_OPTIONS.items()):
            if command in option.commands:
                function = cli_option(option, **others.get(name, {}))(function)
        return function

    return decorate


class GivenOptions:
    """The values that a command received for the options of `options_from`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def make(self, cls: Callable[..., T], **others: Any) -> T:
        """Return an object of one of the classes. `others` are its fields that are not options."""
        for name, option in options_of(cast(type, cls)).items():
            value = self._values[name]
            is_name = isinstance(option.choices, Mapping) and value is not None
            others[name] = option.choices[value] if is_name else value  # type: ignore[index]
        return cls(**others)


def options_from(*classes: type) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command the options that are fields of these classes, all in one argument `given`."""
    options = [(cls, option) for cls in classes for option in options_of(cls).values()]

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def wrapped(*arguments: Any, **values: Any) -> T:
            given = GivenOptions({option.name: values.pop(option.name) for _, option in options})
            return command(*arguments, given=given, **values)

        for cls, option in reversed(options):
            # The help of an option that only one command has is written for the command line.
            words = {"help": option.help} if cls.__module__.startswith("headwater.cli.") else {}
            wrapped = cli_option(option, **words)(wrapped)
        return wrapped

    return decorate


def repeated_words(context: click.Context, leave_out: Collection[str]) -> list[str]:
    """Return the arguments of this command line, without these parameters, as words for another one."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        value: Any = context.params.get(name)
        if name in leave_out or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(parameter.opts[0])
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], str(one)]
    return words


# --- who logs in, and how TLS is spoken ---------------------------------------------------------------------------


class _Place(Protocol):
    """A parsed URL: which user logs in, and whether with TLS."""

    @property
    def user(self) -> str | None: ...

    @property
    def tls(self) -> bool: ...


class LoginOptions(ConnectOptions):
    """The values of `connection_options`."""

    def settings(self, url: str, **others: Any) -> ClientSettings:
        """Return the settings for the bucket of a URL. `others` are further ones of `ClientSettings.of`."""
        where = ConnectionString.parse(url)
        return ClientSettings.of(where, self.credentials(where), tls=self.tls_settings, **others)

    def credentials(self, where: _Place) -> Credentials | None:
        """Return the credentials, or None if no user is named. A name in the URL overrides the variable, and
        `--user` overrides both."""
        user, password = self.user, self.password
        if where.user is not None and not _is_on_command_line("user"):
            user = where.user
        if user is None:
            if password is not None and _is_on_command_line("password"):
                raise InvalidInput("a password was given without a user", hint=_HINT)
            return None
        if password is None and is_terminal():
            password = click.prompt(f"Password of {user}", hide_input=True, err=True)
        if not user or not password:
            raise InvalidInput("the user or the password is missing", hint=_HINT)
        return Credentials(user, password)

    def needed_credentials(self, where: _Place) -> Credentials:
        """Like `credentials`, but raises without a user: for commands that can't log in with only a certificate."""
        found = self.credentials(where)
        if found is None:
            raise InvalidInput("there is no user to log in as", hint=_HINT)
        return found

    def tls_context(self, where: _Place) -> ssl.SSLContext | None:
        """Return the TLS context, or None for a URL without TLS. By default, it trusts the system's certificates."""
        return (self.tls_settings or TlsSettings()).context() if where.tls else None


CONNECTION_OPTIONS = tuple(name for name, option in CONNECT_OPTIONS.items() if option.commands)


def connection_options(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command the connection options, as one argument `login` (`LoginOptions`)."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> T:
        login = LoginOptions(**{name: options.pop(name) for name in CONNECTION_OPTIONS})
        return command(*arguments, login=login, **options)

    for name in reversed(CONNECTION_OPTIONS):
        wrapped = cli_option(CONNECT_OPTIONS[name])(wrapped)
    return wrapped


def _parse_pairs(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    if any(not (name and sign) for name, sign, _ in pairs):
        # The message omits the value: it may be a secret.
        raise click.BadParameter("write NAME=VALUE, such as aws_region=eu-west-1.")
    return {name.strip(): value for name, _, value in pairs}


storage_option = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parse_pairs,
    help="An option of the object store, by its name in delta-rs, such as aws_endpoint_url. Repeat for more. "
    "Environment variables apply as well (AWS_*, AZURE_*, GOOGLE_*), and are the better place for secrets.",
)


def _parse_function(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    module_name, _, name = text.partition(":")
    # The module may be in the current directory.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"{text!r} is no MODULE:FUNCTION: {error}.") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise click.BadParameter(f"{text!r} is no function.")
    return found


transform_option = click.option(
    "--transform",
    metavar="MODULE:FUNCTION",
    callback=_parse_function,
    help="A function from Arrow batch to Arrow batch that is applied to all changes before they are landed. It may "
    "change the columns value, datatype and xattrs. The module may be in the current directory.",
)


def sent_to_tasks(function: TransformFunction, master: str | None) -> Transform:
    """Return a transform for tasks on the executors of a Spark master, or for tasks in this process."""
    if master is None:
        from headwater.lake.chosen_rows import Transform

        return Transform.of(function)
    from headwater.spark.executors import shippable

    return shippable(function)


@contextlib.contextmanager
def task_runners(*, master: str | None, memory: str = "2g") -> Iterator[Callable[[str], JobRunner]]:
    """Yields a function that makes a named runner of tasks. All runners share a Spark session started here or,
    without a master, threads of this process, which then does not load Spark."""
    if master is None:
        from headwater.landing.tasks import LocalRunner, TaskSlots

        slots = TaskSlots()
        yield lambda _: LocalRunner(slots=slots)
        return
    try:
        from headwater.spark.executors import SparkRunner, started_session
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"Spark needs {missing_library(error)}, which is not installed",
            hint=f"Run {install_command('spark')}, or land with --runner local",
        ) from error
    with started_session(master=master, memory=memory) as spark:
        yield lambda name: SparkRunner(spark, name)


@contextlib.contextmanager
def task_runner(name: str, *, master: str | None, memory: str = "2g") -> Iterator[JobRunner]:
    """Yields a single runner."""
    with task_runners(master=master, memory=memory) as make:
        yield make(name)


def is_terminal() -> bool:
    """Return whether the user can be prompted for a password."""
    return sys.stdin.isatty()


def _is_on_command_line(option: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(option) is ParameterSource.COMMANDLINE


# --- errors -------------------------------------------------------------------------------------------------------


def errors_reported(command: Callable[P, T]) -> Callable[P, T]:
    """Print an error as one sentence on standard error, and end with exit code 1."""

    @functools.wraps(command)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return command(*arguments, **options)
        except HeadwaterError as error:
            fail(str(error))

    return wrapped


def fail(sentence: str) -> NoReturn:
    """Print an error and exit. The sentence may contain text from a server, so control characters are escaped."""
    click.echo(f"Error: {printable(sentence)}", err=True)
    sys.exit(EXIT_FAILED)
