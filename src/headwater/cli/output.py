"""What commands write and what may end them: one-line errors, tables, the log, signals, a reader that closes a pipe.

With the extra `cli`, the `click` that all commands use is rich-click, whose help pages have columns and colours. A
client-only installation has plain click, whose pages have the same content.

`headwater.cli` wraps every command in `errors_in_one_sentence`; long-running commands call `set_up_logging`. An error
is never framed, as rich would do: a frame breaks the sentence for logs and scripts that read it.

A signal that arrives during a write of changes takes effect after it, so that the offsets match what was written. The
wait is limited: a reader that stops reading from a pipe would block the command forever.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import select
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from headwater import phrases
from headwater.log_fields import LogEvent, fields
from headwater.phrases import COMPILING, counted, did_you_mean, report_first_compile

if TYPE_CHECKING:
    import rich_click
    from rich_click import RichCommand as RichCommand
    from rich_click import RichGroup as RichGroup

    click = rich_click
else:
    try:
        import rich_click as click
    except ModuleNotFoundError:
        import click
    RichCommand = getattr(click, "RichCommand", click.Command)
    RichGroup = getattr(click, "RichGroup", click.Group)

if layout := getattr(click, "rich_click", None):
    # Show an option and its value in one column, so that nothing is cut on a terminal of 60 columns.
    layout.OPTIONS_TABLE_COLUMN_TYPES = ["opt_all_metavar", "help"]
    layout.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"
    layout.OPTIONS_TABLE_HELP_SECTIONS = ["help", "range", "required", "default", "envvar", "deprecated"]

_HelpShown: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""click 8.1 has no such error: it exits by itself after it has shown the help."""


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Print click's errors and failures of standard output as one sentence, and exit with the code of the error."""
    try:
        with ending_signals_raised(), _output_written():
            yield
    except _HelpShown:
        raise
    except click.ClickException as error:
        click.echo(f"Error: {_sentence(error)}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        click.echo("Error: interrupted", err=True)
        sys.exit(exit_code_after(error))


def _sentence(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    possibilities = getattr(error, "possibilities", None)
    if possibilities:
        # click suggests up to three, and those after the first are rarely what was meant.
        message = f"{error.message} {did_you_mean(possibilities[0])}"
    end = "" if message.endswith("?") else "."
    return f"{message.rstrip('.')}{end} See {error.ctx.command_path} --help"


# --- standard output ----------------------------------------------------------------------------------------------


@contextmanager
def _output_written() -> Iterator[None]:
    """Ignore a reader that closes the pipe early (`| head`), and report a full disk as an error."""
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        abandon_output()
        sys.exit(0)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        abandon_output()
        raise click.ClickException(f"standard output can't be written: {error.strerror}") from error


def _reader_is_gone() -> bool:
    """Return whether standard output is broken, and not a connection."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # poll reports errors of a file without being asked to
    except (io.UnsupportedOperation, ValueError):
        return False
    return bool(poll.poll(0))


def abandon_output() -> None:
    """Discard further output: the interpreter would write the stream's buffered text at exit, and report an error."""
    with suppress(OSError, io.UnsupportedOperation):  # Standard output may not be a file of the system.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


UNCUT_CHARS = 10_000


def output_console() -> Console:
    """Return a console for standard output: as wide as the terminal; files and pipes get uncut, unfolded lines.

    Sentences are printed with `soft_wrap`, so that only the terminal wraps them.
    """
    return Console(highlight=False, width=None if sys.stdout.isatty() else UNCUT_CHARS)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print cells in columns, as many as there are headings. Control characters in a server's text are escaped."""
    shown = [list(headings), *([phrases.printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(headings))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())


# --- rates --------------------------------------------------------------------------------------------------------


COUNT_MIN = 1000
SECONDS_MIN = 1.0
"""Below these, a rate would mostly reflect the start and the end of the run."""


def documents_in(documents: int, seconds: float, *, and_rate: str = "") -> str:
    """Describe a run. `and_rate` follows the rate of documents, if that is shown."""
    sentence = f"{counted(documents, 'document')} in {seconds:.2f} s"
    if documents < COUNT_MIN or seconds < SECONDS_MIN:
        return sentence
    return f"{sentence}: {documents / seconds:,.0f} documents/s{and_rate}"


# --- the log ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

TEXT = "%(asctime)s %(levelname)s %(message)s"
MESSAGE_CHARS_MAX = 2_000
FIELD_CHARS_MAX = 500
"""Limits for logged text from a peer, such as its name and its requests."""
PEER_LINES_FREE, PEER_LINES_PER_S = 10, 1.0
"""How many lines of one kind are logged for a peer at once, and how many per second after that."""
PEERS_MAX = 1_024
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_OWN_MEMBERS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""The members that every record has; all others were passed with the message."""


def printable(text: str, chars_max: int) -> str:
    """Make text of any origin safe for one line: escape characters that a terminal would act on, and cut long text."""
    cut = text if len(text) <= chars_max else f"{text[:chars_max]}… ({len(text)} characters)"
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


class TextFormatter(logging.Formatter):
    """One line per message. A peer can't forge a line with a newline in its name."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message, MESSAGE_CHARS_MAX)
        return super().formatMessage(record)


class PeerLimit(logging.Filter):
    """Limits how many lines of one kind are logged for a peer, so that a stranger can't fill the disk.

    The next line that passes reports how many lines were omitted before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[tuple[str, str], tuple[float, float, int]] = OrderedDict()
        """By peer and kind: how many lines are left, when that was computed, and how many lines were omitted."""

    def filter(self, record: logging.LogRecord) -> bool:
        peer = vars(record).get("peer")
        is_of_http = record.name.startswith("uvicorn")  # uvicorn logs bad requests without naming the peer
        if peer is None and not is_of_http:
            return True
        kind = (str(peer), str(vars(record).get("event", record.msg)))
        free, since_s, left_out = self._kinds.pop(kind, (float(PEER_LINES_FREE), record.created, 0))
        free = min(float(PEER_LINES_FREE), free + max(0.0, record.created - since_s) * PEER_LINES_PER_S)
        is_logged = free >= 1.0
        self._kinds[kind] = (free - is_logged, record.created, 0 if is_logged else left_out + 1)
        if len(self._kinds) > PEERS_MAX:
            self._kinds.popitem(last=False)
        if is_logged and left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it before)", ()
            record.left_out = left_out
        return is_logged


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields passed with the message."""

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage(), MESSAGE_CHARS_MAX),
        }
        about = {
            name: printable(value, FIELD_CHARS_MAX) if isinstance(value, str) else value
            for name, value in vars(record).items()
            if name not in _OWN_MEMBERS
        }
        if about:
            members["fields"] = about
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members, default=str)


