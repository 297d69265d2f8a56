"""A DCP connection of which this node is the consumer: the streams it receives, and what they do to its copies.

Its driver passes in received bytes and sends the bytes of `data_to_send`. The driver is a key-value session whose peer,
the replication proxy, joins it to a producer, or a replicator of this node with its own connection to the producer. The
proxy's requests and the producer's messages come over the same connection, and so do the answers to both.
`protocol.consumer` does what every consumer does (opaques, controls, noops, flow control). This module adds what a copy
needs: who may receive which vbucket, rollbacks, and acknowledging nothing before it is durable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from headwater.errors import MalformedMessage, StoreError, UnexpectedMessage
from headwater.log_fields import LogEvent, fields
from headwater.node.consumer.stream import Outbox, ReplicaStream
from headwater.node.service import BucketService, ConsumerView
from headwater.protocol import consumer, states
from headwater.protocol.features import WITH_COLLECTIONS, Feature, Negotiated, Opcode
from headwater.protocol.frames import Frame
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.base import ErrorResponse, Request, Response
from headwater.protocol.messages.dcp_changes import CacheTransfer, CacheTransferEnd, DcpFlush, OsoSnapshot
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.states import ConsumerStream
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype
from headwater.store.receiving import resume_offset
from headwater.store.settling import roll_back
from headwater.store.vbuckets import RECEIVING_STATES

FIRST_STREAM_OPAQUE = 0x1000
"""As in the seed's example. Those of control messages are lower."""
SILENT_NOOP_INTERVALS = 2
"""DCP docs, dead-connections: a producer that was silent for two intervals is dead."""
_UNASKED = (OsoSnapshot, CacheTransfer, CacheTransferEnd)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """What a consumer asks of its producer before the first stream."""

    buffer_bytes: int = 10 * 1024 * 1024
    """How much the producer may send before it has to wait for acknowledgements."""
    noop_interval_s: int = 20
    consumer_name: str = ""
    """The name under which the producer counts this copy's acknowledgements. If empty, sync writes are not enabled."""

    def controls(self) -> list[consumer.DcpControl]:
        """In sending order: first those of a recorded 7.0.5 consumer, then those that only newer servers know.

        If the producer grants all of them, changes arrive as they are stored. It may refuse any: this node then
        converts changes to that form, and rollbacks into a snapshot without history are not exact.
        """
        values = {
            "connection_buffer_size": str(self.buffer_bytes),
            "enable_noop": "true",
            "set_noop_interval": str(self.noop_interval_s),
            "set_priority": "high",
            "supports_cursor_dropping_vulcan": "true",
            "supports_hifi_MFU": "true",
            "send_stream_end_on_client_close_stream": "true",
            "enable_expiry_opcode": "true",
        }
        if self.consumer_name:
            values |= {"enable_sync_writes": "true", "consumer_name": self.consumer_name}
        values |= {
            "include_deleted_user_xattrs": "true",
            "v7_dcp_status_codes": "true",
            "flatbuffers_system_events": "true",
            "change_streams": "true",
            "max_marker_version": "2.2",
        }
        return [consumer.DcpControl(key=key, value=value) for key, value in values.items()]


# --- what a consumer may do to this bucket's copies ---------------------------------------------------------------

ADD_STREAM_FLAGS = (
    dcp_streams.StreamFlags.TAKEOVER
    | dcp_streams.StreamFlags.DISK_ONLY
    | dcp_streams.StreamFlags.LATEST
    | dcp_streams.StreamFlags.ACTIVE_ONLY
    | dcp_streams.StreamFlags.STRICT_VBUUID
    | dcp_streams.StreamFlags.IGNORE_PURGED_TOMBSTONES
)
"""The flags of a stream that makes a full copy. One without values, or from the latest change on, makes none."""


def take_back(service: BucketService, vbucket: VBucketId, to_seqno: Seqno) -> Seqno:
    """Roll a copy back. Returns the seqno that it reached. The bucket must be at rest."""
    if service.bucket.vbuckets.state(vbucket) not in RECEIVING_STATES:
        raise RequestRefused(Status.NOT_MY_VBUCKET)
    had = service.bucket.vbuckets.high_seqno(vbucket)
    try:
        reached = roll_back(service.bucket, vbucket, to_seqno)
    except StoreError as error:
        raise RequestRefused(Status.ETMPFAIL, error.reason) from error
    service.history.rolled_back(vbucket, kept=reached, had=had, is_drill=False)
    service.on_rolled_back(vbucket)
    return reached


