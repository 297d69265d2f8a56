"""A key-value connection to another node, under asyncio: log in, ask, and, where it is for DCP, hand the bytes on.

Requests may be sent while others wait for their answers; answers come in order. Once a `BytesReceiver` is attached, all
that comes is for it. Everything is on the running event loop, so that it works in a simulated one, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Protocol, Self, cast

from headwater.client.connection_string import Address
from headwater.client.handshake import ANSWER_BYTES_MAX, HandshakeOutcome
from headwater.client.kv_connection import Login, broken, closed, tls_failed, unreachable
from headwater.errors import ConnectionFailed, HeadwaterError, UnexpectedMessage
from headwater.protocol.features import Magic
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages import ErrorResponse, Request, Response, decode_message
from headwater.protocol.messages.session import Stat
from headwater.protocol.refusals import refused_request

_OPAQUES = 0xFFFFFFFF
STATISTICS_MAX = 100_000


class BytesReceiver(Protocol):
    """Takes what a connection receives once it is no longer a matter of requests and answers."""

    def on_data(self, data: bytes) -> None: ...

    def on_lost(self, error: HeadwaterError) -> None: ...

    def on_writable(self, is_writable: bool) -> None:
        """Whether the peer reads what is written; while it does not, no more should be."""
        ...


@dataclass(slots=True)
class _Waiting:
    request: Request
    answer: asyncio.Future[Response]
    statistics: dict[str, str] | None = None
    """What has come so far of an answer that has several parts."""
    opaque: int = field(default=0)


class PeerConnection(asyncio.Protocol):
    """See the module. Made by `open`."""

    def __init__(self, address: Address, login: Login) -> None:
        self.address = address
        self.is_closed = False
        self._login = login
        self._transport: asyncio.Transport
        self._handshake = login.handshake(is_loopback=False)
        self._ready: asyncio.Future[HandshakeOutcome] = asyncio.get_running_loop().create_future()
        self._frames = FrameBuffer(body_bytes_max=ANSWER_BYTES_MAX)
        self._waiting: deque[_Waiting] = deque()
        self._opaque = 0
        self._receiver: BytesReceiver | None = None

    @classmethod
    async def open(cls, address: Address, login: Login) -> Self:
        """Connect and log in, or raise what is in the way of it."""
        loop, timeouts = asyncio.get_running_loop(), login.timeouts
        try:
            async with asyncio.timeout(timeouts.connect_s):
                _, connection = await loop.create_connection(
                    lambda: cls(address, login),
                    address.host,
                    address.port,
                    ssl=login.tls,
                    server_hostname=address.host if login.tls else None,
                )
        except (OSError, ValueError) as error:
            raise _connect_error(address, error, has_tls=login.tls is not None) from error
        try:
            async with asyncio.timeout(timeouts.answer_s):
                await connection._ready
        except TimeoutError as error:
            connection.abort()
            raise broken(address, error, waited_s=timeouts.answer_s) from error
        except BaseException:
            connection.abort()
            raise
        return connection

    @property
    def outcome(self) -> HandshakeOutcome:
        return self._ready.result()

    # --- asking ---------------------------------------------------------------------------------------------------

    async def request(self, message: Request) -> Response:
        """Send a request and wait for its answer. A status other than success is raised as its error."""
        return (await self.request_all([message]))[0]

    async def request_all(self, messages: list[Request]) -> list[Response]:
        """Send requests together and wait for all answers. The first refusal is raised."""
        waiting = [self._send(message) for message in messages]
        try:
            async with asyncio.timeout(self._login.timeouts.answer_s):
                answers = [await one.answer for one in waiting]
        except TimeoutError as error:
            self.abort()
            raise broken(self.address, error, waited_s=self._login.timeouts.answer_s) from error
        for message, answer in zip(messages, answers, strict=True):
            if isinstance(answer, ErrorResponse):
                raise refused_request(message, answer)
        return answers

    async def statistics(self, group: str = "") -> dict[str, str]:
        message = Stat(key=group.encode())
        waiting = self._send(message)
        waiting.statistics = {}
        try:
            async with asyncio.timeout(self._login.timeouts.answer_s):
                answer = await waiting.answer
        except TimeoutError as error:
            self.abort()
            raise broken(self.address, error, waited_s=self._login.timeouts.answer_s) from error
        if isinstance(answer, ErrorResponse):
            raise refused_request(message, answer)
        return waiting.statistics

    def _send(self, message: Request) -> _Waiting:
        if self.is_closed:
            raise closed(self.address)
        self._opaque = self._opaque % _OPAQUES + 1
        waiting = _Waiting(message, asyncio.get_running_loop().create_future(), opaque=self._opaque)
        self._waiting.append(waiting)
        encoded = bytearray(message.encode())
        encoded[12:16] = self._opaque.to_bytes(4)
        self._transport.write(encoded)
        return waiting

    # --- handing on -----------------------------------------------------------------------------------------------

    def attach(self, receiver: BytesReceiver) -> None:
        """From now on all that comes is for this receiver, and so is what has come and was not asked for."""
        assert not self._waiting, "answers are due"
        self._receiver = receiver
        rest = bytes(self._frames.peek())
        self._frames.skip(len(rest))
        if rest:
            receiver.on_data(rest)

    def write(self, data: bytes) -> None:
        if data and not self.is_closed:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self.is_closed and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closed and not self._transport.is_reading():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close after what was written has been sent. Nobody is told."""
        self._receiver = None
        self.is_closed = True
        if hasattr(self, "_transport"):
            self._transport.close()

    def abort(self) -> None:
        self._receiver = None
        self.is_closed = True
        if hasattr(self, "_transport"):
            self._transport.abort()

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername") or ("",)
        self._handshake = self._login.handshake(is_loopback=_is_loopback(str(peer[0])))
        self._transport.write(self._handshake.data_to_send())

    def data_received(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_data(data)
            return
        try:
            if not self._ready.done():
                self._go_on_with_handshake(data)
                return
            self._frames.receive_data(data)
            # What comes behind the last answer is for the receiver that will be attached.
            while self._waiting and (frame := self._frames.next_frame()) is not None:
                self._take(frame)
        except HeadwaterError as error:
            self._fail(error)
            self.abort()

    def _go_on_with_handshake(self, data: bytes) -> None:
        self._handshake.receive_data(data)
        self._transport.write(self._handshake.data_to_send())
        if self._handshake.outcome is not None:
            self._frames.receive_data(self._handshake.trailing_data)
            self._ready.set_result(self._handshake.outcome)

    def _take(self, frame: Frame) -> None:
        if frame.magic is Magic.SERVER_REQUEST:
            return
        if not self._waiting or frame.magic.is_request or frame.opaque != self._waiting[0].opaque:
            raise UnexpectedMessage(f"{frame.opcode_name}, which nobody has asked {self.address} for")
        answer = decode_message(frame, self.outcome.negotiated)
        assert isinstance(answer, Response)
        waiting = self._waiting[0]
        statistics = waiting.statistics
        if statistics is not None and frame.key and len(statistics) < STATISTICS_MAX:
            statistics[frame.key.decode(errors="replace")] = bytes(frame.value).decode(errors="replace")
            return
        self._waiting.popleft()
        if not waiting.answer.done():
            waiting.answer.set_result(answer)

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.on_writable(False)

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.on_writable(True)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        reason = broken(self.address, error) if isinstance(error, OSError) else closed(self.address)
        self._fail(reason)
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            receiver.on_lost(reason)

    def _fail(self, error: HeadwaterError) -> None:
        waiters: list[asyncio.Future[Any]] = [self._ready, *(waiting.answer for waiting in self._waiting)]
        self._waiting.clear()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
                # Whoever waited may have been cancelled; looked at, it is not told as forgotten.
                waiter.exception()


def _connect_error(address: Address, error: OSError | ValueError, *, has_tls: bool) -> ConnectionFailed:
    if has_tls and isinstance(error, OSError) and type(error).__module__ == "ssl":
        return tls_failed(address, error)
    if isinstance(error, TimeoutError):
        return broken(address, error)
    return unreachable(address, error)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
