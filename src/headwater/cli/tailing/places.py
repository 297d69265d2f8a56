"""Where a read starts, as the command line tells it, and where the next one is to go on."""

from __future__ import annotations

import os
import re
import shlex
import stat
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import rich_click as click
from click.core import ParameterSource
from numpy.typing import NDArray

from headwater.client.batches import OPS
from headwater.client.offsets import TEXT_CHARS_MAX, Offsets
from headwater.client.read_options import Start
from headwater.durable_files import replace_file
from headwater.errors import InvalidInput, InvalidOffsets

SHOWN_CHARS_MAX = 1000
"""Longer offsets are not printed on a terminal."""
ARGUMENT_CHARS_MAX = 100_000
"""Less than what Linux takes as one argument, 128 KiB."""

_HINT = "Use beginning, now, a file with offsets, or the offsets themselves as JSON"
_NOT_REPEATED = frozenset({"start", "password", "tls_key_password", "limit"})
"""Options that the command to go on does not have: the place is another, and passwords are not shown."""


# --- where to start -----------------------------------------------------------------------------------------------


def read_start(text: str) -> Start | Offsets:
    """`beginning`, `now`, offsets as JSON, or the path of a file that has them."""
    if text in tuple(Start):
        return Start(text)
    if text.lstrip().startswith("{"):
        return Offsets.from_json(text)
    return read_offsets(Path(text))


def read_offsets(path: Path) -> Offsets:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(TEXT_CHARS_MAX + 1)
    except FileNotFoundError as error:
        raise InvalidInput(f"{str(path)!r} is no file, and no place to start from", hint=_HINT) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInput(f"the offsets in {str(path)!r} can't be read: {reason}", hint=_HINT) from error
    try:
        return Offsets.from_json(text)
    except InvalidOffsets as error:
        raise error.retold(f"{path}: {error.reason}") from error


# --- where to go on -----------------------------------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Tell at once what would fail at the end."""
    where = path if path.exists() else path.parent
    if path.is_dir() or not os.access(where, os.W_OK):
        raise InvalidInput(
            f"the offsets can't be written to {str(path)!r}", hint="Name a file in a folder that you can write to"
        )


def write_offsets(path: Path, offsets: Offsets) -> None:
    """Replace the file as a whole: if that fails, the old one is as it was."""
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
            hint="Free disk space, or name another file",
        ) from error


def resume_command(context: click.Context, offsets: Offsets, *, is_terminal: bool) -> str:
    """The same command, from these offsets on. Where they are long and in no file yet, they are put in one."""
    words = ["headwater", "tail", *_repeated(context)]
    if context.params["checkpoint"] is None:
        text, kept_in = offsets.to_json(), context.params["offsets_file"]
        if kept_in is None and len(text) > (SHOWN_CHARS_MAX if is_terminal else ARGUMENT_CHARS_MAX):
            kept_in = _temporary_file(text)
        words += ["--from", text if kept_in is None else str(kept_in)]
    return shlex.join(words)


def _temporary_file(text: str) -> Path:
    number, name = tempfile.mkstemp(prefix="headwater-offsets-", suffix=".json")
    with os.fdopen(number, "w") as file:
        file.write(text + "\n")
    return Path(name)


def _repeated(context: click.Context) -> list[str]:
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        value: Any = context.params.get(name)
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE or name in _NOT_REPEATED:
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(parameter.opts[0])
        else:
            for one in value if parameter.multiple else [value]:
                words += [parameter.opts[0], str(one)]
    return words


# Which keys are wanted, as `--key` tells it: `*` stands for any characters and `?` for one.


_ONE_CHARACTER = r"(?:[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*|[\x80-\xbf])"
"""Of UTF-8, for an expression that is matched byte by byte; of other bytes, one."""


class KeyPattern:
    """Keys that fit one of the patterns. Rollbacks always do: what they void may have been shown before."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        alternatives = "|".join(_expression(pattern) for pattern in patterns)
        # Binary columns are matched byte by byte. An argument that is not UTF-8 stands for the bytes that it has.
        self._expression = rf"(?s)\A(?:{alternatives})\z".encode(errors="surrogateescape")

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The numbers of the rows that fit, rising."""
        fits = pc.match_substring_regex(batch.column("key"), pattern=self._expression)
        is_rollback = pc.equal(batch.column("op").cast(pa.string()), "rollback")
        wanted = pc.or_(pc.fill_null(fits, False), is_rollback)
        found: NDArray[np.int64] = np.flatnonzero(wanted.to_numpy(zero_copy_only=False))
        return found


def _expression(pattern: str) -> str:
    signs = {"*": r".*", "?": _ONE_CHARACTER}
    return "".join(signs.get(sign) or re.escape(sign) for sign in pattern)


# Which rows people are shown: every vbucket tells of a collection that comes or goes, and they are told once.


EVENTS_MAX = 1024
"""Kept in mind. One that is forgotten would be shown once more."""

_EVENT_OPS = frozenset(op for op in OPS if op.startswith(("collection_", "scope_")))

_COLUMNS = ["op", "scope", "collection", "collection_id", "vbucket"]

_Event = tuple[object, ...]


class EventsOnce:
    """All rows but events that another vbucket has told already.

    The rows have no manifest uid, and a collection can be changed twice. But a vbucket tells of each change once: one
    that says the same again, as after a flush or a rollback, tells of something new, and the others will follow.
    """

    def __init__(self) -> None:
        self._told: dict[_Event, _Told] = {}

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The numbers of the rows to be shown, rising."""
        ops = batch.column("op")
        are_events = np.array([op in _EVENT_OPS for op in ops.dictionary.to_pylist()])[ops.indices.to_numpy()]
        shown = ~are_events
        if are_events.any():
            events = batch.select(_COLUMNS).filter(pa.array(are_events))
            told = zip(*(column.to_pylist() for column in events.columns), strict=True)
            shown[are_events] = [self._is_new(event, vbucket) for *event, vbucket in told]
        return np.flatnonzero(shown)

    def _is_new(self, event: list[object], vbucket: int) -> bool:
        # The last that was heard of is the last to be forgotten.
        told = self._told[tuple(event)] = self._told.pop(tuple(event), _Told())
        if len(self._told) > EVENTS_MAX:
            del self._told[next(iter(self._told))]
        told.by_vbucket[vbucket] += 1
        is_new = told.by_vbucket[vbucket] > told.shown
        told.shown += is_new
        return is_new


@dataclass(slots=True)
class _Told:
    """How often an event has been told, and shown."""

    shown: int = 0
    by_vbucket: Counter[int] = field(default_factory=Counter)
