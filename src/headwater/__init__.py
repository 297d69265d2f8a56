"""Couchbase's change protocol (DCP) in Python, from the wire to the lakehouse.

    async with headwater.connect("couchbase://host/bucket", user="reader", password=…) as client:
        async for change in client.changes():
            …

`headwater.blocking.connect` does the same without asyncio. The names in `__all__` here and in `headwater.blocking`,
`headwater.landing`, `headwater.spark`, `headwater.testing` and `headwater.protocol` are public. Everything else may
change in any version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater._version import __version__
from headwater.lazy_names import lazy_names

if TYPE_CHECKING:
    from headwater import blocking, errors
    from headwater.client.asyncio_client import Client, connect
    from headwater.client.batches import CHANGE_SCHEMA, change_schema
    from headwater.client.blocking_bucket import Surveyor
    from headwater.client.changes import (
        Change,
        CollectionCreated,
        CollectionDropped,
        CollectionModified,
        Deletion,
        DocumentChange,
        Expiration,
        Mutation,
        Rollback,
        ScopeCreated,
        ScopeDropped,
    )
    from headwater.client.checkpoints import CheckpointStore, FileCheckpoint, SqliteCheckpoint
    from headwater.client.checkpoints.xattrs import XattrCheckpoint
    from headwater.client.cluster_map import Network, vbucket_of
    from headwater.client.groups import Membership, StaticMember
    from headwater.client.groups.lease_group import LeaseGroup
    from headwater.client.kv_connection import Timeouts
    from headwater.client.metrics import ReaderMetrics
    from headwater.client.offsets import Offsets
    from headwater.client.prometheus import register_metrics, unregister_metrics
    from headwater.client.read_options import End, ReadKeywords, Snapshots, Start
    from headwater.client.reading import Batches, Changes
    from headwater.client.settings import ClientSettings, ConnectKeywords, TlsSettings
    from headwater.errors import HeadwaterError
    from headwater.protocol.sasl import Mechanism
    from headwater.protocol.snapshots import StreamOffset

_HOMES = {
    "headwater.client.asyncio_client": ("Client", "connect"),
    "headwater.client.batches": ("CHANGE_SCHEMA", "change_schema"),
    "headwater.client.changes": (
        "Change",
        "CollectionCreated",
        "CollectionDropped",
        "CollectionModified",
        "Deletion",
        "DocumentChange",
        "Expiration",
        "Mutation",
        "Rollback",
        "ScopeCreated",
        "ScopeDropped",
    ),
    "headwater.client.checkpoints": ("CheckpointStore", "FileCheckpoint", "SqliteCheckpoint"),
    "headwater.client.checkpoints.xattrs": ("XattrCheckpoint",),
    "headwater.client.cluster_map": ("Network", "vbucket_of"),
    "headwater.client.groups": ("Membership", "StaticMember"),
    "headwater.client.groups.lease_group": ("LeaseGroup",),
    "headwater.client.kv_connection": ("Timeouts",),
    "headwater.client.metrics": ("ReaderMetrics",),
    "headwater.client.offsets": ("Offsets",),
    "headwater.client.prometheus": ("register_metrics", "unregister_metrics"),
    "headwater.client.read_options": ("End", "ReadKeywords", "Snapshots", "Start"),
    "headwater.client.reading": ("Batches", "Changes"),
    "headwater.client.settings": ("ClientSettings", "ConnectKeywords", "TlsSettings"),
    "headwater.client.blocking_bucket": ("Surveyor",),
    "headwater.errors": ("HeadwaterError",),
    "headwater.protocol.sasl": ("Mechanism",),
    "headwater.protocol.snapshots": ("StreamOffset",),
}
_MODULES = ("blocking", "errors", "landing", "protocol", "spark", "testing")

__all__ = [
    "CHANGE_SCHEMA", "Batches", "Change", "Changes", "CheckpointStore", "Client", "ClientSettings",
    "CollectionCreated", "CollectionDropped", "CollectionModified", "ConnectKeywords", "Deletion", "DocumentChange",
    "End", "Expiration", "FileCheckpoint", "HeadwaterError", "LeaseGroup", "Mechanism", "Membership", "Mutation",
    "Network", "Offsets", "ReadKeywords", "ReaderMetrics", "Rollback", "ScopeCreated", "ScopeDropped", "Snapshots",
    "SqliteCheckpoint", "Start", "StaticMember", "StreamOffset", "Surveyor", "Timeouts", "TlsSettings",
    "XattrCheckpoint", "__version__", "blocking", "change_schema", "connect", "errors", "register_metrics",
    "unregister_metrics", "vbucket_of",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__, modules=_MODULES)
