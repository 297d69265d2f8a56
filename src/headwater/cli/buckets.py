"""`headwater buckets`: list, create, change, flush and drop the buckets of a node, or of its cluster."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import rich_click as click

from headwater.cli.management import Access, Answer, Management, ManagementUrl, management_options
from headwater.cli.options import errors_reported
from headwater.errors import HeadwaterError
from headwater.phrases import printable

MAX_TTL_S_MAX = 2**31 - 1
RAM_QUOTA_MB_DEFAULT = 100
"""Couchbase asks for a quota, and this is the least it takes."""
_BUCKETS = ("pools", "default", "buckets")
_BYTES_PER_MB = 1024 * 1024
Find = Callable[[], Management]


@click.group()
def buckets() -> None:
    """List, create, change, flush and drop buckets.

    URL is couchbase://host[:port], or couchbases:// for TLS, of a Couchbase or a Headwater node; the node is asked for
    its management port. http://host:port names that port itself. In a cluster a command concerns all nodes. The user
    who logs in must be an admin.

    \b
    Examples:
      export HEADWATER_USER=admin HEADWATER_PASSWORD=…
      headwater buckets list couchbase://127.0.0.1
      headwater buckets create couchbase://127.0.0.1 travel --flush-enabled
      headwater buckets flush couchbase://127.0.0.1 travel
      headwater buckets drop couchbase://127.0.0.1 travel
    """


# --- arguments ----------------------------------------------------------------------------------------------------


def _on_node(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command what finds the node of its URL, and all options that it takes to get there."""

    @click.argument("url", metavar="URL")
    @management_options
    @errors_reported
    @functools.wraps(command)
    def wrapped(url: str, access: Access, **rest: Any) -> None:
        where = ManagementUrl.parse(url, needs_bucket=False)
        command(lambda: access.open(where), **rest)

    return wrapped


_name_argument = click.argument("name", metavar="NAME")


def _settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the form of the settings that it was given."""

    @click.option("--ram-quota-mb", type=click.IntRange(100), metavar="MB", help="The memory that it may take.")
    @click.option(
        "--replicas", type=click.IntRange(0, 3), metavar="N", help="Copies of each vbucket beside the active."
    )
    @click.option(
        "--max-ttl",
        type=click.IntRange(0, MAX_TTL_S_MAX),
        metavar="S",
        help="How long documents live at most, in seconds; 0 for ever.",
    )
    @click.option("--flush-enabled/--flush-disabled", default=None, help="Whether the bucket can be flushed.")
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        ram_quota_mb: int | None,
        replicas: int | None,
        max_ttl: int | None,
        flush_enabled: bool | None,
        **rest: Any,
    ) -> None:
        given = {
            "ramQuotaMB": ram_quota_mb,
            "replicaNumber": replicas,
            "maxTTL": max_ttl,
            "flushEnabled": None if flush_enabled is None else int(flush_enabled),
        }
        command(*args, form={name: str(value) for name, value in given.items() if value is not None}, **rest)

    return wrapped


# --- commands -----------------------------------------------------------------------------------------------------


@buckets.command("list")
@_on_node
def list_buckets(find: Find, as_json: bool) -> None:
    """List the buckets and their settings.

    \b
    Example:
      headwater buckets list couchbase://127.0.0.1
    """
    answer = find().ask("GET", *_BUCKETS).accepted()
    try:
        rows = [_row(bucket) for bucket in answer]
    except (LookupError, TypeError, AttributeError) as error:
        raise HeadwaterError(
            "the answer is no list of buckets", hint="Check that it is a Couchbase or Headwater node"
        ) from error
    if as_json:
        click.echo(json.dumps({"buckets": rows}))
        return
    shown = [("BUCKET", "DOCUMENTS", "VBUCKETS", "REPLICAS", "MAX TTL", "FLUSH"), *map(_cells, rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@buckets.command("create")
@_on_node
@_name_argument
@_settings_options
@click.option("--vbuckets", type=click.IntRange(1, 1024), metavar="N", help="A power of two. [default: the node's]")
@click.option("--this-node-only", is_flag=True, help="Leave the other nodes of its cluster without it.")
def create_bucket(
    find: Find, name: str, form: dict[str, str], vbuckets: int | None, this_node_only: bool, as_json: bool
) -> None:
    """Create a bucket, on all nodes of the cluster. When the command returns, it is served.

    \b
    Examples:
      headwater buckets create couchbase://127.0.0.1 travel
      headwater buckets create couchbase://127.0.0.1 carts --max-ttl 86400
    """
    form = {"name": name, "ramQuotaMB": str(RAM_QUOTA_MB_DEFAULT), **form}
    if vbuckets is not None:
        form["numVBuckets"] = str(vbuckets)
    path = ("headwater", "buckets") if this_node_only else _BUCKETS
    _report("created", name, find().ask("POST", *path, form=form), as_json=as_json)


@buckets.command("update")
@_on_node
@_name_argument
@_settings_options
def update_bucket(find: Find, name: str, form: dict[str, str], as_json: bool) -> None:
    """Change the settings of a bucket. What is not given stays as it is.

    Another number of replicas is there after the next `headwater cluster rebalance`.

    \b
    Example:
      headwater buckets update couchbase://127.0.0.1 travel --flush-enabled
    """
    if not form:
        raise click.UsageError("Give what is to change: --ram-quota-mb, --replicas, --max-ttl or --flush-enabled.")
    _report("changed", name, find().ask("POST", *_BUCKETS, name, form=form), as_json=as_json)


@buckets.command("flush")
@_on_node
@_name_argument
def flush_bucket(find: Find, name: str, as_json: bool) -> None:
    """Drop all documents of a bucket; its collections stay. Flushing has to be enabled for it.

    There is no way back. Every consumer of its changes rolls back to the beginning.

    \b
    Example:
      headwater buckets flush couchbase://127.0.0.1 travel
    """
    _report("flushed", name, find().ask("POST", *_BUCKETS, name, "controller", "doFlush"), as_json=as_json)


@buckets.command("drop")
@_on_node
@_name_argument
def drop_bucket(find: Find, name: str, as_json: bool) -> None:
    """Drop a bucket with all its data, on all nodes of the cluster.

    There is no way back. Its streams end, and its connections are closed. `headwater serve --bucket` does not make it
    again.

    \b
    Example:
      headwater buckets drop couchbase://127.0.0.1 travel
    """
    _report("dropped", name, find().ask("DELETE", *_BUCKETS, name), as_json=as_json)


# --- output -------------------------------------------------------------------------------------------------------


def _report(what: str, name: str, answer: Answer, *, as_json: bool) -> None:
    answer.accepted()
    click.echo(json.dumps({"bucket": name, "done": what}) if as_json else printable(f"{what} {name}"))


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
    return printable(row["bucket"]), *numbers, ttl, "yes" if row["flush_enabled"] else ""
