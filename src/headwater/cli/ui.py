"""`headwater ui`: a lake in the browser."""

from __future__ import annotations

import signal
import threading

import rich_click as click

from headwater.cli.options import errors_reported, storage_option
from headwater.http.requests import TOKEN_VARIABLE
from headwater.lake.lake_look import LakeWatch
from headwater.lake.location import Location
from headwater.lake_page.serving import PageAddress, serving_page
from headwater.lake_page.state import LakeState

token_option = click.option(
    "--ui-token",
    envvar=TOKEN_VARIABLE,
    show_envvar=True,
    metavar="TOKEN",
    help="What a user has to give to see the page. It must be there unless the page is served on this machine alone.",
)


@click.command()
@click.argument("directory", metavar="DIR|URI")
@click.option(
    "--listen",
    default="8080",
    show_default=True,
    metavar="[HOST:]PORT",
    help="Where the page is served: on this machine alone, unless a host is given. 0 takes any port that is free.",
)
@token_option
@storage_option
@errors_reported
def ui(directory: str, listen: str, ui_token: str | None, storage_options: dict[str, str]) -> None:
    """Show the tables that a bucket was landed in, in the browser.

    How far they are behind, what has happened to them, which tables there are and what is in them, and what `verify`
    found last. DIR is what was landed into, a directory or an object store. The landing may run, here or elsewhere, or
    have stopped; no bucket is asked, and nothing is written.

    On this machine alone the page needs no log-in. Elsewhere it needs a token, and is best put behind a proxy with
    TLS, or reached through ssh.

    It ends with Ctrl-C.

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
        ended.wait()
