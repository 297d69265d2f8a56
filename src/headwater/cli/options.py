"""What the commands that connect have in common: who logs in, whom to trust, and how errors are told."""

from __future__ import annotations

import functools
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import rich_click as click
from click.core import ParameterSource

from headwater.client.handshake import Credentials
from headwater.client.settings import TlsSettings
from headwater.errors import HeadwaterError, InvalidInput
from headwater.phrases import printable

USER_VARIABLE = "HEADWATER_USER"
PASSWORD_VARIABLE = "HEADWATER_PASSWORD"

EXIT_FAILED = 1

_HINT = f"Give --user and --password, or set {USER_VARIABLE} and {PASSWORD_VARIABLE}"
_OPTIONS = (
    click.option("--user", metavar="NAME", envvar=USER_VARIABLE, show_envvar=True, help="Who logs in."),
    click.option(
        "--password",
        metavar="PASSWORD",
        envvar=PASSWORD_VARIABLE,
        show_envvar=True,
        help="The password; asked for on a terminal. As an option, others on the machine can see it.",
    ),
    click.option(
        "--tls-ca",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Certificates to trust with TLS, in PEM; those of the system unless told.",
    ),
    click.option("--tls-skip-verify", is_flag=True, help="Trust any certificate: whom one talks to is then unknown."),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as one line of JSON.")
"""For commands that ask a node, and print what it answers."""

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


def connection_options(command: F) -> F:
    """`--user`, `--password`, `--tls-ca` and `--tls-skip-verify`, for `credentials` and `tls_settings`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class _NamesUser(Protocol):
    @property
    def user(self) -> str | None: ...


class _TellsTls(Protocol):
    @property
    def tls(self) -> bool: ...


def credentials(where: _NamesUser, user: str | None, password: str | None) -> Credentials | None:
    """Who logs in, or None where nobody is named. The name in a URL counts less than `--user`, and more than the
    variable."""
    if where.user is not None and not _is_on_command_line("user"):
        user = where.user
    if user is None:
        if password is not None and _is_on_command_line("password"):
            raise InvalidInput("there is a password, but no user", hint=_HINT)
        return None
    if password is None and _is_terminal():
        password = click.prompt(f"Password of {user}", hide_input=True, err=True)
    if not user or not password:
        raise InvalidInput("the user or the password is missing", hint=_HINT)
    return Credentials(user, password)


def needed_credentials(where: _NamesUser, user: str | None, password: str | None) -> Credentials:
    """Who logs in, where one has to."""
    found = credentials(where, user, password)
    if found is None:
        raise InvalidInput("there is nobody to log in as", hint=_HINT)
    return found


def tls_settings(tls_ca: Path | None, tls_skip_verify: bool) -> TlsSettings | None:
    """Whom to trust, or None where nothing is told about it."""
    if tls_ca is None and not tls_skip_verify:
        return None
    return TlsSettings(ca_file=tls_ca, skip_verify=tls_skip_verify)


def tls_context(where: _TellsTls, tls_ca: Path | None, tls_skip_verify: bool) -> ssl.SSLContext | None:
    """How TLS is spoken, or None where the URL is for none. The system's certificates are trusted unless told."""
    return (tls_settings(tls_ca, tls_skip_verify) or TlsSettings()).context() if where.tls else None


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _is_on_command_line(option: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def errors_told(command: Callable[P, T]) -> Callable[P, T]:
    """Tell an error as one sentence on standard error, and leave with exit code 1."""

    @functools.wraps(command)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return command(*arguments, **options)
        except HeadwaterError as error:
            fail(str(error))

    return wrapped


def fail(sentence: str) -> NoReturn:
    """The sentence may have words of a server in it: a terminal obeys none of them."""
    click.echo(f"Error: {printable(sentence)}", err=True)
    sys.exit(EXIT_FAILED)
