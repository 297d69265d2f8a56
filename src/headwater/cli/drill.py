"""`headwater drill`: what goes wrong in a cluster, on one node and when it is asked for."""

from __future__ import annotations

import http
import json
from typing import Any

import rich_click as click

from headwater.cli.management import Access, Answer, ManagementUrl, management_options
from headwater.cli.options import errors_reported
from headwater.errors import HeadwaterError
from headwater.phrases import counted

_VBUCKET_MAX = 0xFFFF
_ROLLBACK = ("vbucket", "rolled_back_to", "vbuuid", "high_seqno_before")
_REPLICAS = ("replicas",)
_NOT_OURS = "Check that it is a Headwater node: others have no drills"


@click.group()
def drill() -> None:
    """Let a node behave as in a failure, to see what consumers make of it.

    \b
    Example:
      headwater drill rollback couchbase://127.0.0.1/default --vbucket 12 --to 100
      headwater drill hold-replicas couchbase://127.0.0.1:11211/default
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
@management_options
@errors_reported
def rollback(url: str, vbucket: int, to_seqno: int, access: Access, as_json: bool) -> None:
    """Roll a vbucket back, as if a copy that had only reached SEQNO had been promoted.

    The changes after SEQNO are gone for good, and a new branch of history begins. The vbucket's streams end, and a
    consumer that asks again has to roll back. SEQNO must be inside the history window, or else the vbucket starts
    again from 0. The user must be an admin of the bucket. URL is couchbase://host[:port]/bucket or
    http://host:port/bucket.

    \b
    Example:
      headwater drill rollback couchbase://127.0.0.1/default --vbucket 12 --to 100
    """
    answer = _ask(url, access, "vbuckets", str(vbucket), "rollback", form={"to": str(to_seqno)})
    done = _accepted(answer, _ROLLBACK, of="a rollback")
    click.echo(json.dumps(done) if as_json else _sentence(done, to_seqno))


@drill.command("hold-replicas")
@click.argument("url", metavar="URL")
@management_options
@errors_reported
def hold_replicas(url: str, access: Access, as_json: bool) -> None:
    """Let the replicas on a node fall behind, to lose changes by a failover.

    The node takes in no more changes of vbuckets that are active elsewhere, until `release-replicas` or its next start.
    Its connections stay open; the other nodes send what their windows allow, and wait. If one of them dies now and is
    failed over, what it was written meanwhile is gone. Writes with durability wait, too, and may time out. The user
    must be an admin of the bucket. URL names the node that is to hold its replicas: couchbase://host[:port]/bucket or
    http://host:port/bucket.

    \b
    Example:
      headwater drill hold-replicas couchbase://127.0.0.1:11211/default
    """
    done = _accepted(_ask(url, access, "replicas", "hold"), _REPLICAS, of="replicas")
    click.echo(json.dumps(done) if as_json else f"{_replicas(done)} held back")


@drill.command("release-replicas")
@click.argument("url", metavar="URL")
@management_options
@errors_reported
def release_replicas(url: str, access: Access, as_json: bool) -> None:
    """Let the replicas on a node catch up again, after `hold-replicas`.

    \b
    Example:
      headwater drill release-replicas couchbase://127.0.0.1:11211/default
    """
    done = _accepted(_ask(url, access, "replicas", "release"), _REPLICAS, of="replicas")
    click.echo(json.dumps(done) if as_json else f"{_replicas(done)} released")


def _ask(url: str, access: Access, *path: str, form: dict[str, str] | None = None) -> Answer:
    """Have the node of a URL do a drill on its bucket."""
    where = ManagementUrl.parse(url)
    return access.open(where).ask("POST", "headwater", "buckets", where.bucket, *path, form=form)


def _accepted(answer: Answer, names: tuple[str, ...], *, of: str) -> dict[str, Any]:
    """The answer of the node, which has these numbers."""
    is_ours = isinstance(answer.content, dict)
    if answer.status == http.HTTPStatus.NOT_FOUND and not (is_ours and "errors" in answer.content):
        raise HeadwaterError("the node has no drills", hint=_NOT_OURS)
    done = answer.accepted()
    if not is_ours or not all(isinstance(done.get(name), int) for name in names):
        raise HeadwaterError(f"the answer has no numbers of {of}", hint=_NOT_OURS)
    return dict(done)


def _sentence(done: dict[str, Any], asked: int) -> str:
    reached = done["rolled_back_to"]
    sentence = f"vbucket {done['vbucket']} rolled back from {done['high_seqno_before']} to {reached}"
    if reached != asked:
        sentence += f", as {asked} lies before the history window"
    return f"{sentence}: {counted(done['high_seqno_before'] - reached, 'change')} lost (new vbuuid {done['vbuuid']})"


def _replicas(done: dict[str, Any]) -> str:
    return counted(done["replicas"], "replica")
