"""The offsets of a consumer that has taken a part of a batch only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset


def offsets_behind(rows: int, batch: pa.RecordBatch, *, before: Offsets, after: Offsets) -> Offsets:
    """Where a consumer is that has taken the first `rows` of a batch, with the offsets before and after all of it.

    A vbucket of which nothing is left in the batch is where it is after it, which may be behind its last row.
    """
    vbuckets = batch.column("vbucket").to_numpy()
    taken = {int(vbucket): row for row, vbucket in enumerate(vbuckets[:rows])}
    offsets = dict(after.offsets)
    for vbucket in map(VBucketId, np.unique(vbuckets[rows:]).tolist()):
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
