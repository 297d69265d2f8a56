"""The range scans of a bucket that are under way, by the ids that their clients have, and their bounds.

A scan holds a view of the data, and what it needs is not given back to the disk meanwhile: so scans are few, and none
lives long. Handlers begin and continue them, a session that ends takes its own along, and the listener's tick ends
those that are too old. Sans-IO: the time comes in as a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.protocol.numbers import VBucketId, Vbuuid
from headwater.store.range_scan import RangeScan

SCANS_MAX = 32
"""Of a bucket, at a time. Each takes up to 6 MB for its keys, and what was young of its vbucket."""
SCANS_OF_CONNECTION_MAX = 16
SCAN_S_MAX = 180.0
"""How long a scan may take in all; kv_engine's default."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningScan:
    """A scan, and what it began with: on another branch of history it would be of something else."""

    scan: RangeScan
    vbucket: VBucketId
    vbuuid: Vbuuid
    owner: object
    """The session that has begun it. Others that know its id may continue it: clients have several connections."""
    until_s: float


@dataclass(slots=True)
class RangeScans:
    running: dict[bytes, RunningScan] = field(default_factory=dict)

    def is_full(self, owner: object) -> bool:
        own = sum(1 for running in self.running.values() if running.owner is owner)
        return len(self.running) >= SCANS_MAX or own >= SCANS_OF_CONNECTION_MAX

    def end(self, scan_id: bytes) -> None:
        self.running.pop(scan_id).scan.close()

    def end_of(self, owner: object) -> None:
        """The session is gone."""
        for scan_id in [scan_id for scan_id, running in self.running.items() if running.owner is owner]:
            self.end(scan_id)

    def end_all(self) -> None:
        """The bucket is closed."""
        for scan_id in list(self.running):
            self.end(scan_id)

    def tick(self, now_s: float) -> None:
        for scan_id in [scan_id for scan_id, running in self.running.items() if running.until_s <= now_s]:
            self.end(scan_id)
