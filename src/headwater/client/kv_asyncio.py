"""A key-value connection under asyncio: runs a handshake and an exchange over a socket.

Used by bootstrap, surveys, checkpoints and groups, and between the nodes of a cluster. Requests may be sent while
others wait for their answers. Once a `BytesReceiver` is attached, it gets all received bytes: a DCP connection begins
as a key-value connection. This module must use only the running event loop, which may be simulated.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self, TypeVar, cast

from headwater.client import kv_connection
from headwater.client.connection_string import Address
from headwater.client.handshake import ClientHandshake, HandshakeOutcome
from headwater.errors import ConnectionClosed, ConnectionFailed, HeadwaterError
from headwater.protocol.exchange import Answered, Exchange
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.session import Stat

P = TypeVar("P", bound=asyncio.BaseProtocol)

_TLS_ERRORS = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Errors of a connection that was established, and ended during the TLS handshake."""
_WRITTEN_TOGETHER = 64
"""Requests per write: the server works on the first ones while the last are encoded."""


async def open_transport(
    new_protocol: Callable[[], P], address: Address, tls: ssl.SSLContext | None, timeouts: kv_connection.Timeouts
) -> P:
    """Connect a socket, with TLS if wanted, for a protocol. Raises a `ConnectionFailed` that says why it can't."""
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {}
    connect_s = timeouts.connect_s
    if tls is not None:
        # The handshake gets its own time: a port that accepts connections but speaks no TLS is not unreachable.
        handshake_s = min(timeouts.connect_s, timeouts.answer_s)
        options = {"ssl": tls, "server_hostname": address.host, "ssl_handshake_timeout": handshake_s}
        connect_s += handshake_s
    try:
        async with asyncio.timeout(connect_s):
            _, protocol = await loop.create_connection(new_protocol, address.host, address.port, **options)
    except (OSError, ValueError) as error:
        if tls is not None and isinstance(error, _TLS_ERRORS):
            raise kv_connection.tls_failed(address, error) from error
        raise kv_connection.unreachable(address, error) from error
    return protocol


class BytesReceiver(Protocol):
    """Takes what a connection receives once it no longer carries requests and answers."""

    def on_data(self, data: bytes) -> None: ...

    def on_lost(self, error: HeadwaterError) -> None: ...

    def on_writable(self, is_writable: bool) -> None:
        """Called when the peer stops or resumes reading. While it does not read, write nothing more."""
        ...


