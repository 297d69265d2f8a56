"""Which rows people are shown: every vbucket tells of a collection that comes or goes, and they are told once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.client.batches import OPS

EVENTS_MAX = 1024
"""Kept in mind. One that is forgotten would be shown once more."""

_EVENT_OPS = frozenset(op for op in OPS if op.startswith(("collection_", "scope_")))

_COLUMNS = ["op", "scope", "collection", "collection_id", "vbucket"]

_Event = tuple[object, ...]


class EventsOnce:
    """All rows but events that another vbucket has told already.

    The rows have no manifest uid, and a collection can be changed twice. But a vbucket tells of each change once: one
    that says the same again, as after a flush or a rollback, tells of something new, and the others will follow.
    """

    def __init__(self) -> None:
        self._told: dict[_Event, _Told] = {}

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The numbers of the rows to be shown, rising."""
        ops = batch.column("op")
        are_events = np.array([op in _EVENT_OPS for op in ops.dictionary.to_pylist()])[ops.indices.to_numpy()]
        shown = ~are_events
        if are_events.any():
            events = batch.select(_COLUMNS).filter(pa.array(are_events))
            told = zip(*(column.to_pylist() for column in events.columns), strict=True)
            shown[are_events] = [self._is_new(event, vbucket) for *event, vbucket in told]
        return np.flatnonzero(shown)

    def _is_new(self, event: list[object], vbucket: int) -> bool:
        # The last that was heard of is the last to be forgotten.
        told = self._told[tuple(event)] = self._told.pop(tuple(event), _Told())
        if len(self._told) > EVENTS_MAX:
            del self._told[next(iter(self._told))]
        told.by_vbucket[vbucket] += 1
        is_new = told.by_vbucket[vbucket] > told.shown
        told.shown += is_new
        return is_new


@dataclass(slots=True)
class _Told:
    """How often an event has been told, and shown."""

    shown: int = 0
    by_vbucket: Counter[int] = field(default_factory=Counter)
