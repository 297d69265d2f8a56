"""A DCP connection of which this node is the consumer: the streams it receives, its flow control and its noops.

Whoever drives it gives the bytes that come and sends the bytes that are to go: a key-value session whose peer, the
replication proxy, joins it to a producer, or a replicator of this node that has its own connection to the producer. The
proxy's requests and the producer's messages come over the same connection, and so do the answers to both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headwater.errors import MalformedMessage, StoreError, UnexpectedMessage, UnknownOpcode
from headwater.log_fields import LogEvent, fields
from headwater.node.consumer.outbox import Outbox
from headwater.node.consumer.stream import ChangeRun, Inbound, ReplicaStream
from headwater.node.consumer_views import ConsumerView
from headwater.node.service import BucketService, RequestRefused
from headwater.protocol.features import WITH_COLLECTIONS, Negotiated, Opcode
from headwater.protocol.flow_control import counted_bytes
from headwater.protocol.frames import Frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import ErrorResponse, Request, Response
from headwater.protocol.messages.dcp_changes import CacheTransfer, CacheTransferEnd, DcpFlush, OsoSnapshot
from headwater.protocol.messages.dcp_streams import (
    AddStream,
    AddStreamResponse,
    CloseStream,
    Control,
    DcpNoop,
    GetFailoverLog,
    GetFailoverLogResponse,
    StreamEnd,
    StreamFlags,
    StreamRequestResponse,
)
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.states import (
    CloseAnswered,
    ConnectionLost,
    ConsumerStream,
    EndpointState,
    StreamRefused,
    consumer_endpoint_after,
)
from headwater.protocol.status import Status
from headwater.store.receiving import RECEIVING_STATES
from headwater.store.settling import roll_back

# What a consumer asks of its producer before the first stream.


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    buffer_bytes: int = 10 * 1024 * 1024
    """What the producer may send before it has to wait for acknowledgements."""
    noop_interval_s: int = 20
    consumer_name: str = ""
    """The name under which the producer counts this copy's acknowledgements of durable writes; none without it."""

    def controls(self) -> list[Control]:
        """The control messages, in the order they are sent.

        With all of them granted, changes come as they are stored. A producer may refuse any: what comes then is brought
        into that form, and where a snapshot tells no history, rollbacks into it are not exact.
        """
        values = {
            "enable_noop": "true",
            "set_noop_interval": str(self.noop_interval_s),
            "connection_buffer_size": str(self.buffer_bytes),
            "enable_expiry_opcode": "true",
            "v7_dcp_status_codes": "true",
            "flatbuffers_system_events": "true",
            "change_streams": "true",
            "max_marker_version": "2.2",
        }
        if self.consumer_name:
            values |= {"enable_sync_writes": "true", "consumer_name": self.consumer_name}
        return [Control(key=key.encode(), value=value.encode()) for key, value in values.items()]


# What a consumer may do to this bucket's copies: which may be received, and how one is taken back.


ADD_STREAM_FLAGS = (
    StreamFlags.TAKEOVER
    | StreamFlags.DISK_ONLY
    | StreamFlags.LATEST
    | StreamFlags.ACTIVE_ONLY
    | StreamFlags.STRICT_VBUUID
    | StreamFlags.IGNORE_PURGED_TOMBSTONES
)
"""Those that make a copy. Without values, or from the latest change on, it would not be one."""


def check_addable(service: BucketService, request: AddStream) -> None:
    """Whether a stream may be asked for."""
    if int(request.flags) & ~int(ADD_STREAM_FLAGS):
        raise RequestRefused(Status.EINVAL)
    if StreamFlags.TAKEOVER in request.flags and not service.may_take_over(request.vbucket):
        raise RequestRefused(Status.NOT_MY_VBUCKET)
    if request.vbucket in service.receivers:
        raise RequestRefused(Status.KEY_EEXISTS)
    numbers = service.bucket.vbuckets
    if not numbers.exists(request.vbucket) or numbers.state(request.vbucket) not in RECEIVING_STATES:
        raise RequestRefused(Status.NOT_MY_VBUCKET)


