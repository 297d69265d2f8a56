"""`stat dcp`: connections, and their streams."""

from __future__ import annotations

import pytest
from kv_harness import Client, Node

from headwater.node.producer import statistics as producer_statistics
from headwater.node.upr_session import UprSession
from headwater.protocol import upr
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import BufferAck, Control, Open, StreamRequest
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.session import Stat
from headwater.protocol.numbers import Seqno, VBucketId


def statistics(client: Client, group: bytes = b"dcp") -> dict[str, str]:
    *responses, _ = client.call_all(Stat(key=group))
    return {
        response.key.decode(): response.value.decode() for response in responses if isinstance(response, PlainResponse)
    }


def open_consumer(node: Node, name: bytes) -> Client:
    consumer = node.client()
    consumer.succeed(Open(key=name))
    return consumer


def produce(consumer: Client) -> bytes:
    assert consumer.session.dcp is not None
    return consumer.session.dcp.produce(1_000_000)


def test_no_connection(client: Client) -> None:
    assert statistics(client) == {"ep_dcp_count": "0", "ep_dcp_producer_count": "0", "ep_dcp_total_bytes": "0"}


def test_a_connection_and_its_streams(node: Node, client: Client) -> None:
    for key in (b"a", b"b", b"c"):
        client.succeed(Set(key=key, value=b"1"))
    node.clock.advance(60)
    consumer = open_consumer(node, b"spark")
    consumer.succeed(Control(key=b"enable_noop", value=b"true"))
    consumer.succeed(Control(key=b"connection_buffer_size", value=b"5000"))
    consumer.succeed(StreamRequest(opaque=7, end_seqno=Seqno(100)))
    node.clock.advance(30)
    before = statistics(client)
    assert before["eq_dcpq:spark:stream_0_backlog_items"] == "3"
    assert before["eq_dcpq:spark:stream_0_state"] == "accepted"
    sent = len(produce(consumer))
    consumer.send(BufferAck(acked_bytes=10))
    found = statistics(client)
    assert found == {
        "eq_dcpq:spark:type": "producer",
        "eq_dcpq:spark:created": "60",
        "eq_dcpq:spark:total_bytes_sent": str(sent),
        "eq_dcpq:spark:total_acked_bytes": "10",
        "eq_dcpq:spark:unacked_bytes": str(sent - 10),
        "eq_dcpq:spark:max_buffer_bytes": "5000",
        "eq_dcpq:spark:flow_control": "enabled",
        "eq_dcpq:spark:noop_enabled": "true",
        "eq_dcpq:spark:noop_tx_interval": "180",
        "eq_dcpq:spark:noop_wait": "false",
        "eq_dcpq:spark:collections_enabled": "false",
        "eq_dcpq:spark:priority": "medium",
        "eq_dcpq:spark:num_streams": "1",
        "eq_dcpq:spark:backlog_items": "0",
        "eq_dcpq:spark:stream_0_state": "streaming",
        "eq_dcpq:spark:stream_0_opaque": "7",
        "eq_dcpq:spark:stream_0_start_seqno": "0",
        "eq_dcpq:spark:stream_0_end_seqno": "100",
        "eq_dcpq:spark:stream_0_last_sent_seqno": "3",
        "eq_dcpq:spark:stream_0_backlog_items": "0",
        "eq_dcpq:spark:stream_0_frames_sent": "3",
        "eq_dcpq:spark:stream_0_bytes_sent": str(sent),
        "ep_dcp_count": "1",
        "ep_dcp_producer_count": "1",
        "ep_dcp_total_bytes": str(sent),
    }


def test_streams_with_ids(node: Node, client: Client) -> None:
    consumer = open_consumer(node, b"spark")
    consumer.succeed(Control(key=b"enable_noop", value=b"true"))
    consumer.succeed(Control(key=b"enable_stream_id", value=b"true"))
    consumer.succeed(StreamRequest(vbucket=VBucketId(3), value=b'{"sid":9}'))
    assert statistics(client)["eq_dcpq:spark:stream_3_sid_9_start_seqno"] == "0"


def test_one_connection_by_its_name(node: Node, client: Client) -> None:
    open_consumer(node, b"one")
    open_consumer(node, b"two words")
    assert statistics(client)["ep_dcp_producer_count"] == "2"
    found = statistics(client, b"dcp two words")
    assert found["ep_dcp_producer_count"] == "1"
    assert "eq_dcpq:two words:type" in found


def test_many_streams_are_told_by_name_only(node: Node, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_statistics, "STREAMS_TOLD_MAX", 1)
    consumer = open_consumer(node, b"spark")
    for vbucket in range(2):
        consumer.succeed(StreamRequest(vbucket=VBucketId(vbucket)))
    found = statistics(client)
    assert found["eq_dcpq:spark:num_streams"] == "2"
    assert "eq_dcpq:spark:stream_0_state" not in found
    assert "eq_dcpq:spark:stream_0_state" in statistics(client, b"dcp spark")


def test_a_connection_of_the_upr_draft(node: Node, client: Client) -> None:
    session = UprSession(node.bucket_service, name="upr:peer", now_s=0.0)
    session.receive_data(upr.StreamRequest(vbucket=VBucketId(1)).encode())
    found = statistics(client)
    assert found["eq_dcpq:upr:peer:type"] == "upr"
    assert found["eq_dcpq:upr:peer:stream_1_last_sent_seqno"] == "0"


def test_a_connection_that_is_gone(node: Node, client: Client) -> None:
    consumer = open_consumer(node, b"spark")
    consumer.session.disconnected()
    assert statistics(client)["ep_dcp_producer_count"] == "0"
