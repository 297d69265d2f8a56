"""How a command gets to the management side of a node: the options for it, and the node that they lead to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich_click as click

from headwater.cli.connection_options import connection_options, json_option, needed_credentials, tls_context
from headwater.cli.management_api import PORT_MAX, Management, ManagementUrl, find_management


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What the options tell."""

    user: str | None
    password: str | None = field(repr=False)
    tls_ca: Path | None
    tls_skip_verify: bool
    http_port: int | None = None

    def open(self, where: ManagementUrl) -> Management:
        """The management side of the node of a URL. The node is looked for, and who logs in may be asked."""
        credentials = needed_credentials(where, self.user, self.password)
        tls = tls_context(where, self.tls_ca, self.tls_skip_verify)
        address = find_management(where, credentials=credentials, tls=tls, http_port=self.http_port)
        return Management(address=address, credentials=credentials, tls=tls)


def management_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command its `access`, by the options of all commands and `--http-port`; and `--json`, for its answer."""

    @connection_options
    @click.option(
        "--http-port",
        type=click.IntRange(1, PORT_MAX),
        metavar="PORT",
        help="The management port. The node is asked for it unless told.",
    )
    @json_option
    @functools.wraps(command)
    def wrapped(
        user: str | None,
        password: str | None,
        tls_ca: Path | None,
        tls_skip_verify: bool,
        http_port: int | None,
        **rest: Any,
    ) -> None:
        access = Access(
            user=user, password=password, tls_ca=tls_ca, tls_skip_verify=tls_skip_verify, http_port=http_port
        )
        command(access=access, **rest)

    return wrapped
