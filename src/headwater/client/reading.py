"""A read as the caller sees it, under asyncio: batches or typed changes, their offsets, and checkpoints.

The client makes one for each call of `batches()` and `changes()`; the blocking client runs it in a thread. A
checkpoint contains what the caller has finished with. A batch is finished when the caller requests the next one, so a
program that dies or stops in the middle of a batch gets it again: at least once. A program that needs exactly once
keeps `offsets` together with the data, in one transaction, and starts from them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from operator import length_hint
from typing import Any, Generic, Protocol, Self, TypeVar

import pyarrow as pa

from headwater import telemetry
from headwater.client.asyncio_edge import AsyncioEdge
from headwater.client.batches import build_batch, change_schema, raw_schema, with_text_keys
from headwater.client.bootstrap import BucketView
from headwater.client.changes import Change, chunks_of
from headwater.client.checkpoints import CheckpointStore
from headwater.client.collection_names import CollectionFilter, CollectionNames
from headwater.client.metrics import ReaderMetrics, describe_ops
from headwater.client.offsets import Offsets
from headwater.client.pieces import Piece
from headwater.client.read_options import End, ReadOptions
from headwater.client.settings import ClientSettings
from headwater.errors import HeadwaterError, LocalProtocolError
from headwater.phrases import counted, escaped_bytes
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

CHECKPOINT_INTERVAL_S = 5.0
"""The shortest interval between automatic saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStart:
    """The parts of a read, once the bucket is known."""

    edge: AsyncioEdge
    names: CollectionNames
    collections: bool
    """Whether the server has collections."""
    xattrs: bool
    only: CollectionFilter | None
    """The filter to apply here; None if the server filters."""
    bucket_uuid: str
    others: Mapping[VBucketId, StreamOffset]
    """The given offsets of vbuckets that are not read: they are saved together with the others."""
    is_start_found: bool
    """Whether the read starts at "now" or at a time, so that servers determine the offsets."""

    def all_offsets(self, offsets: Mapping[VBucketId, StreamOffset]) -> Offsets:
        return Offsets(self.bucket_uuid, {**self.others, **offsets})

    def build(self, pieces: list[Piece]) -> pa.RecordBatch:
        return build_batch(pieces, self.names, collections=self.collections, xattrs=self.xattrs, only=self.only)


Begin = Callable[[ReadOptions], Awaitable[ReadStart]]


