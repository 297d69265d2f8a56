"""The bucket of a cluster, for landings: writes go to the node of their vbucket, and follow its moves."""

from __future__ import annotations

import time

import httpx

from headwater.client.blocking_bucket import KvCluster
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection
from headwater.client.settings import ClientSettings
from headwater.errors import ConnectionFailed, NotMyVBucket, TemporaryFailure
from headwater.protocol.messages.base import Request, Response
from headwater.testing import HeadwaterCluster
from support.landings import MANAGEMENT_S_MAX, POLL_S, SourceBucket

VBUCKETS = 16
SETTLED_S_MAX = 30.0


class ClusterBucket(SourceBucket):
    def __init__(self, cluster: HeadwaterCluster) -> None:
        super().__init__(cluster.nodes[0])
        self.cluster = cluster
        self._connections: dict[Address, KvConnection] = {}
        self._map: ClusterMap | None = None

    @property
    def url(self) -> str:
        return self.cluster.url

    @property
    def options(self) -> dict[str, str]:
        return {"url": self.url, "user": self.cluster.user, "password": self.cluster.password}

    @property
    def settings(self) -> ClientSettings:
        return ClientSettings.make(**self.options)

    @property
    def map(self) -> ClusterMap:
        if self._map is None:
            self._map = KvCluster(self.settings).read_map()
        return self._map

    def vbuckets_on(self, node: int) -> list[int]:
        """Return the vbuckets that are active on a node."""
        self.close()
        address = self.cluster.nodes[node].address
        return [v for v in range(VBUCKETS) if self.map.nodes[self.map.active_node(v)] == address]

    def request(self, message: Request) -> Response:
        give_up_s = time.monotonic() + SETTLED_S_MAX
        while True:
            try:
                address = self.map.nodes[self.map.active_node(message.vbucket)]
                if address not in self._connections:
                    self._connections[address] = KvConnection.open(address, self.settings.login())
                return self._connections[address].request(message)
            except (ConnectionFailed, NotMyVBucket, TemporaryFailure):
                if time.monotonic() > give_up_s:
                    raise
            self.close()
            time.sleep(POLL_S)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._map = None

    def _ask(self, method: str, path: str, **request: object) -> httpx.Response:
        login = self.cluster.user, self.cluster.password
        url = f"{self.cluster.nodes[0].http_url.rstrip('/')}{path}"
        answer = httpx.request(method, url, auth=login, timeout=MANAGEMENT_S_MAX, **request)
        return answer.raise_for_status()
