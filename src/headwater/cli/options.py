"""The options that several commands have, and what is made of them: who logs in, how TLS is spoken, old spellings.

Commands take their shared options from here, which takes them from the table in `headwater.client.options`: nothing
about them is written twice. A password must never be printed, nor stand in a `repr`.
"""

from __future__ import annotations

import functools
import importlib
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import rich_click as click
from click.core import ParameterSource

from headwater.client import options as table
from headwater.client.options import OPTIONS, Kind, Option, parse_bytes, parse_interval_s, write_bytes
from headwater.client.settings import TlsSettings
from headwater.errors import HeadwaterError, InvalidInput
from headwater.phrases import printable
from headwater.protocol.sasl import Credentials

USER_VARIABLE = "HEADWATER_USER"
PASSWORD_VARIABLE = "HEADWATER_PASSWORD"
KEY_PASSWORD_VARIABLE = "HEADWATER_TLS_KEY_PASSWORD"

EXIT_FAILED = 1
EXIT_BEHIND = 3
"""Of `verify`: the tables are equal as far as they have come, and further behind than is permitted."""

_HINT = f"Give --user and --password, or set {USER_VARIABLE} and {PASSWORD_VARIABLE}"


def parse_time(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """The callback of an option that takes a time; in seconds."""
    try:
        return None if value is None else parse_interval_s(value)
    except InvalidInput as error:
        raise click.BadParameter(f"{value!r} is no time: write 500ms, 5s, 1m or 1h.") from error


json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as one line of JSON.")
"""For commands that ask a node, and print what it answers."""

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

# --- options of the table -----------------------------------------------------------------------------------------


class _BytesType(click.ParamType[int]):
    """A number of bytes; 64K and 16M are understood."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError:
            self.fail(f"{value!r} is no size: write a number of bytes, or 64K or 16M.", param, ctx)


def table_option(name: str, **others: Any) -> Callable[[F], F]:
    """An option by its name in the table; `others` are what click takes, where a command differs."""
    option = OPTIONS[name]
    help_ = " ".join(filter(None, (option.help, _BYTES_NOTE if option.kind is Kind.BYTES else "", option.cli_note)))
    settings: dict[str, Any] = {"help": help_.replace("`", "")}
    match option.kind:
        case Kind.FLAG:
            settings["is_flag"] = True
        case Kind.BYTES:
            shown = write_bytes(option.default)
            settings |= {"type": _BytesType(), "default": shown, "show_default": True, "metavar": "BYTES"}
        case Kind.WHOLE | Kind.NUMBER:
            settings |= {"type": _number_type(option), "metavar": "S" if option.name.endswith("_s") else "N"}
            settings |= {} if option.default is None else {"default": option.default, "show_default": True}
        case Kind.FILE:
            settings |= {"type": click.Path(exists=True, dir_okay=False, path_type=Path), "metavar": "FILE"}
        case Kind.NAMES:
            settings |= {"multiple": True}
        case Kind.TEXT:
            settings |= {} if option.default is None else {"default": option.default, "show_default": True}
    return click.option(option.on_command_line, option.name, **settings | others)


_BYTES_NOTE = "64K and 16M are understood."


def _number_type(option: Option) -> click.IntRange | click.FloatRange:
    if option.kind is Kind.WHOLE:
        most = None if option.most is None else int(option.most)
        return click.IntRange(None if option.least is None else int(option.least), most)
    return click.FloatRange(min=option.least)


class CommandWithOldNames(click.RichCommand):
    """A command that still takes the earlier spellings of its options, and says so on standard error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._renamed(args))

    def _renamed(self, args: list[str]) -> list[str]:
        own = {parameter.name for parameter in self.params}
        old_names = {
            old: new
            for option in OPTIONS.values()
            if option.name in own and self.name in option.commands
            for old, new in (option.cli_old or {}).items()
        }
        renamed: list[str] = []
        for at, word in enumerate(args):
            if word == "--":
                return [*renamed, *args[at:]]
            name, equals, value = word.partition("=")
            if name not in old_names:
                renamed.append(word)
                continue
            new = old_names[name]
            click.echo(f"Warning: {name} is an old spelling: write {' '.join(new)}", err=True)
            renamed += [*new[:-1], f"{new[-1]}{equals}{value}"]
        return renamed


