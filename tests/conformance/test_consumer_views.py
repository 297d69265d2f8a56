"""The connections that a node receives its copies by, as `stat dcp` and the dashboard see them."""

from __future__ import annotations

from headwater.node.producer.statistics import STREAMS_VIEWED_MAX
from headwater.node.service import ConsumerView
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.session import Stat
from support.dcp_world import VBUCKET, World
from support.kv_harness import Client
from support.replication_world import Link


def views(world: World, name: str | None = None, *, streams_max: int = STREAMS_VIEWED_MAX) -> list[ConsumerView]:
    now_s = world.node.service.now_s()
    return world.node.bucket_service.consumer_views(now_s=now_s, name=name, streams_max=streams_max)


def statistics(client: Client, group: bytes = b"dcp") -> dict[str, str]:
    *responses, _ = client.call_all(Stat(key=group))
    return {
        response.key.decode(): response.value.decode() for response in responses if isinstance(response, PlainResponse)
    }


def test_a_connection_tells_what_it_has_received(world: World, replica: World) -> None:
    assert views(replica) == []
    world.store("a", "b", value=bytes(1000))
    link = Link(world, replica)
    (opened,) = views(replica)
    assert (opened.vbuckets, opened.received_changes, opened.streams) == ((), 0, ())
    link.add()
    (view,) = views(replica)
    assert (view.name, view.vbuckets, view.received_changes) == ("replication", (VBUCKET,), 2)
    assert view.received_bytes > 2000
    assert view.is_proxied
    assert view.peer == link.receiver.session.peer != ""
    assert view.acked_bytes + view.unacked_bytes > 2000
    assert view.acked_bytes + view.unacked_bytes <= view.received_bytes
    assert view.streams is not None
    (stream,) = view.streams
    assert (stream.vbucket, stream.received_seqno, stream.received_changes) == (VBUCKET, 2, 2)
    assert (stream.snapshot_start_seqno, stream.snapshot_end_seqno, stream.is_inside_snapshot) == (0, 2, False)
    assert views(world) == [], "the other end is a producer"


def test_what_ended_streams_have_received_counts_on(world: World, replica: World) -> None:
    world.store("a")
    link = Link(world, replica)
    link.add()
    link.close_stream()
    link.run()
    (view,) = views(replica)
    assert (view.vbuckets, view.received_changes) == ((), 1)
    link.cut()
    assert views(replica) == []


def test_what_is_held_is_told_and_not_counted_as_changes(world: World, replica: World) -> None:
    link = Link(world, replica)
    link.add()
    link.receiver.connection.hold()
    world.store("a", value=bytes(1000))
    link.run()
    (view,) = views(replica)
    assert view.is_held
    assert view.held_bytes > 1000
    assert view.received_changes == 0


def test_streams_are_left_out_where_they_are_many(world: World, replica: World) -> None:
    link = Link(world, replica)
    link.add()
    assert [view.streams for view in views(replica, streams_max=0)] == [None]
    assert [len(view.streams or ()) for view in views(replica, "replication", streams_max=0)] == [1]
    assert views(replica, "another", streams_max=0) == []


def test_stat_dcp(world: World, replica: World) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    link.add()
    client = replica.node.client()
    found = statistics(client)
    prefix = "eq_dcpq:replication"
    assert (found["ep_dcp_count"], found["ep_dcp_producer_count"]) == ("1", "0")
    assert found[f"{prefix}:type"] == "consumer"
    assert found[f"{prefix}:total_received_changes"] == "2"
    assert found[f"{prefix}:num_streams"] == "1"
    assert found[f"{prefix}:stream_{VBUCKET}_last_received_seqno"] == "2"
    assert found[f"{prefix}:stream_{VBUCKET}_cur_snapshot_end"] == "2"
    assert found[f"{prefix}:stream_{VBUCKET}_state"] == "open"
    assert statistics(client, b"dcp replication") == found
    assert statistics(client, b"dcp another")["ep_dcp_count"] == "0"
