"""`headwater ui`: show a lake in the browser."""

from __future__ import annotations

import signal
import threading

from headwater.cli.options import errors_reported, storage_option
from headwater.cli.output import click
from headwater.http import TOKEN_VARIABLE
from headwater.lake.lake_look import LakeWatch
from headwater.lake.location import Location
from headwater.lake_page.app import LakeState, PageAddress, serving_page

token_option = click.option(
    "--ui-token",
    envvar=TOKEN_VARIABLE,
    show_envvar=True,
    metavar="TOKEN",
    help="The token that users must enter to see the page. Required if the page is served beyond this machine.",
)


@click.command()
@click.argument("directory", metavar="DIR|URI")
@click.option(
    "--listen",
    default="8080",
    show_default=True,
    metavar="[HOST:]PORT",
    help="The address of the page. Without HOST, only this machine can reach it. Port 0 selects a free port.",
)
@token_option
@storage_option
@errors_reported
def ui(directory: str, listen: str, ui_token: str | None, storage_options: dict[str, str]) -> None:
    """Show the tables of a landing in the browser.

    The page shows how far the tables are behind, their events, their contents, and the last verdict of `verify`. DIR is
    the directory or object store of the landing. The landing may be running, here or elsewhere, or stopped. The command
    connects to no bucket and writes nothing.

    On this machine, the page needs no log-in. On other addresses it needs a token, and should be behind a TLS proxy or
    an ssh tunnel.

    Stop it with Ctrl-C.

    \b
    Examples:
      headwater ui /data/lake
      headwater ui s3://lakes/shop --listen 9000
      HEADWATER_UI_TOKEN=$(openssl rand -hex 16) \\
        headwater ui /data/lake --listen 0.0.0.0:8080
    """
    address = PageAddress.make(listen, ui_token or None)
    location = Location.of(directory, storage_options)
    state = LakeState(LakeWatch(location))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with serving_page(state, address) as url:
        click.echo(f"{location.uri} is shown at {url}", err=True)
        # Polled: a signal just before a wait without a timeout would be handled only after the wait.
        while not ended.wait(1.0):
            pass
