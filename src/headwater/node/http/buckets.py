"""Handlers for one bucket: its scopes and collections, its DCP connections, and drills.

The manifest is shown as in REST, which differs from the one on the wire: every collection has a `maxTTL`, where 0 uses
the bucket's setting and -1 disables it. A drill rolls a vbucket back (`membership`) or lets the copies fall behind.
Couchbase has no paths for drills, nor for connections.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from starlette.responses import Response

from headwater.errors import InvalidInput, LocalProtocolError
from headwater.http.serving import while_connected
from headwater.log_fields import LogEvent
from headwater.node.http.call import Call, Json, Refusal
from headwater.node.options import MAX_TTL_S_MAX
from headwater.node.producer.statistics import connection_statistics
from headwater.phrases import counted, parse_number
from headwater.protocol.manifest import DEFAULT_NAME, Collection, Manifest, Scope
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId

ENSURE_MS_DEFAULT = 30_000
ENSURE_MS_MAX = 300_000
"""How long a request may wait for a manifest."""
ENSURE_WAITS_MAX = 32
"""How many requests of one user may wait at a time, because each holds a connection."""
_BUCKETS_OWN_TTL, _NO_TTL = 0, -1
_UID = re.compile(r"[0-9A-Fa-f]{1,16}")
_BOOLEANS = {"true": True, "false": False}
_VBUCKET_MAX = 0xFFFF


# --- the manifest -------------------------------------------------------------------------------------------------


async def show_manifest(call: Call) -> Response:
    manifest = call.node.users.visible(call.user, call.path("bucket"), call.bucket.manifest)
    return Json({"uid": f"{manifest.uid:x}", "scopes": [_scope(scope) for scope in manifest.scopes]})


def _scope(scope: Scope) -> dict[str, Any]:
    collections = [_collection(collection) for collection in scope.collections]
    return {"name": scope.name, "uid": f"{scope.id:x}", "collections": collections}


def _collection(collection: Collection) -> dict[str, Any]:
    max_ttl = _BUCKETS_OWN_TTL if collection.max_ttl_s is None else collection.max_ttl_s or _NO_TTL
    return {
        "name": collection.name,
        "uid": f"{collection.id:x}",
        "maxTTL": max_ttl,
        "history": collection.history,
    }


# --- changes ------------------------------------------------------------------------------------------------------


async def create_scope(call: Call) -> Response:
    name = _name(await call.form("name"))

    def change(manifest: Manifest) -> Manifest:
        if manifest.scope(name) is not None:
            raise Refusal.errors(400, f'Scope with name "{name}" already exists')
        return manifest.with_scope(name)

    return await _changed(call, change)


async def drop_scope(call: Call) -> Response:
    name = call.path("scope")
    if name == DEFAULT_NAME:
        raise Refusal.errors(400, f"Deleting {DEFAULT_NAME} scope is not allowed")

    def change(manifest: Manifest) -> Manifest:
        _scope_or_refuse(manifest, name)
        return manifest.without_scope(name)

    return await _changed(call, change)


async def create_collection(call: Call) -> Response:
    scope_name = call.path("scope")
    form = await call.form("name", "maxTTL", "history")
    name, max_ttl_s = _name(form), _max_ttl_s(form)
    history = _history(form) if "history" in form else call.service.settings.history_default

    def change(manifest: Manifest) -> Manifest:
        if _scope_or_refuse(manifest, scope_name).collection(name) is not None:
            raise Refusal.errors(400, f'Collection with name "{name}" in scope "{scope_name}" already exists')
        return manifest.with_collection(scope_name, name, max_ttl_s=max_ttl_s, history=history)

    return await _changed(call, change)


async def update_collection(call: Call) -> Response:
    """Change how long documents of a collection live, or whether it keeps history. Settings that are not given stay."""
    scope_name, name = call.path("scope"), call.path("collection")
    form = await call.form("maxTTL", "history")
    changes: dict[str, Any] = {}
    if "maxTTL" in form:
        changes["max_ttl_s"] = _max_ttl_s(form)
    if "history" in form:
        changes["history"] = _history(form)
    if not changes:
        raise Refusal.errors(400, "Give maxTTL, history or both")
    if "maxTTL" in form and (scope_name, name) == (DEFAULT_NAME, DEFAULT_NAME):
        # Clients without collections write there, by the bucket's own rules.
        raise Refusal.errors(400, "The default collection has the bucket's: change that", field="maxTTL")

    def change(manifest: Manifest) -> Manifest:
        known = _collection_or_refuse(manifest, scope_name, name)
        return manifest.with_changed_collection(scope_name, replace(known, **changes))

    return await _changed(call, change)


async def drop_collection(call: Call) -> Response:
    scope_name, name = call.path("scope"), call.path("collection")

    def change(manifest: Manifest) -> Manifest:
        _collection_or_refuse(manifest, scope_name, name)
        return manifest.without_collection(scope_name, name)

    return await _changed(call, change)


def _collection_or_refuse(manifest: Manifest, scope_name: str, name: str) -> Collection:
    collection = _scope_or_refuse(manifest, scope_name).collection(name)
    if collection is None:
        raise Refusal.errors(404, f'Collection with name "{name}" in scope "{scope_name}" is not found')
    return collection


def _scope_or_refuse(manifest: Manifest, name: str) -> Scope:
    scope = manifest.scope(name)
    if scope is None:
        raise Refusal.errors(404, f'Scope with name "{name}" is not found')
    return scope


async def _changed(call: Call, change: Callable[[Manifest], Manifest]) -> Response:
    bucket = call.bucket.facts.name
    manifest = await call.node.change_manifest(bucket, change)
    call.node.log(
        f"{call.user!r} changed the collections of bucket {bucket!r}: manifest {manifest.uid:x}",
        event=LogEvent.COLLECTIONS_CHANGED,
        user=call.user,
        bucket=bucket,
        manifest=f"{manifest.uid:x}",
    )
    return Json({"uid": f"{manifest.uid:x}"})


# --- the fields of the forms --------------------------------------------------------------------------------------


def _name(form: dict[str, str]) -> str:
    if "name" not in form:
        raise Refusal.errors(400, "The name is missing", field="name")
    try:
        # Check the manifest's rule here, so that the answer can name the field.
        Manifest().with_scope(form["name"])
    except LocalProtocolError as error:
        raise Refusal.errors(400, error.hint or error.reason, field="name") from error
    return form["name"]


def _max_ttl_s(form: dict[str, str]) -> int | None:
    """The value as in the manifest: None uses the bucket's setting; 0 disables it."""
    text = form.get("maxTTL", str(_BUCKETS_OWN_TTL))
    number = int(text) if text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= 10 else None
    if number is None or not _NO_TTL <= number <= MAX_TTL_S_MAX:
        raise Refusal.errors(400, f"A number of seconds from {_NO_TTL} to {MAX_TTL_S_MAX}", field="maxTTL")
    return {_BUCKETS_OWN_TTL: None, _NO_TTL: 0}.get(number, number)


