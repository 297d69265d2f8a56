"""One key-value connection, sans-IO: bytes in, answers out, in order.

Requests are handled as they come and answered in their order. An answer that tells of something not yet durable is
held back, and with it all that follow: `Outgoing` says which commit it waits for, and whoever runs the session sends
it when the bucket has published that commit.

Runs of plain sets, which is what bulk loads consist of, are handled by a kernel (`set_run`); everything else goes
message by message through the table of handlers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.errors import MalformedMessage, UnknownOpcode
from headwater.node.auth.users import Action
from headwater.node.kv.context import CloseConnection, Context, Refused
from headwater.node.kv.handlers import HANDLERS
from headwater.node.kv.permissions import NEEDED, NEEDS_NO_LOGIN
from headwater.node.kv.service import BucketService, Service
from headwater.node.kv.set_run import apply_set_run
from headwater.node.limits import ServerLimits
from headwater.node.producer.connection import ProducerConnection
from headwater.protocol.datatype import Datatype
from headwater.protocol.features import Feature, Negotiated
from headwater.protocol.frame_info import RequestInfo
from headwater.protocol.frames import HEADER_BYTES, Frame, FrameBuffer
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.opcodes import Magic, Opcode
from headwater.protocol.sasl import ScramServer
from headwater.protocol.status import Status, status_for_peer

SILENT_ON_SUCCESS = frozenset(
    {
        Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ, Opcode.DELETEQ, Opcode.INCREMENTQ, Opcode.DECREMENTQ,
        Opcode.APPENDQ, Opcode.PREPENDQ, Opcode.FLUSHQ, Opcode.QUITQ,
    }
)  # fmt: skip
SILENT_ON_MISS = frozenset({Opcode.GETQ, Opcode.GETKQ, Opcode.GATQ, Opcode.GETQ_META})
_UNSENT_BYTES_MAX = ServerLimits().unsent_bytes_max
_SERVED_INFOS = frozenset(
    {RequestInfo.BARRIER, RequestInfo.DURABILITY, RequestInfo.PRESERVE_TTL, RequestInfo.STREAM_ID}
)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Bytes to send, once the bucket has made the commit durable; 0 for at once."""

    data: bytes
    commit: int
    bucket: BucketService | None

    @property
    def may_be_sent(self) -> bool:
        return self.bucket is None or self.commit <= self.bucket.bucket.durable_commit


