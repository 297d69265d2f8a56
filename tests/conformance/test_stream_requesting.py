"""Stream requests: what they are answered, and which changes they bring (seeds 000, 001 and 002)."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.node.producer.connection import OpenedStreams, ProducerConnection
from headwater.node.producer.outbound import Output
from headwater.protocol.frames import Frame, decode_frames
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamFlags, VBucketState
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import StreamRequestValue
from support.cases import case_apart
from support.dcp_world import COLLECTIONS, OPAQUE, PURGE_ALL, World, changes, of_type, resume, stream_request

# --- what is answered ---------------------------------------------------------------------------------------------


def test_stream_open_is_answered_with_the_failover_log(world: World) -> None:
    answer = world.consumer().open()
    assert answer.opaque == OPAQUE
    assert [(entry.vbuuid, entry.seqno) for entry in answer.failover_log] == [(world.vbuuid(), 0)]


def test_requests_that_come_together_are_judged_like_single_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection opens streams that are asked for alike without a closer look, and looks closer where it must."""
    world.set_manifest(world.bucket.manifest.with_collection("_default", "new"))
    for vbucket in range(8):
        for number in range(3):
            world.put(f"key {number}", vbucket=vbucket, collection=8 * (number % 2))
    world.commit()
    first = world.vbuuid(2)
    for vbucket, state in ((1, VBucketState.REPLICA), (2, VBucketState.REPLICA), (2, VBucketState.ACTIVE)):
        world.bucket.set_vbucket_state(vbucket, state)
    world.remove("key 0")
    world.put("key 1")
    world.compact(PURGE_ALL)
    latest, takeover, all_of = StreamFlags.LATEST, StreamFlags.TAKEOVER, StreamRequestValue(collections=(0, 8)).encode()
    points: list[tuple[int, dict[str, Any]]] = [
        *((vbucket, {}) for vbucket in (0, 4, 5, 5, 6, 900)),
        (1, {}),
        (7, {"snapshot_end_seqno": 9}),
        (7, {"start_seqno": 2, "end_seqno": 1, "vbuuid": world.vbuuid(7)}),
        (7, {"start_seqno": 2, "snapshot_start_seqno": 3, "vbuuid": world.vbuuid(7)}),
        (7, {"start_seqno": 9, "vbuuid": world.vbuuid(7)}),
        (7, {"start_seqno": 2, "vbuuid": 1}),
        (7, {"start_seqno": 2, "vbuuid": world.vbuuid(7)}),
        (0, {"start_seqno": 4, "vbuuid": world.vbuuid(0)}),
        (2, {"start_seqno": 2, "vbuuid": first}),
        (2, {"start_seqno": 9, "vbuuid": first}),
        (3, {"start_seqno": 1, "snapshot_start_seqno": 0, "snapshot_end_seqno": 7, "vbuuid": world.vbuuid(3)}),
        (3, {"start_seqno": 1, "snapshot_start_seqno": 0, "snapshot_end_seqno": 3, "vbuuid": world.vbuuid(3)}),
    ]
    kinds: list[dict[str, Any]] = [{}, {"flags": latest}, {"flags": takeover}, {"flags": latest, "value": all_of}]
    opened = 0
    accept_repeated = ProducerConnection.accept_repeated

    def counted(*arguments: Any) -> OpenedStreams:
        nonlocal opened
        found = accept_repeated(*arguments)
        opened += found.count
        return found

    def received(kind: dict[str, Any], order: int) -> list[Frame]:
        requests = [
            stream_request(vbucket=vbucket, opaque=number, **point, **kind)
            for number, (vbucket, point) in enumerate(points[::order])
        ]
        consumer = world.consumer(features=COLLECTIONS)
        consumer.send(*requests)
        return consumer.frames()

    for kind in kinds:
        for order in (1, -1):
            monkeypatch.setattr(ProducerConnection, "accept_repeated", counted)
            together = received(kind, order)
            monkeypatch.setattr(ProducerConnection, "accept_repeated", lambda *arguments: OpenedStreams())
            assert together == received(kind, order)
    assert opened >= 3 * 2 * 4


def test_every_message_of_a_stream_has_the_opaque_of_its_request(world: World) -> None:
    world.write("a")
    consumer = world.consumer()
    consumer.open(opaque=0xBEEF, end_seqno=1)
    messages = consumer.received()
    assert len(messages) == 3
    assert {message.opaque for message in messages} == {0xBEEF}


