"""One DCP connection of a reader, sans-IO: handshake, open, controls; then requests out, answers and streams in.

A link knows nothing of vbuckets and rollbacks. It turns received bytes into events, in order: stretches of changes as
bytes (`StreamRun`), every other message of a stream typed (`StreamMessage`), and answers with the request they belong
to (`Answered`). It answers noops, counts what the server's flow control counts, and finds out when the peer is dead.

The receive buffer is the link's own, so that a socket can write into it directly: give `receive_buffer()` to the
socket, then say how much came with `received`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from headwater.client.handshake import ClientHandshake, HandshakeOutcome
from headwater.client.metrics import ReaderMetrics
from headwater.errors import ConnectionFailed, NotSupported, UnexpectedMessage, UnknownOpcode, status_error
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.flow_control import ReceiveWindow, counted_bytes
from headwater.protocol.frames import HEADER_BYTES, Frame, decode_frame
from headwater.protocol.kernels.frame_runs import FrameRun, cut_runs
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response, decode_message
from headwater.protocol.messages.dcp_streams import BufferAck, Control, DcpNoop, Open, OpenFlags
from headwater.protocol.messages.session import ClustermapChangeNotification
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX
from headwater.protocol.states import Table, transition
from headwater.protocol.status import Status

RECEIVE_BUFFER_BYTES = 1024 * 1024
RECEIVE_BUFFER_BYTES_MAX = HEADER_BYTES + FRAME_BODY_BYTES_MAX
ANSWER_TIMEOUT_S = 30.0
SILENT_NOOP_INTERVALS = 2.5
"""A live server sends a noop each interval, whatever else it has to say."""
OVERDRAFT_BYTES_MAX = RECEIVE_BUFFER_BYTES_MAX + 1024 * 1024
"""Servers overdraw the buffer by one frame; more than that is a server that does not know flow control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpControl:
    key: str
    value: str
    is_required: bool = False
    """Older servers refuse what they don't know. Most of it only makes things better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOpening:
    """What makes a key-value connection a DCP connection."""

    name: str
    flags: OpenFlags
    controls: tuple[DcpControl, ...]
    buffer_bytes: int
    noop_interval_s: int


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkReady:
    """The connection can be used. Comes once, first."""

    outcome: HandshakeOutcome


@dataclass(frozen=True, slots=True)
class StreamRun:
    """Changes of one stream."""

    opaque: int
    rows: int
    first_seqno: int
    last_seqno: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """Anything else of a stream."""

    message: Request
    window_bytes: int
    """What it takes of the flow-control window."""


@dataclass(frozen=True, slots=True)
class Answered:
    request: Request
    answer: Response


@dataclass(frozen=True, slots=True)
class ConfigPushed:
    """The server has a new cluster map; with nothing in `config` it has to be asked for."""

    config: bytes


LinkEvent = LinkReady | StreamRun | StreamMessage | Answered | ConfigPushed


# --- states -------------------------------------------------------------------------------------------------------


class LinkState(Enum):
    SHAKING_HANDS = auto()
    OPENING = auto()
    """Open and the controls are sent; not all are answered."""
    READY = auto()


class HandsShaken:
    """The handshake is over."""


class ScoutDone:
    """The handshake is over, and more was never wanted."""


class OpeningAnswered:
    """The last control has been answered."""


LINK: Table[LinkState] = {
    LinkState.SHAKING_HANDS: {HandsShaken: LinkState.OPENING, ScoutDone: LinkState.READY},
    LinkState.OPENING: {OpeningAnswered: LinkState.READY},
    LinkState.READY: {},
}


class DcpLink:
    """One connection. Any error that a method raises is the end of it.

    With no `opening` it is a scout: a connection that only learns the cluster map.
    """

    def __init__(
        self,
        handshake: ClientHandshake,
        opening: DcpOpening | None,
        *,
        now_s: float,
        answer_s_max: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.state = LinkState.SHAKING_HANDS
        self._handshake = handshake
        self._answer_s_max = answer_s_max
        self._opening = opening
        self._buffer = np.empty(RECEIVE_BUFFER_BYTES, dtype=np.uint8)
        self._filled_bytes = 0
        self._to_send = bytearray(handshake.data_to_send())
        self._asked: dict[int, tuple[Request, float]] = {}
        self._opaque = 0
        self._window = ReceiveWindow(size_bytes=opening.buffer_bytes if opening else 0)
        self._owed_bytes = 0
        self._heard_s = now_s
        self._now_s = now_s
        self._outcome: HandshakeOutcome | None = None
        self.metrics: ReaderMetrics | None = None
        """Those of the reader that the link belongs to."""

    # --- out ------------------------------------------------------------------------------------------------------

    @property
    def next_opaque(self) -> int:
        """What the next request goes under."""
        return self._opaque + 1

    def request(self, message: Request) -> int:
        """Send a request, under a new opaque, which is returned."""
        self._opaque += 1
        if message.opaque != self._opaque:
            message = replace(message, opaque=self._opaque)
        self._asked[self._opaque] = (message, self._now_s)
        self._to_send += message.encode()
        return self._opaque

    def release(self, window_bytes: int) -> None:
        """That much of what came has been taken: let the server send as much again, when it is worth a message."""
        self._window = self._window.taken(window_bytes)
        if self._window.ack_is_due:
            acked_bytes, self._window = self._window.acknowledge()
            self._owed_bytes -= acked_bytes
            self._to_send += BufferAck(acked_bytes=acked_bytes).encode()
            if self.metrics is not None:
                self.metrics.on_ack(acked_bytes)

    def data_to_send(self) -> bytes:
        data = bytes(self._to_send)
        self._to_send.clear()
        return data

    @property
    def owed_bytes(self) -> int:
        """What the server has sent and we have not acknowledged."""
        return self._owed_bytes

    @property
    def is_pressed(self) -> bool:
        """The server may soon have to wait for us."""
        return self._owed_bytes * 2 > self._window.size_bytes > 0

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Raises `ConnectionFailed` where the peer is dead. To be called at least once a second."""
        if self._opening is not None and self.state is LinkState.READY:
            silence_s_max = self._opening.noop_interval_s * SILENT_NOOP_INTERVALS
        else:
            silence_s_max = self._answer_s_max
        if now_s - self._now_s > silence_s_max / 2:
            # We were away ourselves: a server that spoke meanwhile has not been heard.
            self._heard_s = now_s
        self._now_s = now_s
        if now_s - self._heard_s > silence_s_max:
            raise ConnectionFailed(
                f"the server has been silent for {now_s - self._heard_s:.0f} seconds",
                hint="Look at the server's load and log, and at the network",
            )
        for request, asked_s in self._asked.values():
            if now_s - max(asked_s, self._heard_s) > self._answer_s_max:
                raise ConnectionFailed(
                    f"{type(request).__name__} has not been answered for {self._answer_s_max:g} seconds",
                    hint="Look at the server's load and log",
                )
            break  # The oldest is the first.

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_buffer(self) -> memoryview:
        """Where the next bytes go."""
        if self._filled_bytes == len(self._buffer):
            # A frame larger than the buffer: its header has been checked against the limit, so this ends.
            grown = np.empty(min(2 * len(self._buffer), RECEIVE_BUFFER_BYTES_MAX), dtype=np.uint8)
            grown[: self._filled_bytes] = self._buffer[: self._filled_bytes]
            self._buffer = grown
        return self._buffer.data[self._filled_bytes :]

    def received(self, byte_count: int, *, now_s: float) -> list[LinkEvent]:
        """That many bytes have come into `receive_buffer`: what they mean."""
        self._heard_s = self._now_s = now_s
        self._filled_bytes += byte_count
        events: list[LinkEvent] = []
        if self.state is LinkState.SHAKING_HANDS:
            self._shake_hands(events)
        if self.state is not LinkState.SHAKING_HANDS:
            self._take_frames(events)
        return events

    def receive_data(self, data: bytes, *, now_s: float) -> list[LinkEvent]:
        """For edges that have bytes already."""
        events: list[LinkEvent] = []
        view = memoryview(data)
        while view:
            buffer = self.receive_buffer()
            part = view[: len(buffer)]
            buffer[: len(part)] = part
            events += self.received(len(part), now_s=now_s)
            view = view[len(part) :]
        return events

    def receive_end(self) -> None:
        """The server has closed the connection. Raises what that means."""
        if self.state is LinkState.SHAKING_HANDS:
            self._handshake.receive_end()
        raise ConnectionFailed("the server has closed the connection", hint="Look at the server's log, and try again")

    def _shake_hands(self, events: list[LinkEvent]) -> None:
        self._handshake.receive_data(self._buffer.data[: self._filled_bytes])
        self._filled_bytes = 0
        self._to_send += self._handshake.data_to_send()
        self._outcome = self._handshake.outcome
        if self._outcome is None:
            return
        trailing = self._handshake.trailing_data
        self._buffer[: len(trailing)] = np.frombuffer(trailing, dtype=np.uint8)
        self._filled_bytes = len(trailing)
        if self._opening is None:
            self._move(ScoutDone)
            events.append(LinkReady(self._outcome))
        else:
            self._move(HandsShaken)
            self._open(self._opening)

    def _open(self, opening: DcpOpening) -> None:
        self.request(Open(key=opening.name.encode(), flags=opening.flags))
        for control in opening.controls:
            self.request(Control(key=control.key.encode(), value=control.value.encode()))

    def _move(self, event: type[Any]) -> None:
        self.state = transition(LINK, self.state, event)

    def _take_frames(self, events: list[LinkEvent]) -> None:
        cut = cut_runs(self._buffer[: self._filled_bytes])
        view = cut.data.data
        for run in cut.runs:
            if run.rows:
                events.append(self._take_changes(run, view))
            else:
                self._take_frame(_frame_at(view, run.start), run.end - run.start, events)
        left = self._filled_bytes - cut.consumed_bytes
        if cut.consumed_bytes and left:
            self._buffer[:left] = self._buffer[cut.consumed_bytes : self._filled_bytes].copy()
        self._filled_bytes = left

    def _take_changes(self, run: FrameRun, view: memoryview) -> StreamRun:
        if not run.is_rising:
            raise UnexpectedMessage(f"seqnos of a stream that do not rise, up to {run.last_seqno}")
        self._charge(run.end - run.start)
        data = bytes(view[run.start : run.end])
        return StreamRun(run.opaque, run.rows, run.first_seqno, run.last_seqno, data)

    def _charge(self, window_bytes: int) -> None:
        size_bytes = self._window.size_bytes
        self._owed_bytes += window_bytes if size_bytes else 0
        if self._owed_bytes > size_bytes + OVERDRAFT_BYTES_MAX:
            raise UnexpectedMessage(f"{self._owed_bytes} bytes for a flow-control buffer of {size_bytes}")

    def _take_frame(self, frame: Frame, frame_bytes: int, events: list[LinkEvent]) -> None:
        window_bytes = counted_bytes(frame.opcode, frame_bytes) if frame.magic.is_request else 0
        self._charge(window_bytes)
        assert self._outcome is not None
        try:
            message = decode_message(frame, self._outcome.negotiated)
        except UnknownOpcode:
            return  # Newer servers may say things that nobody here has asked for.
        if isinstance(message, Response):
            self._take_answer(message, events)
        elif isinstance(message, DcpNoop):
            self._to_send += PlainResponse(opcode=Opcode.DCP_NOOP, opaque=message.opaque).encode()
            if self.metrics is not None:
                self.metrics.on_noop()
        elif isinstance(message, ClustermapChangeNotification):
            events.append(ConfigPushed(message.value))
        elif frame.magic is not Magic.SERVER_REQUEST:
            assert isinstance(message, Request)
            events.append(StreamMessage(message, window_bytes))

    def _take_answer(self, answer: Response, events: list[LinkEvent]) -> None:
        if answer.opaque not in self._asked:
            raise UnexpectedMessage(f"an answer to {answer.opcode.name} that nobody has asked")
        request, _ = self._asked.pop(answer.opaque)
        if request.opcode != answer.opcode:
            raise UnexpectedMessage(f"{answer.opcode.name} as the answer to {type(request).__name__}")
        if self.state is LinkState.OPENING:
            self._on_opening_answer(request, answer)
            if not self._asked:
                self._move(OpeningAnswered)
                assert self._outcome is not None
                events.append(LinkReady(self._outcome))
        else:
            events.append(Answered(request, answer))

    def _on_opening_answer(self, request: Request, answer: Response) -> None:
        if answer.status == Status.SUCCESS:
            return
        context = answer.context if isinstance(answer, ErrorResponse) else ""
        if isinstance(request, Open):
            raise status_error(answer.status, f"the server refused the DCP connection: {context or answer.status.name}")
        assert isinstance(request, Control)
        assert self._opening is not None
        control = next(control for control in self._opening.controls if control.key.encode() == request.key)
        if control.is_required:
            raise NotSupported(
                answer.status,
                f"the server refused the DCP control {control.key}={control.value}: {context or answer.status.name}",
                hint="Check the server's version, or leave out the option that asks for it",
            )


def _frame_at(view: memoryview, start: int) -> Frame:
    decoded = decode_frame(view, start)
    assert decoded is not None, "the kernel reports complete frames only"
    return decoded[0]
