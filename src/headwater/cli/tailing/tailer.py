"""The run of `headwater tail`: from the client's batches to standard output, with the offsets kept on the way.

`tail` makes one `Tailer` from its options. What has been written and the offsets that are kept must never differ: a
signal waits until a write has ended.
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from headwater.cli.interruptions import Interrupted, Interruptions
from headwater.cli.tailing.formats import Encoder, WantedRows
from headwater.cli.tailing.resuming import check_writable, offsets_behind, write_offsets
from headwater.client.blocking_client import Batches, Client
from headwater.client.checkpoints.file import FileCheckpoint
from headwater.client.offsets import Offsets
from headwater.client.read_options import End, ReadKeywords, ReadOptions, Start
from headwater.errors import HeadwaterError
from headwater.phrases import counted

# --- the line at the bottom of the terminal -----------------------------------------------------------------------


REDRAW_EVERY_S = 0.25
RATE_OVER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the line shows."""

    changes: int
    lag: int | None
    """Changes that the server has and the reader has not; None before it is known."""
    rollbacks: int
    reconnects: int


class LagLine:
    """Redraws itself until it is left. Where standard output is the same terminal, `above` makes way for a while."""

    def __init__(self, console: Console, look: Callable[[], Progress]) -> None:
        self._console = console
        self._look = look
        self._history: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._redraw_often, name="headwater-lag-line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._erase()

    @contextmanager
    def above(self) -> Iterator[None]:
        """What is written meanwhile stands above the line."""
        with self._lock:
            self._erase()
            yield
            self._draw()

    def _redraw_often(self) -> None:
        while not self._is_over.wait(REDRAW_EVERY_S):
            with self._lock:
                self._erase()
                self._draw()

    def _erase(self) -> None:
        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def _draw(self) -> None:
        progress = self._look()
        text = describe(progress, self.rate(progress.changes, time.monotonic()))
        # The last column stays free: a terminal may go to the next line by itself when it is written to.
        text.truncate(self._console.width - 1, overflow="ellipsis")
        self._console.print(text, end="", soft_wrap=True)

    def rate(self, changes: int, now_s: float) -> float:
        """Changes a second, over the last seconds."""
        self._history.append((now_s, changes))
        while now_s - self._history[0][0] > RATE_OVER_S:
            self._history.popleft()
        then_s, before = self._history[0]
        return (changes - before) / (now_s - then_s) if now_s > then_s else 0.0


def describe(progress: Progress, changes_per_s: float) -> Text:
    text = Text(f"{counted(progress.changes, 'change')}, {changes_per_s:,.0f}/s", no_wrap=True)
    text.append("  lag ")
    if progress.lag is None:
        text.append("?", style="dim")
    else:
        text.append(f"{progress.lag:,}", style="green" if progress.lag == 0 else "yellow")
    for name, count in (("rollbacks", progress.rollbacks), ("reconnects", progress.reconnects)):
        text.append(f"  {name} ", style="" if count else "dim")
        text.append(f"{count:,}", style="bold red" if count else "dim")
    return text


# --- standard output ----------------------------------------------------------------------------------------------


_WRITE_BYTES = 256 * 1024


class StandardOutput:
    """Bytes, past the interpreter's buffers: `write` returns when all of them are out. A closed pipe raises
    `BrokenPipeError`."""

    def __init__(self) -> None:
        sys.stdout.flush()
        buffered: Any = sys.stdout.buffer
        self._raw = getattr(buffered, "raw", buffered)

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def is_pipe(self) -> bool:
        return self.file is not None and stat.S_ISFIFO(os.fstat(self.file).st_mode)

    @property
    def file(self) -> int | None:
        """The number of the file, where it is one of the system's."""
        try:
            return sys.stdout.fileno()
        except (OSError, io.UnsupportedOperation):
            return None

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            try:
                written = self._raw.write(rest[:_WRITE_BYTES])
            except BrokenPipeError:
                raise
            except OSError as error:
                raise HeadwaterError(
                    f"standard output can't be written to: {error.strerror}",
                    hint="Check the disk and the space on it",
                ) from error
            if written is None:
                # Another process that shares the pipe has made it non-blocking.
                select.select([], [self._raw], [])
                continue
            rest = rest[written:]

    def abandon(self) -> None:
        """Nothing more is written, also not by the interpreter on its way out."""
        if self.file is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file)


# --- the run ------------------------------------------------------------------------------------------------------


SAVE_EVERY_S = 5.0


class Tailer:
    """One run. It ends by returning, or by raising `Interrupted`, `BrokenPipeError` or a `HeadwaterError`."""

    def __init__(
        self,
        *,
        client: Client,
        start: Start | Offsets,
        options: ReadKeywords,
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
            # Where a pipe is closed, what its reader has taken is not known, and the offsets are left as they were.
            try:
                self._read()
            except Interrupted:
                self._keep_offsets()
                self._write_end()
                raise
            except HeadwaterError as error:
                self._keep_offsets_after(error)
                raise
            self._keep_offsets()
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
            options = self._options.copy()
            options["start"] = self._given
            self._reading = self._client.read(ReadOptions.make(**options))
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
        """The end of every vbucket now, as offsets: also a run that sees no change can be resumed."""
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
        """None where the reader of a pipe may write to the same terminal (`| head`): the line can't make way for it."""
        console = Console(stderr=True)
        if self._quiet or self.output.is_pipe or not sys.stderr.isatty() or console.is_dumb_terminal:
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

    # --- the offsets ----------------------------------------------------------------------------------------------

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

    def _keep_offsets(self) -> None:
        self._save()
        if self._offsets_file is not None and (offsets := self.offsets) is not None:
            write_offsets(self._offsets_file, offsets)

    def _keep_offsets_after(self, error: HeadwaterError) -> None:
        if self._behind is None:
            return  # nothing was written
        try:
            self._keep_offsets()
        except HeadwaterError as another:
            if another.reason != error.reason:
                raise error.reworded(f"{error.reason}; besides, {another.reason}") from another
