"""Handlers for documents and parts of them: reading, writing, counters, locks, and observing durability.

One function per message, which `kv.session` calls through the table of `handlers`. Each checks whether the request is
allowed, and calls its `Target` (`kv.documents`) to execute it. Those for parts of documents pass the document to the
sub-document engine, and write the result.
"""

from __future__ import annotations

from typing import Any

from headwater.errors import MalformedLeb128
from headwater.node.kv.context import Context
from headwater.node.kv.documents import (
    LOCK_S_DEFAULT,
    LOCK_S_MAX,
    DocumentRequest,
    Target,
    collection_by_id,
    join_value,
    preserves_ttl,
    received_body,
    received_parts,
    refuse_damaged,
    refuse_vbucket,
    shown_value,
    split_value,
    whole_value,
)
from headwater.node.kv.subdocument import execute as engine
from headwater.node.kv.subdocument.requests import SubdocDocument
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import RequestInfo, decode_collection_id, find
from headwater.protocol.messages import documents as messages
from headwater.protocol.messages import subdocument as subdocs
from headwater.protocol.messages import vbuckets as vbucket_messages
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import GetResponse, MetaOptions, SetWithMeta, StoreResponse
from headwater.protocol.messages.subdocument import DocFlags
from headwater.protocol.messages.vbuckets import KeyState, ObservedDocument
from headwater.protocol.numbers import DEFAULT_COLLECTION, Cas, Seqno
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import GivenVersion, Written
from headwater.store.data_format import Document, Entry

_META_WITH_DATATYPE = 2


# --- get ----------------------------------------------------------------------------------------------------------


def get(context: Context, request: messages.Get) -> GetResponse:
    return _get(context, request)


def get_with_key(context: Context, request: messages.Get) -> GetResponse:
    return _get(context, request, collection_id=request.collection_id, key=request.key)


def get_replica(context: Context, request: messages.GetReplica) -> GetResponse:
    return _get(context, request, state=VBucketState.REPLICA)


def _get(
    context: Context, request: messages.Get, *, state: VBucketState = VBucketState.ACTIVE, **fields: Any
) -> GetResponse:
    target = Target.of(context, request, state=state)
    entry = target.live_or_refuse()
    return _shown(target, target.read(entry), target.shown_cas(entry), **fields)


def _shown(target: Target, document: Document, cas: Cas, **fields: Any) -> GetResponse:
    shown = shown_value(target.context, document)
    return target.context.reply(GetResponse, cas=cas, flags=document.flags, **fields, **shown)


def get_ex(context: Context, request: messages.GetEx) -> GetResponse:
    """A document with its extended attributes."""
    # Recorded from 8.0.2: NOT_SUPPORTED without these in HELLO.
    for feature in (Feature.XATTR, Feature.JSON, Feature.SNAPPY_EVERYWHERE):
        if not context.session.has(feature):
            raise RequestRefused(Status.NOT_SUPPORTED, f"it needs {feature.name} in HELLO")
    is_replica = isinstance(request, messages.GetExReplica)
    target = Target.of(context, request, state=VBucketState.REPLICA if is_replica else VBucketState.ACTIVE)
    entry = target.live_or_refuse()
    document = target.read(entry)
    return context.reply(GetResponse, cas=target.shown_cas(entry), flags=document.flags, **whole_value(document))


def get_meta(context: Context, request: messages.GetMeta) -> messages.GetMetaResponse:
    """The metadata of a document or of its tombstone."""
    if request.version is not None and request.version > _META_WITH_DATATYPE:
        raise RequestRefused(Status.EINVAL, f"version {request.version} of the metadata is not known")
    target = Target.of(context, request)
    entry = target.newest()
    if entry is None:
        raise RequestRefused(Status.KEY_ENOENT)
    document = target.read(entry)
    return context.reply(
        messages.GetMetaResponse,
        cas=target.shown_cas(entry),
        deleted=int(document.is_deleted),
        flags=document.flags,
        # A tombstone has the time of its deletion in place of an expiry.
        expiry=document.delete_time if document.is_deleted else document.expiry,
        rev_seqno=document.rev_seqno,
        document_datatype=int(document.stored_datatype) if request.version == _META_WITH_DATATYPE else None,
    )


