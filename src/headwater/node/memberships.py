"""The memberships of a node: one for each of its buckets, and what the node asks of them as a whole."""

from __future__ import annotations

from collections.abc import Callable

from headwater.client.handshake import Credentials
from headwater.client.kv_connection import FEATURES, Login, Timeouts
from headwater.errors import MalformedJson
from headwater.node.cluster_config import NodeAddress
from headwater.node.commit_loop import CommitLoop
from headwater.node.kv.service import BucketService
from headwater.node.membership import MemberSettings, Membership
from headwater.node.options import NodeOptions
from headwater.node.published_config import PublishedConfig
from headwater.node.tls_contexts import peer_context
from headwater.protocol.features import Feature
from headwater.protocol.manifest import Manifest

TIMEOUTS = Timeouts(connect_s=2.0, answer_s=10.0)
PEER_FEATURES = (*FEATURES, Feature.XATTR, Feature.SNAPPY)
"""With snappy, values are sent as they are stored."""


class Memberships:
    """See the module."""

    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings
        self._by_bucket: dict[str, Membership] = {}

    def open(self, service: BucketService, loop: CommitLoop) -> None:
        self._by_bucket[service.name] = Membership(service, loop, self._settings)

    def of(self, bucket: str) -> Membership:
        return self._by_bucket[bucket]

    async def start(self, address: NodeAddress) -> None:
        for membership in self._by_bucket.values():
            await membership.start(address)

    async def stop(self) -> None:
        for membership in self._by_bucket.values():
            await membership.stop()

    def on_durable(self) -> None:
        for membership in self._by_bucket.values():
            membership.on_durable()

    def on_void(self, service: BucketService) -> None:
        self._by_bucket[service.name].on_void()

    def adopt(self, bucket: str | None, config: bytes) -> bool | None:
        """Take a config that a coordinator has published; None where it is not one, and somebody else's business."""
        published = None if bucket is None else PublishedConfig.decode(config)
        if published is None or bucket is None:
            return None
        if published.bucket != bucket:
            raise MalformedJson(f"a config of bucket {published.bucket!r} was given to bucket {bucket!r}")
        return self._by_bucket[bucket].adopt(published)

    def shown_config(self, bucket: str | None) -> bytes | None:
        """The config of the cluster that a bucket, or for None the node, is in; None where it is in none."""
        if bucket is not None:
            membership = self._by_bucket.get(bucket)
            return membership.shown_config if membership is not None and membership.config is not None else None
        for membership in self._by_bucket.values():
            # A node that was left out tells of itself, or nobody could add it again.
            if membership.config is not None and membership.this_node is not None:
                return membership.shown_node_config()
        return None

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest | None:
        """Have another node change the collections; None where that is this node's own business."""
        membership = self._by_bucket[bucket]
        return await membership.change_manifest(change) if membership.asks_another_for_changes else None


def peer_login(
    options: NodeOptions, random_bytes: Callable[[int], bytes]
) -> Callable[[str, Credentials | None], Login]:
    """How this node logs in to the others: over TLS where it speaks TLS itself."""
    tls = peer_context(options)

    def login(bucket: str, credentials: Credentials | None) -> Login:
        return Login(
            credentials=credentials,
            bucket=bucket,
            tls=tls,
            features=PEER_FEATURES,
            agent="headwater node",
            timeouts=TIMEOUTS,
            random_bytes=random_bytes,
        )

    return login
