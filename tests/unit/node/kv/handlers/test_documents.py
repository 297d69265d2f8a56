"""Reading: documents and their metadata, and what is held back until it is durable."""

from __future__ import annotations

import json

import pytest

from headwater.node.kv import documents
from headwater.node.kv.documents import LOCK_S_DEFAULT, LOCK_S_MAX, LOCKED_CAS
from headwater.protocol.features import Feature, Magic, Opcode
from headwater.protocol.frames import Frame
from headwater.protocol.messages import subdocument
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import (
    COUNTER_MUST_EXIST,
    Add,
    Append,
    DecrementQuiet,
    Delete,
    Get,
    GetAndTouch,
    GetLocked,
    GetMeta,
    GetMetaQuiet,
    GetQuiet,
    GetReplica,
    GetWithKey,
    GetWithKeyQuiet,
    Increment,
    IncrementQuiet,
    Replace,
    Set,
    SetQuiet,
    Touch,
    Unlock,
)
from headwater.protocol.messages.session import Noop
from headwater.protocol.messages.subdocument import LookupSpec, MultiLookup, MultiMutation, MutationSpec, PathFlags
from headwater.protocol.messages.vbuckets import (
    OBSERVED_KEYS_MAX,
    DeleteVBucket,
    KeyState,
    Observe,
    ObservedKey,
    ObserveSeqno,
    SetVBucket,
)
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from support.kv_harness import WITH_COLLECTIONS, Client, Node

# --- get ----------------------------------------------------------------------------------------------------------


def test_the_datatype_says_what_the_value_is_to_clients_that_know_json(node: Node, client: Client) -> None:
    for value, datatype in ((b'{"a":1}', Datatype.JSON), (b"{nope", Datatype.RAW)):
        stored = client.succeed(Set(key=b"k", value=value, flags=7, datatype=Datatype.JSON))
        got = client.succeed(Get(key=b"k"))
        assert (got.value, got.flags, got.cas, got.datatype) == (value, 7, stored.cas, datatype)
    client.succeed(Set(key=b"k", value=b"{}"))
    assert node.client(features=()).succeed(Get(key=b"k")).datatype == Datatype.RAW


def test_the_key_comes_back_where_it_was_asked_for(client: Client, collections_client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    assert client.succeed(Get(key=b"k")).key == b""
    assert client.succeed(GetWithKey(key=b"k")).key == b"k"
    assert client.refused(GetWithKey(key=b"other")) == Status.KEY_ENOENT
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
    key = ObservedKey(vbucket=VBucketId(0), key=b"k").encode()
    for count in (0, OBSERVED_KEYS_MAX + 1):
        request = Frame(magic=Magic.REQUEST, opcode=Opcode.OBSERVE, value=key * count)
        assert client.refused(request.encode()) == Status.EINVAL


# --- metadata -----------------------------------------------------------------------------------------------------


def test_metadata_of_a_document_and_of_its_tombstone(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"1"))
    stored = client.succeed(Set(key=b"k", value=b"{}", flags=5, expiry=60))
    meta = client.succeed(GetMeta(key=b"k"))
    assert (meta.deleted, meta.flags, meta.rev_seqno, meta.cas) == (0, 5, 2, stored.cas)
    assert meta.expiry == node.clock.now_s() + 60
    for version, datatype in ((None, None), (1, None), (2, Datatype.JSON)):
        assert client.succeed(GetMeta(key=b"k", version=version)).document_datatype == datatype
    assert client.refused(GetMeta(key=b"k", version=3)) == Status.EINVAL
    deleted = client.succeed(Delete(key=b"k"))
    meta = client.succeed(GetMeta(key=b"k"))
    assert (meta.deleted, meta.cas, meta.rev_seqno, meta.expiry) == (1, deleted.cas, 3, node.clock.now_s())
    client.succeed(Set(key=b"k", value=b"{}", expiry=1))
    node.clock.advance(1)
    assert client.succeed(GetMeta(key=b"k")).deleted == 1
    assert client.call_all(GetMetaQuiet(key=b"none")) == []


# --- durability ---------------------------------------------------------------------------------------------------


def test_a_read_of_what_is_not_durable_waits(node: Node, client: Client) -> None:
    """Be it a document, or that there is none any more."""
    writer = node.client()
    for write, status in ((Set(key=b"k", value=b"v"), Status.SUCCESS), (Delete(key=b"k"), Status.KEY_ENOENT)):
        writer.send(write)
        client.send(Get(key=b"k"))
        assert client.received() == []
        node.commit()
        assert [response.status for response in client.received()] == [status]


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
    return facts.failover_log.newest.vbuuid


