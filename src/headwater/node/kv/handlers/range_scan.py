"""Handlers of range scans and random keys, which find documents without knowing their keys.

A client describes a scan in JSON to create it (kv_engine, docs/range_scans/range_scan_create.md), and continues it
until it is complete. A scan also ends if it is cancelled or too old, or its session ends (`service.RangeScans`).
`store.range_scan` does the work, part by part.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from headwater.node.kv.context import UNBOUNDED_WORK, Context
from headwater.node.kv.documents import check_vbucket, collection_by_id, shown_value, whole_value
from headwater.node.service import SCAN_S_MAX, RunningScan
from headwater.protocol.features import Feature
from headwater.protocol.messages import documents as messages
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.documents import GetRandomKey, GetResponse
from headwater.protocol.numbers import DEFAULT_COLLECTION, KEY_BYTES_MAX, CollectionId, VBucketId
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype
from headwater.store.range_scan import RangeScan, Sample, ScanWanted, has_change, random_document

PART_BYTES_MAX = 1024 * 1024
PART_ITEMS_MAX = 16_384
"""The most that one answer holds, whatever the client asks for, so that other connections get turns in between."""
REQUEST_BYTES_MAX = 4096
NAME_BYTES_MAX = 50
_KEYS_ONLY, _DOCUMENTS = bytes(4), (1).to_bytes(4)
_U64_MAX = 2**64 - 1

T = TypeVar("T")


def create(context: Context, request: messages.RangeScanCreate) -> messages.RangeScanCreateResponse:
    members = _members(context, request)
    service, bucket = context.bucket_service, context.bucket_service.bucket
    check_vbucket(context, request.vbucket)
    wanted = _wanted(members)
    collection_by_id(context, wanted.collection)
    _check_snapshot(context, request.vbucket, _object(members, "snapshot_requirements"))
    if service.range_scans.is_full(context.session):
        raise RequestRefused(Status.EBUSY, "too many scans are under way; continue or cancel some first")
    begin = partial(RangeScan, now_s=bucket.environment.now_s())
    young = bucket.young_of(request.vbucket)
    scan = context.work(begin, bucket, request.vbucket, young, wanted, cost=UNBOUNDED_WORK, key=wanted)
    if scan.is_complete:
        raise RequestRefused(Status.KEY_ENOENT, "there is no document in this range")
    scan_id = context.service.random_bytes(messages.SCAN_ID_BYTES)
    service.range_scans.running[scan_id] = RunningScan(
        scan=scan,
        vbucket=request.vbucket,
        vbuuid=_vbuuid(context, request.vbucket),
        owner=context.session,
        until_s=context.service.now_s() + SCAN_S_MAX,
    )
    return context.reply(messages.RangeScanCreateResponse, scan_id=scan_id)


def continue_scan(context: Context, request: messages.RangeScanContinue) -> PlainResponse:
    """Answer with the next part. The time limit of the request is not checked, because a part is small."""
    running = _running(context, request)
    scan = running.scan
    take = partial(
        scan.take,
        items_max=min(request.items_max or PART_ITEMS_MAX, PART_ITEMS_MAX),
        bytes_max=min(request.bytes_max or PART_BYTES_MAX, PART_BYTES_MAX),
        datatypes=context.session.datatypes | (Datatype.XATTR if scan.wanted.include_xattrs else Datatype.RAW),
    )
    part = context.work(take, cost=UNBOUNDED_WORK, key=request.scan_id)
    status = Status.RANGE_SCAN_COMPLETE if scan.is_complete else Status.RANGE_SCAN_MORE
    if scan.is_complete:
        context.bucket_service.range_scans.end(request.scan_id)
    extras = _KEYS_ONLY if scan.wanted.keys_only else _DOCUMENTS
    return context.ok(part, extras=extras, status=status)


def cancel(context: Context, request: messages.RangeScanCancel) -> PlainResponse:
    _running(context, request)
    context.bucket_service.range_scans.end(request.scan_id)
    return context.ok()


def _running(context: Context, request: messages.RangeScanContinue | messages.RangeScanCancel) -> RunningScan:
    """The scan of a request. Ends the scan if its vbucket or collection has changed since."""
    scans = context.bucket_service.range_scans
    scans.tick(context.service.now_s())
    running = scans.running.get(request.scan_id)
    if running is None or running.vbucket != request.vbucket:
        check_vbucket(context, request.vbucket)
        raise RequestRefused(Status.KEY_ENOENT, "there is no such scan, or it was too old")
    try:
        check_vbucket(context, request.vbucket)
        collection_by_id(context, running.scan.wanted.collection)
        if _vbuuid(context, request.vbucket) != running.vbuuid:
            raise RequestRefused(Status.RANGE_SCAN_CANCELLED, "the vbucket has begun another branch of history")
    except RequestRefused:
        scans.end(request.scan_id)
        raise
    return running


def _vbuuid(context: Context, vbucket: VBucketId) -> Any:
    facts = context.bucket_service.bucket.vbuckets.facts[vbucket]
    assert facts is not None, "only active vbuckets are scanned"
    return facts.failover_log.newest.vbuuid


def _check_snapshot(context: Context, vbucket: VBucketId, required: dict[str, Any] | None) -> None:
    """Refuse a scan unless the vbucket has the branch and the seqno that the client requires.

    In Couchbase the request may wait for the seqno up to `timeout_ms`. Here writers are answered when their changes are
    durable, so a client whose seqno is from an answer never has to wait, and any other has to retry (ETMPFAIL).
    """
    if required is None:
        return
    vbuuid = _member(required, "vb_uuid", _decimal, needed=True)
    seqno = _member(required, "seqno", _number, needed=True)
    seqno_exists = _member(required, "seqno_exists", _boolean)
    _member(required, "timeout_ms", _number)
    bucket = context.bucket_service.bucket
    if vbuuid != _vbuuid(context, vbucket):
        raise RequestRefused(Status.VBUUID_NOT_EQUAL, "the vbucket is on another branch of history")
    if seqno > bucket.vbuckets.durable_seqno(vbucket):
        raise RequestRefused(Status.ETMPFAIL, "this seqno is not durable yet; try again")
    if seqno_exists and not has_change(bucket, vbucket, seqno):
        raise RequestRefused(Status.NOT_STORED, "the change with this seqno is not stored any more")


# --- the description of a scan ------------------------------------------------------------------------------------


def _members(context: Context, request: messages.RangeScanCreate) -> dict[str, Any]:
    if request.datatype != Datatype.JSON or not context.session.understands_json:
        raise RequestRefused(Status.EINVAL, "a scan is described by JSON: negotiate it and send it as such")
    if len(request.value) > REQUEST_BYTES_MAX:
        raise RequestRefused(Status.EINVAL, f"the description of a scan has at most {REQUEST_BYTES_MAX} bytes")
    try:
        members = json.loads(request.value)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(Status.EINVAL, "the description of the scan is not JSON") from error
    if not isinstance(members, dict):
        raise RequestRefused(Status.EINVAL, "the description of the scan is not an object")
    if len(_member(members, "name", _text, default="").encode()) > NAME_BYTES_MAX:
        raise RequestRefused(Status.EINVAL, f"the name of a scan has at most {NAME_BYTES_MAX} bytes")
    return members


def _wanted(members: dict[str, Any]) -> ScanWanted:
    collection = CollectionId(_member(members, "collection", _hexadecimal, default=DEFAULT_COLLECTION))
    keys_only = _member(members, "key_only", _boolean)
    include_xattrs = _member(members, "include_xattrs", _boolean)
    if keys_only and include_xattrs:
        raise RequestRefused(Status.EINVAL, "a scan of keys has no extended attributes")
    bounds, sampling = _object(members, "range"), _object(members, "sampling")
    if bounds is not None and sampling is not None:
        raise RequestRefused(Status.EINVAL, "a scan has a range or a sampling, not both")
    if sampling is not None:
        documents = _member(sampling, "samples", _number, needed=True)
        if not documents:
            raise RequestRefused(Status.EINVAL, "a sample has one document at least")
        sample = Sample(documents=documents, seed=_member(sampling, "seed", _number, default=0))
        return ScanWanted(collection=collection, keys_only=keys_only, include_xattrs=include_xattrs, sample=sample)
    if bounds is None:
        # Recorded from 8.0.2: {} is a scan of the whole default collection.
        return ScanWanted(collection=collection, keys_only=keys_only, include_xattrs=include_xattrs)
    # `low` is inclusive and `high` exclusive. Appending a zero byte gives the next possible key.
    low, excludes_low = _bound(bounds, "start")
    high, excludes_high = _bound(bounds, "end")
    return ScanWanted(
        collection=collection,
        low=low + b"\0" if excludes_low else low,
        high=high if excludes_high else high + b"\0",
        keys_only=keys_only,
        include_xattrs=include_xattrs,
    )


def _bound(bounds: dict[str, Any], name: str) -> tuple[bytes, bool]:
    """A bound, and whether it is exclusive."""
    excluding = f"excl_{name}"
    if (name in bounds) == (excluding in bounds):
        raise RequestRefused(Status.EINVAL, f"a range has either {name!r} or {excluding!r}")
    is_excluded = excluding in bounds
    return _member(bounds, excluding if is_excluded else name, _key, needed=True), is_excluded


def _object(members: dict[str, Any], name: str) -> dict[str, Any] | None:
    found = members.get(name)
    if found is not None and not isinstance(found, dict):
        raise RequestRefused(Status.EINVAL, f"{name!r} is not an object")
    return found


def _member(
    members: dict[str, Any], name: str, read: Callable[[Any], T], *, default: Any = False, needed: bool = False
) -> T:
    if name not in members:
        if needed:
            raise RequestRefused(Status.EINVAL, f"{name!r} is missing")
        return default  # type: ignore[no-any-return]
    try:
        return read(members[name])
    except (TypeError, ValueError) as error:
        raise RequestRefused(Status.EINVAL, f"{name!r} is not valid: {error}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a string is needed")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false is needed")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _U64_MAX:
        raise TypeError("a number of 64 bits is needed")
    return value


def _decimal(value: Any) -> int:
    text = _text(value)
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_U64_MAX))):
        raise ValueError("a string of decimal digits is needed")
    return int(text)


def _hexadecimal(value: Any) -> int:
    text = _text(value)
    if not text or len(text) > 8 or text.strip("0123456789abcdefABCDEF"):
        raise ValueError("a collection id in hexadecimal is needed")
    return int(text, 16)


def _key(value: Any) -> bytes:
    key = base64.b64decode(_text(value), validate=True)
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"a key has at most {KEY_BYTES_MAX} bytes")
    return key


# --- a random key -------------------------------------------------------------------------------------------------


def get_random_key(context: Context, request: GetRandomKey) -> GetResponse:
    """Answer with any document of a collection."""
    service, bucket = context.bucket_service, context.bucket_service.bucket
    wanted = DEFAULT_COLLECTION if request.collection is None else request.collection
    collection = collection_by_id(context, wanted).id
    draw = int.from_bytes(context.service.random_bytes(8))
    found = random_document(bucket, collection, draw=draw, now_s=bucket.environment.now_s())
    context.work_done += found.walked_bytes
    if found.entry is None:
        if found.is_cut_short:
            raise RequestRefused(Status.ETMPFAIL, "no document of the collection was met in time; try again")
        raise RequestRefused(Status.KEY_ENOENT)
    if service.ack_when_durable:
        context.wait_for(bucket.commit_of(found.entry))
    document = bucket.read(found.vbucket, found.entry)
    is_whole = request.include_xattrs and context.session.has(Feature.GET_RANDOM_KEY_INCLUDE_XATTR)
    return context.reply(
        GetResponse,
        cas=document.cas,
        flags=document.flags,
        collection_id=collection if context.session.negotiated.collections else None,
        key=document.key,
        **(whole_value(document) if is_whole else shown_value(context, document)),
    )
