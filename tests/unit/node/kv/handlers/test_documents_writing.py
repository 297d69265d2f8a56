"""Writing whole documents: existence, CAS, expiry, datatypes, extended attributes, durability."""

from __future__ import annotations

import pytest

from headwater.kernels.compiling import part_for_python
from headwater.node.kv.documents import expiry_time
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import DurabilityLevel, FrameInfo, RequestInfo, durability, preserve_ttl
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.documents import (
    Add,
    AddQuiet,
    Append,
    AppendQuiet,
    Delete,
    DeleteQuiet,
    Get,
    GetAndTouch,
    GetAndTouchQuiet,
    GetMeta,
    Prepend,
    PrependQuiet,
    Replace,
    ReplaceQuiet,
    Set,
    SetQuiet,
    Touch,
)
from headwater.protocol.messages.subdocument import (
    DocFlags,
    LookupSpec,
    MultiLookup,
    MultiMutation,
    MutationSpec,
    PathFlags,
)
from headwater.protocol.numbers import VALUE_BYTES_MAX, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, compress
from headwater.store.set_run import _expiry
from support.cases import case, case_apart
from support.kv_harness import START_S, Client, Node

STORES = (Set, Add, Replace)
MONTH_S = 30 * 24 * 3600


def set_xattr(client: Client, key: bytes, name: bytes, value: bytes) -> None:
    spec = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=PathFlags.XATTR, path=name, value=value)
    client.succeed(MultiMutation(key=key, specs=(spec,)))


def xattr(client: Client, key: bytes, name: bytes) -> bytes:
    spec = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=PathFlags.XATTR, path=name)
    response = client.succeed(MultiLookup(key=key, specs=(spec,), doc_flags=DocFlags.ACCESS_DELETED))
    (result,) = response.results
    return bytes(result.value)


# --- existence and CAS --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*STORES, Append, Prepend])
def test_a_write_to_a_wrong_vbucket_or_collection(collections_client: Client, kind: type[Set]) -> None:
    def request(**fields: object) -> Set:
        return kind(key=b"k", value=b"1", **fields)  # type: ignore[arg-type]

    assert collections_client.refused(request(collection_id=0, vbucket=VBucketId(99))) == Status.NOT_MY_VBUCKET
    response = collections_client.call(request(collection_id=99))
    assert response.status == Status.UNKNOWN_COLLECTION
    assert response.value == b'{"manifest_uid":"0"}'  # type: ignore[attr-defined]


def test_without_the_default_collection_an_older_client_has_nowhere_to_write(node: Node, client: Client) -> None:
    node.set_manifest(Manifest().without_collection("_default", "_default"))
    assert client.refused(Set(key=b"k", value=b"v")) == Status.UNKNOWN_COLLECTION


# --- append and prepend -------------------------------------------------------------------------------------------


def test_append_and_prepend(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"2", flags=7, expiry=60))
    client.succeed(Append(key=b"k", value=b"]"))
    assert client.succeed(Get(key=b"k")).datatype == Datatype.RAW
    client.succeed(Prepend(key=b"k", value=b"[1,"))
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.flags, got.datatype) == (b"[1,2]", 7, Datatype.JSON)
    assert client.succeed(GetMeta(key=b"k")).expiry == node.clock.now_s() + 60


def test_append_of_a_compressed_value(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"a"))
    client.succeed(Append(key=b"k", value=compress(b"b" * 100), datatype=Datatype.SNAPPY))
    assert client.succeed(Get(key=b"k")).value == b"a" + b"b" * 100


# --- expiry -------------------------------------------------------------------------------------------------------


@case(0, None, 0)
@case(0, 0, 0)
@case(1, None, START_S + 1)
@case(MONTH_S, None, START_S + MONTH_S)
@case(MONTH_S + 1, None, MONTH_S + 1)
@case(START_S + 5, None, START_S + 5)
@case(0, 60, START_S + 60)
@case(30, 60, START_S + 30)
@case(90, 60, START_S + 60)
@case(START_S + 90, 60, START_S + 60)
@case(2**32 - 1, None, 2**32 - 1)
def test_the_time_of_expiry(asked: int, max_ttl_s: int | None, expected: int) -> None:
    assert expiry_time(asked, now_s=START_S, max_ttl_s=max_ttl_s) == expected
    assert part_for_python(_expiry)(asked, START_S, max_ttl_s or 0) == expected


