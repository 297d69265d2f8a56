"""The bucket manager of the PyPI package `couchbase`: buckets made, changed, flushed, dropped, on one node and on 3."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from couchbase import exceptions
from couchbase.cluster import Cluster
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.kv_range_scan import PrefixScan
from couchbase.management.buckets import BucketManager, CreateBucketSettings, StorageBackend
from couchbase.management.collections import UpdateCollectionSettings
from couchbase.management.logic.bucket_mgmt_types import (
    BucketSettings,
    BucketType,
    CompressionMode,
    ConflictResolutionType,
)
from couchbase.options import GetOptions, ScanOptions, UpsertOptions


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
    with pytest.raises(exceptions.DocumentNotFoundException):
        documents.get(key)
    documents.upsert(key, {"version": 3})
    assert documents.get(key).content_as[dict] == {"version": 3}

    manager.drop_bucket("orders")
    with pytest.raises(exceptions.BucketDoesNotExistException):
        manager.get_bucket("orders")
    assert "orders" not in {one.name for one in manager.get_all_buckets()}
    manager.create_bucket(CreateBucketSettings(name="orders", num_vbuckets=16))
    assert manager.get_bucket("orders").flush_enabled is False
    manager.drop_bucket("orders")


def test_what_is_refused(manager: BucketManager) -> None:
    with pytest.raises(exceptions.BucketAlreadyExistsException):
        manager.create_bucket(CreateBucketSettings(name="default"))
    with pytest.raises(exceptions.BucketDoesNotExistException):
        manager.drop_bucket("nowhere")
    with pytest.raises(exceptions.BucketDoesNotExistException):
        manager.update_bucket(BucketSettings(name="nowhere", ram_quota_mb=128))
    with pytest.raises(exceptions.BucketNotFlushableException):
        manager.flush_bucket("default")
    for settings in (
        {"bucket_type": BucketType.EPHEMERAL},
        {"minimum_durability_level": DurabilityLevel.MAJORITY, "num_replicas": 3},
        {"history_retention_duration": timedelta(minutes=1)},
        {"ram_quota_mb": 1},
    ):
        with pytest.raises(exceptions.InvalidArgumentException):
            manager.create_bucket(CreateBucketSettings(name="refused", **settings))
    with pytest.raises(exceptions.FeatureUnavailableException):
        manager.create_bucket(
            CreateBucketSettings(name="refused", conflict_resolution_type=ConflictResolutionType.CUSTOM)
        )
    assert "refused" not in {one.name for one in manager.get_all_buckets()}


def test_what_is_set_is_shown(manager: BucketManager) -> None:
    settings: dict[str, Any] = {
        "storage_backend": StorageBackend.MAGMA,
        "conflict_resolution_type": ConflictResolutionType.TIMESTAMP,
        "minimum_durability_level": DurabilityLevel.MAJORITY,
        "compression_mode": CompressionMode.ACTIVE,
        "history_retention_collection_default": True,
        "history_retention_duration": timedelta(hours=2),
        "history_retention_bytes": 2**31,
        "num_replicas": 2,
    }
    manager.create_bucket(CreateBucketSettings(name="set", num_vbuckets=16, **settings))
    try:
        made = manager.get_bucket("set")
        assert {name: made[name] for name in settings} == settings
        changed = {"minimum_durability_level": DurabilityLevel.NONE, "history_retention_duration": timedelta(hours=1)}
        manager.update_bucket(BucketSettings(name="set", **changed))
        made = manager.get_bucket("set")
        assert {name: made[name] for name in settings} == settings | changed
    finally:
        manager.drop_bucket("set")


def test_a_bucket_of_128_vbuckets(any_cluster: Cluster, manager: BucketManager, key: str) -> None:
    """The number that Couchbase 8.0 has for buckets of Magma."""
    manager.create_bucket(CreateBucketSettings(name="small", num_vbuckets=128, storage_backend=StorageBackend.MAGMA))
    try:
        assert manager.get_bucket("small").history_retention_collection_default
        documents = any_cluster.bucket("small").default_collection()
        wanted = {f"{key}-{number}": {"n": number} for number in range(300)}
        tokens = [result.mutation_token().as_dict() for result in documents.upsert_multi(wanted).results.values()]
        assert len({token["partition_id"] for token in tokens}) > 100
        assert max(token["partition_id"] for token in tokens) < 128
        found = documents.get_multi(list(wanted)).results
        assert {name: result.content_as[dict] for name, result in found.items()} == wanted
        scanned = documents.scan(PrefixScan(key), ScanOptions(ids_only=True))
        assert {result.id for result in scanned} == wanted.keys()
    finally:
        manager.drop_bucket("small")


def test_durable_writes_that_no_replica_can_take(cluster: Cluster) -> None:
    """As in Couchbase: one node, and a bucket that was made with a replica. Without one, the active copy is enough."""
    majority = UpsertOptions(durability=ServerDurability(DurabilityLevel.MAJORITY))
    manager = cluster.buckets()
    for name, replicas in (("copied", 1), ("single", 0)):
        manager.create_bucket(CreateBucketSettings(name=name, num_replicas=replicas, num_vbuckets=16))
    try:
        with pytest.raises(exceptions.DurabilityImpossibleException):
            cluster.bucket("copied").default_collection().upsert("k", {}, majority)
        cluster.bucket("single").default_collection().upsert("k", {}, majority)
        manager.create_bucket(
            CreateBucketSettings(name="strict", num_vbuckets=16, minimum_durability_level=DurabilityLevel.MAJORITY)
        )
        with pytest.raises(exceptions.DurabilityImpossibleException):
            cluster.bucket("strict").default_collection().upsert("k", {})
    finally:
        for name in ("copied", "single", "strict"):
            manager.drop_bucket(name)


def test_a_changed_collection(any_cluster: Cluster) -> None:
    collections = any_cluster.bucket("default").collections()
    collections.create_collection("_default", "changed")
    collections.update_collection("_default", "changed", UpdateCollectionSettings(max_expiry=timedelta(hours=2)))
    found = {one.name: one for scope in collections.get_all_scopes() for one in scope.collections}
    assert found["changed"].max_expiry == timedelta(hours=2)
    with pytest.raises(exceptions.CollectionNotFoundException):
        collections.update_collection("_default", "nowhere", UpdateCollectionSettings(max_expiry=timedelta(hours=2)))
