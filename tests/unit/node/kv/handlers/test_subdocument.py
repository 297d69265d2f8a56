"""Sub-document commands as a client sees them: the engine has its own tests, these are about what surrounds it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.protocol.features import Opcode
from headwater.protocol.frames import DurabilityLevel, durability, preserve_ttl
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Delete, Get, GetMeta, Set
from headwater.protocol.messages.subdocument import (
    DocFlags,
    LookupSpec,
    MultiLookup,
    MultiMutation,
    MutationSpec,
    PathFlags,
    SubdocArrayAddUnique,
    SubdocArrayInsert,
    SubdocArrayPushFirst,
    SubdocArrayPushLast,
    SubdocCounter,
    SubdocDelete,
    SubdocDictAdd,
    SubdocDictUpsert,
    SubdocExists,
    SubdocGet,
    SubdocGetCount,
    SubdocReplace,
)
from headwater.protocol.numbers import Cas, CollectionId, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from support.cases import case_apart
from support.kv_harness import Client, Node

DOCUMENT = b'{"a":1,"l":[1,2],"n":5}'
UPSERT_A = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, path=b"a", value=b"2")
GET_A = LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"a")
XATTR = PathFlags.XATTR


@pytest.fixture
def stored(client: Client) -> Any:
    return client.succeed(Set(key=b"k", value=DOCUMENT, flags=7, expiry=60))


def body(client: Client) -> Any:
    return json.loads(client.succeed(Get(key=b"k")).value)


# --- one path -----------------------------------------------------------------------------------------------------


@case_apart(SubdocGet(key=b"k", path=b"l"), b"[1,2]")
@case_apart(SubdocExists(key=b"k", path=b"a"), b"")
@case_apart(SubdocGetCount(key=b"k", path=b"l"), b"2")
def test_looking_up_one_path(client: Client, stored: Any, request_: Request, value: bytes) -> None:
    response = client.succeed(request_)
    assert (response.value, response.cas) == (value, stored.cas)


@case_apart(SubdocDictAdd(key=b"k", path=b"b", new_value=b"2"), {"b": 2})
@case_apart(SubdocDictUpsert(key=b"k", path=b"a", new_value=b"2"), {"a": 2})
@case_apart(SubdocReplace(key=b"k", path=b"a", new_value=b"[]"), {"a": []})
@case_apart(SubdocArrayPushLast(key=b"k", path=b"l", new_value=b"3"), {"l": [1, 2, 3]})
@case_apart(SubdocArrayPushFirst(key=b"k", path=b"l", new_value=b"0"), {"l": [0, 1, 2]})
@case_apart(SubdocArrayInsert(key=b"k", path=b"l[1]", new_value=b"9"), {"l": [1, 9, 2]})
@case_apart(SubdocArrayAddUnique(key=b"k", path=b"l", new_value=b"3"), {"l": [1, 2, 3]})
def test_changing_one_path(client: Client, stored: Any, request_: Request, expected: dict[str, Any]) -> None:
    response = client.succeed(request_)
    assert body(client) == {**json.loads(DOCUMENT), **expected}
    got = client.succeed(Get(key=b"k"))
    assert (got.cas, got.flags, response.seqno, response.value) == (response.cas, 7, 2, b"")


def test_deleting_and_counting_one_path(client: Client, stored: Any) -> None:
    client.succeed(SubdocDelete(key=b"k", path=b"a"))
    assert "a" not in body(client)
    assert client.succeed(SubdocCounter(key=b"k", path=b"n", new_value=b"-2")).value == b"3"
    assert body(client)["n"] == 3


@case_apart(SubdocGet(key=b"k", path=b"none"), Status.SUBDOC_PATH_ENOENT)
@case_apart(SubdocGet(key=b"other", path=b"a"), Status.KEY_ENOENT)
@case_apart(SubdocGet(key=b"k", path=b"a["), Status.SUBDOC_PATH_EINVAL)
@case_apart(SubdocGet(key=b"k", path=b"a", new_value=b"1"), Status.EINVAL)
@case_apart(SubdocExists(key=b"k", path=b"a", expiry=5), Status.EINVAL)
@case_apart(SubdocGet(key=b"k", path=b"a", doc_flags=DocFlags.MKDOC), Status.EINVAL)
@case_apart(SubdocDictAdd(key=b"k", path=b"a", new_value=b"2"), Status.SUBDOC_PATH_EEXISTS)
@case_apart(SubdocDictUpsert(key=b"k", path=b"a", new_value=b"nope"), Status.SUBDOC_VALUE_CANTINSERT)
@case_apart(SubdocDictUpsert(key=b"other", path=b"a", new_value=b"1"), Status.KEY_ENOENT)
@case_apart(SubdocDictUpsert(key=b"k", path=b"a", new_value=b"1", datatype=Datatype.SNAPPY), Status.EINVAL)
@case_apart(SubdocGet(key=b"k", path=b"a", vbucket=VBucketId(99)), Status.NOT_MY_VBUCKET)
@case_apart(SubdocDelete(key=b"k", path=b"a", vbucket=VBucketId(99)), Status.NOT_MY_VBUCKET)
def test_one_path_refused(client: Client, stored: Any, request_: Request, status: Status) -> None:
    assert client.refused(request_) == status
    assert body(client) == json.loads(DOCUMENT)


# --- many paths ---------------------------------------------------------------------------------------------------


def test_looking_up_many_paths(client: Client, stored: Any) -> None:
    missing = LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"none")
    response = client.call(MultiLookup(key=b"k", specs=(GET_A, missing)))
    assert (response.status, response.cas) == (Status.SUBDOC_MULTI_PATH_FAILURE, stored.cas)
    statuses = [result.status for result in response.results]
    assert statuses == [Status.SUCCESS, Status.SUBDOC_PATH_ENOENT]
    assert client.succeed(MultiLookup(key=b"k", specs=(GET_A,))).status == Status.SUCCESS
    assert client.refused(MultiLookup(key=b"other", specs=(GET_A,))) == Status.KEY_ENOENT


def test_changing_many_paths_at_once(client: Client, stored: Any) -> None:
    count = MutationSpec(opcode=Opcode.SUBDOC_COUNTER, path=b"n", value=b"1")
    response = client.succeed(MultiMutation(key=b"k", specs=(UPSERT_A, count)))
    assert [(result.index, result.value) for result in response.results] == [(1, b"6")]
    assert (response.seqno, client.succeed(Get(key=b"k")).cas) == (2, response.cas)
    assert (body(client)["a"], body(client)["n"]) == (2, 6)


def test_all_paths_or_none(node: Node, client: Client, stored: Any) -> None:
    failing = MutationSpec(opcode=Opcode.SUBDOC_DICT_ADD, path=b"l", value=b"1")
    response = client.call(MultiMutation(key=b"k", specs=(UPSERT_A, failing)))
    assert response.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert response.results[0].index == 1
    assert response.vbuuid is None
    assert body(client) == json.loads(DOCUMENT)
    assert node.bucket.vbuckets.high_seqnos[0] == 1


def test_a_request_without_sense_is_told_why(client: Client, stored: Any) -> None:
    response = client.call(MultiMutation(key=b"k", specs=()))
    assert (response.status, bool(response.context)) == (Status.SUBDOC_INVALID_COMBO, True)


# --- CAS ----------------------------------------------------------------------------------------------------------


def test_a_cas_must_be_that_of_the_document(client: Client, stored: Any) -> None:
    wrong = Cas(stored.cas + 1)
    assert client.refused(MultiMutation(key=b"k", specs=(UPSERT_A,), cas=wrong)) == Status.KEY_EEXISTS
    assert client.refused(SubdocDelete(key=b"k", path=b"a", cas=wrong)) == Status.KEY_EEXISTS
    client.succeed(MultiMutation(key=b"k", specs=(UPSERT_A,), cas=stored.cas))


@pytest.mark.parametrize(
    ("doc_flags", "status"),
    [(None, Status.KEY_ENOENT), (DocFlags.MKDOC, Status.KEY_ENOENT), (DocFlags.ADD, Status.EINVAL)],
)
def test_a_cas_needs_a_document(client: Client, doc_flags: DocFlags | None, status: Status) -> None:
    request = MultiMutation(key=b"k", specs=(UPSERT_A,), cas=Cas(1), doc_flags=doc_flags)
    assert client.refused(request) == status


# --- making documents ---------------------------------------------------------------------------------------------


def test_a_document_is_made_where_the_request_asks_for_it(client: Client) -> None:
    assert client.refused(MultiMutation(key=b"k", specs=(UPSERT_A,))) == Status.KEY_ENOENT
    client.succeed(MultiMutation(key=b"k", specs=(UPSERT_A,), doc_flags=DocFlags.MKDOC))
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.flags, got.datatype) == (b'{"a":2}', 0, Datatype.JSON)
    client.succeed(SubdocArrayPushLast(key=b"l", path=b"", new_value=b"1", doc_flags=DocFlags.MKDOC))
    assert client.succeed(Get(key=b"l")).value == b"[1]"


def test_add_makes_a_document_only_where_there_is_none(client: Client) -> None:
    request = MultiMutation(key=b"k", specs=(UPSERT_A,), doc_flags=DocFlags.ADD)
    client.succeed(request)
    assert client.refused(request) == Status.KEY_EEXISTS
    client.succeed(Delete(key=b"k"))
    client.succeed(request)


def test_a_whole_body_can_be_set_and_deleted(client: Client) -> None:
    whole = MutationSpec(opcode=Opcode.SET, value=b"text")
    note = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=XATTR, path=b"note", value=b"1")
    client.succeed(MultiMutation(key=b"k", specs=(note, whole), doc_flags=DocFlags.MKDOC))
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.datatype) == (b"text", Datatype.RAW)
    client.succeed(MultiMutation(key=b"k", specs=(MutationSpec(opcode=Opcode.DELETE),)))
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT


# --- expiry -------------------------------------------------------------------------------------------------------


def test_expiry(node: Node, client: Client, stored: Any) -> None:
    client.succeed(MultiMutation(key=b"k", specs=(UPSERT_A,), frame_infos=(preserve_ttl(),)))
    assert client.succeed(GetMeta(key=b"k")).expiry == node.clock.now_s() + 60
    client.succeed(MultiMutation(key=b"k", specs=(UPSERT_A,), expiry=30))
    assert client.succeed(GetMeta(key=b"k")).expiry == node.clock.now_s() + 30
    client.succeed(SubdocDictUpsert(key=b"k", path=b"a", new_value=b"3", expiry=10))
    assert client.succeed(GetMeta(key=b"k")).expiry == node.clock.now_s() + 10
    client.succeed(SubdocDictUpsert(key=b"k", path=b"a", new_value=b"3"))
    assert client.succeed(GetMeta(key=b"k")).expiry == 0


def test_a_collection_bounds_the_lives_of_its_documents(node: Node, collections_client: Client) -> None:
    node.set_manifest(Manifest().with_collection("_default", "short", max_ttl_s=60))
    short = CollectionId(8)
    request = MultiMutation(key=b"k", specs=(UPSERT_A,), doc_flags=DocFlags.MKDOC, collection_id=short)
    collections_client.succeed(request)
    assert collections_client.succeed(GetMeta(key=b"k", collection_id=short)).expiry == node.clock.now_s() + 60


def test_an_expired_document_is_missing(node: Node, client: Client, stored: Any) -> None:
    node.clock.advance(60)
    assert client.refused(MultiLookup(key=b"k", specs=(GET_A,))) == Status.KEY_ENOENT
    assert client.refused(MultiMutation(key=b"k", specs=(UPSERT_A,))) == Status.KEY_ENOENT
    client.succeed(MultiMutation(key=b"k", specs=(UPSERT_A,), doc_flags=DocFlags.ADD))


# --- extended attributes ------------------------------------------------------------------------------------------


def test_facts_about_the_document_can_be_looked_up(node: Node, client: Client, stored: Any) -> None:
    spec = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=XATTR, path=b"$document")
    (result,) = client.succeed(MultiLookup(key=b"k", specs=(spec,))).results
    facts = json.loads(result.value)
    assert facts["CAS"] == f"0x{stored.cas:016x}"
    assert facts["exptime"] == node.clock.now_s() + 60
    assert (facts["flags"], facts["revid"], facts["seqno"]) == (7, "1", "0x0000000000000001")
    assert facts["vbucket_uuid"] == f"0x{stored.vbuuid:016x}"
    assert facts["last_modified"] == str(node.clock.now_s())
    clock = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=XATTR, path=b"$vbucket.HLC.now")
    (result,) = client.succeed(MultiLookup(key=b"k", specs=(clock,))).results
    assert json.loads(result.value) == str(node.clock.now_s())


@case_apart(b'"${Mutation.CAS}"', lambda written: "0x" + written.cas.to_bytes(8, "little").hex())
@case_apart(b'"${Mutation.seqno}"', lambda written: f"0x{written.seqno:016x}")
def test_macros_describe_their_own_write(node: Node, client: Client, stored: Any, macro: bytes, expected: Any) -> None:
    flags = XATTR | PathFlags.EXPAND_MACROS
    spec = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=flags, path=b"_at", value=macro)
    node.clock.advance(1)
    written = client.succeed(MultiMutation(key=b"k", specs=(spec,)))
    look = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=XATTR, path=b"_at")
    (result,) = client.succeed(MultiLookup(key=b"k", specs=(look,))).results
    assert json.loads(result.value) == expected(written)


# --- tombstones ---------------------------------------------------------------------------------------------------

SYNC = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=XATTR, path=b"_sync", value=b"1")
GET_SYNC = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=XATTR, path=b"_sync")
ACCESS_DELETED = DocFlags.ACCESS_DELETED


@pytest.fixture
def tombstone(client: Client, stored: Any) -> Any:
    """The deletion of `k`, which leaves the attribute `_sync` behind."""
    client.succeed(MultiMutation(key=b"k", specs=(SYNC,)))
    return client.succeed(Delete(key=b"k"))


def test_what_is_left_of_a_deleted_document_can_be_looked_up(client: Client, tombstone: Any) -> None:
    assert client.refused(MultiLookup(key=b"k", specs=(GET_SYNC,))) == Status.KEY_ENOENT
    response = client.succeed(MultiLookup(key=b"k", specs=(GET_SYNC,), doc_flags=ACCESS_DELETED))
    assert (response.status, response.cas) == (Status.SUBDOC_SUCCESS_DELETED, tombstone.cas)
    single = client.succeed(SubdocGet(key=b"k", path=b"_sync", flags=XATTR, doc_flags=ACCESS_DELETED))
    assert (single.status, single.value) == (Status.SUBDOC_SUCCESS_DELETED, b"1")


def test_what_is_left_of_a_deleted_document_can_be_changed(node: Node, client: Client, tombstone: Any) -> None:
    two = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=XATTR, path=b"_sync", value=b"2")
    wrong = MultiMutation(key=b"k", specs=(two,), doc_flags=ACCESS_DELETED, cas=Cas(1))
    assert client.refused(wrong) == Status.KEY_EEXISTS
    response = client.succeed(MultiMutation(key=b"k", specs=(two,), doc_flags=ACCESS_DELETED, cas=tombstone.cas))
    assert response.status == Status.SUBDOC_SUCCESS_DELETED
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT
    looked_up = client.succeed(MultiLookup(key=b"k", specs=(GET_SYNC,), doc_flags=ACCESS_DELETED))
    assert looked_up.results[0].value == b"2"
    (run,) = node.bucket.runs(0, after_seqno=3)
    assert int(run[1]) == Opcode.DCP_DELETION


def test_a_document_can_be_made_as_a_tombstone(client: Client) -> None:
    flags = DocFlags.MKDOC | DocFlags.CREATE_AS_DELETED | ACCESS_DELETED
    response = client.succeed(MultiMutation(key=b"k", specs=(SYNC,), doc_flags=flags))
    assert response.status == Status.SUBDOC_SUCCESS_DELETED
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT
    assert client.succeed(GetMeta(key=b"k")).deleted == 1


def test_a_deleted_document_can_be_revived(client: Client, tombstone: Any) -> None:
    flags = ACCESS_DELETED | DocFlags.REVIVE_DOCUMENT
    whole = MutationSpec(opcode=Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR, flags=XATTR, path=b"_sync")
    response = client.succeed(MultiMutation(key=b"k", specs=(whole,), doc_flags=flags))
    assert response.status == Status.SUCCESS
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.flags) == (b"1", 0)


# --- where and when -----------------------------------------------------------------------------------------------


def test_a_replica_is_read_where_the_request_asks_for_it(node: Node, client: Client, stored: Any) -> None:
    request = MultiLookup(key=b"k", specs=(GET_A,), doc_flags=DocFlags.REPLICA_READ)
    assert client.refused(request) == Status.NOT_MY_VBUCKET
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    assert client.succeed(request).results[0].value == b"1"


def test_answers_wait_until_they_are_durable(node: Node, client: Client, stored: Any) -> None:
    reader = node.client()
    client.send(MultiMutation(key=b"k", specs=(UPSERT_A,)))
    client.send(SubdocDictUpsert(key=b"k", path=b"a", new_value=b"3"))
    reader.send(SubdocGet(key=b"k", path=b"a"))
    assert (client.received(), reader.received()) == ([], [])
    node.commit()
    assert len(client.received()) == 2
    assert reader.received()[0].value == b"3"


def test_a_durable_mutation_waits_for_its_commit(node: Node, client: Client, stored: Any) -> None:
    node.bucket_service.ack_when_durable = False
    info = durability(DurabilityLevel.MAJORITY)
    client.send(MultiMutation(key=b"k", specs=(UPSERT_A,), frame_infos=(info,)))
    assert client.received() == []
