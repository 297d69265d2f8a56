"""Answers that a connection holds back, and what they wait for, sans-IO: commits and undecided durable writes.

`kv.session` creates these, asks them what may be sent, and sends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.errors import MalformedFrameInfo
from headwater.node.durability import SyncWrite, WriteOutcome
from headwater.node.service import BucketService
from headwater.protocol import frames
from headwater.protocol.frames import Frame, RequestInfo

DEFERRED_MAX = 1024
"""The most undecided durable writes of one connection. Beyond that its requests wait."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Answers to send once the bucket has made `commit` durable, or immediately if that is 0."""

    data: bytes
    commit: int
    bucket: BucketService | None
    received_s: float
    """When their requests were received."""

    @property
    def may_be_sent(self) -> bool:
        return self.bucket is None or self.commit <= self.bucket.bucket.durable_commit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeferredAnswer:
    """The answer to a durable write, which exists once the write is decided."""

    write: SyncWrite
    bucket: BucketService
    answer: Callable[[WriteOutcome], bytes | None]
    """Returns None if the peer understands no status for the outcome, so that its connection has to be closed."""
    received_s: float

    @property
    def is_decided(self) -> bool:
        return self.write.outcome is not None

    @property
    def data(self) -> bytes:
        return b"" if self.write.outcome is None else self.answer(self.write.outcome) or b""

    @property
    def ends_connection(self) -> bool:
        return self.write.outcome is not None and self.answer(self.write.outcome) is None

    @property
    def may_be_sent(self) -> bool:
        outcome = self.write.outcome
        return outcome is not None and outcome.commit <= self.bucket.bucket.durable_commit


@dataclass(slots=True)
class Deferrals:
    """The undecided durable writes of one connection. They decide which requests have to wait.

    A request for the same document waits, and so does one that names no document. For all others no client can see
    whether they were handled before or after, so they are handled immediately.
    """

    _by_key: dict[tuple[int, bytes], DeferredAnswer] = field(default_factory=dict)

    def add(self, request: Frame, answer: DeferredAnswer) -> None:
        self._by_key[request.specific, request.key] = answer

    @property
    def is_full(self) -> bool:
        if len(self._by_key) >= DEFERRED_MAX:
            self._forget_decided()
        return len(self._by_key) >= DEFERRED_MAX

    def must_wait(self, request: Frame, *, in_order: bool) -> bool:
        """Whether a request has to wait. Unless `in_order`, only one with a barrier does."""
        if not self._by_key:
            return False
        if not request.key if in_order else _has_barrier(request):
            self._forget_decided()
            return bool(self._by_key)
        deferred = self._by_key.get((request.specific, request.key)) if in_order else None
        return deferred is not None and not deferred.is_decided

    def _forget_decided(self) -> None:
        self._by_key = {key: answer for key, answer in self._by_key.items() if not answer.is_decided}


def _has_barrier(request: Frame) -> bool:
    try:
        return frames.find(frames.decode_frame_infos(request.framing_extras), RequestInfo.BARRIER) is not None
    except MalformedFrameInfo:
        # The handler will refuse the request.
        return False


class NotDurable:
    """The bytes that a connection has written into commits that are not durable yet, to bound them."""

    def __init__(self) -> None:
        self._parts: deque[tuple[BucketService, int, int]] = deque()
        """Bucket, commit and bytes, oldest first."""

    def add(self, bucket: BucketService, before_bytes: int) -> int:
        """Count the bytes of the pending commit beyond `before_bytes`, and return them."""
        commit, written = bucket.bucket.pending_commit, bucket.bucket.pending_bytes - before_bytes
        if written <= 0:
            return 0
        if self._parts and self._parts[-1][0] is bucket and self._parts[-1][1] == commit:
            self._parts[-1] = (bucket, commit, self._parts[-1][2] + written)
        else:
            self._parts.append((bucket, commit, written))
        return written

    @property
    def total_bytes(self) -> int:
        while self._parts and self._parts[0][1] <= self._parts[0][0].bucket.durable_commit:
            self._parts.popleft()
        return sum(part[2] for part in self._parts)
