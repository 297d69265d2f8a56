"""Collections that are gone: of a vbucket and a collection, what is older than an event is no more.

The event is the end of the collection, or that it was created: one that is created again, at a higher seqno, has been
flushed. It counts in its own vbucket only; each vbucket has its own, at a seqno of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headwater.protocol.kernels.memory import Column


class Barriers:
    """The newest such event by vbucket and collection."""

    def __init__(self, ids: Iterable[int], vbuckets: range) -> None:
        self._ids = np.array(sorted(ids), dtype=np.int64)
        self._first = vbuckets.start
        self._seqnos = np.zeros((len(self._ids), len(vbuckets)), dtype=np.int64)

    def add(self, *, vbuckets: Column, ids: Column, seqnos: Column) -> None:
        is_ours = np.isin(ids, self._ids)
        rows = np.searchsorted(self._ids, ids[is_ours])
        np.maximum.at(self._seqnos, (rows, vbuckets[is_ours] - self._first), seqnos[is_ours])

    def before(self, *, vbuckets: Column, ids: Column, seqnos: Column) -> NDArray[np.bool_]:
        """By row: it is older than the newest event of its collection."""
        return seqnos < self.seqnos(vbuckets=vbuckets, ids=ids)

    def seqnos(self, *, vbuckets: Column, ids: Column) -> NDArray[np.int64]:
        """By row: the seqno of the newest event of its collection, or 0."""
        if not self._seqnos.any():
            return np.zeros(len(vbuckets), dtype=np.int64)
        rows = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        found: NDArray[np.int64] = self._seqnos[rows, vbuckets - self._first]
        return np.where(self._ids[rows] == ids, found, 0)

    def __bool__(self) -> bool:
        return bool(self._seqnos.any())
