"""Requests and answers on one key-value connection, sans-IO: the only place that matches the two.

The client's connections, blocking and asyncio, hold one each, and so do the connections between nodes. It numbers
requests by opaque, limits how many are unanswered, and finds the request that an answer belongs to. It must never read
beyond the last answer that is due: those bytes may be for another receiver, such as a DCP stream's.

A server answers a connection's requests in order unless HELLO has agreed on unordered execution (kv_engine,
docs/UnorderedExecution.md), which no connection here asks for. So an answer to any request but the oldest is an error.
The consumer's half of DCP (`consumer`) has its own table of requests, because its opaques name streams, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headwater.errors import LocalProtocolError, NoAnswer, StatusError, UnexpectedMessage
from headwater.protocol.features import NOTHING_NEGOTIATED, Magic, Negotiated
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages import ErrorResponse, Request, Response, decode_message, refused_request
from headwater.protocol.messages.session import Stat

ANSWER_BYTES_MAX = 8 * 1024 * 1024
"""The largest answer is the config; that of a hundred nodes is far below a megabyte."""
ANSWER_TIMEOUT_S = 30.0
"""How long a server may take to answer a request, unless the caller says otherwise."""
UNANSWERED_MAX = 1024
"""Requests that are sent and not answered: one for each vbucket of a bucket. A server that syncs every write to the
disk syncs all that have arrived by then together, so a thousand writes take milliseconds this way, and seconds one by
one."""
REQUESTS_MAX = 1 << 20
"""Requests that are not answered, including those that wait to be sent."""
STATISTICS_MAX = 100_000
"""Frames of one answer to STAT, the only request that has more than one."""
_OPAQUES = 1 << 32
_OPAQUE_AT = 12
"""Offset of the opaque in a header."""


@dataclass(slots=True, kw_only=True)
class _Due:
    request: Request
    sent_s: float
    parts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One frame of the answer to a request. It is decoded on demand, because some callers read the frame as it is."""

    opaque: int
    """What `send` returned."""
    request: Request
    frame: Frame
    negotiated: Negotiated
    is_last: bool = True
    """False for all frames of a STAT's answer but the last."""

    def response(self) -> Response:
        """Return the answer, which may be a refusal."""
        answer = decode_message(self.frame, self.negotiated)
        assert isinstance(answer, Response), "requests are no answers to requests"
        return answer

    def result(self) -> Response | StatusError:
        """Return the answer; a refusal as the error of its status."""
        answer = self.response()
        return refused_request(self.request, answer) if isinstance(answer, ErrorResponse) else answer


@dataclass(frozen=True, slots=True)
class Pushed:
    """A request that the server has sent unasked, such as a new cluster map."""

    frame: Frame


ExchangeEvent = Answered | Pushed


class Exchange:
    """The requests of one connection. `peer` names the server in errors; any error that is raised ends the exchange."""

    def __init__(
        self,
        *,
        peer: str = "the server",
        negotiated: Negotiated = NOTHING_NEGOTIATED,
        answer_s_max: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.negotiated = negotiated
        """What answers are decoded with; the handshake sets it after HELLO."""
        self.peer = peer
        self.answer_s_max = answer_s_max
        self._frames = FrameBuffer(body_bytes_max=ANSWER_BYTES_MAX)
        self._waiting: deque[tuple[int, Request]] = deque()
        """Not sent yet."""
        self._due: dict[int, _Due] = {}
        """Sent and not answered, by opaque, the oldest first."""
        self._to_send = bytearray()
        self._next_opaque = 0
        self._now_s = 0.0

    # --- out ------------------------------------------------------------------------------------------------------

    def send(self, request: Request) -> int:
        """Queue a request under a new opaque, which is returned."""
        if len(self._due) + len(self._waiting) >= REQUESTS_MAX:
            raise LocalProtocolError(f"{REQUESTS_MAX} requests are not answered", hint="Wait for some of the answers")
        opaque = self._next_opaque
        self._next_opaque = (opaque + 1) % _OPAQUES
        self._waiting.append((opaque, request))
        self._send_waiting()
        return opaque

    def _send_waiting(self) -> None:
        while self._waiting and len(self._due) < UNANSWERED_MAX:
            opaque, request = self._waiting.popleft()
            self._due[opaque] = _Due(request=request, sent_s=self._now_s)
            start = len(self._to_send)
            self._to_send += request.encode()
            self._to_send[start + _OPAQUE_AT : start + _OPAQUE_AT + 4] = opaque.to_bytes(4)

    def data_to_send(self) -> bytes:
        """Return the requests that may be sent now. Those that wait for answers to others come later."""
        data = bytes(self._to_send)
        self._to_send.clear()
        return data

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        self._frames.receive_data(data)

    def next_event(self) -> ExchangeEvent | None:
        """Return the next answer, if one is due and has arrived. Raises `RemoteProtocolError` for nonsense."""
        if not self._due or (frame := self._frames.next_frame()) is None:
            return None
        return self._take(frame)

    def events(self) -> list[ExchangeEvent]:
        """Return all that has arrived by now, up to the last answer that is due."""
        events: list[ExchangeEvent] = []
        while (event := self.next_event()) is not None:
            events.append(event)
        return events

    def _take(self, frame: Frame) -> ExchangeEvent:
        if frame.magic is Magic.SERVER_REQUEST:
            return Pushed(frame)
        opaque, due = next(iter(self._due.items()))
        if frame.magic.is_request or (frame.opcode, frame.opaque) != (due.request.opcode, opaque):
            raise UnexpectedMessage(
                f"{frame.opcode_name}, where the answer to {type(due.request).__name__} was due "
                f"({frame.magic.name} with opaque {frame.opaque}, not {opaque})"
            )
        is_part = isinstance(due.request, Stat) and bool(frame.key) and due.parts < STATISTICS_MAX
        if is_part:
            due.parts += 1
        else:
            del self._due[opaque]
            self._send_waiting()
        return Answered(
            opaque=opaque, request=due.request, frame=frame, negotiated=self.negotiated, is_last=not is_part
        )

    @property
    def rest(self) -> bytes:
        """The bytes after the last answer. Another receiver may continue with them."""
        return bytes(self._frames.peek())

    # --- what is due ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether every request has been answered."""
        return not (self._due or self._waiting)

    @property
    def oldest(self) -> Request | None:
        """The request whose answer is due next."""
        return next(iter(self._due.values())).request if self._due else None

    @property
    def deadline_s(self) -> float | None:
        """When the oldest request will have waited too long; None if no request is sent."""
        return next(iter(self._due.values())).sent_s + self.answer_s_max if self._due else None

    def tick(self, now_s: float) -> None:
        """Note the time. Raises `NoAnswer` if the oldest request has waited too long."""
        self._now_s = now_s
        deadline_s = self.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            raise NoAnswer(
                f"{self.peer} has not answered for {self.answer_s_max:g} seconds",
                hint="Check the server's load and log, and that the port is right",
            )
