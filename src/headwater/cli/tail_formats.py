"""What `headwater tail` prints of changes: which rows of a batch, and in which format.

`tail` chooses an encoder and a row selection, and `Tailer` calls them. Text from a server is escaped before it
reaches a terminal.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache, lru_cache
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from headwater.client.batches import OPS, change_schema, with_text_keys
from headwater.client.changes import Change, CollectionEvent, DocumentChange, Rollback, changes_of
from headwater.phrases import escaped, escaped_bytes
from headwater.transfer.change_lines import ChangeLines

# --- in which form ----------------------------------------------------------------------------------------------------


class Format(StrEnum):
    PRETTY = "pretty"
    JSONL = "jsonl"
    ARROW = "arrow"


class Encoder(Protocol):
    """Encodes batches as bytes."""

    def encode(self, batch: pa.RecordBatch) -> bytes | memoryview:
        """Return the bytes of a batch, which are valid until the next call."""

    def end(self) -> bytes:
        """Return the bytes that follow the last batch."""


def encoder(format_: Format, *, no_value: bool, xattrs: bool) -> Encoder:
    match format_:
        case Format.PRETTY:
            return PrettyLines(coloured=_is_coloured(), width=_width)
        case Format.JSONL:
            return ChangeLines(no_value=no_value)
        case Format.ARROW:
            return ArrowStream(change_schema(xattrs=xattrs))


def _is_coloured() -> bool:
    """Decide as rich does: by the terminal and the variables NO_COLOR, FORCE_COLOR and TERM."""
    console = Console(file=sys.stdout)
    return console.color_system is not None and not console.no_color


def _width() -> int | None:
    """Return the current width of the terminal, which may change while the command runs, or None if there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class ArrowStream:
    """The bytes of an Arrow IPC stream, batch by batch. They start with the schema, and `end` completes them."""

    def __init__(self, schema: pa.Schema) -> None:
        self._made = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._made, schema)

    def encode(self, batch: pa.RecordBatch) -> bytes:
        self._writer.write_batch(with_text_keys(batch))
        return self._take()

    def end(self) -> bytes:
        self._writer.close()
        return self._take()

    def _take(self) -> bytes:
        taken = self._made.getvalue()
        self._made.seek(0)
        self._made.truncate()
        return taken


# --- for people -------------------------------------------------------------------------------------------------------

_OP_CHARS = len("collection modified")
_PLACE_CHARS = 12
_VALUE_CHARS_MIN = 12
"""The part of a value that is shown even if the terminal is too narrow for it."""
_BINARY_BYTES_SHOWN = 64
_NO_TIME = "-".ljust(len("2026-01-31 09:05:00.000"))
_MORE = "…"

_OP_STYLES = {"mutation": "green", "deletion": "red", "expiration": "yellow"}
_EVENT_STYLE = "bold blue"
_ROLLBACK_STYLE = "bold white on red"
_TIME_STYLE = "bright_black"
_COLLECTION_STYLE = "cyan"
_KEY_STYLE = "bold"


class PrettyLines:
    """One line per change, in colours on a terminal. A value is cut if its line would be wider than the terminal."""

    def __init__(self, *, coloured: bool, width: Callable[[], int | None]) -> None:
        """`width` returns the current width of a line, or None if nothing is to be cut."""
        self._coloured = coloured
        self._width = width

    def encode(self, batch: pa.RecordBatch) -> bytes:
        width = self._width()
        lines = (self._line(change, width) for change in changes_of(batch))
        return "".join(lines).encode(errors="backslashreplace")

    def end(self) -> bytes:
        return b""

    def _line(self, change: Change, width: int | None) -> str:
        match change:
            case DocumentChange():
                return self._document_line(change, width)
            case Rollback():
                words = f"ROLLBACK of vbucket {change.vbucket} from seqno {change.from_seqno} to {change.seqno}: "
                words += "what was shown of it above that has not happened"
                return f"{self._styled(words, _ROLLBACK_STYLE)}\n"
            case _:
                place = f"{change.vbucket}:{change.seqno}"
                words = self._styled(change.op.replace("_", " ").ljust(_OP_CHARS), _EVENT_STYLE)
                name = change.scope if change.scope is not None else "?"
                if isinstance(change, CollectionEvent):
                    name = _collection(change.scope, change.collection, change.collection_id)
                time = self._styled(_NO_TIME, _TIME_STYLE)
                return f"{time}  {place:<{_PLACE_CHARS}}  {words}  {self._styled(name, _COLLECTION_STYLE)}\n"

    def _document_line(self, change: DocumentChange, width: int | None) -> str:
        time = _time(change.cas)
        place = f"{change.vbucket}:{change.seqno}"
        collection = _collection(change.scope, change.collection, change.collection_id)
        key = escaped(change.key)
        room = None
        if width is not None:
            taken = len(time) + max(len(place), _PLACE_CHARS) + _OP_CHARS + _cells(collection) + _cells(key) + 5 * 2
            room = max(width - taken, _VALUE_CHARS_MIN)
        value = _value_words(change.value or b"", room)
        return (
            f"{self._styled(time, _TIME_STYLE)}  {place:<{_PLACE_CHARS}}  "
            f"{self._styled(f'{change.op:<{_OP_CHARS}}', _OP_STYLES[change.op])}  "
            f"{self._styled(collection, _COLLECTION_STYLE)}  {self._styled(key, _KEY_STYLE)}"
            f"{'  ' if value else ''}{value}\n"
        )

    def _styled(self, text: str, style: str) -> str:
        if not self._coloured:
            return text
        start, end = _codes(style)
        return f"{start}{text}{end}"


