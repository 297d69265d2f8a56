"""`headwater drill`: what goes wrong in a cluster, on one node and when it is asked for."""

from __future__ import annotations

import http
import json
from pathlib import Path
from typing import Any

import rich_click as click

from headwater.cli.connection_options import connection_options, errors_told, needed_credentials, tls_settings
from headwater.cli.management_api import PORT_MAX, Answer, Management, ManagementUrl, find_management
from headwater.client.tls_settings import TlsSettings
from headwater.errors import HeadwaterError

_VBUCKET_MAX = 0xFFFF
_NOT_OURS = "Check that it is a Headwater node: others have no drills"


@click.group()
def drill() -> None:
    """Let a node behave as in a failure, to see what consumers make of it.

    \b
    Example:
      headwater drill rollback couchbase://127.0.0.1/default --vbucket 12 --to 100
    """


@drill.command()
@click.argument("url", metavar="URL")
@click.option("--vbucket", type=click.IntRange(0, _VBUCKET_MAX), required=True, metavar="N", help="The vbucket.")
@click.option(
    "--to",
    "to_seqno",
    type=click.IntRange(0),
    required=True,
    metavar="SEQNO",
    help="The last seqno that is to be left.",
)
@connection_options
@click.option(
    "--http-port",
    type=click.IntRange(1, PORT_MAX),
    metavar="PORT",
    help="The management port. The node is asked for it unless told.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one line of JSON.")
@errors_told
def rollback(
    url: str,
    vbucket: int,
    to_seqno: int,
    user: str | None,
    password: str | None,
    tls_ca: Path | None,
    tls_skip_verify: bool,
    http_port: int | None,
    as_json: bool,
) -> None:
    """Roll a vbucket back, as if a copy that had only reached SEQNO had been promoted.

    The changes after SEQNO are gone for good, and a new branch of history begins. The vbucket's streams end, and a
    consumer that asks again is told to roll back. SEQNO must be inside the history window, or else the vbucket starts
    again from 0. The user must be an admin of the bucket. URL is couchbase://host[:port]/bucket or
    http://host:port/bucket.

    \b
    Example:
      headwater drill rollback couchbase://127.0.0.1/default --vbucket 12 --to 100
    """
    where = ManagementUrl.parse(url)
    credentials = needed_credentials(where, user, password)
    tls = (tls_settings(tls_ca, tls_skip_verify) or TlsSettings()).context() if where.tls else None
    address = find_management(where, credentials=credentials, tls=tls, http_port=http_port)
    management = Management(address=address, credentials=credentials, tls=tls)
    path = ("headwater", "buckets", where.bucket, "vbuckets", str(vbucket), "rollback")
    done = _accepted(management.ask("POST", *path, form={"to": str(to_seqno)}))
    click.echo(json.dumps(done) if as_json else _sentence(done, to_seqno))


def _accepted(answer: Answer) -> dict[str, Any]:
    is_ours = isinstance(answer.content, dict)
    if answer.status == http.HTTPStatus.NOT_FOUND and not (is_ours and "errors" in answer.content):
        raise HeadwaterError("the node has no drills", hint=_NOT_OURS)
    done = answer.accepted()
    names = ("vbucket", "rolled_back_to", "vbuuid", "high_seqno_before")
    if not is_ours or not all(isinstance(done.get(name), int) for name in names):
        raise HeadwaterError("the answer does not tell of a rollback", hint=_NOT_OURS)
    return dict(done)


def _sentence(done: dict[str, Any], asked: int) -> str:
    reached = done["rolled_back_to"]
    sentence = f"vbucket {done['vbucket']} rolled back from {done['high_seqno_before']} to {reached}"
    if reached != asked:
        sentence += f", as {asked} lies before the history window"
    return f"{sentence} (new vbuuid {done['vbuuid']})"
