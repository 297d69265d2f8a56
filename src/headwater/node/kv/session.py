"""One key-value connection, sans-IO: bytes in, answers out, in order.

Requests are handled as they come and answered in their order. An answer that shows something not yet durable is held
back, and with it all that follow: `Outgoing` says which commit it waits for, and `kv_listener`, which runs the session,
sends it when the bucket has published that commit. The answer to a durable write waits for its outcome
(`DeferredAnswer`); a peer that has agreed to unordered execution gets other answers meanwhile.

Runs of plain sets, which is what bulk loads consist of, and of reads are handled by kernels (`store.set_run`,
`store.read_run`); everything else goes message by message through the table of handlers.

What one call of `receive_data` does is bounded, so that a connection can't keep the others waiting: requests that are
left wait for the next turn. They also wait for a log-in to be checked, for a durable write to be decided, for answers
to be read, and, if they write, for room in the commit. `waits_for` says which.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from headwater.errors import MalformedFrameInfo, MalformedMessage, StoreError, UnknownOpcode
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.login_checks import LoginVerdict
from headwater.node.auth.users import Action
from headwater.node.consumer.connection import ConsumerConnection
from headwater.node.durability import SyncWrite, WriteOutcome
from headwater.node.kv.context import CloseSession, Context, SessionState
from headwater.node.kv.handlers import HANDLERS
from headwater.node.kv.permissions import NEEDED, NEEDS_NO_LOGIN, READS_AS_WELL, SERVED_WHILE_WAITING
from headwater.node.options import ServerLimits
from headwater.node.producer.connection import ProducerConnection
from headwater.node.service import BucketService, RequestRefused, Service
from headwater.protocol.features import Feature, Magic, Opcode
from headwater.protocol.flow_control import COUNTED
from headwater.protocol.frames import (
    HEADER_BYTES,
    Frame,
    FrameBuffer,
    RequestInfo,
    decode_frame_infos,
    encode_frame_infos,
    find,
    server_duration,
)
from headwater.protocol.kernels.frame_runs import with_framing_extras
from headwater.protocol.kernels.memory import Bytes
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.status import Status, status_for_peer
from headwater.store.set_run import apply_set_run

DEFERRED_MAX = 1024
"""Durable writes of one connection at a time. Its next requests wait."""
TURN_REQUESTS = 64
TURN_BYTES = 512 * 1024
"""What a connection gets done before others have their turn: so many requests one by one, or so many bytes of requests,
answers and changes. One request may be longer than that."""
SMALL_WRITER_BYTES = 64 * 1024
"""Who has no more than this in the pending commit never waits for the commit to become smaller."""

logger = logging.getLogger(__name__)

SILENT_ON_SUCCESS = frozenset(
    {
        Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ, Opcode.DELETEQ, Opcode.INCREMENTQ, Opcode.DECREMENTQ,
        Opcode.APPENDQ, Opcode.PREPENDQ, Opcode.SETQ_WITH_META, Opcode.ADDQ_WITH_META, Opcode.DELQ_WITH_META,
        Opcode.FLUSHQ, Opcode.QUITQ,
    }
)  # fmt: skip
SILENT_ON_MISS = frozenset({Opcode.GETQ, Opcode.GETKQ, Opcode.GATQ, Opcode.GETQ_META})
WRITE_OPCODES = frozenset(request.opcode for request, action in NEEDED.items() if action is Action.WRITE)
_READS = frozenset(
    {
        Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ,
        Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_MULTI_LOOKUP,
    }
)  # fmt: skip
_SERVED_INFOS = frozenset(
    {RequestInfo.BARRIER, RequestInfo.DURABILITY, RequestInfo.PRESERVE_TTL, RequestInfo.STREAM_ID}
)


class Waits(Enum):
    """What the next request waits for."""

    FOR_NOTHING = auto()
    """No whole request is left."""
    FOR_TURN = auto()
    """Others have theirs first."""
    FOR_LOGIN = auto()
    """The log-in before it is checked."""
    FOR_OUTCOME = auto()
    """A durable write is decided."""
    FOR_READING = auto()
    """The peer reads its answers, or the commit that they wait for is durable."""
    FOR_ROOM = auto()
    """Too much is not durable yet for one more write."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Bytes to send, once the bucket has made the commit durable; 0 for at once."""

    data: bytes
    commit: int
    bucket: BucketService | None
    received_s: float
    """When its requests came."""

    @property
    def may_be_sent(self) -> bool:
        return self.bucket is None or self.commit <= self.bucket.bucket.durable_commit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeferredAnswer:
    """The answer to a durable write. There is none until the write is decided."""

    write: SyncWrite
    bucket: BucketService
    answer: Callable[[WriteOutcome], bytes | None]
    """None where no status can say it to the peer, and its connection has to be closed instead."""
    received_s: float

    @property
    def is_decided(self) -> bool:
        return self.write.outcome is not None

    @property
    def data(self) -> bytes:
        return b"" if self.write.outcome is None else self.answer(self.write.outcome) or b""

    @property
    def ends_connection(self) -> bool:
        return self.write.outcome is not None and self.answer(self.write.outcome) is None

    @property
    def may_be_sent(self) -> bool:
        outcome = self.write.outcome
        return outcome is not None and outcome.commit <= self.bucket.bucket.durable_commit


