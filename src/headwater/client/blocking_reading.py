"""A read as a caller without asyncio sees it. The loop's thread receives; batches are built in the caller's."""

from __future__ import annotations

from typing import Self

import pyarrow as pa

from headwater.client import reading
from headwater.client.changes import Change
from headwater.client.loop_thread import LoopThread
from headwater.client.metrics import ReaderMetrics
from headwater.client.offsets import Offsets


class Batches:
    """Arrow record batches, one after the other. The schema is `headwater.client.batches.change_schema`."""

    def __init__(self, batches: reading.Batches, thread: LoopThread) -> None:
        self._batches = batches
        self._thread = thread

    @property
    def offsets(self) -> Offsets:
        """Behind the last batch that was handed out."""
        return self._batches.offsets

    @property
    def finished(self) -> Offsets:
        """Before the last batch that was handed out: what the caller has asked for more after."""
        return self._batches.finished

    @property
    def metrics(self) -> ReaderMetrics:
        return self._batches.metrics

    def start(self) -> None:
        """Return when every vbucket has its place, which a read otherwise finds with its first batch.

        With `start="now"` these places are "now": all that is written after this has returned is handed out.
        """
        self._thread.run(self._batches.start())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._batches.is_closed:
            raise StopIteration
        while (pieces := self._thread.run(self._batches.take())) is not None:
            batch = self._batches.build(pieces)
            if batch.num_rows:
                return batch
        raise StopIteration

    def close(self) -> None:
        """Save what is finished, and leave nothing open."""
        if not self._batches.is_closed:
            self._thread.run(self._batches.aclose())


class Changes:
    """Typed changes, one after the other."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._walk = reading.BatchWalk()

    @property
    def offsets(self) -> Offsets:
        """Behind the last change that was handed out."""
        return self._walk.offsets(behind=self._batches.offsets)

    @property
    def metrics(self) -> ReaderMetrics:
        return self._batches.metrics

    def start(self) -> None:
        """Return when every vbucket has its place. See `Batches.start`."""
        self._batches.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        while (change := self._walk.next_change()) is None:
            batch = next(self._batches)
            self._walk.enter(batch, before=self._batches.finished)
        return change

    def close(self) -> None:
        self._batches.close()
