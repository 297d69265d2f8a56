"""The consumer's half of a DCP connection, sans-IO: from bytes to runs of changes, messages and answers.

It owns the received bytes, the opaques, the controls and their answers, the noops, the flow control and the clock that
detects a dead producer. The client's link (`client.links`) hands the runs to a reader; the node's consumer
(`node.consumer`) applies them to its copies of the vbuckets. It must never read a single change, nor decide what a
message means for a vbucket: `snapshots.ConsumedStream` decides which message may come next.

    receive_data → events: StreamRun, StreamMessage, RequestAnswered, ConsumerOpened, ForeignFrame, FaultyFrame
    send_opening, send_request, send, release → data_to_send
    tick(now_s) raises `ConnectionFailed` if the producer is dead

What the protocol decides is in kv_engine's docs/dcp/documentation, which comments here cite as "DCP docs".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from headwater import errors
from headwater.kernels.memory import Bytes
from headwater.protocol.features import NOTHING_NEGOTIATED, Magic, Negotiated, Opcode
from headwater.protocol.flow_control import ReceiveWindow, counted_bytes
from headwater.protocol.frames import HEADER_BYTES, Frame, decode_frame
from headwater.protocol.kernels.frame_runs import FrameRun, cut_runs
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import ErrorResponse, Message, PlainResponse, Request, Response
from headwater.protocol.messages.dcp_streams import BufferAck, Control, Open
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX
from headwater.protocol.status import Status

RECEIVE_BUFFER_BYTES = 1024 * 1024
RECEIVE_BUFFER_BYTES_MAX = HEADER_BYTES + FRAME_BODY_BYTES_MAX
"""The size that the buffer of a socket grows to, for one large frame."""
OVERDRAFT_BYTES_MAX = RECEIVE_BUFFER_BYTES_MAX + 1024 * 1024
"""Producers overdraw the buffer by one frame; one that overdraws it by more ignores flow control."""
OPAQUE_MAX = 0x0FFF_FFFF
_DCP_OPCODES = range(Opcode.DCP_OPEN, Opcode.DCP_CACHE_TRANSFER_END + 1)

S = TypeVar("S")
"""What the caller keeps for a stream."""


# --- received bytes -----------------------------------------------------------------------------------------------


class ReceiveBuffer:
    """Holds received bytes until it cuts them into runs of changes and single frames. Both sides use it.

    A socket may write into `room()` directly. While the buffer is paused or held, it cuts nothing and bytes pile up:
    the caller must stop reading, and the producer stops when its window is full.
    """

    def __init__(self, *, keeps_order: bool = False) -> None:
        """With `keeps_order` frames are not sorted by stream, for connections on which others send requests as well."""
        self.is_paused = False
        """Set while items are being taken: the rest stays for later."""
        self.is_held = False
        self._keeps_order = keeps_order
        self._data = np.empty(RECEIVE_BUFFER_BYTES, dtype=np.uint8)
        self._filled_bytes = 0
        self._needed_bytes = HEADER_BYTES
        """How many bytes must be there before cutting is worth a try: a large frame comes in many pieces."""
        self._looked_bytes = 0
        """In held bytes, where the next frame begins that was not checked for a noop."""
        self._is_cut_short = False

    @property
    def buffered_bytes(self) -> int:
        return self._filled_bytes

    @property
    def is_held_back(self) -> bool:
        """Whether whole frames were left for later, and may be cut now."""
        return self._is_cut_short and not self.is_paused and not self.is_held

    # --- in -------------------------------------------------------------------------------------------------------

    def room(self) -> memoryview:
        """Return where the next bytes go. The caller reports with `filled` how many it has written."""
        if self._filled_bytes == len(self._data):
            # A frame larger than the buffer: its header has been checked against the limit, so the growth ends.
            self._grow(min(2 * len(self._data), RECEIVE_BUFFER_BYTES_MAX))
        return self._data.data[self._filled_bytes :]

    def filled(self, byte_count: int) -> None:
        self._filled_bytes += byte_count

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        end = self._filled_bytes + len(data)
        if end > len(self._data):
            self._grow(max(end, 2 * len(self._data)))
        self._data[self._filled_bytes : end] = np.frombuffer(data, dtype=np.uint8)
        self._filled_bytes = end

    def _grow(self, size_bytes: int) -> None:
        grown = np.empty(size_bytes, dtype=np.uint8)
        grown[: self._filled_bytes] = self._data[: self._filled_bytes]
        self._data = grown

    def _remove(self, start: int, end: int) -> None:
        left = self._filled_bytes - end
        if start != end and left:
            self._data[start : start + left] = self._data[end : self._filled_bytes]
        self._filled_bytes = start + left

    # --- out ------------------------------------------------------------------------------------------------------

    def items(self) -> Iterator[tuple[FrameRun, Bytes]]:
        """Yield what is whole, run by run. The bytes of a run are valid until the next one is requested.

        Raises the documented error for bytes that are no frames.
        """
        if self.is_paused or self.is_held or self._filled_bytes < self._needed_bytes:
            return
        self._is_cut_short = False
        self._needed_bytes = HEADER_BYTES
        cut = cut_runs(self._data[: self._filled_bytes], keeps_order=self._keeps_order)
        taken = 0
        try:
            for run in cut.runs:
                taken = run.end
                yield run, cut.data[run.start : run.end]
                if self._stops_here():
                    break
        finally:
            self._remove(0, taken if self._keeps_order else cut.consumed_bytes)
            if self._filled_bytes >= HEADER_BYTES:
                self._needed_bytes = HEADER_BYTES + int.from_bytes(self._data[8:12].tobytes())

    def _stops_here(self) -> bool:
        assert self._keeps_order or not self.is_paused, "sorted frames can't be left where they were"
        self._is_cut_short = self.is_paused
        return self._is_cut_short

    def take_all(self) -> bytes:
        """Take all bytes as they are, for a handshake that precedes the first DCP frame."""
        data = self._data[: self._filled_bytes].tobytes()
        self._filled_bytes = 0
        return data

    # --- holding --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Cut nothing that arrives from now on, until `resume`."""
        self.is_held, self._looked_bytes = True, 0

    def resume(self) -> None:
        """Resume cutting. Held bytes are cut with what arrives next, even if that is nothing."""
        self.is_held, self._needed_bytes = False, HEADER_BYTES
        self._is_cut_short = self._filled_bytes >= HEADER_BYTES

    def take_noops(self) -> list[int]:
        """Take the noops out of held bytes, so that they can be answered at once. Returns their opaques."""
        if not self.is_held or self._filled_bytes - self._looked_bytes < HEADER_BYTES:
            return []
        start = self._looked_bytes
        cut = cut_runs(self._data[start : self._filled_bytes], keeps_order=True)
        noop_header = bytes((Magic.REQUEST, Opcode.DCP_NOOP))
        noops = [run for run in cut.runs if cut.data[run.start : run.start + 2].tobytes() == noop_header]
        for run in reversed(noops):
            self._remove(start + run.start, start + run.end)
        self._looked_bytes = start + cut.consumed_bytes - sum(run.end - run.start for run in noops)
        return [run.opaque for run in noops]


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StreamRun(Generic[S]):
    """Changes of one stream, frame after frame. The data is valid until the next event is requested."""

    opaque: int
    rows: int
    first_seqno: int
    last_seqno: int
    data: Bytes | bytes
    is_rising: bool = True
    """Whether every seqno is higher than the one before."""
    stream: S | None = None
    """None if no stream has this opaque, because it was closed."""

    @property
    def window_bytes(self) -> int:
        """How much of the flow-control window the run takes."""
        return len(self.data)


