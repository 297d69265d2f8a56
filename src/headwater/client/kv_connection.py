"""A blocking key-value connection: the socket, TLS, and the handshake on it.

This is an edge: here the bytes of the sans-IO handshake meet the network, and here its randomness is drawn.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.client.connection_string import Address
from headwater.client.handshake import ANSWER_BYTES_MAX, ClientHandshake, Credentials, HandshakeOutcome
from headwater.errors import ConnectionFailed, InvalidInput, TlsFailed, UnexpectedMessage, status_error
from headwater.protocol.features import Feature
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import ErrorResponse, Request, Response, decode_message
from headwater.protocol.sasl import encode_nonce

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
RECEIVE_BYTES = 256 * 1024

_NONCE_RANDOM_BYTES = 18

FEATURES = (
    Feature.TCP_NODELAY,
    Feature.XERROR,
    Feature.SELECT_BUCKET,
    Feature.JSON,
    Feature.COLLECTIONS,
    Feature.DEDUPE_NMVB_CLUSTERMAP,
)
"""What a connection asks for unless told. Unordered execution is not among them: answers come in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Whom to trust."""

    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    skip_verify: bool = False
    """Trust anybody: the bytes are encrypted, but who reads them is unknown."""

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(
                f"the CA file {self.ca_file} can't be used: {error}", hint="Give certificates in PEM form"
            ) from error
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What every connection to a cluster has in common."""

    credentials: Credentials | None
    bucket: str | None
    tls: ssl.SSLContext | None = None
    features: tuple[Feature, ...] = FEATURES
    agent: str = "headwater"
    random_bytes: Callable[[int], bytes] = os.urandom


class KvConnection:
    """A connection that is logged in and has its bucket. Requests on it are made one at a time."""

    def __init__(self, sock: socket.socket, address: Address, outcome: HandshakeOutcome) -> None:
        self.sock = sock
        self.address = address
        self.outcome = outcome
        self._frames = FrameBuffer(body_bytes_max=ANSWER_BYTES_MAX)
        self._opaque = 0

    @classmethod
    def open(cls, address: Address, login: Login) -> Self:
        """Connect and log in, or raise what is in the way of it."""
        sock = open_socket(address, login.tls)
        try:
            outcome = _shake_hands(sock, address, login)
        except BaseException:
            sock.close()
            raise
        return cls(sock, address, outcome)

    def request(self, message: Request) -> Response:
        """Send a request and wait for its answer. A status other than success is raised as its error."""
        _send_all(self.sock, message.encode(), self.address)
        while (frame := self._frames.next_frame()) is None:
            self._frames.receive_data(_receive(self.sock, self.address) or _raise_closed(self.address))
        if frame.magic.is_request or (frame.opcode, frame.opaque) != (message.opcode, message.opaque):
            raise UnexpectedMessage(f"{frame.opcode_name}, where the answer to {type(message).__name__} was due")
        answer = decode_message(frame, self.outcome.negotiated)
        assert isinstance(answer, Response)
        if isinstance(answer, ErrorResponse):
            raise status_error(answer.status, answer.context)
        return answer

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_socket(address: Address, tls: ssl.SSLContext | None) -> socket.socket:
    """A connected socket, with TLS on it if wanted."""
    try:
        sock = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ConnectionFailed(
            f"{address} can't be reached: {error.strerror or error}",
            hint="Check the address, and that the server is running",
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(ANSWER_TIMEOUT_S)
    if tls is None:
        return sock
    try:
        return tls.wrap_socket(sock, server_hostname=address.host)
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise TlsFailed(
            f"the certificate of {address} is not trusted: {error.verify_message}",
            hint="Give the certificate of its CA by --tls-ca",
        ) from error
    except OSError as error:
        sock.close()
        raise TlsFailed(
            f"{address} does not speak TLS: {getattr(error, 'reason', None) or error}",
            hint="Check the port (11207 is the one with TLS), or use couchbase:// without TLS",
        ) from error


def is_loopback(sock: socket.socket) -> bool:
    """Whether what is sent stays on this machine."""
    peer = ip_address(sock.getpeername()[0].partition("%")[0])
    mapped = peer.ipv4_mapped if isinstance(peer, IPv6Address) else None
    return (mapped or peer).is_loopback


def broken(address: Address, error: OSError) -> ConnectionFailed:
    """The error for a connection that was fine and is no more."""
    if isinstance(error, TimeoutError):
        return ConnectionFailed(
            f"{address} has not answered for {ANSWER_TIMEOUT_S:.0f} seconds", hint="Look at the server's load and log"
        )
    return ConnectionFailed(
        f"the connection to {address} broke: {error.strerror or error}", hint="Look at the server's log, and try again"
    )


def _shake_hands(sock: socket.socket, address: Address, login: Login) -> HandshakeOutcome:
    handshake = ClientHandshake(
        credentials=login.credentials,
        bucket=login.bucket,
        nonce=encode_nonce(login.random_bytes(_NONCE_RANDOM_BYTES)),
        features=login.features,
        agent=login.agent,
        plain_allowed=login.tls is not None or is_loopback(sock),
    )
    while handshake.outcome is None:
        _send_all(sock, handshake.data_to_send(), address)
        data = _receive(sock, address)
        if data:
            handshake.receive_data(data)
        else:
            handshake.receive_end()
    return handshake.outcome


def _send_all(sock: socket.socket, data: bytes, address: Address) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise broken(address, error) from error


def _receive(sock: socket.socket, address: Address) -> bytes:
    try:
        return sock.recv(RECEIVE_BYTES)
    except OSError as error:
        raise broken(address, error) from error


def _raise_closed(address: Address) -> bytes:
    raise ConnectionFailed(f"{address} has closed the connection", hint="Look at the server's log, and try again")