# --- observe ------------------------------------------------------------------------------------------------------


def observe_seqno(context: Context, request: vbucket_messages.ObserveSeqno) -> vbucket_messages.ObserveSeqnoResponse:
    """The durable seqno of a vbucket, and how far the branch of history that the client knows is part of it."""
    refuse_damaged(context, request.vbucket)
    vbuckets = context.bucket_service.bucket.vbuckets
    facts = vbuckets.facts_of(request.vbucket)
    if facts is None or facts.state == VBucketState.DEAD:
        refuse_vbucket(context)
    durable = vbuckets.durable_seqno(request.vbucket)
    newest_vbuuid = facts.failover_log.newest.vbuuid
    shared = facts.failover_log.branch_end(request.vbuuid, high_seqno=durable)
    if shared is None:
        raise RequestRefused(Status.KEY_ENOENT)
    is_older = request.vbuuid != newest_vbuuid
    return context.reply(
        vbucket_messages.ObserveSeqnoResponse,
        vbucket=request.vbucket,
        vbuuid=newest_vbuuid,
        persisted_seqno=durable,
        current_seqno=durable,
        old_vbuuid=request.vbuuid if is_older else None,
        last_received_seqno=shared if is_older else None,
    )


def observe(context: Context, request: vbucket_messages.Observe) -> vbucket_messages.ObserveResponse:
    """The CAS of some documents, and whether they are durable. Clients also send this to replicas."""
    documents = tuple(_observed(context, asked) for asked in request.keys)
    return context.reply(vbucket_messages.ObserveResponse, documents=documents)


def _observed(context: Context, asked: vbucket_messages.ObservedKey) -> ObservedDocument:
    bucket = context.bucket_service.bucket
    refuse_damaged(context, asked.vbucket)
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
        # kv_engine forgets a deleted document once the deletion is persisted, and clients wait for that.
        return ObservedDocument(vbucket=asked.vbucket, key=asked.key, state=KeyState.NOT_FOUND, cas=Cas(0))
    observed = KeyState.PERSISTED if is_durable else KeyState.NOT_PERSISTED
    observed = KeyState.LOGICALLY_DELETED if entry.is_deleted else observed
    return ObservedDocument(vbucket=asked.vbucket, key=asked.key, state=observed, cas=entry.cas)


# --- set, add, replace, delete ------------------------------------------------------------------------------------


def set_document(context: Context, request: messages.Set) -> StoreResponse:
    """Store a document, whether it exists or not. With a CAS, replace only the version that has it."""
    target, body = Target.to_write(context, request), received_body(context, request.value)
    entry = target.live()
    if entry is not None:
        target.check_cas(entry, request.cas)
    elif request.cas:
        raise RequestRefused(Status.KEY_ENOENT)
    return _store_body(request, target, body, over=entry)


def add(context: Context, request: messages.Set) -> StoreResponse:
    """Store a document if there is none."""
    if request.cas:
        raise RequestRefused(Status.EINVAL, "a document that is to be added has no CAS yet")
    target, body = Target.to_write(context, request), received_body(context, request.value)
    if target.live() is not None:
        raise RequestRefused(Status.KEY_EEXISTS)
    return _store_body(request, target, body, over=None)


def replace(context: Context, request: messages.Set) -> StoreResponse:
    """Store a document if it exists."""
    target, body = Target.to_write(context, request), received_body(context, request.value)
    entry = target.live_or_refuse()
    target.check_cas(entry, request.cas)
    return _store_body(request, target, body, over=entry)


