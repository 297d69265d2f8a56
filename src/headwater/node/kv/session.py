"""One key-value connection, sans-IO: bytes in, answers out, in order.

The session answers requests in the order in which they arrive. It holds back an answer that shows something not yet
durable (unless `ack_when_durable` is off), and all that follow: `Outgoing` has the commit it waits for. The answer to a
durable write waits for its outcome (`DeferredAnswer`); a peer that has negotiated unordered execution gets other
answers meanwhile.

The session decides what is sent: call `data_to_send` and `produce_into`. `kv_listener` only moves the bytes, and
reports commits that became durable (`on_durable`) or failed (`on_void`).

Kernels handle runs of plain sets, which bulk loads consist of, and of reads (`store.set_run`, `store.read_run`);
everything else goes message by message through the table of handlers.

One call of `receive_data` does a bounded amount of work, so that a connection can't keep the others waiting: the
remaining requests wait for the next turn. They also wait for a worker to do what takes longer than a turn, for a log-in
to be checked, for a durable write to be decided, for the peer to read its answers, and, if they write, for room in the
commit. `waits_for` says which.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial

import numpy as np

from headwater.errors import MalformedMessage, StoreError, UnknownOpcode
from headwater.kernels.memory import Bytes
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.login_checks import LoginVerdict
from headwater.node.auth.users import Action
from headwater.node.consumer.connection import ConsumerConnection
from headwater.node.durability import SyncWrite, WriteOutcome
from headwater.node.kv import handlers
from headwater.node.kv.answers import Deferrals, DeferredAnswer, NotDurable, Outgoing
from headwater.node.kv.context import (
    REQUEST_WORK,
    TURN_WORK,
    CloseSession,
    Context,
    Postponed,
    SessionState,
    WorkerTask,
)
from headwater.node.options import ServerLimits
from headwater.node.producer.connection import ProducerConnection
from headwater.node.producer.outbound import Output
from headwater.node.service import BucketService, Service
from headwater.protocol import frames
from headwater.protocol.features import Feature, Magic, Opcode
from headwater.protocol.flow_control import COUNTED
from headwater.protocol.frames import HEADER_BYTES, Frame, FrameBuffer, RequestInfo
from headwater.protocol.kernels.frame_runs import with_framing_extras
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import ErrorResponse, Request, Response
from headwater.protocol.numbers import DEFAULT_COLLECTION, FRAME_BODY_BYTES_MAX
from headwater.protocol.status import RequestRefused, Status, status_for_peer
from headwater.store.bucket import Bucket
from headwater.store.set_run import apply_set_run

SMALL_WRITER_BYTES = 64 * 1024
"""A connection with no more than this in the pending commit never waits for the commit to become smaller."""
STRANGER_BYTES_MAX = 16 * 1024
"""How much of one request a peer may send before it has logged in, as in Couchbase."""
STREAM_WORK = TURN_WORK // 256
"""The work of opening one stream in a run of similar stream requests."""
_LONG_ANSWER_BYTES = 256 * 1024
_LONG_READ_BYTES = 64 * 1024
"""After a read from the socket of this size there is probably more to read."""

logger = logging.getLogger(__name__)

SILENT_ON_SUCCESS = frozenset(
    {
        Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ, Opcode.DELETEQ, Opcode.INCREMENTQ, Opcode.DECREMENTQ,
        Opcode.APPENDQ, Opcode.PREPENDQ, Opcode.SETQ_WITH_META, Opcode.ADDQ_WITH_META, Opcode.DELQ_WITH_META,
        Opcode.FLUSHQ, Opcode.QUITQ,
    }
)  # fmt: skip
SILENT_ON_MISS = frozenset({Opcode.GETQ, Opcode.GETKQ, Opcode.GATQ, Opcode.GETQ_META})
_OPCODES_WITHOUT_LOGIN = frozenset(request.opcode for request in handlers.NEEDS_NO_LOGIN)
WRITE_OPCODES = frozenset(request.opcode for request, action in handlers.NEEDED.items() if action is Action.WRITE)
LARGE_OPCODES = frozenset(request.opcode for request in handlers.LARGE_REQUESTS)
SMALL_BODY_BYTES_MAX = 128 * 1024
"""The longest body, including the key, of a request without a document or a config. Longer ones are refused by their
headers: no valid request is that long."""
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
    """There is no whole request."""
    FOR_TURN = auto()
    """For its next turn, after those of other connections."""
    FOR_WORK = auto()
    """For a worker to do what the request needs."""
    FOR_LOGIN = auto()
    """For an earlier log-in to be checked."""
    FOR_OUTCOME = auto()
    """For a durable write to be decided."""
    FOR_READING = auto()
    """For the peer to read its answers, or for the commit that they wait for."""
    FOR_ROOM = auto()
    """For a commit, because too much is not durable yet for one more write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostponedRequest:
    """A request that needs the result of a task. The driver of the session runs the task."""

    frame: Frame
    context: Context
    task: WorkerTask


