"""Where `headwater tail` starts, how far it is, and how the next run goes on from there.

`tail` reads `--from` with it and prints the command to go on; `Tailer` writes the offsets. A password must never get
into that command.
"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import rich_click as click
from click.core import ParameterSource

from headwater.client.offsets import TEXT_CHARS_MAX, Offsets
from headwater.client.read_options import Start
from headwater.durable_files import replace_file
from headwater.errors import InvalidInput, InvalidOffsets
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

SHOWN_CHARS_MAX = 1000
"""Longer offsets are not printed on a terminal."""
ARGUMENT_CHARS_MAX = 100_000
"""Less than what Linux takes as one argument, 128 KiB."""

_HINT = "Use beginning, now, a file with offsets, or the offsets themselves as JSON"
_NOT_REPEATED = frozenset({"start", "password", "tls_key_password", "limit"})
"""Options that the command to go on does not have: it has other offsets, and passwords are not shown."""


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
        raise InvalidInput(f"{str(path)!r} is no file, and nothing to start from", hint=_HINT) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInput(f"the offsets in {str(path)!r} can't be read: {reason}", hint=_HINT) from error
    try:
        return Offsets.from_json(text)
    except InvalidOffsets as error:
        raise error.reworded(f"{path}: {error.reason}") from error


# --- where to go on -----------------------------------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Raise at once what would fail at the end."""
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


# --- how far it is ------------------------------------------------------------------------------------------------


def offsets_behind(rows: int, batch: pa.RecordBatch, *, before: Offsets, after: Offsets) -> Offsets:
    """Where a consumer is that has taken the first `rows` of a batch, with the offsets before and after all of it.

    A vbucket of which nothing is left in the batch is where it is after it, which may be behind its last row.
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
