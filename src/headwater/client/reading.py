"""A read as the caller sees it, under asyncio: batches or typed changes, their offsets, and checkpoints.

The client makes one for every `batches()` and `changes()`; the blocking client runs it in a thread. What is saved is
what the caller has finished with. A batch is finished when the next one is asked for, so a program that dies or stops
in the middle of one gets it again: at least once. A program that needs exactly once keeps `offsets` together with the
data, in one transaction, and starts from them.
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
"""How often what is finished is saved, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStart:
    """What a read is made of, once the bucket is known."""

    edge: AsyncioEdge
    names: CollectionNames
    collections: bool
    """Whether the server has collections."""
    xattrs: bool
    only: CollectionFilter | None
    """What is left to be filtered here."""
    bucket_uuid: str
    others: Mapping[VBucketId, StreamOffset]
    """The offsets of vbuckets that are not read, if they were given: they are kept with those that are."""
    is_start_found: bool
    """Whether it starts at "now" or at a time. Then the servers say where that is."""

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
        """Whether keys are text, as users get them. Our own callers compare keys, and take their bytes."""
        self._started: ReadStart | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_closed = False
        self._taken: list[Piece] | None = None
        """Pieces that were taken and not built: a caller that was interrupted in between gets them again."""
        self._finished: dict[VBucketId, StreamOffset] = {}
        self._saved: dict[VBucketId, StreamOffset] = {}
        self._saved_s = 0.0

    # --- where it is ----------------------------------------------------------------------------------------------

    @property
    def offsets(self) -> Offsets:
        """Behind the last batch that was returned."""
        is_given = self._taken is None
        return self._running().all_offsets(self._running().edge.reader.offsets if is_given else self._finished)

    @property
    def finished(self) -> Offsets:
        """Before the last batch that was returned: the caller is finished with everything up to here."""
        return self._running().all_offsets(self._finished)

    @property
    def metrics(self) -> ReaderMetrics:
        return self._running().edge.reader.metrics

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def schema(self) -> pa.Schema:
        """That of all batches."""
        return (change_schema if self._text_keys else raw_schema)(xattrs=self._options.xattrs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.summary()}>"

    def summary(self) -> str:
        """What is read, and how far it is: `shop.orders, 3 changes read, 0 seqnos behind`."""
        what = ", ".join(map(str, (*self._options.scopes, *self._options.collections))) or "all collections"
        if self._started is None:
            return f"{what}, {'closed' if self._is_closed else 'not started'}"
        metrics = self.metrics
        behind = metrics.lag().total_seqnos
        state = "ended" if self._is_closed else "lag unknown" if behind is None else f"{behind:,} seqnos behind"
        return f"{what}, {describe_ops(metrics.changes)} read, {state}"

    def end_now(self) -> None:
        """Give a read without an end one: what a library reads into a table has to come to an end.

        One that has started without an end never ends, and is refused.
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
        """Return when every vbucket has its offset, which a read otherwise finds with its first batch.

        With `start="now"` these offsets are "now": all that is written after this has returned is read.
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
        """Record a wait for a batch as a span, once there is the batch or an error: the wait itself may be given up."""
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
        """The next pieces as they were received; None at the end. What was built before counts as finished."""
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
        """The rows of pieces that were taken. May be called in any thread, one call after the other."""
        started = self._running()
        batch = started.build(pieces)
        started.edge.reader.metrics.on_batch(batch)
        self._taken = None
        return with_text_keys(batch) if self._text_keys else batch

    async def _start_once(self) -> ReadStart | None:
        """Begin to read, once. None if the read was closed meanwhile.

        A caller that stops waiting for it may call again: the start continues, however short the waits are.
        """
        if self._started is None and not self._is_closed:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            # Unlike with `await`, a caller that is cancelled here leaves it running.
            await asyncio.wait([self._starting])
            if not self._starting.cancelled():
                self._starting.result()
        return self._started

    async def _start(self) -> None:
        try:
            await self._enter(await self._begin(self._options))
        except BaseException:
            # Another reader may have better luck, and must not find the checkpoint locked.
            await self._close_checkpoint()
            raise

    async def _enter(self, started: ReadStart) -> None:
        try:
            await started.edge.wait_for_offsets()
            if started.is_start_found and started.edge.reader.has_offsets and self._checkpoint is not None:
                # Or else a program that dies before its first change would start elsewhere.
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
        """Save now what is finished."""
        if self._checkpoint is not None and self._finished and self._finished != self._saved:
            await self._checkpoint.save(self.finished)
            self._saved = self._finished
        self._saved_s = asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Save what is finished, and close everything."""
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
    """The batches that changes are taken from, with asyncio or without."""

    @property
    def offsets(self) -> Offsets: ...

    @property
    def finished(self) -> Offsets: ...

    @property
    def metrics(self) -> ReaderMetrics: ...

    def summary(self) -> str: ...


B = TypeVar("B", bound=HasOffsets)


class ChangeWalk(Generic[B]):
    """Goes through batches change by change, and knows the offsets at each step."""

    def __init__(self, batches: B) -> None:
        self._batches = batches
        self._chunks: Iterator[Sequence[Change]] = iter(())
        """What is left of the batch."""
        self._left: Iterator[Change] = iter(())
        """What is left of the chunk."""
        self._begun_rows = 0
        """Of the batch, up to the end of the chunk."""
        self._inside: _BatchOffsets | None = None
        """None between batches."""

    @property
    def offsets(self) -> Offsets:
        """Behind the last change that was returned."""
        if self._inside is None:
            return self._batches.offsets
        return self._inside.behind(self._begun_rows - length_hint(self._left))

    @property
    def metrics(self) -> ReaderMetrics:
        """What the read has counted so far."""
        return self._batches.metrics

    def __repr__(self) -> str:
        return f"<Changes of {self._batches.summary()}>"

    def _has_next_chunk(self) -> bool:
        """Whether the batch goes on."""
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
    """The offsets inside of a batch, from the last row of each vbucket that was gone past."""

    def __init__(self, before: Offsets, batch: pa.RecordBatch) -> None:
        names = ("vbucket", "vbuuid", "seqno", "snapshot_start", "snapshot_end")
        self._vbuckets, *self._columns = (batch.column(name).to_numpy() for name in names)
        self._before = before
        self._rows = 0
        self._last: dict[int, int] = {}

    def behind(self, rows: int) -> Offsets:
        """Behind so many rows, which are never fewer than before."""
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
        """Return when every vbucket has its offset. See `Batches.start`."""
        await self._batches.start()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while (change := next(self._left, None)) is None:
            if not self._has_next_chunk():
                self._enter(await self._batches.__anext__())
        return change

    async def aclose(self) -> None:
        """Save what is finished, and close everything."""
        await self._batches.aclose()


# --- at a prompt and in a notebook ------------------------------------------------------------------------------------
#
# A representation says what is known and asks no server. All that comes from a server or a user is escaped before it
# becomes HTML, and a password is never part of it.

COLLECTIONS_SHOWN_MAX = 20
ROWS_SHOWN_MAX = 10
VALUE_BYTES_SHOWN_MAX = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientView:
    """What is shown of a client."""

    settings: ClientSettings
    bucket: BucketView | None
    """None before the client has connected."""
    is_closed: bool
    reads: tuple[str, ...]
    """What is read, and how far each read is."""

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
    """Let a notebook show batches of changes as tables. Where there is none, or it has its own way, nothing is done.

    Batches are of Arrow's own class, which can't be given a `_repr_html_`.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    formatter = getattr(shell, "display_formatter", None)
    if formatter is not None and formatter.formatters["text/html"].for_type(pa.RecordBatch) is None:
        formatter.formatters["text/html"].for_type(pa.RecordBatch, batch_html)


def batch_html(batch: pa.RecordBatch) -> str | None:
    """The first rows of a batch; None for a batch of something else than changes, which is shown as text.

    Every vbucket sends the events of collections and scopes, a thousand times the same: they are counted.
    """
    if not {*_SHOWN} <= {*batch.schema.names}:
        return None
    # It takes long to import, and most programs show no batch.
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
    """Without a head, the first cell of each row is its name."""
    first = "td" if head else "th"
    body = "".join(f"<tr>{_tag(first, row[0])}{''.join(_tag('td', cell) for cell in row[1:])}</tr>" for row in rows)
    names = f"<thead><tr>{''.join(_tag('th', name) for name in head)}</tr></thead>" if head else ""
    return f"<table>{names}<tbody>{body}</tbody></table>"


def _tag(name: str, text: str) -> str:
    return f'<{name} style="text-align: left">{escape(text)}</{name}>'
