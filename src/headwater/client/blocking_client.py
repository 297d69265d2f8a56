"""The blocking version of `asyncio_client`: the same names, run by an event loop in a thread.

The loop's thread receives; the caller's thread builds the batches. Nothing is decided here: every call runs in the
loop. Use a client in `with`, or call `close`; a client that is neither closes when it is garbage-collected.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any, NoReturn, Self, Unpack

import pyarrow as pa

from headwater.client import asyncio_client, reading
from headwater.client.asyncio_client import BucketReader, Checkpoint
from headwater.client.changes import Change
from headwater.client.cluster_map import ClusterMap
from headwater.client.groups import Membership
from headwater.client.metrics import ReaderMetrics
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions
from headwater.client.reading import ClientView
from headwater.client.settings import CONNECT_KEYWORDS, ClientSettings, ConnectKeywords
from headwater.client.threads import LoopThread
from headwater.errors import LocalProtocolError
from headwater.options import list_keywords


class Batches:
    """Arrow record batches, one after the other. Their schema is `schema`.

    Any consumer of an Arrow stream takes all remaining batches: `pyarrow.table(batches)`, `polars.DataFrame(batches)`,
    `duckdb.from_arrow(batches)`, `pyarrow.table(batches).to_pandas()`. A read that was given no end then ends at
    "now".
    """

    def __init__(self, batches: reading.Batches, thread: LoopThread, client: Client) -> None:
        self._batches = batches
        self._thread = thread
        self._client = client
        """Keeps a client that has no other reference alive as long as its reads."""

    @property
    def offsets(self) -> Offsets:
        """The offsets after the last batch that was returned."""
        return self._batches.offsets

    @property
    def finished(self) -> Offsets:
        """The offsets before the last batch that was returned: the caller has finished with everything up to here."""
        return self._batches.finished

    @property
    def metrics(self) -> ReaderMetrics:
        return self._batches.metrics

    def start(self) -> None:
        """Wait until every vbucket has its offset. Without this call, the first batch does that.

        With `start="now"`, these offsets define "now": everything written after this returns is read.
        """
        self._thread.run(self._batches.start)

    @property
    def schema(self) -> pa.Schema:
        """The schema of all batches."""
        return self._batches.schema

    def __repr__(self) -> str:
        return f"<Batches of {self._batches.summary()}>"

    def summary(self) -> str:
        return self._batches.summary()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> Any:
        if self._batches.is_closed:
            raise LocalProtocolError(
                "the read has ended, and can be consumed only once",
                hint="Call batches() again, or keep a table: pyarrow.table(client.batches())",
            )
        self._batches.end_now()
        # Libraries request one stream for its schema, and another for the rows: nothing is read before the second.
        return pa.RecordBatchReader.from_batches(self.schema, self).__arrow_c_stream__(requested_schema)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        # `pandas.DataFrame` does not take an Arrow stream: it asks for an array, or makes a list of what it can
        # iterate over, and the list of a read without an end would never be complete.
        raise LocalProtocolError(
            "pandas.DataFrame can't read an Arrow stream",
            hint="Call pyarrow.table(batches).to_pandas(), or pandas.DataFrame.from_arrow(batches) from pandas 3 on",
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._batches.is_closed:
            raise StopIteration
        with self._batches.recorded() as record:
            while (pieces := self._thread.run(self._batches.take)) is not None:
                batch = self._batches.build(pieces)
                if batch.num_rows:
                    record(batch)
                    return batch
        raise StopIteration

    def close(self) -> None:
        """Save the offsets that are finished, and close everything."""
        if not self._batches.is_closed:
            self._thread.run(self._batches.aclose)


class Changes(reading.ChangeWalk[Batches]):
    """Typed changes, one after the other."""

    def start(self) -> None:
        """Wait until every vbucket has its offset. See `Batches.start`."""
        self._batches.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        while (change := next(self._left, None)) is None:
            if not self._has_next_chunk():
                self._enter(next(self._batches))
        return change

    def close(self) -> None:
        """Save the offsets that are finished, and close everything."""
        self._batches.close()


@list_keywords(CONNECT_KEYWORDS)
def connect(url: str, **settings: Unpack[ConnectKeywords]) -> Client:
    """Make a client of the bucket that the connection string names. Use it in `with`, or `close` it in the end.

    The client connects when it is entered, or when it is first used. Arguments and errors are those of
    `headwater.connect`.
    """
    return Client(ClientSettings.make(url, **settings))


class Client(BucketReader[Batches, Changes]):
    """Reads one bucket."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._client = asyncio_client.Client(settings)
        self._thread: LoopThread | None = None
        self._is_closed = False
        self._turn = threading.RLock()
        """Held to connect and to close: two threads may need the first connection at once."""

    def __enter__(self) -> Self:
        self._is_closed = False
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Connect now instead of with the first read. Does nothing if the client is connected."""
        self._opened()
        return self

    def _opened(self) -> LoopThread:
        with self._turn:
            if self._is_closed:
                raise LocalProtocolError(
                    "the client is closed", hint="Create a new client, and read before you close it"
                )
            if self._thread is None:
                self._thread = LoopThread("headwater")
                self._forgotten = weakref.finalize(self, self._thread.abandon, self._client.close)
                # At exit, do not wait for this: all offsets that were due have been saved.
                self._forgotten.atexit = False
                try:
                    self._thread.run(self._client.__aenter__)
                except BaseException:
                    # The next call may be able to connect.
                    self._end_thread()
                    raise
            return self._thread

    def close(self) -> None:
        """End all reads. Offsets that the callers have finished with are saved."""
        with self._turn:
            self._is_closed = True
            self._end_thread()

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._forgotten.detach()
            try:
                thread.run(self._client.close)
            finally:
                thread.close()

    def __repr__(self) -> str:
        return self._view().text()

    def _repr_html_(self) -> str:
        return self._view().html()

    def _view(self) -> ClientView:
        return replace(self._client.view(), is_closed=self._is_closed)

    @property
    def cluster_map(self) -> ClusterMap:
        """The cluster map as of when the client connected."""
        self._opened()
        return self._client.cluster_map

    @property
    def bucket_uuid(self) -> str:
        return self.cluster_map.uuid

    def _walk(self, batches: Batches) -> Changes:
        return Changes(batches)

    def read(
        self,
        options: ReadOptions,
        *,
        checkpoint: Checkpoint | None = None,
        group: Membership | None = None,
        text_keys: bool = False,
    ) -> Batches:
        thread = self._opened()
        batches = self._client.read(options, checkpoint=checkpoint, group=group, text_keys=text_keys)
        return Batches(batches, thread, self)

    def find_start(self, options: ReadOptions) -> Offsets:
        """Find the offsets just before the first changes at or after `options.start`, which must be a time."""
        return self._opened().run(lambda: self._client.find_start(options))