def _store_body(request: messages.Set, target: Target, body: bytes, *, over: Entry | None) -> StoreResponse:
    # A new body keeps all extended attributes, also those of users (as kv_engine's mutation context does).
    xattrs = split_value(target.read(over))[0] if over is not None and over.has_xattrs else b""
    value, datatype = join_value(target.context, xattrs, body)
    if request.datatype & Datatype.SNAPPY and not xattrs:
        value, datatype = request.value, datatype | Datatype.SNAPPY
    keeps_expiry = over is not None and preserves_ttl(target.context)
    expiry = over.expiry if over is not None and keeps_expiry else target.expiry_time(request.expiry)
    return _stored(target, target.store(value=value, datatype=datatype, flags=request.flags, expiry=expiry))


def _stored(target: Target, written: Written) -> StoreResponse:
    return target.context.reply(StoreResponse, cas=written.cas, **target.mutation_token(written))


def delete(context: Context, request: messages.Delete) -> StoreResponse:
    target, entry = _target_of_existing(context, request)
    kept = target.xattrs_to_keep(entry)
    return _stored(target, target.remove(value=kept, datatype=Datatype.XATTR if kept else Datatype.RAW))


def _target_of_existing(context: Context, request: messages.Delete | messages.Touch) -> tuple[Target, Entry]:
    target = Target.to_write(context, request)
    entry = target.live_or_refuse()
    target.check_cas(entry, request.cas)
    return target, entry


# --- append, prepend, touch ---------------------------------------------------------------------------------------


def append(context: Context, request: messages.Append) -> StoreResponse:
    return _extend(context, request, in_front=False)


def prepend(context: Context, request: messages.Prepend) -> StoreResponse:
    return _extend(context, request, in_front=True)


def _extend(context: Context, request: messages.Append, *, in_front: bool) -> StoreResponse:
    """Extend the body of a document. Flags, expiry and extended attributes stay unchanged."""
    target, more = Target.to_write(context, request), received_body(context, request.value)
    entry = target.live()
    if entry is None:
        raise RequestRefused(Status.NOT_STORED)
    target.check_cas(entry, request.cas)
    document = target.read(entry)
    xattrs, body = split_value(document)
    value, datatype = join_value(context, xattrs, more + body if in_front else body + more)
    written = target.store(value=value, datatype=datatype, flags=document.flags, expiry=document.expiry)
    return _stored(target, written)


def touch(context: Context, request: messages.Touch) -> PlainResponse:
    return context.ok(cas=_touch(context, request)[2])


def get_and_touch(context: Context, request: messages.Touch) -> GetResponse:
    return _shown(*_touch(context, request))


def _touch(context: Context, request: messages.Touch) -> tuple[Target, Document, Cas]:
    """Change the expiry of a document. If it has this expiry already, this writes no new version."""
    target, entry = _target_of_existing(context, request)
    document = target.read(entry)
    expiry = target.expiry_time(request.expiry)
    if expiry == document.expiry:
        return target, document, entry.cas
    value, datatype = document.stored_value, document.stored_datatype
    return target, document, target.store(value=value, datatype=datatype, flags=document.flags, expiry=expiry).cas


# --- counters: documents that hold a number of 64 bits as decimal digits ------------------------------------------


_COUNTS = 2**64
_DIGITS_MAX = len(str(_COUNTS - 1))


def increment(context: Context, request: messages.Increment) -> messages.CounterResponse:
    """Increment a counter. It wraps around at 64 bits."""
    return _count(context, request, request.delta)


def decrement(context: Context, request: messages.Decrement) -> messages.CounterResponse:
    """Decrement a counter. It stops at 0."""
    return _count(context, request, -request.delta)


