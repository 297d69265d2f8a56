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

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow.fs as fs

from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.spark.lake.layout import open_filesystem

FILES_MAX = 10_000
"""More are not looked at: what is not known is only slower."""
NO_BRANCH = Vbuuid(0)
"""No branch has this name: what was read, if anything, is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadExtent:
    """A vbucket was to be read from `start_seqno` to `seqno`, and was, on this branch, out of a snapshot that ended at
    `snapshot_end`; or was not, and the branch is `NO_BRANCH`."""

    vbuuid: Vbuuid
    start_seqno: Seqno
    seqno: Seqno
    snapshot_end: Seqno

    def joined(self, other: ReadExtent) -> ReadExtent:
        """A task may run twice, and nobody knows whose rows were kept: the worst of both holds.

        Where the two have read different branches, it is not even known whose versions are in the table.
        """
        if (self.start_seqno, self.seqno) != (other.start_seqno, other.seqno):
            return other
        return ReadExtent(
            vbuuid=self.vbuuid if self.vbuuid == other.vbuuid else NO_BRANCH,
            start_seqno=self.start_seqno,
            seqno=self.seqno,
            snapshot_end=max(self.snapshot_end, other.snapshot_end),
        )


Extents = Mapping[VBucketId, ReadExtent]


class ExtentFolder:
    """The files of one query, in a folder or under a URI. Only the planner deletes."""

    def __init__(self, folder: str) -> None:
        self._filesystem, self._folder = open_filesystem(folder)

    def write(self, extents: Extents) -> None:
        """To be called by a task at its end."""
        rows = [
            [vbucket, extent.vbuuid, extent.start_seqno, extent.seqno, extent.snapshot_end]
            for vbucket, extent in extents.items()
        ]
        self._filesystem.create_dir(self._folder)
        name = uuid.uuid4().hex
        unfinished = f"{self._folder}/.{name}"
        with self._filesystem.open_output_stream(unfinished) as file:
            file.write(json.dumps(rows).encode())
        self._filesystem.move(unfinished, f"{self._folder}/{name}.json")

    def read(self) -> dict[VBucketId, ReadExtent]:
        """All that is known."""
        return self._read(self._paths())

    def compact(self) -> None:
        """Put one file in the place of many."""
        old = self._paths()
        if len(old) > 1:
            self.write(self._read(old))
            for path in old:
                self._filesystem.delete_file(path)

    def _read(self, paths: Iterable[str]) -> dict[VBucketId, ReadExtent]:
        extents: dict[VBucketId, ReadExtent] = {}
        for path in paths:
            for vbucket, vbuuid, *seqnos in self._rows(path):
                start_seqno, seqno, snapshot_end = map(Seqno, seqnos)
                extent = ReadExtent(
                    vbuuid=Vbuuid(vbuuid), start_seqno=start_seqno, seqno=seqno, snapshot_end=snapshot_end
                )
                known = extents.get(VBucketId(vbucket))
                extents[VBucketId(vbucket)] = known.joined(extent) if known else extent
        return extents

    def _rows(self, path: str) -> list[list[int]]:
        """A file that is gone or was cut off tells nothing, which is safe."""
        try:
            with self._filesystem.open_input_stream(path) as file:
                rows = json.loads(file.read())
            return [[int(number) for number in row] for row in rows if len(row) == 5]
        except (OSError, ValueError, TypeError):
            return []

    def _paths(self) -> list[str]:
        """The newest last."""
        found = self._filesystem.get_file_info(fs.FileSelector(self._folder, allow_not_found=True))
        files = [
            (entry.mtime_ns or 0, entry.path)
            for entry in found
            if entry.type == fs.FileType.File and entry.base_name.endswith(".json")
        ]
        return [path for _, path in sorted(files)[-FILES_MAX:]]
