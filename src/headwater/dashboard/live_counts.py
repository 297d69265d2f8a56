"""How many documents each vbucket has.

The index knows of deleted documents, too, so they have to be counted. A vbucket is counted anew when it has changed,
and a tick looks at a bounded number of slots; with many documents a count is some seconds old.
"""

from __future__ import annotations

import numpy as np

from headwater.dashboard.kernels import count_live
from headwater.dashboard.limits import COUNTED_SLOTS_MAX
from headwater.dashboard.source import Counts
from headwater.store.bucket import Bucket
from headwater.store.index import CAPACITY, COUNT


class LiveCounts:
    """The documents of a bucket's vbuckets, without the deleted."""

    def __init__(self, vbuckets: int) -> None:
        self.counts: Counts = np.zeros(vbuckets, dtype=np.int64)
        self._stamps = np.zeros(vbuckets, dtype=np.uint64)
        self._next = 0

    def refresh(self, bucket: Bucket, *, slots_max: int = COUNTED_SLOTS_MAX) -> None:
        """Count what has changed, in turns."""
        numbers, tables = bucket.vbuckets, bucket.index.tables
        stamps = numbers.high_seqnos ^ numbers.vbuuids
        changed = np.flatnonzero((stamps != self._stamps) & (tables[:, COUNT] > 0))
        empty = tables[:, COUNT] == 0
        self.counts[empty] = 0
        self._stamps[empty] = stamps[empty]
        in_turn = np.concatenate((changed[changed >= self._next], changed[changed < self._next]))
        # As many as the bound allows, and one where even that has more slots.
        fitting = max(1, int(np.searchsorted(np.cumsum(tables[in_turn, CAPACITY]), slots_max, side="right")))
        counted = in_turn[:fitting]
        count_live(bucket.index.slots, tables, counted, self.counts)
        self._stamps[counted] = stamps[counted]
        self._next = int(in_turn[fitting]) if fitting < len(in_turn) else 0
