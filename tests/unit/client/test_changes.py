"""Typed changes: what they are like to a Python programmer, and their JSON form.

That they are the rows of a batch is shown in `tests/property`.
"""

from __future__ import annotations

import gc
import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from headwater.client.batches import build_batch
from headwater.client.changes import ROWS_AT_A_TIME, Change, CollectionDropped, Deletion, Mutation, Rollback, changes_of
from headwater.client.collection_names import CollectionNames
from headwater.client.pieces import ChangeRun, Piece
from headwater.errors import LocalProtocolError
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import dcp_changes
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype
from support.cases import case

GARDEN = Manifest().with_scope("garden").with_collection("garden", "fruit")  # 8 and 9
PLACE: dict[str, Any] = {"vbucket": VBucketId(7), "vbuuid": Vbuuid(0xAB)}
SNAPSHOT: dict[str, Any] = {"snapshot_start": Seqno(1), "snapshot_end": Seqno(5)}

APPLE = Mutation(
    **PLACE,
    **SNAPSHOT,
    seqno=Seqno(3),
    rev=2,
    scope="garden",
    collection="fruit",
    collection_id=CollectionId(9),
    key="äpple",
    value=b'{"colour":"red"}',
    datatype=Datatype.JSON,
    flags=6,
    expiry=1_900_000_000,
    cas=Cas(1_794_715_140_654_366_720),
)


def batch_of(*pieces: Piece) -> pa.RecordBatch:
    return build_batch(pieces, CollectionNames(GARDEN), collections=True, xattrs=False)


def read(*pieces: Piece) -> list[Change]:
    return list(changes_of(batch_of(*pieces)))


def run(*messages: dcp_changes.Mutation) -> ChangeRun:
    return ChangeRun(**PLACE, **SNAPSHOT, rows=len(messages), data=b"".join(message.encode() for message in messages))


def sent(key: bytes = "äpple".encode(), number: int = 3) -> dcp_changes.Mutation:
    return dcp_changes.Mutation(
        vbucket=VBucketId(7),
        cas=APPLE.cas,
        datatype=Datatype.JSON,
        seqno=Seqno(number),
        rev_seqno=2,
        flags=6,
        expiry=1_900_000_000,
        collection_id=CollectionId(9),
        key=key,
        value=APPLE.value,
    )


# --- out of batches -----------------------------------------------------------------------------------------------


def test_many_changes_keep_their_order() -> None:
    count = 2 * ROWS_AT_A_TIME + 7
    changes = read(run(*(sent(number=number) for number in range(count))))
    assert [change.seqno for change in changes] == list(range(count))
    assert changes[-1] == replace(APPLE, seqno=Seqno(count - 1))
    assert type(changes[-1].datatype) is Datatype


def test_no_change_keeps_its_batch_in_memory() -> None:
    before = pa.total_allocated_bytes()
    count = 3 * ROWS_AT_A_TIME
    batch = batch_of(run(*(sent(number=number) for number in range(count))))
    walk = changes_of(batch)
    changes = [next(walk).keep(), *(change for change in walk if change.seqno % 2)]
    del batch
    assert pa.total_allocated_bytes() == before
    assert changes == [replace(APPLE, seqno=Seqno(number)) for number in (0, *range(1, count, 2))]


def test_a_walk_that_is_given_up_leaves_nothing_to_the_garbage_collector() -> None:
    before = pa.total_allocated_bytes()
    gc.disable()
    try:
        change = next(changes_of(batch_of(run(sent(), sent(number=4)))))
        assert pa.total_allocated_bytes() == before
    finally:
        gc.enable()
    assert change == APPLE


# --- as Python objects --------------------------------------------------------------------------------------------


def test_changes_can_not_be_changed_and_can_be_kept() -> None:
    (change,) = read(run(sent()))
    with pytest.raises(FrozenInstanceError):
        change.seqno = Seqno(1)
    assert not hasattr(change, "__dict__")
    assert not hasattr(APPLE, "colour")
    assert APPLE.keep() is APPLE
    assert pickle.loads(pickle.dumps(change)) == change
    assert APPLE.key_bytes == "äpple".encode()
    assert len({change, APPLE, replace(APPLE, xattrs={"a": b"1"})}) == 2
    assert repr(change).startswith("<Mutation of 'äpple': collection=garden.fruit, vbucket=7, seqno=3, changed_at=")


