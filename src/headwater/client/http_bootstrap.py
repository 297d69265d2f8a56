"""The cluster map over HTTP, from the cluster manager: for where only its port is known, or reachable at first.

The terse config (`/pools/default/b/BUCKET`) is the same JSON as that of the key-value protocol. Servers that do not
have it have a stream of configs (`/pools/default/bs/BUCKET`) that begins with it, each ended by four newlines.

HTTP's basic authentication shows the password to whoever listens, just as SASL PLAIN does, so the same rule is kept: it
is sent over TLS, or to this machine, or where the caller names PLAIN. A client certificate takes its place.

One exchange has one deadline and a limit to its size, whatever the server does. This is an edge: it blocks.
"""

from __future__ import annotations

import base64
import http.client
import io
import socket
import time
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.handshake import ANSWER_BYTES_MAX, Credentials
from headwater.client.kv_connection import broken, is_loopback, open_socket, raise_if_tls, send_all
from headwater.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionClosed,
    HeadwaterError,
    RemoteProtocolError,
    TemporaryFailure,
    TlsFailed,
    UnknownBucket,
    WrongProtocol,
)
from headwater.protocol.sasl import Mechanism
from headwater.protocol.status import Status

_END_OF_CONFIG = b"\n\n\n\n"
_READ_BYTES = 64 * 1024
_PORT_HINT = "Check that the port is the cluster manager's (8091, or 18091 with TLS)"


def fetch_map_over_http(address: Address, settings: ClientSettings) -> ClusterMap:
    """The newest cluster map, as the cluster manager at `address` tells it; or an error that says why not."""
    return settings.decode_map(fetch_config(address, settings), asked=address)


def fetch_config(address: Address, settings: ClientSettings) -> bytes:
    """The config as JSON."""
    bucket = quote(settings.bucket, safe="")
    answer = _ask(address, settings, f"/pools/default/b/{bucket}")
    if answer.status == http.HTTPStatus.NOT_FOUND:
        answer = _ask(address, settings, f"/pools/default/bs/{bucket}")
    if answer.status != http.HTTPStatus.OK:
        raise _refused(address, settings, answer.status)
    return answer.config


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    config: bytes


def _ask(address: Address, settings: ClientSettings, path: str) -> _Answer:
    sock = open_socket(address, settings.tls_context(), settings.timeouts)
    wire = _Wire(sock, settings.timeouts.answer_s)
    try:
        wire.send(_request(address, settings, path, is_loopback=is_loopback(sock)))
        # All that it wants of a socket is a file to read from.
        response = http.client.HTTPResponse(cast(socket.socket, wire), method="GET")
        response.begin()
        config = _read_config(response, address) if response.status == http.HTTPStatus.OK else b""
        return _Answer(response.status, config)
    except (http.client.HTTPException, OSError) as error:
        failure = _failure(address, settings, error)
        if settings.tls is None and isinstance(failure, ConnectionClosed):
            raise_if_tls(address, settings.timeouts, failure)
        raise failure from error
    finally:
        sock.close()


def _request(address: Address, settings: ClientSettings, path: str, *, is_loopback: bool) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {address}",
        f"User-Agent: {settings.agent}",
        "Accept: application/json",
        "Connection: close",
    ]
    if settings.credentials is not None:
        is_safe = settings.tls is not None or is_loopback or settings.mechanism is Mechanism.PLAIN
        lines.append(f"Authorization: Basic {_basic(settings.credentials, is_safe=is_safe)}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _basic(credentials: Credentials, *, is_safe: bool) -> str:
    if not is_safe:
        raise AuthenticationFailed(
            Status.AUTH_ERROR,
            "the password would be sent in clear, for anybody to read",
            hint="Use couchbases:// with port 18091, leave the port out, or name the mechanism PLAIN to allow it",
        )
    if ":" in credentials.user:
        raise AuthenticationFailed(
            Status.AUTH_ERROR, "HTTP can't log in a user with a colon in the name", hint="Leave the port out"
        )
    return base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()


def _read_config(response: http.client.HTTPResponse, address: Address) -> bytes:
    """The answer up to its end, or to the end of the first config of a stream."""
    body = bytearray()
    while data := response.read1(_READ_BYTES):
        searched = max(0, len(body) - len(_END_OF_CONFIG))
        body += data
        end = body.find(_END_OF_CONFIG, searched)
        if end >= 0:
            return bytes(body[:end])
        if len(body) > ANSWER_BYTES_MAX:
            raise RemoteProtocolError(
                f"the answer of {address} has more than {ANSWER_BYTES_MAX} bytes",
                offset=ANSWER_BYTES_MAX,
                hint=_PORT_HINT,
            )
    if response.length:
        raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)


class _Wire(io.RawIOBase):
    """A socket to be read as a file, up to a deadline: a byte now and then does not put it off."""

    def __init__(self, sock: socket.socket, within_s: float) -> None:
        self._sock = sock
        self._deadline_s = time.monotonic() + within_s

    def send(self, data: bytes) -> None:
        self._sock.settimeout(self._left_s())
        send_all(self._sock, data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._left_s())
        return self._sock.recv_into(buffer)

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


# --- what is wrong ------------------------------------------------------------------------------------------------


def _refused(address: Address, settings: ClientSettings, status: int) -> HeadwaterError:
    if status == http.HTTPStatus.UNAUTHORIZED:
        if settings.credentials is None:
            return AuthenticationFailed(
                Status.AUTH_ERROR,
                f"{address} wants a log-in",
                hint="Give a user and a password, or a client certificate that the server knows a user for",
            )
        return AuthenticationFailed(
            Status.AUTH_ERROR, f"{address} refused the log-in: the user or the password is wrong"
        )
    if status == http.HTTPStatus.FORBIDDEN:
        return AccessDenied(
            Status.EACCESS,
            f"{address}: the user may not use bucket {settings.bucket!r}",
            hint="Check the bucket's name, and give the user a role on it",
        )
    if status == http.HTTPStatus.NOT_FOUND:
        return UnknownBucket(Status.KEY_ENOENT, f"{address}: there is no bucket {settings.bucket!r}")
    if status in (http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE):
        return TemporaryFailure(Status.ETMPFAIL, f"{address} is too busy: HTTP status {status}")
    return RemoteProtocolError(
        f"{address} does not give the cluster map: HTTP status {status}",
        hint=f"{_PORT_HINT}, and TLS on both ends or on neither",
    )


def _failure(address: Address, settings: ClientSettings, error: http.client.HTTPException | OSError) -> HeadwaterError:
    # The first is an OSError, too.
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
        return ConnectionClosed(f"{address} closed the connection before it had answered", hint=_PORT_HINT)
    if isinstance(error, http.client.BadStatusLine) and str(error.args[0]).startswith("\x15\x03"):
        return TlsFailed(
            f"{address} speaks TLS, and this connection does not",
            hint="Write couchbases://, or take the port without TLS (8091)",
        )
    if isinstance(error, OSError):
        return broken(address, error, waited_s=settings.timeouts.answer_s)
    return WrongProtocol(f"{address} does not speak HTTP", hint=_PORT_HINT)