def set_up_logging(log_format: str, *, level: str = "info") -> None:
    """Write this process's log to standard error, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(TEXT))
    handler.addFilter(PeerLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    report_first_compile(lambda: logger.info(COMPILING, extra=fields(event=LogEvent.COMPILING)))
    for talkative in ("asyncio", "py4j", "uvicorn"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    if log_format == "json":
        # Python itself would write these as text.
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    about = fields(error=kind.__name__, reason=str(error))
    logger.critical("the process ends: %s", error, exc_info=(kind, error, traceback), extra=about)


# --- what may end a command from outside --------------------------------------------------------------------------


GRACE_S = 2.0
"""How long a write may continue after the first signal."""
REPEAT_S = 0.05

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """An ending signal has arrived. The command ends as after Ctrl-C, with the exit code of this signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code_after(error: BaseException) -> int:
    """Return 128 plus the number of the signal that raised the error, as shells do."""
    return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """Raise `Ended` for an ending signal, which would otherwise end the process immediately, without any cleanup."""
    process = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            raise Ended(number)
        # A process that was forked since, such as a pool worker, ends as if there were no handler.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    # Only the main thread may set handlers. Signals that are ignored, as under nohup, stay ignored.
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in ENDING_SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


class Interruptions:
    """Raises `Ended` for ending signals, but only inside `allowed`: for a command that must not stop halfway."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        """The signal that has arrived."""
        self._reader_is_gone = False
        self._is_allowed = False
        self._is_over = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow signals to interrupt. One that arrived earlier interrupts immediately."""
        self._is_allowed = True
        try:
            self._heed()
            yield
        finally:
            self._is_allowed = False

    def hurry(self) -> None:
        """After a signal, limit the next operation to the grace period."""
        if self.number is not None:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _heed(self) -> None:
        if self.number is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Ended(self.number)
        if self._reader_is_gone:
            raise BrokenPipeError

    def watch_reader(self, file: int) -> None:
        """Raise `BrokenPipeError` in `allowed` when the last process that reads from a pipe has closed it.

        A write would raise it, too, but the next one may be far off: `| head -1` should end at once.
        """
        # Its signal may arrive late, and must not end the code that follows.
        self._previous[signal.SIGALRM] = signal.SIG_IGN
        threading.Thread(target=self._wait_for_reader, args=(file,), name="headwater-reader-watch", daemon=True).start()

    def _wait_for_reader(self, file: int) -> None:
        poll = select.poll()
        poll.register(file, 0)  # poll reports errors of a file without being asked to
        poll.poll()
        self._reader_is_gone = True
        # Repeated: a signal just before the main thread begins to wait would be handled only after the wait.
        while not self._is_over.wait(REPEAT_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def __enter__(self) -> Self:
        for number in ENDING_SIGNALS:
            # Signals that a shell or nohup ignores stay ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._is_over.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self.number is None
        self.number = self.number or signal.Signals(number)
        if self._is_allowed or not is_first:
            self._heed()
        self.hurry()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None or self._is_allowed:
            self._heed()