@dataclass(slots=True)
class Deferrals:
    """The undecided durable writes of one connection, and what has to wait for them.

    A request about the same document does, and so does one that is about no document. From all others no client could
    see whether they came before or after, so they are handled at once.
    """

    _by_key: dict[tuple[int, bytes], DeferredAnswer] = field(default_factory=dict)

    def add(self, request: Frame, answer: DeferredAnswer) -> None:
        self._by_key[request.specific, request.key] = answer

    @property
    def is_full(self) -> bool:
        if len(self._by_key) >= DEFERRED_MAX:
            self._forget_decided()
        return len(self._by_key) >= DEFERRED_MAX

    def hold(self, request: Frame, *, in_order: bool) -> bool:
        """Whether a request has to wait. Where the peer lets requests overtake each other, only one with a barrier."""
        if not self._by_key:
            return False
        if not request.key if in_order else _has_barrier(request):
            self._forget_decided()
            return bool(self._by_key)
        deferred = self._by_key.get((request.specific, request.key)) if in_order else None
        return deferred is not None and not deferred.is_decided

    def _forget_decided(self) -> None:
        self._by_key = {key: answer for key, answer in self._by_key.items() if not answer.is_decided}


def _has_barrier(request: Frame) -> bool:
    try:
        return find(decode_frame_infos(request.framing_extras), RequestInfo.BARRIER) is not None
    except MalformedFrameInfo:
        # It is refused when it is handled.
        return False


class NotDurable:
    """What a connection has put into commits that are not durable yet: there is a bound to that."""

    def __init__(self) -> None:
        self._parts: deque[tuple[BucketService, int, int]] = deque()
        """Bucket, commit and bytes, oldest first."""

    def add(self, bucket: BucketService, before_bytes: int) -> int:
        """Count what the pending commit holds beyond `before_bytes`. Returns how much that is."""
        pending = bucket.bucket.pending
        written = pending.used_bytes - before_bytes
        if written <= 0:
            return 0
        if self._parts and self._parts[-1][0] is bucket and self._parts[-1][1] == pending.number:
            self._parts[-1] = (bucket, pending.number, self._parts[-1][2] + written)
        else:
            self._parts.append((bucket, pending.number, written))
        return written

    @property
    def total_bytes(self) -> int:
        while self._parts and self._parts[0][1] <= self._parts[0][0].bucket.durable_commit:
            self._parts.popleft()
        return sum(part[2] for part in self._parts)