def _count(context: Context, request: messages.Increment, delta: int) -> messages.CounterResponse:
    """Add to a counter, or create it. An existing counter keeps its expiry, whatever the request says."""
    target = Target.to_write(context, request)
    entry = target.live()
    if entry is None:
        if request.expiry == messages.COUNTER_MUST_EXIST or request.cas:
            raise RequestRefused(Status.KEY_ENOENT)
        count, xattrs, flags, expiry = request.initial, b"", 0, target.expiry_time(request.expiry)
    else:
        target.check_cas(entry, request.cas)
        document = target.read(entry)
        xattrs, body = split_value(document)
        if not body.isdigit() or len(body) > _DIGITS_MAX or int(body) >= _COUNTS:
            raise RequestRefused(Status.DELTA_BADVAL, "the document is not a number of 64 bits")
        count, flags, expiry = max(0, int(body) + delta) % _COUNTS, document.flags, document.expiry
    value, datatype = join_value(context, xattrs, b"%d" % count)
    written = target.store(value=value, datatype=datatype, flags=flags, expiry=expiry)
    return context.reply(messages.CounterResponse, cas=written.cas, count=count, **target.mutation_token(written))


# --- locks --------------------------------------------------------------------------------------------------------


def get_locked(context: Context, request: messages.GetLocked) -> GetResponse:
    """Get a document and lock it. The CAS of the answer unlocks it."""
    target = Target.to_write(context, request)
    entry = target.live_or_refuse()
    if target.lock_on(entry) is not None:
        raise _refused(context, Status.LOCKED)
    # A lock time out of bounds is not refused: it means the default.
    asked_s = request.lock_time_s or 0
    lock_s = asked_s if 0 < asked_s <= LOCK_S_MAX else LOCK_S_DEFAULT
    return _shown(target, target.read(entry), target.take_lock(entry, lock_s=lock_s))


def unlock(context: Context, request: messages.Unlock) -> PlainResponse:
    if not request.cas:
        raise RequestRefused(Status.EINVAL, "a document is unlocked with the CAS it was locked with")
    target = Target.of(context, request)
    entry = target.live_or_refuse()
    lock = target.lock_on(entry)
    if lock is None:
        raise _refused(context, Status.NOT_LOCKED)
    if request.cas != lock.cas:
        raise _refused(context, Status.LOCKED)
    target.release(entry)
    return context.ok()


def _refused(context: Context, status: Status) -> RequestRefused:
    """The refusal of a lock request: a temporary failure for clients without extended errors."""
    return RequestRefused(status if context.session.has(Feature.XERROR) else Status.ETMPFAIL)


# --- with metadata ------------------------------------------------------------------------------------------------
#
# Writes with metadata are sent by replication between clusters and by backup tools. The version keeps the CAS and the
# revision that it has elsewhere. If there is another version, conflict resolution decides which of the two is newer, by
# revision or by time according to the bucket's `conflictResolutionType`. The rules are those of kv_engine's
# set_with_meta.md and del_with_meta.md.


_NO_OPTIONS = MetaOptions(0)
_SET_OPTIONS = MetaOptions.FORCE | MetaOptions.REGENERATE_CAS | MetaOptions.SKIP_CONFLICT_RESOLUTION
_DELETE_OPTIONS = _SET_OPTIONS | MetaOptions.IS_EXPIRATION
_UNRESOLVED = MetaOptions.FORCE | MetaOptions.SKIP_CONFLICT_RESOLUTION
_NO_CAS = frozenset({0, 2**64 - 1})
_REV_SEQNO_MAX = 2**48 - 1
"""kv_engine stores revisions in 48 bits."""
_FUTURE_NS_MAX = 65 * 60 * 1_000_000_000
"""How far a CAS may be ahead of the clock; kv_engine's limit. All later writes of the vbucket get a higher CAS."""


def add_with_meta(context: Context, request: SetWithMeta) -> StoreResponse:
    return set_with_meta(context, request, only_new=True)