def test_an_expired_document_is_gone_and_leaves_an_expiration(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v", expiry=10))
    node.clock.advance(9)
    client.succeed(Get(key=b"k"))
    node.clock.advance(1)
    changes = node.changes
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT
    assert node.changes == changes + 1
    assert [int(run[1]) for run in node.bucket.runs(0, after_seqno=1)] == [Opcode.DCP_EXPIRATION]
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT
    assert node.bucket.vbuckets.high_seqnos[0] == 2


def test_the_expiry_is_preserved_where_the_request_asks_for_it(node: Node, client: Client) -> None:
    preserving = (preserve_ttl(),)
    client.succeed(Set(key=b"k", value=b"1", expiry=60, frame_infos=preserving))
    until = node.clock.now_s() + 60
    assert client.succeed(GetMeta(key=b"k")).expiry == until
    client.succeed(Set(key=b"k", value=b"2", expiry=5, frame_infos=preserving))
    assert client.succeed(GetMeta(key=b"k")).expiry == until
    client.succeed(Replace(key=b"k", value=b"3", frame_infos=preserving))
    assert client.succeed(GetMeta(key=b"k")).expiry == until
    client.succeed(Replace(key=b"k", value=b"4"))
    assert client.succeed(GetMeta(key=b"k")).expiry == 0


# --- touch --------------------------------------------------------------------------------------------------------


def test_get_and_touch(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{}", flags=3, expiry=60))
    got = client.succeed(GetAndTouch(key=b"k", expiry=0))
    assert (got.value, got.flags, got.datatype) == (b"{}", 3, Datatype.JSON)
    assert client.succeed(GetMeta(key=b"k")).expiry == 0
    assert client.refused(GetAndTouch(key=b"other", expiry=1)) == Status.KEY_ENOENT
    assert client.call_all(GetAndTouchQuiet(key=b"other", expiry=1)) == []
    assert len(client.call_all(GetAndTouchQuiet(key=b"k", expiry=1))) == 1


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
def test_compressed_values_are_stored_as_they_come(client: Client, kind: type[Set]) -> None:
    value = b'{"long":"' + b"x" * 500 + b'"}'
    if kind is Replace:
        client.succeed(Set(key=b"k", value=b"1"))
    client.succeed(kind(key=b"k", value=compress(value), datatype=Datatype.SNAPPY))
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.datatype) == (compress(value), Datatype.JSON | Datatype.SNAPPY)
    touched = client.succeed(GetAndTouch(key=b"k", expiry=100))
    assert (touched.value, touched.datatype) == (got.value, got.datatype)
    inflated = client.node.client(features=(Feature.XERROR, Feature.JSON)).succeed(Get(key=b"k"))
    assert (inflated.value, inflated.datatype) == (value, Datatype.JSON)


def test_datatypes_that_are_refused(node: Node, client: Client) -> None:
    """Those that are not for plain values, or were not negotiated; and a value that is not snappy."""
    for datatype in (Datatype.XATTR, Datatype(0x08), Datatype.XATTR | Datatype.JSON):
        assert client.refused(Set(key=b"k", value=b"v", datatype=datatype)) == Status.EINVAL
    older = node.client(features=(Feature.XERROR,))
    for datatype in (Datatype.SNAPPY, Datatype.JSON):
        assert older.refused(Add(key=b"k", value=compress(b"v"), datatype=datatype)) == Status.EINVAL
    assert client.refused(Set(key=b"k", value=b"\xff" * 9, datatype=Datatype.SNAPPY)) == Status.EINVAL


@pytest.mark.parametrize("kind", STORES)
def test_a_value_that_is_too_large(client: Client, kind: type[Set]) -> None:
    large = bytes(VALUE_BYTES_MAX + 1)
    assert client.refused(kind(key=b"k", value=large)) == Status.E2BIG
    assert client.refused(kind(key=b"k", value=compress(large), datatype=Datatype.SNAPPY)) == Status.E2BIG


def test_a_value_that_grows_too_large(client: Client) -> None:
    client.succeed(Set(key=b"k", value=bytes(VALUE_BYTES_MAX)))
    assert client.refused(Append(key=b"k", value=b"1")) == Status.E2BIG
    assert len(client.succeed(Get(key=b"k")).value) == VALUE_BYTES_MAX


# --- extended attributes ------------------------------------------------------------------------------------------


@case_apart(Set(key=b"k", value=b"[2]"))
@case_apart(Replace(key=b"k", value=b"[2]"))
@case_apart(Append(key=b"k", value=b" "))
@case_apart(Prepend(key=b"k", value=b" "))
@case_apart(Touch(key=b"k", expiry=60))
def test_a_new_body_leaves_the_extended_attributes_alone(client: Client, write: Set) -> None:
    client.succeed(Set(key=b"k", value=b"[1]"))
    set_xattr(client, b"k", b"note", b'"mine"')
    client.succeed(write)
    assert xattr(client, b"k", b"note") == b'"mine"'
    got = client.succeed(Get(key=b"k"))
    assert (got.value.strip() in (b"[1]", b"[2]"), got.datatype) == (True, Datatype.JSON)


@pytest.mark.parametrize("in_order", [True, False])
def test_extended_attributes_are_left_alone_after_a_restart_too(node: Node, client: Client, in_order: bool) -> None:
    client.succeed(Set(key=b"k", value=b"[1]"))
    set_xattr(client, b"k", b"note", b'"mine"')
    node.reopen(in_order=in_order)
    client = node.client()
    client.succeed(Set(key=b"k", value=b"[2]"))
    assert xattr(client, b"k", b"note") == b'"mine"'


def test_only_the_system_s_attributes_outlive_the_document(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{}"))
    set_xattr(client, b"k", b"note", b"1")
    set_xattr(client, b"k", b"_sync", b"2")
    client.succeed(Delete(key=b"k"))
    assert xattr(client, b"k", b"_sync") == b"2"
    spec = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=PathFlags.XATTR, path=b"note")
    response = client.call(MultiLookup(key=b"k", specs=(spec,), doc_flags=DocFlags.ACCESS_DELETED))
    assert response.status == Status.SUBDOC_MULTI_PATH_FAILURE_DELETED


def test_the_system_s_attributes_outlive_an_expired_document_too(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{}"))
    set_xattr(client, b"k", b"_sync", b"2")
    set_xattr(client, b"k", b"note", b"1")
    client.succeed(Touch(key=b"k", expiry=1))
    node.clock.advance(1)
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT
    assert xattr(client, b"k", b"_sync") == b"2"
    assert client.succeed(GetMeta(key=b"k", version=2)).document_datatype == Datatype.XATTR


def test_a_document_that_comes_back_has_no_attributes(client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"{}"))
    set_xattr(client, b"k", b"_sync", b"2")
    client.succeed(Delete(key=b"k"))
    client.succeed(Add(key=b"k", value=b"{}"))
    assert client.succeed(GetMeta(key=b"k", version=2)).document_datatype == Datatype.JSON


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_write_tells_where_it_stands_in_history(node: Node, client: Client) -> None:
    facts = node.bucket.vbuckets.facts[0]
    vbuuid = facts.failover_log.newest.vbuuid
    for seqno, request in enumerate(
        [
            Set(key=b"k", value=b"1"),
            Replace(key=b"k", value=b"1"),
            Append(key=b"k", value=b"1"),
            Delete(key=b"k"),
            Add(key=b"k", value=b"1"),
        ],
        start=1,
    ):
        response = client.succeed(request)
        assert (response.vbuuid, response.seqno) == (vbuuid, seqno)


def test_a_client_that_did_not_ask_is_not_told(node: Node) -> None:
    client = node.client(features=(Feature.XERROR,))
    assert client.succeed(Add(key=b"k", value=b"1")).vbuuid is None


QUIET = [
    SetQuiet(key=b"k", value=b"1"),
    ReplaceQuiet(key=b"k", value=b"2"),
    AppendQuiet(key=b"k", value=b"3"),
    PrependQuiet(key=b"k", value=b"0"),
    DeleteQuiet(key=b"k"),
    AddQuiet(key=b"k", value=b"1"),
]


def test_quiet_writes_answer_only_where_they_fail(client: Client) -> None:
    assert client.call_all(*QUIET) == []
    assert client.succeed(Get(key=b"k")).value == b"1"
    failing = [ReplaceQuiet(key=b"a", value=b"1"), DeleteQuiet(key=b"a"), AppendQuiet(key=b"a", value=b"1")]
    statuses = [response.status for response in client.call_all(*failing)]
    assert statuses == [Status.KEY_ENOENT, Status.KEY_ENOENT, Status.NOT_STORED]


# --- durability ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", list(DurabilityLevel))
def test_a_durable_write_waits_for_its_commit(node: Node, level: DurabilityLevel) -> None:
    node.bucket_service.ack_when_durable = False
    client = node.client()
    client.send(Set(key=b"k", value=b"v", frame_infos=(durability(level, timeout_ms=1000),)))
    assert client.received() == []
    node.commit()
    assert [response.status for response in client.received()] == [Status.SUCCESS]


@case_apart(b"\x00", Status.DURABILITY_INVALID_LEVEL)
@case_apart(b"\x04", Status.DURABILITY_INVALID_LEVEL)
@case_apart(b"\xff", Status.DURABILITY_INVALID_LEVEL)
@case_apart(b"\1\0", Status.EINVAL)
def test_durabilities_that_are_refused(client: Client, data: bytes, status: Status) -> None:
    info = FrameInfo(RequestInfo.DURABILITY, data)
    assert client.refused(Delete(key=b"k", frame_infos=(info,))) == Status.KEY_ENOENT
    assert client.refused(Set(key=b"k", value=b"v", frame_infos=(info,))) == status
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT


def test_every_write_is_announced_for_commit(node: Node, client: Client) -> None:
    for request in (Set(key=b"k", value=b"1"), Append(key=b"k", value=b"1"), Touch(key=b"k", expiry=9)):
        changes = node.changes
        client.succeed(request)
        assert node.changes == changes + 1
