"""What a consumer has to say: requests, answers, and acknowledgements that wait until what they tell is durable."""

from __future__ import annotations

from collections import deque

from headwater.node.consumer.sync_writes import SyncWriteReceiver
from headwater.protocol.flow_control import ReceiveWindow
from headwater.protocol.messages.base import ErrorResponse, Message, PlainResponse
from headwater.protocol.messages.dcp_connection import BufferAck
from headwater.protocol.opcodes import Opcode
from headwater.protocol.status import Status
from headwater.store.bucket import Bucket


class Outbox:
    """Bytes for the other end, in order; those that wait keep their order among themselves."""

    def __init__(self, bucket: Bucket, *, buffer_bytes: int) -> None:
        self._bucket = bucket
        self._data = bytearray()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._window = ReceiveWindow(size_bytes=buffer_bytes)
        self._taken: deque[tuple[int, int]] = deque()
        """Bytes that were taken, and the commit that makes them durable."""
        self.undurable_bytes = 0
        self.acked_bytes = 0
        self.acknowledging: dict[int, SyncWriteReceiver] = {}
        """Streams with durable writes to acknowledge, by their opaques."""

    def send(self, message: Message) -> None:
        self._data += message.encode()

    def send_when_durable(self, message: Message) -> None:
        """Send it once everything that was taken so far is durable."""
        self._waiting.append((self._last_commit(), message.encode()))
        self.on_durable()

    def succeed(self, opcode: int, opaque: int, *, when_durable: bool = False) -> None:
        answer = PlainResponse(opcode=Opcode(opcode), opaque=opaque)
        (self.send_when_durable if when_durable else self.send)(answer)

    def refuse(self, opcode: int, opaque: int, status: Status) -> None:
        self.send(ErrorResponse(opcode=Opcode(opcode), opaque=opaque, status=status))

    def count(self, window_bytes: int) -> None:
        """That much was taken of what flow control counts. It is acknowledged when it is durable.

        So the producer waits when the disk does, and what is held in memory is never more than the buffer.
        """
        if window_bytes:
            self._taken.append((self._last_commit(), window_bytes))
            self.undurable_bytes += window_bytes
            self._acknowledge()

    def on_durable(self) -> None:
        """The bucket has published a commit."""
        while self._waiting and self._waiting[0][0] <= self._bucket.durable_commit:
            self._data += self._waiting.popleft()[1]
        for opaque, sync_writes in list(self.acknowledging.items()):
            self._data += sync_writes.on_durable()
            if not sync_writes.is_waiting:
                del self.acknowledging[opaque]
        self._acknowledge()

    def on_void(self) -> None:
        """What was not durable has been taken back: nobody is told that it is."""
        self._waiting.clear()

    @property
    def unacked_bytes(self) -> int:
        return self.undurable_bytes + self._window.unacked_bytes

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data

    @property
    def is_empty(self) -> bool:
        return not self._data

    def _last_commit(self) -> int:
        """The commit that makes everything durable that was taken so far."""
        if not self._bucket.pending.is_empty:
            return self._bucket.pending.number
        return 0 if self._bucket.in_flight is None else self._bucket.in_flight.number

    def _acknowledge(self) -> None:
        while self._taken and self._taken[0][0] <= self._bucket.durable_commit:
            window_bytes = self._taken.popleft()[1]
            self.undurable_bytes -= window_bytes
            self._window = self._window.taken(window_bytes)
        if self._window.ack_is_due:
            acked_bytes, self._window = self._window.acknowledge()
            self.acked_bytes += acked_bytes
            self.send(BufferAck(acked_bytes=acked_bytes))
