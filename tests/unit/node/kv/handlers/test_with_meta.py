"""Writes with metadata: what is kept of it, which version wins, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.node.options import BucketSettings
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import DurabilityLevel, decode_frames, durability
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import (
    AddWithMeta,
    AddWithMetaQuiet,
    DeleteWithMeta,
    DeleteWithMetaQuiet,
    Get,
    GetLocked,
    GetMeta,
    MetaOptions,
    Set,
    SetWithMeta,
    SetWithMetaQuiet,
)
from headwater.protocol.messages.subdocument import LookupSpec, MultiLookup, PathFlags
from headwater.protocol.numbers import Cas, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs
from support.cases import case_apart
from support.kv_harness import START_S, Client, Node

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
