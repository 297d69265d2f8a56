"""Asks for the manifest of a bucket again and again, over one connection. An edge: it blocks."""

from __future__ import annotations

from headwater.client.bucket_view import BucketView
from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import ClusterMap
from headwater.client.kv_cluster import KvCluster
from headwater.client.kv_connection import KvConnection
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.vbuckets import GetCollectionsManifest


class ManifestConnection:
    """Connects when it is first asked, and again after a failure."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._connection: KvConnection | None = None

    def look(self, cluster_map: ClusterMap) -> BucketView:
        """The bucket as it is now, with a map that is known already."""
        if self._connection is None:
            self._connection = KvCluster(self._settings).connect()
        try:
            has_collections = self._connection.outcome.negotiated.collections
            manifest = _read_manifest(self._connection) if has_collections else Manifest()
        except BaseException:
            # Nobody must take an answer that is still on its way for that to the next question.
            self.close()
            raise
        return BucketView(cluster_map=cluster_map, manifest=manifest, has_collections=has_collections)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _read_manifest(connection: KvConnection) -> Manifest:
    answer = connection.request(GetCollectionsManifest())
    assert isinstance(answer, PlainResponse)
    return Manifest.decode(answer.value)
