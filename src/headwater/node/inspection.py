"""The node as those see it who show it to people: read only, and with nothing made for them in advance.

The dashboard names what it needs (`dashboard.source.NodeSource`), and this has it. Neither package knows the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Unpack

import numpy as np
from starlette.requests import Request

from headwater.log_fields import Fields
from headwater.node.auth.users import Action
from headwater.node.consumer.consumer_views import ConsumerView
from headwater.node.http.answers import Refusal
from headwater.node.http.logins import Logins
from headwater.node.node import Node
from headwater.node.producer.statistics import ConnectionStatistics, connection_statistics, stream_backlogs
from headwater.node.traffic import Traffic
from headwater.store.bucket import Bucket

Lags = np.ndarray[tuple[int], np.dtype[np.int64]]


class Inspection:
    """See the module. Everything is called in the node's event loop."""

    def __init__(self, node: Node, logins: Logins) -> None:
        self._node = node
        self._logins = logins

    @property
    def is_ready(self) -> bool:
        return self._node.is_ready

    @property
    def version(self) -> str:
        return self._node.server_version

    def now_s(self) -> float:
        return self._node.now_s()

    def uptime_s(self) -> float:
        return self._node.uptime_s()

    def log(self, message: str, **about: Unpack[Fields]) -> None:
        self._node.log(message, **about)

    # --- who asks -------------------------------------------------------------------------------------------------

    async def log_in(self, peer: str, name: str, password: str) -> None:
        """Raise a refusal unless the user has this password. Failures count in the node's one throttle."""
        try:
            await self._logins.check(peer, name, password)
        except Refusal as refusal:
            # A browser would ask with a window of its own if it saw the challenge.
            headers = {key: value for key, value in (refusal.headers or {}).items() if key != "WWW-Authenticate"}
            raise Refusal(refusal.status, refusal.body, headers=headers) from refusal

    async def user_of(self, request: Request) -> str:
        """The user by HTTP's basic authentication, for programs."""
        return await self._logins.user_of(request)

    def user(self, name: str) -> object | None:
        """What stands for the user as it is now: another object once its password or its rights have changed."""
        return self._node.users.by_name.get(name)

    def may_see(self, user: str, bucket: str) -> bool:
        """Whether the user may read the bucket's documents and changes."""
        users = self._node.users
        return users.may(user, Action.READ, bucket) and users.may(user, Action.STREAM, bucket)

    # --- what there is --------------------------------------------------------------------------------------------

    def bucket_names(self) -> Iterable[str]:
        return self._node.bucket_names()

    def bucket(self, name: str) -> Bucket:
        return self._node.bucket_service(name).bucket

    def disk_bytes(self, bucket: str) -> int:
        return self._node.folder.disk_bytes(bucket)

    def cluster_config(self, bucket: str) -> bytes:
        return self._node.cluster_config(bucket)

    def traffic(self, bucket: str) -> Traffic:
        """The totals of all connections, those that are gone included."""
        ended, connections = self._node.bucket_service(bucket).ended, self._node.producer_connections(bucket)
        return Traffic(
            requests=self._node.kv_requests(bucket),
            sent_messages=ended.sent_messages + sum(connection.sent_messages for connection in connections),
            sent_bytes=ended.sent_bytes + sum(connection.sent_bytes for connection in connections),
            rollbacks=ended.rollbacks,
        )

    def connections(self, bucket: str, name: str | None = None) -> list[ConnectionStatistics]:
        """All connections without their streams, or the one that is named with them."""
        connections = self._node.producer_connections(bucket)
        return connection_statistics(connections, now_s=self.now_s(), name=name, streams_max=0)

    def consumers(self, bucket: str, name: str | None = None) -> list[ConsumerView]:
        """All connections that this node receives its copies by without their streams, or the one named with them."""
        return self._node.consumer_views(bucket, name, streams_max=0)

    def lags(self, bucket: str) -> Lags:
        """Of each vbucket: how many seqnos the stream of it that is furthest behind has still to get."""
        lags: Lags = np.zeros(len(self.bucket(bucket).vbuckets), dtype=np.int64)
        for connection in self._node.producer_connections(bucket):
            np.maximum.at(lags, *stream_backlogs(connection))
        return lags

    # --- the other nodes of the cluster ---------------------------------------------------------------------------

    def holds_replicas(self, bucket: str) -> bool:
        """Whether copies here are let fall behind, for a drill."""
        return self._node.membership(bucket).replication.is_held

    def offer_numbers(self, bucket: str, tell: Callable[[], Iterable[tuple[str, object]]]) -> None:
        """Let the other nodes have what this tells, when they ask for it with `numbers_of`."""
        self._node.bucket_service(bucket).vbucket_numbers = tell

    def other_nodes(self, bucket: str) -> list[str]:
        """The other nodes of the bucket's cluster, by the names that its config has for them."""
        return self._node.membership(bucket).peer_statistics.names()

    async def numbers_of(self, bucket: str, node: str) -> Mapping[str, str]:
        """What another node offers. Raises a `HeadwaterError` where it does not answer."""
        return await self._node.membership(bucket).peer_statistics.ask(node, "headwater-vbuckets")
