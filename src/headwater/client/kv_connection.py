"""A blocking key-value connection, and what it shares with the asyncio one: log-in, timeouts, and errors.

`KvConnection` runs a handshake and an exchange over a socket, for commands, the loader's sockets and tests; under an
event loop, `kv_asyncio` does that. Errors of the operating system and of TLS are translated here for both, and must
not reach a user in other words.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from traceback import walk_tb
from types import TracebackType
from typing import Any, Self

from headwater import errors
from headwater.client.connection_string import HTTP_TLS_PORT, KV_TLS_PORT, Address
from headwater.client.handshake import ClientHandshake, HandshakeOutcome
from headwater.options import suggest_keywords
from headwater.protocol.exchange import ANSWER_TIMEOUT_S, Answered, Exchange
from headwater.protocol.features import Feature
from headwater.protocol.messages import Request, Response
from headwater.protocol.sasl import Credentials, Mechanism, encode_nonce, is_loopback_address

CONNECT_TIMEOUT_S = 5.0
RECEIVE_BYTES = 256 * 1024

_NONCE_RANDOM_BYTES = 18
_PROBE_S_MAX = 5.0
_TIMEOUT_S_MIN = 0.001
"""A timeout of 0 would make a socket non-blocking."""

FEATURES = (
    Feature.TCP_NODELAY,
    Feature.XERROR,
    Feature.SELECT_BUCKET,
    Feature.JSON,
    Feature.COLLECTIONS,
    Feature.DEDUPE_NMVB_CLUSTERMAP,
)
"""The features requested by default. Unordered execution is not one of them: answers come in order."""


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long to wait for servers."""

    connect_s: float = CONNECT_TIMEOUT_S
    answer_s: float = ANSWER_TIMEOUT_S
    """The limit for a whole handshake, and later for each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """The settings that all connections to a cluster share."""

    credentials: Credentials | None
    bucket: str | None
    tls: ssl.SSLContext | None = None
    mechanism: Mechanism | None = None
    bucket_was_seen: bool = False
    features: tuple[Feature, ...] = FEATURES
    agent: str = "headwater"
    timeouts: Timeouts = Timeouts()
    random_bytes: Callable[[int], bytes] = os.urandom

    def handshake(self, *, is_loopback: bool, peer: str = "the server") -> ClientHandshake:
        """Make the handshake for a new connection. `is_loopback` says whether it stays on this machine."""
        return ClientHandshake(
            credentials=self.credentials,
            bucket=self.bucket,
            nonce=encode_nonce(self.random_bytes(_NONCE_RANDOM_BYTES)),
            features=self.features,
            agent=self.agent,
            plain_allowed=self.tls is not None or is_loopback,
            mechanism=self.mechanism,
            bucket_was_seen=self.bucket_was_seen,
            peer=peer,
            answer_s_max=self.timeouts.answer_s,
        )


class KvConnection:
    """A blocking connection that is logged in and has its bucket selected, for callers without an event loop."""

    def __init__(self, sock: socket.socket, address: Address, outcome: HandshakeOutcome, exchange: Exchange) -> None:
        self.sock = sock
        self.address = address
        self.outcome = outcome
        self._exchange = exchange

    @classmethod
    def open(cls, address: Address, login: Login) -> Self:
        """Connect and log in. Raises a `HeadwaterError` if that fails."""
        sock = open_socket(address, login.tls, login.timeouts)
        answer_s = login.timeouts.answer_s
        try:
            handshake = login.handshake(is_loopback=is_loopback(sock), peer=str(address))
            outcome = _do_handshake(sock, address, handshake, answer_s)
            sock.settimeout(answer_s)
        except BaseException as error:
            sock.close()
            if isinstance(error, errors.ConnectionClosed) and login.tls is None:
                raise_if_tls(address, login.timeouts, error)
            raise
        return cls(sock, address, outcome, handshake.exchange)

    @property
    def buffered_bytes(self) -> int:
        """The number of received bytes that belong to no answer yet."""
        return len(self._exchange.rest)

    def request(self, message: Request) -> Response:
        """Send a request and wait for its answer. A status other than success is raised as its error.

        After any other error, the connection can't be used.
        """
        exchange = self._exchange
        exchange.tick(time.monotonic())
        exchange.send(message)
        _send(self.sock, exchange.data_to_send(), self.address, exchange.answer_s_max)
        while (deadline_s := exchange.deadline_s) is not None:
            event = exchange.next_event()
            if isinstance(event, Answered):
                return accepted(event.result())
            if event is None:
                now_s = time.monotonic()
                exchange.tick(now_s)
                self.sock.settimeout(max(deadline_s - now_s, _TIMEOUT_S_MIN))
                data = _receive(self.sock, self.address, exchange.answer_s_max)
                if not data:
                    raise closed(self.address)
                exchange.receive_data(data)
        raise AssertionError("a request that is sent is due until it is answered")

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def accepted(answer: Response | errors.StatusError) -> Response:
    """Return the answer, or raise it if it is a refusal."""
    if isinstance(answer, errors.StatusError):
        raise answer
    return answer


def open_socket(address: Address, tls: ssl.SSLContext | None, timeouts: Timeouts) -> socket.socket:
    """Connect a socket, with TLS if wanted."""
    try:
        sock = socket.create_connection((address.host, address.port), timeout=timeouts.connect_s)
    except (OSError, ValueError) as error:
        raise unreachable(address, error) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(timeouts.answer_s)
    if tls is None:
        return sock
    try:
        return tls.wrap_socket(sock, server_hostname=address.host)
    except OSError as error:
        sock.close()
        _close_forgotten(error)
        raise tls_failed(address, error) from error


def _close_forgotten(error: OSError) -> None:
    """Close the socket that Python leaves open if the peer resets it at the wrong moment: its frames still hold it."""
    for frame, _ in walk_tb(error.__traceback__):
        forgotten = frame.f_locals.get("self")
        if isinstance(forgotten, ssl.SSLSocket):
            forgotten.close()


def raise_if_tls(address: Address, timeouts: Timeouts, error: errors.HeadwaterError) -> None:
    """Raise `TlsFailed` if the port speaks TLS: most such servers close a connection without TLS, and send nothing."""
    probe_timeouts = replace(timeouts, answer_s=min(timeouts.answer_s, _PROBE_S_MAX))
    try:
        open_socket(address, without_verification(), probe_timeouts).close()
    except errors.ConnectionFailed:
        return
    raise spoke_tls(address) from error


def without_verification() -> ssl.SSLContext:
    """A context to find out whether a port speaks TLS. Nothing is ever sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def spoke_tls(address: Address) -> errors.TlsFailed:
    return errors.TlsFailed(
        f"{address} uses TLS, and this connection does not",
        hint="Write couchbases://, or use the port without TLS (11210, or 8091 for HTTP)",
    )