class Batches:
    """Arrow record batches, one after the other. Their schema is `schema`."""

    def __init__(
        self, begin: Begin, options: ReadOptions, checkpoint: CheckpointStore | None = None, *, text_keys: bool = False
    ) -> None:
        self._begin = begin
        self._options = options
        self._checkpoint = checkpoint
        self._text_keys = text_keys
        """Whether keys are text, as users get them. Internal callers compare keys as bytes."""
        self._started: ReadStart | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_closed = False
        self._taken: list[Piece] | None = None
        """Pieces that were taken and not built: a caller that is interrupted in between gets them again."""
        self._finished: dict[VBucketId, StreamOffset] = {}
        self._saved: dict[VBucketId, StreamOffset] = {}
        self._saved_s = 0.0

    # --- its position ---------------------------------------------------------------------------------------------

    @property
    def offsets(self) -> Offsets:
        """The offsets after the last batch that was returned."""
        is_given = self._taken is None
        return self._running().all_offsets(self._running().edge.reader.offsets if is_given else self._finished)

    @property
    def finished(self) -> Offsets:
        """The offsets before the last batch that was returned: the caller has finished with everything up to here."""
        return self._running().all_offsets(self._finished)

    @property
    def metrics(self) -> ReaderMetrics:
        return self._running().edge.reader.metrics

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def schema(self) -> pa.Schema:
        """The schema of all batches."""
        return (change_schema if self._text_keys else raw_schema)(xattrs=self._options.xattrs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.summary()}>"

    def summary(self) -> str:
        """What is read, and its progress: `shop.orders, 3 changes read, 0 seqnos behind`."""
        what = ", ".join(map(str, (*self._options.scopes, *self._options.collections))) or "all collections"
        if self._started is None:
            return f"{what}, {'closed' if self._is_closed else 'not started'}"
        metrics = self.metrics
        behind = metrics.lag().total_seqnos
        state = "ended" if self._is_closed else "lag unknown" if behind is None else f"{behind:,} seqnos behind"
        return f"{what}, {describe_ops(metrics.changes)} read, {state}"

    def end_now(self) -> None:
        """End a read without an end at "now": a library that reads it into a table needs an end.

        Raises `LocalProtocolError` if the read has already started without an end.
        """
        if self._options.end is None and self._started is not None:
            raise LocalProtocolError(
                "the read has started, and has no end", hint='Create one with end="now", or iterate over its batches'
            )
        if self._options.end is None:
            self._options = replace(self._options, end=End.NOW)

    def _running(self) -> ReadStart:
        if self._started is None:
            raise LocalProtocolError(
                "the read has not started yet", hint="Call start(), or request the first batch or change"
            )
        return self._started

    # --- reading --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until every vbucket has its offset. Without this call, the first batch does that.

        With `start="now"`, these offsets define "now": everything written after this returns is read.
        """
        started = await self._start_once()
        if started is None:
            raise LocalProtocolError("the read is closed", hint="Make a new one")
        started.edge.check_offsets()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        with self.recorded() as record:
            while (pieces := await self.take()) is not None:
                batch = self.build(pieces)
                if batch.num_rows:
                    record(batch)
                    return batch
        raise StopAsyncIteration

    @contextmanager
    def recorded(self) -> Iterator[Callable[[pa.RecordBatch], None]]:
        """Record a wait for a batch as a span, once it has a batch or an error. A cancelled wait leaves no span."""
        began_ns = time.time_ns()

        def record(batch: pa.RecordBatch | None, failure: HeadwaterError | None = None) -> None:
            about: dict[str, str | int] = {**telemetry.SYSTEM}
            if self._started is not None:
                about |= {"db.namespace": self.metrics.bucket, "headwater.reader": self.metrics.reader}
            if batch is not None:
                about |= {"headwater.rows": batch.num_rows, "headwater.bytes": batch.nbytes}
            telemetry.Unrecorded(name="headwater.read", attributes=about, began_ns=began_ns).record(failure)

        try:
            yield record
        except HeadwaterError as error:
            record(None, error)
            raise

    async def take(self) -> list[Piece] | None:
        """Return the next pieces as received; None at the end. Batches that were built before count as finished."""
        if self._is_closed:
            return None
        if self._taken is None:
            await self._take_next()
        return self._taken

    async def _take_next(self) -> None:
        started = await self._start_once()
        if started is None:
            return
        self._finished = started.edge.reader.offsets
        await self._save_if_due()
        self._taken = await started.edge.take()
        if self._taken is None:
            self._finished = started.edge.reader.offsets
            await self.aclose()

    def build(self, pieces: list[Piece]) -> pa.RecordBatch:
        """Build the rows of taken pieces. May be called in any thread, one call after the other."""
        started = self._running()
        batch = started.build(pieces)
        started.edge.reader.metrics.on_batch(batch)
        self._taken = None
        return with_text_keys(batch) if self._text_keys else batch

    async def _start_once(self) -> ReadStart | None:
        """Begin to read, once. Returns None if the read was closed meanwhile.

        A caller that is cancelled may call again: the start continues in the background, however short the waits are.
        """
        if self._started is None and not self._is_closed:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            # Unlike awaiting the task itself, cancelling this wait leaves the task running.
            await asyncio.wait([self._starting])
            if not self._starting.cancelled():
                self._starting.result()
        return self._started

    async def _start(self) -> None:
        try:
            await self._enter(await self._begin(self._options))
        except BaseException:
            # Another reader may succeed, and must not find the checkpoint locked.
            await self._close_checkpoint()
            raise

    async def _enter(self, started: ReadStart) -> None:
        try:
            await started.edge.wait_for_offsets()
            if started.is_start_found and started.edge.reader.has_offsets and self._checkpoint is not None:
                # Otherwise a program that dies before its first change would start elsewhere the next time.
                await self._checkpoint.save(started.all_offsets(started.edge.reader.offsets))
        except BaseException:
            await started.edge.close()
            raise
        if self._is_closed:
            await started.edge.close()
            return
        self._started = started
        self._saved_s = asyncio.get_running_loop().time()
        self._saved = self._finished = started.edge.reader.offsets

    # --- checkpoints ----------------------------------------------------------------------------------------------

    async def _save_if_due(self) -> None:
        if asyncio.get_running_loop().time() - self._saved_s >= CHECKPOINT_INTERVAL_S:
            await self.save()

    async def save(self) -> None:
        """Save the finished offsets now."""
        if self._checkpoint is not None and self._finished and self._finished != self._saved:
            await self._checkpoint.save(self.finished)
            self._saved = self._finished
        self._saved_s = asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Save the finished offsets, and close everything."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        try:
            await self.save()
        finally:
            try:
                if self._started is not None:
                    await self._started.edge.close()
            finally:
                await self._close_checkpoint()

    async def _close_checkpoint(self) -> None:
        if self._checkpoint is not None:
            await self._checkpoint.close()


class HasOffsets(Protocol):
    """The batches from which changes are taken, with asyncio or without."""

    @property
    def offsets(self) -> Offsets: ...

    @property
    def finished(self) -> Offsets: ...

    @property
    def metrics(self) -> ReaderMetrics: ...

    def summary(self) -> str: ...


B = TypeVar("B", bound=HasOffsets)


class ChangeWalk(Generic[B]):
    """Iterates over batches change by change, and knows the offsets at each step."""

    def __init__(self, batches: B) -> None:
        self._batches = batches
        self._chunks: Iterator[Sequence[Change]] = iter(())
        """The remaining chunks of the batch."""
        self._left: Iterator[Change] = iter(())
        """The remaining changes of the chunk."""
        self._begun_rows = 0
        """The rows of the batch up to the end of the current chunk."""
        self._inside: _BatchOffsets | None = None
        """None between batches."""

    @property
    def offsets(self) -> Offsets:
        """The offsets after the last change that was returned."""
        if self._inside is None:
            return self._batches.offsets
        return self._inside.behind(self._begun_rows - length_hint(self._left))

    @property
    def metrics(self) -> ReaderMetrics:
        """The counters of the read."""
        return self._batches.metrics

    def __repr__(self) -> str:
        return f"<Changes of {self._batches.summary()}>"

    def _has_next_chunk(self) -> bool:
        """Move to the next chunk of the batch, and return whether there is one."""
        chunk = next(self._chunks, None)
        if chunk is None:
            self._inside = None
            return False
        self._begun_rows += len(chunk)
        self._left = iter(chunk)
        return True

    def _enter(self, batch: pa.RecordBatch) -> None:
        self._inside = _BatchOffsets(self._batches.finished, batch)
        self._begun_rows = 0
        self._chunks = chunks_of(batch)


class _BatchOffsets:
    """The offsets inside a batch, from the last row of each vbucket up to a position."""

    def __init__(self, before: Offsets, batch: pa.RecordBatch) -> None:
        names = ("vbucket", "vbuuid", "seqno", "snapshot_start", "snapshot_end")
        self._vbuckets, *self._columns = (batch.column(name).to_numpy() for name in names)
        self._before = before
        self._rows = 0
        self._last: dict[int, int] = {}

    def behind(self, rows: int) -> Offsets:
        """Return the offsets after this many rows, which never decrease between calls."""
        self._last.update(zip(self._vbuckets[self._rows : rows].tolist(), range(self._rows, rows), strict=True))
        self._rows = rows
        return self._before.updated({VBucketId(vbucket): self._behind_row(row) for vbucket, row in self._last.items()})

    def _behind_row(self, row: int) -> StreamOffset:
        vbuuid, seqno, start, end = (int(column[row]) for column in self._columns)
        return StreamOffset(
            vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_start=Seqno(start), snapshot_end=Seqno(end)
        )


class Changes(ChangeWalk[Batches]):
    """Typed changes, one after the other."""

    async def start(self) -> None:
        """Wait until every vbucket has its offset. See `Batches.start`."""
        await self._batches.start()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while (change := next(self._left, None)) is None:
            if not self._has_next_chunk():
                self._enter(await self._batches.__anext__())
        return change

    async def aclose(self) -> None:
        """Save the finished offsets, and close everything."""
        await self._batches.aclose()


# --- at a prompt and in a notebook ------------------------------------------------------------------------------------
#
# A representation shows what is known and contacts no server. Text from servers and users is escaped before it becomes
# HTML, and a password is never part of it.

COLLECTIONS_SHOWN_MAX = 20
ROWS_SHOWN_MAX = 10
VALUE_BYTES_SHOWN_MAX = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientView:
    """The parts of a client's representation."""

    settings: ClientSettings
    bucket: BucketView | None
    """None before the client has connected."""
    is_closed: bool
    reads: tuple[str, ...]
    """What each read reads, and its progress."""

    def text(self) -> str:
        reads = "".join(f"; reads {read}" for read in self.reads)
        return f"<Client of {self.settings.bucket} at {self._hosts}{self._user}, {self._state}{reads}>"

    def html(self) -> str:
        rows = [("bucket", self.settings.bucket), ("at", f"{self._hosts}{self._user}"), ("state", self._state)]
        if self.bucket is not None:
            rows.append(("collections", self._collections(self.bucket)))
        rows.extend(("reads", read) for read in self.reads)
        return _table((), rows)

    @property
    def _hosts(self) -> str:
        return ", ".join(map(str, self.settings.addresses))

    @property
    def _user(self) -> str:
        credentials = self.settings.credentials
        return "" if credentials is None else f" as {credentials.user}"

    @property
    def _state(self) -> str:
        if self.is_closed:
            return "closed"
        if self.bucket is None:
            return "not connected yet"
        nodes = counted(len(self.bucket.cluster_map.nodes), "node")
        collections = counted(sum(1 for _ in self.bucket.manifest.collections()), "collection")
        return f"{counted(self.bucket.cluster_map.vbuckets, 'vbucket')} on {nodes}, {collections}"

    def _collections(self, bucket: BucketView) -> str:
        names = [f"{scope.name}.{collection.name}" for scope, collection in bucket.manifest.collections()]
        more = len(names) - COLLECTIONS_SHOWN_MAX
        return ", ".join(names[:COLLECTIONS_SHOWN_MAX]) + (f" and {more:,} more" if more > 0 else "")