def test_observe_seqno_has_what_is_durable_and_how_far_an_older_branch_is_shared(node: Node, client: Client) -> None:
    old = vbuuid(node)
    client.succeed(Set(key=b"k", value=b"v"))
    node.client().send(Set(key=b"k", value=b"w"))
    client.send(ObserveSeqno(vbuuid=old))
    (observed,) = client.received()
    assert (observed.persisted_seqno, observed.current_seqno) == (1, 1)
    assert observed.old_vbuuid is None
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    node.bucket.set_vbucket_state(0, VBucketState.ACTIVE)
    client.succeed(Set(key=b"k", value=b"x"))
    later = client.succeed(ObserveSeqno(vbuuid=old))
    assert (later.vbuuid, later.old_vbuuid) == (vbuuid(node), old)
    assert (later.current_seqno, later.last_received_seqno) == (Seqno(3), Seqno(2))


def test_observe_of_an_unknown_branch_or_vbucket(node: Node, client: Client) -> None:
    assert client.refused(ObserveSeqno(vbuuid=Vbuuid(1))) == Status.KEY_ENOENT
    assert client.refused(ObserveSeqno(vbuuid=Vbuuid(1), vbucket=VBucketId(99))) == Status.NOT_MY_VBUCKET
    node.bucket.set_vbucket_state(1, VBucketState.DEAD)
    assert client.refused(ObserveSeqno(vbuuid=vbuuid(node, 1), vbucket=VBucketId(1))) == Status.NOT_MY_VBUCKET


# Counters: where they begin, where they end, and what they leave alone.


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


def test_a_cas_must_be_that_of_the_counter(client: Client) -> None:
    assert client.refused(Increment(key=b"n", cas=Cas(1))) == Status.KEY_ENOENT
    cas = client.succeed(Set(key=b"n", value=b"1")).cas
    assert client.refused(Increment(key=b"n", cas=Cas(cas + 1))) == Status.KEY_EEXISTS
    assert client.succeed(Increment(key=b"n", cas=cas)).count == 2


def test_quiet_counters(client: Client) -> None:
    assert client.call_all(IncrementQuiet(key=b"n", initial=3), DecrementQuiet(key=b"n", delta=1)) == []
    assert client.succeed(Get(key=b"n")).value == b"2"
    assert client.refused(IncrementQuiet(key=b"m", expiry=COUNTER_MUST_EXIST)) == Status.KEY_ENOENT


# --- locks: who may write, what others see, and how a lock ends -----------------------------------------------------


UPSERT = subdocument.MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, path=b"a", value=b"1")

WRITES: list[Request] = [
    Set(key=b"k", value=b"w"), Replace(key=b"k", value=b"w"), Delete(key=b"k"), Append(key=b"k", value=b"w"),
    Touch(key=b"k", expiry=5), GetAndTouch(key=b"k", expiry=5), Increment(key=b"k"),
    subdocument.SubdocDictUpsert(key=b"k", path=b"a", new_value=b"1"),
    subdocument.MultiMutation(key=b"k", specs=(UPSERT,)),
    subdocument.MultiMutation(key=b"k", specs=(UPSERT,), doc_flags=subdocument.DocFlags.MKDOC),
]  # fmt: skip


@pytest.fixture
def cas(client: Client) -> Cas:
    """The CAS of the lock on the document `k`."""
    client.succeed(Set(key=b"k", value=b"{}", flags=3))
    cas: Cas = client.succeed(GetLocked(key=b"k")).cas
    return cas


@pytest.mark.parametrize("write", WRITES, ids=lambda write: type(write).__name__)
@pytest.mark.parametrize("other", [Cas(0), Cas(1), LOCKED_CAS])
def test_others_can_t_write(client: Client, cas: Cas, write: Request, other: Cas) -> None:
    assert client.refused(type(write)(**fields(write), cas=other)) == Status.LOCKED
    assert client.succeed(Get(key=b"k")).value == b"{}"


@pytest.mark.parametrize("write", [w for w in WRITES if not isinstance(w, Increment)], ids=lambda w: type(w).__name__)
def test_who_has_the_lock_writes_and_lets_go_of_it(client: Client, cas: Cas, write: Request) -> None:
    client.succeed(type(write)(**fields(write), cas=cas))
    client.succeed(Set(key=b"k", value=b"anybody"))


def fields(write: Request) -> dict[str, object]:
    names = ("key", "value", "expiry", "path", "new_value", "specs", "doc_flags")
    return {name: getattr(write, name) for name in names if hasattr(write, name)}