@dataclass(slots=True)
class StreamMessage(Generic[S]):
    """Any other DCP request: of a stream, if one has its opaque, or to the connection."""

    message: Request
    window_bytes: int
    stream: S | None = None


@dataclass(slots=True)
class ForeignFrame:
    """A request that is not DCP's."""

    frame: Frame


@dataclass(slots=True)
class FaultyFrame:
    """A DCP request that can't be decoded. The frame itself is sound."""

    frame: Frame
    error: errors.MalformedMessage | errors.UnknownOpcode
    window_bytes: int


@dataclass(slots=True)
class RequestAnswered(Generic[S]):
    """The answer to a request of ours."""

    request: Request
    answer: Response
    stream: S | None = None
    """The stream of the request, if it has not been closed meanwhile."""


@dataclass(slots=True)
class ConsumerOpened:
    """All controls, and the open if one was sent, have been answered."""


ConsumerEvent = StreamRun[S] | StreamMessage[S] | ForeignFrame | FaultyFrame | RequestAnswered[S] | ConsumerOpened


# --- the connection -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpControl:
    """A connection setting that the consumer requests from the producer before the first stream."""

    key: str
    value: str
    is_required: bool = False
    """Whether a refusal is an error. Older servers refuse unknown settings, most of which only make things better."""
    refused_hint: str = "Check the server's version, or leave out the option that asks for it"
    """What a user can do if a required control is refused."""


