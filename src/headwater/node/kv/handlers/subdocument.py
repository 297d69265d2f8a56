"""Handlers for parts of documents: they bring the document to the sub-document engine and write what comes out."""

from __future__ import annotations

from headwater.node.kv.context import Context
from headwater.node.kv.documents import DocumentRequest, Target, preserves_ttl
from headwater.node.kv.subdocument import execute as engine
from headwater.node.kv.subdocument.virtual_xattrs import SubdocDocument
from headwater.protocol.features import Opcode
from headwater.protocol.messages import subdocument as messages
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.subdocument import DocFlags
from headwater.protocol.numbers import Cas, Seqno
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Written
from headwater.store.data_format import Entry

_NO_FLAGS = DocFlags(0)
_NANOSECONDS = 10**9

# --- look-ups -----------------------------------------------------------------------------------------------------


def look_up_one(context: Context, request: messages.SubdocGet) -> messages.SubdocResponse:
    if request.new_value or request.expiry is not None:
        raise RequestRefused(Status.EINVAL, "a look-up has neither a value nor an expiry")
    spec = messages.LookupSpec(opcode=Opcode(request.opcode), flags=request.flags, path=request.path)
    doc_flags = request.doc_flags or _NO_FLAGS
    document = _document_to_read(context, request, doc_flags)
    outcome = context.work(engine.lookup_one, document, spec, doc_flags, cost=_cost(document, 1))
    assert document is not None, "without a document there is nothing to look up"
    return context.reply(messages.SubdocResponse, status=outcome.status, cas=document.cas, value=outcome.value)


def look_up(context: Context, request: messages.MultiLookup) -> messages.MultiLookupResponse:
    doc_flags = request.doc_flags or _NO_FLAGS
    document = _document_to_read(context, request, doc_flags)
    cost = _cost(document, len(request.specs))
    outcome = context.work(engine.lookup_in, document, request.specs, doc_flags, cost=cost)
    assert document is not None, "without a document there is nothing to look up"
    return context.reply(messages.MultiLookupResponse, status=outcome.status, cas=document.cas, results=outcome.results)


def _document_to_read(context: Context, request: DocumentRequest, doc_flags: DocFlags) -> SubdocDocument | None:
    _check_datatype(context)
    state = VBucketState.REPLICA if doc_flags & DocFlags.REPLICA_READ else VBucketState.ACTIVE
    target = Target.of(context, request, state=state)
    entry = target.newest()
    return None if entry is None else _for_engine(target, entry)


# --- mutations ----------------------------------------------------------------------------------------------------


def mutate_one(context: Context, request: messages.SubdocGet) -> messages.SubdocResponse:
    spec = messages.MutationSpec(
        opcode=Opcode(request.opcode), flags=request.flags, path=request.path, value=request.new_value
    )
    doc_flags = request.doc_flags or _NO_FLAGS
    target, document = _target_to_write(context, request, doc_flags)
    cost = _cost(document, 1) + len(request.new_value)
    outcome = context.work(engine.mutate_one, document, spec, doc_flags, cost=cost)
    written = _write(request, target, outcome, over=document)
    return context.reply(
        messages.SubdocResponse,
        status=outcome.status,
        cas=written.cas,
        value=outcome.results[0].value if outcome.results else b"",
        **target.mutation_token(written),
    )


def mutate(context: Context, request: messages.MultiMutation) -> messages.MultiMutationResponse:
    doc_flags = request.doc_flags or _NO_FLAGS
    target, document = _target_to_write(context, request, doc_flags)
    cost = _cost(document, len(request.specs)) + sum(len(spec.value) for spec in request.specs)
    outcome = context.work(engine.mutate_in, document, request.specs, doc_flags, cost=cost)
    if isinstance(outcome, engine.PathFailed):
        return context.reply(messages.MultiMutationResponse, status=outcome.status, results=outcome.results)
    written = _write(request, target, outcome, over=document)
    return context.reply(
        messages.MultiMutationResponse,
        status=outcome.status,
        cas=written.cas,
        results=outcome.results,
        **target.mutation_token(written),
    )


def _target_to_write(
    context: Context, request: messages.SubdocGet | messages.MultiMutation, doc_flags: DocFlags
) -> tuple[Target, SubdocDocument | None]:
    """Where to write, and the newest version there, which the request's CAS allows to replace."""
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
    request: messages.SubdocGet | messages.MultiMutation, target: Target, outcome: engine.Mutated, *,
    over: SubdocDocument | None,
) -> Written:  # fmt: skip
    def value(cas: Cas, seqno: Seqno) -> bytes:
        return outcome.value.fill(cas=cas, seqno=seqno)

    if outcome.deleted:
        return target.remove(value=value, datatype=outcome.value.datatype)
    # What is left of a document that was deleted has no say in the one that takes its place.
    lasting = None if over is None or over.deleted else over
    user_flags = request.user_flags if isinstance(request, messages.MultiMutation) else None
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
    """The text is checked once, and walked through for each path."""
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
