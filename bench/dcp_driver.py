"""A DCP consumer that only receives bytes, so that the producer is measured."""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import cast

from bench.kv_driver import Login
from headwater.protocol.features import WITH_COLLECTIONS, Feature
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.kernels import decode_changes
from headwater.protocol.kernels.decode import other_message_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import BufferAck, Control, Open, StreamEnd, StreamFlags, StreamRequest
from headwater.protocol.messages.session import Hello, SaslAuth, SelectBucket
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.status import Status

TIMEOUT_S = 20.0
PIECE_BYTES = 1024 * 1024
"""How many bytes are sent and received at once."""
_NO_FLAGS = StreamFlags(0)
_OPENING_S_MAX = 120.0
_QUIET_S = 0.5
"""Consumers that have received nothing for this long have opened all their streams."""


def connect_dcp(port: int, login: Login, name: str, *, buffer_bytes: int | None = None) -> socket.socket:
    """Return a connection that is logged in and ready for streams of its bucket; a buffer enables flow control."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    plain = PlainLogin(user=login.user, password=login.password).encode()
    requests = [
        Hello(key=b"bench", features=(Feature.XERROR, Feature.JSON, Feature.COLLECTIONS)),
        SaslAuth(key=b"PLAIN", value=plain),
        SelectBucket(key=login.bucket.encode()),
        Open(key=name.encode()),
        Control(key=b"enable_noop", value=b"true"),  # Streams with collections require it
    ]
    if buffer_bytes is not None:
        requests.append(Control(key=b"connection_buffer_size", value=str(buffer_bytes).encode()))
    connection.sendall(b"".join(request.encode() for request in requests))
    frames = FrameBuffer()
    for _ in requests:
        while (frame := frames.next_frame()) is None:
            frames.receive_data(connection.recv(4096))
        if frame.specific != Status.SUCCESS:
            raise RuntimeError(f"{frame.opcode_name} was refused with status {frame.specific:#x}")
    return connection


def stream_requests(vbuckets: int | Iterable[int], flags: StreamFlags = _NO_FLAGS, value: bytes = b"") -> bytes:
    """Return requests for all changes of the first N vbuckets, or of these. A stream's opaque is its vbucket."""
    return b"".join(
        StreamRequest(vbucket=VBucketId(vbucket), opaque=vbucket, flags=flags, value=value).encode()
        for vbucket in (range(vbuckets) if isinstance(vbuckets, int) else vbuckets)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """The contents of streams up to the latest change."""

    total_bytes: int
    changes: int
    snapshots_from_disk: int


def survey_backfill(connection: socket.socket, requests: bytes, vbuckets: int) -> Backfill:
    """Open streams, count what they send up to their ends, and close the connection."""
    buffer = memoryview(bytearray(8 * PIECE_BYTES))
    filled = total = changes = from_disk = 0
    kinds: Counter[type] = Counter()
    with connection:
        connection.sendall(requests)
        while kinds[StreamEnd] < vbuckets:
            received = connection.recv_into(buffer[filled:])
            if not received:
                raise RuntimeError("the node has closed the connection")
            filled += received
            total += received
            decoded = decode_changes(buffer[:filled], collections=True)
            changes += decoded.batch.num_rows
            for other in decoded.others:
                message = decode_message(other_message_frame(buffer, other), WITH_COLLECTIONS)
                kinds[type(message)] += 1
                from_disk += isinstance(message, SnapshotMarker) and SnapshotFlags.DISK in message.flags
            rest = bytes(buffer[decoded.consumed_bytes : filled])
            buffer[: len(rest)] = rest
            filled = len(rest)
    return Backfill(total_bytes=total, changes=changes, snapshots_from_disk=from_disk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How long it took to receive a number of bytes."""

    opening_s: float
    """From before connecting to the first byte of data."""
    data_s: float
    """From the first byte of data to the last."""


def drain(connect: Callable[[], socket.socket], requests: bytes, total_bytes: int) -> Drained:
    """Connect, send requests, and receive this many bytes without looking at them."""
    buffer = bytearray(PIECE_BYTES)
    start_s = time.perf_counter()
    with connect() as connection:
        connection.sendall(requests)
        missing = total_bytes - connection.recv_into(buffer)
        first_s = time.perf_counter()
        while missing > 0:
            received = connection.recv_into(buffer)
            if not received:
                raise RuntimeError(f"the connection ended {missing} bytes too early")
            missing -= received
        return Drained(opening_s=first_s - start_s, data_s=time.perf_counter() - first_s)


def drain_acknowledging(connection: socket.socket, requests: bytes, total_bytes: int, ack_bytes: int) -> float:
    """Send requests on an open connection, and receive and acknowledge this many bytes. Returns the seconds."""
    buffer = bytearray(PIECE_BYTES)
    ack = BufferAck(acked_bytes=ack_bytes).encode()
    start_s = time.perf_counter()
    connection.sendall(requests)
    missing, unacked = total_bytes, 0
    while missing > 0:
        received = connection.recv_into(buffer)
        if not received:
            raise RuntimeError(f"the connection ended {missing} bytes too early")
        missing -= received
        unacked += received
        if unacked >= ack_bytes:
            connection.sendall(ack)
            unacked -= ack_bytes
    return time.perf_counter() - start_s


@contextmanager
def raw_sender(total_bytes: int) -> Iterator[int]:
    """Yield the port of a process that only sends this many bytes to every client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = multiprocessing.get_context("fork").Process(target=_send_raw, args=(listener, total_bytes))
        sender.start()
        try:
            yield listener.getsockname()[1]
        finally:
            sender.terminate()
            sender.join()


def _send_raw(listener: socket.socket, total_bytes: int) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    while True:
        connection, _ = listener.accept()
        with connection:
            for sent in range(0, total_bytes, PIECE_BYTES):
                connection.sendall(piece[: total_bytes - sent])


@contextmanager
def draining(port: int, login: Login, consumers: int, vbuckets: int) -> Iterator[None]:
    """Run consumers with a stream of every vbucket, in a separate process that receives all their data."""
    context = multiprocessing.get_context("fork")
    is_open = context.Event()
    drainer = context.Process(target=_drain_all, args=(port, login, consumers, vbuckets, is_open))
    drainer.start()
    try:
        if not is_open.wait(_OPENING_S_MAX):
            raise RuntimeError(f"{consumers} consumers were not open after {_OPENING_S_MAX:.0f} s")
        yield
    finally:
        drainer.terminate()
        drainer.join()


def _drain_all(port: int, login: Login, consumers: int, vbuckets: int, is_open: Event) -> None:
    buffer = bytearray(PIECE_BYTES)
    selector = selectors.DefaultSelector()
    for number in range(consumers):
        connection = connect_dcp(port, login, f"consumer-{number}")
        connection.sendall(stream_requests(vbuckets))
        connection.recv_into(buffer)
        selector.register(connection, selectors.EVENT_READ)
    while True:
        ready = selector.select(timeout=_QUIET_S)
        if not ready:
            is_open.set()
        for key, _ in ready:
            connection = cast(socket.socket, key.fileobj)
            connection.recv_into(buffer)
