"""What of ours lies beside the tables: the checkpoints of the queries, their progress, and what they were asked for."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Self

import pyarrow.fs as fs

from headwater.errors import InvalidInput
from headwater.spark.checkpoint_log import CheckpointLog
from headwater.spark.lake.layout import open_filesystem
from headwater.spark.source_options import SourceOptions

OWN_FOLDER = "_headwater"
_CHECKPOINT = "checkpoint-"
_SELECTION = "selection.json"
_TIDIED = "tidied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a bucket is landed: everything, or these scopes and collections."""

    scopes: tuple[str, ...] = ()
    collections: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: SourceOptions) -> Self:
        names = options.read.collections
        return cls(scopes=tuple(sorted(options.read.scopes)), collections=tuple(sorted(map(str, names))))

    def __str__(self) -> str:
        parts = [
            f"the {what} {', '.join(names)}"
            for what, names in (("scopes", self.scopes), ("collections", self.collections))
            if names
        ]
        return " and ".join(parts) or "all collections"


class OwnFolder:
    """The folder in a directory of tables."""

    def __init__(self, into: str) -> None:
        self.folder = f"{into.rstrip('/')}/{OWN_FOLDER}"
        self.progress = f"{self.folder}/progress"
        """Where tasks tell how far they have read."""

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def newest_checkpoint(self) -> CheckpointLog:
        """The one with the highest number, or the first, which is not there yet."""
        return self._checkpoint(self._newest_number())

    def next_checkpoint(self) -> CheckpointLog:
        return self._checkpoint(self._newest_number() + 1)

    def _newest_number(self) -> int:
        names = [name.removeprefix(_CHECKPOINT) for name in names_in(self.folder) if name.startswith(_CHECKPOINT)]
        return max((int(name) for name in names if name.isdigit()), default=1)

    def _checkpoint(self, number: int) -> CheckpointLog:
        return CheckpointLog(f"{self.folder}/{_CHECKPOINT}{number}")

    # --- when it was tidied up --------------------------------------------------------------------------------------

    def tidied_s_ago(self) -> float:
        """How long ago `note_tidied` was called, by whichever run; for ever, if it never was."""
        filesystem, path = open_filesystem(f"{self.folder}/{_TIDIED}")
        found = filesystem.get_file_info(path)
        return math.inf if found.mtime is None else time.time() - found.mtime.timestamp()

    def note_tidied(self) -> None:
        filesystem, path = open_filesystem(f"{self.folder}/{_TIDIED}")
        with filesystem.open_output_stream(path) as file:
            file.write(b"")

    # --- what was asked for ---------------------------------------------------------------------------------------

    def read_selection(self) -> Selection | None:
        """None where nobody has written it down, or where it is lost."""
        filesystem, path = open_filesystem(f"{self.folder}/{_SELECTION}")
        if filesystem.get_file_info(path).type != fs.FileType.File:
            return None
        with filesystem.open_input_stream(path) as file:
            try:
                told = json.loads(file.read())
                return Selection(scopes=tuple(told["scopes"]), collections=tuple(told["collections"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(
                    f"{path} can't be read: {error!r}", hint="Remove it, if the options are as before"
                ) from error

    def write_selection(self, selection: Selection) -> None:
        told = {"scopes": selection.scopes, "collections": selection.collections}
        filesystem, path = open_filesystem(f"{self.folder}/{_SELECTION}")
        with filesystem.open_output_stream(path) as file:
            file.write(json.dumps(told).encode())


def names_in(directory: str) -> list[str]:
    """What a directory holds; nothing where there is none."""
    filesystem, path = open_filesystem(directory)
    try:
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except OSError as error:
        raise InvalidInput(
            f"{directory} can't be used: {error}", hint="Give a directory that can be written"
        ) from error
    return sorted(entry.base_name for entry in found)