def set_with_meta(context: Context, request: SetWithMeta, *, only_new: bool = False) -> StoreResponse:
    given = _given(context, request, _SET_OPTIONS)
    target, entry = _meta_target(context, request)
    if only_new and entry is not None and not entry.is_deleted:
        raise RequestRefused(Status.KEY_EEXISTS)
    _resolve(request, target, entry, is_removal=False)
    value, datatype = join_value(context, *received_parts(context, request.value))
    # Unlike in a plain set, the expiry is always absolute: it must not depend on when the write arrives here.
    expiry = target.expiry_time(request.expiry, is_time=True)
    written = target.store(value=value, datatype=datatype, flags=request.flags, expiry=expiry, given=given)
    return _stored(target, written)


def delete_with_meta(context: Context, request: SetWithMeta) -> StoreResponse:
    """Store a tombstone, even if there is no document: it may have been created and deleted elsewhere."""
    given = _given(context, request, _DELETE_OPTIONS)
    target, entry = _meta_target(context, request)
    _resolve(request, target, entry, is_removal=True)
    xattrs, body = received_parts(context, request.value)
    if body:
        raise RequestRefused(Status.EINVAL, "a deleted document has extended attributes at most, and no body")
    written = target.remove(
        value=xattrs,
        datatype=Datatype.XATTR if xattrs else Datatype.RAW,
        expired=bool(_options(request) & MetaOptions.IS_EXPIRATION),
        delete_time=request.expiry or None,
        given=given,
    )
    return _stored(target, written)


def _options(request: SetWithMeta) -> MetaOptions:
    return request.options or _NO_OPTIONS


def _given(context: Context, request: SetWithMeta, known: MetaOptions) -> GivenVersion:
    """The CAS and revision of the version. Refuses a request that is invalid whatever is stored."""
    options = _options(request)
    if find(request.frame_infos, RequestInfo.DURABILITY) is not None:
        raise RequestRefused(Status.EINVAL, "a version with metadata of another cluster can't be a durable write")
    # set_with_meta.md: a client sets FORCE_ACCEPT to confirm that it expects resolution by time.
    if _is_by_time(context) != bool(options & MetaOptions.FORCE_ACCEPT):
        raise RequestRefused(
            Status.EINVAL, "FORCE_ACCEPT is for buckets in which the last write wins, and needed there"
        )
    if int(options) & ~int(known | MetaOptions.FORCE_ACCEPT):
        raise RequestRefused(Status.EINVAL, f"these options are not known, or not for this command: 0x{options:x}")
    is_regenerated = bool(options & MetaOptions.REGENERATE_CAS)
    if is_regenerated and not options & _UNRESOLVED:
        raise RequestRefused(Status.EINVAL, "REGENERATE_CAS needs SKIP_CONFLICT_RESOLUTION")
    if request.rev_seqno > _REV_SEQNO_MAX:
        raise RequestRefused(Status.EINVAL, f"a revision is {_REV_SEQNO_MAX} at most")
    if not is_regenerated:
        if request.meta_cas in _NO_CAS:
            raise RequestRefused(Status.KEY_EEXISTS, "no version can have this CAS")
        if request.meta_cas > context.service.now_ns() + _FUTURE_NS_MAX:
            raise RequestRefused(
                Status.CAS_VALUE_INVALID,
                f"the CAS is more than {_FUTURE_NS_MAX // 60_000_000_000} minutes ahead of this node's clock",
            )
    return GivenVersion(cas=None if is_regenerated else Cas(request.meta_cas), rev_seqno=max(1, request.rev_seqno))


def _is_by_time(context: Context) -> bool:
    return context.bucket_service.settings.conflict_resolution == "lww"


def _meta_target(context: Context, request: SetWithMeta) -> tuple[Target, Entry | None]:
    """Return the target and its newest version. Refuses if the CAS of the header does not match.

    In Couchbase FORCE also writes to replicas and pending vbuckets. These have the history of their active copy, from
    which such a write would diverge, so it gets NOT_MY_VBUCKET here like any other.
    """
    target = Target.to_write(context, request)
    entry = target.newest()
    if entry is not None and not entry.is_deleted:
        target.check_cas(entry, request.cas)
    elif request.cas:
        raise RequestRefused(Status.KEY_ENOENT)
    return target, entry


