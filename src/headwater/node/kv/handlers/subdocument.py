"""Handlers for parts of documents: they bring the document to the sub-document engine and write what comes out."""

from __future__ import annotations

from functools import partial

from headwater.node.kv import subdocument as engine
from headwater.node.kv.context import Context
from headwater.node.kv.documents import (
    DocumentRequest,
    Target,
    check_cas,
    expiry_time,
    mutation_token,
    newest,
    preserves_ttl,
    remove,
    shown_cas,
    store,
    target_of,
    target_to_write,
)
from headwater.node.service import RequestRefused
from headwater.protocol.features import Opcode
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.subdocument import (
    DocFlags,
    LookupSpec,
    MultiLookup,
    MultiLookupResponse,
    MultiMutation,
    MultiMutationResponse,
    MutationSpec,
    SubdocGet,
    SubdocResponse,
)
from headwater.protocol.numbers import Cas, Seqno
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Written
from headwater.store.data_format import Entry

_NO_FLAGS = DocFlags(0)
_NANOSECONDS = 10**9

# --- look-ups -----------------------------------------------------------------------------------------------------


def look_up_one(context: Context, request: SubdocGet) -> SubdocResponse:
    if request.new_value or request.expiry is not None:
        raise RequestRefused(Status.EINVAL, "a look-up has neither a value nor an expiry")
    spec = LookupSpec(opcode=Opcode(request.opcode), flags=request.flags, path=request.path)
    doc_flags = request.doc_flags or _NO_FLAGS
    document = _document_to_read(context, request, doc_flags)
    outcome = engine.lookup_one(document, spec, doc_flags)
    if isinstance(outcome, engine.SubdocRefused):
        raise RequestRefused(outcome.status, outcome.reason)
    assert document is not None, "without a document there is nothing to look up"
    return context.reply(SubdocResponse, status=outcome.status, cas=document.cas, value=outcome.value)


def look_up(context: Context, request: MultiLookup) -> MultiLookupResponse:
    doc_flags = request.doc_flags or _NO_FLAGS
    document = _document_to_read(context, request, doc_flags)
    outcome = engine.lookup_in(document, request.specs, doc_flags)
    if isinstance(outcome, engine.SubdocRefused):
        raise RequestRefused(outcome.status, outcome.reason)
    assert document is not None, "without a document there is nothing to look up"
    return context.reply(MultiLookupResponse, status=outcome.status, cas=document.cas, results=outcome.results)


def _document_to_read(context: Context, request: DocumentRequest, doc_flags: DocFlags) -> engine.SubdocDocument | None:
    _check_datatype(context)
    state = VBucketState.REPLICA if doc_flags & DocFlags.REPLICA_READ else VBucketState.ACTIVE
    target = target_of(context, request, state=state)
    entry = newest(context, target)
    return None if entry is None else _for_engine(target, entry)


# --- mutations ----------------------------------------------------------------------------------------------------


def mutate_one(context: Context, request: SubdocGet) -> SubdocResponse:
    spec = MutationSpec(opcode=Opcode(request.opcode), flags=request.flags, path=request.path, value=request.new_value)
    doc_flags = request.doc_flags or _NO_FLAGS
    target, entry = _target_to_write(context, request, doc_flags)
    document = None if entry is None else _for_engine(target, entry)
    outcome = engine.mutate_one(document, spec, doc_flags)
    if isinstance(outcome, engine.SubdocRefused):
        raise RequestRefused(outcome.status, outcome.reason)
    written = _write(context, request, target, outcome, over=document)
    return context.reply(
        SubdocResponse,
        status=outcome.status,
        cas=written.cas,
        value=outcome.results[0].value if outcome.results else b"",
        **mutation_token(context, target, written),
    )


def mutate(context: Context, request: MultiMutation) -> MultiMutationResponse:
    doc_flags = request.doc_flags or _NO_FLAGS
    target, entry = _target_to_write(context, request, doc_flags)
    document = None if entry is None else _for_engine(target, entry)
    outcome = engine.mutate_in(document, request.specs, doc_flags)
    if isinstance(outcome, engine.SubdocRefused):
        raise RequestRefused(outcome.status, outcome.reason)
    if isinstance(outcome, engine.PathFailed):
        return context.reply(MultiMutationResponse, status=outcome.status, results=outcome.results)
    written = _write(context, request, target, outcome, over=document)
    return context.reply(
        MultiMutationResponse,
        status=outcome.status,
        cas=written.cas,
        results=outcome.results,
        **mutation_token(context, target, written),
    )


def _target_to_write(
    context: Context, request: SubdocGet | MultiMutation, doc_flags: DocFlags
) -> tuple[Target, Entry | None]:
    """Where to write, and the newest version there, which the request's CAS allows to replace."""
    _check_datatype(context)
    if doc_flags & DocFlags.ADD and request.cas:
        raise RequestRefused(Status.EINVAL, "a document that is to be added has no CAS yet")
    target = target_to_write(context, request)
    entry = newest(context, target)
    if entry is not None and (not entry.is_deleted or doc_flags & DocFlags.ACCESS_DELETED):
        if not doc_flags & DocFlags.ADD:
            check_cas(target, entry, request.cas)
    elif request.cas:
        raise RequestRefused(Status.KEY_ENOENT)
    return target, entry


def _write(
    context: Context,
    request: SubdocGet | MultiMutation,
    target: Target,
    outcome: engine.Mutated,
    *,
    over: engine.SubdocDocument | None,
) -> Written:
    value = partial(_filled, outcome.value)
    if outcome.deleted:
        return remove(context, target, value=value, datatype=outcome.value.datatype)
    # What is left of a document that was deleted has no say in the one that takes its place.
    lasting = None if over is None or over.deleted else over
    now_s = target.bucket.environment.now_s()
    expiry = expiry_time(request.expiry or 0, now_s=now_s, max_ttl_s=target.max_ttl_s)
    user_flags = request.user_flags if isinstance(request, MultiMutation) else None
    if user_flags is None:
        user_flags = lasting.flags if lasting else 0
    return store(
        context,
        target,
        value=value,
        datatype=outcome.value.datatype,
        flags=user_flags,
        expiry=lasting.expiry if lasting and preserves_ttl(request) else expiry,
    )


def _filled(value: engine.NewValue, cas: Cas, seqno: Seqno) -> bytes:
    return value.fill(cas=cas, seqno=seqno)


# --- both ---------------------------------------------------------------------------------------------------------


def _check_datatype(context: Context) -> None:
    if context.request.datatype not in (Datatype.RAW, Datatype.JSON):
        raise RequestRefused(
            Status.EINVAL, "the value of a sub-document command is neither compressed nor has it attributes"
        )


def _for_engine(target: Target, entry: Entry) -> engine.SubdocDocument:
    document, bucket = target.read(entry), target.bucket
    facts = bucket.vbuckets.facts[target.vbucket]
    assert facts is not None, "only documents of vbuckets that exist are read"
    clock_ns = max(bucket.environment.now_ns(), int(bucket.vbuckets.max_cas[target.vbucket]))
    return engine.SubdocDocument(
        value=document.value,
        datatype=document.stored_datatype,
        cas=shown_cas(target, entry),
        seqno=document.seqno,
        vbuuid=facts.failover_log.newest.vbuuid,
        rev=document.rev_seqno,
        flags=document.flags,
        expiry=document.expiry,
        deleted=document.is_deleted,
        hlc_now_s=clock_ns // _NANOSECONDS,
    )
