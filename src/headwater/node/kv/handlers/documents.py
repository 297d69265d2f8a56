"""Handlers of whole documents: reading, writing, counters and locks; and how far a vbucket is durable.

One function a message, called by `kv.session` through the table of `handlers`. Each decides whether the request may be
done and says so to `kv.documents`, which does it.
"""

from __future__ import annotations

from headwater.errors import MalformedLeb128
from headwater.node.kv.context import Context
from headwater.node.kv.documents import (
    LOCK_S_DEFAULT,
    LOCK_S_MAX,
    Target,
    check_cas,
    collection_by_id,
    expiry_time,
    join_value,
    live,
    live_or_refuse,
    lock_on,
    mutation_token,
    newest,
    preserves_ttl,
    received_body,
    refuse_damaged,
    refuse_vbucket,
    release,
    remove,
    shown_cas,
    shown_value,
    split_value,
    store,
    take_lock,
    target_of,
    target_to_write,
    whole_value,
    xattrs_to_keep,
)
from headwater.node.service import RequestRefused
from headwater.protocol.features import Feature
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import (
    COUNTER_MUST_EXIST,
    Append,
    CounterResponse,
    Decrement,
    Delete,
    Get,
    GetEx,
    GetExReplica,
    GetLocked,
    GetMeta,
    GetMetaResponse,
    GetReplica,
    GetResponse,
    Increment,
    Prepend,
    Set,
    StoreResponse,
    Touch,
    Unlock,
)
from headwater.protocol.messages.vbuckets import (
    KeyState,
    Observe,
    ObservedDocument,
    ObservedKey,
    ObserveResponse,
    ObserveSeqno,
    ObserveSeqnoResponse,
)
from headwater.protocol.numbers import DEFAULT_COLLECTION, Cas, Seqno, decode_collection_id
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Written
from headwater.store.data_format import Document, Entry

_META_WITH_DATATYPE = 2


def get(context: Context, request: Get) -> GetResponse:
    return _get(context, request)


def get_with_key(context: Context, request: Get) -> GetResponse:
    return _get(context, request, with_key=True)


def get_replica(context: Context, request: GetReplica) -> GetResponse:
    return _get(context, request, state=VBucketState.REPLICA)


def get_ex(context: Context, request: GetEx) -> GetResponse:
    """A document with its extended attributes."""
    # Recorded of 8.0.2: without these in HELLO it is NOT_SUPPORTED.
    for feature in (Feature.XATTR, Feature.JSON, Feature.SNAPPY_EVERYWHERE):
        if not context.session.has(feature):
            raise RequestRefused(Status.NOT_SUPPORTED, f"it needs {feature.name} in HELLO")
    is_replica = isinstance(request, GetExReplica)
    target = target_of(context, request, state=VBucketState.REPLICA if is_replica else VBucketState.ACTIVE)
    entry = live_or_refuse(context, target)
    document = target.read(entry)
    return context.reply(GetResponse, cas=shown_cas(target, entry), flags=document.flags, **whole_value(document))


def _get(
    context: Context, request: Get, *, state: VBucketState = VBucketState.ACTIVE, with_key: bool = False
) -> GetResponse:
    target = target_of(context, request, state=state)
    entry = live_or_refuse(context, target)
    document = target.read(entry)
    return context.reply(
        GetResponse,
        cas=shown_cas(target, entry),
        flags=document.flags,
        collection_id=request.collection_id if with_key else None,
        key=request.key if with_key else b"",
        **shown_value(context, document),
    )


