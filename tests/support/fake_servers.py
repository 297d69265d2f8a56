"""Servers in threads for behaviour that no real node shows: silence, garbage, requests for a certificate."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwater.client.connection_string import Address
from headwater.errors import AuthenticationFailed
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response, decode_message, session
from headwater.protocol.sasl import Mechanism, PlainLogin, ScramServer, derive_credentials, encode_nonce
from headwater.protocol.status import Status

# A server's side of the handshake, built from the sans-IO protocol package.


USER, PASSWORD = "ada", "pässword, with = and ,"
CONFIG = b'{"rev": 1}'
ASKED = (Feature.XERROR, Feature.COLLECTIONS, Feature.SNAPPY)


class Peer:
    """A server's side of the handshake. `replace` replaces the answer to one kind of request."""

    def __init__(
        self,
        *,
        mechanisms: str = "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN",
        bucket: str = "travel",
        config: bytes = CONFIG,
        password: str = PASSWORD,
        is_known_by_certificate: bool = False,
    ) -> None:
        self.password = password
        self.mechanisms = mechanisms
        self.bucket = bucket
        self.config = config
        self.is_known_by_certificate = is_known_by_certificate
        self.seen: list[Request] = []
        self.writes: list[int] = []
        """How many requests arrived in each write."""
        self.pushed_before: dict[type[Request], Request] = {}
        """Requests that the server itself sends before an answer."""
        self.replace: dict[type[Request], Callable[[Any], Response | Request]] = {}
        self._frames = FrameBuffer()
        self._scram: ScramServer | None = None

    def receive_data(self, data: bytes) -> bytes:
        self._frames.receive_data(data)
        answers: list[Response | Request] = []
        for frame in self._frames.frames():
            request = decode_message(frame)
            assert isinstance(request, Request)
            self.seen.append(request)
            if type(request) in self.pushed_before:
                answers.append(self.pushed_before[type(request)])
            answers.append(self.replace.get(type(request), self._answer)(request))
        self.writes.append(len(answers))
        return b"".join(answer.encode() for answer in answers)

    def _answer(self, request: Request) -> Response:
        if isinstance(request, session.Hello):
            agreed = tuple(feature for feature in request.features if feature is not Feature.SNAPPY)
            return session.HelloResponse(opaque=request.opaque, features=agreed)
        if isinstance(request, session.SaslListMechanisms | session.SaslAuth) and self.is_known_by_certificate:
            return refused(request, Status.NOT_SUPPORTED)
        if isinstance(request, session.SaslListMechanisms):
            return ok(request, self.mechanisms.encode())
        if isinstance(request, session.SaslStep):
            return self._step(request)
        if isinstance(request, session.SaslAuth):
            return self._auth(request)
        if isinstance(request, session.SelectBucket):
            return ok(request) if request.key == self.bucket.encode() else refused(request, Status.KEY_ENOENT)
        assert isinstance(request, session.GetClusterConfig)
        return ok(request, self.config)

    def _auth(self, request: session.SaslAuth) -> Response:
        mechanism = Mechanism.decode(request.key)
        if mechanism is Mechanism.PLAIN:
            matches = PlainLogin.decode(request.value) == PlainLogin(USER, self.password)
            return ok(request) if matches else refused(request, Status.AUTH_ERROR)
        self._scram = ScramServer(
            mechanism,
            lambda mechanism, _: derive_credentials(mechanism, self.password, salt=b"s" * 16, iterations=4000),
            encode_nonce(b"server" * 3),
        )
        return ok(request, self._scram.start(request.value), status=Status.AUTH_CONTINUE)

    def _step(self, request: session.SaslStep) -> Response:
        assert self._scram is not None
        try:
            return ok(request, self._scram.finish(request.value))
        except AuthenticationFailed:
            return refused(request, Status.AUTH_ERROR)


def ok(request: Request, value: bytes = b"", *, status: Status = Status.SUCCESS, **parts: Any) -> PlainResponse:
    return PlainResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=status, value=value, **parts)


def refused(request: Request, status: Status, value: bytes = b"") -> ErrorResponse:
    return ErrorResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=status, value=value)


Talk = Callable[[socket.socket], None]


@contextmanager
def serving(talk: Talk, *, tls: ssl.SSLContext | None = None) -> Iterator[Address]:
    """Pass every connection to `talk`, each in its own thread. At the end, close those that it leaves open."""
    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with suppress(OSError), sock:
            if tls is None:
                talk(sock)
                return
            with tls.wrap_socket(sock, server_side=True) as encrypted:
                talk(encrypted)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            connections.append(sock)
            threads.append(threading.Thread(target=serve, args=(sock,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for sock in connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def down() -> Address:
    """Return an address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address("127.0.0.1", listener.getsockname()[1])


def silent(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def hanging_up(sock: socket.socket) -> None:
    sock.recv(1 << 16)


def saying(data: bytes) -> Talk:
    """Wait for the first bytes, answer, and hang up."""

    def talk(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        silent(sock)

    return talk


def dripping(data: bytes, *, every_s: float) -> Talk:
    """Send a byte now and then, forever."""

    def talk(sock: socket.socket) -> None:
        gone = threading.Event()
        while True:
            for at in range(len(data)):
                sock.sendall(data[at : at + 1])
                gone.wait(every_s)

    return talk


def answering(new_peer: Callable[[], Peer]) -> Talk:
    """Speak the key-value protocol, as far as the handshake."""

    def talk(sock: socket.socket) -> None:
        peer = new_peer()
        while data := sock.recv(1 << 16):
            sock.sendall(peer.receive_data(data))

    return talk


def answering_http(answers: dict[str, bytes], requests: list[str], *, hangs_up: bool = True) -> Talk:
    """Answer the requests for some paths, and all others with 404. Records the requests."""

    def talk(sock: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            data = sock.recv(1 << 16)
            if not data:
                return
            request += data
        requests.append(request.decode())
        path = request.split(b" ")[1].decode()
        sock.sendall(answers.get(path, http_answer(b"Requested resource not found.\r\n", status=404)))
        if hangs_up:
            sock.shutdown(socket.SHUT_WR)
        silent(sock)

    return talk


def http_answer(body: bytes, *, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d Whatever\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
