"""Locks: who may write, what others see, and how a lock ends."""

from __future__ import annotations

import pytest

from headwater.node.kv import documents
from headwater.node.kv.documents import LOCK_S_DEFAULT, LOCK_S_MAX, LOCKED_CAS
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import (
    Add,
    Append,
    Delete,
    Get,
    GetAndTouch,
    GetLocked,
    GetMeta,
    Increment,
    Replace,
    Set,
    SetQuiet,
    Touch,
    Unlock,
)
from headwater.protocol.messages.subdocument import (
    DocFlags,
    LookupSpec,
    MultiLookup,
    MultiMutation,
    MutationSpec,
    SubdocDictUpsert,
)
from headwater.protocol.messages.vbuckets import DeleteVBucket, SetVBucket
from headwater.protocol.numbers import Cas
from headwater.protocol.status import Status
from support.kv_harness import Client, Node

UPSERT = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, path=b"a", value=b"1")

WRITES: list[Request] = [
    Set(key=b"k", value=b"w"),
    Replace(key=b"k", value=b"w"),
    Delete(key=b"k"),
    Append(key=b"k", value=b"w"),
    Touch(key=b"k", expiry=5),
    GetAndTouch(key=b"k", expiry=5),
    Increment(key=b"k"),
    SubdocDictUpsert(key=b"k", path=b"a", new_value=b"1"),
    MultiMutation(key=b"k", specs=(UPSERT,)),
    MultiMutation(key=b"k", specs=(UPSERT,), doc_flags=DocFlags.MKDOC),
]


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
    added = MultiMutation(key=b"k", specs=(UPSERT,), doc_flags=DocFlags.ADD)
    assert client.refused(added) == Status.KEY_EEXISTS


def test_others_see_a_cas_that_is_good_for_nothing(client: Client, cas: Cas) -> None:
    look = LookupSpec(opcode=Opcode.SUBDOC_GET_COUNT, path=b"")
    for request in (Get(key=b"k"), GetMeta(key=b"k"), MultiLookup(key=b"k", specs=(look,))):
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
