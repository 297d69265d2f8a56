"""Reading: documents and their metadata, and what is held back until it is durable."""

from __future__ import annotations

import json

import pytest

from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import ErrorResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import (
    COUNTER_MUST_EXIST,
    Decrement,
    DecrementQuiet,
    Delete,
    Get,
    GetMeta,
    GetMetaQuiet,
    GetMetaResponse,
    GetQuiet,
    GetReplica,
    GetResponse,
    GetWithKey,
    GetWithKeyQuiet,
    Increment,
    IncrementQuiet,
    Set,
)
from headwater.protocol.messages.session import Noop
from headwater.protocol.messages.subdocument import (
    LookupSpec,
    MultiLookup,
    MultiMutation,
    MutationSpec,
    PathFlags,
)
from headwater.protocol.messages.vbuckets import (
    OBSERVED_KEYS_MAX,
    KeyState,
    Observe,
    ObservedKey,
    ObserveResponse,
    ObserveSeqno,
)
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from support.kv_harness import WITH_COLLECTIONS, Client, Node

# --- get ----------------------------------------------------------------------------------------------------------


def test_a_document_comes_back_as_it_was_stored(client: Client) -> None:
    stored = client.succeed(Set(key=b"k", value=b'{"a":1}', flags=7))
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.flags, got.cas, got.datatype) == (b'{"a":1}', 7, stored.cas, Datatype.JSON)


def test_a_value_that_is_not_json_has_no_datatype(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{nope", datatype=Datatype.JSON))
    assert client.succeed(Get(key=b"k")).datatype == Datatype.RAW


def test_a_client_that_knows_no_json_gets_no_datatype(node: Node) -> None:
    client = node.client(features=())
    client.succeed(Set(key=b"k", value=b"{}"))
    assert client.succeed(Get(key=b"k")).datatype == Datatype.RAW


def test_a_value_may_be_empty(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b""))
    assert client.succeed(Get(key=b"k")).value == b""


def test_what_is_not_there_is_not_found(client: Client) -> None:
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT


def test_the_key_comes_back_where_it_was_asked_for(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    assert client.succeed(Get(key=b"k")).key == b""
    assert client.succeed(GetWithKey(key=b"k")).key == b"k"
    assert client.refused(GetWithKey(key=b"other")) == Status.KEY_ENOENT


def test_the_key_comes_back_with_its_collection(collections_client: Client) -> None:
    collections_client.succeed(Set(key=b"k", value=b"v", collection_id=0))
    got = collections_client.succeed(GetWithKey(key=b"k", collection_id=0))
    assert (got.collection_id, got.key) == (0, b"k")


def test_quiet_gets_say_nothing_of_misses(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    answers = client.call_all(GetQuiet(key=b"a"), GetWithKeyQuiet(key=b"b"), GetQuiet(key=b"k"), Noop(opaque=9))
    assert [(a.opcode, a.status) for a in answers] == [(Opcode.GETQ, Status.SUCCESS), (Opcode.NOOP, Status.SUCCESS)]


def test_the_value_is_shown_without_its_extended_attributes(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b'{"a":1}'))
    spec = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=PathFlags.XATTR, path=b"note", value=b'"x"')
    client.succeed(MultiMutation(key=b"k", specs=(spec,)))
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.datatype) == (b'{"a":1}', Datatype.JSON)


# --- vbuckets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [VBucketState.REPLICA, VBucketState.PENDING, VBucketState.DEAD])
def test_only_active_vbuckets_are_read_from(node: Node, client: Client, state: VBucketState) -> None:
    node.bucket.set_vbucket_state(3, state)
    assert client.refused(Get(key=b"k", vbucket=VBucketId(3))) == Status.NOT_MY_VBUCKET


def test_a_wrong_vbucket_is_answered_with_the_cluster_config(client: Client) -> None:
    response = client.call(Get(key=b"k", vbucket=VBucketId(99)))
    assert isinstance(response, ErrorResponse)
    assert (response.status, response.datatype) == (Status.NOT_MY_VBUCKET, Datatype.JSON)
    assert json.loads(response.value)["name"] == "default"


