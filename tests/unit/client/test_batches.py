"""Batches of changes: what the rows of documents, events and rollbacks look like, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from headwater.client.batches import OPS, RAW_SCHEMA, build_batch, change_schema, raw_schema, with_text_keys
from headwater.client.collection_names import CollectionFilter, CollectionNames
from headwater.client.pieces import ChangeRun, EventPiece, Piece, RollbackPiece
from headwater.errors import MalformedSnappy, MalformedXattrs, TruncatedFrame, UnexpectedMessage
from headwater.protocol.frames import preserve_ttl
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.messages.dcp_streams import DcpNoop
from headwater.protocol.numbers import Cas, CollectionId, ManifestUid, ScopeId, Seqno, VBucketId, Vbuuid
from headwater.protocol.system_events import CollectionCreated, CollectionDropped, Event, ScopeCreated
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs

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
DELETED = Deletion(
    vbucket=VBucketId(7), seqno=Seqno(4), rev_seqno=3, collection_id=CollectionId(9), key=b"apple", delete_time=8
)


def run(*messages: Mutation | Deletion | Expiration, vbuuid: int = 0xAB) -> ChangeRun:
    return ChangeRun(
        vbucket=VBucketId(7),
        vbuuid=Vbuuid(vbuuid),
        snapshot_start=Seqno(1),
        snapshot_end=Seqno(5),
        rows=len(messages),
        data=b"".join(message.encode() for message in messages),
    )


def told(event: Event) -> EventPiece:
    return EventPiece(
        vbucket=VBucketId(7),
        vbuuid=Vbuuid(0xAB),
        snapshot_start=Seqno(1),
        snapshot_end=Seqno(5),
        seqno=Seqno(2),
        event=event,
    )


ROOTS_CREATED = told(
    CollectionCreated(
        manifest_uid=ManifestUid(3), scope_id=ScopeId(8), collection_id=CollectionId(10), name="roots", max_ttl_s=5
    )
)
YARD_CREATED = told(ScopeCreated(manifest_uid=ManifestUid(4), scope_id=ScopeId(11), name="yard"))
ROLLED_BACK = RollbackPiece(
    vbucket=VBucketId(7),
    seqno=Seqno(2),
    from_seqno=Seqno(9),
    old_vbuuid=Vbuuid(0xAB),
    new_vbuuid=Vbuuid(2**64 - 1),
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


@pytest.mark.parametrize("kind", [Deletion, Expiration])
def test_a_removal_has_its_time_and_no_value(kind: type[Deletion | Expiration]) -> None:
    removal = kind(
        vbucket=VBucketId(7),
        seqno=Seqno(4),
        rev_seqno=3,
        collection_id=CollectionId(9),
        key=b"apple",
        delete_time=1_700_000_000,
    )
    (row,) = build(run(removal)).to_pylist()
    assert (row["op"], row["value"], row["expiry"]) == (kind.__name__.lower(), None, 1_700_000_000)
    assert (row["cas"], row["changed_at"]) == (0, None)
    (row,) = build(run(replace(removal, delete_time=None, value=b"kept"))).to_pylist()
    assert (row["value"], row["expiry"]) == (b"kept", 0)


def test_an_empty_document_is_no_missing_one() -> None:
    batch = build(run(replace(APPLE, value=b""), DELETED))
    assert batch.column("value").to_pylist() == [b"", None]


def test_an_event_has_names_and_no_document() -> None:
    created, scope_created = build(ROOTS_CREATED, YARD_CREATED).to_pylist()
    assert created == {
        "vbucket": 7,
        "vbuuid": 0xAB,
        "seqno": 2,
        "rev": 0,
        "op": "collection_created",
        "scope": "garden",
        "collection": "roots",
        "collection_id": 10,
        "key": None,
        "value": None,
        "datatype": 0,
        "flags": 0,
        "expiry": 0,
        "cas": 0,
        "changed_at": None,
        "snapshot_start": 1,
        "snapshot_end": 5,
    }
    assert [scope_created[name] for name in ("op", "scope", "collection", "collection_id")] == [
        "scope_created",
        "yard",
        None,
        None,
    ]


def test_a_rollback_tells_the_new_branch_and_what_stays() -> None:
    (row,) = build(ROLLED_BACK).to_pylist()
    assert (row["op"], row["vbucket"], row["vbuuid"], row["seqno"]) == ("rollback", 7, 2**64 - 1, 2)
    assert (row["snapshot_start"], row["snapshot_end"], row["key"], row["collection_id"]) == (2, 2, None, None)
    assert json.loads(row["value"]) == {"from_seqno": 9, "old_vbuuid": 0xAB, "new_vbuuid": 2**64 - 1}


def test_rows_are_in_the_order_of_the_pieces() -> None:
    batch = build(
        ROLLED_BACK,
        run(APPLE, DELETED),
        run(DELETED, vbuuid=2),
        ROOTS_CREATED,
        YARD_CREATED,
        run(),
        run(APPLE, vbuuid=3),
    )
    assert batch.column("op").to_pylist() == [
        "rollback",
        "mutation",
        "deletion",
        "deletion",
        "collection_created",
        "scope_created",
        "mutation",
    ]
    assert batch.column("vbuuid").to_pylist() == [2**64 - 1, 0xAB, 0xAB, 2, 0xAB, 0xAB, 3]


@pytest.mark.parametrize("pieces", [(), (run(),), (run(), run())])
@pytest.mark.parametrize("xattrs", [False, True])
def test_no_rows(pieces: tuple[Piece, ...], xattrs: bool) -> None:
    batch = build(*pieces, xattrs=xattrs)
    assert batch.num_rows == 0
    assert batch.schema == raw_schema(xattrs=xattrs)


def test_without_collections_everything_is_in_the_default_one() -> None:
    plain = replace(APPLE, collection_id=None)
    batch = build_batch([run(plain)], CollectionNames(), collections=False, xattrs=False)
    assert [batch.column(name)[0].as_py() for name in ("scope", "collection", "collection_id", "key")] == [
        "_default",
        "_default",
        0,
        b"apple",
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
    for batch, keys, key_bytes in (
        (plain, ["apple"], [None]),
        (odd, ["apple", "a\\xff\\xff"], [None, b"a\\xff\xff"]),
    ):
        shown = with_text_keys(batch)
        assert shown.schema == change_schema(xattrs=False)
        assert (shown.column("key").to_pylist(), shown.column("key_bytes").to_pylist()) == (keys, key_bytes)
    same_bytes = [part.column("key").buffers()[2].address for part in (plain, with_text_keys(plain))]
    assert same_bytes[0] == same_bytes[1], "nothing is copied"


# --- names --------------------------------------------------------------------------------------------------------


def test_a_name_that_an_event_tells_holds_for_the_rows_before_it_too() -> None:
    carrot = replace(APPLE, collection_id=CollectionId(10))
    batch = build(run(carrot), ROOTS_CREATED)
    assert batch.column("collection").to_pylist() == ["roots", "roots"]


def test_an_id_that_nobody_has_named_has_no_names() -> None:
    unnamed = [replace(APPLE, collection_id=CollectionId(number)) for number in (10, 8)]
    batch = build(run(unnamed[0], APPLE, unnamed[1]))
    assert batch.column("scope").to_pylist() == [None, "garden", None]
    assert batch.column("collection").to_pylist() == [None, "fruit", None]
    assert batch.column("collection_id").to_pylist() == [10, 9, 8]


def test_all_batches_share_their_dictionaries() -> None:
    names = CollectionNames(GARDEN)
    with_event, after = build(run(APPLE), ROOTS_CREATED, names=names), build(run(APPLE), names=names)
    for name in ("op", "scope", "collection"):
        assert with_event.column(name).dictionary.equals(after.column(name).dictionary)
    assert after.column("op").dictionary.to_pylist() == list(OPS)


# --- values -------------------------------------------------------------------------------------------------------


def test_values_come_inflated_and_without_their_attributes() -> None:
    with_xattrs = encode_xattrs(ValueParts({"_sync": b'{"rev":1}', "tag": b'"x"'}, b"{}"))
    batch = build(
        run(
            replace(APPLE, value=compress(with_xattrs), datatype=Datatype(7)),
            replace(APPLE, value=with_xattrs, datatype=Datatype.XATTR),
            replace(APPLE, value=compress(b"raw"), datatype=Datatype.SNAPPY),
            APPLE,
            replace(DELETED, value=encode_xattrs(ValueParts({"_sync": b"1"}, b"")), datatype=Datatype.XATTR),
            replace(APPLE, value=encode_xattrs(ValueParts({}, b"1")), datatype=Datatype.XATTR | Datatype.JSON),
        ),
        ROLLED_BACK,
        xattrs=True,
    )
    assert batch.column("value").to_pylist()[:-1] == [b"{}", b"{}", b"raw", b'{"colour":"red"}', None, b"1"]
    assert batch.column("datatype").to_pylist() == [1, 0, 0, 1, 0, 1, 0]
    both = [("_sync", b'{"rev":1}'), ("tag", b'"x"')]
    assert batch.column("xattrs").to_pylist() == [both, both, None, None, [("_sync", b"1")], [], None]


def test_attributes_that_nobody_asked_for_are_left_out() -> None:
    value = encode_xattrs(ValueParts({"_sync": b"1"}, b"{}"))
    batch = build(run(replace(APPLE, value=value, datatype=Datatype.XATTR)))
    assert batch.column("value").to_pylist() == [b"{}"]


def test_where_no_values_are_sent_their_datatypes_may_still_be() -> None:
    nothing = replace(APPLE, value=b"", datatype=Datatype(7))
    batch = build(run(nothing), xattrs=True)
    assert [batch.column(name)[0].as_py() for name in ("value", "datatype", "xattrs")] == [b"", 1, None]
    batch = build(run(nothing, replace(APPLE, value=compress(b"there"), datatype=Datatype.SNAPPY)))
    assert batch.column("value").to_pylist() == [b"", b"there"]


# --- what is refused ----------------------------------------------------------------------------------------------


def test_malformed_values_are_refused() -> None:
    with pytest.raises(MalformedSnappy):
        build(run(APPLE, replace(APPLE, value=b"\xff\xff", datatype=Datatype.SNAPPY)))
    with pytest.raises(MalformedXattrs):
        build(run(APPLE, replace(APPLE, value=b"\xff\xff", datatype=Datatype.XATTR)))


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


# --- filters ------------------------------------------------------------------------------------------------------


def test_a_filter_drops_rows_of_other_collections_and_counts_the_rest_to_their_runs() -> None:
    other = replace(APPLE, collection_id=CollectionId(0), key=b"other")
    only = CollectionFilter(collections=frozenset({CollectionId(9)}))
    batch = build(
        run(other, APPLE, vbuuid=1),
        ROOTS_CREATED,
        run(other, vbuuid=2),
        ROLLED_BACK,
        run(DELETED, APPLE, other, vbuuid=3),
        only=only,
    )
    assert batch.column("op").to_pylist() == ["mutation", "rollback", "deletion", "mutation"]
    assert batch.column("vbuuid").to_pylist() == [1, 2**64 - 1, 3, 3]


def test_a_filter_on_a_scope_takes_what_is_created_in_it_later() -> None:
    carrot = replace(APPLE, collection_id=CollectionId(10))
    only = CollectionFilter(scopes=frozenset({ScopeId(8)}))
    dropped = told(CollectionDropped(manifest_uid=ManifestUid(3), scope_id=ScopeId(8), collection_id=CollectionId(10)))
    batch = build(ROOTS_CREATED, run(carrot), YARD_CREATED, dropped, only=only)
    assert batch.column("op").to_pylist() == ["collection_created", "mutation", "collection_dropped"]


def test_what_a_filter_drops_is_not_even_inflated() -> None:
    broken = replace(APPLE, collection_id=CollectionId(0), value=b"\xff\xff", datatype=Datatype.SNAPPY)
    only = CollectionFilter(collections=frozenset({CollectionId(9)}))
    assert build(run(broken, APPLE), only=only).num_rows == 1
    assert build(run(broken), only=only).num_rows == 0
