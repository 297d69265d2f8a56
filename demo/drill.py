"""The failover drill: takes back changes that are in the tables already."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
from deltalake import DeltaTable

from demo.commands import headwater


@dataclass(frozen=True, slots=True)
class Drilled:
    """What the drills have done to the bucket."""

    vbuckets: frozenset[int]
    changes: int
    """That are gone."""
    landed: int
    """How many of them were in the tables."""


def drill_rollbacks(url: str, lake: Path, *, count: int) -> Drilled:
    """Take the vbuckets with the most changes back by a third of them, as a failover to a lagging copy does."""
    seqnos = DeltaTable(lake / "changes").to_pyarrow_table(columns=["vbucket", "seqno"])
    landed = seqnos.group_by("vbucket").aggregate([("seqno", "max")])
    most = landed.take(pc.select_k_unstable(landed, count, [("seqno_max", "descending"), ("vbucket", "ascending")]))
    gone = gone_landed = 0
    for row in most.to_pylist():
        to_seqno = row["seqno_max"] * 2 // 3
        options = ["--vbucket", str(row["vbucket"]), "--to", str(to_seqno)]
        done = json.loads(headwater("drill", "rollback", url, *options, "--json"))
        gone += done["high_seqno_before"] - done["rolled_back_to"]
        gone_landed += row["seqno_max"] - done["rolled_back_to"]
    return Drilled(frozenset(most.column("vbucket").to_pylist()), gone, gone_landed)


def void_changes(lake: Path) -> int:
    """How many changes the tables hold that a rollback took back."""
    changes = DeltaTable(lake / "changes").to_pyarrow_table(columns=["void"])
    return int(pc.sum(changes.column("void")).as_py() or 0)