def is_loopback(sock: Any) -> bool:
    """Whether sent data stays on this machine. False if the peer of the socket is already gone."""
    try:
        return is_loopback_address(str(sock.getpeername()[0]))
    except OSError:
        return False


def _do_handshake(
    sock: socket.socket, address: Address, handshake: ClientHandshake, answer_s: float
) -> HandshakeOutcome:
    deadline_s = time.monotonic() + answer_s
    while handshake.outcome is None:
        _send(sock, handshake.data_to_send(), address, answer_s)
        # One deadline for all: a server that sends a byte now and then must not extend it.
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise broken(address, TimeoutError(), waited_s=answer_s)
        sock.settimeout(left_s)
        data = _receive(sock, address, answer_s)
        if data:
            handshake.receive_data(data)
        else:
            handshake.receive_end()
    return handshake.outcome


def _send(sock: socket.socket, data: bytes, address: Address, waited_s: float) -> None:
    try:
        send_all(sock, data)
    except OSError as error:
        raise broken(address, error, waited_s=waited_s) from error


def send_all(sock: socket.socket, data: bytes) -> None:
    """Send all data. If the peer has ended TLS meanwhile, raise the error that it sent, if any."""
    try:
        sock.sendall(data)
    except OSError as error:
        # With TLS 1.3 the server verifies our certificate after our handshake is done, and closes with an alert.
        if isinstance(sock, ssl.SSLSocket) and not isinstance(error, TimeoutError):
            sock.recv(1)
        raise


