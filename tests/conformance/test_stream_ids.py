"""Stream ids: many streams on one vbucket of one connection (seed 001)."""

from __future__ import annotations

from headwater.protocol.features import Magic
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotMarker
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamEnd
from headwater.protocol.numbers import STREAMS_PER_VBUCKET_MAX
from headwater.protocol.status import Status
from support.dcp_world import COLLECTIONS, Consumer, World, of_type, stream_request


def _consumer(world: World, flags: OpenFlags = OpenFlags.PRODUCER) -> Consumer:
    return world.consumer(features=COLLECTIONS, flags=flags, enable_stream_id="true")


def test_a_sid_stands_in_every_message_of_its_stream(world: World) -> None:
    world.write("a")
    consumer = _consumer(world)
    consumer.open(value=b'{"sid":71}', end_seqno=1)
    frames = consumer.frames()
    assert [frame.magic for frame in frames] == [Magic.FLEXIBLE_REQUEST] * 3
    messages = consumer.decode(frames)
    assert [type(message) for message in messages] == [SnapshotMarker, Mutation, StreamEnd]
    assert [message.stream_id for message in of_type(messages, object)] == [71, 71, 71]


def test_many_streams_on_one_vbucket(world: World) -> None:
    world.write("a")
    consumer = _consumer(world)
    for sid in (1, 2, 65535):
        consumer.open(value=b'{"sid":%d}' % sid, opaque=sid)
    mutations = of_type(consumer.received(), Mutation)
    assert {(change.stream_id, change.opaque) for change in mutations} == {(1, 1), (2, 2), (65535, 65535)}


def test_streams_with_ids_have_filters_of_their_own(world: World) -> None:
    world.set_manifest(Manifest().with_collection("_default", "fruit"))
    world.write("a")
    world.write("apple", collection=8)
    consumer = _consumer(world)
    consumer.open(value=b'{"sid":1,"collections":["0"]}')
    consumer.open(value=b'{"sid":2,"collections":["8"]}')
    mutations = of_type(consumer.received(), Mutation)
    assert {(change.stream_id, change.key) for change in mutations} == {(1, b"a"), (2, b"apple")}


def test_a_sid_in_use_is_key_eexists(world: World) -> None:
    consumer = _consumer(world)
    consumer.open(value=b'{"sid":1}')
    assert consumer.refused(stream_request(value=b'{"sid":1}')) == Status.KEY_EEXISTS
    consumer.open(value=b'{"sid":1}', vbucket=1)


def test_the_number_of_streams_on_a_vbucket_is_limited(world: World) -> None:
    consumer = _consumer(world)
    for sid in range(1, STREAMS_PER_VBUCKET_MAX + 1):
        consumer.open(value=b'{"sid":%d}' % sid)
    assert consumer.refused(stream_request(value=b'{"sid":999}')) == Status.ENOMEM
    assert consumer.close_stream(sid=1) == Status.SUCCESS
    consumer.open(value=b'{"sid":999}')


def test_a_stream_is_closed_by_its_id(world: World) -> None:
    consumer = _consumer(world)
    consumer.open(value=b'{"sid":1}')
    consumer.open(value=b'{"sid":2}')
    assert consumer.close_stream() == Status.DCP_STREAMID_INVALID
    assert consumer.close_stream(sid=1) == Status.SUCCESS
    assert consumer.close_stream(sid=1) == Status.KEY_ENOENT
    world.write("a")
    assert {change.stream_id for change in of_type(consumer.received(), Mutation)} == {2}
    without_ids = world.consumer(features=COLLECTIONS)
    without_ids.open()
    assert without_ids.close_stream(sid=1) == Status.DCP_STREAMID_INVALID
