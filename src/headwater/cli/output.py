"""What commands write, and what may end them: errors as one sentence, tables, the log, signals, a reader that is gone.

`click`, as all commands use it, is rich-click where the extra `cli` is installed, with columns and colours in pages of
help. A mere client has click alone, whose pages say the same.

`headwater.cli` wraps every command in `errors_in_one_sentence`; commands that run for long call `set_up_logging`. An
error is never drawn with a frame around it, as rich would: that breaks it where a log or a script reads it.

A signal that comes while changes are being written waits until they are out, so that the offsets say exactly what has
been written. It does not wait for ever: a reader that takes nothing from a pipe would hold the command there.
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
    # An option and what it takes in one column, so that nothing is cut on a terminal of 60 columns.
    layout.OPTIONS_TABLE_COLUMN_TYPES = ["opt_all_metavar", "help"]
    layout.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"
    layout.OPTIONS_TABLE_HELP_SECTIONS = ["help", "range", "required", "default", "envvar", "deprecated"]

_HelpShown: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""click 8.1 ends by itself when it has shown the help, and has no such error."""


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Print what click raises and what goes wrong with standard output, and end with its exit code."""
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
        # click shows three of them, and those behind the first have little to do with what was meant.
        message = f"{error.message} {did_you_mean(possibilities[0])}"
    end = "" if message.endswith("?") else "."
    return f"{message.rstrip('.')}{end} See {error.ctx.command_path} --help"


# --- standard output ----------------------------------------------------------------------------------------------


@contextmanager
def _output_written() -> Iterator[None]:
    """A reader that has seen enough (`| head`) is no error; a full disk is."""
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
    """Whether it is our own output that is broken, and not a connection."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors of a file are reported without being asked for
    except (io.UnsupportedOperation, ValueError):
        return False
    return bool(poll.poll(0))


def abandon_output() -> None:
    """Write nothing more: the stream may hold text that the interpreter would write on its way out, and complain."""
    with suppress(OSError, io.UnsupportedOperation):  # It may be no file of the system's.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


UNCUT_CHARS = 10_000


def output_console() -> Console:
    """For standard output: as wide as the terminal is, and never cut or folded in a file or a pipe.

    Sentences are printed with `soft_wrap`, so that nothing breaks them but the terminal.
    """
    return Console(highlight=False, width=None if sys.stdout.isatty() else UNCUT_CHARS)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print cells in columns. Text of a server is made harmless; as many columns as there are headings are shown."""
    shown = [list(headings), *([phrases.printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(headings))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())


# --- rates --------------------------------------------------------------------------------------------------------


COUNT_MIN = 1000
SECONDS_MIN = 1.0
"""Below these, a rate is about how a run begins and ends."""


def documents_in(documents: int, seconds: float, *, and_rate: str = "") -> str:
    """`and_rate` stands behind the rate of documents, where there is one."""
    sentence = f"{counted(documents, 'document')} in {seconds:.2f} s"
    if documents < COUNT_MIN or seconds < SECONDS_MIN:
        return sentence
    return f"{sentence}: {documents / seconds:,.0f} documents/s{and_rate}"


# --- the log ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

TEXT = "%(asctime)s %(levelname)s %(message)s"
MESSAGE_CHARS_MAX = 2_000
FIELD_CHARS_MAX = 500
"""What a peer calls itself, and what it asks for, is logged. None of that is worth more."""
PEER_LINES_FREE, PEER_LINES_PER_S = 10, 1.0
"""How many lines of one kind a peer can have logged at once, and how many in a second after that."""
PEERS_MAX = 1_024
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_OWN_MEMBERS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; all else was given with the message."""


def printable(text: str, chars_max: int) -> str:
    """Text of any origin on one line: what a terminal would act on is escaped, and what is too long is cut."""
    cut = text if len(text) <= chars_max else f"{text[:chars_max]}… ({len(text)} characters)"
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


class TextFormatter(logging.Formatter):
    """A line a message. A peer can't forge another one by a name with a newline in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message, MESSAGE_CHARS_MAX)
        return super().formatMessage(record)


class PeerLimit(logging.Filter):
    """Lets a peer have only so many lines of a kind logged: a stranger must not fill the disk.

    The next line that is let through says how many were left out before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[tuple[str, str], tuple[float, float, int]] = OrderedDict()
        """By peer and kind: how many lines are free, since when that counts, and how many were left out."""

    def filter(self, record: logging.LogRecord) -> bool:
        peer = vars(record).get("peer")
        is_of_http = record.name.startswith("uvicorn")  # which logs bad requests, and does not say whose
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
    """One JSON object a line: time, level, logger, message, and the fields that the message came with."""

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
    """Write the log of this process to its standard error, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(TEXT))
    handler.addFilter(PeerLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    report_first_compile(lambda: logger.info(COMPILING, extra=fields(event=LogEvent.COMPILING)))
    for talkative in ("asyncio", "py4j", "uvicorn"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    if log_format == "json":
        # What Python itself would write there is text.
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
    """An ending signal has come. A command ends as after Ctrl-C, with the exit code of this signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code_after(error: BaseException) -> int:
    """128 and the number of the signal that raised it, as shells have it."""
    return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """Raise `Ended` for an ending signal that would else end the process at once, with nothing cleaned up."""
    process = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            raise Ended(number)
        # A process that was forked since, such as a worker of a pool, ends as if there were no handler.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    # Only the main thread may set handlers. What is ignored, as under nohup, stays ignored.
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
    """Raises `Ended` for ending signals, inside `allowed` only: for a command that must not stop half-way."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        """The signal that has come."""
        self._reader_is_gone = False
        self._is_allowed = False
        self._is_over = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow signals to interrupt; one that came earlier does so immediately."""
        self._is_allowed = True
        try:
            self._heed()
            yield
        finally:
            self._is_allowed = False

    def hurry(self) -> None:
        """After a signal, wait no longer than the grace for what comes now."""
        if self.number is not None:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _heed(self) -> None:
        if self.number is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Ended(self.number)
        if self._reader_is_gone:
            raise BrokenPipeError

    def watch_reader(self, file: int) -> None:
        """Raise `BrokenPipeError` in `allowed` when no process is left that reads from a pipe.

        A write would raise it, too, but it may be long until there is one: `| head -1` should end at once.
        """
        # Its signal may come late, and must not end what comes after this.
        self._previous[signal.SIGALRM] = signal.SIG_IGN
        threading.Thread(target=self._wait_for_reader, args=(file,), name="headwater-reader-watch", daemon=True).start()

    def _wait_for_reader(self, file: int) -> None:
        poll = select.poll()
        poll.register(file, 0)  # errors of a file are reported without being asked for
        poll.poll()
        self._reader_is_gone = True
        # A signal that comes just before the main thread begins to wait would be seen after its wait only.
        while not self._is_over.wait(REPEAT_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def __enter__(self) -> Self:
        for number in ENDING_SIGNALS:
            # What a shell or nohup has set to be ignored stays ignored.
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