# --- who logs in, and how TLS is spoken ---------------------------------------------------------------------------


class _NamesUser(Protocol):
    @property
    def user(self) -> str | None: ...


class _HasTls(Protocol):
    @property
    def tls(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginOptions:
    """The values of `connection_options`."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_key_password: str | None = field(default=None, repr=False)
    tls_skip_verify: bool = False

    def credentials(self, where: _NamesUser) -> Credentials | None:
        """Who logs in, or None where no user is named. The name in a URL counts less than `--user`, and more than the
        variable."""
        user, password = self.user, self.password
        if where.user is not None and not _is_on_command_line("user"):
            user = where.user
        if user is None:
            if password is not None and _is_on_command_line("password"):
                raise InvalidInput("there is a password, but no user", hint=_HINT)
            return None
        if password is None and is_terminal():
            password = click.prompt(f"Password of {user}", hide_input=True, err=True)
        if not user or not password:
            raise InvalidInput("the user or the password is missing", hint=_HINT)
        return Credentials(user, password)

    def needed_credentials(self, where: _NamesUser) -> Credentials:
        """As `credentials`, for commands that can't log in by a certificate alone."""
        found = self.credentials(where)
        if found is None:
            raise InvalidInput("there is no user to log in as", hint=_HINT)
        return found

    @property
    def tls_settings(self) -> TlsSettings | None:
        """What the options say about TLS, or None where they say nothing."""
        if self.tls_cert is None and self.tls_key is not None:
            raise InvalidInput("there is a key, but no client certificate that it belongs to", hint="Give --tls-cert")
        settings = TlsSettings(
            ca_file=self.tls_ca,
            skip_verify=self.tls_skip_verify,
            certificate_file=self.tls_cert,
            key_file=self.tls_key,
            # The variable may be set for other commands.
            key_password=None if self.tls_cert is None else self.tls_key_password,
        )
        return None if settings == TlsSettings() else settings

    def tls_context(self, where: _HasTls) -> ssl.SSLContext | None:
        """How TLS is spoken, or None for a URL without it. The system's certificates are trusted by default."""
        return (self.tls_settings or TlsSettings()).context() if where.tls else None


_VARIABLES = {"user": USER_VARIABLE, "password": PASSWORD_VARIABLE, "tls_key_password": KEY_PASSWORD_VARIABLE}
_METAVARS = {"user": "NAME", "password": "PASSWORD", "tls_key_password": "PASSWORD"}
CONNECTION_OPTIONS = tuple(option.name for option in table.TO_CONNECT if "*" in option.commands)


def connection_options(command: Callable[..., T]) -> Callable[..., T]:
    """Gives a command the options to connect, as one argument `login` (`LoginOptions`)."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> T:
        login = LoginOptions(**{name: options.pop(name) for name in CONNECTION_OPTIONS})
        return command(*arguments, login=login, **options)

    for name in reversed(CONNECTION_OPTIONS):
        others: dict[str, Any] = {"metavar": _METAVARS[name]} if name in _METAVARS else {}
        if name in _VARIABLES:
            others |= {"envvar": _VARIABLES[name], "show_envvar": True}
        wrapped = table_option(name, **others)(wrapped)
    return wrapped


def _parse_pairs(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    if any(not (name and sign) for name, sign, _ in pairs):
        # Not the value itself: it may be a secret.
        raise click.BadParameter("write NAME=VALUE, such as aws_region=eu-west-1.")
    return {name.strip(): value for name, _, value in pairs}


storage_option = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parse_pairs,
    help="For tables in an object store: an option as delta-rs calls it, such as aws_endpoint_url. Repeat for more. "
    "The environment counts as well (AWS_*, AZURE_*, GOOGLE_*), and is the better place for secrets.",
)


def _parse_function(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    module_name, _, name = text.partition(":")
    # Where the command is started there may be a module for it.
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
    help="A function that changes go through before they are landed, from Arrow batch to Arrow batch. It may change "
    "the columns value, datatype and xattrs. The module may lie in the current directory.",
)


def is_terminal() -> bool:
    """Whether a password can be asked for."""
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
    """The sentence may hold text of a server: a terminal must not obey any of it."""
    click.echo(f"Error: {printable(sentence)}", err=True)
    sys.exit(EXIT_FAILED)
