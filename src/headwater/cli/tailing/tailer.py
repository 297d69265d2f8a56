"""The run of `headwater tail`: from the client's batches to standard output, with the place kept on the way."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console

from headwater.cli.tailing.cut_batch import offsets_behind
from headwater.cli.tailing.formats import Encoder
from headwater.cli.tailing.interruptions import Interrupted, Interruptions
from headwater.cli.tailing.lag_line import LagLine, Progress
from headwater.cli.tailing.places import check_writable, write_offsets
from headwater.cli.tailing.standard_output import StandardOutput
from headwater.client.blocking_client import Client
from headwater.client.blocking_reading import Batches
from headwater.client.checkpoints.file import FileCheckpoint
from headwater.client.offsets import Offsets
from headwater.client.read_options import End, Start
from headwater.errors import HeadwaterError

SAVE_EVERY_S = 5.0


class WantedRows(Protocol):
    """Chooses what is written of a batch."""

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The numbers of the rows, rising."""


class Tailer:
    """One run. It ends by returning, or by raising `Interrupted`, `BrokenPipeError` or a `HeadwaterError`."""

    def __init__(
        self,
        *,
        client: Client,
        start: Start | Offsets,
        options: dict[str, Any],
        encoder: Encoder,
        wanted: WantedRows | None = None,
        limit: int | None = None,
        checkpoint: Path | None = None,
        offsets_file: Path | None = None,
        quiet: bool = False,
    ) -> None:
        """`options` are those of the client's `batches`, but `start`. All rows are written where none are chosen."""
        if offsets_file is not None:
            check_writable(offsets_file)
        self.output = StandardOutput()
        self.interruptions = Interruptions()
        self.written = 0
        """Changes."""
        self._client = client
        self._start = start
        self._options = options
        self._encoder = encoder
        self._wanted = wanted
        self._limit = limit
        self._checkpoint = None if checkpoint is None else FileCheckpoint(checkpoint)
        self._offsets_file = offsets_file
        self._quiet = quiet
        self._reading: Batches | None = None
        self._given: Offsets | None = None
        """What the read started from; None before the bucket is known."""
        self._behind: Offsets | None = None
        """Behind what has been written; None before the first batch."""
        self._is_writing = False
        self._saved_s = time.monotonic()

    @property
    def offsets(self) -> Offsets | None:
        """Behind what has been written, also of vbuckets that were given and are not read this time.

        None before the bucket is known.
        """
        if self._given is None or self._behind is None:
            return self._given
        return self._given.updated(self._behind.offsets)

    def run(self) -> None:
        with self.interruptions, self._open_checkpoint():
            if self.output.file is not None and not self.output.is_terminal:
                self.interruptions.watch_reader(self.output.file)
            # Where a pipe is closed, what its reader has taken is not known, and the place is left as it was.
            try:
                self._read()
            except Interrupted:
                self._keep_place()
                self._write_end()
                raise
            except HeadwaterError as error:
                self._keep_place_after(error)
                raise
            self._keep_place()
            self._write_end()

    # --- reading --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        with ExitStack() as stack:
            with self.interruptions.allowed():
                start = self._load_checkpoint() or self._start
                stack.enter_context(self._client)
                if start is Start.NOW:
                    start = self._now()
            self._given = start if isinstance(start, Offsets) else Offsets(self._client.bucket_uuid)
            self._reading = self._client.batches(start=self._given, **self._options)
            line = stack.enter_context(self._lag_line())
            while self._limit is None or self.written < self._limit:
                with self.interruptions.allowed():
                    batch = next(self._reading, None)
                if batch is None:
                    self._behind = self._reading.offsets
                    return
                self._take(batch, line)
                self._save_if_due()

    def _now(self) -> Offsets:
        """The place of now in every vbucket. As offsets, so that also a run that sees no change can be gone on with."""
        reading = self._client.batches(start=Start.NOW, end=End.NOW, vbuckets=self._options["vbuckets"])
        for _ in reading:
            pass
        return reading.offsets

    def _take(self, batch: pa.RecordBatch, line: LagLine | None) -> None:
        assert self._reading is not None
        shown, rows = self._select(batch)
        behind = self._reading.offsets
        if rows < batch.num_rows:
            behind = offsets_behind(rows, batch, before=self._reading.finished, after=behind)
        if shown.num_rows:
            self._write(self._encoder.encode(shown), line)
        self._behind = behind
        self.written += shown.num_rows

    def _select(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """The rows to be shown, and how many of the batch are done with then."""
        left = batch.num_rows if self._limit is None else self._limit - self.written
        if self._wanted is None:
            rows = min(left, batch.num_rows)
            return batch.slice(0, rows), rows
        wanted = self._wanted.rows(batch)
        rows = batch.num_rows if len(wanted) <= left else int(wanted[left - 1]) + 1
        if len(wanted) == batch.num_rows:
            return batch.slice(0, rows), rows
        return batch.take(pa.array(wanted[:left], pa.int64())), rows

    # --- writing --------------------------------------------------------------------------------------------------

    def _write(self, data: bytes | memoryview, line: LagLine | None) -> None:
        self._is_writing = True
        with nullcontext() if line is None or not self.output.is_terminal else line.above():
            self.output.write(data)
        self._is_writing = False

    def _write_end(self) -> None:
        # Where a reader does not take what was being written, it won't take the end of it either.
        if not self._is_writing and (end := self._encoder.end()):
            self.interruptions.hurry()
            self._write(end, None)

    def _lag_line(self) -> AbstractContextManager[LagLine | None]:
        console = Console(stderr=True)
        if self._quiet or not sys.stderr.isatty() or console.is_dumb_terminal:
            return nullcontext()
        return LagLine(console, self._progress)

    def _progress(self) -> Progress:
        assert self._reading is not None
        try:
            metrics = self._reading.metrics
        except HeadwaterError:  # it has not started yet
            return Progress(changes=self.written, lag=None, rollbacks=0, reconnects=0)
        return Progress(
            changes=self.written,
            lag=metrics.lag().total_seqnos,
            rollbacks=metrics.rollbacks,
            reconnects=sum(dict(metrics.reconnects).values()),
        )

    # --- the place ------------------------------------------------------------------------------------------------

    @contextmanager
    def _open_checkpoint(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._checkpoint is not None:
                asyncio.run(self._checkpoint.close())

    def _load_checkpoint(self) -> Offsets | None:
        return None if self._checkpoint is None else asyncio.run(self._checkpoint.load())

    def _save_if_due(self) -> None:
        now_s = time.monotonic()
        if self._checkpoint is not None and now_s - self._saved_s >= SAVE_EVERY_S:
            self._save()
            self._saved_s = now_s

    def _save(self) -> None:
        if self._checkpoint is not None and (offsets := self.offsets) is not None:
            asyncio.run(self._checkpoint.save(offsets))

    def _keep_place(self) -> None:
        self._save()
        if self._offsets_file is not None and (offsets := self.offsets) is not None:
            write_offsets(self._offsets_file, offsets)

    def _keep_place_after(self, error: HeadwaterError) -> None:
        if self._behind is None:
            return  # it is still where it was
        try:
            self._keep_place()
        except HeadwaterError as another:
            if another.reason != error.reason:
                raise error.retold(f"{error.reason}; besides, {another.reason}") from another
