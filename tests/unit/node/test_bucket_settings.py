"""The settings of a bucket as they are stored and published."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import DataDamaged, MalformedJson
from headwater.node.bucket_settings import BUCKET_SETTINGS, BucketSettings, stored_settings
from headwater.store.engine import MemoryEngine, PutRow, Table

SETTINGS = BucketSettings(ram_quota_mb=128, replicas=2, max_ttl_s=60, flush_enabled=True)


def test_they_are_what_they_were() -> None:
    engine = MemoryEngine()
    assert stored_settings(engine) == BucketSettings()
    engine.write([SETTINGS.row()])
    assert stored_settings(engine) == SETTINGS
    assert BucketSettings.decode({**SETTINGS.encode(), "of a newer version": 1}) == SETTINGS


@pytest.mark.parametrize(
    "members",
    [
        {"replicas": 4},
        {"replicas": True},
        {"max_ttl_s": -1},
        {"flush_enabled": 1},
        {"max_ttl_s": "1"},
        {"durability_min_level": 4},
        {"storage_backend": "rocks"},
    ],
)
def test_junk_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(MalformedJson):
        BucketSettings.decode(members)


@pytest.mark.parametrize("stored", [b"{", b"[1]", b'{"replicas": -1}'])
def test_damage_is_reported(stored: bytes) -> None:
    engine = MemoryEngine()
    engine.write([PutRow(Table.BUCKET, BUCKET_SETTINGS, stored)])
    with pytest.raises(DataDamaged):
        stored_settings(engine)
