"""What a failover has taken back, and what the tables have made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
from deltalake import DeltaTable

from demo.commands import PASSWORD, USER
from headwater import ClientSettings, Offsets, Surveyor


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Changes that are in the tables, and in the bucket no more."""

    vbuckets: frozenset[int]
    changes: int


def taken_back(url: str, landed: Offsets) -> TakenBack:
    """Compare how far the tables are with where the branches of the bucket's history begin."""
    with Surveyor(ClientSettings.make(url, user=USER, password=PASSWORD)) as surveyor:
        branches = {vbucket: status.failover_log.newest for vbucket, status in surveyor.survey().items()}
    lost = {
        int(vbucket): offset.seqno - branches[vbucket].seqno
        for vbucket, offset in landed.offsets.items()
        if offset.vbuuid != branches[vbucket].vbuuid and offset.seqno > branches[vbucket].seqno
    }
    return TakenBack(frozenset(lost), sum(lost.values()))


def void_changes(lake: Path) -> int:
    """How many changes the tables hold that a rollback took back."""
    changes = DeltaTable(lake / "changes").to_pyarrow_table(columns=["void"])
    return int(pc.sum(changes.column("void")).as_py() or 0)
