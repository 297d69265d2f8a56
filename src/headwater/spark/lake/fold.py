"""Changes of one collection's table and one group of vbuckets, folded to what they leave.

*Pending* changes are those after the batch that the table was last merged at. Of each key the newest counts: a mutation
is the document now, a removal says that there is none. An event that ends a collection takes all that is older.

A vbucket with a rollback among its pending changes is *rolled back*: what the table holds of it is worth nothing any
more, since versions that were overwritten, removed or dropped on the dead branch may be alive again. All of it is taken
from `changes` anew, as far as that is not void.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.protocol.kernels.memory import Column
from headwater.spark.lake.barriers import Barriers
from headwater.spark.lake.change_rows import (
    COLLECTION_CREATED,
    COLLECTION_DROPPED,
    EXPIRATION,
    MUTATION,
    ROLLBACK,
    ChangeRows,
    Marks,
)
from headwater.spark.lake.key_index import KeyIndex, document_places


def rolled_back(pending: Sequence[ChangeRows], *, after_batch: int) -> dict[int, int]:
    """The vbuckets with a rollback after a batch, and the least seqno that one of them kept.

    A rollback that another one made void counts as well: what it took back stays so.
    """
    found: dict[int, int] = {}
    for rows in pending:
        marks = (rows.ops == ROLLBACK) & (rows.batches > after_batch)
        for vbucket, kept in zip(rows.vbuckets[marks].tolist(), rows.seqnos[marks].tolist(), strict=True):
            found[vbucket] = min(kept, found.get(vbucket, kept))
    return found


class Fold:
    """What the changes leave. `whole` has all changes of the vbuckets in `rolled`, `pending` those of the others."""

    def __init__(
        self,
        *,
        ids: frozenset[int],
        vbuckets: range,
        after_batch: int,
        rolled: Column,
        pending: Sequence[ChangeRows],
        whole: Sequence[ChangeRows],
    ) -> None:
        self._rolled = rolled
        self._barriers = Barriers(ids, vbuckets)
        self._wanted_ids = np.array(sorted(ids), dtype=np.int64)
        self._parts: list[tuple[ChangeRows, Marks]] = []
        for rows in pending:
            self._take(rows, (rows.batches > after_batch) & ~np.isin(rows.vbuckets, rolled))
        for rows in whole:
            self._take(rows, np.isin(rows.vbuckets, rolled))
        self._seqnos = self._joined("seqnos")
        self._vbuckets = self._joined("vbuckets")
        keys = [rows.keys(marks) for rows, marks in self._parts]
        joined_keys = pa.concat_arrays(keys) if keys else pa.array([], pa.binary())
        self._index = KeyIndex(joined_keys, self._seqnos, document_places(self._vbuckets, self._joined("ids")))
        self._live: Marks = self._index.newest & (self._joined("ops") == MUTATION)
        if self._barriers:
            ids_joined = self._joined("ids")
            self._live &= ~self._barriers.before(vbuckets=self._vbuckets, ids=ids_joined, seqnos=self._seqnos)

    def _take(self, rows: ChangeRows, marks: Marks) -> None:
        marks = marks & ~rows.void
        events = marks & ((rows.ops == COLLECTION_CREATED) | (rows.ops == COLLECTION_DROPPED))
        self._barriers.add(vbuckets=rows.vbuckets[events], ids=rows.ids[events], seqnos=rows.seqnos[events])
        documents = marks & (rows.ops <= EXPIRATION) & np.isin(rows.ids, self._wanted_ids)
        if documents.any():
            self._parts.append((rows, documents))

    def _joined(self, name: str) -> NDArray[np.int64]:
        columns = [getattr(rows, name)[marks] for rows, marks in self._parts]
        return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)

    def can_touch(self, vbuckets: tuple[float, float]) -> bool:
        """Whether rows of a table's file, whose vbuckets lie between two, can be replaced or gone."""
        if self._barriers:
            return True
        low, high = vbuckets
        return any(bool(np.any((touched >= low) & (touched <= high))) for touched in (self._vbuckets, self._rolled))

    def survivors(self, *, keys: pa.Array, vbuckets: Column, seqnos: Column, ids: Column) -> Marks:
        """Of rows that the table has: which of them stay. A row that is newer than its change hides the change."""
        found = self._index.find(keys, document_places(vbuckets, ids))
        has_change = found >= 0
        changed_at = np.where(has_change, self._seqnos[found] if len(self._seqnos) else 0, -1)
        is_rolled = np.isin(vbuckets, self._rolled)
        is_newer = has_change & (seqnos > changed_at) & ~is_rolled
        self._live[found[is_newer]] = False
        stays: Marks = (~has_change | is_newer) & ~is_rolled
        return stays & ~self._barriers.before(vbuckets=vbuckets, ids=ids, seqnos=seqnos)

    @property
    def live_rows(self) -> int:
        return int(self._live.sum())

    def live(self) -> Iterator[pa.Table]:
        """The changes that are documents now, with all their columns. To be asked after `survivors`."""
        start = 0
        for rows, marks in self._parts:
            end = start + int(marks.sum())
            kept = marks.copy()
            kept[marks] = self._live[start:end]
            start = end
            if kept.any():
                yield rows.wide(kept)
