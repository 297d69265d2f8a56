"""`headwater collections`: list, create, change and drop the scopes and collections of a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headwater.cli.management import BucketScopes, ManagedNode, managed, no_list
from headwater.cli.output import click, print_table

MAX_TTL_S_MAX = 2**31 - 1
_BUCKETS_OWN_TTL, _NO_TTL = 0, -1


@click.group()
def collections() -> None:
    """List, create, change and drop scopes and collections.

    URL is couchbase://host[:port]/bucket, or couchbases:// for TLS, of a Couchbase or a Headwater node; the command
    asks the node for its management port. http://host:port/bucket gives that port directly. Without TLS, anyone on the
    network path can read the password.

    \b
    Examples:
      export HEADWATER_USER=admin HEADWATER_PASSWORD=…
      headwater collections list couchbase://127.0.0.1/default
      headwater collections create couchbase://127.0.0.1/default shop
      headwater collections create couchbase://127.0.0.1/default shop.orders
    """


# --- arguments ----------------------------------------------------------------------------------------------------


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
@managed(needs_bucket=True)
def list_collections(node: ManagedNode) -> None:
    """List the scopes and collections of a bucket.

    \b
    Example:
      headwater collections list couchbase://127.0.0.1/default
    """
    manifest = BucketScopes(node).ask("GET").accepted()
    try:
        rows = list(_rows(manifest))
    except (LookupError, TypeError, AttributeError) as error:
        raise no_list("collections") from error
    if node.as_json:
        click.echo(json.dumps(manifest))
        return
    print_table(("COLLECTION", "ID", "MAX TTL", "HISTORY"), rows)


def _max_ttl_option(help_text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--max-ttl", type=click.IntRange(_NO_TTL, MAX_TTL_S_MAX), metavar="S", help=help_text)


@collections.command("create")
@managed(needs_bucket=True)
@_name_argument
@_max_ttl_option("Maximum time to live of documents, in seconds; -1 for no limit, 0 for the bucket's setting.")
@click.option("--history", is_flag=True, help="Keep every version of the collection's documents for change streams.")
def create_collection(node: ManagedNode, name: _Name, max_ttl: int | None, history: bool) -> None:
    """Create a scope, or a collection in an existing scope.

    When the command returns, the change is in effect on every reachable node.

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
    _print(node, "created", name, BucketScopes(node).create(name.scope, name.collection, **settings))


@collections.command("update")
@managed(needs_bucket=True)
@_name_argument
@_max_ttl_option("Maximum time to live of documents written from now on; -1 for no limit, 0 for the bucket's setting.")
@click.option("--history/--no-history", default=None, help="Whether every version is kept for change streams.")
def update_collection(node: ManagedNode, name: _Name, max_ttl: int | None, history: bool | None) -> None:
    """Change a collection. Settings that are not given stay the same.

    When the command returns, the change is in effect on every reachable node.

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
    _print(node, "changed", name, BucketScopes(node).update(name.scope, name.collection, **settings))


@collections.command("drop")
@managed(needs_bucket=True)
@_name_argument
def drop_collection(node: ManagedNode, name: _Name) -> None:
    """Drop a scope or a collection, with all documents in it.

    This can't be undone. When the command returns, the change is in effect on every reachable node.

    \b
    Examples:
      headwater collections drop couchbase://127.0.0.1/default shop.carts
      headwater collections drop couchbase://127.0.0.1/default shop
    """
    path = (name.scope,) if name.collection is None else (name.scope, "collections", name.collection)
    scopes = BucketScopes(node)
    _print(node, "dropped", name, scopes.wait_for(scopes.ask("DELETE", *path)))


# --- output -------------------------------------------------------------------------------------------------------


def _print(node: ManagedNode, what: str, name: _Name, uid: str) -> None:
    node.print(f"{what} {name} (manifest {uid})", {"uid": uid})


def _rows(manifest: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for scope in manifest["scopes"]:
        for collection in scope["collections"]:
            yield (
                f"{scope['name']}.{collection['name']}",
                str(collection["uid"]),
                _ttl(collection.get("maxTTL", _BUCKETS_OWN_TTL)),
                "yes" if collection.get("history") else "",
            )
        if not scope["collections"]:
            yield str(scope["name"]), "", "", ""


def _ttl(max_ttl: Any) -> str:
    if max_ttl == _BUCKETS_OWN_TTL:
        return ""
    return "none" if max_ttl == _NO_TTL else f"{max_ttl} s"
