"""Servers in threads, for what no real node does: to be silent, to speak nonsense, to want a certificate."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headwater.client.connection_string import Address
from support.handshake_peer import Peer

Talk = Callable[[socket.socket], None]


@contextmanager
def serving(talk: Talk, *, tls: ssl.SSLContext | None = None) -> Iterator[Address]:
    """Lets `talk` have every connection, each in a thread of its own. What it leaves open is ended at the end."""
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
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address("127.0.0.1", listener.getsockname()[1])


def silent(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def hanging_up(sock: socket.socket) -> None:
    sock.recv(1 << 16)


def saying(data: bytes) -> Talk:
    """Waits for the first bytes, answers, and hangs up."""

    def talk(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        silent(sock)

    return talk


def dripping(data: bytes, *, every_s: float) -> Talk:
    """Says a byte now and then, for ever."""

    def talk(sock: socket.socket) -> None:
        gone = threading.Event()
        while True:
            for at in range(len(data)):
                sock.sendall(data[at : at + 1])
                gone.wait(every_s)

    return talk


def answering(new_peer: Callable[[], Peer]) -> Talk:
    """Speaks the key-value protocol, as far as the handshake goes."""

    def talk(sock: socket.socket) -> None:
        peer = new_peer()
        while data := sock.recv(1 << 16):
            sock.sendall(peer.receive_data(data))

    return talk


def answering_http(answers: dict[str, bytes], requests: list[str], *, hangs_up: bool = True) -> Talk:
    """Answers the requests for some paths; whoever asks for another gets 404. Remembers what was asked."""

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
