"""What the HTTP side needs of a node. Whoever runs the node implements `NodeView`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, Unpack

from headwater.log_fields import Fields
from headwater.node.auth.throttle import LoginThrottle
from headwater.node.auth.users import Users
from headwater.node.failover_drill import RolledBack
from headwater.node.http.changes import Changes
from headwater.node.producer.connection import ProducerConnection
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Seqno, VBucketId


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """A bucket as it is now."""

    name: str
    uuid: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUsage:
    """What a bucket holds and takes."""

    items: int
    disk_bytes: int
    memory_bytes: int
    memory_quota_bytes: int


class NodeView(Protocol):
    """The node as the routes see it. Everything is called in the event loop that runs the HTTP side."""

    @property
    def users(self) -> Users: ...

    def is_node_user(self, name: str) -> bool:
        """Whether this is whom the other nodes of a cluster log in as."""
        ...

    async def change_users(self, change: Callable[[Users], Users]) -> None:
        """Put what `change` makes of the users into force, other nodes' left out, and return once that is durable.

        `change` is called once, in a thread. What it raises is raised here; a `StoreError` says that the users are as
        they were, and so does a `LocalProtocolError` where there would be no admin left.
        """
        ...

    @property
    def throttle(self) -> LoginThrottle:
        """The one that the key-value side uses, too: guesses count wherever they are made."""
        ...

    @property
    def server_version(self) -> str:
        """Such as `7.6.0-0-headwater`. Clients decide by its first three numbers what they may use."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether every bucket is open and served. Until then, and while the node stops, little else is asked here."""
        ...

    @property
    def why_not_ready(self) -> str:
        """What the node does instead, such as `it opens bucket 'travel', 1 of 2`."""
        ...

    @property
    def config_changes(self) -> Changes:
        """To be notified when a cluster config has changed."""
        ...

    def now_s(self) -> float:
        """The throttle's clock, which never goes back."""
        ...

    def uptime_s(self) -> float: ...

    def log(self, message: str, **about: Unpack[Fields]) -> None: ...

    def bucket_names(self) -> Iterable[str]: ...

    def bucket(self, name: str) -> BucketView | None: ...

    def usage(self, bucket: str) -> BucketUsage: ...

    def cluster_config(self, bucket: str | None) -> bytes:
        """The cluster config for a bucket, or for the node, as the key-value side gives it (`cluster_config`)."""
        ...

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Put what `change` makes of the manifest into force, and return it once it is durable.

        `change` is called once, and nothing else happens between that and the new manifest being in force. What it
        raises is raised here; a `StoreError` says that the manifest is as it was.
        """
        ...

    async def wait_for_manifest(self, bucket: str, uid: int) -> None:
        """Return once a manifest with this uid or a higher one is durable. The wait may be cancelled."""
        ...

    def producer_connections(self, bucket: str) -> list[ProducerConnection]:
        """The connections that get changes of a bucket."""
        ...

    async def roll_back(self, bucket: str, vbucket: VBucketId, to_seqno: Seqno) -> RolledBack:
        """Do a failover drill. `InvalidInput` says that it can't be done so, a `StoreError` that it was not done."""
        ...

    def hold_replicas(self, bucket: str) -> int:
        """Let the copies on this node fall behind until they are released. Returns how many there are."""
        ...

    def release_replicas(self, bucket: str) -> int: ...
