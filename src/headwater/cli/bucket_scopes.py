"""The scopes and collections of a bucket, on the management side of its node."""

from __future__ import annotations

import functools
import http
from collections.abc import Callable, Iterable

from headwater.cli.management_api import Answer, Management, ManagementUrl
from headwater.cli.management_options import Access
from headwater.errors import HeadwaterError

_WAIT_MS = 30_000
_CAN_T_WAIT = frozenset({http.HTTPStatus.FORBIDDEN, http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED})
"""What servers say that have no way to wait for a manifest, or not for this user."""
_HINT = "Check that it is a Couchbase or Headwater node"


def scopes_of(url: str, access: Access) -> BucketScopes:
    """Of the bucket of a URL."""
    where = ManagementUrl.parse(url)
    return BucketScopes(where.bucket, lambda: access.open(where))


class BucketScopes:
    """Asked and changed over HTTP. The node is looked for when it is needed first."""

    def __init__(self, name: str, find: Callable[[], Management]) -> None:
        self._name = name
        self._find = functools.cache(find)

    def ask(self, method: str, *path: str, form: dict[str, str] | None = None) -> Answer:
        return self._find().ask(method, "pools", "default", "buckets", self._name, "scopes", *path, form=form)

    def wait_for(self, changed: Answer) -> str:
        """The uid of the manifest that a change has made, once every node has it."""
        content = changed.accepted()
        uid = content.get("uid") if isinstance(content, dict) else None
        if not isinstance(uid, str):
            raise HeadwaterError("the answer has no manifest uid", hint=_HINT)
        waited = self.ask("POST", "@ensureManifest", uid, form={"timeout": str(_WAIT_MS)})
        if waited.status not in _CAN_T_WAIT:
            waited.accepted()
        return uid

    def create(self, scope: str, collection: str | None = None, **settings: str) -> str:
        """Create a scope, or a collection in it. Gives the uid of the manifest, once every node has it."""
        if collection is None:
            return self.wait_for(self.ask("POST", form={"name": scope}))
        return self.wait_for(self.ask("POST", scope, "collections", form={"name": collection, **settings}))

    def create_missing(self, names: Iterable[str]) -> None:
        """Have all of these collections, each of them `scope.collection`."""
        there = self._names()
        for name in names:
            scope, _, collection = name.partition(".")
            if scope not in there:
                self.create(scope)
                there[scope] = set()
            if collection not in there[scope]:
                self.create(scope, collection)
                there[scope].add(collection)

    def _names(self) -> dict[str, set[str]]:
        manifest = self.ask("GET").accepted()
        try:
            return {
                scope["name"]: {collection["name"] for collection in scope["collections"]}
                for scope in manifest["scopes"]
            }
        except (LookupError, TypeError) as error:
            raise HeadwaterError("the answer is no list of collections", hint=_HINT) from error
