"""Batches of changes: one row by example, their schemas, and what is refused.

That all rows are what the typed codec sees, with filters and without, is shown in `tests/property`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from headwater.client.batches import OPS, RAW_SCHEMA, build_batch, change_schema, raw_schema, with_text_keys
from headwater.client.collection_names import CollectionFilter, CollectionNames
from headwater.client.pieces import ChangeRun, EventPiece, Piece
from headwater.errors import TruncatedFrame, UnexpectedMessage
from headwater.protocol.frames import preserve_ttl
from headwater.protocol.manifest import CollectionCreated, Manifest
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import DcpNoop
from headwater.protocol.numbers import Cas, CollectionId, ManifestUid, ScopeId, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype

GARDEN = Manifest().with_scope("garden").with_collection("garden", "fruit")  # 8 and 9
APPLE = Mutation(
    vbucket=VBucketId(7),
    cas=Cas(1_794_715_140_654_366_720),
    datatype=Datatype.JSON,
    seqno=Seqno(3),
    rev_seqno=2,
    flags=0x0200_0006,
    expiry=1_900_000_000,
    collection_id=CollectionId(9),
    key=b"apple",
    value=b'{"colour":"red"}',
)


def run(*messages: Mutation) -> ChangeRun:
    return ChangeRun(
        vbucket=VBucketId(7),
        vbuuid=Vbuuid(0xAB),
        snapshot_start=Seqno(1),
        snapshot_end=Seqno(5),
        rows=len(messages),
        data=b"".join(message.encode() for message in messages),
    )


ROOTS_CREATED = EventPiece(
    vbucket=VBucketId(7),
    vbuuid=Vbuuid(0xAB),
    snapshot_start=Seqno(1),
    snapshot_end=Seqno(5),
    seqno=Seqno(2),
    event=CollectionCreated(
        manifest_uid=ManifestUid(3), scope_id=ScopeId(8), collection_id=CollectionId(10), name="roots", max_ttl_s=5
    ),
)


def build(*pieces: Piece, xattrs: bool = False, **options: Any) -> pa.RecordBatch:
    names = options.pop("names", None) or CollectionNames(GARDEN)
    batch = build_batch(pieces, names, collections=True, xattrs=xattrs, **options)
    batch.validate(full=True)
    return batch


# --- rows ---------------------------------------------------------------------------------------------------------


def test_a_mutation() -> None:
    assert build(run(APPLE)).to_pylist() == [
        {
            "vbucket": 7,
            "vbuuid": 0xAB,
            "seqno": 3,
            "rev": 2,
            "op": "mutation",
            "scope": "garden",
            "collection": "fruit",
            "collection_id": 9,
            "key": b"apple",
            "value": b'{"colour":"red"}',
            "datatype": 1,
            "flags": 0x0200_0006,
            "expiry": 1_900_000_000,
            "cas": 1_794_715_140_654_366_720,
            "changed_at": datetime(2026, 11, 15, 3, 59, 0, 654366, tzinfo=UTC),
            "snapshot_start": 1,
            "snapshot_end": 5,
        }
    ]


def test_the_schema_says_which_columns_have_no_nulls() -> None:
    assert {field.name for field in RAW_SCHEMA if field.nullable} == {
        "scope", "collection", "collection_id", "key", "value", "changed_at",
    }  # fmt: skip
    assert raw_schema(xattrs=True).field("xattrs").type == pa.map_(pa.string(), pa.binary())
    assert raw_schema(xattrs=False) is RAW_SCHEMA


def test_users_get_keys_as_text_and_the_bytes_of_those_that_are_none() -> None:
    """As the tables and Spark have them."""
    plain, odd = build(run(APPLE)), build(run(APPLE, replace(APPLE, key=b"a\\xff\xff", seqno=Seqno(2))))
    for batch, keys, key_bytes in ((plain, ["apple"], [None]), (odd, ["apple", "a\\xff\\xff"], [None, b"a\\xff\xff"])):
        shown = with_text_keys(batch)
        assert shown.schema == change_schema(xattrs=False)
        assert (shown.column("key").to_pylist(), shown.column("key_bytes").to_pylist()) == (keys, key_bytes)
    same_bytes = [part.column("key").buffers()[2].address for part in (plain, with_text_keys(plain))]
    assert same_bytes[0] == same_bytes[1], "nothing is copied"


def test_all_batches_share_their_dictionaries() -> None:
    names = CollectionNames(GARDEN)
    with_event, after = build(run(APPLE), ROOTS_CREATED, names=names), build(run(APPLE), names=names)
    for name in ("op", "scope", "collection"):
        assert with_event.column(name).dictionary.equals(after.column(name).dictionary)
    assert after.column("op").dictionary.to_pylist() == list(OPS)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_frame_that_is_no_plain_change_is_refused() -> None:
    sound = run(APPLE)
    for frame in (DcpNoop().encode(), replace(APPLE, frame_infos=(preserve_ttl(),)).encode()):
        with pytest.raises(UnexpectedMessage, match=rf"among changes that is none \(at byte {len(sound.data)}\)"):
            build(replace(sound, rows=2, data=bytes(sound.data) + frame))


def test_a_run_that_ends_inside_a_frame_is_refused() -> None:
    sound = run(APPLE)
    with pytest.raises(TruncatedFrame, match="ends inside a frame"):
        build(replace(sound, data=sound.data[:-1]))


def test_a_change_of_another_vbucket_than_its_stream_is_refused() -> None:
    stray = replace(APPLE, vbucket=VBucketId(8))
    with pytest.raises(UnexpectedMessage, match="a change of vbucket 8 on another's stream"):
        build(run(APPLE), run(APPLE, stray, APPLE))
    assert build(replace(run(stray), vbucket=VBucketId(8)), run(APPLE)).column("vbucket").to_pylist() == [8, 7]


def test_what_a_filter_drops_is_not_even_inflated() -> None:
    broken = replace(APPLE, collection_id=CollectionId(0), value=b"\xff\xff", datatype=Datatype.SNAPPY)
    only = CollectionFilter(collections=frozenset({CollectionId(9)}))
    assert build(run(broken, APPLE), only=only).num_rows == 1
    assert build(run(broken), only=only).num_rows == 0
