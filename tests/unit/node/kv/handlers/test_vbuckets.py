"""VBuckets as wholes: states, seqnos, durability, flush."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.node.options import BucketSettings
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Delete, Get, GetLocked, Set
from headwater.protocol.messages.session import Flush, FlushQuiet
from headwater.protocol.messages.vbuckets import DeleteVBucket, GetAllVbSeqnos, GetVBucket, SeqnoPersistence, SetVBucket
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.store.settling import abandon, settle_now
from support.kv_harness import Client, Node

VB3 = VBucketId(3)
FRUIT = CollectionId(8)
BAD_TOPOLOGIES = (b"7", b"[]", b"[[7]]", b"[[]]")

# --- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(VBucketState))
@pytest.mark.parametrize("wide", [False, True])
def test_a_state_is_set_and_got(client: Client, state: VBucketState, wide: bool) -> None:
    client.succeed(SetVBucket(vbucket=VB3, state=state, state_is_wide=wide))
    assert client.succeed(GetVBucket(vbucket=VB3)).state == state


def test_a_state_is_answered_when_it_is_durable(node: Node, client: Client) -> None:
    client.send(SetVBucket(vbucket=VB3, state=VBucketState.DEAD))
    assert client.received() == []
    node.commit()
    assert len(client.received()) == 1
    node.reopen(in_order=False)
    assert node.client().succeed(GetVBucket(vbucket=VB3)).state == VBucketState.DEAD


def test_states_and_vbuckets_that_do_not_exist(client: Client) -> None:
    assert client.refused(SetVBucket(vbucket=VB3, state=VBucketState(0))) == Status.EINVAL
    assert client.refused(SetVBucket(vbucket=VB3, state=VBucketState(5))) == Status.EINVAL
    assert client.refused(SetVBucket(vbucket=VBucketId(8), state=VBucketState.ACTIVE)) == Status.ERANGE
    assert client.refused(GetVBucket(vbucket=VBucketId(8))) == Status.NOT_MY_VBUCKET


def test_a_topology_is_kept(node: Node, client: Client) -> None:
    value = b'{"topology":[["a","b",null]]}'
    client.succeed(SetVBucket(vbucket=VB3, state=VBucketState.ACTIVE, value=value))
    node.reopen()
    facts = node.bucket.vbuckets.facts[3]
    assert [list(chain) for chain in facts.topology or ()] == [["a", "b", None]]
    node.client().succeed(SetVBucket(vbucket=VB3, state=VBucketState.ACTIVE, value=b'{"topology":null}'))
    facts = node.bucket.vbuckets.facts[3]
    assert facts.topology is None


@pytest.mark.parametrize(
    ("state", "value", "status"),
    [
        *(
            (VBucketState.ACTIVE, value, Status.EINVAL)
            for value in (b"nope", b"[]", b"{}", b"7", *(b'{"topology":%s}' % bad for bad in BAD_TOPOLOGIES))
        ),
        (VBucketState.REPLICA, b'{"topology":[["a"]]}', Status.EINVAL),
        (VBucketState.REPLICA, b'{"next_expected_state":"active"}', Status.SUCCESS),
        (VBucketState.REPLICA, b'{"next_expected_state":"alive"}', Status.EINVAL),
        (VBucketState.REPLICA, b'{"use_snapshot":"fbr"}', Status.NOT_SUPPORTED),
    ],
)
def test_what_the_value_of_a_state_may_say(client: Client, state: VBucketState, value: bytes, status: Status) -> None:
    """Only an active vbucket has a topology. The rest is what newer clusters say of a vbucket."""
    assert client.call(SetVBucket(vbucket=VB3, state=state, value=value)).status == status


def test_a_vbucket_made_active_again_branches(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v", vbucket=VB3))
    client.succeed(SetVBucket(vbucket=VB3, state=VBucketState.REPLICA))
    client.succeed(SetVBucket(vbucket=VB3, state=VBucketState.ACTIVE))
    facts = node.bucket.vbuckets.facts[3]
    assert [entry.seqno for entry in facts.failover_log.entries] == [1, 0]


# --- removal ------------------------------------------------------------------------------------------------------


def test_a_vbucket_is_removed_with_its_data(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v", vbucket=VB3))
    client.succeed(DeleteVBucket(vbucket=VB3))
    assert client.refused(GetVBucket(vbucket=VB3)) == Status.NOT_MY_VBUCKET
    assert client.refused(DeleteVBucket(vbucket=VB3)) == Status.NOT_MY_VBUCKET
    client.succeed(SetVBucket(vbucket=VB3, state=VBucketState.ACTIVE))
    assert client.refused(Get(key=b"k", vbucket=VB3)) == Status.KEY_ENOENT
    assert client.succeed(Set(key=b"k", value=b"v", vbucket=VB3)).seqno == 1


def test_a_vbucket_that_could_not_be_written_never_was(node: Node, client: Client) -> None:
    client.succeed(DeleteVBucket(vbucket=VB3))
    client.send(SetVBucket(vbucket=VB3, state=VBucketState.ACTIVE), Set(key=b"k", value=b"v", vbucket=VB3))
    abandon(node.bucket)
    client.session.outgoing.clear()
    assert client.refused(GetVBucket(vbucket=VB3)) == Status.NOT_MY_VBUCKET
    client.succeed(SetVBucket(vbucket=VB3, state=VBucketState.ACTIVE))
    assert client.refused(Get(key=b"k", vbucket=VB3)) == Status.KEY_ENOENT
    assert client.succeed(Set(key=b"k", value=b"v", vbucket=VB3)).seqno == 1


@pytest.mark.parametrize("request_", [DeleteVBucket(vbucket=VB3), Flush()])
def test_nothing_is_taken_away_under_the_hands_of_a_commit(node: Node, client: Client, request_: Any) -> None:
    client.send(Set(key=b"k", value=b"v", vbucket=VB3))
    commit = node.bucket.seal()
    assert commit is not None
    client.send(request_)
    node.bucket.persist(commit)
    node.bucket.publish(commit)
    assert [response.status for response in client.received()] == [Status.SUCCESS, Status.ETMPFAIL]
    node.bucket_service.is_at_rest = lambda: False
    assert client.refused(request_) == Status.ETMPFAIL
    node.bucket_service.is_at_rest = lambda: True
    client.succeed(request_)


def test_flush_drops_all_documents(node: Node, client: Client) -> None:
    for vbucket in range(8):
        client.succeed(Set(key=b"k", value=b"v", vbucket=VBucketId(vbucket)))
    client.succeed(GetLocked(key=b"k"))
    before = [facts and facts.failover_log.newest.vbuuid for facts in node.bucket.vbuckets.facts]
    client.succeed(Flush())
    for vbucket in range(8):
        assert client.refused(Get(key=b"k", vbucket=VBucketId(vbucket))) == Status.KEY_ENOENT
    after = [facts and facts.failover_log.newest.vbuuid for facts in node.bucket.vbuckets.facts]
    assert set(before).isdisjoint(after)
    assert client.succeed(Set(key=b"k", value=b"v")).seqno == 1
    node.reopen()
    assert node.client().refused(Get(key=b"k", vbucket=VB3)) == Status.KEY_ENOENT


def test_a_bucket_whose_flush_is_disabled_keeps_its_documents(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    node.bucket_service.settings = BucketSettings()
    assert client.refused(Flush()) == client.refused(FlushQuiet()) == Status.NOT_SUPPORTED
    assert client.succeed(Get(key=b"k")).value == b"v"


def test_flush_is_not_for_later(client: Client) -> None:
    client.succeed(Flush(delay_s=0))
    assert client.refused(Flush(delay_s=5)) == Status.NOT_SUPPORTED
    assert client.call_all(FlushQuiet()) == []


def events(node: Node, vbucket: int) -> list[bytes]:
    """The names in a vbucket's system events."""
    runs = [run.tobytes() for run in node.bucket.runs(vbucket)]
    data = b"".join(runs)
    names, at = [], 0
    while at < len(data):
        key_at = at + 24 + data[at + 4]
        if data[at + 1] == Opcode.DCP_SYSTEM_EVENT:
            names.append(data[key_at : key_at + int.from_bytes(data[at + 2 : at + 4])])
        at += 24 + int.from_bytes(data[at + 8 : at + 12])
    return names