class ConsumerCounters(Protocol):
    """Counts what the connection does by itself."""

    def on_ack(self, acked_bytes: int) -> None: ...

    def on_noop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    buffer_bytes: int
    """Bytes that the producer may send before it has to wait for acknowledgements; 0 without flow control."""
    silence_s_max: float
    """How long a producer that has agreed to send noops may be silent."""
    answer_s_max: float | None = None
    """How long a request may be unanswered; None for no limit."""


class DcpConsumer(Generic[S]):
    """One connection (see the module). Any error that a method raises ends the connection."""

    def __init__(
        self,
        limits: ConsumerLimits,
        *,
        now_s: float,
        negotiated: Negotiated = NOTHING_NEGOTIATED,
        keeps_order: bool = False,
        ignores_stray_answers: bool = False,
        counters: ConsumerCounters | None = None,
    ) -> None:
        """`negotiated` may be set later, before the first event. `ignores_stray_answers` is for connections on which
        others send requests to the producer as well."""
        self.negotiated = negotiated
        self.counters = counters
        self.streams: dict[int, S] = {}
        """Streams by opaque. Messages with another opaque are of a stream that was closed."""
        self.granted: set[str] = set()
        """The keys of the controls that the producer has agreed to."""
        self.messages = 0
        """How many single messages and runs of changes were received."""
        self.owed_bytes = 0
        """Bytes that the producer has sent and we have not acknowledged."""
        self.acked_bytes = 0
        self._limits = limits
        self._ignores_stray_answers = ignores_stray_answers
        self._buffer = ReceiveBuffer(keeps_order=keeps_order)
        self._heard_s = self._now_s = now_s
        self._window = ReceiveWindow(size_bytes=limits.buffer_bytes)
        self._to_send = bytearray()
        self._asked: dict[int, tuple[Request, float]] = {}
        """Requests that are not answered, and when each was sent, oldest first."""
        self._controls: dict[int, DcpControl | None] = {}
        """The opaques of controls, and of the open, that are not answered."""
        self._first_opaque = self._next_opaque = 1

    # --- out ------------------------------------------------------------------------------------------------------

    def send_opening(
        self, controls: Iterable[DcpControl], *, open_request: Open | None = None, first_stream_opaque: int = 1
    ) -> None:
        """Send the open, unless the connection is open already, and the controls, in their order."""
        if open_request is not None:
            self._controls[self.send_request(open_request)] = None
        for control in controls:
            message = Control(key=control.key.encode(), value=control.value.encode())
            self._controls[self.send_request(message)] = control
        self._first_opaque = first_stream_opaque
        self._next_opaque = max(self._next_opaque, first_stream_opaque)

    def take_opaque(self) -> int:
        """Return an opaque that is not in use."""
        while True:
            opaque = self._next_opaque
            self._next_opaque = opaque + 1 if opaque < OPAQUE_MAX else self._first_opaque
            if opaque not in self.streams and opaque not in self._asked:
                return opaque

    def send_request(self, message: Request, *, stream: S | None = None) -> int:
        """Send a request that must be answered. Returns its opaque; a request without one gets a new one.

        With `stream`, messages under this opaque are of that stream, until it is taken out of `streams`.
        """
        if not message.opaque:
            message = replace(message, opaque=self.take_opaque())
        if stream is not None:
            self.streams[message.opaque] = stream
        self._asked[message.opaque] = message, self._now_s
        self._to_send += message.encode()
        return message.opaque

    def send(self, message: Message | bytes) -> None:
        """Send an answer, or a request whose answer does not matter."""
        self._to_send += message if isinstance(message, bytes) else message.encode()

    def send_success(self, opcode: int, opaque: int) -> None:
        self.send(PlainResponse(opcode=Opcode(opcode), opaque=opaque))

    def send_refusal(self, opcode: int, opaque: int, status: Status) -> None:
        self.send(ErrorResponse(opcode=Opcode(opcode), opaque=opaque, status=status))

    def release(self, window_bytes: int) -> None:
        """Note bytes that the caller has processed, and acknowledge them once that is worth a message."""
        self._window = self._window.taken(window_bytes)
        if self._window.ack_is_due:
            acked_bytes, self._window = self._window.acknowledge()
            self.owed_bytes -= acked_bytes
            self.acked_bytes += acked_bytes
            self.send(BufferAck(acked_bytes=acked_bytes))
            if self.counters is not None:
                self.counters.on_ack(acked_bytes)

    def data_to_send(self) -> bytes:
        data = bytes(self._to_send)
        self._to_send.clear()
        return data

    @property
    def is_pressed(self) -> bool:
        """Whether the producer may soon have to wait for us."""
        return self.owed_bytes * 2 > self._window.size_bytes > 0

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now_s: float, *, is_deaf: bool = False) -> None:
        """Note the time. Raises `ConnectionFailed` if the producer is dead. Call it about once a second.

        With `is_deaf` received bytes are not being read, so that silence says nothing.
        """
        answer_s_max = self._limits.answer_s_max
        # DCP docs, dead-connections: a producer that has agreed to noops sends one each interval, unless it sends
        # something else; a consumer that hears nothing for two of them has to disconnect.
        silence_s_max = self._limits.silence_s_max if "enable_noop" in self.granted else answer_s_max
        was_away = silence_s_max is not None and now_s - self._now_s > silence_s_max / 2
        if is_deaf or was_away:
            # The producer may have spoken meanwhile without being heard.
            self._heard_s = now_s
        self._now_s = now_s
        if silence_s_max is not None and now_s - self._heard_s > silence_s_max:
            raise errors.ConnectionFailed(
                f"the server has been silent for {now_s - self._heard_s:.0f} seconds",
                hint="Check the server's load and log, and the network",
            )
        if answer_s_max is None or not self._asked:
            return
        request, asked_s = next(iter(self._asked.values()))
        if now_s - max(asked_s, self._heard_s) > answer_s_max:
            raise errors.ConnectionFailed(
                f"{type(request).__name__} has not been answered for {answer_s_max:g} seconds",
                hint="Check the server's load and log",
            )

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_buffer(self) -> memoryview:
        """Return where a socket writes the next bytes."""
        return self._buffer.room()

    def received(self, byte_count: int, *, now_s: float) -> None:
        """Note that a socket has written this many bytes into `receive_buffer`."""
        self._heard_s = self._now_s = now_s
        self._buffer.filled(byte_count)

    def receive_data(self, data: bytes | bytearray | memoryview, *, now_s: float) -> None:
        self._heard_s = self._now_s = now_s
        self._buffer.receive_data(data)

    def events(self) -> Iterator[ConsumerEvent[S]]:
        """Yield what the received bytes mean, in order. Answers noops on the way, also in held bytes."""
        for run, data in self._buffer.items():
            self.messages += 1
            if run.rows:
                self._charge(len(data))
                stream = self.streams.get(run.opaque)
                yield StreamRun(
                    run.opaque, run.rows, run.first_seqno, run.last_seqno, data, bool(run.is_rising), stream
                )
            else:
                event = self._take_frame(data)
                if event is not None:
                    yield event
        if self._buffer.is_held:
            for opaque in self._buffer.take_noops():
                self._answer_noop(opaque)

    def _charge(self, window_bytes: int) -> None:
        # DCP docs, flow-control: while any room is left a producer sends the next message, whatever its size.
        size_bytes = self._window.size_bytes
        self.owed_bytes += window_bytes if size_bytes else 0
        if self.owed_bytes > size_bytes + OVERDRAFT_BYTES_MAX and "connection_buffer_size" in self.granted:
            raise errors.UnexpectedMessage(f"{self.owed_bytes} bytes for a flow-control buffer of {size_bytes}")

    def _take_frame(self, data: Bytes) -> ConsumerEvent[S] | None:
        decoded = decode_frame(data.data)
        assert decoded is not None, "the kernel reports complete frames only"
        frame = decoded[0]
        if not frame.magic.is_request:
            return self._take_answer(frame)
        if frame.magic is Magic.SERVER_REQUEST or frame.opcode not in _DCP_OPCODES:
            return ForeignFrame(frame)
        window_bytes = counted_bytes(frame.opcode, len(data))
        self._charge(window_bytes)
        try:
            message = decode_message(frame, self.negotiated)
        except (errors.MalformedMessage, errors.UnknownOpcode) as error:
            return FaultyFrame(frame, error, window_bytes)
        if frame.opcode == Opcode.DCP_NOOP:
            self._answer_noop(frame.opaque)
            return None
        assert isinstance(message, Request)
        return StreamMessage(message, window_bytes, self.streams.get(frame.opaque))

    def _answer_noop(self, opaque: int) -> None:
        self.send_success(Opcode.DCP_NOOP, opaque)
        if self.counters is not None:
            self.counters.on_noop()

    # --- answers --------------------------------------------------------------------------------------------------

    def _take_answer(self, frame: Frame) -> ConsumerEvent[S] | None:
        request, _ = self._asked.get(frame.opaque, (None, 0.0))
        if request is None or request.opcode != frame.opcode:
            if self._ignores_stray_answers or not Opcode(frame.opcode).is_known:
                return None
            raise errors.UnexpectedMessage(
                f"an answer to {frame.opcode_name} with opaque {frame.opaque} that was not asked"
            )
        del self._asked[frame.opaque]
        answer = decode_message(frame, self.negotiated)
        assert isinstance(answer, Response)
        if frame.opaque not in self._controls:
            return RequestAnswered(request, answer, self.streams.get(frame.opaque))
        self._take_opening_answer(self._controls.pop(frame.opaque), answer)
        return None if self._controls else ConsumerOpened()

    def _take_opening_answer(self, control: DcpControl | None, answer: Response) -> None:
        if answer.status == Status.SUCCESS:
            if control is not None:
                self.granted.add(control.key)
            return
        context = answer.context if isinstance(answer, ErrorResponse) else ""
        reason = context or answer.status.name
        if control is None:
            raise errors.status_error(answer.status, f"the server refused the DCP connection: {reason}")
        if control.is_required:
            raise errors.NotSupported(
                answer.status,
                f"the server refused the DCP control {control.key}={control.value}: {reason}",
                hint=control.refused_hint,
            )

    # --- holding --------------------------------------------------------------------------------------------------

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were received and not processed."""
        return self._buffer.buffered_bytes

    @property
    def is_held(self) -> bool:
        return self._buffer.is_held

    @property
    def is_held_back(self) -> bool:
        """Whether something received was left for later, and may be taken now: call `events` again."""
        return self._buffer.is_held_back

    def hold(self) -> None:
        """Yield no events until `resume`, but answer noops. The producer stops when its window is full."""
        self._buffer.hold()

    def resume(self) -> None:
        self._buffer.resume()

    def pause(self) -> None:
        """Make the current event the last one until `unpause`."""
        self._buffer.is_paused = True

    def unpause(self) -> None:
        self._buffer.is_paused = False
