"""What Spark writes into a query's checkpoint folder, as far as a sink has to know it.

A sink is told the number of a batch and nothing else. The offsets that the batch starts and ends at are in the
checkpoint before the sink is called: the file `offsets/N` has a line of versions, a line of settings, and then a line
of offsets for each source. The file `metadata` has the id of the query, which is another one for every new checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as fs

from headwater.client.offsets import Offsets
from headwater.errors import LakeOutOfStep
from headwater.spark.lake.layout import open_filesystem

_SOURCE_LINE = 2


@dataclass(frozen=True, slots=True)
class CheckpointLog:
    """The checkpoint of a query that reads one `dcp` source."""

    folder: str

    def query_id(self) -> str:
        metadata = self._json("metadata", line=0)
        if not isinstance(metadata, dict) or not isinstance(metadata.get("id"), str):
            raise self._unreadable("metadata", "it names no query")
        found: str = metadata["id"]
        return found

    def offsets(self, batch_id: int) -> Offsets:
        """Where a batch ends."""
        return Offsets.from_json(json.dumps(self._json(f"offsets/{batch_id}", line=_SOURCE_LINE)))

    def start_of(self, batch_id: int) -> Offsets | None:
        """Where a batch starts; None for the first, which starts where the source says."""
        return None if batch_id == 0 else self.offsets(batch_id - 1)

    @property
    def last_planned(self) -> int | None:
        """The newest batch that has its offsets here; None where no query has ever planned one."""
        return self._last("offsets")

    @property
    def last_committed(self) -> int | None:
        """The newest batch that Spark knows to be done."""
        return self._last("commits")

    def _last(self, log: str) -> int | None:
        filesystem, folder = open_filesystem(self.folder)
        found = filesystem.get_file_info(fs.FileSelector(f"{folder}/{log}", allow_not_found=True))
        return max((int(entry.base_name) for entry in found if entry.base_name.isdigit()), default=None)

    def _json(self, name: str, *, line: int) -> Any:
        filesystem, folder = open_filesystem(self.folder)
        try:
            with filesystem.open_input_stream(f"{folder}/{name}") as file:
                return json.loads(file.read().decode().splitlines()[line])
        except (OSError, ValueError, IndexError) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, why: object) -> LakeOutOfStep:
        return LakeOutOfStep(
            f"{name} of the checkpoint in {self.folder} can't be read: {why}",
            hint=f"Remove {self.folder}: the next run goes on where the tables end",
        )