def test_add_finds_the_document_first(client: Client, cas: Cas) -> None:
    assert client.refused(Add(key=b"k", value=b"w")) == Status.KEY_EEXISTS
    added = subdocument.MultiMutation(key=b"k", specs=(UPSERT,), doc_flags=subdocument.DocFlags.ADD)
    assert client.refused(added) == Status.KEY_EEXISTS


def test_others_see_a_cas_that_is_good_for_nothing(client: Client, cas: Cas) -> None:
    look = subdocument.LookupSpec(opcode=Opcode.SUBDOC_GET_COUNT, path=b"")
    for request in (Get(key=b"k"), GetMeta(key=b"k"), subdocument.MultiLookup(key=b"k", specs=(look,))):
        assert client.succeed(request).cas == LOCKED_CAS


def test_unlock_restores_what_was(client: Client) -> None:
    stored = client.succeed(Set(key=b"k", value=b"{}"))
    cas = client.succeed(GetLocked(key=b"k")).cas
    assert client.refused(Unlock(key=b"k", cas=Cas(cas + 1))) == Status.LOCKED
    assert client.refused(Unlock(key=b"k")) == Status.EINVAL
    client.succeed(Unlock(key=b"k", cas=cas))
    assert client.succeed(Get(key=b"k")).cas == stored.cas
    client.succeed(Set(key=b"k", value=b"w"))


@pytest.mark.parametrize(
    ("asked_s", "lasts_s"),
    [(None, LOCK_S_DEFAULT), (0, LOCK_S_DEFAULT), (1, 1), (LOCK_S_MAX, LOCK_S_MAX), (LOCK_S_MAX + 1, LOCK_S_DEFAULT)],
)
def test_a_lock_runs_out(node: Node, client: Client, asked_s: int | None, lasts_s: int) -> None:
    stored = client.succeed(Set(key=b"k", value=b"{}"))
    cas = client.succeed(GetLocked(key=b"k", lock_time_s=asked_s)).cas
    node.clock.advance(lasts_s - 0.001)
    assert client.refused(Set(key=b"k", value=b"w")) == Status.LOCKED
    node.clock.advance(0.001)
    assert client.refused(Unlock(key=b"k", cas=cas)) == Status.NOT_LOCKED
    assert client.succeed(Get(key=b"k")).cas == stored.cas
    client.succeed(Set(key=b"k", value=b"w", cas=stored.cas))
    assert node.bucket_service.locks == {}


def test_to_a_client_without_extended_errors(node: Node, client: Client, cas: Cas) -> None:
    older = node.client(features=(Feature.SELECT_BUCKET,))
    assert older.refused(Set(key=b"k", value=b"w")) == Status.KEY_EEXISTS
    assert older.refused(GetLocked(key=b"k")) == Status.ETMPFAIL
    assert older.refused(Unlock(key=b"k", cas=Cas(1))) == Status.ETMPFAIL
    client.succeed(Unlock(key=b"k", cas=cas))
    assert older.refused(Unlock(key=b"k", cas=cas)) == Status.ETMPFAIL


def test_the_lock_of_a_former_document_is_not_that_of_its_successor(node: Node, client: Client) -> None:
    """A run of sets replaces a tombstone without a look at the locks."""
    client.succeed(Set(key=b"k", value=b"{}", expiry=2))
    client.succeed(GetLocked(key=b"k"))
    node.clock.advance(2)
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT
    client.call_all(SetQuiet(key=b"k", value=b"1"))
    client.succeed(Replace(key=b"k", value=b"2"))


def test_locks_go_with_their_vbucket(node: Node, client: Client, cas: Cas) -> None:
    client.succeed(DeleteVBucket())
    assert node.bucket_service.locks == {}
    client.succeed(SetVBucket(state=VBucketState.ACTIVE))
    client.succeed(Set(key=b"k", value=b"w"))


def test_locks_are_bounded(node: Node, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LOCKS_MAX", 2)
    for key in (b"a", b"b", b"c"):
        client.succeed(Set(key=key, value=b"{}"))
    client.succeed(GetLocked(key=b"a", lock_time_s=1))
    client.succeed(GetLocked(key=b"b", lock_time_s=10))
    assert client.refused(GetLocked(key=b"c")) == Status.ETMPFAIL
    node.clock.advance(1)
    client.succeed(GetLocked(key=b"c"))
    client.succeed(Set(key=b"a", value=b"w"))
    assert client.refused(Set(key=b"b", value=b"w")) == Status.LOCKED
