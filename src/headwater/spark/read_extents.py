"""How far the snapshots went that tasks have read: what a planner must know to come through a failover cheaply.

A batch is planned up to a seqno, say 100. When its tasks read, the server may have written more, and sends one snapshot
up to 105 in which a key that had version 60 has only version 103. The rows behind 100 are left for the next batch, so
after this one the key is still in a version older than 60. That is no harm, since version 103 is on its way; unless a
failover takes it back. Then version 60 holds again, and a reader that goes on from 100 never sees it.

So after a failover, going on from 100 is right only if the snapshot that was read ended at or before the place where
the histories part. Tasks write that down, a small file each, in a folder that the planner can read (`progressDir`).
Where it is not known the planner assumes the worst and goes back to the last seqno that is known to be complete, or to
the beginning of the vbucket. `headwater land` keeps such a folder beside its tables.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid

FILES_MAX = 10_000
"""More are not looked at: what is not known is only slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadExtent:
    """A vbucket was read up to `seqno`, on this branch, out of a snapshot that ended at `snapshot_end`."""

    vbuuid: Vbuuid
    seqno: Seqno
    snapshot_end: Seqno

    def joined(self, other: ReadExtent) -> ReadExtent:
        """A task may run twice, and nobody knows whose rows were kept: the worst of both holds."""
        if (self.vbuuid, self.seqno) != (other.vbuuid, other.seqno):
            return other
        return self if self.snapshot_end >= other.snapshot_end else other


class ExtentFolder:
    """The files of one query. Only the planner deletes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, extents: Mapping[VBucketId, ReadExtent]) -> None:
        """To be called by a task at its end."""
        rows = [[vbucket, extent.vbuuid, extent.seqno, extent.snapshot_end] for vbucket, extent in extents.items()]
        self._folder.mkdir(parents=True, exist_ok=True)
        name = uuid.uuid4().hex
        unfinished = self._folder / f".{name}"
        unfinished.write_text(json.dumps(rows))
        unfinished.rename(self._folder / f"{name}.json")

    def read(self) -> dict[VBucketId, ReadExtent]:
        """All that is known, the newest last."""
        extents: dict[VBucketId, ReadExtent] = {}
        for path in self._paths():
            for vbucket, vbuuid, seqno, snapshot_end in _rows(path):
                extent = ReadExtent(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_end=Seqno(snapshot_end))
                known = extents.get(VBucketId(vbucket))
                extents[VBucketId(vbucket)] = known.joined(extent) if known else extent
        return extents

    def compact(self, extents: Mapping[VBucketId, ReadExtent]) -> None:
        """Put one file in the place of many."""
        old = self._paths()
        if len(old) > 1:
            self.write(extents)
            for path in old:
                path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        found: list[tuple[float, Path]] = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)[-FILES_MAX:]]


def _rows(path: Path) -> list[list[int]]:
    """A file that is gone or was cut off tells nothing, which is safe."""
    try:
        rows = json.loads(path.read_text())
        return [[int(number) for number in row] for row in rows if len(row) == 4]
    except (OSError, ValueError, TypeError):
        return []
