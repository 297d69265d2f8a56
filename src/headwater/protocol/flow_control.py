"""Flow control: how many bytes may be on their way to a consumer.

The consumer states the size of its buffer; the producer counts what it sends against it and stops when the buffer is
full; the consumer acknowledges what it has taken. Whole frames count, header included. The producer sends while any
room is left, so a window may be overdrawn by one frame: that is what real servers do, and a frame larger than the
buffer could never be sent otherwise. Noops, responses and control traffic do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.protocol.features import Opcode

COUNTED = frozenset(
    {
        Opcode.DCP_STREAM_END,
        Opcode.DCP_SNAPSHOT_MARKER,
        Opcode.DCP_MUTATION,
        Opcode.DCP_DELETION,
        Opcode.DCP_EXPIRATION,
        Opcode.DCP_FLUSH,
        Opcode.DCP_SET_VBUCKET_STATE,
        Opcode.DCP_SYSTEM_EVENT,
        Opcode.DCP_PREPARE,
        Opcode.DCP_COMMIT,
        Opcode.DCP_ABORT,
        Opcode.DCP_SEQNO_ADVANCED,
        Opcode.DCP_OSO_SNAPSHOT,
        Opcode.DCP_CACHE_TRANSFER,
        Opcode.DCP_CACHE_TRANSFER_END,
    }
)
"""The messages that take room in the consumer's buffer."""

PREPARE_SURCHARGE_BYTES = 2
"""Real producers count two bytes more for a prepare than they send, and expect them to be acknowledged."""


def counted_bytes(opcode: int, frame_bytes: int) -> int:
    """Return how much of the window a frame of this opcode and length takes."""
    if opcode not in COUNTED:
        return 0
    return frame_bytes + PREPARE_SURCHARGE_BYTES if opcode == Opcode.DCP_PREPARE else frame_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWindow:
    """The producer's side. A size of 0 means that the consumer has not asked for flow control."""

    size_bytes: int = 0
    unacked_bytes: int = 0

    @property
    def room_bytes(self) -> int | None:
        """Bytes that fit; None for no limit, negative if the window is overdrawn."""
        return self.size_bytes - self.unacked_bytes if self.size_bytes else None

    @property
    def is_open(self) -> bool:
        room = self.room_bytes
        return room is None or room > 0

    def sent(self, frame_bytes: int) -> SendWindow:
        return replace(self, unacked_bytes=self.unacked_bytes + frame_bytes)

    def acked(self, acked_bytes: int) -> SendWindow:
        """Note an acknowledgement. A consumer that acknowledges more than it was sent gains nothing by it."""
        return replace(self, unacked_bytes=max(0, self.unacked_bytes - acked_bytes))

    def resized(self, size_bytes: int) -> SendWindow:
        return replace(self, size_bytes=size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveWindow:
    """The consumer's side: what it has processed and not yet acknowledged."""

    size_bytes: int
    unacked_bytes: int = 0

    def taken(self, frame_bytes: int) -> ReceiveWindow:
        return ReceiveWindow(size_bytes=self.size_bytes, unacked_bytes=self.unacked_bytes + frame_bytes)

    @property
    def ack_is_due(self) -> bool:
        """At a fifth of the buffer: late enough to be cheap, early enough that the producer never waits."""
        return self.unacked_bytes * 5 >= self.size_bytes > 0

    def acknowledge(self) -> tuple[int, ReceiveWindow]:
        """Return the bytes to acknowledge, and the window after that."""
        return self.unacked_bytes, replace(self, unacked_bytes=0)
