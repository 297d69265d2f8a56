"""`headwater collections`: list, create, change and drop the scopes and collections of a bucket."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import rich_click as click

from headwater.cli.management import Access, BucketScopes, management_options, scopes_of
from headwater.cli.options import errors_reported
from headwater.errors import HeadwaterError
from headwater.phrases import printable

MAX_TTL_S_MAX = 2**31 - 1
_BUCKETS_OWN_TTL, _NO_TTL = 0, -1


@click.group()
def collections() -> None:
    """List, create, change and drop scopes and collections.

    URL is couchbase://host[:port]/bucket, or couchbases:// for TLS, of a Couchbase or a Headwater node; the node is
    asked for its management port. http://host:port/bucket names that port itself. Without TLS, who listens on the way
    can read the password.

    \b
    Examples:
      export HEADWATER_USER=admin HEADWATER_PASSWORD=…
      headwater collections list couchbase://127.0.0.1/default
      headwater collections create couchbase://127.0.0.1/default shop
      headwater collections create couchbase://127.0.0.1/default shop.orders
    """


# --- arguments ----------------------------------------------------------------------------------------------------


def _on_bucket(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the bucket of its URL, and all options that it takes to get there."""

    @click.argument("url", metavar="URL")
    @management_options
    @errors_reported
    @functools.wraps(command)
    def wrapped(url: str, access: Access, **rest: Any) -> None:
        command(scopes_of(url, access), **rest)

    return wrapped


@dataclass(frozen=True, slots=True)
class _Name:
    """A scope, or a collection in a scope."""

    scope: str
    collection: str | None = None

    def __str__(self) -> str:
        return self.scope if self.collection is None else f"{self.scope}.{self.collection}"


def _parse_name(context: click.Context, parameter: click.Parameter, value: str) -> _Name:
    scope, dot, collection = value.partition(".")
    if not scope or (dot and not collection) or "." in collection:
        raise click.BadParameter(f"{value!r} is not a scope, nor a scope and a collection.")
    return _Name(scope, collection or None)


_name_argument = click.argument("name", metavar="SCOPE[.COLLECTION]", callback=_parse_name)


# --- commands -----------------------------------------------------------------------------------------------------


@collections.command("list")
@_on_bucket
def list_collections(bucket: BucketScopes, as_json: bool) -> None:
    """List the scopes and collections of a bucket.

    \b
    Example:
      headwater collections list couchbase://127.0.0.1/default
    """
    manifest = bucket.ask("GET").accepted()
    try:
        rows = [("COLLECTION", "ID", "MAX TTL", "HISTORY"), *_rows(manifest)]
    except (LookupError, TypeError, AttributeError) as error:
        raise HeadwaterError(
            "the answer is no list of collections", hint="Check that it is a Couchbase or Headwater node"
        ) from error
    if as_json:
        click.echo(json.dumps(manifest))
        return
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _max_ttl_option(help_text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--max-ttl", type=click.IntRange(_NO_TTL, MAX_TTL_S_MAX), metavar="S", help=help_text)


@collections.command("create")
@_on_bucket
@_name_argument
@_max_ttl_option("How long documents of the collection live at most, in seconds; -1 for ever, 0 as the bucket has it.")
@click.option("--history", is_flag=True, help="Keep every version of the collection's documents for change streams.")
def create_collection(bucket: BucketScopes, name: _Name, max_ttl: int | None, history: bool, as_json: bool) -> None:
    """Create a scope, or a collection in a scope that exists.

    When the command returns, every node knows it.

    \b
    Examples:
      headwater collections create couchbase://127.0.0.1/default shop
      headwater collections create http://127.0.0.1:8091/default shop.carts \\
        --max-ttl 86400
    """
    if name.collection is None and (max_ttl is not None or history):
        raise click.UsageError("A scope has neither --max-ttl nor --history: name a collection of it.")
    settings = {} if max_ttl is None else {"maxTTL": str(max_ttl)}
    if history:
        settings["history"] = "true"
    _print("created", name, bucket.create(name.scope, name.collection, **settings), as_json=as_json)


@collections.command("update")
@_on_bucket
@_name_argument
@_max_ttl_option("How long documents that are written from now on live at most; -1 for ever, 0 as the bucket has it.")
@click.option("--history/--no-history", default=None, help="Whether every version is kept for change streams.")
def update_collection(
    bucket: BucketScopes, name: _Name, max_ttl: int | None, history: bool | None, as_json: bool
) -> None:
    """Change a collection. What is not given stays as it is.

    When the command returns, every node knows it.

    \b
    Example:
      headwater collections update couchbase://127.0.0.1/default shop.carts \\
        --max-ttl 3600
    """
    if name.collection is None:
        raise click.UsageError("A scope has no settings: name a collection of it.")
    settings = {} if max_ttl is None else {"maxTTL": str(max_ttl)}
    if history is not None:
        settings["history"] = "true" if history else "false"
    if not settings:
        raise click.UsageError("Give what is to change: --max-ttl, --history or --no-history.")
    _print("changed", name, bucket.update(name.scope, name.collection, **settings), as_json=as_json)


@collections.command("drop")
@_on_bucket
@_name_argument
def drop_collection(bucket: BucketScopes, name: _Name, as_json: bool) -> None:
    """Drop a scope or a collection, with all documents in it.

    There is no way back. When the command returns, every node knows it.

    \b
    Examples:
      headwater collections drop couchbase://127.0.0.1/default shop.carts
      headwater collections drop couchbase://127.0.0.1/default shop
    """
    path = (name.scope,) if name.collection is None else (name.scope, "collections", name.collection)
    _print("dropped", name, bucket.wait_for(bucket.ask("DELETE", *path)), as_json=as_json)


# --- output -------------------------------------------------------------------------------------------------------


def _print(what: str, name: _Name, uid: str, *, as_json: bool) -> None:
    click.echo(json.dumps({"uid": uid}) if as_json else f"{what} {name} (manifest {printable(uid)})")


def _rows(manifest: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for scope in manifest["scopes"]:
        for collection in scope["collections"]:
            yield (
                printable(f"{scope['name']}.{collection['name']}"),
                printable(str(collection["uid"])),
                _ttl(collection.get("maxTTL", _BUCKETS_OWN_TTL)),
                "yes" if collection.get("history") else "",
            )
        if not scope["collections"]:
            yield printable(str(scope["name"])), "", "", ""


def _ttl(max_ttl: Any) -> str:
    if max_ttl == _BUCKETS_OWN_TTL:
        return ""
    return "none" if max_ttl == _NO_TTL else printable(f"{max_ttl} s")
