"""What a session has to send: answers that wait for a commit, and answers that wait for a durable write's outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.errors import MalformedFrameInfo
from headwater.node.durability.sync_writes import Outcome, SyncWrite
from headwater.node.kv.service import BucketService
from headwater.protocol.frame_info import RequestInfo, decode_frame_infos, find
from headwater.protocol.frames import Frame

DEFERRED_MAX = 1024
"""Durable writes of one connection at a time. Its next requests wait."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Bytes to send, once the bucket has made the commit durable; 0 for at once."""

    data: bytes
    commit: int
    bucket: BucketService | None

    @property
    def may_be_sent(self) -> bool:
        return self.bucket is None or self.commit <= self.bucket.bucket.durable_commit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeferredAnswer:
    """The answer to a durable write. There is none until the write is decided."""

    write: SyncWrite
    bucket: BucketService
    answer: Callable[[Outcome], bytes | None]
    """None where the peer can't be told, and its connection has to be closed instead."""

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
    """The undecided durable writes of one connection, and what has to wait for them.

    A request about the same document does, and so does one that is about no document. All others could not tell whether
    they came before or after, so they are handled at once.
    """

    _by_key: dict[tuple[int, bytes], DeferredAnswer] = field(default_factory=dict)

    def add(self, request: Frame, answer: DeferredAnswer) -> None:
        self._by_key[request.specific, request.key] = answer

    @property
    def is_full(self) -> bool:
        if len(self._by_key) >= DEFERRED_MAX:
            self._forget_decided()
        return len(self._by_key) >= DEFERRED_MAX

    def hold(self, request: Frame, *, in_order: bool) -> bool:
        """Whether a request has to wait. Where the peer lets requests overtake each other, only one with a barrier."""
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
        return find(decode_frame_infos(request.framing_extras), RequestInfo.BARRIER) is not None
    except MalformedFrameInfo:
        # It is refused when it is handled.
        return False