def _time(cas: int) -> str:
    """Return the time of a change in the user's time zone."""
    if not cas:
        return _NO_TIME
    milliseconds = cas // 1_000_000
    return f"{_second(milliseconds // 1000)}.{milliseconds % 1000:03}"


@lru_cache(maxsize=1024)
def _second(second: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second)).astimezone().strftime("%Y-%m-%d %H:%M:%S")


@lru_cache(maxsize=1024)
def _collection(scope: str | None, collection: str | None, collection_id: int) -> str:
    if collection is None:
        return f"(collection 0x{collection_id:x})"
    return escaped(f"{'?' if scope is None else scope}.{collection}")


def _value_words(value: bytes, room: int | None) -> str:
    """Return as much of a value as fits."""
    # A character has up to four bytes. One that is cut in two lies beyond the room.
    shown = value if room is None else value[: 4 * room + 4]
    try:
        text = shown.decode()
    except UnicodeDecodeError as error:
        is_cut = len(shown) < len(value) and error.start > len(shown) - 4
        text = shown[: error.start].decode() if is_cut else _binary_words(value)
    # Line breaks in JSON are white space.
    text = escaped(text.replace("\n", " ").replace("\r", " "))
    return text if room is None else _cut(text, room)


def _binary_words(value: bytes) -> str:
    """Return the size and the beginning of a value, even if there is room for more."""
    more = _MORE if len(value) > _BINARY_BYTES_SHOWN else ""
    return f"({len(value):,} bytes) {escaped_bytes(value[:_BINARY_BYTES_SHOWN])}{more}"


def _cells(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _cut(text: str, cells: int) -> str:
    if _cells(text) <= cells:
        return text
    return f"{text[: cells - 1] if text.isascii() else set_cell_size(text, cells - 1)}{_MORE}"


@cache
def _codes(style: str) -> tuple[str, str]:
    """Return the escape codes around text in this style. The sixteen colours follow the user's own scheme."""
    start, _, end = Style.parse(style).render("|", color_system=ColorSystem.STANDARD).partition("|")
    return start, end


# --- which rows -------------------------------------------------------------------------------------------------------


class WantedRows(Protocol):
    """Chooses which rows of a batch are written."""

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the row numbers in ascending order."""


_ONE_CHARACTER = r"(?:[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*|[\x80-\xbf])"
"""One character of UTF-8, for an expression that is matched byte by byte; in other data, one byte."""


class KeyPattern:
    """Selects keys that match one of the patterns of `--key`: `*` matches any characters and `?` matches one.

    Rollbacks always match: the changes that they undo may have been shown before.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        alternatives = "|".join(_expression(pattern) for pattern in patterns)
        # Binary columns are matched byte by byte. An argument that is not UTF-8 stands for its own bytes.
        self._expression = rf"(?s)\A(?:{alternatives})\z".encode(errors="surrogateescape")

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the numbers of the matching rows, in ascending order."""
        # Imported here: the module creates its functions on import, which takes longer than to print the first changes.
        import pyarrow.compute as pc

        fits = pc.match_substring_regex(batch.column("key"), pattern=self._expression)
        is_rollback = pc.equal(batch.column("op").cast(pa.string()), "rollback")
        wanted = pc.or_(pc.fill_null(fits, False), is_rollback)
        found: NDArray[np.int64] = np.flatnonzero(wanted.to_numpy(zero_copy_only=False))
        return found


def _expression(pattern: str) -> str:
    signs = {"*": r".*", "?": _ONE_CHARACTER}
    return "".join(signs.get(sign) or re.escape(sign) for sign in pattern)


EVENTS_MAX = 1024
"""How many events are remembered. A forgotten event would be shown again."""

_EVENT_OPS = frozenset(op for op in OPS if op.startswith(("collection_", "scope_")))

_COLUMNS = ["op", "scope", "collection", "collection_id", "vbucket"]

_Event = tuple[object, ...]


class EventsOnce:
    """Selects all rows except events that another vbucket has sent already: every vbucket sends its own copy.

    The rows have no manifest uid, and a collection can be changed twice. But a vbucket sends each event once: an equal
    one from the same vbucket, as after a flush or a rollback, is a new event, and the other vbuckets will send it, too.
    """

    def __init__(self) -> None:
        self._seen: dict[_Event, _Seen] = {}

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the numbers of the rows to show, in ascending order."""
        ops = batch.column("op")
        are_events = np.array([op in _EVENT_OPS for op in ops.dictionary.to_pylist()])[ops.indices.to_numpy()]
        shown = ~are_events
        if are_events.any():
            events = batch.select(_COLUMNS).filter(pa.array(are_events))
            sent = zip(*(column.to_pylist() for column in events.columns), strict=True)
            shown[are_events] = [self._is_new(event, vbucket) for *event, vbucket in sent]
        return np.flatnonzero(shown)

    def _is_new(self, event: list[object], vbucket: int) -> bool:
        # Inserted last, so that the newest event is forgotten last.
        seen = self._seen[tuple(event)] = self._seen.pop(tuple(event), _Seen())
        if len(self._seen) > EVENTS_MAX:
            del self._seen[next(iter(self._seen))]
        seen.by_vbucket[vbucket] += 1
        is_new = seen.by_vbucket[vbucket] > seen.shown
        seen.shown += is_new
        return is_new


@dataclass(slots=True)
class _Seen:
    """How often an event was sent by each vbucket, and shown."""

    shown: int = 0
    by_vbucket: Counter[int] = field(default_factory=Counter)
