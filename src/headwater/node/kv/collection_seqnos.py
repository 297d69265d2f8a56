"""The high seqno of one collection in a vbucket.

Nothing keeps count of these, so they are looked for in the changes themselves, the newest first. A collection that is
written to is found at once; one that is not costs a read of all that came after its last change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwater.protocol.kernels.frame_header import SYSTEM_EVENT, is_document_change
from headwater.protocol.kernels.frame_header import collection_id as collection_of_key
from headwater.protocol.kernels.memory import AnyBytes, Bytes, i64, kernel, load_u16, load_u32, load_u64, u64
from headwater.protocol.numbers import CollectionId
from headwater.store.bucket import Bucket
from headwater.store.data_format import blocks_of
from headwater.store.engine import Table, View
from headwater.store.runs import as_run


def collection_high_seqnos(bucket: Bucket, vbuckets: Sequence[int], collection_id: CollectionId) -> list[int]:
    """The last durable seqno of a collection in each vbucket: that of its creation at least, 0 where it never was."""
    with bucket.engine.view() as view:
        return [_high_seqno(bucket, view, vbucket, collection_id) for vbucket in vbuckets]


def _high_seqno(bucket: Bucket, view: View, vbucket: int, collection_id: CollectionId) -> int:
    found = (int(_last_of_collection(run, collection_id)) for run in _runs_newest_first(bucket, view, vbucket))
    return next((seqno for seqno in found if seqno), 0)


def _runs_newest_first(bucket: Bucket, view: View, vbucket: int) -> Iterator[Bytes]:
    for commit in reversed(bucket.young.of(vbucket)):
        yield commit.run(vbucket)
    start, end = blocks_of(vbucket)
    while (last := view.last_before(Table.BLOCKS, end)) is not None and last[0] >= start:
        yield as_run(last[1])
        end = last[0]


@kernel
def _last_of_collection(run: AnyBytes, wanted: int) -> int:
    """The seqno of the last change of a collection in a run, its creation included; 0 where there is none."""
    at = i64(0)
    seqno = u64(0)
    while at < len(run):
        extras_at = at + 24
        key_at = extras_at + i64(run[at + 4])
        opcode = run[at + 1]
        if is_document_change(opcode):
            if collection_of_key(run, key_at) == u64(wanted):
                seqno = load_u64(run, extras_at)
        elif opcode == SYSTEM_EVENT and load_u32(run, extras_at + 8) == 0:
            # A collection was created: the value is the manifest's uid, the scope's id and the collection's.
            value_at = key_at + i64(load_u16(run, at + 2))
            if u64(load_u32(run, value_at + 12)) == u64(wanted):
                seqno = load_u64(run, extras_at)
        at = extras_at + i64(load_u32(run, at + 8))
    return int(seqno)
