"""The PyPI package `couchbase` with named scopes and collections: made over REST, by the SDK, and written to."""

from __future__ import annotations

from datetime import timedelta

import httpx
import pytest
from couchbase import exceptions
from couchbase.cluster import Cluster
from couchbase.management.collections import CollectionManager, CreateCollectionSettings
from couchbase.options import GetOptions, UpsertOptions

from support.node_process import PASSWORD, USER, NodeProcess

SHORT = timedelta(seconds=1)


@pytest.fixture(scope="module")
def manager(cluster: Cluster) -> CollectionManager:
    return cluster.bucket("default").collections()


def names(manager: CollectionManager) -> dict[str, set[str]]:
    return {scope.name: {collection.name for collection in scope.collections} for scope in manager.get_all_scopes()}


def test_collections_made_over_rest(sdk_node: NodeProcess, cluster: Cluster, key: str) -> None:
    scopes = f"{sdk_node.http_url}/pools/default/buckets/default/scopes"
    with httpx.Client(auth=(USER, PASSWORD)) as client:
        client.post(scopes, data={"name": "inventory"}).raise_for_status()
        for name in ("hotels", "flights"):
            made = client.post(f"{scopes}/inventory/collections", data={"name": name})
            uid = made.raise_for_status().json()["uid"]
        client.post(f"{scopes}/@ensureManifest/{uid}").raise_for_status()
    scope = cluster.bucket("default").scope("inventory")
    hotels, flights = scope.collection("hotels"), scope.collection("flights")
    hotels.upsert(key, {"stars": 4})
    flights.upsert(key, {"seats": 200})
    assert hotels.get(key).content_as[dict] == {"stars": 4}
    assert flights.get(key).content_as[dict] == {"seats": 200}
    assert not cluster.bucket("default").default_collection().exists(key).exists
    hotels.remove(key)
    with pytest.raises(exceptions.DocumentNotFoundException):
        hotels.get(key)
    assert flights.exists(key).exists


def test_collections_made_by_the_sdk(cluster: Cluster, manager: CollectionManager, key: str) -> None:
    manager.create_scope("made")
    manager.create_collection("made", "one")
    manager.create_collection("made", "two")
    assert names(manager)["made"] == {"one", "two"}
    one = cluster.bucket("default").scope("made").collection("one")
    one.upsert(key, {"version": 1})
    assert one.get(key).content_as[dict] == {"version": 1}
    manager.drop_collection("made", "two")
    assert names(manager)["made"] == {"one"}
    manager.drop_scope("made")
    assert "made" not in names(manager)
    assert "_default" in names(manager)["_default"]


def test_what_is_there_already_or_not_there(manager: CollectionManager) -> None:
    manager.create_scope("twice")
    manager.create_collection("twice", "twice")
    for error, call, *names in (
        (exceptions.ScopeAlreadyExistsException, manager.create_scope, "twice"),
        (exceptions.CollectionAlreadyExistsException, manager.create_collection, "twice", "twice"),
        (exceptions.ScopeNotFoundException, manager.drop_scope, "nowhere"),
        (exceptions.ScopeNotFoundException, manager.create_collection, "nowhere", "one"),
        (exceptions.CollectionNotFoundException, manager.drop_collection, "_default", "nowhere"),
    ):
        with pytest.raises(error):
            call(*names)


def test_writing_to_a_collection_that_is_not_there(cluster: Cluster, key: str) -> None:
    """The SDK takes it for one that is on its way, and tries until its time is up."""
    nowhere = cluster.bucket("default").scope("_default").collection("nowhere")
    with pytest.raises((exceptions.UnAmbiguousTimeoutException, exceptions.AmbiguousTimeoutException)) as refused:
        nowhere.upsert(key, {}, UpsertOptions(timeout=SHORT))
    assert "collection" in str(refused.value).lower()


def test_a_collection_made_again_is_empty(cluster: Cluster, manager: CollectionManager, key: str) -> None:
    manager.create_collection("_default", "again")
    collection = cluster.bucket("default").scope("_default").collection("again")
    collection.upsert(key, {"version": 1})
    manager.drop_collection("_default", "again")
    manager.create_collection("_default", "again")
    with pytest.raises(exceptions.DocumentNotFoundException):
        # The SDK knows the old id, is told that it is gone, and asks for the new one.
        collection.get(key, GetOptions(timeout=timedelta(seconds=10)))
    collection.upsert(key, {"version": 2})
    assert collection.get(key).content_as[dict] == {"version": 2}


def test_the_expiry_of_a_collection(cluster: Cluster, manager: CollectionManager, key: str) -> None:
    manager.create_collection("_default", "short", CreateCollectionSettings(max_expiry=timedelta(hours=1)))
    found = {collection.name: collection for scope in manager.get_all_scopes() for collection in scope.collections}
    assert found["short"].max_expiry == timedelta(hours=1)
    collection = cluster.bucket("default").scope("_default").collection("short")
    collection.upsert(key, {})
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time is not None


def test_a_bucket_has_its_own_collections(cluster: Cluster, manager: CollectionManager, key: str) -> None:
    other = cluster.bucket("other")
    manager.create_scope("only-here")
    assert "only-here" not in names(other.collections())
    other.default_collection().upsert(key, {"bucket": "other"})
    assert not cluster.bucket("default").default_collection().exists(key).exists