def test_a_long_value_is_not_shown_whole() -> None:
    shown = repr(replace(APPLE, value=b"x" * 1_000_000))
    assert len(shown) < 300
    assert shown.endswith("… (1,000,000 bytes)>")


def test_the_time_of_a_change_is_in_its_cas() -> None:
    assert APPLE.changed_at == datetime(2026, 11, 15, 3, 59, 0, 654366, tzinfo=UTC)
    assert replace(APPLE, cas=Cas(APPLE.cas | 0xFFFF)).changed_at == APPLE.changed_at
    assert replace(APPLE, cas=Cas(0)).changed_at is None
    latest = replace(APPLE, cas=Cas(2**64 - 1)).changed_at
    assert latest.year == 2554


def test_json_values() -> None:
    assert APPLE.is_json
    assert APPLE.json() == {"colour": "red"}
    assert replace(APPLE, value=b"1", datatype=Datatype.RAW).json() == 1
    members = {field.name: getattr(APPLE, field.name) for field in fields(APPLE)}
    assert Deletion(**{**members, "value": None}).json() is None


@pytest.mark.parametrize("value", [b"", b"{", b"\xff", b"NaN", b"1\x000\x00", b"[" * 100_000, b"1" * 5_000])
def test_what_is_not_json_is_told_apart(value: bytes) -> None:
    change = replace(APPLE, value=value)
    with pytest.raises(LocalProtocolError, match="the value of 'äpple' can't be read as JSON") as raised:
        change.json()
    assert "is_json" in raised.value.hint
    assert "value" not in change.to_dict()


# --- the JSON form ------------------------------------------------------------------------------------------------


def test_the_json_form_of_a_document() -> None:
    assert json.loads(json.dumps(APPLE.to_dict())) == {
        "op": "mutation", "vbucket": 7, "vbuuid": 0xAB, "seqno": 3, "rev": 2, "scope": "garden",
        "collection": "fruit", "collection_id": 9, "key": "äpple", "value": {"colour": "red"}, "flags": 6,
        "expiry": 1_900_000_000, "cas": 1_794_715_140_654_366_720, "changed_at": "2026-11-15T03:59:00.654366+00:00",
        "snapshot_start": 1, "snapshot_end": 5,
    }  # fmt: skip


@case({"value": b"\xff"}, {"value_base64": "/w=="}, {"value"})
@case({"value": b"1", "datatype": Datatype.RAW}, {"value_base64": "MQ=="}, {"value"})
@case({"value": None}, {"value": None}, {"value_base64"})
@case({"key": "\udcff"}, {"key_base64": "/w=="}, {"key"})
@case({"cas": 0}, {"changed_at": None}, set())
@case({"xattrs": {}}, {"xattrs": {}}, {"xattrs_base64"})
@case({"xattrs": {"a": b"[1]", "b": b"?"}}, {"xattrs": {"a": [1]}, "xattrs_base64": {"b": "Pw=="}}, set())
def test_what_json_can_not_hold_is_base64(changed: dict[str, Any], members: dict[str, Any], missing: set[str]) -> None:
    form = replace(APPLE, **changed).to_dict()
    assert {name: form[name] for name in members} == members
    assert not missing & form.keys()


def test_the_json_form_of_events_and_rollbacks() -> None:
    dropped = CollectionDropped(
        **PLACE, **SNAPSHOT, seqno=Seqno(2), scope=None, collection="fruit", collection_id=CollectionId(9)
    )
    assert dropped.to_dict() == {
        "op": "collection_dropped", "vbucket": 7, "vbuuid": 0xAB, "seqno": 2, "scope": None, "snapshot_start": 1,
        "snapshot_end": 5, "collection": "fruit", "collection_id": 9,
    }  # fmt: skip
    rollback = Rollback(
        vbucket=VBucketId(7), seqno=Seqno(2), from_seqno=Seqno(9), old_vbuuid=Vbuuid(1), new_vbuuid=Vbuuid(2)
    )
    assert rollback.to_dict() == {
        "op": "rollback", "vbucket": 7, "seqno": 2, "from_seqno": 9, "old_vbuuid": 1, "new_vbuuid": 2,
    }  # fmt: skip
