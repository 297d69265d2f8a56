"""Scopes and collections over HTTP: they come and go, and are waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.errors import StoreFull
from headwater.protocol.manifest import COLLECTIONS_MAX, Collection, Manifest, Scope
from headwater.protocol.numbers import CollectionId, ScopeId
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, open_bucket
from support.cases import case_apart
from support.http_node import ENVIRONMENT, READER, SCOPES, Client, Node

SHOP = "beer/scopes/shop"


def test_a_new_bucket_has_the_default_collection(ask: Client) -> None:
    default = {"name": "_default", "uid": "0", "maxTTL": 0, "history": False}
    assert ask("GET", SCOPES, auth=READER).json() == {
        "uid": "0",
        "scopes": [{"name": "_default", "uid": "0", "collections": [default]}],
    }


def test_scopes_and_collections_come_and_go(node: Node, engine: LmdbEngine, ask: Client) -> None:
    assert ask("POST", SCOPES, data={"name": "shop"}).json() == {"uid": "1"}
    form = {"name": "orders", "maxTTL": "60", "history": "true"}
    assert ask("POST", f"{SCOPES}/shop/collections", data=form).json() == {"uid": "2"}
    assert ask("POST", f"{SCOPES}/_default/collections", data={"name": "log"}).json() == {"uid": "3"}
    told = ask("GET", SCOPES).json()["scopes"]
    assert told[1] == {
        "name": "shop",
        "uid": "8",
        "collections": [{"name": "orders", "uid": "9", "maxTTL": 60, "history": True}],
    }
    assert [collection["name"] for collection in told[0]["collections"]] == ["_default", "log"]

    assert ask("DELETE", f"{SCOPES}/shop/collections/orders").json() == {"uid": "4"}
    assert ask("DELETE", f"{SCOPES}/shop").json() == {"uid": "5"}
    assert [scope["name"] for scope in ask("GET", SCOPES).json()["scopes"]] == ["_default"]
    assert ask("GET", "/pools/default/buckets/beer").json()["collectionsManifestUid"] == "5"

    close_bucket(node.stored)
    assert open_bucket(engine, environment=ENVIRONMENT, secret=(1, 2)).manifest.uid == 5
    assert "'ann' changed the collections of bucket 'beer': manifest 5" in node.logged


@pytest.mark.parametrize(("asked", "kept"), [("0", None), ("-1", 0), ("1", 1), ("2147483647", 2**31 - 1)])
def test_a_collection_s_time_to_live(node: Node, ask: Client, asked: str, kept: int | None) -> None:
    """REST's 0 is the bucket's own and its -1 is none, where the manifest has nothing and 0."""
    assert ask("POST", f"{SCOPES}/_default/collections", data={"name": "c", "maxTTL": asked}).status_code == 200
    collection = node.stored.manifest.find("_default", "c")
    assert collection.max_ttl_s == kept
    assert ask("GET", SCOPES).json()["scopes"][0]["collections"][1]["maxTTL"] == int(asked)


def test_names_may_have_a_percent_sign(ask: Client) -> None:
    for number in range(9):
        ask("POST", SCOPES, data={"name": f"s{number}"})
    assert ask("POST", SCOPES, data={"name": "a%b"}).json() == {"uid": "a"}, "uids are in base 16"
    assert ask("POST", f"{SCOPES}/a%25b/collections", data={"name": "c%20d"}).status_code == 200
    assert ask("DELETE", f"{SCOPES}/a%25b/collections/c%2520d").status_code == 200


@pytest.mark.parametrize("name", ["", "_x", "%x", "a b", "a.b", "ä", "a" * 252])
def test_bad_names(node: Node, ask: Client, name: str) -> None:
    for path in (SCOPES, f"{SCOPES}/_default/collections"):
        answer = ask("POST", path, data={"name": name})
        assert answer.status_code == 400
        assert answer.json()["errors"].keys() == {"name"}
    assert node.stored.manifest.uid == 0


@case_apart({}, "name")
@case_apart({"name": "c", "colour": "red"}, "colour")
@case_apart({"name": ["c", "d"]}, "name")
@case_apart({"name": "c", "maxTTL": "soon"}, "maxTTL")
@case_apart({"name": "c", "maxTTL": "-2"}, "maxTTL")
@case_apart({"name": "c", "maxTTL": "2147483648"}, "maxTTL")
@case_apart({"name": "c", "maxTTL": "9" * 5000}, "maxTTL")
@case_apart({"name": "c", "maxTTL": "--1"}, "maxTTL")
@case_apart({"name": "c", "maxTTL": "²"}, "maxTTL")
@case_apart({"name": "c", "history": "maybe"}, "history")
@case_apart({str(number): "x" for number in range(17)}, "_")
def test_bad_fields(node: Node, ask: Client, form: dict[str, Any], field: str) -> None:
    answer = ask("POST", f"{SCOPES}/_default/collections", data=form)
    assert answer.status_code == 400
    assert answer.json()["errors"].keys() == {field}
    assert node.stored.manifest.uid == 0


def test_a_body_that_is_not_utf_8(ask: Client) -> None:
    for body in (b"name=\xff", b"name=%ff"):
        assert ask("POST", SCOPES, content=body).status_code == 400


@case_apart("POST", "beer/scopes", "shop", 400, 'Scope with name "shop" already exists')
@case_apart(
    "POST", f"{SHOP}/collections", "orders", 400, 'Collection with name "orders" in scope "shop" already exists'
)
@case_apart("POST", "beer/scopes/pub/collections", "orders", 404, 'Scope with name "pub" is not found')
@case_apart("DELETE", "beer/scopes/pub", None, 404, 'Scope with name "pub" is not found')
@case_apart("DELETE", "beer/scopes/_default", None, 400, "Deleting _default scope is not allowed")
@case_apart("DELETE", "beer/scopes/pub/collections/x", None, 404, 'Scope with name "pub" is not found')
@case_apart("DELETE", f"{SHOP}/collections/x", None, 404, 'Collection with name "x" in scope "shop" is not found')
@case_apart("POST", "nope/scopes", "shop", 404, 'Bucket with name "nope" not found')
def test_changes_that_can_t_be_made(
    node: Node, ask: Client, method: str, path: str, name: str | None, status: int, message: str
) -> None:
    """The words are those that the SDKs look for."""
    node.stored.set_manifest(Manifest().with_scope("shop").with_collection("shop", "orders"))
    answer = ask(method, f"/pools/default/buckets/{path}", data={"name": name} if name else None)
    assert (answer.status_code, answer.json()) == (status, {"errors": {"_": message}})
    assert node.stored.manifest.uid == 2


def test_one_collection_too_many(node: Node, ask: Client) -> None:
    collections = tuple(Collection(id=CollectionId(8 + at), name=f"c{at}") for at in range(COLLECTIONS_MAX))
    node.stored.manifest = Manifest(scopes=(Scope(id=ScopeId(0), name="_default", collections=collections),))
    answer = ask("POST", f"{SCOPES}/_default/collections", data={"name": "more"})
    assert answer.status_code == 400
    assert "at most 1200 scopes" in answer.json()["errors"]["_"]


def test_a_full_disk_and_faults_of_our_own(node: Node, ask: Client) -> None:
    node.fault = StoreFull("no room is left", hint="Free disk space")
    answer = ask("POST", SCOPES, data={"name": "shop"})
    assert (answer.status_code, answer.json()) == (503, {"errors": {"_": "no room is left. Free disk space"}})
    node.fault = ZeroDivisionError("of ours")
    answer = ask("POST", SCOPES, data={"name": "shop"})
    assert answer.status_code == 500
    assert "an error of its own" in answer.json()["message"]


# --- waiting for a manifest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_manifest_that_is_there(ask: Client, method: str) -> None:
    ask("POST", SCOPES, data={"name": "shop"})
    for uid in ("0", "1"):
        answer = ask(method, f"{SCOPES}/@ensureManifest/{uid}", auth=READER)
        assert (answer.status_code, answer.content) == (200, b"")


async def test_a_manifest_that_comes_later(node: Node, ask: Client) -> None:
    waiting = asyncio.create_task(ask.send("POST", f"{SCOPES}/@ensureManifest/1"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await ask.send("POST", SCOPES, data={"name": "shop"})
    assert (await waiting).status_code == 200


def test_manifests_that_do_not_come_or_can_not_be(ask: Client) -> None:
    answer = ask("POST", f"{SCOPES}/@ensureManifest/A", data={"timeout": "10"})
    assert (answer.status_code, answer.json()) == (504, {"message": "The manifest did not come within 0.01 s"})
    for uid in ("x", "-1", "1_0", "0x1", "1" * 17):
        assert ask("POST", f"{SCOPES}/@ensureManifest/{uid}").status_code == 400, uid
    for timeout in ("soon", "-1", "300001"):
        answer = ask("POST", f"{SCOPES}/@ensureManifest/0", data={"timeout": timeout})
        assert (answer.status_code, answer.json()["errors"].keys()) == (400, {"timeout"})
