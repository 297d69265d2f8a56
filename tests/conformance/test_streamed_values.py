"""What a consumer gets of each change: values, extended attributes, delete times, expirations."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.messages.dcp_streams import OpenFlags
from headwater.protocol.messages.documents import Set
from headwater.protocol.values import Datatype, ValueParts, compress, decode_xattrs, decompress, encode_xattrs
from support.dcp_world import COLLECTIONS, PLAIN, World, of_type

PRODUCER = OpenFlags.PRODUCER
XATTRS = PRODUCER | OpenFlags.INCLUDE_XATTRS
SECTION = encode_xattrs(ValueParts({"_sync": b"1", "user": b'{"u":2}'}, b""))
SYSTEM_SECTION = encode_xattrs(ValueParts({"_sync": b"1"}, b""))
BODY = b'{"body":true}'
WITH_XATTRS = Datatype.JSON | Datatype.XATTR


def _one(world: World, kind: type[Any], flags: OpenFlags = PRODUCER, **controls: str) -> Any:
    """The one change of the vbucket that is of a kind."""
    consumer = world.consumer(flags=flags, **controls)
    consumer.open()
    (change,) = of_type(consumer.received(), kind)
    return change


# --- values -------------------------------------------------------------------------------------------------------


def test_a_value_comes_with_its_datatype(world: World) -> None:
    world.write("a", value=BODY)
    change = _one(world, Mutation)
    assert (change.value, change.datatype) == (BODY, Datatype.JSON)


def test_no_value_drops_value_and_datatype(world: World) -> None:
    world.write("a", value=BODY)
    change = _one(world, Mutation, PRODUCER | OpenFlags.NO_VALUE)
    assert (change.value, change.datatype) == (b"", Datatype.RAW)


def test_no_value_with_underlying_datatype_keeps_the_datatype(world: World) -> None:
    world.write("a", value=BODY)
    change = _one(world, Mutation, PRODUCER | OpenFlags.NO_VALUE_WITH_UNDERLYING_DATATYPE)
    assert (change.value, change.datatype) == (b"", Datatype.JSON)


def test_xattrs_are_included_where_asked_for(world: World) -> None:
    world.write("a", value=SECTION + BODY, datatype=WITH_XATTRS)
    change = _one(world, Mutation, XATTRS)
    assert (change.value, change.datatype) == (SECTION + BODY, WITH_XATTRS)


def test_xattrs_are_stripped_otherwise(world: World) -> None:
    world.write("a", value=SECTION + BODY, datatype=WITH_XATTRS)
    change = _one(world, Mutation)
    assert (change.value, change.datatype) == (BODY, Datatype.JSON)


def test_no_value_keeps_the_xattrs_that_were_asked_for(world: World) -> None:
    world.write("a", value=SECTION + BODY, datatype=WITH_XATTRS)
    change = _one(world, Mutation, XATTRS | OpenFlags.NO_VALUE)
    assert (change.value, change.datatype) == (SECTION, Datatype.XATTR)


def test_no_value_with_underlying_datatype_and_xattrs(world: World) -> None:
    world.write("a", value=SECTION + BODY, datatype=WITH_XATTRS)
    change = _one(world, Mutation, XATTRS | OpenFlags.NO_VALUE_WITH_UNDERLYING_DATATYPE)
    assert (change.value, change.datatype) == (SECTION, WITH_XATTRS)


def test_no_value_with_underlying_datatype_tells_of_xattrs_it_does_not_bring(world: World) -> None:
    world.write("a", value=SECTION + BODY, datatype=WITH_XATTRS)
    change = _one(world, Mutation, PRODUCER | OpenFlags.NO_VALUE_WITH_UNDERLYING_DATATYPE)
    assert (change.value, change.datatype) == (b"", WITH_XATTRS)


def test_expiry_flags_and_revision_come_as_they_were_written(world: World) -> None:
    world.write("a", expiry=1_900_000_000)
    change = _one(world, Mutation)
    assert (change.expiry, change.rev_seqno, change.cas != 0) == (1_900_000_000, 1, True)


def test_forced_compression_sends_snappy(world: World) -> None:
    world.write("a", value=b'"' + b"x" * 1000 + b'"')
    consumer = world.consumer(force_value_compression="true")
    consumer.open()
    (change,) = of_type(consumer.received(), Mutation)
    assert change.datatype == Datatype.JSON | Datatype.SNAPPY
    assert decompress(change.value) == b'"' + b"x" * 1000 + b'"'


def test_what_was_written_compressed_comes_so_to_those_who_take_it(world: World) -> None:
    value = b'"' + b"x" * 1000 + b'"'
    kv = world.node.client()
    kv.succeed(Set(key=b"a", value=compress(value), datatype=Datatype.SNAPPY))
    kv.succeed(Set(key=b"b", value=value))
    for features, expected in (
        (PLAIN, [(compress(value), Datatype.JSON | Datatype.SNAPPY), (value, Datatype.JSON)]),
        ((Feature.XERROR, Feature.JSON), [(value, Datatype.JSON)] * 2),
    ):
        consumer = world.consumer(features=features)
        consumer.open()
        changes = of_type(consumer.received(), Mutation)
        assert [(change.value, change.datatype) for change in changes] == expected


def test_no_compression_for_a_consumer_that_has_not_negotiated_it(world: World) -> None:
    world.write("a", value=b'"' + b"x" * 1000 + b'"')
    features = tuple(feature for feature in PLAIN if feature is not Feature.SNAPPY)
    consumer = world.consumer(features=features)
    consumer.open()
    (change,) = of_type(consumer.received(), Mutation)
    assert change.datatype == Datatype.JSON


# --- removals -----------------------------------------------------------------------------------------------------


def _removed(world: World, *, expired: bool = False) -> None:
    world.put("a")
    world.remove("a", expired=expired)
    world.commit()


def test_deletion_v1_without_delete_times(world: World) -> None:
    _removed(world)
    change = _one(world, Deletion)
    assert (change.seqno, change.rev_seqno, change.delete_time) == (2, 2, None)


def test_deletion_v2_with_delete_times(world: World) -> None:
    _removed(world)
    change = _one(world, Deletion, PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES)
    assert change.delete_time == world.node.clock.now_s()


def test_expiry_output_off_sends_a_deletion(world: World) -> None:
    _removed(world, expired=True)
    assert _one(world, Deletion).delete_time is None
    assert _one(world, Deletion, PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES).delete_time == world.node.clock.now_s()


def test_expiry_output_on_sends_an_expiration(world: World) -> None:
    _removed(world, expired=True)
    change = _one(world, Expiration, PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES, enable_expiry_opcode="true")
    assert (change.seqno, change.delete_time) == (2, world.node.clock.now_s())


def test_expiry_output_without_delete_times_is_granted_and_changes_nothing(world: World) -> None:
    """As recorded from a 7.0.5 server, whatever its documents say."""
    _removed(world, expired=True)
    assert _one(world, Deletion, enable_expiry_opcode="true").delete_time is None


def test_expiry_output_on_leaves_deletions_deletions(world: World) -> None:
    _removed(world)
    assert _one(world, Deletion, enable_expiry_opcode="true").seqno == 2


def test_system_xattrs_outlive_the_document(world: World) -> None:
    world.remove("a", value=SYSTEM_SECTION, datatype=Datatype.XATTR)
    world.commit()
    change = _one(world, Deletion, XATTRS)
    assert (change.value, change.datatype) == (SYSTEM_SECTION, Datatype.XATTR)
    assert _one(world, Deletion).value == b""


def test_deleted_user_xattrs_come_where_asked_for(world: World) -> None:
    world.remove("a", value=SECTION, datatype=Datatype.XATTR)
    world.commit()
    change = _one(world, Deletion, XATTRS | OpenFlags.INCLUDE_DELETED_USER_XATTRS)
    assert set(decode_xattrs(change.value).xattrs) == {"_sync", "user"}


def test_deleted_user_xattrs_are_left_out_otherwise(world: World) -> None:
    world.remove("a", value=SECTION, datatype=Datatype.XATTR)
    world.commit()
    change = _one(world, Deletion, XATTRS)
    assert (change.value, change.datatype) == (SYSTEM_SECTION, Datatype.XATTR)


def test_a_deletion_that_has_only_user_xattrs_comes_without_a_value(world: World) -> None:
    world.remove("a", value=encode_xattrs(ValueParts({"user": b"1"}, b"")), datatype=Datatype.XATTR)
    world.commit()
    change = _one(world, Deletion, XATTRS)
    assert (change.value, change.datatype) == (b"", Datatype.RAW)


def test_many_small_expirations_with_stream_ids_and_delete_times(world: World) -> None:
    # Each grows by all that a frame can grow by.
    for number in range(2000):
        world.remove(chr(ord("a") + number % 26) + "" if number < 26 else f"{number:x}", expired=True)
    world.settle()
    flags = PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES
    consumer = world.consumer(flags=flags, features=COLLECTIONS, enable_stream_id="true")
    consumer.open(value=b'{"sid":1}')
    removals = of_type(consumer.received(), Deletion)
    assert [removal.seqno for removal in removals] == list(range(1, 2001))


@pytest.mark.parametrize("features", [PLAIN, COLLECTIONS], ids=["plain", "collections"])
def test_a_deletion_deduplicates_the_document(world: World, features: tuple[Feature, ...]) -> None:
    _removed(world)
    consumer = world.consumer(features=features)
    assert consumer.stream() == ["marker 0..2", "remove a@2"]
