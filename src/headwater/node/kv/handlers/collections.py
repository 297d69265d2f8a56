"""Handlers about scopes and collections: the manifest, and ids by names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from headwater.errors import MalformedJson
from headwater.node.kv.context import Context
from headwater.node.service import RequestRefused
from headwater.protocol.manifest import (
    COLLECTIONS_MAX,
    DEFAULT_NAME,
    FIRST_ID,
    NAME_BYTES_MAX,
    SCOPES_MAX,
    Manifest,
    Scope,
)
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.vbuckets import (
    GetCollectionId,
    GetCollectionIdResponse,
    GetCollectionsManifest,
    GetScopeId,
    SetCollectionsManifest,
)
from headwater.protocol.numbers import DEFAULT_COLLECTION, DEFAULT_SCOPE
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype

_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_%-]{{0,{NAME_BYTES_MAX - 1}}}")

# --- the manifest -------------------------------------------------------------------------------------------------


def get_manifest(context: Context, request: GetCollectionsManifest) -> PlainResponse:
    datatype = Datatype.JSON if context.session.understands_json else Datatype.RAW
    return context.ok(_manifest_to_show(context).encode(), datatype=datatype)


def _manifest_to_show(context: Context) -> Manifest:
    service = context.bucket_service
    if service.ack_when_durable:
        context.wait_for(service.manifest_commit)
    return context.service.users.visible(context.session.user or "", service.name, service.bucket.manifest)


def set_manifest(context: Context, request: SetCollectionsManifest) -> PlainResponse:
    """Take a newer manifest. The same one again changes nothing."""
    service = context.bucket_service
    current = service.bucket.manifest
    manifest = _decoded(request.value)
    if manifest.uid < current.uid:
        unappliable = context.service.dialect.refuses_older_manifest_as_unappliable
        status = Status.CANNOT_APPLY_MANIFEST if unappliable else Status.ERANGE
        raise RequestRefused(status, f"the manifest has uid {manifest.uid:x}, the bucket has {current.uid:x}")
    if manifest.uid == current.uid:
        if current.events_to(manifest):
            raise RequestRefused(Status.CANNOT_APPLY_MANIFEST, "a manifest that differs has a higher uid")
        return context.ok()
    _check_successor(current, manifest)
    ids_used = max(current.ids_used, manifest.ids_used)
    context.wait_for(service.set_manifest(replace(manifest, ids_used=ids_used)))
    return context.ok()


def _decoded(value: bytes) -> Manifest:
    try:
        manifest = Manifest.decode(value)
    except MalformedJson as error:
        raise RequestRefused(Status.EINVAL, error.reason) from error
    collections = [collection for _, collection in manifest.collections()]
    if len(manifest.scopes) > SCOPES_MAX or len(collections) > COLLECTIONS_MAX:
        raise RequestRefused(
            Status.EINVAL, f"a bucket has at most {SCOPES_MAX} scopes and {COLLECTIONS_MAX} collections"
        )
    _check_names((scope.id, scope.name) for scope in manifest.scopes)
    for scope in manifest.scopes:
        _check_names((collection.id, collection.name) for collection in scope.collections)
    default = manifest.collection_by_id(DEFAULT_COLLECTION)
    if default is not None and default[0].id != DEFAULT_SCOPE:
        raise RequestRefused(Status.EINVAL, "the default collection is in the default scope")
    return manifest


def _check_names(entries: Iterable[tuple[int, str]]) -> None:
    """The scopes of a manifest, or the collections of a scope."""
    names = set()
    for number, name in entries:
        if not _NAME.fullmatch(name) or name in names:
            raise RequestRefused(Status.EINVAL, f"{name!r} is not a name, or stands twice")
        if (number == DEFAULT_COLLECTION) != (name == DEFAULT_NAME) or 0 < number < FIRST_ID:
            raise RequestRefused(Status.EINVAL, f"{name!r} can't have the id {number:x}")
        names.add(name)


def _check_successor(current: Manifest, newer: Manifest) -> None:
    """What stays keeps its name, and a collection its scope. A flush is not taken back."""
    names = {scope.id: scope.name for scope in newer.scopes}
    for scope in current.scopes:
        if names.get(scope.id, scope.name) != scope.name:
            raise RequestRefused(Status.CANNOT_APPLY_MANIFEST, f"scope {scope.id:x} changes its name")
    for scope, collection in current.collections():
        found = newer.collection_by_id(collection.id)
        if found is not None and (found[0].id, found[1].name) != (scope.id, collection.name):
            raise RequestRefused(
                Status.CANNOT_APPLY_MANIFEST, f"collection {collection.id:x} changes its name or scope"
            )
        if found is not None and found[1].flush_uid < collection.flush_uid:
            raise RequestRefused(
                Status.CANNOT_APPLY_MANIFEST, f"collection {collection.id:x} was flushed by {collection.flush_uid:x}"
            )


# --- ids by names -------------------------------------------------------------------------------------------------


def get_collection_id(context: Context, request: GetCollectionId) -> GetCollectionIdResponse:
    """The id of `scope.collection`. A name that is left out is the default one."""
    names = _names(request)
    if len(names) != 2:
        raise RequestRefused(Status.EINVAL, "the path of a collection is scope.collection")
    manifest = _manifest_to_show(context)
    collection = _scope(manifest, names[0]).collection(names[1])
    if collection is None:
        raise RequestRefused(Status.UNKNOWN_COLLECTION, manifest_uid=f"{manifest.uid:x}")
    return context.reply(GetCollectionIdResponse, manifest_uid=manifest.uid, id=collection.id)


def get_scope_id(context: Context, request: GetScopeId) -> GetCollectionIdResponse:
    """The id of `scope`; of `scope.collection` only the scope counts."""
    names = _names(request)
    if len(names) > 2:
        raise RequestRefused(Status.EINVAL, "the path of a scope is scope or scope.collection")
    manifest = _manifest_to_show(context)
    return context.reply(GetCollectionIdResponse, manifest_uid=manifest.uid, id=_scope(manifest, names[0]).id)


def _names(request: GetCollectionId) -> list[str]:
    path = (request.value or request.key).decode(errors="replace")
    names = [name or DEFAULT_NAME for name in path.split(".")]
    if not all(_NAME.fullmatch(name) for name in names):
        raise RequestRefused(Status.EINVAL, f"{path!r} is not a path of a scope or collection")
    return names


def _scope(manifest: Manifest, name: str) -> Scope:
    scope = manifest.scope(name)
    if scope is None:
        raise RequestRefused(Status.UNKNOWN_SCOPE, manifest_uid=f"{manifest.uid:x}")
    return scope
