"""How far the tables are behind the bucket, and when the documents are merged. Pure: clocks and counts come in.

Two numbers say how far `changes` is behind. The lag in seqnos is counted from the high seqnos of the bucket, which are
asked for every second, whatever the batches do. The lag in seconds is the age of the newest survey that the tables hold
everything of: whatever was written before it is in the tables. A batch that never ends shows in both.

`documents` is behind `changes` by what is not merged yet. Merging every batch would be best, and costs most where a few
changes touch many files. So a merge waits until the machine has done something else for as long as the last one took,
and until it writes at most a multiple of what has changed, unless a change would wait for longer than it may.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from headwater.client.offsets import Offsets
from headwater.landing.planning import Survey, high_offsets
from headwater.options import suggest_keywords
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset

WAIT_S_MAX = 60.0
MERGE_SHARE = 0.5
WRITE_RATIO = 8.0
WRITE_BYTES_S = 64 * 1024
_SURVEYS_MAX = 256
_SLOW_MERGES = 3
_LATE = 1.1
"""A merge that is begun in time may end a little later than it was expected to."""


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How fresh `documents` is kept."""

    wait_s_max: float = WAIT_S_MAX
    """The longest time that a change waits to be merged, if the machine can keep up."""
    merge_share: float = MERGE_SHARE
    """The share of the time that merging may take while no change waits for longer than that: from 0 to 1."""
    write_ratio: float = WRITE_RATIO
    """While no change waits for longer than that, merges write at most this many times the bytes that changed…"""
    write_bytes_s: float = WRITE_BYTES_S
    """…plus this many bytes a second, so that small tables are merged at once."""


class MergeClock:
    """When it is time to merge."""

    def __init__(self, rules: Freshness) -> None:
        self._rules = rules
        self._ended_s = float("-inf")
        self._took_s = 0.0
        self._slow = 0
        """How many merges in a row were slow."""

    def on_merged(self, *, began_s: float, ended_s: float, waited_s: float = 0.0) -> None:
        """When a merge began, the oldest change had waited for `waited_s`."""
        took_s, rested_s = ended_s - began_s, began_s - self._ended_s
        is_slow = took_s > rested_s or waited_s + took_s > _LATE * self._rules.wait_s_max
        self._slow = self._slow + 1 if is_slow else 0
        self._ended_s, self._took_s = ended_s, took_s

    @property
    def is_behind(self) -> bool:
        """Merges take more than half of the time again and again, or changes wait for longer than they may."""
        return self._slow >= _SLOW_MERGES

    def is_due(self, *, now_s: float, waited_s: float, changed_bytes: float = 0, expected_bytes: float = 0) -> bool:
        """Whether to merge now, when the oldest change has waited for `waited_s`.

        `changed_bytes` wait in `changes`, and the merge is expected to write `expected_bytes`.
        """
        rules, rested_s = self._rules, now_s - self._ended_s
        if waited_s + self._took_s >= rules.wait_s_max:
            return True
        share = rules.merge_share
        if not share or rested_s < self._took_s * (1 - share) / share:
            return False
        return expected_bytes <= rules.write_ratio * changed_bytes + rules.write_bytes_s * rested_s


class LandingLag:
    """How far `changes` is behind the bucket. May be used from several threads."""

    def __init__(self, held: Offsets, *, as_of_s: float | None) -> None:
        """`as_of_s` is what the tables say of themselves: when the bucket was last known to be in them."""
        self._lock = threading.Lock()
        self._surveys: list[tuple[float, dict[VBucketId, StreamOffset]]] = []
        """Times and newest offsets, oldest first, that the tables do not hold everything of."""
        self._apart_s = 0.0
        self._high: Mapping[VBucketId, Seqno] | None = None
        self._last: Mapping[VBucketId, Seqno] = {}
        """With the prepares and aborts at the ends of vbuckets, which the tables may have passed."""
        self._as_of_s = as_of_s
        self._held = held

    @property
    def seqnos(self) -> int | None:
        """How many seqnos the bucket has that the tables do not.

        None where that is not known: the bucket can't be asked, or a failover has taken back what the tables hold.
        """
        with self._lock:
            if self._high is None:
                return None
            ahead = [self._ahead(vbucket, high) for vbucket, high in self._high.items()]
        return sum(ahead) if min(ahead, default=0) >= 0 else None

    @property
    def as_of_s(self) -> float | None:
        """Everything that was written to the bucket before this time is in the tables."""
        with self._lock:
            return self._as_of_s

    def seconds(self, now_s: float) -> float | None:
        as_of_s = self.as_of_s
        return None if as_of_s is None else max(0.0, now_s - as_of_s)

    def on_high_seqnos(self, high_seqnos: Mapping[VBucketId, Seqno]) -> None:
        """The bucket was asked how far its vbuckets are."""
        with self._lock:
            self._high = high_seqnos

    def on_unreachable(self) -> None:
        """The bucket can't be asked: how far it is, is not known."""
        with self._lock:
            self._high = None

    def on_survey(self, survey: Survey, *, at_s: float) -> None:
        """The bucket was asked at this time, or a little later, how far its vbuckets are and on which branch."""
        newest = dict(high_offsets("", survey).offsets)
        with self._lock:
            self._high = {vbucket: at.seqno for vbucket, at in newest.items()}
            self._last = {vbucket: status.last_seqno for vbucket, status in survey.items()}
            self._surveys.append((at_s, newest))
            self._settle()
            if len(self._surveys) > 1 and at_s - self._surveys[-2][0] < self._apart_s:
                del self._surveys[-1]
            elif len(self._surveys) > _SURVEYS_MAX:
                # The lag is long by now: surveys that are twice as far apart show it well enough.
                self._apart_s = 2 * (at_s - self._surveys[0][0]) / len(self._surveys)
                self._surveys = self._surveys[::2]

    def on_offsets(self, held: Offsets, *, is_missing: bool = False) -> None:
        """The tables hold this now; with `is_missing` they have lost something that they held."""
        with self._lock:
            self._held = held
            if is_missing:
                self._as_of_s = None
            self._settle()

    def _ahead(self, vbucket: VBucketId, high: Seqno) -> int:
        """How many seqnos a vbucket is ahead of the tables; below 0 where they hold what it does not."""
        offset = self._held.get(vbucket)
        held = 0 if offset is None else offset.seqno
        return 0 if high < held <= self._last.get(vbucket, high) else high - held

    def _settle(self) -> None:
        """The newest survey that the tables hold all of says since when they do. Those before it say nothing more: a
        failover may have left them with seqnos that will never come."""
        for number in range(len(self._surveys) - 1, -1, -1):
            at_s, newest = self._surveys[number]
            if all(self._holds(vbucket, at) for vbucket, at in newest.items()):
                self._as_of_s = at_s if self._as_of_s is None else max(at_s, self._as_of_s)
                del self._surveys[: number + 1]
                self._apart_s = self._apart_s if self._surveys else 0.0
                return

    def _holds(self, vbucket: VBucketId, newest: StreamOffset) -> bool:
        """Whether the tables have what a vbucket had. On another branch the same seqnos are other changes."""
        offset = self._held.get(vbucket)
        if offset is None or not offset.seqno:
            return not newest.seqno
        return offset.vbuuid == newest.vbuuid and offset.seqno >= newest.seqno
