"""`headwater tail`: print the changes of a bucket as they arrive, for people, scripts and Arrow.

The command makes one `Tailer` from its options, which writes the client's batches to standard output and keeps the
offsets. The kept offsets must always match what was written, so a signal takes effect only after a write has ended.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import select
import shlex
import signal
import stat
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
from click.core import ParameterSource
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from headwater import __version__
from headwater.cli.options import (
    EXIT_FAILED,
    GivenOptions,
    LoginOptions,
    connection_options,
    fail,
    options_from,
    read_options,
    repeated_words,
)
from headwater.cli.output import Ended, Interruptions, abandon_output, click, exit_code_after
from headwater.cli.tail_formats import Encoder, EventsOnce, Format, KeyPattern, WantedRows, encoder
from headwater.client.blocking_client import Batches, Client
from headwater.client.checkpoints import FileCheckpoint
from headwater.client.metrics import count_ops, describe_ops
from headwater.client.offsets import TEXT_CHARS_MAX, VBUCKETS_MAX, Offsets
from headwater.client.read_options import START_TIMES, End, ReadKeywords, ReadOptions, Start, parse_start_time
from headwater.durable_files import replace_file
from headwater.errors import BucketReplaced, CheckpointError, HeadwaterError, InvalidInput, InvalidOffsets
from headwater.options import option
from headwater.phrases import printable
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

# --- the line at the bottom of the terminal -----------------------------------------------------------------------


REDRAW_EVERY_S = 0.25
RATE_OVER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The figures in the line."""

    rows: Mapping[str, int]
    """Counts by `op`."""
    lag: int | None
    """How many changes the server has that the reader does not have; None before it is known."""
    rollbacks: int
    reconnects: int


class LagLine:
    """A line that redraws itself until its context ends. Write in `above` if standard output is the same terminal."""

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

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._erase()

    @contextmanager
    def above(self) -> Iterator[None]:
        """Remove the line during a write to the terminal, and redraw it below."""
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
        text = describe(progress, self.rate(sum(progress.rows.values()), time.monotonic()))
        # The last column stays free: a terminal may wrap to the next line when it is written to.
        text.truncate(self._console.width - 1, overflow="ellipsis")
        self._console.print(text, end="", soft_wrap=True)

    def rate(self, changes: int, now_s: float) -> float:
        """Return the changes per second over the last seconds."""
        self._history.append((now_s, changes))
        while now_s - self._history[0][0] > RATE_OVER_S:
            self._history.popleft()
        then_s, before = self._history[0]
        return (changes - before) / (now_s - then_s) if now_s > then_s else 0.0


def describe(progress: Progress, changes_per_s: float) -> Text:
    text = Text(f"{describe_ops(progress.rows)}, {changes_per_s:,.0f}/s", no_wrap=True)
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
    """Writes bytes past the interpreter's buffers: `write` returns when all of them are written. A closed pipe
    raises `BrokenPipeError`."""

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
        """The file descriptor, or None if standard output is not a file of the system."""
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
                    f"standard output can't be written: {error.strerror}",
                    hint="Check the disk and the space on it",
                ) from error
            if written is None:
                # Another process that shares the pipe has made it non-blocking.
                select.select([], [self._raw], [])
                continue
            rest = rest[written:]


# --- the run ------------------------------------------------------------------------------------------------------


SAVE_EVERY_S = 5.0


