"""Scopes and collections: the manifest from outside, and ids by names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.protocol.features import Feature
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.vbuckets import (
    GetCollectionId,
    GetCollectionsManifest,
    GetScopeId,
    SetCollectionsManifest,
)
from headwater.protocol.numbers import CollectionId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.settling import abandon
from support.cases import case_apart
from support.kv_harness import Client, Node

DEFAULT = {"name": "_default", "uid": "0"}
FRUIT = {"name": "fruit", "uid": "8"}
BERRIES = {"name": "berries", "uid": "9", "maxTTL": 60}


def manifest(uid: str, *scopes: dict[str, Any]) -> SetCollectionsManifest:
    return SetCollectionsManifest(value=json.dumps({"uid": uid, "scopes": scopes}).encode())


def scope(*collections: dict[str, Any], name: str = "_default", uid: str = "0") -> dict[str, Any]:
    return {"name": name, "uid": uid, "collections": collections}


# --- the manifest -------------------------------------------------------------------------------------------------


def test_a_manifest_is_set_and_got(node: Node, client: Client) -> None:
    """At first there is the default collection only. A newer manifest is answered when it is durable."""
    first = client.succeed(GetCollectionsManifest())
    assert first.datatype == Datatype.JSON
    assert json.loads(first.value) == {"uid": "0", "scopes": [scope(DEFAULT) | {"collections": [DEFAULT]}]}
    sent = manifest("2", scope(DEFAULT, FRUIT), scope(BERRIES, name="garden", uid="8"))
    client.send(sent)
    assert client.received() == []
    node.commit()
    assert [answer.status for answer in client.received()] == [Status.SUCCESS]
    assert json.loads(client.succeed(GetCollectionsManifest()).value) == json.loads(sent.value)
    node.reopen()
    assert json.loads(node.client().succeed(GetCollectionsManifest()).value) == json.loads(sent.value)


@pytest.mark.parametrize("request_", [GetCollectionsManifest(), GetCollectionId(value=b".fruit"), GetScopeId()])
def test_a_manifest_is_not_shown_before_it_is_durable(node: Node, client: Client, request_: Any) -> None:
    reader = node.client()
    client.send(manifest("1", scope(DEFAULT, FRUIT)))
    reader.send(request_)
    assert reader.received() == []
    node.commit()
    assert [response.status for response in reader.received()] == [Status.SUCCESS]


def test_collections_hold_documents_of_their_own(node: Node, collections_client: Client) -> None:
    client = collections_client
    client.succeed(manifest("1", scope(DEFAULT, FRUIT)))
    client.succeed(Set(key=b"k", value=b"default", collection_id=CollectionId(0)))
    client.succeed(Set(key=b"k", value=b"fruit", collection_id=CollectionId(8)))
    assert client.succeed(Get(key=b"k", collection_id=CollectionId(0))).value == b"default"
    assert client.succeed(Get(key=b"k", collection_id=CollectionId(8))).value == b"fruit"
    client.succeed(manifest("2", scope(DEFAULT)))
    assert client.refused(Get(key=b"k", collection_id=CollectionId(8))) == Status.UNKNOWN_COLLECTION


def test_uids_do_not_go_backwards(client: Client) -> None:
    client.succeed(manifest("a", scope(DEFAULT, FRUIT)))
    assert client.refused(manifest("9", scope(DEFAULT))) == Status.CANNOT_APPLY_MANIFEST
    client.succeed(manifest("a", scope(DEFAULT, FRUIT)))
    assert client.refused(manifest("a", scope(DEFAULT))) == Status.CANNOT_APPLY_MANIFEST
    client.succeed(manifest("b", scope(DEFAULT)))


@case_apart([scope(DEFAULT, {"name": "roots", "uid": "8"}), scope(name="garden", uid="9")])
@case_apart([scope(DEFAULT), scope(FRUIT, name="garden", uid="9")])
@case_apart([scope(DEFAULT, FRUIT), scope(name="field", uid="9")])
def test_what_stays_keeps_its_name_and_its_scope(client: Client, scopes: list[dict[str, Any]]) -> None:
    client.succeed(manifest("1", scope(DEFAULT, FRUIT), scope(name="garden", uid="9")))
    assert client.refused(manifest("2", *scopes)) == Status.CANNOT_APPLY_MANIFEST


def test_a_collection_s_longest_life_can_be_changed(node: Node, client: Client) -> None:
    client.succeed(manifest("1", scope(DEFAULT, FRUIT)))
    client.succeed(manifest("2", scope(DEFAULT, FRUIT | {"maxTTL": 5})))
    found = node.bucket.manifest.find("_default", "fruit")
    assert found.max_ttl_s == 5


@case_apart(b"nope")
@case_apart(b"[]")
@case_apart(b"7")
@case_apart(b'{"uid":"1"}')
@case_apart(b'{"uid":1,"scopes":[]}')
@case_apart(b'{"uid":"1","scopes":[]}')
@case_apart(b'{"uid":"1","scopes":[7]}')
@case_apart(b'{"uid":"1","scopes":[{"uid":"0","name":"_default","collections":[[]]}]}')
@case_apart(b'{"uid":"-1","scopes":[{"uid":"0","name":"_default","collections":[]}]}')
@case_apart(b'{"uid":"10000000000000000","scopes":[{"uid":"0","name":"_default","collections":[]}]}')
def test_what_is_not_a_manifest(client: Client, value: bytes) -> None:
    assert client.refused(SetCollectionsManifest(value=value)) == Status.EINVAL


@case_apart([scope(DEFAULT, {"name": "", "uid": "8"})])
@case_apart([scope(DEFAULT, {"name": "a.b", "uid": "8"})])
@case_apart([scope(DEFAULT, {"name": "%a", "uid": "8"})])
@case_apart([scope(DEFAULT, {"name": "x" * 252, "uid": "8"})])
@case_apart([scope(DEFAULT, {"name": "low", "uid": "7"})])
@case_apart([scope(DEFAULT, {"name": "_default", "uid": "8"})])
@case_apart([scope({"name": "other", "uid": "0"})])
@case_apart([scope(DEFAULT, {"name": "large", "uid": "100000000"})])
@case_apart([scope(DEFAULT, FRUIT, {"name": "fruit", "uid": "9"})])
@case_apart([scope(DEFAULT, FRUIT, {"name": "twice", "uid": "8"})])
@case_apart([scope(DEFAULT), scope(name="a", uid="8"), scope(name="a", uid="9")])
@case_apart([scope(), scope(DEFAULT, name="a", uid="8")])
@case_apart([scope(name="a", uid="8")])
@case_apart([scope(*({"name": f"c{number}", "uid": f"{number + 8:x}"} for number in range(1201)))])
def test_manifests_that_are_not_sound(client: Client, scopes: list[dict[str, Any]]) -> None:
    assert client.refused(manifest("1", *scopes)) == Status.EINVAL


def test_a_scope_may_leave_its_collections_out(client: Client) -> None:
    client.succeed(manifest("1", {"name": "_default", "uid": "0"}))


def test_ids_are_not_given_out_again(node: Node, client: Client) -> None:
    client.succeed(manifest("1", scope(DEFAULT, {"name": "last", "uid": "1f"})))
    client.succeed(manifest("2", scope(DEFAULT)))
    node.reopen()
    found = node.bucket.manifest.with_collection("_default", "next").find("_default", "next")
    assert found.id == 0x20


def test_a_manifest_that_could_not_be_written_is_taken_back(node: Node, client: Client) -> None:
    client.send(manifest("1", scope(DEFAULT, FRUIT)))
    abandon(node.bucket)
    client.session.outgoing.clear()
    assert json.loads(client.succeed(GetCollectionsManifest()).value)["uid"] == "0"
    client.succeed(manifest("1", scope(DEFAULT)))


def test_only_an_admin_sets_a_manifest(node: Node) -> None:
    assert node.client(user="writer").refused(manifest("1", scope(DEFAULT))) == Status.EACCESS


# --- ids by names -------------------------------------------------------------------------------------------------


@pytest.fixture
def garden(node: Node) -> Manifest:
    made = Manifest().with_collection("_default", "fruit").with_scope("garden").with_collection("garden", "berries")
    node.set_manifest(made)
    return made


@pytest.mark.parametrize(
    ("path", "expected"),
    [(b"_default._default", 0), (b".", 0), (b".fruit", 8), (b"_default.fruit", 8), (b"garden.berries", 10)],
)
@pytest.mark.parametrize("part", ["key", "value"])
def test_the_id_of_a_collection(client: Client, garden: Manifest, path: bytes, expected: int, part: str) -> None:
    request = GetCollectionId(key=path) if part == "key" else GetCollectionId(value=path)
    response = client.succeed(request)
    assert (response.manifest_uid, response.id) == (garden.uid, expected)


@pytest.mark.parametrize(("path", "expected"), [(b"", 0), (b"_default", 0), (b"garden", 9), (b"garden.none", 9)])
def test_the_id_of_a_scope(client: Client, garden: Manifest, path: bytes, expected: int) -> None:
    response = client.succeed(GetScopeId(value=path))
    assert (response.manifest_uid, response.id) == (garden.uid, expected)


@case_apart(GetCollectionId(value=b"garden.none"), Status.UNKNOWN_COLLECTION)
@case_apart(GetCollectionId(value=b"none.berries"), Status.UNKNOWN_SCOPE)
@case_apart(GetScopeId(value=b"none"), Status.UNKNOWN_SCOPE)
@case_apart(GetCollectionId(value=b"garden"), Status.EINVAL)
@case_apart(GetCollectionId(value=b""), Status.EINVAL)
@case_apart(GetCollectionId(value=b"a.b.c"), Status.EINVAL)
@case_apart(GetCollectionId(value=b"garden.ber ries"), Status.EINVAL)
@case_apart(GetCollectionId(value=b"garden.\xff"), Status.EINVAL)
@case_apart(GetScopeId(value=b"a.b.c"), Status.EINVAL)
def test_names_that_have_no_id(client: Client, garden: Manifest, request_: GetCollectionId, status: Status) -> None:
    response = client.call(request_)
    assert response.status == status
    if status != Status.EINVAL:
        assert json.loads(response.value) == {"manifest_uid": f"{garden.uid:x}"}


def test_a_client_without_extended_errors_or_collections(node: Node, garden: Manifest) -> None:
    older = node.client(features=(Feature.SELECT_BUCKET,))
    assert older.refused(GetScopeId(value=b"none")) == Status.EINVAL
    collections_only = node.client(features=(Feature.COLLECTIONS,))
    assert collections_only.refused(GetScopeId(value=b"none")) == Status.UNKNOWN_SCOPE
