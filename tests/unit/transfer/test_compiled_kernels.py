"""After `compile_kernels` a reader, a loader and `tail --json` compile nothing, whatever the changes hold."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest

from headwater.cli.kernels import PARTS
from headwater.client.batches import build_batch
from headwater.client.collection_names import CollectionFilter, CollectionNames
from headwater.client.pieces import ChangeRun
from headwater.kernels.machine_code import compile_kernels
from headwater.protocol.kernels.frame_runs import cut_runs
from headwater.protocol.messages.dcp_changes import Deletion, Mutation
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs
from headwater.transfer import set_frames
from headwater.transfer.change_lines import ChangeLines
from headwater.transfer.export_files import are_json
from headwater.transfer.json_lines import JsonLines
from headwater.transfer.key_template import GeneratedDocuments, KeyTemplate
from support.machine import loaded_kernels

WITH_XATTRS = encode_xattrs(ValueParts(xattrs={"name": b"1"}, body=b"{}"))
PACKED = {"value": compress(WITH_XATTRS), "datatype": Datatype.JSON | Datatype.SNAPPY | Datatype.XATTR}
PLAIN = {"value": b"{}", "datatype": Datatype.JSON}


def a_run(*bodies: dict[str, object]) -> ChangeRun:
    key = {"key": b"k", "collection_id": DEFAULT_COLLECTION, "rev_seqno": 1}
    changes = [Mutation(opaque=1 + at % 2, seqno=Seqno(at), **key, **body) for at, body in enumerate(bodies, start=1)]
    data = b"".join(change.encode() for change in changes) + Deletion(seqno=Seqno(9), **key).encode()
    for received in (data, bytearray(data)):
        cut_runs(np.frombuffer(received, dtype=np.uint8))
    return ChangeRun(
        vbucket=VBucketId(0),
        vbuuid=Vbuuid(1),
        snapshot_start=Seqno(0),
        snapshot_end=Seqno(9),
        rows=len(changes) + 1,
        data=data,
    )


@pytest.mark.parametrize("bodies", [(PLAIN,), (PLAIN, PACKED, PLAIN)], ids=["plain", "compressed"])
@pytest.mark.parametrize("collections", [True, False])
def test_reading(bodies: tuple[dict[str, object], ...], collections: bool) -> None:
    compile_kernels(*PARTS["client"])
    before = loaded_kernels()
    everything = CollectionFilter(collections=frozenset({DEFAULT_COLLECTION}))
    for only in (everything, None):
        batch = build_batch([a_run(*bodies)], CollectionNames(), collections=collections, xattrs=True, only=only)
        are_json(batch)
        for no_value in (False, True):
            ChangeLines(no_value=no_value).encode(batch)
    assert loaded_kernels() == before


def test_loading() -> None:
    compile_kernels(*PARTS["client"])
    before = loaded_kernels()
    lines = JsonLines(BytesIO(b'{"id":1}\n{"id":"\\u00e9"}\n'), KeyTemplate.parse("k::{id}::{#}"))
    for documents in (lines, GeneratedDocuments(3, KeyTemplate.parse("k::{#}"))):
        for batch in documents.batches():
            frames = set_frames.encode_sets(batch, vbuckets=4)
            for part in set_frames.split_frames(frames, np.zeros(4, dtype=np.int64), lanes=1):
                set_frames.set_opaques(part.data, part.starts, 0)
    for answers in (b"", bytearray()):
        received = np.frombuffer(answers, dtype=np.uint8)
        set_frames.scan_answers(received, opaque=0, failures=np.empty((1, 2), dtype=np.int64))
    assert loaded_kernels() == before