class Tailer:
    """One run. It ends by returning, or by raising `Ended`, `BrokenPipeError` or a `HeadwaterError`."""

    def __init__(
        self,
        *,
        client: Client,
        start: Start | Offsets | datetime,
        options: ReadKeywords,
        encoder: Encoder,
        wanted: WantedRows | None = None,
        limit: int | None = None,
        checkpoint: Path | None = None,
        offsets_file: Path | None = None,
        quiet: bool = False,
    ) -> None:
        """`options` are those of the client's `batches`, without `start`. If `wanted` is None, all rows are written."""
        if offsets_file is not None:
            check_writable(offsets_file)
        self.output = StandardOutput()
        self.interruptions = Interruptions()
        self.written = 0
        """The number of rows written."""
        self.rows: Counter[str] = Counter()
        """The same number by `op`."""
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
        """The offsets at which the read started; None before the bucket is known."""
        self._behind: Offsets | None = None
        """The offsets after the last written change; None before the first batch."""
        self._is_writing = False
        self._saved_s = time.monotonic()

    @property
    def offsets(self) -> Offsets | None:
        """The offsets after the last written change, including given vbuckets that are not read this time.

        None before the bucket is known.
        """
        if self._given is None or self._behind is None:
            return self._given
        return self._given.updated(self._behind.offsets)

    def run(self) -> None:
        with self.interruptions, ExitStack() as stack:
            if (checkpoint := self._checkpoint) is not None:
                stack.callback(lambda: asyncio.run(checkpoint.close()))
            if self.output.file is not None and not self.output.is_terminal:
                self.interruptions.watch_reader(self.output.file)
            # If a pipe is closed, it is unknown how much its reader has read, and the offsets stay as they were.
            try:
                self._read()
            except Ended:
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
                kept = None if self._checkpoint is None else asyncio.run(self._checkpoint.load())
                start = kept or self._start
                stack.enter_context(self._client)
                options = self._options.copy()
                if start is Start.NOW:
                    start = self._now()
                elif isinstance(start, datetime):
                    options["start"] = start
                    start = self._client.find_start(ReadOptions.make(**options))
            self._given = start if isinstance(start, Offsets) else Offsets(self._client.bucket_uuid)
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
        """Return the current end of every vbucket as offsets, so that a run that sees no change can be resumed, too."""
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
        self.rows += count_ops(shown)

    def _select(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """Return the rows to show, and how many rows of the batch are then processed."""
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
        # A reader that did not take the last write won't take the end of the stream either.
        if not self._is_writing and (end := self._encoder.end()):
            self.interruptions.hurry()
            self._write(end, None)

    def _lag_line(self) -> AbstractContextManager[LagLine | None]:
        """Return no line if the output is a pipe whose reader may write to the same terminal (`| head`)."""
        console = Console(stderr=True)
        if self._quiet or self.output.is_pipe or not sys.stderr.isatty() or console.is_dumb_terminal:
            return nullcontext()
        return LagLine(console, self._progress)

    def _progress(self) -> Progress:
        assert self._reading is not None
        try:
            metrics = self._reading.metrics
        except HeadwaterError:  # it has not started yet
            return Progress(rows=self.rows, lag=None, rollbacks=0, reconnects=0)
        return Progress(
            rows=self.rows,
            lag=metrics.lag().total_seqnos,
            rollbacks=metrics.rollbacks,
            reconnects=sum(dict(metrics.reconnects).values()),
        )

    # --- the offsets ----------------------------------------------------------------------------------------------

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


SHOWN_CHARS_MAX = 1000
"""Longer offsets are not printed on a terminal."""
ARGUMENT_CHARS_MAX = 100_000
"""Less than Linux accepts as one argument, 128 KiB."""

_HINT = f"Use beginning, now, {START_TIMES}, a file with offsets, or the offsets themselves as JSON"
_NOT_REPEATED = frozenset({"start", "password", "tls_key_password", "limit"})
"""Options that the command to resume does not repeat: it has other offsets, and passwords are not shown."""


# --- where to start -----------------------------------------------------------------------------------------------


def read_start(text: str) -> Start | Offsets | datetime:
    """Parse `beginning`, `now`, a time, offsets as JSON, or the path of a file that has them."""
    if text in tuple(Start):
        return Start(text)
    if text.lstrip().startswith("{"):
        return Offsets.from_json(text)
    return parse_start_time(text) or read_offsets(Path(text))


def read_offsets(path: Path) -> Offsets:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(TEXT_CHARS_MAX + 1)
    except FileNotFoundError as error:
        raise InvalidInput(f"{str(path)!r} is no file, and nothing to start from", hint=_HINT) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInput(f"the offsets in {str(path)!r} can't be read: {reason}", hint=_HINT) from error
    try:
        return Offsets.from_json(text)
    except InvalidOffsets as error:
        raise error.reworded(f"{path}: {error.reason}") from error


# --- where to resume ----------------------------------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Raise now for a file that could not be written at the end."""
    where = path if path.exists() else path.parent
    if path.is_dir() or not os.access(where, os.W_OK):
        raise InvalidInput(f"the offsets can't be written to {str(path)!r}", hint="Give a file in a writable folder")


def write_offsets(path: Path, offsets: Offsets) -> None:
    """Replace the file atomically: if that fails, the old one is unchanged."""
    text = offsets.to_json() + "\n"
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_text(text)  # a pipe, say
            return
        target = Path(os.path.realpath(path))
        replace_file(target, text.encode(), unfinished=target.with_name(f"{target.name}.tmp"))
    except OSError as error:
        raise InvalidInput(
            f"the offsets can't be written to {str(path)!r}: {error.strerror}",
            hint="Free disk space, or give another file",
        ) from error


def resume_command(context: click.Context, offsets: Offsets, *, is_terminal: bool) -> str:
    """Return the same command, starting at these offsets. Long offsets that are in no file yet are written to one."""
    words = ["headwater", "tail", *repeated_words(context, _NOT_REPEATED)]
    if context.params["checkpoint"] is None:
        text, kept_in = offsets.to_json(), context.params["offsets_file"]
        if kept_in is None and len(text) > (SHOWN_CHARS_MAX if is_terminal else ARGUMENT_CHARS_MAX):
            number, name = tempfile.mkstemp(prefix="headwater-offsets-", suffix=".json")
            with os.fdopen(number, "w") as file:
                file.write(text + "\n")
            kept_in = Path(name)
        words += ["--from", text if kept_in is None else str(kept_in)]
    return shlex.join(words)


# --- offsets within a batch ---------------------------------------------------------------------------------------


def offsets_behind(rows: int, batch: pa.RecordBatch, *, before: Offsets, after: Offsets) -> Offsets:
    """Return the offsets after the first `rows` of a batch. `before` and `after` are those around the whole batch.

    A vbucket with no rows left has its offset of `after`, which may lie beyond its last row.
    """
    vbuckets = batch.column("vbucket").to_numpy()
    taken = {int(vbucket): row for row, vbucket in enumerate(vbuckets[:rows])}
    offsets = dict(after.offsets)
    for vbucket in map(VBucketId, np.flatnonzero(np.bincount(vbuckets[rows:])).tolist()):
        if vbucket in taken:
            offsets[vbucket] = _offset_of(batch, taken[vbucket])
        elif vbucket in before.offsets:
            offsets[vbucket] = before.offsets[vbucket]
        else:
            del offsets[vbucket]
    return replace(after, offsets=offsets)


def _offset_of(batch: pa.RecordBatch, row: int) -> StreamOffset:
    vbuuid, seqno, start, end = (
        batch.column(name)[row].as_py() for name in ("vbuuid", "seqno", "snapshot_start", "snapshot_end")
    )
    return StreamOffset(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_start=Seqno(start), snapshot_end=Seqno(end))


# --- options ----------------------------------------------------------------------------------------------------------

_RANGE = re.compile(r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?")


def _parse_vbuckets(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        match = _RANGE.fullmatch(value)
        if match is None or not int(match["first"]) <= int(match["last"] or match["first"]) < VBUCKETS_MAX:
            raise click.BadParameter(f"{value!r} is not a vbucket: write 12, or 0-15 for a range.")
    return values


def _vbuckets(values: tuple[str, ...]) -> frozenset[int] | None:
    """Return the numbers, or None for all vbuckets."""
    found: set[int] = set()
    for value in values:
        first, _, last = value.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found) if values else None


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TailOptions:
    """The options of the command, except those that choose what to read."""

    format_name: str = option(
        "Text, one JSON object per line, or an Arrow IPC stream.",
        Format.PRETTY.value,
        cli_name="--format",
        cli_type=click.Choice([choice.value for choice in Format]),
    )
    as_json: bool = option("The same as --format jsonl.", False, cli_name="--json")
    keys: tuple[str, ...] = option(
        "Print only keys that match: * matches any characters, ? matches one. Repeat for more. The server still sends "
        "all changes.",
        cli_name="--key",
        metavar="PATTERN",
    )
    limit: int | None = option("Stop after N rows, system events included.", least=1)
    checkpoint: Path | None = option(
        "Resume where the last run with this file ended, and save the offsets in it. --from applies to the first run "
        "only.",
        cli_type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
    )
    offsets_file: Path | None = option(
        "Write the offsets to this file at the end, for --from.",
        cli_type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
    )
    quiet: bool = option(
        "Do not show the lag. It is never shown if the output goes to a pipe.", False, cli_also=("-q",)
    )


@click.command()
@click.argument("url")
@read_options(
    "tail",
    start={
        "metavar": "TIME|OFFSETS",
        "help": "Where to start: beginning, now, a time, a file with offsets, or offsets as JSON. A time is written as "
        "ISO 8601 with a zone, as a date (UTC), as seconds since 1970, or as so long ago: -2h. Each vbucket then "
        "starts at its first change at or after that time, by the clock of the CAS.",
    },
    end={
        "type": click.Choice(["now", "inf"]),
        "default": "inf",
        "show_default": True,
        "help": "Where to end: at the current state of the bucket, or never.",
    },
    vbuckets={"callback": _parse_vbuckets},
    name={"default": "headwater-tail"},
    give_up_after_s={"help": "Seconds that a vbucket may be unreachable before the command fails."},
)
@options_from(TailOptions)
@connection_options
@click.pass_context
def tail(
    context: click.Context,
    /,
    url: str,
    start: str,
    end: str,
    given: GivenOptions,
    login: LoginOptions,
    **options: Any,
) -> None:
    """Print the changes of a bucket as they arrive.

    URL is couchbase://host[:port]/bucket, or couchbases:// for TLS. There is one line per change: mutations, deletions,
    expirations, created and dropped collections, and rollbacks, which mean that changes shown before did not happen.
    Every vbucket has its own event for a collection: text output shows it once, JSON and Arrow show all of them.

    Ctrl-C stops the command, which then prints how to resume. The exit code is 0 when the requested end is reached or
    the reader closes the pipe, 1 for a failure, 2 for an invalid command line, 130 after Ctrl-C and 143 after SIGTERM.

    \b
    Examples:
      headwater tail couchbase://localhost/default
      headwater tail couchbase://localhost/default --to now --json | jq .key
      headwater tail couchbase://localhost/default --from now --key 'user::*'
      headwater tail couchbase://localhost/default --start-at -2h
      headwater tail couchbase://localhost/default --checkpoint tail.json --json
    """
    asked = given.make(TailOptions)
    format_ = _format(context, asked.format_name, as_json=asked.as_json)
    try:
        tailer = Tailer(
            client=Client(login.settings(url, agent=f"headwater-tail/{__version__}")),
            start=read_start(start),
            options=_read_options(end, **options),
            encoder=_encoder(format_, **options),
            wanted=_wanted(format_, asked.keys),
            limit=asked.limit,
            checkpoint=asked.checkpoint,
            offsets_file=asked.offsets_file,
            quiet=asked.quiet,
        )
    except HeadwaterError as error:
        fail(str(error))
    exit_code = _run(tailer, context)
    if tailer.interruptions.number is not None:
        # Immediately: a normal exit would wait for a thread that waits for a server's answer.
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _read_options(end: str, *, vbuckets: tuple[str, ...], **others: Any) -> ReadKeywords:
    """Return the options of the client, checked."""
    options: Any = {"end": None if end == "inf" else end, "vbuckets": _vbuckets(vbuckets), **others}
    ReadOptions.make(**options)
    return cast(ReadKeywords, options)


def _format(context: click.Context, name: str, *, as_json: bool) -> Format:
    is_given = context.get_parameter_source("format_name") is ParameterSource.COMMANDLINE
    if as_json and is_given and name != Format.JSONL:
        raise click.UsageError(f"--json is not --format {name}: give one of the two.")
    return Format.JSONL if as_json else Format(name)


def _wanted(format_: Format, keys: tuple[str, ...]) -> WantedRows | None:
    """Return what selects the rows. Programs get every event: a vbucket's offset depends on its own."""
    if keys:
        return KeyPattern(keys)
    return EventsOnce() if format_ is Format.PRETTY else None


def _encoder(format_: Format, *, no_value: bool, xattrs: bool, **_: Any) -> Encoder:
    if format_ is Format.ARROW and sys.stdout.isatty():
        raise InvalidInput(
            "Arrow can't be written to a terminal", hint="Send it to a file (> changes.arrows) or a program (| program)"
        )
    return encoder(format_, no_value=no_value, xattrs=xattrs)


# --- the end ------------------------------------------------------------------------------------------------------


def _run(tailer: Tailer, context: click.Context) -> int:
    """Run the tailer. Returns the exit code, and prints the reason if it is not 0."""
    try:
        tailer.run()
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`).
        abandon_output()
        return 0
    except Ended as error:
        what = "Interrupted" if error.number == signal.SIGINT else "Ended"
        _print_how_to_go_on(f"{what} after {describe_ops(tailer.rows)}.", tailer, context)
        return exit_code_after(error)
    except HeadwaterError as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        if tailer.written and not isinstance(error, CheckpointError | BucketReplaced):
            _print_how_to_go_on(f"{describe_ops(tailer.rows)} came before that.", tailer, context)
        return EXIT_FAILED
    return 0


def _print_how_to_go_on(what: str, tailer: Tailer, context: click.Context) -> None:
    if tailer.offsets is None:
        return
    command = resume_command(context, tailer.offsets, is_terminal=sys.stderr.isatty())
    click.echo(f"{what} To resume from there:\n  {printable(command)}", err=True)
