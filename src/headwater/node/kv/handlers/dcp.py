"""Handlers for DCP: opening a connection, and the settings and streams of one on which this node is the producer.

The table of the endpoint's states (`protocol.states`) decides first: a message in the wrong state gets EINVAL. One for
the other kind of endpoint gets EINVAL as well, or closes the connection, according to the dialect
(`protocol.stream_requests`). On a connection on which this node is the consumer, `node.consumer` handles everything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from headwater.errors import UnexpectedMessage
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.users import Action
from headwater.node.consumer.connection import ConsumerConnection, ConsumerSettings
from headwater.node.kv.context import CloseSession, Context
from headwater.node.kv.documents import refuse_damaged, refuse_vbucket
from headwater.node.producer.connection import ProducerConnection
from headwater.node.producer.controls import BadControl
from headwater.protocol.failover_log import RollbackDemand
from headwater.protocol.features import Feature
from headwater.protocol.messages import dcp_streams as messages
from headwater.protocol.messages.base import PlainResponse, Request, Response
from headwater.protocol.messages.dcp_changes import SeqnoAcknowledged
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamRequest
from headwater.protocol.numbers import CONNECTION_NAME_BYTES_MAX
from headwater.protocol.states import PRODUCER_ENDPOINT, EndpointState, transition
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.stream_requests import Dialect, StreamRefusal
from headwater.protocol.values import Datatype

logger = logging.getLogger(__name__)

_OPEN_VALUE_BYTES_MAX = 4096
"""The value has one member, the name of the consumer."""
NODE_CONNECTION_PREFIXES = ("replication:", "takeover:")
"""Prefixes of the names of connections between nodes (`node.replication`, `cluster.rebalance`)."""


def dcp(context: Context, request: Request) -> Response | None:
    """Pass a DCP message to its handler, if the state of the endpoint allows it."""
    session = context.session
    state = EndpointState.UNOPENED if session.dcp is None and session.consumer is None else EndpointState.OPEN
    try:
        following = transition(PRODUCER_ENDPOINT, state, type(request))
    except UnexpectedMessage as error:
        raise RequestRefused(Status.EINVAL, "The command can only be sent on a DCP connection") from error
    if following is EndpointState.CLOSED:
        if context.service.dialect.answers_misplaced:
            raise RequestRefused(Status.EINVAL, f"{type(request).__name__} is for a consumer, and this is a producer")
        raise CloseSession
    return _HANDLERS[type(request)](context, request)


def _connection(context: Context) -> ProducerConnection:
    connection = context.session.dcp
    assert connection is not None, "the table lets these through on open connections only"
    return connection


# --- the connection -----------------------------------------------------------------------------------------------


def _open(context: Context, request: messages.Open) -> PlainResponse:
    dialect = context.service.dialect
    if not 0 < len(request.key) <= dialect.name_bytes_max:
        raise RequestRefused(Status.EINVAL, f"a connection's name has 1 to {dialect.name_bytes_max} bytes")
    _check_flags(request.flags, dialect)
    _check_may_take_name(context, request.key.decode(errors="replace"))
    consumer_name = _consumer_name(request)
    if OpenFlags.PRODUCER not in request.flags:
        return _open_as_consumer(context, request, consumer_name)
    session = context.session
    session.open_dcp(
        ProducerConnection(
            bucket=context.bucket_service.bucket,
            name=request.key.decode(errors="replace"),
            flags=request.flags,
            knows_collections=session.negotiated.collections,
            may_compress=session.has(Feature.SNAPPY),
            opened_s=context.service.now_s(),
            live=context.bucket_service.live_frames,
            dialect=dialect,
            has_right=lambda: session.may(Action.STREAM),
        )
    )
    return context.ok()


def _check_flags(flags: OpenFlags, dialect: Dialect) -> None:
    # Notifiers (0x02) are in the flags of "Open Connection" (kv_engine, DCP docs), but current servers have none.
    if unknown := int(flags) & ~int(dialect.open_flags):
        raise RequestRefused(Status.EINVAL, f"the flags 0x{unknown:x} are not known")
    # Recorded from 8.0.2.
    if OpenFlags.NO_VALUE in flags and OpenFlags.NO_VALUE_WITH_UNDERLYING_DATATYPE in flags:
        raise RequestRefused(Status.EINVAL, "the two flags for no values exclude each other")
    if OpenFlags.INCLUDE_DELETED_USER_XATTRS in flags and OpenFlags.INCLUDE_XATTRS not in flags:
        raise RequestRefused(Status.EINVAL, "the attributes of removed documents need the flag for attributes")


def _check_may_take_name(context: Context, name: str) -> None:
    """Opening a connection closes the one with the same name (`open_dcp`), so only that connection's user, or a node,
    may reuse its name.

    Names of replication and takeover connections are reserved for nodes even while unused: a lost connection is
    reopened under its name, and must not find it taken.
    """
    session = context.session
    if session.may(Action.NODE):
        return
    if name.startswith(NODE_CONNECTION_PREFIXES):
        raise RequestRefused(Status.EACCESS, "names of replication and takeover connections are for nodes")
    known = context.bucket_service.dcp_sessions.get(name)
    if known is not None and known.user not in (None, session.user):
        raise RequestRefused(Status.EACCESS, "a connection of another user has this name")


def _open_as_consumer(context: Context, request: messages.Open, consumer_name: str) -> PlainResponse:
    """Open a connection on which this node is the consumer. Only nodes may: what they send is written unchecked."""
    session = context.session
    if not session.may(Action.NODE):
        raise RequestRefused(Status.EACCESS)
    session.open_dcp(
        ConsumerConnection(
            context.bucket_service,
            name=request.key.decode(errors="replace"),
            peer=session.peer,
            settings=ConsumerSettings(consumer_name=consumer_name),
            now_s=context.service.now_s(),
            negotiated=session.negotiated,
            is_proxied=True,
        )
    )
    return context.ok()


def _consumer_name(request: messages.Open) -> str:
    """The consumer's name in a topology, if the value, a JSON object, has it. A producer receives it by a control.

    This refuses what the recorded 7.0.5 server refused. The connection stays open, and the peer may send another open.
    """
    if not request.value:
        if request.datatype != Datatype.RAW:
            raise RequestRefused(Status.EINVAL, "an open without a value has the datatype raw")
        return ""
    if request.datatype != Datatype.JSON:
        raise RequestRefused(Status.EINVAL, "an open with a value has the datatype JSON")
    if len(request.value) > _OPEN_VALUE_BYTES_MAX:
        raise RequestRefused(Status.EINVAL, f"the value of an open has at most {_OPEN_VALUE_BYTES_MAX} bytes")
    try:
        decoded = json.loads(request.value)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(Status.EINVAL, "the value is not JSON") from error
    if not isinstance(decoded, dict):
        raise RequestRefused(Status.EINVAL, "the value is not a JSON object")
    if unknown := decoded.keys() - {"consumer_name"}:
        raise RequestRefused(Status.EINVAL, f"{min(unknown)!r} is not known in the value of an open")
    if decoded and OpenFlags.PRODUCER in request.flags:
        raise RequestRefused(Status.EINVAL, "consumer_name is for a node that is to be the consumer")
    name = decoded.get("consumer_name", "")
    if not isinstance(name, str) or len(name.encode()) > CONNECTION_NAME_BYTES_MAX:
        raise RequestRefused(Status.EINVAL, f"consumer_name is a string of at most {CONNECTION_NAME_BYTES_MAX} bytes")
    return name


def _control(context: Context, request: messages.Control) -> PlainResponse:
    try:
        _connection(context).set_control(request.key, request.value)
    except BadControl as error:
        raise RequestRefused(error.status) from error
    return context.ok()


def _buffer_ack(context: Context, request: messages.BufferAck) -> None:
    _connection(context).on_buffer_ack(request.acked_bytes)


def _noop(context: Context, request: messages.DcpNoop) -> PlainResponse:
    return context.ok()


def _seqno_acknowledged(context: Context, request: SeqnoAcknowledged) -> None:
    """Count an acknowledgement of a replica. Only nodes may send it, since it decides durable writes of others."""
    if not context.session.may(Action.NODE):
        raise RequestRefused(Status.EACCESS)
    connection = _connection(context)
    controls = connection.controls
    if not connection.has_streamed(request.vbucket):
        # As recorded from a 7.0.5 server. It is no fault if there was a stream that has ended meanwhile.
        raise CloseSession
    if not controls.sync_writes or not controls.consumer_name:
        raise RequestRefused(
            Status.EINVAL, "sync writes are not enabled on this connection, or its consumer has no name"
        )
    if request.prepared_seqno > context.bucket_service.bucket.vbuckets.high_seqnos[request.vbucket]:
        # As recorded from an 8.0.2 server: no stream has sent this seqno. If accepted, it would commit later writes.
        if connection.is_streaming(request.vbucket):
            raise CloseSession
        return
    context.bucket_service.sync_writes.acknowledge(request.vbucket, controls.consumer_name, request.prepared_seqno)


# --- streams ------------------------------------------------------------------------------------------------------


def _stream_request(context: Context, request: StreamRequest) -> Response:
    connection = _connection(context)
    refuse_damaged(context, request.vbucket)
    admission = connection.admit(request)
    if isinstance(admission, RollbackDemand):
        history = context.bucket_service.history
        by_node = connection.name.startswith(NODE_CONNECTION_PREFIXES)
        # A consumer inside a snapshot lacks the end of it, which the active vbucket had.
        is_inside = request.start_seqno > request.snapshot_start_seqno
        had = max(request.start_seqno, request.snapshot_end_seqno) if is_inside else request.start_seqno
        history.asked(request.vbucket, vbuuid=request.vbuuid, seqno=had, by_node=by_node)
        _log_rollback(context, request, admission)
        return messages.StreamRequestResponse(
            opaque=request.opaque, status=Status.ROLLBACK, rollback_seqno=admission.to_seqno
        )
    if isinstance(admission, StreamRefusal):
        _refuse(context, admission)
    else:
        connection.open_stream(request, admission)
        # Only for nodes: this reverts acknowledgements of the copy, so durable writes could fail.
        if connection.controls.sync_writes and context.session.may(Action.NODE):
            sync_writes = context.bucket_service.sync_writes
            sync_writes.begin_stream(request.vbucket, connection.controls.consumer_name, request.start_seqno)
    facts = connection.bucket.vbuckets.facts[request.vbucket]
    assert facts is not None, "a stream is admitted on a vbucket that is here"
    return messages.StreamRequestResponse(opaque=request.opaque, failover_log=facts.failover_log.entries)


def _log_rollback(context: Context, request: StreamRequest, rollback: RollbackDemand) -> None:
    about = context.session.log_fields()
    logger.info(
        "bucket %s: DCP connection %s has to roll vbucket %d back from %d to %d",
        *(about["bucket"], about["connection"], request.vbucket, request.start_seqno, rollback.to_seqno),
        extra={
            **about,
            **fields(
                event=LogEvent.ROLLBACK_DEMANDED,
                vbucket=request.vbucket,
                from_seqno=request.start_seqno,
                seqno=rollback.to_seqno,
            ),
        },
    )


def _refuse(context: Context, refused: StreamRefusal) -> None:
    if refused.status == Status.NOT_MY_VBUCKET:
        refuse_vbucket(context)
    if refused.status in (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE):
        uid = context.bucket_service.bucket.manifest.uid
        raise RequestRefused(refused.status, manifest_uid=f"{uid:x}")
    context_text = refused.reason if refused.status == Status.EINVAL else ""
    raise RequestRefused(refused.status, context_text)


def _close_stream(context: Context, request: messages.CloseStream) -> PlainResponse:
    connection = _connection(context)
    if (request.stream_id is not None) != connection.controls.stream_id:
        raise RequestRefused(Status.DCP_STREAMID_INVALID)
    closing = connection.close_stream(request.vbucket, request.stream_id)
    if closing is None:
        raise RequestRefused(Status.KEY_ENOENT)
    # As recorded from 7.0.5 servers, the answer is sent first, then the stream-end, if a control has requested one.
    context.then_send(closing)
    return context.ok()


def get_failover_log(context: Context, request: messages.GetFailoverLog) -> messages.GetFailoverLogResponse:
    """The failover log of a vbucket that is here. With its other opcode, also on connections that are not DCP."""
    refuse_damaged(context, request.vbucket)
    numbers = context.bucket_service.bucket.vbuckets
    facts = numbers.facts_of(request.vbucket)
    if facts is None:
        refuse_vbucket(context)
    return context.reply(messages.GetFailoverLogResponse, failover_log=facts.failover_log.entries)


_HANDLERS: dict[type[Request], Callable[[Any, Any], Response | None]] = {
    messages.Open: _open,
    messages.Control: _control,
    messages.BufferAck: _buffer_ack,
    messages.DcpNoop: _noop,
    SeqnoAcknowledged: _seqno_acknowledged,
    StreamRequest: _stream_request,
    messages.CloseStream: _close_stream,
    messages.GetFailoverLog: get_failover_log,
}
