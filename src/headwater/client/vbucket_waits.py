"""Vbuckets without a stream: since when, until when, and what stood in their way last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headwater.client.backoff import Backoff
from headwater.errors import HeadwaterError
from headwater.protocol.numbers import VBucketId

_NEVER = math.inf
"""When a vbucket is due that has been asked for: not before whoever was asked has answered, or is lost."""


@dataclass(slots=True)
class _Wait:
    since_s: float
    due_s: float
    failures: int = 0
    last: HeadwaterError | None = None


class VBucketWaits:
    """A vbucket waits from when it is first wanted, or its stream is lost, until a server has accepted it."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._waits: dict[VBucketId, _Wait] = {}

    def begin(self, vbucket: VBucketId, *, now_s: float) -> None:
        """It is wanted, and may be asked for at once."""
        self._waits[vbucket] = _Wait(now_s, now_s)

    def again(self, vbucket: VBucketId, error: HeadwaterError | None, *, now_s: float, at_once: bool) -> None:
        """It did not work out, or not for long: ask again, at once or after a delay that grows."""
        wait = self._waits.setdefault(vbucket, _Wait(now_s, now_s))
        wait.last = error or wait.last
        wait.failures += not at_once
        wait.due_s = now_s if at_once else now_s + self._backoff.delay_s(wait.failures)

    def end(self, vbucket: VBucketId) -> None:
        self._waits.pop(vbucket, None)

    def asked(self, vbucket: VBucketId) -> None:
        """It has been asked for. It still waits, for the answer."""
        self._waits[vbucket].due_s = _NEVER

    def hurry(self, vbucket: VBucketId, *, now_s: float) -> None:
        """There is news of it: don't wait any longer, unless it is asked for already."""
        wait = self._waits.get(vbucket)
        if wait is not None and wait.due_s != _NEVER:
            wait.due_s = min(wait.due_s, now_s)

    def due(self, now_s: float) -> Iterator[VBucketId]:
        """Those to be asked for now."""
        return (vbucket for vbucket, wait in self._waits.items() if wait.due_s <= now_s)

    def overdue(self, now_s: float, *, after_s: float) -> tuple[VBucketId, HeadwaterError | None] | None:
        """One that has waited for longer than that, and what stood in its way last."""
        for vbucket, wait in self._waits.items():
            if now_s - wait.since_s > after_s:
                return vbucket, wait.last
        return None
