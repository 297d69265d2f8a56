"""One look at a bucket before it is read: its map, and its scopes and collections."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import ClusterMap
from headwater.client.kv_cluster import KvCluster
from headwater.client.kv_connection import KvConnection
from headwater.errors import StatusError
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.vbuckets import GetCollectionsManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    cluster_map: ClusterMap
    manifest: Manifest
    has_collections: bool


def look_at_bucket(settings: ClientSettings) -> BucketView:
    """Connect to any host, blocking. Raises what is in the way of it."""
    cluster = KvCluster(settings)
    with cluster.connect() as connection:
        has_collections = connection.outcome.negotiated.collections
        return BucketView(
            cluster_map=cluster.map_of(connection),
            manifest=read_manifest(connection) if has_collections else Manifest(),
            has_collections=has_collections,
        )


def read_manifest(connection: KvConnection) -> Manifest:
    try:
        answer = connection.request(GetCollectionsManifest())
    except StatusError as error:
        raise error.retold(f"the collections can't be read: {error.reason}") from error
    assert isinstance(answer, PlainResponse)
    return Manifest.decode(answer.value)