class AsyncKvConnection(asyncio.Protocol):
    """A connection that is logged in and has its bucket selected. Made by `open`."""

    def __init__(self, address: Address, login: kv_connection.Login) -> None:
        self.address = address
        self.is_closed = False
        self._login = login
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._handshake: ClientHandshake
        self._exchange: Exchange
        """Both are set when the socket is connected."""
        self._ready: asyncio.Future[HandshakeOutcome] = self._loop.create_future()
        self._answers: dict[int, tuple[list[Answered], asyncio.Future[list[Answered]]]] = {}
        """By opaque, the frames of an answer that were received, and the future that waits for all of them."""
        self._deadline: asyncio.TimerHandle | None = None
        self._receiver: BytesReceiver | None = None

    @classmethod
    async def open(cls, address: Address, login: kv_connection.Login) -> Self:
        """Connect and log in. Raises a `HeadwaterError` if that fails."""
        timeouts = login.timeouts
        connection = await open_transport(lambda: cls(address, login), address, login.tls, timeouts)
        try:
            async with asyncio.timeout(timeouts.answer_s):
                await connection._ready
        except TimeoutError as error:
            connection.abort()
            raise kv_connection.broken(address, error, waited_s=timeouts.answer_s) from error
        except BaseException:
            connection.abort()
            raise
        return connection

    @property
    def is_usable(self) -> bool:
        """Whether the connection can send requests: it is open, and belongs to the running event loop."""
        return not self.is_closed and self._loop is asyncio.get_running_loop()

    @property
    def outcome(self) -> HandshakeOutcome:
        return self._ready.result()

    # --- requests -------------------------------------------------------------------------------------------------

    async def request(self, message: Request) -> Response:
        """Send a request and wait for its answer. A status other than success is raised as its error."""
        (answer,) = self.send([message])
        return kv_connection.accepted((await answer)[-1].result())

    async def request_all(self, messages: Sequence[Request]) -> list[Response]:
        """Send requests together and wait for all answers. Raises the first refusal."""
        answers = [(await answer)[-1].result() for answer in self.send(messages)]
        return [kv_connection.accepted(answer) for answer in answers]

    async def statistics(self, group: str = "") -> dict[str, str]:
        (answer,) = self.send([Stat(key=group.encode())])
        frames = await answer
        kv_connection.accepted(frames[-1].result())
        return {
            part.frame.key.decode(errors="replace"): bytes(part.frame.value).decode(errors="replace")
            for part in frames[:-1]
        }

    def send(self, messages: Iterable[Request]) -> list[asyncio.Future[list[Answered]]]:
        """Send requests together. Each future completes with all frames of its answer, in order."""
        if self.is_closed:
            raise kv_connection.closed(self.address)
        self._exchange.tick(self._loop.time())
        waiting: list[asyncio.Future[list[Answered]]] = []
        for message in messages:
            waiting.append(self._loop.create_future())
            self._answers[self._exchange.send(message)] = ([], waiting[-1])
            if not len(waiting) % _WRITTEN_TOGETHER:
                self._send()
        self._send()
        return waiting

    def _send(self) -> None:
        """Send what the exchange has, and schedule a check for when the oldest request should be answered."""
        data = self._exchange.data_to_send()
        if data and self._transport is not None:
            self._transport.write(data)
        if self._deadline is None and (deadline_s := self._exchange.deadline_s) is not None and not self.is_closed:
            self._deadline = self._loop.call_at(deadline_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        try:
            self._exchange.tick(self._loop.time())
        except HeadwaterError as error:
            self._fail(error)
            self.abort()
        else:
            self._send()

    # --- handing over to a receiver -------------------------------------------------------------------------------

    def attach(self, receiver: BytesReceiver) -> None:
        """From now on, pass all received bytes to this receiver, including those that are already here."""
        assert self._exchange.is_idle, "answers are due"
        self._receiver = receiver
        if rest := self._exchange.rest:
            receiver.on_data(rest)

    def write(self, data: bytes) -> None:
        if data and not self.is_closed and self._transport is not None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self.is_closed and self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closed and self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close once all written data is sent. The receiver is not called any more."""
        self._end()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        self._receiver = None
        self.is_closed = True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not instances of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        is_local = kv_connection.is_loopback(transport.get_extra_info("socket"))
        self._handshake = self._login.handshake(is_loopback=is_local, peer=str(self.address))
        self._exchange = self._handshake.exchange
        self._transport.write(self._handshake.data_to_send())

    def data_received(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_data(data)
            return
        if self.is_closed or self._ready.cancelled():
            # The connection was given up; uvloop still delivers data that was under way.
            return
        try:
            if self._ready.done():
                self._exchange.receive_data(data)
                self._take_answers()
                self._exchange.tick(self._loop.time())
                self._send()
                return
            self._handshake.receive_data(data)
            self.write(self._handshake.data_to_send())
            if self._handshake.outcome is not None:
                self._ready.set_result(self._handshake.outcome)
        except HeadwaterError as error:
            self._fail(error)
            self.abort()

    def _take_answers(self) -> None:
        for event in self._exchange.events():
            # Requests from the server are ignored here.
            if isinstance(event, Answered):
                frames, waiting = self._answers[event.opaque]
                frames.append(event)
                if event.is_last:
                    del self._answers[event.opaque]
                    if not waiting.done():
                        waiting.set_result(frames)

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.on_writable(False)

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.on_writable(True)

    def connection_lost(self, error: Exception | None) -> None:
        receiver = self._receiver
        self._end()
        reason: HeadwaterError = (
            kv_connection.broken(self.address, error)
            if isinstance(error, OSError)
            else kv_connection.closed(self.address)
        )
        if not self._ready.done() and not isinstance(error, OSError):
            try:
                self._handshake.receive_end()
            except HeadwaterError as due:
                reason = due
        self._fail(reason)
        if receiver is not None:
            receiver.on_lost(reason)

    def _fail(self, error: HeadwaterError) -> None:
        waiters: list[asyncio.Future[Any]] = [self._ready, *(waiting for _, waiting in self._answers.values())]
        self._answers.clear()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
                # The caller may have been cancelled; asyncio does not log an exception that was retrieved.
                waiter.exception()


async def raise_if_tls(address: Address, timeouts: kv_connection.Timeouts, error: ConnectionClosed) -> None:
    """Raise `TlsFailed` if the port speaks TLS: most such servers close a connection without TLS, and send nothing."""
    try:
        probe = await open_transport(_Probe, address, kv_connection.without_verification(), timeouts)
    except ConnectionFailed:
        return
    probe.transport.abort()
    raise kv_connection.spoke_tls(address) from error


class _Probe(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