class KvSession(SessionState):
    """One connection. See the module's docstring."""

    def __init__(
        self, service: Service, *, peer: str, allows_plain: bool, limits: ServerLimits | None = None,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`on_replaced` is called to close the connection, as when a newer DCP connection takes its name."""
        super().__init__(service, peer=peer, allows_plain=allows_plain)
        self.outgoing: deque[Outgoing | DeferredAnswer] = deque()
        self.unordered: list[DeferredAnswer] = []
        """Answers to durable writes that later answers may overtake."""
        self.requests = 0
        self.waits_for = Waits.FOR_NOTHING
        """What the remaining requests wait for. When that has happened, call `receive_data` again with no bytes."""
        self._limits = limits or ServerLimits()
        self.in_transport_bytes = 0
        """Answers in the transport that the peer has not read yet. The driver of the session sets it."""
        self._unsent_bytes = 0
        """`unsent_bytes`, kept up to date during a call of `receive_data`."""
        self._writes = NotDurable()
        self.postponed: PostponedRequest | None = None
        """The request that a worker works for. Later requests wait until it is answered."""
        self.work_done = 0
        """The work of all requests and streams so far, in the unit of `TURN_WORK`."""
        self._turn_end_work = TURN_WORK
        """The turn ends when `work_done` reaches this."""
        self._on_replaced = on_replaced
        self._must_look = True
        """Whether idle streams may have something to send that no commit was reported for (`on_durable`)."""
        self._is_over = False
        """Whether the connection is closing, and drops what it still receives."""
        self._frames = FrameBuffer()
        self._dropped_bytes = 0
        """How many bytes are still to be received and dropped of a request that was refused by its header."""
        self._deferrals = Deferrals()
        self._held: Frame | None = None
        """A request that waits for a durable write."""
        self._reply = bytearray()
        self._reply_commit = 0
        self._received_s = 0.0
        """When the requests that are being handled were received."""

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Handle received bytes for one turn. If whole requests may remain, `waits_for` says what they wait for.

        Raises:
            CloseSession: the connection must be closed.
            RemoteProtocolError: the connection must be closed because of what the peer sent.
        """
        self.service.notice_pause()
        self._must_look = True
        if data:
            self._received_s = self.service.now_s()
        if self._is_over:
            raise CloseSession
        if self.consumer is not None:
            self._receive_as_consumer(self.consumer, data)
        else:
            self._handle_turn(data)
        self._frames.free_taken()
        has_had_turn = self.work_done >= self._turn_end_work or len(data) >= _LONG_READ_BYTES
        if has_had_turn and not self.is_held_back and not self.is_flooded:
            # Pause reading: uvloop goes on reading one socket while it has data. Other connections get their turns
            # first, even if each request of this one takes a whole turn.
            self.waits_for = Waits.FOR_TURN

    def _handle_turn(self, data: bytes | bytearray | memoryview) -> None:
        if self._dropped_bytes:
            dropped = min(self._dropped_bytes, len(data))
            self._dropped_bytes -= dropped
            data = memoryview(data)[dropped:]
        self._frames.receive_data(data)
        self._unsent_bytes = self.unsent_bytes
        self._turn_end_work = self.work_done + TURN_WORK
        try:
            while (waits_for := self._next_waits_for()) is Waits.FOR_NOTHING:
                if self._handle_run():
                    continue
                frame = self._next_frame()
                if frame is None:
                    break
                self._handle(frame)
                if self.consumer is not None:
                    # This request has opened it: the bytes after the request are for the consumer.
                    with self._frames.peek() as view:
                        rest = bytes(view)
                    self._frames.skip(len(rest))
                    self._receive_as_consumer(self.consumer, rest)
                    return
        finally:
            self.flush()
        self.waits_for = waits_for if self._held is None else self._next_waits_for()

    @property
    def is_held_back(self) -> bool:
        """Whether remaining requests wait for something."""
        return self.waits_for is not Waits.FOR_NOTHING

    @property
    def may_resume(self) -> bool:
        """Whether `receive_data` would handle the remaining requests, as far as the session knows."""
        match self.waits_for:
            case Waits.FOR_TURN:
                return True
            case Waits.FOR_READING:
                return self.unsent_bytes <= self._limits.unsent_bytes_max
            case Waits.FOR_OUTCOME:
                return self._next_waits_for() is not Waits.FOR_OUTCOME
            case Waits.FOR_ROOM:
                return self._has_room()
        return False

    @property
    def wants_data(self) -> bool:
        """Whether to continue reading: not while requests remain, or too many answers are unsent."""
        is_full = self.consumer is not None and self.consumer.is_full
        return not is_full and not self.is_held_back and self.unsent_bytes <= self._limits.unsent_bytes_max

    @property
    def is_flooded(self) -> bool:
        """Whether a peer that has not logged in has sent too much of a request."""
        return self.user is None and not self.is_held_back and self._frames.buffered_bytes > STRANGER_BYTES_MAX

    @property
    def held_bytes(self) -> int:
        """The bytes held for the peer: requests that are incomplete or wait, received changes, and answers."""
        waiting = 0 if self._held is None else len(self._held.value)
        if self.postponed is not None:
            waiting += len(self.postponed.frame.value)
        changes = 0 if self.consumer is None else self.consumer.held_bytes
        return self._frames.held_bytes + waiting + changes + self._outgoing_bytes

    def free(self) -> None:
        """Free what is held for the peer, because the connection is closed: nothing more is received or sent."""
        self._is_over = True
        self._frames, self._held, self.login, self.postponed = FrameBuffer(), None, None, None
        self._deferrals, self._reply = Deferrals(), bytearray()
        self.outgoing.clear()
        self.unordered.clear()

    def _next_waits_for(self) -> Waits:
        if self.login is not None:
            return Waits.FOR_LOGIN
        if self.postponed is not None:
            return Waits.FOR_WORK
        if self._held is None and not self._frames.buffered_bytes:
            return Waits.FOR_NOTHING
        if self._deferrals.is_full or (self._held is not None and self._must_wait(self._held)):
            return Waits.FOR_OUTCOME
        if self._unsent_bytes + len(self._reply) > self._limits.unsent_bytes_max:
            return Waits.FOR_READING
        if self._held is None and not self._has_room():
            return Waits.FOR_ROOM
        if self.work_done >= self._turn_end_work:
            return Waits.FOR_TURN
        return Waits.FOR_NOTHING

    def _has_room(self) -> bool:
        """Whether the next request does not write, or there is room for it within the limits of undurable bytes."""
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
        if self._held is None and self.user is not None:  # A peer without a user is dropped instead: `is_flooded`.
            self._refuse_too_long()
        frame, self._held = self._held or self._frames.next_frame(), None
        if frame is not None and self._must_wait(frame):
            self._held = frame
            return None
        return frame

    def _refuse_too_long(self) -> None:
        """Refuse requests that are longer than any valid one of their kind as soon as their headers arrive. Drop the
        rest of them."""
        while self._frames.buffered_bytes >= HEADER_BYTES:
            with self._frames.peek() as view:
                header = bytes(view[:HEADER_BYTES])
            body_bytes = int.from_bytes(header[8:12])
            is_request = header[0] in (Magic.REQUEST, Magic.FLEXIBLE_REQUEST) and body_bytes <= FRAME_BODY_BYTES_MAX
            if not is_request or body_bytes <= SMALL_BODY_BYTES_MAX or header[1] in LARGE_OPCODES:
                return
            self.requests += 1
            self.work_done += REQUEST_WORK
            refused = RequestRefused(Status.EINVAL, f"this request has at most {SMALL_BODY_BYTES_MAX} bytes")
            context = Context(self.service, self, Request(opaque=int.from_bytes(header[12:16])))
            self._write(self._refusal(context, refused, opcode=header[1]), commit=0)
            here = min(HEADER_BYTES + body_bytes, self._frames.buffered_bytes)
            self._dropped_bytes = HEADER_BYTES + body_bytes - here
            self._frames.skip(here)

    def _must_wait(self, frame: Frame) -> bool:
        return self._deferrals.must_wait(frame, in_order=not self.has(Feature.UNORDERED_EXECUTION))

    def finish_login(self, verdict: LoginVerdict) -> None:
        """Answer the log-in that was checked. Requests that wait for it are for the next turn."""
        login, self.login = self.login, None
        assert login is not None
        try:
            answer = login.conclude(verdict)
        except RequestRefused as refused:
            answer = self._refusal(login.context, refused)
        self._write(answer, commit=0)
        self.flush()
        self.waits_for = Waits.FOR_TURN if self._frames.buffered_bytes else Waits.FOR_NOTHING

    def finish_work(self) -> None:
        """Continue the request whose task is done. It may need another one.

        Raises:
            CloseSession: the connection must be closed.
        """
        postponed, self.postponed = self.postponed, None
        assert postponed is not None
        self._turn_end_work = self.work_done + TURN_WORK
        try:
            self._count_work(postponed.frame, partial(self._serve, postponed.frame, postponed.context))
        finally:
            self.flush()
        self.waits_for = Waits.FOR_TURN if self.postponed is None else Waits.FOR_WORK

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

    def _handle_run(self) -> bool:
        """Handle a run of plain sets, of reads or of stream requests at once. Returns False if there is none."""
        if self.bucket is None or self.bucket.is_waiting or self._held is not None:
            return False
        if self._frames.buffered_bytes < HEADER_BYTES:
            return False
        with self._frames.peek() as view:
            # Only for a whole request: the kernels prepare for all received bytes, again with every piece of a request.
            if view[0] != Magic.REQUEST or HEADER_BYTES + int.from_bytes(view[8:12]) > len(view):
                return False
            if view[1] in (Opcode.SET, Opcode.SETQ):
                return self._apply_sets(self.bucket, np.frombuffer(view, dtype=np.uint8))
            if view[1] in _READS:
                return self._answer_reads(self.bucket, np.frombuffer(view, dtype=np.uint8))
            if view[1] == Opcode.DCP_STREAM_REQUEST and self.dcp is not None:
                return self._open_streams(self.dcp, view)
        return False

    def _apply_sets(self, bucket: BucketService, data: Bytes) -> bool:
        if not self.may(Action.WRITE) or bucket.settings.durability_min_level:
            return False
        before = bucket.bucket.pending_bytes
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
            self._add_answers(run.responses, commit=bucket.bucket.pending_commit if bucket.ack_when_durable else 0)
            self._writes.add(bucket, before)
            self.work_done += TURN_WORK if run.is_cut_short else run.consumed_bytes
            bucket.on_change()
        return run.sets > 0

    def _answer_reads(self, bucket: BucketService, data: Bytes) -> bool:
        if not self.may(Action.READ):
            return False
        run = bucket.reads.answer_run(data, collections=self.negotiated.collections, datatypes=self.datatypes)
        self._frames.skip(run.consumed_bytes)
        self.requests += run.reads
        self._add_answers(run.responses, commit=run.commit if bucket.ack_when_durable else 0)
        self.work_done += run.consumed_bytes + len(run.responses) + run.walked_bytes
        return run.reads > 0

    def _open_streams(self, dcp: ProducerConnection, data: memoryview) -> bool:
        # Unsent answers may be those to durable writes, and a request without a key has to wait for these.
        if not self.may(Action.STREAM) or self.outgoing:
            return False
        opened = dcp.accept_repeated(data, TURN_WORK // STREAM_WORK)
        self._frames.skip(opened.request_bytes)
        self.requests += opened.count
        self._add_answers(opened.answers, commit=0)
        self.work_done += opened.count * STREAM_WORK
        return opened.count > 0

    def _handle(self, frame: Frame) -> None:
        """Handle one request, and count its work."""
        self._count_work(frame, partial(self._handle_frame, frame))

    def _count_work(self, frame: Frame, handle: Callable[[], int]) -> None:
        bucket, answered = self.bucket, self._unsent_bytes + len(self._reply)
        written = 0 if bucket is None else bucket.bucket.pending_bytes
        done = handle()
        if bucket is not None:
            written = self._writes.add(bucket, written)
        answered = self._unsent_bytes + len(self._reply) - answered
        self.work_done += REQUEST_WORK + len(frame.value) + answered + written + done

    def _handle_frame(self, frame: Frame) -> int:
        """Decode and serve one request. Returns its work beyond the lengths of the request and its answer."""
        self.requests += 1
        if frame.magic not in (Magic.REQUEST, Magic.FLEXIBLE_REQUEST):
            self._handle_answer(frame)
            return 0
        try:
            message = decode_message(frame, self.negotiated)
        except UnknownOpcode:
            self._refuse_frame(frame, RequestRefused(Status.UNKNOWN_COMMAND))
            return 0
        except MalformedMessage as error:
            self._refuse_frame(frame, RequestRefused(Status.EINVAL, error.reason))
            return 0
        assert isinstance(message, Request)
        return self._serve(frame, Context(self.service, self, message))

    def _serve(self, frame: Frame, context: Context) -> int:
        """Call the handler of a request, for the first time or after its task is done. Returns its work as
        `_handle_frame` does."""
        context.commit, context.work_done = 0, 0
        message = context.request
        try:
            self._check_allowed(message)
            answer = handlers.HANDLERS[type(message)](context, message)
        except Postponed as postponed:
            self.postponed = PostponedRequest(frame=frame, context=context, task=postponed.task)
            return context.work_done
        except RequestRefused as refused:
            answer = self._refusal(context, refused)
        except StoreError as error:
            # Stored data could not be read. kv_engine answers with a temporary failure, too.
            answer = self._refusal(context, RequestRefused(Status.ETMPFAIL, error.reason))
        if self.login is not None:
            return context.work_done  # `finish_login` answers when the log-in has been checked.
        if context.sync_write is not None:
            assert isinstance(answer, Response), "a write has one answer"
            self._defer(context, context.sync_write, frame, answer)
        else:
            self._answer(context, answer)
        return context.work_done

    def _handle_answer(self, frame: Frame) -> None:
        """Handle an answer to a request of this node, which sends requests on DCP connections only."""
        if self.dcp is None or frame.magic.is_request:
            return
        if frame.opcode in COUNTED and frame.specific not in (Status.SUCCESS, Status.KEY_ENOENT):
            # The consumer has refused a change. KEY_ENOENT is no fault: it has closed the stream meanwhile.
            raise CloseSession
        if frame.opcode == Opcode.DCP_NOOP:
            self.dcp.on_noop_answer()
        elif frame.opcode == Opcode.DCP_SET_VBUCKET_STATE:
            self._reply += self.dcp.on_hand_over_answer(frame.opaque)
            if self.bucket is not None:
                # The stream has changed the vbucket's state, which has to be committed.
                self.bucket.sync_writes.evaluate_all()
                self.bucket.on_change()

    def open_dcp(self, connection: ProducerConnection | ConsumerConnection) -> None:
        """Make this a DCP connection. Closes an older one of the same name."""
        assert self.bucket is not None
        # Names are unique (kv_engine, DCP docs, "Open Connection"). The recorded servers close the older one, too.
        older = self.bucket.dcp_sessions.pop(connection.name, None)
        if older is not None:
            older.end_dcp()
        self.bucket.dcp_sessions[connection.name] = self
        if isinstance(connection, ProducerConnection):
            self.dcp = connection
        else:
            self.consumer = connection
            connection.on_other = self._handle
            connection.start()
        self._log_dcp("opened", LogEvent.DCP_OPENED)

    def end_dcp(self) -> None:
        """Stop this DCP connection and close it. Others may receive its vbuckets immediately."""
        self._is_over = True
        if self.consumer is not None:
            self.consumer.disconnect()
        self._on_replaced()

    def disconnected(self) -> None:
        """The connection is closed. Break the session's reference cycles, so that no garbage collection has to."""
        self.free()
        self._on_replaced = lambda: None
        for bucket in self.service.buckets.values():
            bucket.range_scans.end_of(self)
        if self.bucket is not None:
            self.bucket.range_scans.end_of(self)  # A dropped bucket is not in `service.buckets` any more.
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
        self.dcp = self.consumer = None

    def _log_dcp(self, what: str, event: LogEvent) -> None:
        about = self.log_fields()
        logger.info(
            "bucket %s: DCP connection %s from %s %s",
            *(about["bucket"], about["connection"], self.peer, what),
            extra={**about, **fields(event=event)},
        )

    def _check_allowed(self, request: Request) -> None:
        if type(request) not in handlers.HANDLERS:
            raise RequestRefused(Status.UNKNOWN_COMMAND)
        if any(info.id not in _SERVED_INFOS for info in request.frame_infos):
            raise RequestRefused(Status.UNKNOWN_FRAME_INFO)
        if type(request) in handlers.NEEDS_NO_LOGIN:
            return
        needed = handlers.NEEDED.get(type(request))
        if needed is None or not self._may_do(needed, request):
            raise RequestRefused(Status.EACCESS)
        if type(request) in handlers.READS_AS_WELL and not self._may_do(Action.READ, request):
            raise RequestRefused(Status.EACCESS)
        if self.bucket is not None and self.bucket.is_waiting and type(request) not in handlers.SERVED_WHILE_WAITING:
            raise RequestRefused(Status.ETMPFAIL, "the node asks the others first; try again")

    def _may_do(self, action: Action, request: Request) -> bool:
        """Whether the user has the right for the whole bucket, or for the collection of the request's document."""
        if self.may(action):
            return True
        if self.user is None or self.bucket is None or not hasattr(request, "collection_id"):
            return False
        # Without collections negotiated, documents are in the default one.
        found = self.bucket.bucket.manifest.collection_by_id(request.collection_id or DEFAULT_COLLECTION)
        if found is None:
            return False
        names = {"scope": found[0].name, "collection": found[1].name}
        return self.service.users.may(self.user, action, self.bucket.name, **names)

    # --- out ------------------------------------------------------------------------------------------------------

    def _refuse_frame(self, frame: Frame, refused: RequestRefused) -> None:
        context = Context(self.service, self, Request(opaque=frame.opaque))
        self._write(self._refusal(context, refused, opcode=frame.opcode), commit=0)

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
                # The next answer has to wait for the commit that this one would have waited for.
                self._reply_commit = max(self._reply_commit, context.commit)
                continue
            self._write(response, commit=context.commit)
        self._reply += context.after

    def _defer(self, context: Context, write: SyncWrite, frame: Frame, response: Response) -> None:
        """Answer when the durable write is decided. Do not keep the request until then: it may be large."""
        opcode, bare = frame.opcode, Context(self.service, self, Request(opaque=frame.opaque))
        deferred = DeferredAnswer(
            write=write,
            bucket=context.bucket_service,
            answer=lambda outcome: self._answer_to(bare, opcode, response, outcome),
            received_s=self._received_s,
        )
        self._deferrals.add(frame, deferred)
        if self.has(Feature.UNORDERED_EXECUTION):
            self.unordered.append(deferred)
        else:
            self.flush()
            self.outgoing.append(deferred)

    def _answer_to(self, context: Context, opcode: int, response: Response, outcome: WriteOutcome) -> bytes | None:
        """The answer to a decided durable write; None if the peer knows no status for it, and must be disconnected."""
        if outcome.status != Status.SUCCESS:
            try:
                return self._refusal(context, RequestRefused(outcome.status), opcode=opcode).encode()
            except CloseSession:
                return None
        if self._is_silent(opcode, response.status):
            return b""
        if getattr(response, "seqno", None) is not None:
            # The mutation token was made when only the prepare's seqno was known.
            response = replace(response, seqno=outcome.seqno)  # type: ignore[call-arg]
        return response.encode()

    @staticmethod
    def _is_silent(opcode: int, status: Status) -> bool:
        if status == Status.SUCCESS:
            return opcode in SILENT_ON_SUCCESS
        return status == Status.KEY_ENOENT and opcode in SILENT_ON_MISS

    def _write(self, response: Response, *, commit: int) -> None:
        self._add_answers(response.encode(), commit=commit)

    def _add_answers(self, data: bytes, *, commit: int) -> None:
        commit = max(self._reply_commit, commit)
        if len(data) < _LONG_ANSWER_BYTES:
            self._reply += data
            self._reply_commit = commit
            return
        # Queue it as a piece of its own, to avoid copying megabytes.
        if self._reply:
            self.flush()
        self._reply_commit = 0
        self.outgoing.append(Outgoing(data, commit, self.bucket, self._received_s))
        self._unsent_bytes += len(data)

    def flush(self) -> None:
        """Queue the answers so far as one piece to send. Needed before the bucket changes: commits belong to it."""
        # Quiet writes have no answer, but the next answer still has to wait for their commit.
        if self._reply or self._reply_commit:
            self.outgoing.append(Outgoing(bytes(self._reply), self._reply_commit, self.bucket, self._received_s))
            self._unsent_bytes += len(self._reply)
            self._reply.clear()
            self._reply_commit = 0

    # --- sending --------------------------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        return self.in_transport_bytes + self._outgoing_bytes

    @property
    def _outgoing_bytes(self) -> int:
        return sum(len(piece.data) for piece in self.outgoing) if self.outgoing else 0

    @property
    def is_finished(self) -> bool:
        """Whether to close the connection: it has ended, or the peer has quit and everything is sent."""
        return self._is_over or (self.is_quitting and not self.outgoing and not self.unordered)

    def data_to_send(self) -> bytes:
        """The next answers that may be sent; empty if there are none now. Call this again while the peer reads."""
        while self.outgoing and self.outgoing[0].may_be_sent:
            data = self._encode(self.outgoing.popleft())
            if data or self._is_over:
                return data
        if self.unordered:
            ready = [answer for answer in self.unordered if answer.may_be_sent]
            if ready:
                self.unordered = [answer for answer in self.unordered if not answer.may_be_sent]
                return b"".join(self._encode(answer) for answer in ready)
        if self.consumer is not None and not self.outgoing:
            self.consumer.on_durable()
            return self.consumer.data_to_send()
        return b""

    def _encode(self, piece: Outgoing | DeferredAnswer) -> bytes:
        """The bytes of a piece that is sent now. With tracing negotiated, they include the time that the node took."""
        if isinstance(piece, DeferredAnswer) and piece.ends_connection:
            self._is_over = True
        if not self.has(Feature.TRACING):
            return piece.data
        took = frames.server_duration((self.service.now_s() - piece.received_s) * 1e6)
        return with_framing_extras(piece.data, frames.encode_frame_infos((took,)))

    def produce_into(self, output: Output, bytes_max: int) -> bool:
        """Write what the streams have to send, unless answers are unsent. Returns whether they have more to send."""
        if self.dcp is None or self.outgoing:
            return False
        must_look, self._must_look = self._must_look, False
        self.dcp.produce_into(output, bytes_max, is_awake=not must_look)
        self.work_done += output.used
        return self.dcp.has_more

    def on_durable(self, changed: Mapping[Bucket, Collection[int] | None]) -> bool:
        """Commits became durable. Returns whether there may be something to send.

        `changed` has the vbuckets with new changes of each bucket; None if any may have changed.
        """
        vbuckets = None if self.dcp is None else changed.get(self.dcp.bucket)
        has_answers = bool(self.outgoing or self.unordered)
        if self.dcp is not None and vbuckets is not None:
            # Most commits change few vbuckets, and most connections have no stream that waits for one of them.
            return self.dcp.wake(vbuckets) or has_answers
        self._must_look = True
        if self.consumer is not None:
            self.consumer.on_durable()
        return has_answers or self.dcp is not None or self.consumer is not None

    def on_void(self, bucket: BucketService, commits: Collection[int]) -> bool:
        """Commits of a bucket could not be written: turn the answers that wait for them into temporary failures.

        Returns whether there may be something to send.

        Raises:
            CloseSession: the peer can only be informed by closing the connection.
        """
        if self.consumer is not None and self.bucket is bucket:
            # This node has lost changes that the producer has sent: its streams have to be requested again.
            self.consumer.on_void()
            raise CloseSession
        # Only `Outgoing`: `SyncWrites.on_void` has updated the writes of deferred answers.
        void = {
            at: piece
            for at, piece in enumerate(self.outgoing)
            if isinstance(piece, Outgoing) and piece.bucket is bucket and piece.commit in commits
        }
        if not all(piece.data for piece in void.values()):
            # A quiet write has failed, and has no answer that could report it.
            raise CloseSession
        for at, piece in void.items():
            self.outgoing[at] = Outgoing(_failed_answers(piece.data), 0, None, piece.received_s)
        return bool(self.outgoing or self.unordered or self.consumer)

    def on_bucket_dropped(self) -> None:
        """The vbuckets of the bucket are gone: all streams, also idle ones, have to send their ends."""
        self._must_look = True

    def heard(self, now_s: float) -> None:
        """The peer has sent a whole request."""
        if self.dcp is not None:
            self.dcp.heard(now_s)

    def tick(self, now_s: float) -> None:
        """Keep a DCP connection alive: `data_to_send` has a noop if one is due.

        Raises:
            UnexpectedMessage: the consumer has stopped answering.
            ConnectionFailed: the producer has stopped sending.
        """
        if self.consumer is not None:
            self.consumer.tick(now_s)
        if self.dcp is not None:
            self._must_look = True  # A vbucket may have changed without a commit.
            self._reply += self.dcp.tick(now_s)
            self.flush()


def _failed_answers(data: bytes) -> bytes:
    """Replace answers by temporary failures, except answers about the connection, which do not depend on data."""
    failed = bytearray()
    for frame in frames.decode_frames(data):
        if frame.opcode in _OPCODES_WITHOUT_LOGIN:
            failed += frame.encode()
        else:
            failed += ErrorResponse(opcode=Opcode(frame.opcode), opaque=frame.opaque, status=Status.ETMPFAIL).encode()
    return bytes(failed)
