"""The settings of a bucket that can be changed while it is served, and where a node keeps them.

They are a row of the bucket's own table, beside its facts, so a bucket and its settings are made in one write. In a
cluster the published config carries them (`PublishedConfig.settings`), and every node stores what it adopts. REST's
names for them, and what is refused, are in `http.bucket_management`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headwater.errors import DataDamaged, MalformedJson
from headwater.protocol.frames import DurabilityLevel
from headwater.store.compaction import Retention
from headwater.store.engine import Engine, PutRow, Table

BUCKET_SETTINGS = b"settings"
"""The key in the bucket's own table."""
REPLICAS_MAX = 3
MAX_TTL_S_MAX = 2**31 - 1
RAM_QUOTA_MB_MIN = 100
"""Couchbase's bound."""
RAM_QUOTA_MB_MAX = 2**31 - 1
HISTORY_S_MAX = 2**53
HISTORY_BYTES_MIN = 2**31
"""Couchbase's bound for a bucket that has one."""
HISTORY_BYTES_MAX = 2**53
_BOUNDS = {
    "replicas": REPLICAS_MAX,
    "max_ttl_s": MAX_TTL_S_MAX,
    "ram_quota_mb": RAM_QUOTA_MB_MAX,
    "durability_min_level": max(DurabilityLevel),
    "history_s": HISTORY_S_MAX,
    "history_bytes": HISTORY_BYTES_MAX,
}
_CHOICES = {
    "storage_backend": ("couchstore", "magma"),
    "conflict_resolution": ("seqno", "lww"),
    "compression_mode": ("off", "passive", "active"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """The defaults are those of a bucket that `headwater serve --bucket` makes."""

    ram_quota_mb: int | None = None
    """Kept and shown, for clients that compare what they set; nothing is bounded by it. None shows the machine's."""
    replicas: int = 1
    """Of a bucket that is in no cluster. In one the published config has the number. One is Couchbase's default, too.
    Clients that watch over durability themselves refuse to, even for the active copy alone, if there is to be none."""
    max_ttl_s: int = 0
    """How long documents live at most, unless their collection says otherwise; 0 for no bound."""
    flush_enabled: bool = False
    durable_alone: bool = True
    """Whether the active copy is enough for a durable write of a bucket in no cluster, where no node has the replicas.
    Couchbase refuses such writes (DURABILITY_IMPOSSIBLE), and so do buckets that are made over REST."""
    durability_min_level: int = 0
    """The `DurabilityLevel` that every write of a client has at least; 0 for none."""
    storage_backend: str = "couchstore"
    """Kept and shown; there is one kind of storage. It keeps histories, which Couchbase has in Magma only."""
    conflict_resolution: str = "seqno"
    """Which of two versions a write with metadata leaves: the one with the higher revision, or with `lww` the one that
    was written last."""
    compression_mode: str = "passive"
    """Kept and shown: values are kept as clients send them."""
    history_s: int = 0
    history_bytes: int = 0
    """How much of superseded versions the whole bucket keeps, in place of the node's options where one of both is set;
    0 is no bound then."""
    history_default: bool = False
    """Whether the history of a new collection is kept, if it does not say."""
    is_forming: bool = False
    """It was made to be shared out over several nodes, and has no config yet. One that never gets it is removed."""

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, members: Mapping[str, Any]) -> BucketSettings:
        """Read settings that another node or an earlier version has written: what is missing has its default."""
        known = {name: members[name] for name in cls.__dataclass_fields__ if name in members}
        for name, value in known.items():
            if name in _CHOICES:
                is_valid = value in _CHOICES[name]
            elif name in _BOUNDS:
                is_valid = type(value) is int and 0 <= value <= _BOUNDS[name]
            else:
                is_valid = isinstance(value, bool)
            if not is_valid and not (name == "ram_quota_mb" and value is None):
                raise MalformedJson(f"{value!r} is not a value of the bucket's setting {name}")
        return cls(**known)

    def retention(self, of_node: Retention, *, vbuckets: int) -> Retention:
        """What a bucket of so many vbuckets keeps."""
        if not self.history_s and not self.history_bytes:
            return of_node
        return replace(
            of_node,
            history_s=self.history_s or HISTORY_S_MAX,
            history_bytes=-(-self.history_bytes // vbuckets) or HISTORY_BYTES_MAX,
        )

    def row(self) -> PutRow:
        return PutRow(Table.BUCKET, BUCKET_SETTINGS, json.dumps(self.encode()).encode())


def stored_settings(engine: Engine) -> BucketSettings:
    """The settings of the bucket that an engine holds."""
    with engine.view() as view:
        row = view.get(Table.BUCKET, BUCKET_SETTINGS)
        stored = None if row is None else bytes(row)
    if stored is None:
        return BucketSettings()
    try:
        members = json.loads(stored)
        if not isinstance(members, dict):
            raise MalformedJson("they are no object")
        return BucketSettings.decode(members)
    except (ValueError, TypeError, AttributeError, MalformedJson) as error:
        raise DataDamaged(
            f"the settings of a bucket are damaged: {error!r}", hint="Restore the data from a backup or a replica"
        ) from error
