"""Places that a vbucket can go back to: where its last batches ended, and how far their snapshots had gone by then.

With writes going on, nearly every snapshot that a batch reads goes beyond the batch, and the seqno at which nothing is
missing stays behind. But a failover that happened later than all of those snapshots has taken nothing of what they
hide: what is missing at the end of that batch is in the shared history, and comes again. So of the last few batch ends,
the newest whose snapshots all lie in the shared part is as good to go back to as the beginning, and much nearer.

The planner notes a place before it plans the batch that starts there, when all tasks before it are done. What it knows
is written down in the query's folder (`progressDir`) before the batch is planned, so that after a crash no place is
taken for known that a rollback has given up.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping

from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.lake.layout import open_filesystem

PLACES_MAX = 4
"""Of each vbucket. A failover takes back seconds, not many batches."""
_NAME = "places"

Places = Mapping[VBucketId, tuple[StreamOffset, ...]]
"""By vbucket, the oldest first. The snapshot end of a place says how far all snapshots went that were read up to it."""


def with_place(places: tuple[StreamOffset, ...], at: StreamOffset, *, is_known: bool) -> tuple[StreamOffset, ...]:
    """The places of a vbucket that has come, or gone back, to an offset; with that offset itself, if it can be one."""
    kept = tuple(place for place in places if place.seqno <= at.seqno)
    if not is_known or not at.seqno or (kept and kept[-1].seqno == at.seqno):
        return kept
    return (*kept, at)[-PLACES_MAX:]


class PlacesFile:
    """What is known, in a folder or under a URI. Only the planner reads and writes it."""

    def __init__(self, folder: str) -> None:
        self._filesystem, self._folder = open_filesystem(folder)

    def read(self) -> dict[VBucketId, tuple[StreamOffset, ...]]:
        """What can't be read tells nothing, which is safe."""
        try:
            with self._filesystem.open_input_stream(f"{self._folder}/{_NAME}") as file:
                told = json.loads(file.read())
            return {VBucketId(int(vbucket)): tuple(map(_decode, places)) for vbucket, places in told.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def write(self, places: Places) -> None:
        told = {str(vbucket): [_encode(place) for place in held] for vbucket, held in places.items() if held}
        self._filesystem.create_dir(self._folder)
        unfinished = f"{self._folder}/.{uuid.uuid4().hex}"
        with self._filesystem.open_output_stream(unfinished) as file:
            file.write(json.dumps(told).encode())
        self._filesystem.move(unfinished, f"{self._folder}/{_NAME}")


def _encode(place: StreamOffset) -> list[int]:
    return [place.vbuuid, place.seqno, place.snapshot_start, place.snapshot_end]


def _decode(numbers: list[int]) -> StreamOffset:
    vbuuid, seqno, snapshot_start, snapshot_end = map(int, numbers)
    return StreamOffset(
        vbuuid=Vbuuid(vbuuid),
        seqno=Seqno(seqno),
        snapshot_start=Seqno(snapshot_start),
        snapshot_end=Seqno(snapshot_end),
    )
