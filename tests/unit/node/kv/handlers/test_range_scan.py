"""Range scans and random keys as a client sees them: what is asked for, what ends a scan, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from headwater.node.service import SCAN_S_MAX, SCANS_MAX, SCANS_OF_CONNECTION_MAX
from headwater.protocol.features import Feature
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import documents as range_scan
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Delete, GetRandomKey, Set
from headwater.protocol.messages.session import Stat
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.settling import flush, settle_now
from support.cases import case_apart
from support.kv_harness import WITH_COLLECTIONS, Client, Node

KEYS = [b"a", b"b", b"ba", b"bb", b"c"]
EVERYTHING = {"range": {"start": "", "end": base64.b64encode(b"\xff").decode()}}


@pytest.fixture
def stored(node: Node, client: Client) -> None:
    # Ids must differ, as those of a real node do.
    drawn = iter(range(1, 10_000))
    node.service.random_bytes = lambda count: next(drawn).to_bytes(count)
    for key in KEYS:
        client.succeed(Set(key=key, value=b'"%s"' % key, flags=7))
    client.succeed(Set(key=b"bz", value=b"{}"))
    client.succeed(Delete(key=b"bz"))
    client.succeed(Set(key=b"b", vbucket=VBucketId(1), value=b"{}"))


def described(**members: Any) -> range_scan.RangeScanCreate:
    return range_scan.RangeScanCreate(datatype=Datatype.JSON, value=json.dumps(members).encode())


def between(**bounds: bytes) -> dict[str, Any]:
    return {"range": {name: base64.b64encode(bound).decode() for name, bound in bounds.items()}}


def keys_of(client: Client, *, items_max: int = 0, **members: Any) -> list[bytes]:
    """Create a scan and take all of it."""
    scan_id = client.succeed(described(key_only=True, **members)).scan_id
    found: list[bytes] = []
    while True:
        part = client.succeed(range_scan.RangeScanContinue(scan_id=scan_id, items_max=items_max))
        assert not part.has_documents
        found += part.keys
        if part.status == Status.RANGE_SCAN_COMPLETE:
            assert client.refused(range_scan.RangeScanContinue(scan_id=scan_id)) == Status.KEY_ENOENT
            return found
        assert part.status == Status.RANGE_SCAN_MORE
        assert part.keys


# --- what is asked for --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stored")
@case_apart({"start": b"", "end": b"\xff"}, KEYS)
@case_apart({"start": b"b", "end": b"bb"}, [b"b", b"ba", b"bb"])
@case_apart({"excl_start": b"b", "excl_end": b"bb"}, [b"ba"])
@case_apart({"start": b"b", "end": b"b\xff"}, [b"b", b"ba", b"bb"])
@case_apart({"excl_start": b"bb", "end": b"c"}, [b"c"])
def test_ranges(client: Client, bounds: dict[str, bytes], expected: list[bytes]) -> None:
    assert keys_of(client, **between(**bounds)) == keys_of(client, items_max=1, **between(**bounds)) == expected


@pytest.mark.usefixtures("stored")
def test_documents(node: Node, client: Client) -> None:
    scan_id = client.succeed(described(**EVERYTHING)).scan_id
    part = client.succeed(range_scan.RangeScanContinue(scan_id=scan_id, bytes_max=1))
    assert (part.status, part.has_documents, len(part.documents)) == (Status.RANGE_SCAN_MORE, 1, 1)
    assert (part.documents[0].key, part.documents[0].value, part.documents[0].flags) == (b"a", b'"a"', 7)
    # A later part is still of the moment that the scan began at.
    client.succeed(Set(key=b"b", value=b'"new"'))
    settle_now(node.bucket)
    rest = client.succeed(range_scan.RangeScanContinue(scan_id=scan_id))
    assert [(found.key, found.value) for found in rest.documents] == [(key, b'"%s"' % key) for key in KEYS[1:]]
    assert (rest.status, rest.documents[0].datatype) == (Status.RANGE_SCAN_COMPLETE, Datatype.JSON)


@pytest.mark.usefixtures("stored")
def test_a_collection(node: Node, client: Client) -> None:
    node.set_manifest(Manifest().with_collection("_default", "c"))
    collection = node.bucket.manifest.scopes[0].collections[-1].id
    writer = node.client(features=WITH_COLLECTIONS)
    writer.succeed(Set(key=b"b", collection_id=collection, value=b"{}"))
    assert keys_of(client, collection=f"{collection:x}", **EVERYTHING) == [b"b"]
    running = client.succeed(described(collection=f"{collection:X}", **EVERYTHING)).scan_id
    node.set_manifest(node.bucket.manifest.without_collection("_default", "c"))
    assert writer.refused(range_scan.RangeScanContinue(scan_id=running)) == Status.UNKNOWN_COLLECTION
    assert client.refused(described(collection="99", **EVERYTHING)) == Status.UNKNOWN_COLLECTION


@pytest.mark.usefixtures("stored")
def test_samples(client: Client) -> None:
    assert keys_of(client, sampling={"samples": 100, "seed": 2**64 - 1}) == KEYS
    some = keys_of(client, sampling={"samples": 3, "seed": 4})
    assert set(some) < set(KEYS)
    assert some == keys_of(client, sampling={"samples": 3, "seed": 4})


@pytest.mark.usefixtures("stored")
def test_what_a_snapshot_must_have(node: Node, client: Client) -> None:
    vbuuid, seqno = str(node.bucket.vbuckets.vbuuids[0]), int(node.bucket.vbuckets.high_seqnos[0])

    def create(**required: Any) -> Status:
        return client.call(described(**EVERYTHING, snapshot_requirements=required)).status

    assert create(vb_uuid=vbuuid, seqno=seqno, timeout_ms=1000) == Status.SUCCESS
    assert create(vb_uuid=vbuuid, seqno=seqno, seqno_exists=True) == Status.SUCCESS
    assert create(vb_uuid=vbuuid, seqno=seqno + 1) == Status.ETMPFAIL
    assert create(vb_uuid=str(int(vbuuid) + 1), seqno=seqno) == Status.VBUUID_NOT_EQUAL
    assert create(vb_uuid=vbuuid, seqno=0, seqno_exists=True) == Status.NOT_STORED
    assert create(seqno=seqno) == create(vb_uuid=int(vbuuid), seqno=seqno) == Status.EINVAL


# --- what ends a scan ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stored")
def test_a_scan_is_cancelled(client: Client) -> None:
    scan_id = client.succeed(described(**EVERYTHING)).scan_id
    client.succeed(range_scan.RangeScanCancel(scan_id=scan_id))
    assert client.refused(range_scan.RangeScanCancel(scan_id=scan_id)) == Status.KEY_ENOENT
    assert client.refused(range_scan.RangeScanContinue(scan_id=scan_id)) == Status.KEY_ENOENT


@pytest.mark.usefixtures("stored")
def test_a_scan_ends_with_its_session_and_its_time(node: Node, client: Client) -> None:
    other = node.client()
    first, second = (client.succeed(described(**EVERYTHING)).scan_id for client in (client, other))
    # Any session that knows the id may go on with it.
    assert other.succeed(range_scan.RangeScanContinue(scan_id=first, items_max=1)).status == Status.RANGE_SCAN_MORE
    client.session.disconnected()
    assert list(node.bucket_service.range_scans.running) == [second]
    node.clock.advance(SCAN_S_MAX)
    node.bucket_service.range_scans.tick(node.service.now_s())
    assert not node.bucket_service.range_scans.running
    assert other.refused(range_scan.RangeScanContinue(scan_id=second)) == Status.KEY_ENOENT


@pytest.mark.usefixtures("stored")
def test_a_scan_ends_with_its_vbucket(node: Node, client: Client) -> None:
    scan_ids = [client.succeed(described(**EVERYTHING)).scan_id for _ in range(2)]
    wrong = range_scan.RangeScanContinue(scan_id=scan_ids[0], vbucket=VBucketId(1))
    assert client.refused(wrong) == Status.KEY_ENOENT
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    assert client.refused(range_scan.RangeScanContinue(scan_id=scan_ids[0])) == Status.NOT_MY_VBUCKET
    node.bucket.set_vbucket_state(0, VBucketState.ACTIVE)
    flush(node.bucket)
    assert client.refused(range_scan.RangeScanContinue(scan_id=scan_ids[1])) == Status.RANGE_SCAN_CANCELLED
    assert not node.bucket_service.range_scans.running


@pytest.mark.usefixtures("stored")
def test_there_is_a_limit_to_scans(node: Node, client: Client) -> None:
    for _ in range(SCANS_OF_CONNECTION_MAX):
        client.succeed(described(**EVERYTHING))
    assert client.refused(described(**EVERYTHING)) == Status.EBUSY
    others = [node.client() for _ in range(SCANS_MAX // SCANS_OF_CONNECTION_MAX)]
    for other in others[1:]:
        for _ in range(SCANS_OF_CONNECTION_MAX):
            other.succeed(described(**EVERYTHING))
    assert others[0].refused(described(**EVERYTHING)) == Status.EBUSY
    client.session.disconnected()
    others[0].succeed(described(**EVERYTHING))


@pytest.mark.usefixtures("stored")
def test_the_statistics_show_scans(client: Client) -> None:
    scan_id = client.succeed(described(key_only=True, **EVERYTHING)).scan_id
    *found, _ = client.call_all(Stat(key=b"range-scans"))
    shown = {
        response.key.decode(): response.value.decode() for response in found if isinstance(response, PlainResponse)
    }
    prefix = f"vb_0:{scan_id.hex()}"
    assert shown[f"{prefix}:key_value"] == "key"
    assert shown[f"{prefix}:seconds_left"] == str(int(SCAN_S_MAX))


# --- what is refused ----------------------------------------------------------------------------------------------

START = {"start": ""}


@pytest.mark.usefixtures("stored")
@case_apart(between(start=b"x", end=b"y"), Status.KEY_ENOENT)
@case_apart({**EVERYTHING, "key_only": True, "include_xattrs": True}, Status.EINVAL)
@case_apart({**EVERYTHING, "sampling": {"samples": 1}}, Status.EINVAL)
@case_apart({"sampling": {}}, Status.EINVAL)
@case_apart({"sampling": {"samples": 0}}, Status.EINVAL)
@case_apart({"sampling": {"samples": True}}, Status.EINVAL)
@case_apart({"sampling": []}, Status.EINVAL)
@case_apart({"range": START}, Status.EINVAL)
@case_apart({"range": {**START, "excl_start": "", "end": ""}}, Status.EINVAL)
@case_apart({"range": {**START, "end": "not base64"}}, Status.EINVAL)
@case_apart({"range": {**START, "end": 5}}, Status.EINVAL)
@case_apart(between(start=b"", end=b"x" * 251), Status.EINVAL)
@case_apart({**EVERYTHING, "collection": 8}, Status.EINVAL)
@case_apart({**EVERYTHING, "collection": "0x8"}, Status.EINVAL)
@case_apart({**EVERYTHING, "key_only": 1}, Status.EINVAL)
@case_apart({**EVERYTHING, "name": "x" * 51}, Status.EINVAL)
@case_apart({**EVERYTHING, "more": "x" * 4096}, Status.EINVAL)
@case_apart({**EVERYTHING, "snapshot_requirements": 5}, Status.EINVAL)
def test_descriptions_that_are_refused(client: Client, members: dict[str, Any], status: Status) -> None:
    response = client.call(described(**members))
    assert (response.status, bool(getattr(response, "context", ""))) == (status, True)


@pytest.mark.usefixtures("stored")
def test_requests_that_are_refused(node: Node, client: Client) -> None:
    create = described(**EVERYTHING)
    assert client.refused(range_scan.RangeScanCreate(value=create.value)) == Status.EINVAL
    assert client.refused(range_scan.RangeScanCreate(datatype=Datatype.JSON, value=b"[1]")) == Status.EINVAL
    assert client.refused(range_scan.RangeScanCreate(datatype=Datatype.JSON, value=b"{")) == Status.EINVAL
    without_json = node.client(features=(Feature.XERROR, Feature.SELECT_BUCKET))
    assert without_json.refused(create) == Status.EINVAL
    assert node.client(user="data_writer").refused(create) == Status.EACCESS
    node.bucket.set_vbucket_state(0, VBucketState.REPLICA)
    assert client.refused(create) == Status.NOT_MY_VBUCKET


# --- random keys --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stored")
def test_a_random_key(node: Node, client: Client) -> None:
    drawn = {client.succeed(GetRandomKey()).key for _ in range(100)}
    assert drawn == set(KEYS)
    got = client.succeed(GetRandomKey())
    assert (got.flags in (0, 7), got.datatype) == (True, Datatype.JSON)


@pytest.mark.usefixtures("stored")
def test_a_random_key_of_a_collection_with_next_to_none(node: Node, client: Client) -> None:
    node.set_manifest(Manifest().with_collection("_default", "c").with_collection("_default", "empty"))
    small, empty = (collection.id for collection in node.bucket.manifest.scopes[0].collections[-2:])
    writer = node.client(features=WITH_COLLECTIONS)
    for number in range(300):
        writer.succeed(Set(key=b"%d" % number, collection_id=CollectionId(0), value=b"{}"))
    for key in (b"one", b"two", b"deleted"):
        writer.succeed(Set(key=key, collection_id=small, vbucket=VBucketId(5), value=b"{}"))
    writer.succeed(Delete(key=b"deleted", collection_id=small, vbucket=VBucketId(5)))
    drawn = {
        (got.collection_id, got.key) for got in (writer.succeed(GetRandomKey(collection=small)) for _ in range(40))
    }
    assert drawn == {(small, b"one"), (small, b"two")}
    assert writer.refused(GetRandomKey(collection=empty)) == Status.KEY_ENOENT
    assert writer.refused(GetRandomKey(collection=CollectionId(99))) == Status.UNKNOWN_COLLECTION


def test_no_key_at_random_where_there_is_none(client: Client) -> None:
    assert client.refused(GetRandomKey()) == Status.KEY_ENOENT