class KvSession:
    """The state of one connection."""

    def __init__(
        self, service: Service, *, peer: str, allows_plain: bool, unsent_bytes_max: int = _UNSENT_BYTES_MAX
    ) -> None:
        self.service = service
        self.peer = peer
        self.allows_plain = allows_plain
        """Passwords may come as they are: the way here is encrypted, or does not leave the machine."""
        self.negotiated = Negotiated()
        self.agent = ""
        self.user: str | None = None
        self.scram: ScramServer | None = None
        self.bucket: BucketService | None = None
        self.outgoing: deque[Outgoing] = deque()
        self.requests = 0
        self.is_quitting = False
        """The peer has said goodbye: close once everything is sent."""
        self.is_held_back = False
        """Requests wait for answers to be sent: call `receive_data` again, with nothing, when some have been."""
        self._unsent_bytes_max = unsent_bytes_max
        self._unsent_bytes = 0
        """In `outgoing`, as far as a call of `receive_data` knows."""
        self.dcp: ProducerConnection | None = None
        """Set once the connection has been opened as a DCP connection."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when a newer DCP connection of the same name takes this one's place."""
        self._frames = FrameBuffer()
        self._reply = bytearray()
        self._reply_commit = 0

    def has(self, feature: Feature) -> bool:
        return feature in self.negotiated.features

    @property
    def understands_json(self) -> bool:
        return self.has(Feature.JSON)

    def may(self, action: Action) -> bool:
        bucket = self.bucket.name if self.bucket else None
        return self.user is not None and self.service.users.may(self.user, action, bucket)

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Handle what has come. Raises `CloseConnection` or a `RemoteProtocolError` where the connection is to end.

        What was answered before that is in `outgoing`. A short request may have a long answer, so requests beyond what
        may be unsent are left for later (`is_held_back`).
        """
        self.is_held_back = False
        self._unsent_bytes = sum(len(piece.data) for piece in self.outgoing)
        self._frames.receive_data(data)
        try:
            self._handle_sets()
            while self._has_room and (frame := self._frames.next_frame()) is not None:
                self._handle(frame)
                self._handle_sets()
        finally:
            self.flush()
        self.is_held_back = not self._has_room and self._frames.buffered_bytes > 0

    @property
    def _has_room(self) -> bool:
        return self._unsent_bytes + len(self._reply) <= self._unsent_bytes_max

    @property
    def unhandled_bytes(self) -> int:
        """What has come and is not a whole request yet, or is held back."""
        return self._frames.buffered_bytes

    def _handle_sets(self) -> None:
        """Hand a run of plain sets to the kernel."""
        if self.bucket is None or self._frames.buffered_bytes < HEADER_BYTES or not self.may(Action.WRITE):
            return
        with self._frames.peek() as view:
            if view[0] != Magic.REQUEST or view[1] not in (Opcode.SET, Opcode.SETQ):
                return
            run = apply_set_run(
                self.bucket,
                np.frombuffer(view, dtype=np.uint8),
                collections=self.negotiated.collections,
                mutation_tokens=self.has(Feature.MUTATION_SEQNO),
                now_ns=self.service.now_ns(),
            )
        self._frames.skip(run.consumed_bytes)
        if run.sets:
            self.requests += run.sets
            self._reply += run.responses
            if self.bucket.ack_when_durable:
                self._reply_commit = max(self._reply_commit, self.bucket.bucket.pending.number)
            self.bucket.on_change()

    def _handle(self, frame: Frame) -> None:
        self.requests += 1
        if frame.magic not in (Magic.REQUEST, Magic.FLEXIBLE_REQUEST):
            self._handle_answer(frame)
            return
        try:
            message = decode_message(frame, self.negotiated)
        except UnknownOpcode:
            self._refuse_frame(frame, Refused(Status.UNKNOWN_COMMAND))
            return
        except MalformedMessage as error:
            self._refuse_frame(frame, Refused(Status.EINVAL, error.reason))
            return
        assert isinstance(message, Request)
        context = Context(self.service, self, message)
        try:
            self._check_allowed(message)
            answer = HANDLERS[type(message)](context, message)
        except Refused as refused:
            answer = self._refusal(context, refused)
        self._answer(context, answer)

    def _handle_answer(self, frame: Frame) -> None:
        """The peer answers a request of ours: there are some on DCP connections only."""
        if self.dcp is None or frame.magic.is_request:
            return
        if frame.opcode == Opcode.DCP_NOOP:
            self.dcp.on_noop_answer()
        elif frame.opcode == Opcode.DCP_SET_VBUCKET_STATE:
            self._reply += self.dcp.on_hand_over_answer(frame.opaque)
            self.dcp_changed()

    def open_dcp(self, connection: ProducerConnection) -> None:
        """Make this a DCP connection. An older one of the same name has to go."""
        assert self.bucket is not None
        older = self.bucket.dcp_sessions.pop(connection.name, None)
        if older is not None:
            older.on_replaced()
        self.bucket.dcp_sessions[connection.name] = self
        self.dcp = connection

    def dcp_changed(self) -> None:
        """A stream has changed the bucket: there is something to commit."""
        if self.bucket is not None:
            self.bucket.on_change()

    def disconnected(self) -> None:
        """The connection is gone."""
        if self.dcp is None or self.bucket is None:
            return
        if self.bucket.dcp_sessions.get(self.dcp.name) is self:
            del self.bucket.dcp_sessions[self.dcp.name]
        self.dcp.disconnect()

    def _check_allowed(self, request: Request) -> None:
        if type(request) not in HANDLERS:
            raise Refused(Status.UNKNOWN_COMMAND)
        if any(info.id not in _SERVED_INFOS for info in request.frame_infos):
            raise Refused(Status.UNKNOWN_FRAME_INFO)
        if type(request) in NEEDS_NO_LOGIN:
            return
        if self.user is None or not self.may(NEEDED.get(type(request), Action.READ)):
            raise Refused(Status.EACCESS)

    # --- out ------------------------------------------------------------------------------------------------------

    def _refuse_frame(self, frame: Frame, refused: Refused) -> None:
        stand_in = Request(opaque=frame.opaque)
        context = Context(self.service, self, stand_in)
        response = self._refusal(context, refused, opcode=frame.opcode)
        self._write(response, commit=0)

    def _refusal(self, context: Context, refused: Refused, *, opcode: int | None = None) -> Response:
        status = status_for_peer(
            refused.status, xerror=self.has(Feature.XERROR), collections=self.negotiated.collections
        )
        if status is None:
            raise CloseConnection
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
            self.outgoing.append(Outgoing(bytes(self._reply), self._reply_commit, self.bucket))
            self._unsent_bytes += len(self._reply)
            self._reply.clear()
            self._reply_commit = 0

    def datatype_for_peer(self, datatype: Datatype) -> Datatype:
        """The datatype bits the peer has negotiated."""
        return datatype & (Datatype.JSON if self.understands_json else Datatype.RAW)
