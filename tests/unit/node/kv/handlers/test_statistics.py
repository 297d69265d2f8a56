"""Statistics: the groups there are, and how they are sent."""

from __future__ import annotations

import pytest

from headwater.cluster.planning import Copy, most_advanced
from headwater.node.auth.users import Role
from headwater.node.producer import statistics as producer_statistics
from headwater.node.upr_session import UprSession
from headwater.protocol import upr
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Opcode
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import BufferAck, Control, Open, StreamRequest, VBucketState
from headwater.protocol.messages.documents import Delete, GetLocked, Set
from headwater.protocol.messages.session import Stat
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.sasl import Credentials
from headwater.protocol.status import Status
from headwater.store.receiving import begin_snapshot, receive_change, take_failover_log
from support.cases import case_apart
from support.kv_harness import START_S, WITH_COLLECTIONS, Client, Node


def statistics(client: Client, group: bytes = b"") -> dict[str, str]:
    *responses, last = client.call_all(Stat(key=group, opaque=5))
    assert (last.key, last.value, last.opaque, last.opcode) == (b"", b"", 5, Opcode.STAT)
    found = {}
    for response in responses:
        assert (response.status, response.opaque) == (Status.SUCCESS, 5)
        found[response.key.decode()] = response.value.decode()
    assert len(found) == len(responses)
    return found


@pytest.mark.parametrize("name", [b"key", b"vkey"])
def test_statistics_of_one_document(node: Node, client: Client, name: bytes) -> None:
    stored = client.succeed(Set(key=b"a key", value=b"{}", flags=7, expiry=60, vbucket=VBucketId(3)))
    found = statistics(client, name + b" a key 3")
    expected = {
        "key_is_dirty": "false",
        "key_exptime": str(node.clock.now_s() + 60),
        "key_flags": "7",
        "key_cas": str(stored.cas),
        "key_vb_state": "active",
    }
    assert found == {**expected, "key_valid": "valid"} if name == b"vkey" else expected
    node.bucket_service.ack_when_durable = False
    client.send(Set(key=b"a key", value=b"1", vbucket=VBucketId(3)), Stat(key=name + b" a key 3"))
    dirty = next(r for r in client.received() if isinstance(r, PlainResponse) and r.key == b"key_is_dirty")
    assert dirty.value == b"true"


def test_statistics_of_a_document_of_a_collection(node: Node, client: Client) -> None:
    node.set_manifest(Manifest().with_scope("s").with_collection("s", "c"))
    collection = node.bucket.manifest.scopes[-1].collections[0].id
    writer = node.client(features=WITH_COLLECTIONS)
    writer.succeed(Set(key=b"k", collection_id=collection, value=b"{}", flags=9))
    for named in (b"s.c", b"0x%x" % collection):
        assert statistics(client, b"key k 0 " + named)["key_flags"] == "9"


@case_apart(b"none 0", Status.KEY_ENOENT)
@case_apart(b"k 99", Status.NOT_MY_VBUCKET)
@case_apart(b"k", Status.EINVAL)
@case_apart(b" 0", Status.EINVAL)
@case_apart(b"k x", Status.EINVAL)
@case_apart(b"k " + b"9" * 5000, Status.EINVAL)
@case_apart(b"k 0 no.such", Status.UNKNOWN_COLLECTION)
def test_documents_that_have_no_statistics(client: Client, argument: bytes, status: Status) -> None:
    assert client.refused(Stat(key=b"key " + argument)) == status


