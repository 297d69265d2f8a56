"""What a consumer gets of each change: values, extended attributes, delete times, expirations."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.messages.dcp_streams import OpenFlags
from headwater.protocol.messages.documents import Set
from headwater.protocol.values import Datatype, ValueParts, compress, decompress, encode_xattrs
from support.cases import case_apart
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


NO_VALUE, ONLY_DATATYPE = OpenFlags.NO_VALUE, OpenFlags.NO_VALUE_WITH_UNDERLYING_DATATYPE


@case_apart(PRODUCER, (BODY, Datatype.JSON), (BODY, Datatype.JSON))
@case_apart(XATTRS, (BODY, Datatype.JSON), (SECTION + BODY, WITH_XATTRS))
@case_apart(PRODUCER | NO_VALUE, (b"", Datatype.RAW), (b"", Datatype.RAW))
@case_apart(XATTRS | NO_VALUE, (b"", Datatype.RAW), (SECTION, Datatype.XATTR))
@case_apart(PRODUCER | ONLY_DATATYPE, (b"", Datatype.JSON), (b"", WITH_XATTRS))
@case_apart(XATTRS | ONLY_DATATYPE, (b"", Datatype.JSON), (SECTION, WITH_XATTRS))
def test_the_flags_of_the_open_decide_on_values_and_xattrs(
    world: World, flags: OpenFlags, plain: tuple[bytes, Datatype], with_xattrs: tuple[bytes, Datatype]
) -> None:
    world.write("a", value=BODY)
    world.write("b", value=SECTION + BODY, datatype=WITH_XATTRS)
    consumer = world.consumer(flags=flags)
    consumer.open()
    changes = of_type(consumer.received(), Mutation)
    assert [(change.value, change.datatype) for change in changes] == [plain, with_xattrs]


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


# --- removals -----------------------------------------------------------------------------------------------------


def _removed(world: World, *, expired: bool = False) -> None:
    world.put("a")
    world.remove("a", expired=expired)
    world.commit()


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("with_times", [False, True])
@pytest.mark.parametrize("expiry_opcode", ["false", "true"])
def test_the_form_of_a_removal(world: World, expired: bool, with_times: bool, expiry_opcode: str) -> None:
    """As recorded from a 7.0.5 server, expirations come as such only with delete times, whatever its documents say."""
    _removed(world, expired=expired)
    flags = PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES if with_times else PRODUCER
    kind = Expiration if expired and with_times and expiry_opcode == "true" else Deletion
    change = _one(world, kind, flags, enable_expiry_opcode=expiry_opcode)
    assert (change.seqno, change.rev_seqno) == (2, 2)
    assert change.delete_time == (world.node.clock.now_s() if with_times else None)


USER_SECTION = encode_xattrs(ValueParts({"user": b"1"}, b""))


@case_apart(SECTION, PRODUCER, b"")
@case_apart(SECTION, XATTRS, SYSTEM_SECTION)
@case_apart(SECTION, XATTRS | OpenFlags.INCLUDE_DELETED_USER_XATTRS, SECTION)
@case_apart(USER_SECTION, XATTRS, b"")
def test_the_xattrs_of_a_deletion(world: World, left: bytes, flags: OpenFlags, expected: bytes) -> None:
    """Those of the system outlive the document, and those of users where the open asks for them."""
    world.remove("a", value=left, datatype=Datatype.XATTR)
    world.commit()
    change = _one(world, Deletion, flags)
    assert (change.value, change.datatype) == (expected, Datatype.XATTR if expected else Datatype.RAW)


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
