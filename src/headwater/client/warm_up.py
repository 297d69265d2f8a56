"""Have all kernels that a reader uses compiled before it is in a hurry. They are kept on disk for the next process."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater.client.batches import build_batch
from headwater.client.collection_names import CollectionFilter, CollectionNames
from headwater.client.pieces import ChangeRun
from headwater.protocol.kernels.frame_runs import cut_runs
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs


def warm_up() -> None:
    """Let a few changes of every kind go the way of all changes."""
    for collections in (True, False):
        a_batch(collections=collections)


def a_batch(*, collections: bool = True) -> pa.RecordBatch:
    """A batch of such changes."""
    value = encode_xattrs(ValueParts(xattrs={"name": b"1"}, body=b"{}"))
    frames = [
        Mutation(opaque=1, seqno=Seqno(1), rev_seqno=1, key=b"k", collection_id=DEFAULT_COLLECTION, value=b"{}"),
        Mutation(
            opaque=2,
            seqno=Seqno(1),
            rev_seqno=1,
            key=b"k",
            collection_id=DEFAULT_COLLECTION,
            value=compress(value),
            datatype=Datatype.JSON | Datatype.SNAPPY | Datatype.XATTR,
        ),
        Mutation(opaque=1, seqno=Seqno(2), rev_seqno=1, key=b"k", collection_id=DEFAULT_COLLECTION, value=b"{}"),
    ]
    data = b"".join(frame.encode() for frame in frames)
    cut_runs(np.frombuffer(data, dtype=np.uint8))
    run = ChangeRun(
        vbucket=VBucketId(0),
        vbuuid=Vbuuid(1),
        snapshot_start=Seqno(0),
        snapshot_end=Seqno(2),
        rows=len(frames),
        data=data,
    )
    everything = CollectionFilter(collections=frozenset({DEFAULT_COLLECTION}))
    return build_batch([run], CollectionNames(), collections=collections, xattrs=True, only=everything)