def take_back(service: BucketService, vbucket: VBucketId, to_seqno: Seqno) -> Seqno:
    """Take a copy back, and return the seqno it was taken to. The bucket must be at rest."""
    if service.bucket.vbuckets.state(vbucket) not in RECEIVING_STATES:
        raise RequestRefused(Status.NOT_MY_VBUCKET)
    try:
        reached = roll_back(service.bucket, vbucket, to_seqno)
    except StoreError as error:
        raise RequestRefused(Status.ETMPFAIL, error.reason) from error
    service.on_rolled_back(vbucket)
    return reached


logger = logging.getLogger(__name__)

FIRST_STREAM_OPAQUE = 0x1000
"""As in the seed's example. Those of control messages are lower."""
_OPAQUE_MAX = 0x0FFF_FFFF
SILENT_NOOP_INTERVALS = 2
_DCP_OPCODES = range(Opcode.DCP_OPEN, Opcode.DCP_CACHE_TRANSFER_END + 1)
_UNASKED = (OsoSnapshot, CacheTransfer, CacheTransferEnd)


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream is over, for a driver that has to ask for it again."""

    vbucket: VBucketId
    reason: StreamEnd | Status
    """The producer's word, or the status with which one of its messages was refused here."""


class ConsumerConnection:
    """See the module. Any error that a method raises is the end of the connection."""

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
        self.messages = 0
        """How many single messages and runs of changes have come."""
        self.answers: list[Response] = []
        """To add-streams, where no proxy waits for them on the connection."""
        self.ended: list[StreamEnded] = []
        """Streams that have ended since the driver has last looked, where no proxy looks after them."""
        self.is_void = False
        """What was taken has been taken back. The connection is of no further use."""
        self.on_other: Callable[[Frame], None] = _refuse_other
        """Takes requests that are not DCP's."""
        self._service = service
        self._bucket = service.bucket
        self._negotiated = negotiated
        self._inbound = Inbound()
        self._outbox = Outbox(self._bucket, buffer_bytes=settings.buffer_bytes)
        self._by_opaque: dict[int, ReplicaStream] = {}
        self._controls: dict[int, Control] = {}
        """Control messages that have not been answered."""
        self._granted: set[bytes] = set()
        self._next_opaque = FIRST_STREAM_OPAQUE
        self._heard_s = self._now_s = now_s
        self._ended_changes = 0
        """Received by streams that have ended."""

    # --- out ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask the producer for everything that brings changes in the form they are stored in."""
        self._service.consumers[self] = None
        for opaque, control in enumerate(self.settings.controls(), start=1):
            message = Control(opaque=opaque, key=control.key, value=control.value)
            self._controls[opaque] = message
            self._outbox.send(message)

    def data_to_send(self) -> bytes:
        return self._outbox.take()

    @property
    def is_full(self) -> bool:
        """More has come than is durable by now: read on when the bucket has caught up."""
        return self._outbox.undurable_bytes + self._inbound.buffered_bytes > 2 * self.settings.buffer_bytes

    @property
    def is_held_back(self) -> bool:
        """Something that came had to wait for the bucket: call `receive_data` again, with nothing."""
        return self._inbound.is_held_back

    @property
    def held_bytes(self) -> int:
        """What has come and was not looked into."""
        return self._inbound.buffered_bytes

    @property
    def is_held(self) -> bool:
        return self._inbound.is_held

    @property
    def received_changes(self) -> int:
        return self._ended_changes + sum(stream.received_changes for stream in self.streams.values())

    @property
    def acked_bytes(self) -> int:
        return self._outbox.acked_bytes

    @property
    def unacked_bytes(self) -> int:
        return self._outbox.unacked_bytes

    def hold(self) -> None:
        """Take nothing in until `release`, but keep the connection: noops are answered, changes are not acknowledged.

        The producer stops where its window ends. What it has sent by then waits here.
        """
        self._inbound.hold()

    def release(self) -> None:
        """Go on with what was held. The driver then calls `receive_data`, with nothing."""
        self._inbound.release()

    def on_durable(self) -> None:
        """The bucket has published a commit, or was at rest: what has waited for it goes out."""
        self._outbox.on_durable()

    def on_void(self) -> None:
        """A commit could not be written, and what was not durable is gone. The driver has to close the connection."""
        self.is_void = True
        self._outbox.on_void()
        self.disconnect()

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what has come. Raises a `RemoteProtocolError` where the connection is to end."""
        if self.is_void:
            raise UnexpectedMessage("what was received could not be stored")
        self._heard_s = self._now_s
        self.received_bytes += len(data)
        window_bytes = 0
        for item in self._inbound.receive(data):
            self.messages += 1
            if isinstance(item, ChangeRun):
                window_bytes += len(item.data)
                self._receive_run(item)
            elif item.frame.magic.is_request:
                window_bytes += counted_bytes(item.frame.opcode, item.size_bytes)
                self._receive_request(item.frame)
            else:
                self._receive_answer(item.frame)
        self._outbox.count(window_bytes)
        for opaque in self._inbound.take_noops():
            self._outbox.succeed(Opcode.DCP_NOOP, opaque)

    def _receive_run(self, run: ChangeRun) -> None:
        stream = self._by_opaque.get(run.opaque)
        try:
            if stream is None or stream.state is ConsumerStream.REQUESTED:
                raise RequestRefused(Status.KEY_ENOENT)
            stream.receive_run(run, self._negotiated)
        except RequestRefused as refused:
            # One answer for all of them: the producer has to end the stream, however many it has sent.
            self._refuse_stream(int(run.data[1]), run.opaque, stream, refused.status)

    def _receive_request(self, frame: Frame) -> None:
        if frame.opcode not in _DCP_OPCODES:
            self.on_other(frame)
            return
        try:
            message = decode_message(frame, self._negotiated)
        except (MalformedMessage, UnknownOpcode) as error:
            status = Status.EINVAL if isinstance(error, MalformedMessage) else Status.UNKNOWN_COMMAND
            self._outbox.refuse(frame.opcode, frame.opaque, status)
            return
        assert isinstance(message, Request)
        try:
            following = consumer_endpoint_after(EndpointState.OPEN, type(message))
        except UnexpectedMessage:
            self._outbox.refuse(frame.opcode, frame.opaque, Status.EINVAL)
            return
        if following is EndpointState.CLOSED:
            raise UnexpectedMessage(f"{type(message).__name__} was sent to a consumer, and is for a producer")
        self._receive_message(message)

    def _receive_message(self, message: Request) -> None:
        if isinstance(message, DcpNoop):
            self._outbox.succeed(message.opcode, message.opaque)
        elif isinstance(message, AddStream):
            self.add_stream(message)
        elif isinstance(message, CloseStream):
            self._close_stream(message)
        elif isinstance(message, GetFailoverLog):
            self._tell_failover_log(message)
        else:
            self._receive_stream_message(message)

    def _receive_stream_message(self, message: Request) -> None:
        stream = self._by_opaque.get(message.opaque)
        try:
            if stream is None or stream.state in (ConsumerStream.REQUESTED, ConsumerStream.ROLLING_BACK):
                raise RequestRefused(Status.KEY_ENOENT)
            if isinstance(message, _UNASKED):
                raise RequestRefused(Status.NOT_SUPPORTED)
            if isinstance(message, StreamEnd):
                stream.move(StreamEnd)
                self._forget(stream, message)
            elif isinstance(message, DcpFlush):
                self._flush(stream, message)
            else:
                stream.receive(message)
        except RequestRefused as refused:
            self._refuse_stream(message.opcode, message.opaque, stream, refused.status)

    def _refuse_stream(self, opcode: int, opaque: int, stream: ReplicaStream | None, status: Status) -> None:
        self._outbox.refuse(opcode, opaque, status)
        if stream is not None and stream.state is not ConsumerStream.REQUESTED:
            stream.move(ConnectionLost)
            self._forget(stream, status)

    def _receive_answer(self, frame: Frame) -> None:
        """The producer answers a request of ours. One that we have given up meanwhile does not matter any more."""
        if frame.opcode == Opcode.DCP_CONTROL:
            control = self._controls.pop(frame.opaque, None)
            if control is not None and frame.specific == Status.SUCCESS:
                self._granted.add(control.key)
            return
        stream = self._by_opaque.get(frame.opaque)
        if frame.opcode != Opcode.DCP_STREAM_REQUEST or stream is None or stream.state is not ConsumerStream.REQUESTED:
            return
        answer = decode_message(frame, self._negotiated)
        assert isinstance(answer, Response)
        try:
            if not isinstance(answer, StreamRequestResponse):
                raise RequestRefused(answer.status)
            if answer.rollback_seqno is None:
                stream.on_accepted(answer.failover_log)
                self._answer(stream, self._accepted(stream))
            else:
                stream.on_rollback_demanded(answer.rollback_seqno)
                self._service.when_at_rest(partial(self._roll_back, stream, answer.rollback_seqno))
        except RequestRefused as refused:
            self._give_up(stream, refused.status)

    # --- streams --------------------------------------------------------------------------------------------------

    def add_stream(self, request: AddStream) -> None:
        """Ask the producer for a stream. The answer comes when the producer has given one."""
        try:
            check_addable(self._service, request)
        except RequestRefused as refused:
            self._send_answer(_error(request, refused.status))
            return
        stream = ReplicaStream(self._service, self._outbox, request, opaque=self._take_opaque())
        self.streams[stream.vbucket] = self._by_opaque[stream.opaque] = stream
        self._service.receivers[stream.vbucket] = self
        self._outbox.send(stream.request())

    def _take_opaque(self) -> int:
        while self._next_opaque in self._by_opaque:
            self._next_opaque = max(FIRST_STREAM_OPAQUE, (self._next_opaque + 1) & _OPAQUE_MAX)
        opaque = self._next_opaque
        self._next_opaque = max(FIRST_STREAM_OPAQUE, (opaque + 1) & _OPAQUE_MAX)
        return opaque

    def _accepted(self, stream: ReplicaStream) -> Response:
        return AddStreamResponse(opaque=stream.asked.opaque, stream_opaque=stream.opaque)

    def _answer(self, stream: ReplicaStream, answer: Response) -> None:
        if not stream.is_answered:
            stream.is_answered = True
            self._send_answer(answer)

    def _send_answer(self, answer: Response) -> None:
        if self.is_proxied:
            self._outbox.send(answer)
        else:
            self.answers.append(answer)

    def _give_up(self, stream: ReplicaStream, status: Status) -> None:
        """A stream that was asked for does not come to be."""
        stream.move(StreamRefused if stream.state is ConsumerStream.REQUESTED else ConnectionLost)
        self._forget(stream, status)
        self._answer(stream, _error(stream.asked, status))

    def _close_stream(self, request: CloseStream) -> None:
        stream = self.streams.get(request.vbucket)
        if stream is None:
            self._outbox.refuse(request.opcode, request.opaque, Status.KEY_ENOENT)
            return
        stream.move(CloseStream)
        stream.move(CloseAnswered)
        self._forget(stream, Status.SUCCESS)
        self._answer(stream, _error(stream.asked, Status.KEY_ENOENT))
        self._outbox.succeed(request.opcode, request.opaque)

    def close_stream(self, vbucket: VBucketId) -> None:
        """Ask the producer for no more of a stream, where no proxy does. What still comes of it is not taken."""
        stream = self.streams.get(vbucket)
        if stream is not None:
            stream.move(ConnectionLost)
            self._forget(stream, Status.SUCCESS)
            self._outbox.send(CloseStream(vbucket=vbucket, opaque=stream.opaque))

    def _forget(self, stream: ReplicaStream, reason: StreamEnd | Status) -> None:
        del self._by_opaque[stream.opaque]
        self._outbox.acknowledging.pop(stream.opaque, None)
        self._ended_changes += stream.received_changes
        del self.streams[stream.vbucket]
        del self._service.receivers[stream.vbucket]
        if not self.is_proxied:
            self.ended.append(StreamEnded(stream.vbucket, reason))

    def _tell_failover_log(self, request: GetFailoverLog) -> None:
        numbers = self._bucket.vbuckets
        facts = numbers.facts[request.vbucket] if numbers.exists(request.vbucket) else None
        if facts is None:
            self._outbox.refuse(request.opcode, request.opaque, Status.NOT_MY_VBUCKET)
        else:
            self._outbox.send(
                GetFailoverLogResponse(opaque=request.opaque, failover_log=facts.failover_log.entries)
            )  # fmt: skip

    def takeovers(self) -> list[VBucketId]:
        """The vbuckets that it receives in order to take them over."""
        return [stream.vbucket for stream in self.streams.values() if StreamFlags.TAKEOVER in stream.asked.flags]

    def view(self, *, now_s: float, with_streams: bool) -> ConsumerView:
        vbuckets = sorted(self.streams)
        return ConsumerView(
            name=self.name,
            peer=self.peer,
            is_proxied=self.is_proxied,
            open_s=max(0.0, now_s - self.opened_s),
            received_bytes=self.received_bytes,
            received_changes=self.received_changes,
            acked_bytes=self.acked_bytes,
            unacked_bytes=self.unacked_bytes,
            held_bytes=self.held_bytes,
            buffer_bytes_max=self.settings.buffer_bytes,
            is_held=self.is_held,
            vbuckets=tuple(vbuckets),
            streams=tuple(self.streams[vbucket].view() for vbucket in vbuckets) if with_streams else None,
        )

    # --- taking back ----------------------------------------------------------------------------------------------

    def _roll_back(self, stream: ReplicaStream, to_seqno: Seqno) -> None:
        """Take the copy back and ask again. The bucket is at rest."""
        if stream.state is not ConsumerStream.ROLLING_BACK:
            return
        from_seqno = int(self._bucket.vbuckets.high_seqnos[stream.vbucket])
        try:
            reached = take_back(self._service, stream.vbucket, to_seqno)
            stream.on_rolled_back(reached)
        except RequestRefused as refused:
            self._give_up(stream, refused.status)
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
            self._outbox.send(stream.request())

    def _flush(self, stream: ReplicaStream, message: DcpFlush) -> None:
        """Drop everything of a vbucket. What comes behind has to wait, since it is about the empty one."""
        try:
            stream.move(DcpFlush)
        except UnexpectedMessage as error:
            raise RequestRefused(Status.EINVAL) from error
        self._inbound.is_paused = True
        self._service.when_at_rest(partial(self._drop_all, stream, message))

    def _drop_all(self, stream: ReplicaStream, message: DcpFlush) -> None:
        self._inbound.is_paused = False
        if stream.state is not ConsumerStream.OPEN:
            return
        try:
            take_back(self._service, stream.vbucket, Seqno(0))
            stream.on_flushed()
            self._outbox.succeed(message.opcode, message.opaque)
        except RequestRefused as refused:
            self._refuse_stream(message.opcode, message.opaque, stream, refused.status)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Raises `UnexpectedMessage` where the producer must be taken for dead. To be called every second or so."""
        if self.is_full:
            # It may have spoken, and was not heard.
            self._heard_s = now_s
        self._now_s = now_s
        silence_s = now_s - self._heard_s
        if b"enable_noop" in self._granted and silence_s > SILENT_NOOP_INTERVALS * self.settings.noop_interval_s:
            raise UnexpectedMessage(f"the producer of {self.name!r} has been silent for {silence_s:.0f} s")

    def disconnect(self) -> None:
        """The connection is gone: others may receive what it has received."""
        for stream in list(self.streams.values()):
            stream.move(ConnectionLost)
            self._forget(stream, Status.ETMPFAIL)
        self._service.consumers.pop(self, None)


def _error(request: Request, status: Status) -> ErrorResponse:
    return ErrorResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=status)


def _refuse_other(frame: Frame) -> None:
    raise UnexpectedMessage(f"the producer has sent {frame.opcode_name}")