def _receive(sock: socket.socket, address: Address, waited_s: float) -> bytes:
    try:
        return sock.recv(RECEIVE_BYTES)
    except OSError as error:
        raise broken(address, error, waited_s=waited_s) from error


# --- errors of the operating system and of TLS --------------------------------------------------------------------

_CA_HINT = "Give the certificate of its CA by --tls-ca (TlsSettings.ca_file in Python)"
_TLS_HINT = "Check the port (11207 and 18091 are those with TLS), or use couchbase:// without TLS"
_NO_TLS_HINT = (
    "This is the port for TLS, which a node without a certificate does not have: write couchbase:// to connect without "
    "TLS, or start the node with --tls-cert and --tls-key"
)
_CERTIFICATE_HINT = (
    "Give a client certificate that the server knows (TlsSettings.certificate_file), or fix the one that is given"
)
_ALERT_HINT = "Check the versions of TLS and the ciphers that the server allows"
_CERTIFICATE_ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")


_BROKEN_OFF = (ConnectionError, TimeoutError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


def unreachable(address: Address, error: OSError | ValueError) -> errors.HostUnreachable:
    """The error for a connection that could not be made. A `ValueError` is an impossible host name."""
    has_no_tls = isinstance(error, ConnectionRefusedError) and address.port in (KV_TLS_PORT, HTTP_TLS_PORT)
    hint = _NO_TLS_HINT if has_no_tls else "Check the address, and that the server is running"
    return errors.HostUnreachable(f"{address} can't be reached: {_words(error)}", hint=hint)


def tls_failed(address: Address, error: OSError) -> errors.TlsFailed:
    """The error for a connection on which TLS failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return errors.TlsFailed(f"the certificate of {address} is not trusted: {error.verify_message}", hint=_CA_HINT)
    if _is_alert(error):
        return _alerted(address, error)
    kind = errors.TlsBroken if isinstance(error, _BROKEN_OFF) else errors.TlsFailed
    return kind(f"{address} does not speak TLS: {_words(error)}", hint=_TLS_HINT)


def broken(address: Address, error: OSError, *, waited_s: float = ANSWER_TIMEOUT_S) -> errors.ConnectionFailed:
    """The error for a connection that broke, or a server that has not answered."""
    if isinstance(error, TimeoutError):
        return errors.NoAnswer(
            f"{address} has not answered for {waited_s:g} seconds",
            hint="Check the server's load and log, and that the port is right",
        )
    if _is_alert(error):
        # With TLS 1.3, only now does a client learn that the server rejects its certificate, or requires one.
        return _alerted(address, error)
    kind = errors.ConnectionClosed if isinstance(error, ConnectionError) else errors.ConnectionFailed
    return kind(f"the connection to {address} broke: {_words(error)}", hint="Check the server's log, and try again")


def closed(address: Address) -> errors.ConnectionClosed:
    """The error for a server that closed the connection instead of answering."""
    return errors.ConnectionClosed(f"{address} has closed the connection", hint="Check the server's log, and try again")


def _is_alert(error: OSError) -> bool:
    """Whether the peer has sent a TLS alert."""
    return isinstance(error, ssl.SSLError) and "_ALERT_" in (error.reason or "")


def _alerted(address: Address, error: OSError) -> errors.TlsFailed:
    words = _words(error)
    is_about_certificate = any(part in words for part in _CERTIFICATE_ALERTS)
    hint = _CERTIFICATE_HINT if is_about_certificate else _ALERT_HINT
    return errors.TlsFailed(f"{address} has refused TLS with us: {words}", hint=hint)


def _words(error: OSError | ValueError) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return "timed out"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError | socket.gaierror) and error.errno:
        # Event loops replace the message, and add the address again.
        return os.strerror(error.errno)
    # If the connection ends during the TLS handshake, event loops give no message at all.
    return (
        str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error) or "the connection was closed"
    )
