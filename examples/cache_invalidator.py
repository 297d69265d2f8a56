"""Drops documents from a cache as soon as they change.

    python examples/cache_invalidator.py couchbase://127.0.0.1/default

A cache that forgets a document too often is slow; one that forgets too seldom is wrong. So this one follows the bucket
from now on, without values, and forgets every key that changes. After a failover some changes have never happened, and
the server does not say which keys they were: then it forgets the whole vbucket.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import headwater
from headwater import Deletion, Expiration, HeadwaterError, Mutation, Rollback, vbucket_of


class Cache:
    """Documents by vbucket and key, loaded when they are first asked for."""

    def __init__(self, load: Callable[[str], Any], vbuckets: int) -> None:
        self._load = load
        self._vbuckets = vbuckets
        self._documents: defaultdict[int, dict[str, Any]] = defaultdict(dict)

    def get(self, key: str) -> Any:
        vbucket = self._documents[vbucket_of(key.encode(), self._vbuckets)]
        if key not in vbucket:
            vbucket[key] = self._load(key)
        return vbucket[key]

    def forget(self, key: str) -> None:
        self._documents[vbucket_of(key.encode(), self._vbuckets)].pop(key, None)

    def forget_vbucket(self, vbucket: int) -> None:
        self._documents.pop(vbucket, None)


def changes_from_now(client: headwater.blocking.Client) -> headwater.blocking.Changes:
    """All that changes after this has returned. What is loaded from now on can't become wrong unnoticed."""
    changes = client.changes(start="now", no_value=True, snapshots="as-they-come", name="cache-invalidator")
    changes.start()
    return changes


def follow(changes: headwater.blocking.Changes, cache: Cache, *, limit: int | None = None) -> None:
    """Forget what changes, for ever or for a number of changes."""
    for number, change in enumerate(changes, start=1):
        match change:
            case Mutation() | Deletion() | Expiration():
                cache.forget(change.key)
                print("forgotten:", change.key, flush=True)
            case Rollback():
                cache.forget_vbucket(change.vbucket)
                print("forgotten: all of vbucket", change.vbucket, flush=True)
        if number == limit:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Drop documents from a cache as soon as they change.")
    parser.add_argument("url", help="couchbase://host/bucket")
    url = parser.parse_args().url
    user, password = os.environ.get("HEADWATER_USER"), os.environ.get("HEADWATER_PASSWORD")
    with headwater.blocking.connect(url, user=user, password=password) as client:
        # Yours would ask the database.
        cache = Cache(load=lambda key: f"the document {key}", vbuckets=client.cluster_map.vbuckets)
        changes = changes_from_now(client)
        print("following", url, flush=True)
        follow(changes, cache)


if __name__ == "__main__":
    try:
        main()
    except HeadwaterError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        # The usual end of a program that follows for ever.
        sys.exit(130)
