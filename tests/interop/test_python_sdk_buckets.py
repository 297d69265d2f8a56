"""The bucket manager of the PyPI package `couchbase`: buckets made, changed, flushed, dropped, on one node and on 3."""

from __future__ import annotations

from datetime import timedelta

import pytest
from couchbase.cluster import Cluster
from couchbase.durability import DurabilityLevel
from couchbase.exceptions import (
    BucketAlreadyExistsException,
    BucketDoesNotExistException,
    BucketNotFlushableException,
    CollectionNotFoundException,
    DocumentNotFoundException,
    InvalidArgumentException,
)
from couchbase.management.buckets import BucketManager, CreateBucketSettings, StorageBackend
from couchbase.management.collections import UpdateCollectionSettings
from couchbase.management.logic.bucket_mgmt_types import BucketSettings, BucketType, ConflictResolutionType
from couchbase.options import GetOptions


@pytest.fixture
def manager(any_cluster: Cluster) -> BucketManager:
    return any_cluster.buckets()


def test_the_life_of_a_bucket(any_cluster: Cluster, manager: BucketManager, key: str) -> None:
    manager.create_bucket(CreateBucketSettings(name="orders", ram_quota_mb=128, flush_enabled=True, num_vbuckets=16))
    made = manager.get_bucket("orders")
    assert (made.name, made.ram_quota_mb, made.flush_enabled, made.max_expiry) == ("orders", 128, True, timedelta(0))
    assert {"default", "orders"} <= {one.name for one in manager.get_all_buckets()}
    documents = any_cluster.bucket("orders").default_collection()
    documents.upsert(key, {"version": 1})

    manager.update_bucket(BucketSettings(name="orders", max_expiry=timedelta(hours=1), ram_quota_mb=256))
    changed = manager.get_bucket("orders")
    assert (changed.ram_quota_mb, changed.max_expiry, changed.flush_enabled) == (256, timedelta(hours=1), True)
    documents.upsert(key, {"version": 2})
    assert documents.get(key, GetOptions(with_expiry=True)).expiry_time is not None

    manager.flush_bucket("orders")
    with pytest.raises(DocumentNotFoundException):
        documents.get(key)
    documents.upsert(key, {"version": 3})
    assert documents.get(key).content_as[dict] == {"version": 3}

    manager.drop_bucket("orders")
    with pytest.raises(BucketDoesNotExistException):
        manager.get_bucket("orders")
    assert "orders" not in {one.name for one in manager.get_all_buckets()}
    manager.create_bucket(CreateBucketSettings(name="orders", num_vbuckets=16))
    assert manager.get_bucket("orders").flush_enabled is False
    manager.drop_bucket("orders")


def test_what_is_refused(manager: BucketManager) -> None:
    with pytest.raises(BucketAlreadyExistsException):
        manager.create_bucket(CreateBucketSettings(name="default"))
    with pytest.raises(BucketDoesNotExistException):
        manager.drop_bucket("nowhere")
    with pytest.raises(BucketDoesNotExistException):
        manager.update_bucket(BucketSettings(name="nowhere", ram_quota_mb=128))
    with pytest.raises(BucketNotFlushableException):
        manager.flush_bucket("default")
    for settings in (
        {"storage_backend": StorageBackend.MAGMA},
        {"bucket_type": BucketType.EPHEMERAL},
        {"conflict_resolution_type": ConflictResolutionType.TIMESTAMP},
        {"minimum_durability_level": DurabilityLevel.MAJORITY},
        {"ram_quota_mb": 1},
    ):
        with pytest.raises(InvalidArgumentException):
            manager.create_bucket(CreateBucketSettings(name="refused", **settings))
    assert "refused" not in {one.name for one in manager.get_all_buckets()}


def test_a_changed_collection(any_cluster: Cluster) -> None:
    collections = any_cluster.bucket("default").collections()
    collections.create_collection("_default", "changed")
    collections.update_collection("_default", "changed", UpdateCollectionSettings(max_expiry=timedelta(hours=2)))
    found = {one.name: one for scope in collections.get_all_scopes() for one in scope.collections}
    assert found["changed"].max_expiry == timedelta(hours=2)
    with pytest.raises(CollectionNotFoundException):
        collections.update_collection("_default", "nowhere", UpdateCollectionSettings(max_expiry=timedelta(hours=2)))
