"""The blocking twin of `asyncio_client`: the same names, and an event loop in a thread behind them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Generic, Self, TypeVar, Unpack

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
from headwater.errors import LocalProtocolError

# An event loop in a thread of its own, for callers that have none.
#
# The loop goes on while the caller is busy: noops are answered and bytes received, up to the flow-control window,
# however long the caller takes with a batch.


T = TypeVar("T")

INTERRUPT_S_MAX = 0.5
"""A signal that comes just before a thread begins to wait does not wake it: so long may an interrupt go unnoticed."""
CANCEL_S_MAX = 10.0
"""How long an interrupted call may take to come to its end."""


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = _new_loop()
        # A program that forgets to close the client must still be able to end.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait for what it returns or raises. Interrupted, it is cancelled, and waited for."""
        if self.is_closed:
            work.close()
            raise LocalProtocolError("the client is closed", hint="Read inside of `with`, or make a new client")
        call = _Call(self._loop, work)
        try:
            # In here, too: the interrupt may come as soon as the loop has been told.
            self._loop.call_soon_threadsafe(call.start)
            while not call.ended.wait(INTERRUPT_S_MAX):
                pass
        except BaseException:
            self._loop.call_soon_threadsafe(call.cancel)
            call.ended.wait(CANCEL_S_MAX)
            raise
        return call.result()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """End the thread. Whatever still runs in it is cancelled."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Call(Generic[T]):
    """A coroutine that one thread has given to the loop of another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.ended = threading.Event()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(lambda _: self.ended.set())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()  # interrupted before the loop was told to start it
            self.ended.set()

    def result(self) -> T:
        assert self._task is not None, "started first"
        return self._task.result()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


# A read as a caller without asyncio sees it. The loop's thread receives; batches are built in the caller's.


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