def _resolve(request: SetWithMeta, target: Target, entry: Entry | None, *, is_removal: bool) -> None:
    """Refuse a version that is not newer than the stored one."""
    if entry is None or _options(request) & _UNRESOLVED:
        return
    theirs = (max(1, request.rev_seqno), int(request.meta_cas))
    ours = (entry.rev_seqno, int(entry.cas))
    if _is_by_time(target.context):
        theirs, ours = theirs[::-1], ours[::-1]
    if theirs == ours and not is_removal:
        document = target.read(entry)
        expiry = document.delete_time if document.is_deleted else document.expiry
        wins = (request.expiry, -request.flags) > (expiry, -document.flags)
    else:
        wins = theirs > ours
    if not wins:
        raise RequestRefused(Status.KEY_EEXISTS, "the version that is there is the newer one")


# --- parts of documents, by the sub-document engine -------------------------------------------------------------------


_NO_FLAGS = DocFlags(0)
_NANOSECONDS = 10**9

# --- look-ups -----------------------------------------------------------------------------------------------------


def look_up_one(context: Context, request: subdocs.SubdocGet) -> subdocs.SubdocResponse:
    if request.new_value or request.expiry is not None:
        raise RequestRefused(Status.EINVAL, "a look-up has neither a value nor an expiry")
    spec = subdocs.LookupSpec(opcode=Opcode(request.opcode), flags=request.flags, path=request.path)
    doc_flags = request.doc_flags or _NO_FLAGS
    document = _document_to_read(context, request, doc_flags)
    outcome = context.work(engine.lookup_one, document, spec, doc_flags, cost=_cost(document, 1))
    assert document is not None, "without a document there is nothing to look up"
    return context.reply(subdocs.SubdocResponse, status=outcome.status, cas=document.cas, value=outcome.value)


def look_up(context: Context, request: subdocs.MultiLookup) -> subdocs.MultiLookupResponse:
    doc_flags = request.doc_flags or _NO_FLAGS
    document = _document_to_read(context, request, doc_flags)
    cost = _cost(document, len(request.specs))
    outcome = context.work(engine.lookup_in, document, request.specs, doc_flags, cost=cost)
    assert document is not None, "without a document there is nothing to look up"
    return context.reply(subdocs.MultiLookupResponse, status=outcome.status, cas=document.cas, results=outcome.results)


def _document_to_read(context: Context, request: DocumentRequest, doc_flags: DocFlags) -> SubdocDocument | None:
    _check_datatype(context)
    state = VBucketState.REPLICA if doc_flags & DocFlags.REPLICA_READ else VBucketState.ACTIVE
    target = Target.of(context, request, state=state)
    entry = target.newest()
    return None if entry is None else _for_engine(target, entry)


# --- mutations ----------------------------------------------------------------------------------------------------


def mutate_one(context: Context, request: subdocs.SubdocGet) -> subdocs.SubdocResponse:
    spec = subdocs.MutationSpec(
        opcode=Opcode(request.opcode), flags=request.flags, path=request.path, value=request.new_value
    )
    doc_flags = request.doc_flags or _NO_FLAGS
    target, document = _target_to_write(context, request, doc_flags)
    cost = _cost(document, 1) + len(request.new_value)
    outcome = context.work(engine.mutate_one, document, spec, doc_flags, cost=cost)
    written = _write(request, target, outcome, over=document)
    return context.reply(
        subdocs.SubdocResponse,
        status=outcome.status,
        cas=written.cas,
        value=outcome.results[0].value if outcome.results else b"",
        **target.mutation_token(written),
    )