def get_meta(context: Context, request: GetMeta) -> GetMetaResponse:
    """The metadata of a document or of its tombstone."""
    if request.version is not None and request.version > _META_WITH_DATATYPE:
        raise RequestRefused(Status.EINVAL, f"version {request.version} of the metadata is not known")
    target = target_of(context, request)
    entry = newest(context, target)
    if entry is None:
        raise RequestRefused(Status.KEY_ENOENT)
    document = target.read(entry)
    return context.reply(
        GetMetaResponse,
        cas=shown_cas(target, entry),
        deleted=int(document.is_deleted),
        flags=document.flags,
        # A tombstone has the time of its deletion where a document has its expiry.
        expiry=document.delete_time if document.is_deleted else document.expiry,
        rev_seqno=document.rev_seqno,
        document_datatype=int(document.stored_datatype) if request.version == _META_WITH_DATATYPE else None,
    )


def observe_seqno(context: Context, request: ObserveSeqno) -> ObserveSeqnoResponse:
    """How far the vbucket is durable, on the branch of history that the client knows."""
    refuse_damaged(context.bucket_service, request.vbucket)
    vbuckets = context.bucket_service.bucket.vbuckets
    facts = vbuckets.facts[request.vbucket] if vbuckets.exists(request.vbucket) else None
    if facts is None or facts.state == VBucketState.DEAD:
        refuse_vbucket(context)
    durable = Seqno(int(vbuckets.durable_seqnos[request.vbucket]))
    newest_vbuuid = facts.failover_log.newest.vbuuid
    shared = facts.failover_log.branch_end(request.vbuuid, high_seqno=durable)
    if shared is None:
        raise RequestRefused(Status.KEY_ENOENT)
    is_older = request.vbuuid != newest_vbuuid
    return context.reply(
        ObserveSeqnoResponse,
        vbucket=request.vbucket,
        vbuuid=newest_vbuuid,
        persisted_seqno=durable,
        current_seqno=durable,
        old_vbuuid=request.vbuuid if is_older else None,
        last_received_seqno=shared if is_older else None,
    )


def observe(context: Context, request: Observe) -> ObserveResponse:
    """Which versions of some documents there are, and whether they are durable. Replicas are asked, too."""
    return context.reply(ObserveResponse, documents=tuple(_observed(context, asked) for asked in request.keys))


def _observed(context: Context, asked: ObservedKey) -> ObservedDocument:
    bucket = context.bucket_service.bucket
    refuse_damaged(context.bucket_service, asked.vbucket)
    state = bucket.vbuckets.state(asked.vbucket)
    if state is None or state == VBucketState.DEAD:
        refuse_vbucket(context)
    collection, key = DEFAULT_COLLECTION, asked.key
    if context.session.negotiated.collections:
        try:
            collection, at = decode_collection_id(asked.key)
        except MalformedLeb128 as error:
            raise RequestRefused(Status.EINVAL, error.reason) from error
        key = asked.key[at:]
    entry = bucket.find(asked.vbucket, collection_by_id(context, collection).id, key)
    is_durable = entry is not None and bucket.commit_of(entry) <= bucket.durable_commit
    if entry is None or (entry.is_deleted and is_durable):
        # kv_engine forgets a deleted document once that is persisted, and clients wait for it to be gone.
        return ObservedDocument(vbucket=asked.vbucket, key=asked.key, state=KeyState.NOT_FOUND, cas=Cas(0))
    observed = KeyState.PERSISTED if is_durable else KeyState.NOT_PERSISTED
    return ObservedDocument(
        vbucket=asked.vbucket,
        key=asked.key,
        state=KeyState.LOGICALLY_DELETED if entry.is_deleted else observed,
        cas=entry.cas,
    )


# --- set, add, replace --------------------------------------------------------------------------------------------


def set_document(context: Context, request: Set) -> StoreResponse:
    """Store a document, whether there is one or not; with a CAS, only over the version that has it."""
    target, body = target_to_write(context, request), received_body(context, request.value)
    entry = live(context, target)
    if entry is not None:
        check_cas(target, entry, request.cas)
    elif request.cas:
        raise RequestRefused(Status.KEY_ENOENT)
    return _store_body(context, request, target, body, over=entry)


