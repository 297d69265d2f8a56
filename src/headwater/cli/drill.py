"""`headwater drill`: the failures of a cluster, on one node and on demand."""

from __future__ import annotations

import http
from typing import Any

from headwater.cli.management import ManagedNode, managed
from headwater.cli.output import click
from headwater.errors import HeadwaterError
from headwater.phrases import counted

_VBUCKET_MAX = 0xFFFF
_ROLLBACK = ("vbucket", "rolled_back_to", "vbuuid", "high_seqno_before")
_NOT_OURS = "Check that it is a Headwater node: others have no drills"


@click.group()
def drill() -> None:
    """Make a node behave as in a failure, to test consumers.

    \b
    Example:
      headwater drill rollback couchbase://127.0.0.1/default --vbucket 12 --to 100
      headwater drill hold-replicas couchbase://127.0.0.1:11211/default
    """


@drill.command()
@click.option("--vbucket", type=click.IntRange(0, _VBUCKET_MAX), required=True, metavar="N", help="The vbucket.")
@click.option(
    "--to",
    "to_seqno",
    type=click.IntRange(0),
    required=True,
    metavar="SEQNO",
    help="The last seqno to keep.",
)
@managed(needs_bucket=True)
def rollback(node: ManagedNode, vbucket: int, to_seqno: int) -> None:
    """Roll a vbucket back, as if a copy that had only reached SEQNO had been promoted.

    The changes after SEQNO are lost permanently, and a new branch of history begins. The vbucket's streams end, and
    consumers that reconnect have to roll back. If SEQNO is outside the history window, the vbucket starts again from 0.
    The user must be an admin of the bucket. URL is couchbase://host[:port]/bucket or http://host:port/bucket.

    \b
    Example:
      headwater drill rollback couchbase://127.0.0.1/default --vbucket 12 --to 100
    """
    path = ("vbuckets", str(vbucket), "rollback")
    done = _ask(node, *path, form={"to": str(to_seqno)}, names=_ROLLBACK, of="a rollback")
    node.print(_sentence(done, to_seqno), done)


@drill.command("hold-replicas")
@managed(needs_bucket=True)
def hold_replicas(node: ManagedNode) -> None:
    """Make the replicas on a node fall behind, so that a failover loses changes.

    The node accepts no more changes of vbuckets that are active elsewhere, until `release-replicas` or a restart. Its
    connections stay open; the other nodes send what their windows allow, and wait. If one of them dies now and is
    failed over, the changes written to it in the meantime are lost. Durable writes wait, too, and may time out. The
    user must be an admin of the bucket. URL is the node that holds back its replicas: couchbase://host[:port]/bucket or
    http://host:port/bucket.

    \b
    Example:
      headwater drill hold-replicas couchbase://127.0.0.1:11211/default
    """
    done = _ask(node, "replicas", "hold")
    node.print(f"{counted(done['replicas'], 'replica')} held back", done)


@drill.command("release-replicas")
@managed(needs_bucket=True)
def release_replicas(node: ManagedNode) -> None:
    """Let the replicas on a node catch up again, after `hold-replicas`.

    \b
    Example:
      headwater drill release-replicas couchbase://127.0.0.1:11211/default
    """
    done = _ask(node, "replicas", "release")
    node.print(f"{counted(done['replicas'], 'replica')} released", done)


@drill.command("cut-connections")
@managed(needs_bucket=True)
def cut_connections(node: ManagedNode) -> None:
    """Break all key-value and DCP connections of a bucket to a node, like a network failure.

    What the node has not sent yet is lost, in the middle of a snapshot as well. Clients and other nodes may connect
    again immediately. The user must be an admin of the bucket.

    \b
    Example:
      headwater drill cut-connections couchbase://127.0.0.1/default
    """
    done = _ask(node, "connections", "cut")
    node.print(f"{counted(done['connections'], 'connection')} cut", done)


def _ask(
    node: ManagedNode, *path: str, form: dict[str, str] | None = None, names: tuple[str, ...] = (), of: str = ""
) -> dict[str, Any]:
    """Run a drill on the bucket of the URL's node. Its answer must have these integer members: `names`, or by
    default one named like the first part of the path, a count."""
    answer = node.ask("POST", "headwater", "buckets", node.where.bucket, *path, form=form)
    names, of = names or path[:1], of or path[0]
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