def _history(form: dict[str, str]) -> bool:
    history = _BOOLEANS.get(form["history"])
    if history is None:
        raise Refusal.errors(400, "Either true or false", field="history")
    return history


# --- waiting ------------------------------------------------------------------------------------------------------


async def ensure_manifest(call: Call) -> Response:
    """Answer once the manifest of this uid, or a newer one, is permanently in force."""
    bucket, text = call.bucket.facts.name, call.path("uid")
    if not _UID.fullmatch(text):
        raise Refusal.errors(400, "A manifest uid is a number in base 16")
    timeout_s, waits = _timeout_s(await call.form("timeout", "nodes")), call.streams.manifest_waits
    if waits[call.user] >= ENSURE_WAITS_MAX:
        raise Refusal.message(503, f"The user waits for {ENSURE_WAITS_MAX} manifests already", Retry_After="1")
    waits[call.user] += 1
    try:
        async with asyncio.timeout(timeout_s):
            await while_connected(call.request, call.node.wait_for_manifest(bucket, int(text, 16)))
    except TimeoutError as error:
        raise Refusal.message(504, f"The manifest did not come within {timeout_s:g} s") from error
    finally:
        waits[call.user] -= 1
    return Response()


def _timeout_s(form: dict[str, str]) -> float:
    milliseconds = parse_number(form.get("timeout", str(ENSURE_MS_DEFAULT)), ENSURE_MS_MAX)
    if milliseconds is None:
        raise Refusal.errors(400, f"Milliseconds, at most {ENSURE_MS_MAX}", field="timeout")
    return milliseconds / 1000