class KvSession(SessionState):
    """One connection. `kv_listener` drives it: bytes to `receive_data`, pieces from `outgoing`."""

    def __init__(self, service: Service, *, peer: str, allows_plain: bool, limits: ServerLimits | None = None) -> None:
        super().__init__(service, peer=peer, allows_plain=allows_plain)
        self.outgoing: deque[Outgoing | DeferredAnswer] = deque()
        self.unordered: list[DeferredAnswer] = []
        """Answers that others may overtake."""
        self.requests = 0
        self.waits_for = Waits.FOR_NOTHING
        """Why requests are left: call `receive_data` again, with nothing, when it has come."""
        self._limits = limits or ServerLimits()
        self._unsent_bytes = 0
        """In `outgoing`, as far as a call of `receive_data` knows."""
        self._writes = NotDurable()
        self._turn_requests = self._turn_bytes = 0
        """What this turn has had so far."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when this DCP connection is to end, as a newer one of the same name takes its place, for example."""
        self._is_over = False
        """What still comes while the connection closes is dropped."""
        self._frames = FrameBuffer()
        self._deferrals = Deferrals()
        self._held: Frame | None = None
        """A request that waits for a durable write."""
        self._reply = bytearray()
        self._reply_commit = 0
        self._received_s = 0.0
        """When the requests came that are handled now."""

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Handle what has come, a turn of it. Raises `CloseSession` or a `RemoteProtocolError` where the connection is
        to end.

        What was answered before that is in `outgoing`. If whole requests may be left, `waits_for` says why.
        """
        self.service.stay_awake()
        if data:
            self._received_s = self.service.now_s()
        if self._is_over:
            raise CloseSession
        if self.consumer is not None:
            self._receive_as_consumer(self.consumer, data)
            return
        self._frames.receive_data(data)
        self._unsent_bytes = sum(len(piece.data) for piece in self.outgoing)
        self._turn_requests = self._turn_bytes = 0
        try:
            while (waits_for := self._next_waits_for()) is Waits.FOR_NOTHING:
                if self._handle_run():
                    continue
                frame = self._next_frame()
                if frame is None:
                    break
                self._handle(frame)
                if self._hand_on_rest():
                    return
        finally:
            self.flush()
        self.waits_for = waits_for if self._held is None else self._next_waits_for()

    @property
    def is_held_back(self) -> bool:
        """Whether requests are left that wait for something."""
        return self.waits_for is not Waits.FOR_NOTHING

    def _next_waits_for(self) -> Waits:
        if self.login is not None:
            return Waits.FOR_LOGIN
        if self._held is None and not self._frames.buffered_bytes:
            return Waits.FOR_NOTHING
        if self._deferrals.is_full or (self._held is not None and self._must_wait(self._held)):
            return Waits.FOR_OUTCOME
        if self._unsent_bytes + len(self._reply) > self._limits.unsent_bytes_max:
            return Waits.FOR_READING
        if self._held is None and not self._has_room():
            return Waits.FOR_ROOM
        if self._turn_requests >= TURN_REQUESTS or self._turn_bytes >= TURN_BYTES:
            return Waits.FOR_TURN
        return Waits.FOR_NOTHING

    def _has_room(self) -> bool:
        """Whether the next request does not write, or what is not durable yet leaves room for it."""
        if self.bucket is None:
            return True
        with self._frames.peek() as view:
            if len(view) < HEADER_BYTES or view[1] not in WRITE_OPCODES:
                return True
        own_bytes, limits = self._writes.total_bytes, self._limits
        if own_bytes >= limits.pending_bytes_max or self.service.pending_bytes >= limits.node_pending_bytes_max:
            return False
        return own_bytes <= SMALL_WRITER_BYTES or self.bucket.has_room

    def _next_frame(self) -> Frame | None:
        """The next request, unless it has to wait for a durable write."""
        frame, self._held = self._held or self._frames.next_frame(), None
        if frame is not None and self._must_wait(frame):
            self._held = frame
            return None
        return frame

    @property
    def waits_for_outcome(self) -> bool:
        """Whether no request can be handled before a durable write is decided."""
        return self._next_waits_for() is Waits.FOR_OUTCOME

    def _must_wait(self, frame: Frame) -> bool:
        return self._deferrals.hold(frame, in_order=not self.has(Feature.UNORDERED_EXECUTION))

    def finish_login(self, verdict: LoginVerdict) -> None:
        """The log-in that requests wait for has been checked."""
        login, self.login = self.login, None
        assert login is not None
        try:
            answer = login.conclude(verdict)
        except RequestRefused as refused:
            answer = self._refusal(login.context, refused)
        self._write(answer, commit=0)
        self.flush()
        # The requests behind it are for the next turn.
        self.waits_for = Waits.FOR_TURN if self._frames.buffered_bytes else Waits.FOR_NOTHING

    def _hand_on_rest(self) -> bool:
        """If the connection has just become a consumer's, what came behind the open is for that."""
        if self.consumer is None:
            return False
        with self._frames.peek() as view:
            rest = bytes(view)
        self._frames.skip(len(rest))
        self._receive_as_consumer(self.consumer, rest)
        return True

    def _receive_as_consumer(self, consumer: ConsumerConnection, data: bytes | bytearray | memoryview) -> None:
        if not self.may(Action.NODE):
            raise CloseSession
        messages = consumer.messages
        try:
            consumer.receive_data(data)
        finally:
            self.requests += consumer.messages - messages
            self.flush()
        self.waits_for = Waits.FOR_TURN if consumer.is_held_back else Waits.FOR_NOTHING

    @property
    def unhandled_bytes(self) -> int:
        """What has come and is not a whole request yet, or is held back."""
        return self._frames.buffered_bytes

    def _handle_run(self) -> bool:
        """Hand a run of plain sets or of reads to its kernel. False where there is none."""
        if self.bucket is None or self.bucket.is_waiting or self._held is not None:
            return False
        if self._frames.buffered_bytes < HEADER_BYTES:
            return False
        with self._frames.peek() as view:
            if view[0] != Magic.REQUEST:
                return False
            if view[1] in (Opcode.SET, Opcode.SETQ):
                return self._apply_sets(self.bucket, np.frombuffer(view, dtype=np.uint8))
            if view[1] in _READS:
                return self._answer_reads(self.bucket, np.frombuffer(view, dtype=np.uint8))
        return False

    def _apply_sets(self, bucket: BucketService, data: Bytes) -> bool:
        if not self.may(Action.WRITE) or bucket.settings.durability_min_level:
            return False
        before = bucket.bucket.pending.used_bytes
        run = apply_set_run(
            bucket.bucket,
            data,
            collections=self.negotiated.collections,
            mutation_tokens=self.has(Feature.MUTATION_SEQNO),
            now_ns=self.service.now_ns(),
            datatypes=self.datatypes,
        )
        self._frames.skip(run.consumed_bytes)
        if run.sets:
            self.requests += run.sets
            self._reply += run.responses
            if bucket.ack_when_durable:
                self._reply_commit = max(self._reply_commit, bucket.bucket.pending.number)
            self._writes.add(bucket, before)
            self._turn_bytes += TURN_BYTES if run.is_cut_short else run.consumed_bytes
            bucket.on_change()
        return run.sets > 0

    def _answer_reads(self, bucket: BucketService, data: Bytes) -> bool:
        if not self.may(Action.READ):
            return False
        run = bucket.reads.answer_run(data, collections=self.negotiated.collections, datatypes=self.datatypes)
        self._frames.skip(run.consumed_bytes)
        self.requests += run.reads
        self._reply += run.responses
        self._turn_bytes += run.consumed_bytes + len(run.responses)
        if bucket.ack_when_durable:
            self._reply_commit = max(self._reply_commit, run.commit)
        return run.reads > 0

    def _handle(self, frame: Frame) -> None:
        """Handle one request, and count what it takes."""
        bucket, reply_bytes = self.bucket, len(self._reply)
        written = 0 if bucket is None else bucket.bucket.pending.used_bytes
        self._handle_frame(frame)
        if bucket is not None:
            written = self._writes.add(bucket, written)
        self._turn_requests += 1
        self._turn_bytes += len(frame.value) + max(0, len(self._reply) - reply_bytes) + written

    def _handle_frame(self, frame: Frame) -> None:
        self.requests += 1
        if frame.magic not in (Magic.REQUEST, Magic.FLEXIBLE_REQUEST):
            self._handle_answer(frame)
            return
        try:
            message = decode_message(frame, self.negotiated)
        except UnknownOpcode:
            self._refuse_frame(frame, RequestRefused(Status.UNKNOWN_COMMAND))
            return
        except MalformedMessage as error:
            self._refuse_frame(frame, RequestRefused(Status.EINVAL, error.reason))
            return
        assert isinstance(message, Request)
        context = Context(self.service, self, message)
        try:
            self._check_allowed(message)
            answer = HANDLERS[type(message)](context, message)
        except RequestRefused as refused:
            answer = self._refusal(context, refused)
        except StoreError as error:
            # What was asked for could not be read: kv_engine calls that a temporary failure, too.
            answer = self._refusal(context, RequestRefused(Status.ETMPFAIL, error.reason))
        if self.login is not None:
            return  # It is answered when it has been checked.
        if context.sync_write is not None:
            assert isinstance(answer, Response), "a write has one answer"
            self._defer(context, context.sync_write, frame, answer)
        else:
            self._answer(context, answer)

    def _handle_answer(self, frame: Frame) -> None:
        """The peer answers a request of ours: there are some on DCP connections only."""
        if self.dcp is None or frame.magic.is_request:
            return
        if frame.opcode in COUNTED and frame.specific not in (Status.SUCCESS, Status.KEY_ENOENT):
            # The consumer has not taken what it was sent; that it has closed the stream meanwhile is no fault.
            raise CloseSession
        if frame.opcode == Opcode.DCP_NOOP:
            self.dcp.on_noop_answer()
        elif frame.opcode == Opcode.DCP_SET_VBUCKET_STATE:
            self._reply += self.dcp.on_hand_over_answer(frame.opaque)
            self.dcp_changed()

    def open_dcp(self, connection: ProducerConnection | ConsumerConnection) -> None:
        """Make this a DCP connection. An older one of the same name has to go."""
        assert self.bucket is not None
        # Names are unique (kv_engine, DCP docs, "Open Connection"); the recorded servers close the older one, too.
        older = self.bucket.dcp_sessions.pop(connection.name, None)
        if older is not None:
            older.end_dcp()
        self.bucket.dcp_sessions[connection.name] = self
        if isinstance(connection, ProducerConnection):
            self.dcp = connection
            self._log_dcp("opened", LogEvent.DCP_OPENED)
            return
        self.consumer = connection
        self._log_dcp("opened", LogEvent.DCP_OPENED)
        connection.on_other = self._handle
        connection.start()

    def end_dcp(self) -> None:
        """Have nothing more happen by this DCP connection, and close it. What it receives, others may at once."""
        self._is_over = True
        if self.consumer is not None:
            self.consumer.disconnect()
        self.on_replaced()

    def dcp_changed(self) -> None:
        """A stream has changed the bucket: there is something to commit."""
        if self.bucket is not None:
            self.bucket.sync_writes.evaluate_all()
            self.bucket.on_change()

    def disconnected(self) -> None:
        """The connection is gone."""
        for bucket in self.service.buckets.values():
            bucket.range_scans.end_of(self)
        if self.bucket is not None:
            self.bucket.range_scans.end_of(self)  # It may have been dropped, and be none of the service's any more.
            self.bucket.ended.requests += self.requests
        connection = self.dcp or self.consumer
        if connection is None or self.bucket is None:
            return
        if self.bucket.dcp_sessions.get(connection.name) is self:
            del self.bucket.dcp_sessions[connection.name]
        if self.dcp is not None:
            self.bucket.ended.add_connection(self.dcp)
        self._log_dcp("closed", LogEvent.DCP_CLOSED)
        connection.disconnect()

    def _log_dcp(self, what: str, event: LogEvent) -> None:
        about = self.log_fields()
        logger.info(
            "bucket %s: DCP connection %s from %s %s",
            *(about["bucket"], about["connection"], self.peer, what),
            extra={**about, **fields(event=event)},
        )

    def _check_allowed(self, request: Request) -> None:
        if type(request) not in HANDLERS:
            raise RequestRefused(Status.UNKNOWN_COMMAND)
        if any(info.id not in _SERVED_INFOS for info in request.frame_infos):
            raise RequestRefused(Status.UNKNOWN_FRAME_INFO)
        if type(request) in NEEDS_NO_LOGIN:
            return
        if not self._may_do(NEEDED.get(type(request), Action.READ), request):
            raise RequestRefused(Status.EACCESS)
        if type(request) in READS_AS_WELL and not self._may_do(Action.READ, request):
            raise RequestRefused(Status.EACCESS)
        if self.bucket is not None and self.bucket.is_waiting and type(request) not in SERVED_WHILE_WAITING:
            raise RequestRefused(Status.ETMPFAIL, "the node asks the others first; try again")

    def _may_do(self, action: Action, request: Request) -> bool:
        """Whether the user has the right on the whole bucket, or on the collection of the document that it is about."""
        if self.may(action):
            return True
        if self.user is None or self.bucket is None or not hasattr(request, "collection_id"):
            return False
        # Where no collections are negotiated, documents are in the default one.
        found = self.bucket.bucket.manifest.collection_by_id(request.collection_id or DEFAULT_COLLECTION)
        if found is None:
            return False
        names = {"scope": found[0].name, "collection": found[1].name}
        return self.service.users.may(self.user, action, self.bucket.name, **names)

    # --- out ------------------------------------------------------------------------------------------------------

    def _refuse_frame(self, frame: Frame, refused: RequestRefused) -> None:
        stand_in = Request(opaque=frame.opaque)
        context = Context(self.service, self, stand_in)
        response = self._refusal(context, refused, opcode=frame.opcode)
        self._write(response, commit=0)

    def _refusal(self, context: Context, refused: RequestRefused, *, opcode: int | None = None) -> Response:
        status = status_for_peer(
            refused.status, xerror=self.has(Feature.XERROR), collections=self.negotiated.collections
        )
        if status is None:
            raise CloseSession
        refused.status = status
        return context.error(refused, opcode=opcode)

    def _answer(self, context: Context, answer: Response | Sequence[Response] | None) -> None:
        responses = answer if isinstance(answer, Sequence) else (answer,)
        for response in responses:
            if response is None or self._is_silent(context.request.opcode, response.status):
                # The next answer still has to wait for what this one would have waited for.
                self._reply_commit = max(self._reply_commit, context.commit)
                continue
            self._write(response, commit=context.commit)
        self._reply += context.after

    def _defer(self, context: Context, write: SyncWrite, frame: Frame, response: Response) -> None:
        """Answer when the durable write is decided."""
        deferred = DeferredAnswer(
            write=write,
            bucket=context.bucket_service,
            answer=lambda outcome: self._answer_to(context, response, outcome),
            received_s=self._received_s,
        )
        self._deferrals.add(frame, deferred)
        if self.has(Feature.UNORDERED_EXECUTION):
            self.unordered.append(deferred)
        else:
            self.flush()
            self.outgoing.append(deferred)

    def _answer_to(self, context: Context, response: Response, outcome: WriteOutcome) -> bytes | None:
        """What is sent when a durable write is decided; None where that can't be said and the connection has to end."""
        if outcome.status != Status.SUCCESS:
            try:
                return self._refusal(context, RequestRefused(outcome.status)).encode()
            except CloseSession:
                return None
        if self._is_silent(context.request.opcode, response.status):
            return b""
        if getattr(response, "seqno", None) is not None:
            # It has a mutation token, which was made when only the prepare's seqno was known.
            response = replace(response, seqno=outcome.seqno)  # type: ignore[call-arg]
        return response.encode()

    @staticmethod
    def _is_silent(opcode: int, status: Status) -> bool:
        if status == Status.SUCCESS:
            return opcode in SILENT_ON_SUCCESS
        return status == Status.KEY_ENOENT and opcode in SILENT_ON_MISS

    def _write(self, response: Response, *, commit: int) -> None:
        self._reply += response.encode()
        self._reply_commit = max(self._reply_commit, commit)

    def flush(self) -> None:
        """Close the answers so far into one piece to send. Needed before the bucket changes: commits are its own."""
        # Quiet writes leave nothing to send, and still what comes next has to wait for them.
        if self._reply or self._reply_commit:
            self.outgoing.append(Outgoing(bytes(self._reply), self._reply_commit, self.bucket, self._received_s))
            self._unsent_bytes += len(self._reply)
            self._reply.clear()
            self._reply_commit = 0

    def to_send(self, piece: Outgoing | DeferredAnswer) -> bytes:
        """The bytes of a piece that is sent now: where tracing is agreed on, with the time that the node took."""
        if not self.has(Feature.TRACING):
            return piece.data
        took = server_duration((self.service.now_s() - piece.received_s) * 1e6)
        return with_framing_extras(piece.data, encode_frame_infos((took,)))