def mutate(context: Context, request: subdocs.MultiMutation) -> subdocs.MultiMutationResponse:
    doc_flags = request.doc_flags or _NO_FLAGS
    target, document = _target_to_write(context, request, doc_flags)
    cost = _cost(document, len(request.specs)) + sum(len(spec.value) for spec in request.specs)
    outcome = context.work(engine.mutate_in, document, request.specs, doc_flags, cost=cost)
    if isinstance(outcome, engine.PathFailed):
        return context.reply(subdocs.MultiMutationResponse, status=outcome.status, results=outcome.results)
    written = _write(request, target, outcome, over=document)
    return context.reply(
        subdocs.MultiMutationResponse,
        status=outcome.status,
        cas=written.cas,
        results=outcome.results,
        **target.mutation_token(written),
    )


def _target_to_write(
    context: Context, request: subdocs.SubdocGet | subdocs.MultiMutation, doc_flags: DocFlags
) -> tuple[Target, SubdocDocument | None]:
    """The target, and its newest version, which the CAS of the request allows to replace."""
    _check_datatype(context)
    if doc_flags & DocFlags.ADD and request.cas:
        raise RequestRefused(Status.EINVAL, "a document that is to be added has no CAS yet")
    target = Target.to_write(context, request)
    entry = target.newest()
    if entry is not None and (not entry.is_deleted or doc_flags & DocFlags.ACCESS_DELETED):
        if not doc_flags & DocFlags.ADD:
            target.check_cas(entry, request.cas)
    elif request.cas:
        raise RequestRefused(Status.KEY_ENOENT)
    return target, None if entry is None else _for_engine(target, entry)


def _write(
    request: subdocs.SubdocGet | subdocs.MultiMutation, target: Target, outcome: engine.Mutated, *,
    over: SubdocDocument | None,
) -> Written:  # fmt: skip
    def value(cas: Cas, seqno: Seqno) -> bytes:
        return outcome.value.fill(cas=cas, seqno=seqno)

    if outcome.deleted:
        return target.remove(value=value, datatype=outcome.value.datatype)
    # A new document inherits no flags and no expiry from the tombstone that it replaces.
    lasting = None if over is None or over.deleted else over
    user_flags = request.user_flags if isinstance(request, subdocs.MultiMutation) else None
    if user_flags is None:
        user_flags = lasting.flags if lasting else 0
    keeps_expiry = lasting is not None and preserves_ttl(target.context)
    expiry = lasting.expiry if lasting and keeps_expiry else target.expiry_time(request.expiry or 0)
    return target.store(value=value, datatype=outcome.value.datatype, flags=user_flags, expiry=expiry)


# --- both ---------------------------------------------------------------------------------------------------------


def _check_datatype(context: Context) -> None:
    if context.request.datatype not in (Datatype.RAW, Datatype.JSON):
        raise RequestRefused(
            Status.EINVAL, "the value of a sub-document command is neither compressed nor has it attributes"
        )


def _cost(document: SubdocDocument | None, paths: int) -> int:
    """The bytes to scan: the text is checked once, and scanned for each path."""
    return 0 if document is None else len(document.value) * (1 + paths)


def _for_engine(target: Target, entry: Entry) -> SubdocDocument:
    document, bucket = target.read(entry), target.bucket
    facts = bucket.vbuckets.facts[target.vbucket]
    assert facts is not None, "only documents of vbuckets that exist are read"
    clock_ns = max(bucket.environment.now_ns(), int(bucket.vbuckets.max_cas[target.vbucket]))
    return SubdocDocument(
        value=document.value,
        datatype=document.stored_datatype,
        cas=target.shown_cas(entry),
        seqno=document.seqno,
        vbuuid=facts.failover_log.newest.vbuuid,
        rev=document.rev_seqno,
        flags=document.flags,
        expiry=document.expiry,
        deleted=document.is_deleted,
        hlc_now_s=clock_ns // _NANOSECONDS,
    )