def test_general_statistics(node: Node, client: Client) -> None:
    for key in (b"a", b"b", b"c"):
        client.succeed(Set(key=key, value=b"1"))
    client.succeed(Set(key=b"a", value=b"1", vbucket=VBucketId(1)))
    client.succeed(Delete(key=b"a"))
    client.succeed(GetLocked(key=b"b"))
    node.bucket.set_vbucket_state(1, VBucketState.REPLICA)
    node.clock.advance(90)
    found = statistics(client)
    expected = {
        "version": "1.2.3", "time": str(START_S + 90), "uptime": "90", "curr_items": "2", "curr_items_tot": "3",
        "vb_active_num": "7", "vb_replica_num": "1", "vb_pending_num": "0", "vb_dead_num": "0",
        "ep_bucket_uuid": "0123456789abcdef", "ep_max_vbuckets": "8", "ep_queue_size": "0", "ep_locked_items": "1",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected


def test_states_of_vbuckets(node: Node, client: Client) -> None:
    node.bucket.set_vbucket_state(1, VBucketState.DEAD)
    found = statistics(client, b"vbucket")
    assert (found["vb_0"], found["vb_1"], len(found)) == ("active", "dead", 8)


def test_details_of_vbuckets(node: Node, client: Client) -> None:
    stored = client.succeed(Set(key=b"a", value=b"1"))
    client.succeed(Set(key=b"b", value=b"1"))
    deleted = client.succeed(Delete(key=b"b"))
    found = statistics(client, b"vbucket-details 0")
    assert found == {
        "vb_0": "active", "vb_0:num_items": "1", "vb_0:num_tombstones": "1", "vb_0:high_seqno": "3",
        "vb_0:purge_seqno": "0", "vb_0:uuid": str(stored.vbuuid), "vb_0:max_cas": str(deleted.cas),
    }  # fmt: skip
    assert set(found) < set(statistics(client, b"vbucket-details"))


def test_seqnos_of_vbuckets_are_durable_ones(node: Node, client: Client) -> None:
    stored = client.succeed(Set(key=b"a", value=b"1"))
    reader = node.client()
    client.send(Set(key=b"a", value=b"2"))
    reader.send(Stat(key=b"vbucket-seqno 0"))
    found = {response.key.decode(): response.value.decode() for response in reader.received()}
    assert found == {
        "": "", "vb_0:high_seqno": "1", "vb_0:abs_high_seqno": "1", "vb_0:last_persisted_seqno": "1",
        "vb_0:purge_seqno": "0", "vb_0:uuid": str(stored.vbuuid), "vb_0:last_persisted_snap_start": "1",
        "vb_0:last_persisted_snap_end": "1",
    }  # fmt: skip


@case_apart(
    (b"vbucket 8", b"vbucket-details x", b"vbucket-seqno -1", b"vbucket-details 99", b"vbucket " + b"9" * 5000),
    Status.NOT_MY_VBUCKET,
)
@case_apart((b"nonsense", b"uuid 1", b"\xff", b"VBUCKET"), Status.KEY_ENOENT)
def test_vbuckets_and_groups_that_do_not_exist(client: Client, groups: tuple[bytes, ...], status: Status) -> None:
    assert statistics(client, b"uuid") == {"uuid": "0123456789abcdef"}
    for group in groups:
        assert client.refused(Stat(key=group)) == status


def test_collections(node: Node, client: Client) -> None:
    node.set_manifest(Manifest().with_scope("garden").with_collection("garden", "berries", max_ttl_s=60))
    assert statistics(client, b"collections") == {
        "manifest_uid": "2", "0x0:name": "_default", "0x0:0x0:name": "_default", "0x0:0x0:scope_name": "_default",
        "0x8:name": "garden", "0x8:0x9:name": "berries", "0x8:0x9:scope_name": "garden", "0x8:0x9:maxTTL": "60",
    }  # fmt: skip


# What a node tells of its copies, by which a failover chooses: up to where one is whole, and on which branch.


VB = VBucketId(1)
OLD, NEW = FailoverEntry(vbuuid=Vbuuid(11), seqno=Seqno(0)), FailoverEntry(vbuuid=Vbuuid(22), seqno=Seqno(4))


@pytest.fixture
def replica(node: Node) -> Node:
    node.bucket.set_vbucket_state(VB, VBucketState.REPLICA)
    return node


def receive(node: Node, *seqnos: int, start: int, end: int, has_history: bool) -> None:
    begin_snapshot(node.bucket, VB, start=Seqno(start), end=Seqno(end), has_history=has_history)
    for seqno in seqnos:
        change = Mutation(
            vbucket=VB, seqno=Seqno(seqno), rev_seqno=1, collection_id=CollectionId(0), key=b"%d" % seqno, value=b"{}"
        )
        receive_change(node.bucket, VB, change, end_seqno=Seqno(end))
    node.commit()


def told(client: Client) -> tuple[str, int, tuple[int, ...]]:
    state, seqno, branches = statistics(client, b"headwater-copies")[f"vb_{VB}"].split(" ")
    return state, int(seqno), tuple(int(branch) for branch in branches.split(","))


def test_a_copy_inside_of_a_deduplicated_snapshot_is_whole_up_to_its_start(replica: Node, client: Client) -> None:
    take_failover_log(replica.bucket, VB, (OLD,))
    receive(replica, 1, 2, start=0, end=2, has_history=False)
    assert told(client) == ("replica", 2, (11,))
    # Older versions of what comes at 9 are gone with the snapshot, and it has not come.
    receive(replica, 5, 7, start=2, end=9, has_history=False)
    assert told(client) == ("replica", 2, (11,))
    receive(replica, 9, start=7, end=9, has_history=False)
    assert told(client) == ("replica", 9, (11,))


def test_inside_of_a_snapshot_with_every_version_it_is_whole(replica: Node, client: Client) -> None:
    receive(replica, 1, 2, start=0, end=9, has_history=True)
    assert told(client)[1] == 2


def test_a_copy_is_on_no_branch_that_begins_behind_what_it_holds(replica: Node, client: Client) -> None:
    take_failover_log(replica.bucket, VB, (NEW, OLD))
    receive(replica, 1, 2, start=0, end=2, has_history=True)
    assert told(client) == ("replica", 2, (11,))
    receive(replica, 5, start=2, end=5, has_history=True)
    assert told(client) == ("replica", 5, (22, 11))


def test_an_active_vbucket_is_whole(replica: Node, client: Client) -> None:
    take_failover_log(replica.bucket, VB, (OLD,))
    receive(replica, 5, start=0, end=9, has_history=False)
    replica.bucket.set_vbucket_state(VB, VBucketState.ACTIVE)
    replica.commit()
    assert told(client)[:2] == ("active", 5)


def test_a_failover_takes_the_copy_that_is_whole(replica: Node, client: Client) -> None:
    """One that is being built from its start knows the newest branch by name, and holds little of it."""
    take_failover_log(replica.bucket, VB, (NEW, OLD))
    receive(replica, 5, 7, start=0, end=9, has_history=False)
    _, seqno, branches = told(client)
    copies = {"built": Copy(seqno=Seqno(seqno), branches=branches), "old": Copy(seqno=Seqno(3), branches=(11,))}
    assert most_advanced(["built", "old"], copies) == "old"


# `stat dcp`: connections, and their streams.


def open_consumer(node: Node, name: bytes) -> Client:
    consumer = node.client()
    consumer.succeed(Open(key=name))
    return consumer


def produce(consumer: Client) -> bytes:
    return consumer.session.dcp.produce(1_000_000)


def test_a_connection_and_its_streams(node: Node, client: Client) -> None:
    for key in (b"a", b"b", b"c"):
        client.succeed(Set(key=key, value=b"1"))
    node.clock.advance(60)
    consumer = open_consumer(node, b"spark")
    consumer.succeed(Control(key=b"enable_noop", value=b"true"))
    consumer.succeed(Control(key=b"connection_buffer_size", value=b"5000"))
    consumer.succeed(StreamRequest(opaque=7, end_seqno=Seqno(100)))
    node.clock.advance(30)
    before = statistics(client, b"dcp")
    assert before["eq_dcpq:spark:stream_0_backlog_items"] == "3"
    assert before["eq_dcpq:spark:stream_0_state"] == "accepted"
    sent = len(produce(consumer))
    consumer.send(BufferAck(acked_bytes=10))
    found = statistics(client, b"dcp")
    assert found == {
        "eq_dcpq:spark:type": "producer", "eq_dcpq:spark:created": "60", "eq_dcpq:spark:total_bytes_sent": str(sent),
        "eq_dcpq:spark:total_acked_bytes": "10", "eq_dcpq:spark:unacked_bytes": str(sent - 10),
        "eq_dcpq:spark:max_buffer_bytes": "5000", "eq_dcpq:spark:flow_control": "enabled",
        "eq_dcpq:spark:noop_enabled": "true", "eq_dcpq:spark:noop_tx_interval": "180",
        "eq_dcpq:spark:noop_wait": "false", "eq_dcpq:spark:collections_enabled": "false",
        "eq_dcpq:spark:priority": "medium", "eq_dcpq:spark:num_streams": "1", "eq_dcpq:spark:backlog_items": "0",
        "eq_dcpq:spark:stream_0_state": "streaming", "eq_dcpq:spark:stream_0_opaque": "7",
        "eq_dcpq:spark:stream_0_start_seqno": "0", "eq_dcpq:spark:stream_0_end_seqno": "100",
        "eq_dcpq:spark:stream_0_last_sent_seqno": "3", "eq_dcpq:spark:stream_0_backlog_items": "0",
        "eq_dcpq:spark:stream_0_frames_sent": "3", "eq_dcpq:spark:stream_0_bytes_sent": str(sent),
        "ep_dcp_count": "1", "ep_dcp_producer_count": "1", "ep_dcp_total_bytes": str(sent),
    }  # fmt: skip


def test_streams_with_ids(node: Node, client: Client) -> None:
    consumer = open_consumer(node, b"spark")
    consumer.succeed(Control(key=b"enable_noop", value=b"true"))
    consumer.succeed(Control(key=b"enable_stream_id", value=b"true"))
    consumer.succeed(StreamRequest(vbucket=VBucketId(3), value=b'{"sid":9}'))
    assert statistics(client, b"dcp")["eq_dcpq:spark:stream_3_sid_9_start_seqno"] == "0"


def test_one_connection_by_its_name(node: Node, client: Client) -> None:
    one = open_consumer(node, b"one")
    open_consumer(node, b"two words")
    assert statistics(client, b"dcp")["ep_dcp_producer_count"] == "2"
    found = statistics(client, b"dcp two words")
    assert found["ep_dcp_producer_count"] == "1"
    assert "eq_dcpq:two words:type" in found
    one.session.disconnected()
    assert statistics(client, b"dcp")["ep_dcp_producer_count"] == "1"


def test_many_streams_are_told_by_name_only(node: Node, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_statistics, "STREAMS_VIEWED_MAX", 1)
    consumer = open_consumer(node, b"spark")
    for vbucket in range(2):
        consumer.succeed(StreamRequest(vbucket=VBucketId(vbucket)))
    found = statistics(client, b"dcp")
    assert found["eq_dcpq:spark:num_streams"] == "2"
    assert "eq_dcpq:spark:stream_0_state" not in found
    assert "eq_dcpq:spark:stream_0_state" in statistics(client, b"dcp spark")


def test_a_connection_of_the_upr_draft(node: Node, client: Client) -> None:
    session = UprSession(node.bucket_service, name="upr:peer", now_s=0.0)
    session.receive_data(upr.UprStreamRequest(vbucket=VBucketId(1)).encode())
    found = statistics(client, b"dcp")
    assert found["eq_dcpq:upr:peer:type"] == "upr"
    assert found["eq_dcpq:upr:peer:stream_1_last_sent_seqno"] == "0"


# Who gets to know how the nodes of a cluster log in to each other.


GROUP = b"headwater-login"


def test_the_login_of_nodes_is_for_admins(node: Node) -> None:
    admin = node.client()
    assert statistics(admin, GROUP) == {}, "the node is not in a cluster"
    node.bucket_service.config = PublishedConfig(
        revision=1, bucket="default", uuid="0", nodes=(NodeAddress(host="127.0.0.1", kv_port=1),), rows=((0,),) * 4,
        login=Credentials("@cluster-default", "drawn once"),
    )  # fmt: skip
    assert statistics(admin, GROUP) == {"user": "@cluster-default", "password": "drawn once"}
    for role in Role:
        if role != Role.ADMIN and not role.is_of_another_service:
            assert node.client(user=role.value).refused(Stat(key=GROUP)) == Status.EACCESS