def test_a_vbucket_that_begins_tells_the_collections_there_are(node: Node, client: Client) -> None:
    node.set_manifest(Manifest().with_collection("_default", "fruit"))
    assert events(node, 3) == [b"fruit"]
    client.succeed(Flush())
    assert events(node, 3) == [b"fruit"]
    client.succeed(DeleteVBucket(vbucket=VB3))
    client.succeed(SetVBucket(vbucket=VB3, state=VBucketState.ACTIVE))
    assert events(node, 3) == [b"fruit"]


# --- seqnos -------------------------------------------------------------------------------------------------------


def seqnos(client: Client, **fields: Any) -> dict[int, int]:
    response = client.succeed(GetAllVbSeqnos(**fields))
    assert [entry.vbucket for entry in response.seqnos] == sorted(entry.vbucket for entry in response.seqnos)
    return {entry.vbucket: entry.seqno for entry in response.seqnos}


def test_all_vbuckets_that_are_alive(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v", vbucket=VB3))
    for vbucket, state in enumerate(VBucketState):
        client.succeed(SetVBucket(vbucket=VBucketId(vbucket), state=state))
    assert set(seqnos(client)) == {0, 1, 2, 4, 5, 6, 7}
    assert set(seqnos(client, state=0)) == {0, 1, 2, 4, 5, 6, 7}
    assert set(seqnos(client, state=VBucketState.REPLICA)) == {1}
    assert seqnos(client, state=VBucketState.DEAD) == {3: 1}
    assert client.refused(GetAllVbSeqnos(state=9)) == Status.EINVAL


def test_only_durable_seqnos_are_told(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    node.client().send(Set(key=b"k", value=b"w"))
    client.send(GetAllVbSeqnos())
    assert client.received()[0].seqnos[0].seqno == 1


def test_seqnos_have_every_write_that_was_acknowledged(node: Node) -> None:
    """Also where that is before it is durable: then the answer waits for the disk."""
    node.bucket_service.ack_when_durable = False
    writer, *asking = (node.client(features=features) for features in ((), (), (Feature.COLLECTIONS,)))
    writer.send(Set(key=b"k", value=b"v", vbucket=VB3))
    in_flight = node.bucket.seal()
    assert in_flight is not None
    writer.send(Set(key=b"k", value=b"v", vbucket=VBucketId(5)))
    assert [answer.status for answer in writer.received()] == [Status.SUCCESS, Status.SUCCESS]
    for client in asking:
        client.send(GetAllVbSeqnos())
    node.bucket.persist(in_flight)
    node.bucket.publish(in_flight)
    assert [client.received() for client in asking] == [[], []]
    node.commit()
    for client in asking:
        (answer,) = client.received()
        assert {entry.vbucket: entry.seqno for entry in answer.seqnos if entry.seqno} == {3: 1, 5: 1}
        client.send(GetAllVbSeqnos())
        assert client.received() == [answer], "there is nothing to wait for"


@pytest.mark.parametrize("settled", [False, True])
def test_seqnos_of_a_collection(node: Node, collections_client: Client, settled: bool) -> None:
    client = collections_client
    node.set_manifest(Manifest().with_collection("_default", "fruit"))
    for collection_id in (FRUIT, CollectionId(0), FRUIT, CollectionId(0)):
        client.succeed(Set(key=b"k", value=b"v", collection_id=collection_id, vbucket=VB3))
    client.succeed(Delete(key=b"k", collection_id=FRUIT, vbucket=VBucketId(3)))
    client.succeed(Set(key=b"k", value=b"v", collection_id=CollectionId(0), vbucket=VB3))
    if settled:
        settle_now(node.bucket)
    assert seqnos(client)[3] == 7
    assert seqnos(client, state=0, collection=FRUIT) == {0: 1, 1: 1, 2: 1, 3: 6, 4: 1, 5: 1, 6: 1, 7: 1}
    assert seqnos(client, state=0, collection=0) == {0: 0, 1: 0, 2: 0, 3: 7, 4: 0, 5: 0, 6: 0, 7: 0}


def test_a_collection_is_looked_for_in_older_blocks(node: Node, collections_client: Client) -> None:
    client = collections_client
    node.set_manifest(Manifest().with_collection("_default", "fruit"))
    client.succeed(Set(key=b"k", value=b"v", collection_id=FRUIT))
    for number in range(8):
        client.succeed(Set(key=b"%d" % number, value=bytes(100_000), collection_id=CollectionId(0)))
    settle_now(node.bucket)
    client.succeed(Set(key=b"k", value=b"v", collection_id=CollectionId(0)))
    assert seqnos(client, state=VBucketState.ACTIVE, collection=FRUIT)[0] == 2


def test_an_unknown_collection_has_no_seqnos(node: Node, collections_client: Client) -> None:
    request = GetAllVbSeqnos(state=0, collection=CollectionId(99))
    assert collections_client.refused(request) == Status.UNKNOWN_COLLECTION
    older = node.client(features=(Feature.XERROR,))
    assert older.refused(GetAllVbSeqnos(state=0, collection=CollectionId(0))) == Status.EINVAL


# --- durability ---------------------------------------------------------------------------------------------------


def test_seqno_persistence_answers_when_the_seqno_is_durable(node: Node, client: Client) -> None:
    writer = node.client()
    writer.send(Set(key=b"k", value=b"1", vbucket=VB3))
    first = node.bucket.seal()
    assert first is not None
    writer.send(Set(key=b"k", value=b"2", vbucket=VB3))
    early, late = node.client(), node.client()
    early.send(SeqnoPersistence(vbucket=VB3, seqno=Seqno(1)))
    late.send(SeqnoPersistence(vbucket=VB3, seqno=Seqno(2)))
    assert (early.received(), late.received()) == ([], [])
    node.bucket.persist(first)
    node.bucket.publish(first)
    assert [response.status for response in early.received()] == [Status.SUCCESS]
    assert late.received() == []
    node.commit()
    assert [response.status for response in late.received()] == [Status.SUCCESS]
    client.send(SeqnoPersistence(vbucket=VB3, seqno=Seqno(2)))
    assert [response.status for response in client.received()] == [Status.SUCCESS]


def test_seqno_persistence_waits_whatever_writers_are_promised(node: Node) -> None:
    node.bucket_service.ack_when_durable = False
    client = node.client()
    assert client.refused(SeqnoPersistence(seqno=Seqno(1))) == Status.ETMPFAIL
    assert client.refused(SeqnoPersistence(seqno=Seqno(1), vbucket=VBucketId(99))) == Status.NOT_MY_VBUCKET
    client.send(Set(key=b"k", value=b"1"), SeqnoPersistence(seqno=Seqno(1)))
    assert client.received() == []
