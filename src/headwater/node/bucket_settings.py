"""The settings of a bucket that can be changed while it is served, and where a node keeps them.

They are a row of the bucket's own table, beside its facts, so a bucket and its settings are made in one write. In a
cluster the published config carries them (`PublishedConfig.settings`), and every node stores what it adopts. REST's
names for them, and what is refused, are in `http.bucket_management`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwater.errors import DataDamaged, MalformedJson
from headwater.store.engine import Engine, PutRow, Table

BUCKET_SETTINGS = b"settings"
"""The key in the bucket's own table."""
REPLICAS_MAX = 3
MAX_TTL_S_MAX = 2**31 - 1
RAM_QUOTA_MB_MIN = 100
"""Couchbase's bound."""
RAM_QUOTA_MB_MAX = 2**31 - 1
_BOUNDS = {"replicas": REPLICAS_MAX, "max_ttl_s": MAX_TTL_S_MAX, "ram_quota_mb": RAM_QUOTA_MB_MAX}


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
    is_forming: bool = False
    """It was made to be shared out over several nodes, and has no config yet. One that never gets it is removed."""

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, members: Mapping[str, Any]) -> BucketSettings:
        """Read settings that another node or an earlier version has written: what is missing has its default."""
        known = {name: members[name] for name in cls.__dataclass_fields__ if name in members}
        for name, value in known.items():
            bound = _BOUNDS.get(name)
            is_valid = isinstance(value, bool) if bound is None else type(value) is int and 0 <= value <= bound
            if not is_valid and not (name == "ram_quota_mb" and value is None):
                raise MalformedJson(f"{value!r} is not a value of the bucket's setting {name}")
        return cls(**known)

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
