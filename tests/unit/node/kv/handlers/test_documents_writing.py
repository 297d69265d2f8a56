"""Writing whole documents: existence, CAS, expiry, datatypes, extended attributes, durability."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.kernels.compiling import part_for_python
from headwater.node.kv.documents import expiry_time
from headwater.node.options import BucketSettings
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import DurabilityLevel, FrameInfo, RequestInfo, decode_frames, durability, preserve_ttl
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import (
    Add,
    AddQuiet,
    AddWithMeta,
    AddWithMetaQuiet,
    Append,
    AppendQuiet,
    Delete,
    DeleteQuiet,
    DeleteWithMeta,
    DeleteWithMetaQuiet,
    Get,
    GetAndTouch,
    GetAndTouchQuiet,
    GetLocked,
    GetMeta,
    MetaOptions,
    Prepend,
    PrependQuiet,
    Replace,
    ReplaceQuiet,
    Set,
    SetQuiet,
    SetWithMeta,
    SetWithMetaQuiet,
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
from headwater.protocol.numbers import VALUE_BYTES_MAX, Cas, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs
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
        return kind(key=b"k", value=b"1", **fields)

    assert collections_client.refused(request(collection_id=0, vbucket=VBucketId(99))) == Status.NOT_MY_VBUCKET
    response = collections_client.call(request(collection_id=99))
    assert response.status == Status.UNKNOWN_COLLECTION
    assert response.value == b'{"manifest_uid":"0"}'


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
    SetQuiet(key=b"k", value=b"1"), ReplaceQuiet(key=b"k", value=b"2"), AppendQuiet(key=b"k", value=b"3"),
    PrependQuiet(key=b"k", value=b"0"), DeleteQuiet(key=b"k"), AddQuiet(key=b"k", value=b"1"),
]  # fmt: skip


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


# --- writes with metadata: what is kept of it, which version wins, and what is refused ------------------------------


CAS = START_S * 1_000_000_000
"""The time on the clock that stands still."""
EXPIRY = START_S + 60
ATTRIBUTES = encode_xattrs(ValueParts({"_sync": b"1", "user": b"2"}, b""))
SKIP = MetaOptions.SKIP_CONFLICT_RESOLUTION


def version(**fields: Any) -> dict[str, Any]:
    """Metadata that a write brings along; a key beside it."""
    return {"key": b"k", "rev_seqno": 7, "meta_cas": Cas(CAS + 7), **fields}


def meta(client: Client) -> tuple[int, int, int, int, int]:
    """Whether it is deleted, revision, CAS, expiry or the time it was deleted, flags."""
    found = client.succeed(GetMeta(key=b"k"))
    return found.deleted, found.rev_seqno, found.cas, found.expiry, found.flags


def test_a_version_keeps_its_metadata(node: Node, client: Client) -> None:
    response = client.succeed(SetWithMeta(**version(flags=5, expiry=EXPIRY), value=b"{}"))
    assert (response.cas, response.seqno) == (CAS + 7, 1)
    assert meta(client) == (0, 7, CAS + 7, EXPIRY, 5)
    assert client.succeed(Get(key=b"k")).value == b"{}"
    # The next one of this node comes after it.
    later = client.succeed(Set(key=b"k", value=b"1"))
    assert later.cas > CAS + 7
    assert meta(client)[1] == 8
    node.reopen()
    assert meta(node.client())[1:3] == (8, later.cas)


def test_a_deletion_keeps_its_metadata(node: Node, client: Client) -> None:
    """Also one of a document that never was here."""
    client.succeed(DeleteWithMeta(**version(expiry=START_S - 1000), value=ATTRIBUTES, datatype=Datatype.XATTR))
    assert meta(client) == (1, 7, CAS + 7, START_S - 1000, 0)
    sync = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=PathFlags.XATTR, path=b"_sync")
    assert client.refused(MultiLookup(key=b"k", specs=(sync,))) == Status.KEY_ENOENT
    expiration = MetaOptions.IS_EXPIRATION
    client.succeed(DeleteWithMeta(**version(rev_seqno=8, options=expiration)))
    opcodes = [frame.opcode for run in node.bucket.runs(0) for frame in decode_frames(run.tobytes())]
    assert opcodes == [Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION]


def test_values_come_with_their_attributes_and_compressed(client: Client) -> None:
    value = compress(ATTRIBUTES + b"[1]")
    client.succeed(SetWithMeta(**version(), value=value, datatype=Datatype.SNAPPY | Datatype.XATTR))
    got = client.succeed(Get(key=b"k"))
    assert (got.value, got.datatype) == (b"[1]", Datatype.JSON)
    user = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=PathFlags.XATTR, path=b"user")
    assert client.succeed(MultiLookup(key=b"k", specs=(user,))).results[0].value == b"2"
    # They are the version's own, and not those of the document that was there.
    client.succeed(SetWithMeta(**version(rev_seqno=8), value=b"2", extended_meta=b""))
    assert client.succeed(MultiLookup(key=b"k", specs=(user,))).results[0].status == Status.SUBDOC_PATH_ENOENT


WINS: list[tuple[dict[str, int], bool, bool]] = [
    ({"rev_seqno": 8, "meta_cas": CAS}, True, True),
    ({"rev_seqno": 6, "meta_cas": CAS + 9}, False, False),
    ({"meta_cas": CAS + 8}, True, True),
    ({"meta_cas": CAS + 6}, False, False),
    ({"expiry": EXPIRY + 1, "flags": 5}, True, False),
    ({"expiry": EXPIRY - 1, "flags": 5}, False, False),
    ({"expiry": EXPIRY, "flags": 4}, True, False),
    ({"expiry": EXPIRY, "flags": 5}, False, False),
    ({"expiry": EXPIRY, "flags": 6}, False, False),
]
"""Of a version against revision 7 with CAS + 7, the expiry and flags 5: whether a set wins, and whether a deletion."""


@pytest.mark.parametrize(("fields", "set_wins", "delete_wins"), WINS)
def test_which_version_wins(client: Client, fields: dict[str, int], set_wins: bool, delete_wins: bool) -> None:
    """First the revision decides, then the CAS, and for sets the expiry and the flags."""
    for kind, wins in ((SetWithMeta, set_wins), (DeleteWithMeta, delete_wins)):
        there = version(flags=5, expiry=EXPIRY, options=SKIP)
        client.succeed(SetWithMeta(**there, value=b"there"))
        request = kind(**version(**fields))
        assert (client.call(request).status == Status.SUCCESS) is wins
        assert client.refused(kind(**version(rev_seqno=1))) == Status.KEY_EEXISTS
        # Whatever the metadata says, it can be forced.
        for option in (SKIP, MetaOptions.FORCE):
            client.succeed(kind(**version(rev_seqno=1, options=option)))
        assert meta(client)[1] == 1


def test_the_last_write_wins_where_the_bucket_says_so(node: Node, client: Client) -> None:
    node.bucket_service.settings = BucketSettings(conflict_resolution="lww")
    accept = {"options": MetaOptions.FORCE_ACCEPT}
    client.succeed(SetWithMeta(**version(), **accept))
    assert client.refused(SetWithMeta(**version(meta_cas=Cas(CAS + 8)))) == Status.EINVAL
    older = SetWithMeta(**version(rev_seqno=9, meta_cas=Cas(CAS + 6)), **accept)
    assert client.refused(older) == Status.KEY_EEXISTS
    client.succeed(SetWithMeta(**version(rev_seqno=1, meta_cas=Cas(CAS + 8)), **accept))
    assert meta(client)[1:3] == (1, CAS + 8)


def test_adding_needs_that_there_is_none(client: Client) -> None:
    client.succeed(AddWithMeta(**version(), value=b"1"))
    assert client.refused(AddWithMeta(**version(rev_seqno=9), value=b"2")) == Status.KEY_EEXISTS
    client.succeed(DeleteWithMeta(**version(rev_seqno=9)))
    assert client.refused(AddWithMeta(**version(rev_seqno=8), value=b"3")) == Status.KEY_EEXISTS
    client.succeed(AddWithMeta(**version(rev_seqno=10), value=b"3"))


def test_a_cas_of_the_node_s_own(client: Client) -> None:
    regenerate = SKIP | MetaOptions.REGENERATE_CAS
    response = client.succeed(SetWithMeta(**version(meta_cas=0, options=regenerate), value=b"1"))
    assert response.cas
    assert meta(client)[1:3] == (7, response.cas)


def test_the_cas_of_the_header_is_that_of_the_version_to_replace(client: Client) -> None:
    newer = version(rev_seqno=9)
    assert client.refused(SetWithMeta(**newer, cas=Cas(5))) == Status.KEY_ENOENT
    stored = client.succeed(SetWithMeta(**version(), value=b"1"))
    assert client.refused(SetWithMeta(**newer, cas=Cas(5))) == Status.KEY_EEXISTS
    client.succeed(SetWithMeta(**newer, cas=stored.cas))
    client.succeed(GetLocked(key=b"k"))
    assert client.refused(DeleteWithMeta(**version(rev_seqno=10))) == Status.LOCKED


def test_quiet_forms_answer_only_where_they_fail(client: Client) -> None:
    quiet = (
        SetWithMetaQuiet(**version(opaque=1), value=b"1"),
        AddWithMetaQuiet(**version(opaque=2, rev_seqno=8), value=b"1"),
        DeleteWithMetaQuiet(**version(opaque=3, rev_seqno=9)),
    )
    assert [(answer.opaque, answer.status) for answer in client.call_all(*quiet)] == [(2, Status.KEY_EEXISTS)]


@case_apart(SetWithMeta(**version(options=MetaOptions.FORCE_ACCEPT)), Status.EINVAL)
@case_apart(SetWithMeta(**version(options=MetaOptions.REGENERATE_CAS)), Status.EINVAL)
@case_apart(SetWithMeta(**version(options=MetaOptions.IS_EXPIRATION)), Status.EINVAL)
@case_apart(DeleteWithMeta(**version(options=MetaOptions(0x20))), Status.EINVAL)
@case_apart(SetWithMeta(**version(rev_seqno=2**48)), Status.EINVAL)
@case_apart(SetWithMeta(**version(meta_cas=0)), Status.KEY_EEXISTS)
@case_apart(SetWithMeta(**version(meta_cas=2**64 - 1)), Status.KEY_EEXISTS)
@case_apart(SetWithMeta(**version(meta_cas=CAS + 66 * 60 * 10**9)), Status.CAS_VALUE_INVALID)
@case_apart(SetWithMeta(**version(), frame_infos=(durability(DurabilityLevel.MAJORITY),)), Status.EINVAL)
@case_apart(SetWithMeta(**version(), value=b"\0\0\0\x09", datatype=Datatype.XATTR), Status.XATTR_EINVAL)
@case_apart(DeleteWithMeta(**version(), value=b"body"), Status.EINVAL)
@case_apart(SetWithMeta(**version(vbucket=VBucketId(99))), Status.NOT_MY_VBUCKET)
def test_what_is_refused(client: Client, request_: SetWithMeta, status: Status) -> None:
    assert client.refused(request_) == status
    assert client.refused(GetMeta(key=b"k")) == Status.KEY_ENOENT


def test_copies_that_are_not_active_take_none(node: Node, client: Client) -> None:
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    assert client.refused(SetWithMeta(**version(options=MetaOptions.FORCE))) == Status.NOT_MY_VBUCKET


def test_attributes_are_for_those_who_negotiated_them(node: Node) -> None:
    plain = node.client(features=(Feature.XERROR, Feature.SELECT_BUCKET))
    assert plain.refused(SetWithMeta(**version(), value=ATTRIBUTES, datatype=Datatype.XATTR)) == Status.EINVAL


def test_writing_needs_the_right_to_write(node: Node) -> None:
    assert node.client(user="reader").refused(SetWithMeta(**version())) == Status.EACCESS
