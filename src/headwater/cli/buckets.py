"""`headwater buckets`: list, create, change, flush and drop the buckets of a node, or of its cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headwater.cli.management import Answer, ManagedNode, managed, no_list
from headwater.cli.options import GivenOptions, options_from
from headwater.cli.output import click, print_table
from headwater.options import option

MAX_TTL_S_MAX = 2**31 - 1
RAM_QUOTA_MB_DEFAULT = 100
"""Couchbase requires a quota, and this is its minimum."""
_BUCKETS = ("pools", "default", "buckets")
_BYTES_PER_MB = 1024 * 1024


@click.group()
def buckets() -> None:
    """List, create, change, flush and drop buckets.

    URL is couchbase://host[:port], or couchbases:// for TLS, of a Couchbase or a Headwater node; the command asks the
    node for its management port. http://host:port gives that port directly. In a cluster, a command applies to all
    nodes. The user must be an admin.

    \b
    Examples:
      export HEADWATER_USER=admin HEADWATER_PASSWORD=…
      headwater buckets list couchbase://127.0.0.1
      headwater buckets create couchbase://127.0.0.1 travel --flush-enabled
      headwater buckets flush couchbase://127.0.0.1 travel
      headwater buckets drop couchbase://127.0.0.1 travel
    """


# --- arguments ----------------------------------------------------------------------------------------------------


_name_argument = click.argument("name", metavar="NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """The settings of a bucket."""

    ram_quota_mb: int | None = option("Memory quota of the bucket, in MB.", cli_type=click.IntRange(100), metavar="MB")
    replicas: int | None = option("Replicas of each vbucket.", least=0, most=3)
    max_ttl: int | None = option(
        "Maximum time to live of documents, in seconds; 0 for no limit.", least=0, most=MAX_TTL_S_MAX, metavar="S"
    )
    flush_enabled: bool | None = option(
        "Whether the bucket can be flushed.", cli_name="--flush-enabled/--flush-disabled"
    )

    def form(self) -> dict[str, str]:
        """Return the settings that were given, under Couchbase's names."""
        names = {"ram_quota_mb": "ramQuotaMB", "replicas": "replicaNumber", "max_ttl": "maxTTL"}
        form = {wire: str(value) for name, wire in names.items() if (value := getattr(self, name)) is not None}
        return form if self.flush_enabled is None else form | {"flushEnabled": str(int(self.flush_enabled))}


# --- commands -----------------------------------------------------------------------------------------------------


@buckets.command("list")
@managed()
def list_buckets(node: ManagedNode) -> None:
    """List the buckets and their settings.

    \b
    Example:
      headwater buckets list couchbase://127.0.0.1
    """
    answer = node.ask("GET", *_BUCKETS).accepted()
    try:
        rows = [_row(bucket) for bucket in answer]
    except (LookupError, TypeError, AttributeError) as error:
        raise no_list("buckets") from error
    if node.as_json:
        click.echo(json.dumps({"buckets": rows}))
        return
    print_table(("BUCKET", "DOCUMENTS", "VBUCKETS", "REPLICAS", "MAX TTL", "FLUSH"), map(_cells, rows))


@buckets.command("create")
@managed()
@_name_argument
@options_from(BucketOptions)
@click.option("--vbuckets", type=click.IntRange(1, 1024), metavar="N", help="A power of two. [default: the node's]")
@click.option("--this-node-only", is_flag=True, help="Create it on this node only, not in its cluster.")
def create_bucket(
    node: ManagedNode, name: str, given: GivenOptions, vbuckets: int | None, this_node_only: bool
) -> None:
    """Create a bucket, on all nodes of the cluster. It is ready when the command returns.

    \b
    Examples:
      headwater buckets create couchbase://127.0.0.1 travel
      headwater buckets create couchbase://127.0.0.1 carts --max-ttl 86400
    """
    form = {"name": name, "ramQuotaMB": str(RAM_QUOTA_MB_DEFAULT), **given.make(BucketOptions).form()}
    if vbuckets is not None:
        form["numVBuckets"] = str(vbuckets)
    path = ("headwater", "buckets") if this_node_only else _BUCKETS
    _report(node, "created", name, node.ask("POST", *path, form=form))


@buckets.command("update")
@managed()
@_name_argument
@options_from(BucketOptions)
def update_bucket(node: ManagedNode, name: str, given: GivenOptions) -> None:
    """Change the settings of a bucket. Settings that are not given stay the same.

    A new number of replicas takes effect with the next `headwater cluster rebalance`.

    \b
    Example:
      headwater buckets update couchbase://127.0.0.1 travel --flush-enabled
    """
    form = given.make(BucketOptions).form()
    if not form:
        raise click.UsageError("Give what is to change: --ram-quota-mb, --replicas, --max-ttl or --flush-enabled.")
    _report(node, "changed", name, node.ask("POST", *_BUCKETS, name, form=form))


@buckets.command("flush")
@managed()
@_name_argument
def flush_bucket(node: ManagedNode, name: str) -> None:
    """Delete all documents of a bucket; its collections stay. Flushing must be enabled for the bucket.

    This can't be undone. Every consumer of its changes rolls back to the beginning.

    \b
    Example:
      headwater buckets flush couchbase://127.0.0.1 travel
    """
    _report(node, "flushed", name, node.ask("POST", *_BUCKETS, name, "controller", "doFlush"))


@buckets.command("drop")
@managed()
@_name_argument
def drop_bucket(node: ManagedNode, name: str) -> None:
    """Drop a bucket with all its data, on all nodes of the cluster.

    This can't be undone. The streams of the bucket end, and its connections are closed. `headwater serve --bucket` does
    not create it again.

    \b
    Example:
      headwater buckets drop couchbase://127.0.0.1 travel
    """
    _report(node, "dropped", name, node.ask("DELETE", *_BUCKETS, name))


# --- output -------------------------------------------------------------------------------------------------------


def _report(node: ManagedNode, what: str, name: str, answer: Answer) -> None:
    answer.accepted()
    node.print(f"{what} {name}", {"bucket": name, "done": what})


def _row(bucket: dict[str, Any]) -> dict[str, Any]:
    return {
        "bucket": str(bucket["name"]),
        "documents": int(bucket["basicStats"]["itemCount"]),
        "vbuckets": int(bucket.get("numVBuckets") or len(bucket["vBucketServerMap"]["vBucketMap"])),
        "replicas": int(bucket["replicaNumber"]),
        "max_ttl_s": int(bucket.get("maxTTL", 0)),
        "flush_enabled": "flush" in bucket["controllers"],
        "ram_quota_mb": int(bucket["quota"]["rawRAM"]) // _BYTES_PER_MB,
        "disk_bytes": int(bucket["basicStats"]["diskUsed"]),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = (str(row[name]) for name in ("documents", "vbuckets", "replicas"))
    ttl = f"{row['max_ttl_s']} s" if row["max_ttl_s"] else ""
    return row["bucket"], *numbers, ttl, "yes" if row["flush_enabled"] else ""
