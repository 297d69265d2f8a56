"""Opening a connection, and what may be sent before and after it."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import AddStream, Control, DcpNoop, GetFailoverLog, Open, OpenFlags
from headwater.protocol.numbers import Seqno
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from support.cases import case
from support.dcp_world import COLLECTIONS, NO_XERROR, World, stream_request


def test_a_connection_is_opened_once_and_first(world: World) -> None:
    consumer = world.connection()
    assert consumer.refused(stream_request()) == Status.EINVAL
    assert consumer.refused(Control(key=b"enable_noop", value=b"true")) == Status.EINVAL
    assert consumer.call(Open(key=b"first")).status == Status.SUCCESS
    assert consumer.refused(Open(key=b"again")) == Status.EINVAL
    assert consumer.stream() == []


@pytest.mark.parametrize("misplaced", [AddStream(), Mutation(seqno=Seqno(1), rev_seqno=1, key=b"k")])
def test_a_producer_refuses_or_closes_on_what_is_for_a_consumer(world: World, misplaced: Request) -> None:
    consumer = world.consumer()
    assert consumer.refused(misplaced) == Status.EINVAL
    assert not consumer.is_closed
    world.speak_as("7.0")
    consumer.send(misplaced)
    assert consumer.is_closed
    assert consumer.received() == []


@case("an open flag that is unknown", {"flags": OpenFlags(0x11)}, (Status.SUCCESS, Status.EINVAL))
@case("a notifier", {"flags": OpenFlags.NOTIFIER}, (Status.EINVAL, Status.EINVAL))
@case("a seqno", {"seqno": 5}, (Status.SUCCESS, Status.SUCCESS))
@case("a name of 201 bytes", {"key": b"n" * 201}, (Status.EINVAL, Status.SUCCESS))
@case("both flags for no values", {"flags": OpenFlags(0x49)}, (Status.EINVAL, Status.EINVAL))
@case("deleted attributes alone", {"flags": OpenFlags(0x101)}, (Status.EINVAL, Status.EINVAL))
def test_dialects_judge_opens_differently(
    world: World, reason: str, fields: dict[str, Any], statuses: tuple[Status, Status]
) -> None:
    for version, status in zip(("7.0", "8.0"), statuses, strict=True):
        world.speak_as(version)
        request = Open(**{"flags": OpenFlags.PRODUCER, "key": version.encode(), **fields})
        assert world.connection().call(request).status == status, f"{reason}, as {version}"


@case("stream_buffer_size", "1000", (Status.EINVAL, Status.NOT_SUPPORTED))
@case("set_noop_interval", "0", (Status.SUCCESS, Status.EINVAL))
@case("set_noop_interval", "0.05", (Status.SUCCESS, Status.EINVAL))
@case("set_noop_interval", "100000", (Status.EINVAL, Status.SUCCESS))
@case("enable_noop", "yes", (Status.EINVAL, Status.SUCCESS))
@case("flatbuffers_system_events", "false", (Status.SUCCESS, Status.EINVAL))
@case("enable_sync_writes", "false", (Status.SUCCESS, Status.EINVAL))
@case("max_marker_version", "2.0", (Status.SUCCESS, Status.EINVAL))
@case("max_marker_version", "2.2", (Status.SUCCESS, Status.SUCCESS))
def test_dialects_differ_on_controls(world: World, key: str, value: str, statuses: tuple[Status, Status]) -> None:
    for version, status in zip(("7.0", "8.0"), statuses, strict=True):
        world.speak_as(version)
        consumer = world.consumer(features=COLLECTIONS)
        answer = consumer.call(Control(key=key.encode(), value=value.encode()))
        assert answer.status == status, f"{key}={value}, as {version}"


def test_stream_ids_and_sync_writes_exclude_each_other(world: World) -> None:
    with_ids = world.consumer(features=COLLECTIONS, enable_stream_id="true")
    assert with_ids.refused(Control(key=b"enable_sync_writes", value=b"true")) == Status.NOT_SUPPORTED
    with_sync_writes = world.consumer(features=COLLECTIONS, enable_sync_writes="true")
    assert with_sync_writes.refused(Control(key=b"enable_stream_id", value=b"true")) == Status.NOT_SUPPORTED


@pytest.mark.parametrize("name", [b"", b"n" * 251])
def test_a_name_has_1_to_250_bytes(world: World, name: bytes) -> None:
    consumer = world.connection()
    frame = b"\x80\x50" + len(name).to_bytes(2) + b"\x08" + bytes(3) + (8 + len(name)).to_bytes(4) + bytes(12)
    assert consumer.refused(frame + bytes(7) + b"\x01" + name) == Status.EINVAL
    assert consumer.call(Open(key=b"n" * 200)).status == Status.SUCCESS
    assert consumer.call(DcpNoop(opaque=7)).opaque == 7


def test_the_value_of_an_open_is_for_a_consumer_and_says_that_it_is_json(world: World) -> None:
    """What a 7.0.5 server refuses is in its recorded session (`test_recorded_sessions_replayed`); these are not."""
    connection = world.connection()
    long = b'{"consumer_name":"%s"}' % (b"n" * 201)
    for value in (b"not json", b"[" * 100_000, long, b'{"consumer_name":"n","other":1}'):
        open_request = Open(key=b"name", flags=OpenFlags(0), value=value, datatype=Datatype.JSON)
        assert connection.refused(open_request) == Status.EINVAL
    named = Open(key=b"name", flags=OpenFlags(0), value=b'{"consumer_name":"n"}', datatype=Datatype.JSON)
    assert connection.call(named).status == Status.SUCCESS


def test_a_name_is_taken_over_by_a_second_connection(world: World) -> None:
    world.write("a")
    older = world.consumer(name="same")
    older.open()
    world.consumer(name="other")
    assert not older.is_closed
    newer = world.consumer(name="same")
    assert older.is_closed
    assert older.received() == []
    assert newer.stream() == ["marker 0..1", "set a@1"]
    newer.session.disconnected()
    assert world.consumer(name="same").stream() == ["marker 0..1", "set a@1"]
    assert not newer.is_closed


@case("enable_noop", "true")
@case("set_noop_interval", "20")
@case("set_noop_interval", "0.1")
@case("connection_buffer_size", "1048576")
@case("set_priority", "high")
@case("force_value_compression", "true")
@case("supports_cursor_dropping", "true")
@case("send_stream_end_on_client_close_stream", "true")
@case("enable_expiry_opcode", "true")
@case("enable_stream_id", "true")
@case("enable_out_of_order_snapshots", "true")
@case("enable_out_of_order_snapshots", "true_with_seqno_advanced")
@case("backfill_order", "sequential")
@case("backfill_order", "round-robin")
@case("v7_dcp_status_codes", "true")
@case("flatbuffers_system_events", "true")
@case("change_streams", "true")
@case("max_marker_version", "2.2")
def test_a_known_control_is_taken(world: World, key: str, value: str) -> None:
    world.consumer(features=COLLECTIONS).control(key, value)


@case(b"no_such_control", b"1")
@case(b"enable_ext_metadata", b"true")
@case(b"supports_cursor_dropping_vulnerable", b"true")
@case(b"enable_value_compression", b"false")
@case(b"enable_expiry_opcode", b"yes")
@case(b"connection_buffer_size", b"abc")
@case(b"connection_buffer_size", b"-1")
@case(b"set_noop_interval", b"often")
@case(b"set_noop_interval", b"nan")
@case(b"set_priority", b"urgent")
@case(b"backfill_order", b"random")
@case(b"enable_stream_id", b"false")
@case(b"max_marker_version", b"3.0")
@case(b"enable_out_of_order_snapshots", b"maybe")
@case(b"\xff\xfe", b"true")
def test_an_unknown_control_or_a_bad_value_is_einval(world: World, key: bytes, value: bytes) -> None:
    consumer = world.consumer()
    assert consumer.refused(Control(key=key, value=value)) == Status.EINVAL
    consumer.open()


def test_the_failover_log(world: World) -> None:
    consumer = world.consumer()
    assert [entry.vbuuid for entry in consumer.succeed(GetFailoverLog()).failover_log] == [world.vbuuid()]
    assert consumer.refused(GetFailoverLog(vbucket=500)) == Status.NOT_MY_VBUCKET


# --- extended errors ----------------------------------------------------------------------------------------------


def test_without_extended_errors_a_refusal_has_an_older_status_or_disconnects(world: World) -> None:
    consumer = world.consumer(features=NO_XERROR, enable_noop="true")
    assert consumer.refused(stream_request(value=b'{"collections":["9"]}')) == Status.EINVAL
    assert consumer.refused(stream_request(vbucket=500)) == Status.NOT_MY_VBUCKET
    consumer.control("enable_stream_id", "true")
    consumer.send(stream_request())
    assert consumer.is_closed