def test_a_replica_is_read_by_its_own_command(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    assert client.refused(GetReplica(key=b"k")) == Status.NOT_MY_VBUCKET
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    assert client.succeed(GetReplica(key=b"k")).value == b"v"
    assert client.refused(Get(key=b"k")) == Status.NOT_MY_VBUCKET


def test_an_expired_document_of_a_replica_is_hidden_and_left_alone(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v", expiry=10))
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    node.clock.advance(11)
    assert client.refused(GetReplica(key=b"k")) == Status.KEY_ENOENT
    assert node.bucket.vbuckets.high_seqnos[0] == 1


# --- observe ------------------------------------------------------------------------------------------------------


def observed(client: Client, *keys: ObservedKey) -> list[tuple[KeyState, int]]:
    client.send(Observe(keys=keys))
    (response,) = client.received()
    assert isinstance(response, ObserveResponse)
    assert [(found.vbucket, found.key) for found in response.documents] == [(key.vbucket, key.key) for key in keys]
    return [(found.state, found.cas) for found in response.documents]


def test_observe_says_what_is_durable(node: Node, client: Client) -> None:
    """Also while it is not: clients ask again until it is."""
    key, other = ObservedKey(vbucket=VBucketId(3), key=b"k"), ObservedKey(vbucket=VBucketId(1), key=b"other")
    writer = node.client()
    writer.send(Set(key=b"k", vbucket=VBucketId(3), value=b"1"))
    cas = node.bucket.vbuckets.max_cas[3]
    assert observed(client, key, other) == [(KeyState.NOT_PERSISTED, cas), (KeyState.NOT_FOUND, 0)]
    node.commit()
    assert observed(client, other, key) == [(KeyState.NOT_FOUND, 0), (KeyState.PERSISTED, cas)]
    node.bucket.set_vbucket_state(3, VBucketState.REPLICA)
    assert observed(client, key) == [(KeyState.PERSISTED, cas)]
    node.bucket.set_vbucket_state(3, VBucketState.ACTIVE)
    node.commit()
    writer.send(Delete(key=b"k", vbucket=VBucketId(3)))
    assert observed(client, key) == [(KeyState.LOGICALLY_DELETED, node.bucket.vbuckets.max_cas[3])]
    node.commit()
    assert observed(client, key) == [(KeyState.NOT_FOUND, 0)]


def test_observe_in_collections(node: Node) -> None:
    client = node.client(features=WITH_COLLECTIONS)
    stored = client.succeed(Set(key=b"k", collection_id=CollectionId(0), value=b"1"))
    assert observed(client, ObservedKey(vbucket=VBucketId(0), key=b"\x00k")) == [(KeyState.PERSISTED, stored.cas)]
    for key, status in ((b"\x09k", Status.UNKNOWN_COLLECTION), (b"\xff", Status.EINVAL)):
        assert client.refused(Observe(keys=(ObservedKey(vbucket=VBucketId(0), key=key),))) == status


def test_observe_refused(node: Node, client: Client) -> None:
    assert client.refused(Observe(keys=(ObservedKey(vbucket=VBucketId(99), key=b"k"),))) == Status.NOT_MY_VBUCKET
    assert client.refused(Observe(keys=())) == Status.EINVAL
    many = (ObservedKey(vbucket=VBucketId(0), key=b"k"),) * (OBSERVED_KEYS_MAX + 1)
    assert client.refused(Observe(keys=many)) == Status.EINVAL


# --- metadata -----------------------------------------------------------------------------------------------------


def test_metadata_of_a_document(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"1"))
    stored = client.succeed(Set(key=b"k", value=b"{}", flags=5, expiry=60))
    meta = client.succeed(GetMeta(key=b"k"))
    assert isinstance(meta, GetMetaResponse)
    assert (meta.deleted, meta.flags, meta.rev_seqno, meta.cas) == (0, 5, 2, stored.cas)
    assert meta.expiry == node.clock.now_s() + 60
    assert meta.document_datatype is None


def test_version_2_of_the_metadata_has_the_datatype(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{}"))
    assert client.succeed(GetMeta(key=b"k", version=1)).document_datatype is None
    assert client.succeed(GetMeta(key=b"k", version=2)).document_datatype == Datatype.JSON
    assert client.refused(GetMeta(key=b"k", version=3)) == Status.EINVAL


def test_metadata_of_a_tombstone(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{}", flags=5))
    deleted = client.succeed(Delete(key=b"k"))
    meta = client.succeed(GetMeta(key=b"k"))
    assert (meta.deleted, meta.cas, meta.rev_seqno) == (1, deleted.cas, 2)
    assert meta.expiry == node.clock.now_s()


def test_metadata_of_an_expired_document_is_that_of_its_tombstone(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{}", expiry=1))
    node.clock.advance(1)
    assert client.succeed(GetMeta(key=b"k")).deleted == 1


def test_metadata_of_nothing(client: Client) -> None:
    assert client.refused(GetMeta(key=b"k")) == Status.KEY_ENOENT
    assert client.call_all(GetMetaQuiet(key=b"k")) == []


# --- durability ---------------------------------------------------------------------------------------------------


def test_a_read_of_what_is_not_durable_waits(node: Node, client: Client) -> None:
    writer = node.client()
    writer.send(Set(key=b"k", value=b"v"))
    client.send(Get(key=b"k"))
    assert client.received() == []
    node.commit()
    (got,) = client.received()
    assert isinstance(got, GetResponse)
    assert got.value == b"v"


def test_that_a_document_is_gone_is_not_told_before_it_is_durable(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    node.client().send(Delete(key=b"k"))
    client.send(Get(key=b"k"))
    assert client.received() == []
    node.commit()
    assert [response.status for response in client.received()] == [Status.KEY_ENOENT]


def test_a_read_of_a_commit_in_flight_waits_for_that_one_only(node: Node, client: Client) -> None:
    writer = node.client()
    writer.send(Set(key=b"k", value=b"v"))
    commit = node.bucket.seal()
    assert commit is not None
    writer.send(Set(key=b"other", value=b"v"))
    client.send(Get(key=b"k"))
    assert client.received() == []
    node.bucket.persist(commit)
    node.bucket.publish(commit)
    assert [response.status for response in client.received()] == [Status.SUCCESS]


def test_with_durability_in_memory_nothing_waits(node: Node) -> None:
    node.bucket_service.ack_when_durable = False
    client = node.client()
    client.send(Set(key=b"k", value=b"v"), Get(key=b"k"))
    assert [response.status for response in client.received()] == [Status.SUCCESS, Status.SUCCESS]


# --- observe-seqno ------------------------------------------------------------------------------------------------


def vbuuid(node: Node, vbucket: int = 0) -> Vbuuid:
    facts = node.bucket.vbuckets.facts[vbucket]
    assert facts is not None
    return facts.failover_log.newest.vbuuid


def test_observe_tells_what_is_durable(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    node.client().send(Set(key=b"k", value=b"w"))
    client.send(ObserveSeqno(vbuuid=vbuuid(node)))
    (observed,) = client.received()
    assert (observed.persisted_seqno, observed.current_seqno) == (1, 1)  # type: ignore[attr-defined]
    assert observed.old_vbuuid is None  # type: ignore[attr-defined]


def test_observe_tells_an_older_branch_how_far_it_is_shared(node: Node, client: Client) -> None:
    old = vbuuid(node)
    client.succeed(Set(key=b"k", value=b"v"))
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    node.bucket.set_vbucket_state(0, VBucketState.ACTIVE)
    client.succeed(Set(key=b"k", value=b"w"))
    observed = client.succeed(ObserveSeqno(vbuuid=old))
    assert (observed.vbuuid, observed.old_vbuuid) == (vbuuid(node), old)
    assert (observed.current_seqno, observed.last_received_seqno) == (Seqno(2), Seqno(1))


def test_observe_of_an_unknown_branch_or_vbucket(node: Node, client: Client) -> None:
    assert client.refused(ObserveSeqno(vbuuid=Vbuuid(1))) == Status.KEY_ENOENT
    assert client.refused(ObserveSeqno(vbuuid=Vbuuid(1), vbucket=VBucketId(99))) == Status.NOT_MY_VBUCKET
    node.bucket.set_vbucket_state(1, VBucketState.DEAD)
    assert client.refused(ObserveSeqno(vbuuid=vbuuid(node, 1), vbucket=VBucketId(1))) == Status.NOT_MY_VBUCKET


# Counters: where they begin, where they end, and what they leave alone.


@pytest.mark.parametrize("kind", [Increment, Decrement])
def test_a_counter_begins_with_its_initial_value(node: Node, client: Client, kind: type[Increment]) -> None:
    begun = client.succeed(kind(key=b"n", delta=5, initial=40, expiry=60))
    got = client.succeed(Get(key=b"n"))
    assert (begun.count, begun.cas) == (40, got.cas)
    assert (got.value, got.flags, got.datatype) == (b"40", 0, Datatype.JSON)
    assert client.succeed(GetMeta(key=b"n")).expiry == node.clock.now_s() + 60


def test_counting(client: Client) -> None:
    client.succeed(Increment(key=b"n", initial=10))
    assert client.succeed(Increment(key=b"n", delta=5)).count == 15
    assert client.succeed(Decrement(key=b"n", delta=3)).count == 12
    assert client.succeed(Get(key=b"n")).value == b"12"


def test_down_stops_at_0_and_up_starts_again(client: Client) -> None:
    client.succeed(Set(key=b"n", value=b"3"))
    assert client.succeed(Decrement(key=b"n", delta=4)).count == 0
    client.succeed(Set(key=b"n", value=b"%d" % (2**64 - 1)))
    assert client.succeed(Increment(key=b"n", delta=2)).count == 1


def test_a_counter_keeps_flags_expiry_and_attributes(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"n", value=b"3", flags=9))
    spec = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=PathFlags.XATTR, path=b"note", value=b"1")
    client.succeed(MultiMutation(key=b"n", specs=(spec,), expiry=60))
    client.succeed(Increment(key=b"n", delta=1, expiry=5))
    got = client.succeed(Get(key=b"n"))
    assert (got.value, got.flags) == (b"4", 9)
    assert client.succeed(GetMeta(key=b"n")).expiry == node.clock.now_s() + 60
    look = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=PathFlags.XATTR, path=b"note")
    assert client.succeed(MultiLookup(key=b"n", specs=(look,))).results[0].value == b"1"


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b" 1", b"18446744073709551616", b"9" * 1000, b"\xb2"])
def test_what_is_not_a_number(client: Client, value: bytes) -> None:
    client.succeed(Set(key=b"n", value=value))
    assert client.refused(Increment(key=b"n")) == Status.DELTA_BADVAL
    assert client.succeed(Get(key=b"n")).value == value


def test_a_counter_that_must_exist(client: Client) -> None:
    assert client.refused(Increment(key=b"n", expiry=COUNTER_MUST_EXIST)) == Status.KEY_ENOENT
    client.succeed(Set(key=b"n", value=b"1"))
    assert client.succeed(Increment(key=b"n", expiry=COUNTER_MUST_EXIST)).count == 2
    assert client.succeed(GetMeta(key=b"n")).expiry == 0


def test_a_cas_must_be_that_of_the_counter(client: Client) -> None:
    assert client.refused(Increment(key=b"n", cas=Cas(1))) == Status.KEY_ENOENT
    cas = client.succeed(Set(key=b"n", value=b"1")).cas
    assert client.refused(Increment(key=b"n", cas=Cas(cas + 1))) == Status.KEY_EEXISTS
    assert client.succeed(Increment(key=b"n", cas=cas)).count == 2


def test_the_answer_tells_where_the_write_stands(client: Client) -> None:
    assert client.succeed(Increment(key=b"n")).seqno == 1
    assert client.succeed(Increment(key=b"n")).seqno == 2


def test_quiet_counters(client: Client) -> None:
    assert client.call_all(IncrementQuiet(key=b"n", initial=3), DecrementQuiet(key=b"n", delta=1)) == []
    assert client.succeed(Get(key=b"n")).value == b"2"
    assert client.refused(IncrementQuiet(key=b"m", expiry=COUNTER_MUST_EXIST)) == Status.KEY_ENOENT