def add(context: Context, request: Set) -> StoreResponse:
    """Store a document where there is none."""
    if request.cas:
        raise RequestRefused(Status.EINVAL, "a document that is to be added has no CAS yet")
    target, body = target_to_write(context, request), received_body(context, request.value)
    if live(context, target) is not None:
        raise RequestRefused(Status.KEY_EEXISTS)
    return _store_body(context, request, target, body, over=None)


def replace(context: Context, request: Set) -> StoreResponse:
    """Store a document where there is one."""
    target, body = target_to_write(context, request), received_body(context, request.value)
    entry = live_or_refuse(context, target)
    check_cas(target, entry, request.cas)
    return _store_body(context, request, target, body, over=entry)


def _store_body(context: Context, request: Set, target: Target, body: bytes, *, over: Entry | None) -> StoreResponse:
    # A new body leaves the extended attributes alone, those of users too (kv_engine's mutation context has it so).
    xattrs = split_value(target.read(over))[0] if over is not None and over.has_xattrs else b""
    value, datatype = join_value(xattrs, body)
    if request.datatype & Datatype.SNAPPY and not xattrs:
        value, datatype = request.value, datatype | Datatype.SNAPPY
    expiry = over.expiry if over is not None and preserves_ttl(request) else _expiry(target, request.expiry)
    written = store(context, target, value=value, datatype=datatype, flags=request.flags, expiry=expiry)
    return _stored(context, target, written)


def _expiry(target: Target, asked: int) -> int:
    return expiry_time(asked, now_s=target.bucket.environment.now_s(), max_ttl_s=target.max_ttl_s)


def _stored(context: Context, target: Target, written: Written) -> StoreResponse:
    return context.reply(StoreResponse, cas=written.cas, **mutation_token(context, target, written))


# --- delete -------------------------------------------------------------------------------------------------------


def delete(context: Context, request: Delete) -> StoreResponse:
    target = target_to_write(context, request)
    entry = live_or_refuse(context, target)
    check_cas(target, entry, request.cas)
    kept = xattrs_to_keep(target, entry)
    written = remove(context, target, value=kept, datatype=Datatype.XATTR if kept else Datatype.RAW)
    return _stored(context, target, written)


# --- append and prepend -------------------------------------------------------------------------------------------


def append(context: Context, request: Append) -> StoreResponse:
    return _extend(context, request, in_front=False)


def prepend(context: Context, request: Prepend) -> StoreResponse:
    return _extend(context, request, in_front=True)


def _extend(context: Context, request: Append, *, in_front: bool) -> StoreResponse:
    """Flags, expiry and extended attributes stay as they are."""
    target, more = target_to_write(context, request), received_body(context, request.value)
    entry = live(context, target)
    if entry is None:
        raise RequestRefused(Status.NOT_STORED)
    check_cas(target, entry, request.cas)
    document = target.read(entry)
    xattrs, body = split_value(document)
    value, datatype = join_value(xattrs, more + body if in_front else body + more)
    written = store(context, target, value=value, datatype=datatype, flags=document.flags, expiry=document.expiry)
    return _stored(context, target, written)


# --- touch --------------------------------------------------------------------------------------------------------


def touch(context: Context, request: Touch) -> PlainResponse:
    _, cas = _touch(context, request)
    return context.ok(cas=cas)


def get_and_touch(context: Context, request: Touch) -> GetResponse:
    document, cas = _touch(context, request)
    return context.reply(
        GetResponse,
        cas=cas,
        flags=document.flags,
        **shown_value(context, document),
    )


def _touch(context: Context, request: Touch) -> tuple[Document, Cas]:
    """Give a document another expiry. One that has it already stays the version it is."""
    target = target_to_write(context, request)
    entry = live_or_refuse(context, target)
    check_cas(target, entry, request.cas)
    document = target.read(entry)
    expiry = _expiry(target, request.expiry)
    if expiry == document.expiry:
        return document, entry.cas
    written = store(
        context, target, value=document.stored_value, datatype=document.stored_datatype, flags=document.flags,
        expiry=expiry,
    )  # fmt: skip
    return document, written.cas