# --- the connection -----------------------------------------------------------------------------------------------


class ConsumerConnection:
    """See the module. Any error that a method raises ends the connection."""

    def __init__(
        self,
        service: BucketService,
        *,
        name: str,
        peer: str,
        settings: ConsumerSettings,
        now_s: float,
        negotiated: Negotiated = WITH_COLLECTIONS,
        is_proxied: bool = False,
    ) -> None:
        self.name = name
        self.peer = peer
        self.settings = settings
        self.is_proxied = is_proxied
        self.opened_s = now_s
        self.received_bytes = 0
        self.streams: dict[VBucketId, ReplicaStream] = {}
        self.is_void = False
        """Received data could not be stored, so the connection has to be closed."""
        self.on_other: Callable[[Frame], None] = _refuse_other
        """Called with frames that are not part of DCP."""
        self._service = service
        self._bucket = service.bucket
        self._negotiated = negotiated
        limits = consumer.ConsumerLimits(
            buffer_bytes=settings.buffer_bytes, silence_s_max=SILENT_NOOP_INTERVALS * settings.noop_interval_s
        )
        # The proxy's requests come between the streams' messages, and their order matters. A producer may answer what
        # needs none, such as an acknowledgement for a vbucket that has gone (DCP docs, commands/seqno-acknowledged).
        self._dcp: consumer.DcpConsumer[ReplicaStream] = consumer.DcpConsumer(
            limits, now_s=now_s, negotiated=negotiated, keeps_order=True, ignores_stray_answers=True
        )
        self._outbox = Outbox(self._bucket, self._dcp)
        self._now_s = now_s
        self._has_asked = False
        """Whether the controls were sent that make changes arrive in the form they are stored in."""
        self._ended_changes = 0
        """Changes received by streams that have ended."""

    # --- out ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register as a connection that receives. It requests nothing before the first stream, as a 7.0.5 server does:
        a proxy opens both ends before it joins them."""
        self._service.consumers[self] = None

    def data_to_send(self) -> bytes:
        return self._dcp.data_to_send()

    @property
    def messages(self) -> int:
        """How many single messages and runs of changes were received."""
        return self._dcp.messages

    @property
    def is_full(self) -> bool:
        """Whether too much received data is not durable yet. Read on once the bucket has caught up."""
        return self._outbox.undurable_bytes + self._dcp.buffered_bytes > 2 * self.settings.buffer_bytes

    @property
    def is_held_back(self) -> bool:
        """Whether received data has to wait for the bucket. If so, call `receive_data` again, with no data."""
        return self._dcp.is_held_back

    @property
    def held_bytes(self) -> int:
        """Received bytes that were not processed yet."""
        return self._dcp.buffered_bytes

    def hold(self) -> None:
        """Stop processing until `release`, but keep the connection: answer noops, and acknowledge no changes.

        The producer stops at the end of its window. What it has sent by then is buffered here.
        """
        self._dcp.hold()

    def release(self) -> None:
        """Continue after `hold`. The driver then calls `receive_data`, with no data."""
        self._dcp.resume()

    def on_durable(self) -> None:
        """The bucket has published a commit, or was at rest: send what has waited for that."""
        self._outbox.on_durable()

    def on_void(self) -> None:
        """A commit could not be written, and what was not durable is lost. The driver has to close the connection."""
        self.is_void = True
        self._outbox.on_void()
        self.disconnect()

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Process received data. Raises a `RemoteProtocolError` if the connection has to end."""
        if self.is_void:
            raise UnexpectedMessage("what was received could not be stored")
        self.received_bytes += len(data)
        self._dcp.receive_data(data, now_s=self._now_s)
        window_bytes = 0
        for event in self._dcp.events():
            match event:
                case consumer.StreamRun():
                    window_bytes += event.window_bytes
                    self._receive_run(event)
                case consumer.StreamMessage():
                    window_bytes += event.window_bytes
                    self._receive_request(event.message, event.stream)
                case consumer.RequestAnswered():
                    self._receive_answer(event.answer, event.stream)
                case consumer.ForeignFrame():
                    self.on_other(event.frame)
                case consumer.FaultyFrame():
                    window_bytes += event.window_bytes
                    is_malformed = isinstance(event.error, MalformedMessage)
                    status = Status.EINVAL if is_malformed else Status.UNKNOWN_COMMAND
                    refused = RequestRefused(status, event.error.reason)
                    self._dcp.send(self._error(event.frame.opcode, event.frame.opaque, refused))
        self._outbox.release(window_bytes)

    def _receive_run(self, run: consumer.StreamRun[ReplicaStream]) -> None:
        stream = run.stream
        try:
            if stream is None or stream.state is ConsumerStream.REQUESTED:
                raise self._no_stream(VBucketId(int.from_bytes(bytes(run.data[6:8]))))
            stream.receive_run(run, self._negotiated)
        except RequestRefused as refused:
            # One answer for the whole run: the producer has to end the stream, however many changes it has sent.
            self._refuse_stream(int(run.data[1]), run.opaque, stream, refused)

    def _no_stream(self, vbucket: VBucketId) -> RequestRefused:
        """The refusal of a message whose opaque belongs to no stream: the vbucket has another stream, or none.

        The newer statuses, of 7.0, are only for producers that have agreed to them.
        """
        is_v7 = "v7_dcp_status_codes" in self._dcp.granted
        if vbucket in self.streams:
            return RequestRefused(Status.OPAQUE_NO_MATCH if is_v7 else Status.KEY_EEXISTS)
        return RequestRefused(Status.STREAM_NOT_FOUND if is_v7 else Status.KEY_ENOENT)

    def _receive_request(self, message: Request, stream: ReplicaStream | None) -> None:
        try:
            following = states.transition(states.CONSUMER_ENDPOINT, states.EndpointState.OPEN, type(message))
        except UnexpectedMessage:
            self._dcp.send_refusal(message.opcode, message.opaque, Status.EINVAL)
            return
        if following is states.EndpointState.CLOSED:
            raise UnexpectedMessage(f"{type(message).__name__} was sent to a consumer, and is for a producer")
        match message:
            case dcp_streams.AddStream():
                self.add_stream(message)
            case dcp_streams.CloseStream():
                self._close_for_proxy(message)
            case dcp_streams.GetFailoverLog():
                facts = self._bucket.vbuckets.facts_of(message.vbucket)
                if facts is None:
                    self._dcp.send_refusal(message.opcode, message.opaque, Status.NOT_MY_VBUCKET)
                else:
                    entries = facts.failover_log.entries
                    self._dcp.send(dcp_streams.GetFailoverLogResponse(opaque=message.opaque, failover_log=entries))
            case _:
                self._receive_stream_message(message, stream)

    def _receive_stream_message(self, message: Request, stream: ReplicaStream | None) -> None:
        try:
            if stream is None and isinstance(message, dcp_streams.StreamEnd):
                # Expected: the control for closed streams has asked for this message.
                return
            if stream is None or stream.state in (ConsumerStream.REQUESTED, ConsumerStream.ROLLING_BACK):
                raise self._no_stream(message.vbucket)
            if isinstance(message, _UNASKED):
                # As recorded from an 8.0.2 server. The stream continues: it has lost no change.
                self._dcp.send_refusal(message.opcode, message.opaque, Status.UNKNOWN_COMMAND)
                return
            if isinstance(message, dcp_streams.StreamEnd):
                stream.move(dcp_streams.StreamEnd)
                self._drop(stream)
            elif isinstance(message, DcpFlush):
                self._flush(stream, message)
            else:
                stream.receive(message)
        except RequestRefused as refused:
            self._refuse_stream(message.opcode, message.opaque, stream, refused)

    def _refuse_stream(self, opcode: int, opaque: int, stream: ReplicaStream | None, refused: RequestRefused) -> None:
        self._dcp.send(self._error(opcode, opaque, refused))
        if stream is not None and stream.state is not ConsumerStream.REQUESTED:
            stream.move(states.ConnectionLost)
            self._drop(stream)

    def _receive_answer(self, answer: Response, stream: ReplicaStream | None) -> None:
        """The producer has answered a stream request. If the stream was given up meanwhile, ignore the answer."""
        if stream is None or stream.state is not ConsumerStream.REQUESTED:
            return
        try:
            if not isinstance(answer, dcp_streams.StreamRequestResponse):
                raise RequestRefused(answer.status)
            if answer.rollback_seqno is None:
                stream.on_accepted(answer.failover_log)
                self._answer(
                    stream, dcp_streams.AddStreamResponse(opaque=stream.asked.opaque, stream_opaque=stream.opaque)
                )
            else:
                stream.on_rollback_demanded(answer.rollback_seqno)
                self._service.when_at_rest(partial(self._roll_back, stream, answer.rollback_seqno))
        except RequestRefused as refused:
            self._give_up(stream, refused)

    # --- streams --------------------------------------------------------------------------------------------------

    def add_stream(self, request: dcp_streams.AddStream) -> None:
        """Request a stream from the producer. The proxy gets its answer once the producer has answered."""
        try:
            self._check_addable(request)
        except RequestRefused as refused:
            self._answer_proxy(self._error(request.opcode, request.opaque, refused))
            return
        if not self._has_asked:
            self._has_asked = True
            self._dcp.send_opening(self.settings.controls(), first_stream_opaque=FIRST_STREAM_OPAQUE)
        stream = ReplicaStream(self._service, self._outbox, request, opaque=self._dcp.take_opaque())
        self.streams[stream.vbucket] = stream
        self._service.receivers[stream.vbucket] = self
        self._dcp.send_request(stream.request(), stream=stream)

    def _check_addable(self, request: dcp_streams.AddStream) -> None:
        """Raise `RequestRefused` if this stream may not be requested."""
        if int(request.flags) & ~int(ADD_STREAM_FLAGS):
            raise RequestRefused(Status.EINVAL, f"a copy can't be made with the flags {int(request.flags):#x}")
        if dcp_streams.StreamFlags.TAKEOVER in request.flags and not self._service.may_take_over(request.vbucket):
            raise RequestRefused(Status.NOT_MY_VBUCKET)
        if request.vbucket in self._service.receivers:
            raise RequestRefused(Status.KEY_EEXISTS)
        if self._bucket.vbuckets.state(request.vbucket) not in RECEIVING_STATES:
            raise RequestRefused(Status.NOT_MY_VBUCKET)

    def _answer(self, stream: ReplicaStream, answer: Response) -> None:
        if not stream.is_answered:
            stream.is_answered = True
            self._answer_proxy(answer)

    def _answer_proxy(self, answer: Response) -> None:
        """Answer an add-stream. A replicator checks `streams` instead, and requests again what is missing there."""
        if self.is_proxied:
            self._dcp.send(answer)

    def _give_up(self, stream: ReplicaStream, refused: RequestRefused) -> None:
        """Drop a stream that was refused or can't be rolled back, and answer its add-stream."""
        stream.move(states.StreamRefused if stream.state is ConsumerStream.REQUESTED else states.ConnectionLost)
        self._drop(stream)
        answer = self._error(stream.asked.opcode, stream.asked.opaque, refused)
        # As recorded: a refusal also has the opaque that the stream would have had.
        self._answer(stream, replace(answer, extras=stream.opaque.to_bytes(4)))

    def _close_for_proxy(self, request: dcp_streams.CloseStream) -> None:
        stream = self.streams.get(request.vbucket)
        if stream is None:
            self._dcp.send_refusal(request.opcode, request.opaque, Status.KEY_ENOENT)
            return
        stream.move(dcp_streams.CloseStream)
        stream.move(states.CloseAnswered)
        self._drop(stream)
        self._answer(stream, self._error(stream.asked.opcode, stream.asked.opaque, RequestRefused(Status.KEY_ENOENT)))
        self._dcp.send_success(request.opcode, request.opaque)

    def close_stream(self, vbucket: VBucketId) -> None:
        """Close a stream at the producer, if there is no proxy. Messages that still come for it are refused."""
        stream = self.streams.get(vbucket)
        if stream is not None:
            stream.move(states.ConnectionLost)
            self._drop(stream)
            self._dcp.send(dcp_streams.CloseStream(vbucket=vbucket, opaque=stream.opaque))

    def _drop(self, stream: ReplicaStream) -> None:
        """Remove a stream that has ended: other connections may receive its vbucket."""
        del self._dcp.streams[stream.opaque]
        self._outbox.acknowledging.pop(stream.opaque, None)
        self._ended_changes += stream.received_changes
        del self.streams[stream.vbucket]
        del self._service.receivers[stream.vbucket]

    def takeovers(self) -> list[VBucketId]:
        """The vbuckets that this connection receives in order to take them over."""
        return [
            stream.vbucket for stream in self.streams.values() if dcp_streams.StreamFlags.TAKEOVER in stream.asked.flags
        ]

    def view(self, *, now_s: float, with_streams: bool) -> ConsumerView:
        vbuckets = sorted(self.streams)
        return ConsumerView(
            name=self.name,
            peer=self.peer,
            is_proxied=self.is_proxied,
            open_s=max(0.0, now_s - self.opened_s),
            received_bytes=self.received_bytes,
            received_changes=self._ended_changes + sum(stream.received_changes for stream in self.streams.values()),
            acked_bytes=self._dcp.acked_bytes,
            unacked_bytes=self._dcp.owed_bytes,
            held_bytes=self.held_bytes,
            buffer_bytes_max=self.settings.buffer_bytes,
            is_held=self._dcp.is_held,
            vbuckets=tuple(vbuckets),
            streams=tuple(self.streams[vbucket].view() for vbucket in vbuckets) if with_streams else None,
        )

    # --- rollbacks ------------------------------------------------------------------------------------------------

    def _roll_back(self, stream: ReplicaStream, to_seqno: Seqno) -> None:
        """Roll the copy back and request the stream again. The bucket is at rest."""
        if stream.state is not ConsumerStream.ROLLING_BACK:
            return
        from_seqno = self._bucket.vbuckets.high_seqno(stream.vbucket)
        try:
            reached = take_back(self._service, stream.vbucket, to_seqno)
            stream.move(states.RollbackDone)
        except RequestRefused as refused:
            self._give_up(stream, refused)
        else:
            logger.info(
                "bucket %s: the replica of vbucket %d is rolled back from %d to %d",
                *(self._service.name, stream.vbucket, from_seqno, reached),
                extra=fields(
                    event=LogEvent.ROLLED_BACK,
                    bucket=self._service.name,
                    connection=self.name,
                    peer=self.peer,
                    vbucket=stream.vbucket,
                    from_seqno=from_seqno,
                    seqno=reached,
                ),
            )
            self._dcp.send_request(stream.request(), stream=stream)

    def _flush(self, stream: ReplicaStream, message: DcpFlush) -> None:
        """Drop everything in a vbucket. Later messages have to wait, because they refer to the emptied vbucket."""
        try:
            stream.move(DcpFlush)
        except UnexpectedMessage as error:
            raise RequestRefused(Status.EINVAL) from error
        self._dcp.pause()
        self._service.when_at_rest(partial(self._drop_all, stream, message))

    def _drop_all(self, stream: ReplicaStream, message: DcpFlush) -> None:
        self._dcp.unpause()
        if stream.state is not ConsumerStream.OPEN:
            return
        try:
            take_back(self._service, stream.vbucket, Seqno(0))
            stream.restart(resume_offset(self._bucket, stream.vbucket))
            self._dcp.send_success(message.opcode, message.opaque)
        except RequestRefused as refused:
            self._refuse_stream(message.opcode, message.opaque, stream, refused)

    def _error(self, opcode: int, opaque: int, refused: RequestRefused) -> ErrorResponse:
        """The refusal, with its reason as JSON. Its datatype says so if the peer has negotiated JSON."""
        answer = ErrorResponse(opcode=Opcode(opcode), opaque=opaque, status=refused.status)
        if not refused.context or refused.status == Status.NOT_MY_VBUCKET:
            # With this status, the peer would take a body for the cluster's config.
            return answer
        is_json = Feature.JSON in self._negotiated.features
        value = json.dumps({"error": {"context": refused.context}}, separators=(",", ":")).encode()
        return replace(answer, value=value, datatype=Datatype.JSON if is_json else Datatype.RAW)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Call this about once a second. Raises `ConnectionFailed` if the producer is considered dead."""
        self._now_s = now_s
        self._dcp.tick(now_s, is_deaf=self.is_full)

    def disconnect(self) -> None:
        """The connection is closed: other connections may receive its vbuckets."""
        for stream in list(self.streams.values()):
            stream.move(states.ConnectionLost)
            self._drop(stream)
        self._service.consumers.pop(self, None)


def _refuse_other(frame: Frame) -> None:
    raise UnexpectedMessage(f"the producer has sent {frame.opcode_name}")
