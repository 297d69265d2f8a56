"""Statistics: the groups there are, and how they are sent."""

from __future__ import annotations

import pytest
from kv_harness import START_S, Client, Node

from headwater.protocol.features import Opcode
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Delete, GetLocked, Set
from headwater.protocol.messages.session import Stat
from headwater.protocol.numbers import VBucketId
from headwater.protocol.status import Status


def statistics(client: Client, group: bytes = b"") -> dict[str, str]:
    *responses, last = client.call_all(Stat(key=group, opaque=5))
    assert isinstance(last, PlainResponse)
    assert (last.key, last.value, last.opaque, last.opcode) == (b"", b"", 5, Opcode.STAT)
    found = {}
    for response in responses:
        assert isinstance(response, PlainResponse)
        assert (response.status, response.opaque) == (Status.SUCCESS, 5)
        found[response.key.decode()] = response.value.decode()
    assert len(found) == len(responses)
    return found


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
        "version": "1.2.3",
        "time": str(START_S + 90),
        "uptime": "90",
        "curr_items": "2",
        "curr_items_tot": "3",
        "vb_active_num": "7",
        "vb_replica_num": "1",
        "vb_pending_num": "0",
        "vb_dead_num": "0",
        "ep_bucket_uuid": "0123456789abcdef",
        "ep_max_vbuckets": "8",
        "ep_queue_size": "0",
        "ep_locked_items": "1",
    }
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
        "vb_0": "active",
        "vb_0:num_items": "1",
        "vb_0:num_tombstones": "1",
        "vb_0:high_seqno": "3",
        "vb_0:purge_seqno": "0",
        "vb_0:uuid": str(stored.vbuuid),
        "vb_0:max_cas": str(deleted.cas),
    }
    assert set(found) < set(statistics(client, b"vbucket-details"))


def test_seqnos_of_vbuckets_are_durable_ones(node: Node, client: Client) -> None:
    stored = client.succeed(Set(key=b"a", value=b"1"))
    reader = node.client()
    client.send(Set(key=b"a", value=b"2"))
    reader.send(Stat(key=b"vbucket-seqno 0"))
    found = {response.key.decode(): response.value.decode() for response in reader.received()}  # type: ignore[attr-defined]
    assert found == {
        "": "",
        "vb_0:high_seqno": "1",
        "vb_0:abs_high_seqno": "1",
        "vb_0:last_persisted_seqno": "1",
        "vb_0:purge_seqno": "0",
        "vb_0:uuid": str(stored.vbuuid),
        "vb_0:last_persisted_snap_start": "1",
        "vb_0:last_persisted_snap_end": "1",
    }


@pytest.mark.parametrize("group", [b"vbucket 8", b"vbucket-details x", b"vbucket-seqno -1", b"vbucket-details 99"])
def test_vbuckets_that_are_not_there(client: Client, group: bytes) -> None:
    assert client.refused(Stat(key=group)) == Status.NOT_MY_VBUCKET


def test_collections(node: Node, client: Client) -> None:
    node.set_manifest(Manifest().with_scope("garden").with_collection("garden", "berries", max_ttl_s=60))
    assert statistics(client, b"collections") == {
        "manifest_uid": "2",
        "0x0:name": "_default",
        "0x0:0x0:name": "_default",
        "0x0:0x0:scope_name": "_default",
        "0x8:name": "garden",
        "0x8:0x9:name": "berries",
        "0x8:0x9:scope_name": "garden",
        "0x8:0x9:maxTTL": "60",
    }


def test_the_bucket_s_uuid(client: Client) -> None:
    assert statistics(client, b"uuid") == {"uuid": "0123456789abcdef"}


@pytest.mark.parametrize("group", [b"nonsense", b"uuid 1", b"\xff", b"VBUCKET"])
def test_groups_nobody_knows(client: Client, group: bytes) -> None:
    assert client.refused(Stat(key=group)) == Status.KEY_ENOENT