# --- counters: documents that hold a number of 64 bits as decimal digits ------------------------------------------


_COUNTS = 2**64
_DIGITS_MAX = len(str(_COUNTS - 1))


def increment(context: Context, request: Increment) -> CounterResponse:
    """Beyond 64 bits it starts again from 0."""
    return _count(context, request, request.delta)


def decrement(context: Context, request: Decrement) -> CounterResponse:
    """It stops at 0."""
    return _count(context, request, -request.delta)


def _count(context: Context, request: Increment, delta: int) -> CounterResponse:
    target = target_to_write(context, request)
    entry = live(context, target)
    if entry is None:
        count, written = _begin(context, request, target)
    else:
        check_cas(target, entry, request.cas)
        count, written = _go_on(context, target, entry, delta)
    return context.reply(CounterResponse, cas=written.cas, count=count, **mutation_token(context, target, written))


def _begin(context: Context, request: Increment, target: Target) -> tuple[int, Written]:
    if request.expiry == COUNTER_MUST_EXIST or request.cas:
        raise RequestRefused(Status.KEY_ENOENT)
    value, datatype = join_value(b"", b"%d" % request.initial)
    now_s = target.bucket.environment.now_s()
    expiry = expiry_time(request.expiry, now_s=now_s, max_ttl_s=target.max_ttl_s)
    return request.initial, store(context, target, value=value, datatype=datatype, flags=0, expiry=expiry)


def _go_on(context: Context, target: Target, entry: Entry, delta: int) -> tuple[int, Written]:
    """The expiry of a counter that exists stays, whatever the request says."""
    document = target.read(entry)
    xattrs, body = split_value(document)
    count = max(0, _number(body) + delta) % _COUNTS
    value, datatype = join_value(xattrs, b"%d" % count)
    return count, store(context, target, value=value, datatype=datatype, flags=document.flags, expiry=document.expiry)


def _number(body: bytes) -> int:
    if not body.isdigit() or len(body) > _DIGITS_MAX or int(body) >= _COUNTS:
        raise RequestRefused(Status.DELTA_BADVAL, "the document is not a number of 64 bits")
    return int(body)


# --- locks --------------------------------------------------------------------------------------------------------


def get_locked(context: Context, request: GetLocked) -> GetResponse:
    """Get a document and lock it. The CAS of the answer opens the lock."""
    target = target_to_write(context, request)
    entry = live_or_refuse(context, target)
    if lock_on(target, entry) is not None:
        raise _refused(context, Status.LOCKED)
    document = target.read(entry)
    # A time that is out of bounds is not refused: it means the default.
    asked_s = request.lock_time_s or 0
    lock_s = asked_s if 0 < asked_s <= LOCK_S_MAX else LOCK_S_DEFAULT
    return context.reply(
        GetResponse,
        cas=take_lock(target, entry, lock_s=lock_s),
        flags=document.flags,
        **shown_value(context, document),
    )


def unlock(context: Context, request: Unlock) -> PlainResponse:
    if not request.cas:
        raise RequestRefused(Status.EINVAL, "a document is unlocked with the CAS it was locked with")
    target = target_of(context, request)
    entry = live_or_refuse(context, target)
    lock = lock_on(target, entry)
    if lock is None:
        raise _refused(context, Status.NOT_LOCKED)
    if request.cas != lock.cas:
        raise _refused(context, Status.LOCKED)
    release(target, entry)
    return context.ok()


def _refused(context: Context, status: Status) -> RequestRefused:
    """To a client without extended errors, a lock that is in the way of another one is a passing failure."""
    return RequestRefused(status if context.session.has(Feature.XERROR) else Status.ETMPFAIL)