# --- batches ------------------------------------------------------------------------------------------------------

_SHOWN = ("changed_at", "op", "scope", "collection", "key", "value", "vbucket", "seqno")


def show_batches_in_notebooks() -> None:
    """Make a notebook show batches of changes as tables. Does nothing outside of notebooks, or if a formatter is set.

    Batches are of Arrow's own class, to which `_repr_html_` can't be added.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    formatter = getattr(shell, "display_formatter", None)
    if formatter is not None and formatter.formatters["text/html"].for_type(pa.RecordBatch) is None:
        formatter.formatters["text/html"].for_type(pa.RecordBatch, batch_html)


def batch_html(batch: pa.RecordBatch) -> str | None:
    """Format the first rows of a batch. Returns None for a batch without changes' columns, which is shown as text.

    Every vbucket sends the same events of collections and scopes, so these are only counted.
    """
    if not {*_SHOWN} <= {*batch.schema.names}:
        return None
    # The import takes long, and most programs show no batch.
    import pyarrow.compute as pc

    is_event = pc.match_substring_regex(batch.column("op").cast(pa.string()), "^(collection|scope)_")
    changes = batch.select(_SHOWN).filter(pc.invert(is_event))
    rows = [[_cell(name, row[name]) for name in _SHOWN] for row in changes.slice(0, ROWS_SHOWN_MAX).to_pylist()]
    shown = f", the first {len(rows)} of them shown" if changes.num_rows > len(rows) else ""
    events = counted(batch.num_rows - changes.num_rows, "event")
    return f"{_table(_SHOWN, rows)}<p>{counted(changes.num_rows, 'change')}{shown}; {events} of collections.</p>"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "changed_at":
        return str(value.strftime("%Y-%m-%d %H:%M:%S"))
    if isinstance(value, bytes):
        shown = escaped_bytes(value[:VALUE_BYTES_SHOWN_MAX])
        return f"{shown} … ({len(value):,} bytes)" if len(value) > VALUE_BYTES_SHOWN_MAX else shown
    return str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table. Without a head, the first cell of each row is its name."""
    first = "td" if head else "th"
    body = "".join(f"<tr>{_tag(first, row[0])}{''.join(_tag('td', cell) for cell in row[1:])}</tr>" for row in rows)
    names = f"<thead><tr>{''.join(_tag('th', name) for name in head)}</tr></thead>" if head else ""
    return f"<table>{names}<tbody>{body}</tbody></table>"


def _tag(name: str, text: str) -> str:
    return f'<{name} style="text-align: left">{escape(text)}</{name}>'
