"""Many DCP consumers on one selector: fast ones, slow ones, with and without flow control and collections."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import struct
import time
from dataclasses import dataclass

import numpy as np

from headwater.client.handshake import Credentials
from headwater.client.kv_connection import FEATURES, KvConnection, Login
from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_streams import (
    BufferAck,
    Control,
    Open,
    StreamEndReason,
    StreamFlags,
    StreamRequest,
)
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from support.checked_streams import (
    END_REASON,
    ENDED,
    PASSED,
    PHASE,
    REQUESTED,
    SNAPSHOT_END,
    SNAPSHOT_START,
    VBUUID,
    CheckedStreams,
)
from support.node_process import PASSWORD, USER, NodeProcess

BUFFER_BYTES = 256 * 1024
FRAME_BYTES_MAX = 2048
NOOP_ANSWER = struct.Struct(">BBHBBHIIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a consumer behaves."""

    read_bytes: int = BUFFER_BYTES - FRAME_BYTES_MAX
    rest_s: float = 0.0
    """How long it sleeps after each read."""
    receive_buffer_bytes: int = 0
    """Of its socket; 0 for what the system gives. One smaller than loopback's segments of 64 KiB makes TCP itself
    crawl, at a few KiB each 0.2 s, for as long as the connection lives."""
    flow_control_bytes: int = 0
    """Its connection buffer, of which it acknowledges halves; 0 for no flow control."""
    knows_collections: bool = True

    @property
    def is_slow(self) -> bool:
        return self.rest_s > 0


class Consumer:
    """One connection with a stream of each vbucket, or of each up to what is there now."""

    def __init__(
        self, node: NodeProcess, name: str, manner: Manner, state: CheckedStreams, flags: StreamFlags | None = None
    ) -> None:
        self.name = name
        self.manner = manner
        self.state = state
        self.is_in_a_hurry = False
        """A slow consumer that wants to get to the end."""
        self.received_bytes = 0
        self.reopened = 0
        self._flags = StreamFlags(0) if flags is None else flags
        self._unacked_bytes = 0
        self._buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
        self._filled = 0
        self.sock = self._open(node)

    def _open(self, node: NodeProcess) -> socket.socket:
        left_out = set() if self.manner.knows_collections else {Feature.COLLECTIONS}
        features = tuple(feature for feature in FEATURES if feature not in left_out)
        connection = KvConnection.open(
            node.address, Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=features)
        )
        connection.request(Open(key=self.name.encode()))
        connection.request(Control(key=b"enable_noop", value=b"true"))
        if self.manner.flow_control_bytes:
            size = str(self.manner.flow_control_bytes).encode()
            connection.request(Control(key=b"connection_buffer_size", value=size))
        if self.manner.receive_buffer_bytes:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.manner.receive_buffer_bytes)
        connection.sock.sendall(b"".join(self._request(vbucket) for vbucket in range(self.state.vbuckets)))
        connection.sock.setblocking(False)
        return connection.sock

    def _request(self, vbucket: int) -> bytes:
        """Ask for a stream from where this consumer is."""
        stream = self.state.streams[vbucket]
        stream[PHASE] = REQUESTED
        passed = Seqno(int(stream[PASSED]))
        return StreamRequest(
            vbucket=VBucketId(vbucket),
            opaque=vbucket,
            flags=self._flags,
            start_seqno=passed,
            vbuuid=Vbuuid(int(stream[VBUUID]) if passed else 0),
            snapshot_start_seqno=Seqno(min(passed, int(stream[SNAPSHOT_START]))),
            snapshot_end_seqno=Seqno(int(stream[SNAPSHOT_END])),
        ).encode()

    def read(self) -> None:
        """Take what is there, or a little of it; answer what has to be answered."""
        room = len(self._buffer) - self._filled
        size = room if self.is_in_a_hurry else min(self.manner.read_bytes, room)
        received = self.sock.recv_into(self._buffer[self._filled : self._filled + size])
        assert received, f"the node has closed the connection of {self.name}"
        self.received_bytes += received
        self._filled += received
        seen = self.state.receive(self._buffer[: self._filled])
        rest = self._buffer[seen.consumed_bytes : self._filled].copy()
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)
        self._unacked_bytes += seen.flow_control_bytes
        answers = b"".join(NOOP_ANSWER.pack(0x81, 0x5C, 0, 0, 0, 0, 0, seen.noop_opaque, 0) for _ in range(seen.noops))
        if self.manner.flow_control_bytes and self._unacked_bytes >= self.manner.flow_control_bytes // 2:
            answers += BufferAck(acked_bytes=self._unacked_bytes).encode()
            self._unacked_bytes = 0
        if seen.has_ends and not self._flags & StreamFlags.LATEST:
            answers += self._reopen()
        if answers:
            assert self.sock.send(answers) == len(answers), "a few bytes always fit"

    def _reopen(self) -> bytes:
        """A stream may end because its snapshot has been compacted away under a slow consumer, and for nothing else."""
        requests = []
        for vbucket in np.flatnonzero(self.state.streams[:, PHASE] == ENDED).tolist():
            reason = StreamEndReason(int(self.state.streams[vbucket, END_REASON]))
            assert reason is StreamEndReason.TOO_SLOW, f"the stream of vbucket {vbucket} ended with {reason.name}"
            requests.append(self._request(vbucket))
        self.reopened += len(requests)
        return b"".join(requests)

    @property
    def passed(self) -> np.ndarray:
        return self.state.streams[:, PASSED]

    @property
    def is_at_end(self) -> bool:
        """Whether all streams have ended; those without the flag `LATEST` never do."""
        return bool((self.state.streams[:, PHASE] == ENDED).all())

    def describe(self, stored: CheckedStreams) -> str:
        """What a test tells where this consumer does not get to the end."""
        behind = np.flatnonzero(self.passed != stored.streams[:, PASSED])
        return (
            f"{self.name}: {self.manner}, {self.received_bytes} bytes received, {self._filled} of them not applied, "
            f"{self._unacked_bytes} not acknowledged, {self.reopened} streams reopened, {len(behind)} streams behind: "
            f"{[(int(vbucket), self.state.streams[vbucket].tolist()) for vbucket in behind[:3]]}"
        )

    def close(self) -> None:
        self.sock.close()


class Selection:
    """Serves consumers: a fast one whenever it has something to read, a slow one after its rest."""

    def __init__(self, consumers: list[Consumer]) -> None:
        self._selector = selectors.DefaultSelector()
        self._resting: list[tuple[float, int, Consumer]] = []
        self._numbers = itertools.count()
        for consumer in consumers:
            self._selector.register(consumer.sock, selectors.EVENT_READ, consumer)

    def run(self, seconds: float) -> None:
        """Serve the consumers for a while."""
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            while self._resting and (self._resting[0][0] <= now_s or self._resting[0][2].is_in_a_hurry):
                consumer = heapq.heappop(self._resting)[2]
                self._selector.register(consumer.sock, selectors.EVENT_READ, consumer)
            next_s = min(end_s, self._resting[0][0]) if self._resting else end_s
            for key, _ in self._selector.select(max(0.0, next_s - now_s)):
                self._serve(key.data)

    def _serve(self, consumer: Consumer) -> None:
        consumer.read()
        if consumer.manner.is_slow and not consumer.is_in_a_hurry:
            self._selector.unregister(consumer.sock)
            wake_s = time.monotonic() + consumer.manner.rest_s
            heapq.heappush(self._resting, (wake_s, next(self._numbers), consumer))

    def close(self) -> None:
        self._selector.close()