# --- DCP connections ----------------------------------------------------------------------------------------------


async def show_connections(call: Call) -> Response:
    """The connections that receive changes of the bucket, with their streams: all, or the one named in the query."""
    bucket = call.bucket.facts.name
    name = call.request.query_params.get("connection")
    statistics = connection_statistics(call.service.producer_connections(), now_s=call.node.now_s(), name=name)
    connections = [asdict(connection) for connection in statistics]
    for connection in connections:
        for stream in connection["streams"] or ():
            if stream["end_seqno"] == SEQNO_MAX:
                # No end. A page's script can't hold the number itself.
                stream["end_seqno"] = None
    return Json({"bucket": bucket, "connections": connections})


# --- drills -------------------------------------------------------------------------------------------------------


async def roll_back(call: Call) -> Response:
    """Roll a vbucket back to a seqno, as a failover to a copy that is behind would."""
    bucket = call.bucket.facts.name
    vbucket = _number(call.path("vbucket"), _VBUCKET_MAX, field="vbucket")
    form = await call.form("to")
    if "to" not in form:
        raise Refusal.errors(400, "The seqno is missing", field="to")
    to_seqno = _number(form["to"], SEQNO_MAX, field="to")
    try:
        rolled = await call.node.roll_back(bucket, VBucketId(vbucket), Seqno(to_seqno))
    except InvalidInput as error:
        raise Refusal.errors(400, str(error)) from error
    call.node.log(
        f"{call.user!r} rolled vbucket {rolled.vbucket} of bucket {bucket!r} back"
        f" from {rolled.high_seqno_before} to {rolled.to_seqno}",
        event=LogEvent.ROLLED_BACK,
        user=call.user,
        bucket=bucket,
        vbucket=rolled.vbucket,
        from_seqno=rolled.high_seqno_before,
        seqno=rolled.to_seqno,
        vbuuid=rolled.vbuuid,
    )
    return Json(
        {
            "vbucket": rolled.vbucket,
            "rolled_back_to": rolled.to_seqno,
            "vbuuid": rolled.vbuuid,
            "high_seqno_before": rolled.high_seqno_before,
        }
    )


async def hold_replicas(call: Call) -> Response:
    """Stop processing changes for the copies on this node: if their active node fails, those changes are lost."""
    replicas = call.node.hold_replicas(call.bucket.facts.name)
    _log_replicas(call, "holds", replicas, LogEvent.REPLICAS_HELD)
    return Json({"held": True, "replicas": replicas})


async def release_replicas(call: Call) -> Response:
    replicas = call.node.release_replicas(call.bucket.facts.name)
    _log_replicas(call, "released", replicas, LogEvent.REPLICAS_RELEASED)
    return Json({"held": False, "replicas": replicas})


async def cut_connections(call: Call) -> Response:
    """A drill: unsent data is lost, and clients have to connect again."""
    return Json({"connections": call.node.cut_connections(call.bucket.facts.name, call.user)})


def _log_replicas(call: Call, verb: str, replicas: int, event: LogEvent) -> None:
    bucket = call.bucket.facts.name
    message = f"{call.user!r} {verb} {counted(replicas, 'replica')} of bucket {bucket!r}"
    call.node.log(message, event=event, user=call.user, bucket=bucket, replicas=replicas)


def _number(text: str, largest: int, *, field: str) -> int:
    number = parse_number(text, largest)
    if number is None:
        raise Refusal.errors(400, f"A number from 0 to {largest}", field=field)
    return number