def test_a_second_stream_on_a_vbucket_is_key_eexists(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    assert consumer.refused(stream_request()) == Status.KEY_EEXISTS


@pytest.mark.parametrize("vbucket", [8, 500, 2000])
def test_not_my_vbucket_where_it_does_not_exist(world: World, vbucket: int) -> None:
    assert world.consumer().refused(stream_request(vbucket=vbucket)) == Status.NOT_MY_VBUCKET


def test_extras_of_a_wrong_length_are_einval_and_the_connection_lives(world: World) -> None:
    consumer = world.consumer()
    frame = b"\x80\x53\x00\x00\x28\x00\x00\x00\x00\x00\x00\x28" + bytes(12) + bytes(40)
    assert consumer.refused(frame) == Status.EINVAL
    consumer.open()


@case_apart(b"not json")
@case_apart(b"[1]")
@case_apart(b'{"colour":"red"}')
@case_apart(b'{"collections":"0"}')
@case_apart(b'{"collections":[0]}')
@case_apart(b'{"scope":0}')
@case_apart(b'{"collections":["0"],"scope":"0"}')
@case_apart(b'{"sid":"1"}')
def test_a_value_that_is_not_as_specified_is_einval(world: World, value: bytes) -> None:
    consumer = world.consumer(features=COLLECTIONS)
    assert consumer.refused(stream_request(value=value)) == Status.EINVAL
    consumer.open()


def test_collections_and_xattrs_need_noops(world: World) -> None:
    with_xattrs = OpenFlags.PRODUCER | OpenFlags.INCLUDE_XATTRS
    for fields in ({"features": COLLECTIONS}, {"flags": with_xattrs}):
        consumer = world.consumer(**fields, enable_noop="false")
        assert consumer.refused(stream_request()) == Status.NOT_SUPPORTED


# --- which changes come -------------------------------------------------------------------------------------------


def test_a_request_on_an_empty_vbucket_brings_nothing_yet(world: World) -> None:
    consumer = world.consumer()
    assert consumer.stream() == []
    world.write("a")
    assert consumer.brief() == ["marker 0..1", "set a@1"]


def test_a_partial_request_brings_what_follows_its_start(world: World) -> None:
    world.store("a", "b", "c", "d")
    lines = world.consumer().stream(**resume(world, 2))
    assert changes(lines) == ["set c@3", "set d@4"]


def test_a_request_inside_a_snapshot_goes_on_with_that_snapshot(world: World) -> None:
    world.store("a", "b", "c", "d")
    fields = resume(world, 2, snapshot_start_seqno=0, snapshot_end_seqno=4)
    assert world.consumer().stream(**fields) == ["marker 0..4", "set c@3", "set d@4"]


def test_a_bounded_request_delivers_the_whole_snapshot_and_ends(world: World) -> None:
    world.store("a", "b", "c")
    assert world.consumer().stream(end_seqno=2) == ["marker 0..3", "set a@1", "set b@2", "set c@3", "end OK"]


def test_a_bounded_request_beyond_the_high_seqno_waits_for_it(world: World) -> None:
    world.store("a")
    consumer = world.consumer()
    assert consumer.stream(end_seqno=3) == ["marker 0..1", "set a@1"]
    world.write("b")
    assert consumer.brief() == ["marker 2..2", "set b@2"]
    world.write("c")
    assert consumer.brief() == ["marker 3..3", "set c@3", "end OK"]


def test_a_request_whose_start_is_its_end_ends_at_once(world: World) -> None:
    world.store("a", "b", "c")
    assert world.consumer().stream(**resume(world, 2, end_seqno=2)) == ["end OK"]
    assert world.consumer().stream(vbucket=3, end_seqno=0) == ["end OK"]


def test_the_marker_says_whether_a_snapshot_is_in_memory_or_on_disk(world: World) -> None:
    world.write("a", "b")
    for expected in (SnapshotFlags.MEMORY | SnapshotFlags.CHECKPOINT, SnapshotFlags.DISK | SnapshotFlags.CHECKPOINT):
        consumer = world.consumer()
        consumer.open()
        (marker,) = of_type(consumer.received(), SnapshotMarker)
        assert marker.flags == expected
        world.settle()


def test_a_disk_only_request_ends_with_what_was_there(world: World) -> None:
    world.store("a", "b")
    consumer = world.consumer()
    assert consumer.stream(flags=StreamFlags.DISK_ONLY) == ["marker 0..2", "set a@1", "set b@2", "end OK"]
    world.write("c")
    assert consumer.brief() == []


def test_a_latest_request_ends_at_the_high_seqno_of_its_opening(world: World) -> None:
    world.store("a", "b")
    consumer = world.consumer()
    consumer.open(flags=StreamFlags.LATEST)
    assert consumer.brief() == ["marker 0..2", "set a@1", "set b@2", "end OK"]


def test_a_from_latest_request_brings_only_what_is_new(world: World) -> None:
    world.store("a", "b")
    consumer = world.consumer()
    assert consumer.stream(flags=StreamFlags.FROM_LATEST) == []
    world.write("c")
    assert changes(consumer.brief()) == ["set c@3"]


def test_what_is_not_durable_is_not_sent(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    world.put("a")
    assert consumer.brief() == []
    world.commit()
    assert consumer.brief() == ["marker 0..1", "set a@1"]


# --- keep the stream open -----------------------------------------------------------------------------------------


def test_keep_stream_open_goes_on_live_after_the_backfill(world: World) -> None:
    world.store("a", "b")
    consumer = world.consumer()
    assert consumer.stream() == ["marker 0..2", "set a@1", "set b@2"]
    world.write("c")
    assert consumer.brief() == ["marker 3..3", "set c@3"]
    world.write("d", "e")
    assert consumer.brief() == ["marker 4..5", "set d@4", "set e@5"]


def test_the_seam_between_backfill_and_live_has_no_gap_and_no_repeat(world: World) -> None:
    world.store(*(f"old-{number}" for number in range(50)))
    consumer = world.consumer()
    consumer.open()
    seqnos: list[int] = []
    for number in range(100):
        # Writes, commits and settling go on at every point of the backfill.
        world.put(f"new-{number}")
        if number % 2:
            world.commit()
        if number % 7 == 0:
            world.settle()
        seqnos += [change.seqno for change in of_type(consumer.step(), Mutation)]
    world.commit()
    seqnos += [change.seqno for change in of_type(consumer.received(), Mutation)]
    assert seqnos == list(range(1, 151))


def test_cursor_movement_streams_of_one_vbucket_go_at_their_own_pace(world: World) -> None:
    world.store("a", "b", "c")
    fast, slow = world.consumer(), world.consumer()
    fast.open()
    slow.open()
    assert changes(fast.brief()) == ["set a@1", "set b@2", "set c@3"]
    slow.step()
    world.write("d")
    assert changes(fast.brief()) == ["set d@4"]
    world.settle()
    assert changes(slow.brief())[-1] == "set d@4"


def test_a_slow_consumer_falls_back_to_disk(world: World) -> None:
    consumer = world.consumer()
    world.write("a")
    consumer.stream()
    world.store("b", "c")
    messages = consumer.received()
    (marker,) = of_type(messages, SnapshotMarker)
    assert SnapshotFlags.DISK in marker.flags
    assert [change.seqno for change in of_type(messages, Mutation)] == [2, 3]


def test_multiple_streams_of_one_connection(world: World) -> None:
    for vbucket in range(4):
        world.put("a", "b", vbucket=vbucket)
    world.settle()
    consumer = world.consumer()
    for vbucket in range(4):
        consumer.open(vbucket=vbucket, opaque=100 + vbucket)
    mutations = of_type(consumer.received(), Mutation)
    assert sorted((change.vbucket, change.opaque, change.seqno) for change in mutations) == [
        (vbucket, 100 + vbucket, seqno) for vbucket in range(4) for seqno in (1, 2)
    ]


def test_the_order_of_backfills(world: World) -> None:
    for vbucket in range(2):
        world.put("a", "b", "c", vbucket=vbucket)
    world.settle()
    for order, expected in (("sequential", [0, 0, 0, 1, 1, 1]), ("round-robin", [0, 1, 0, 1, 0, 1])):
        consumer = world.consumer(backfill_order=order)
        consumer.open(vbucket=0)
        consumer.open(vbucket=1)
        mutations = of_type(consumer.decode(consumer.frames(bytes_max=1)), Mutation)
        assert [change.vbucket for change in mutations] == expected


# --- between two requests of a connection -------------------------------------------------------------------------


def test_a_control_counts_for_the_streams_that_are_asked_for_after_it(world: World) -> None:
    for vbucket in (0, 1):
        world.put("a", vbucket=vbucket)
        world.bucket.put_removal(vbucket, collection_id=0, key=b"a", expired=True)
    world.commit()
    consumer = world.consumer(flags=OpenFlags.PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES)
    consumer.open()
    assert len(of_type(consumer.received(), Deletion)) == 1
    consumer.control("enable_expiry_opcode", "true")
    consumer.open(vbucket=1)
    assert len(of_type(consumer.received(), Expiration)) == 1


def test_a_collection_counts_from_its_creation_to_its_drop(world: World) -> None:
    consumer = world.consumer(features=COLLECTIONS)
    consumer.open(vbucket=1)
    created = world.set_manifest(world.bucket.manifest.with_collection("_default", "orders"))
    orders = created.find("_default", "orders")
    value = StreamRequestValue(collections=(orders.id,)).encode()
    consumer.open(value=value)
    world.set_manifest(created.without_collection("_default", "orders"))
    assert consumer.refused(stream_request(value=value, vbucket=2)) == Status.UNKNOWN_COLLECTION


# --- turns --------------------------------------------------------------------------------------------------------


def test_there_is_more_while_streams_have_something_and_the_window_is_open(world: World) -> None:
    world.store("a", "b", "c", "d")
    consumer = world.consumer(connection_buffer_size="100")
    producer = consumer.session.dcp
    consumer.open()
    assert producer.has_more
    while sent := sum(len(frame.encode()) for frame in consumer.frames()):
        assert not producer.has_more, "the window is full"
        consumer.ack(sent)
    assert not producer.has_more, "the stream is idle"
    world.write("new")
    assert consumer.brief() == ["marker 5..5", "set new@5"]


def test_a_commit_wakes_the_streams_of_its_vbuckets_alone(world: World) -> None:
    consumer = world.consumer()
    consumer.open(vbucket=0)
    consumer.open(vbucket=1)
    consumer.received()
    world.write("new", vbucket=1)
    producer, output = consumer.session.dcp, Output()
    assert not producer.wake([2])
    assert producer.wake([1])
    producer.produce_into(output, 1 << 20, is_awake=True)
    assert consumer.decode(decode_frames(bytes(output.data)))[1].vbucket == 1
    assert not producer.has_more
