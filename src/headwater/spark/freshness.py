"""How far the tables are behind the bucket, and when the documents are merged. Pure: clocks and counts come in.

Two numbers say how far `changes` is behind. The lag in seqnos is counted from what the bucket says, at any time. The
lag in seconds is the age of the newest look at the bucket that the tables hold everything of: whatever was written
before that look is in the tables. Both are asked independently of batches, so a batch that never ends shows.

`documents` is behind `changes` by what is not merged yet. Merging every batch would be best, and costs most where a few
changes touch many files. So a merge waits until the machine has done something else for as long as the last one took,
unless a change would wait for longer than it may.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId

WAIT_S_MAX = 60.0
MERGE_SHARE = 0.5
_LOOKS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How fresh `documents` is kept."""

    wait_s_max: float = WAIT_S_MAX
    """A change waits at most so long to be merged, where the machine can keep up."""
    merge_share: float = MERGE_SHARE
    """The part of the time that merging may take while no change waits for longer than that: from 0 to 1."""


class MergeClock:
    """When it is time to merge."""

    def __init__(self, rules: Freshness) -> None:
        self._rules = rules
        self._ended_s = float("-inf")
        self._took_s = 0.0

    def on_merged(self, *, began_s: float, ended_s: float) -> None:
        self._ended_s, self._took_s = ended_s, ended_s - began_s

    def is_due(self, *, now_s: float, waited_s: float) -> bool:
        """Whether to merge now, when the oldest change has waited for `waited_s`."""
        if waited_s + self._took_s >= self._rules.wait_s_max:
            return True
        share = self._rules.merge_share
        return share > 0 and now_s - self._ended_s >= self._took_s * (1 - share) / share


class Lag:
    """How far `changes` is behind the bucket. May be used from several threads."""

    def __init__(self, places: Offsets, *, as_of_s: float | None) -> None:
        """`as_of_s` is what the tables say of themselves: when the bucket was last known to be in them."""
        self._lock = threading.Lock()
        self._looks: list[tuple[float, NDArray[np.uint64]]] = []
        """Times and high seqnos, oldest first, that the tables do not hold everything of."""
        self._apart_s = 0.0
        self._high: NDArray[np.uint64] | None = None
        self._as_of_s = as_of_s
        self._places = np.zeros(0, dtype=np.uint64)
        self.on_places(places)

    @property
    def seqnos(self) -> int | None:
        """How many seqnos the bucket has that the tables do not; None where the bucket can't be asked."""
        with self._lock:
            if self._high is None:
                return None
            return int(np.sum(np.maximum(self._high, self._held(len(self._high))) - self._held(len(self._high))))

    @property
    def as_of_s(self) -> float | None:
        """Everything that was written to the bucket before this time is in the tables."""
        with self._lock:
            return self._as_of_s

    def seconds(self, now_s: float) -> float | None:
        as_of_s = self.as_of_s
        return None if as_of_s is None else max(0.0, now_s - as_of_s)

    def on_look(self, high_seqnos: Mapping[VBucketId, Seqno], *, at_s: float) -> None:
        """The bucket was asked at this time, or a little later, how far its vbuckets are."""
        high = np.zeros(max(high_seqnos, default=-1) + 1, dtype=np.uint64)
        high[list(high_seqnos)] = list(high_seqnos.values())
        with self._lock:
            self._high = high
            self._looks.append((at_s, high))
            self._settle()
            if len(self._looks) > 1 and at_s - self._looks[-2][0] < self._apart_s:
                del self._looks[-1]
            elif len(self._looks) > _LOOKS_MAX:
                # The lag is long by now: looks that are twice as far apart tell it well enough.
                self._apart_s = 2 * (at_s - self._looks[0][0]) / len(self._looks)
                self._looks = self._looks[::2]

    def on_unreachable(self) -> None:
        """The bucket can't be asked: how far it is, is not known."""
        with self._lock:
            self._high = None

    def on_places(self, places: Offsets, *, is_missing: bool = False) -> None:
        """The tables hold this now; with `is_missing` they have lost something that they held."""
        held = np.zeros(max(places.offsets, default=-1) + 1, dtype=np.uint64)
        for vbucket, at in places.offsets.items():
            held[vbucket] = at.seqno
        with self._lock:
            self._places = held
            if is_missing:
                self._as_of_s = None
            self._settle()

    def _held(self, vbuckets: int) -> NDArray[np.uint64]:
        held = np.zeros(vbuckets, dtype=np.uint64)
        held[: min(vbuckets, len(self._places))] = self._places[:vbuckets]
        return held

    def _settle(self) -> None:
        """The newest look that the tables hold all of says since when they do. Those before it tell nothing more: a
        failover may have left them with seqnos that will never come."""
        for number in range(len(self._looks) - 1, -1, -1):
            at_s, high = self._looks[number]
            if bool(np.all(high <= self._held(len(high)))):
                self._as_of_s = at_s if self._as_of_s is None else max(at_s, self._as_of_s)
                del self._looks[: number + 1]
                self._apart_s = self._apart_s if self._looks else 0.0
                return
