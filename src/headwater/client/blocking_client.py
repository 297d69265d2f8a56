"""The blocking twin of `asyncio_client`: the same names, and an event loop in a thread behind them.

The loop's thread receives; batches are built in the caller's. Nothing is decided here: every call is run in the loop.
"""

from __future__ import annotations

from typing import Self, Unpack

import pyarrow as pa

from headwater.client import asyncio_client, reading
from headwater.client.changes import Change
from headwater.client.checkpoints.file import CheckpointStore
from headwater.client.cluster_map import ClusterMap
from headwater.client.groups.membership import Membership
from headwater.client.metrics import ReaderMetrics
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadKeywords, ReadOptions
from headwater.client.settings import ClientSettings, ConnectKeywords
from headwater.client.threads import LoopThread


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
        """Return when every vbucket has its offset, which a read otherwise finds with its first batch.

        With `start="now"` these offsets are "now": all that is written after this has returned is read.
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
        """Return when every vbucket has its offset. See `Batches.start`."""
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


def connect(url: str, **settings: Unpack[ConnectKeywords]) -> Client:
    """A client of the bucket that the connection string names. Use it in `with`."""
    return Client(ClientSettings.make(url, **settings))


def connect_with(settings: ClientSettings) -> Client:
    """As `connect`, with settings that were made elsewhere, perhaps in another process."""
    return Client(settings)


class Client:
    """Reads one bucket."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._client = asyncio_client.Client(settings)
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread("headwater")
        try:
            self._thread.run(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all reads. What their callers have finished with is saved."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._client.close())
            finally:
                thread.close()

    @property
    def cluster_map(self) -> ClusterMap:
        """As it was when the client connected."""
        return self._client.cluster_map

    @property
    def bucket_uuid(self) -> str:
        return self._client.bucket_uuid

    def batches(
        self,
        *,
        checkpoint: CheckpointStore | None = None,
        group: Membership | None = None,
        **options: Unpack[ReadKeywords],
    ) -> Batches:
        """Changes as Arrow record batches. See the asyncio client for the arguments."""
        return self.read(ReadOptions.make("batches", **options), checkpoint=checkpoint, group=group)

    def changes(
        self,
        *,
        checkpoint: CheckpointStore | None = None,
        group: Membership | None = None,
        **options: Unpack[ReadKeywords],
    ) -> Changes:
        """Changes as objects, one by one. The arguments are those of `batches`."""
        return Changes(self.read(ReadOptions.make("changes", **options), checkpoint=checkpoint, group=group))

    def read(
        self, options: ReadOptions, *, checkpoint: CheckpointStore | None = None, group: Membership | None = None
    ) -> Batches:
        """As `batches`, with options that were made before."""
        batches = self._client.read(options, checkpoint=checkpoint, group=group)
        assert self._thread is not None, "an unconnected client has refused already"
        return Batches(batches, self._thread)
