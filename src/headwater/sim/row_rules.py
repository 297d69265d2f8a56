"""The rules that the rows of one consumer keep, over all its lives. They share no code with the client.

* Seqnos of a vbucket rise, unless a rollback takes it back; and that one takes something back.
* A change lies in its snapshot, and a snapshot has a key once, unless all versions were asked for.
* Nothing is read on a branch that another one has taken the place of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from headwater.sim.consumer_state import Row


@dataclass(slots=True)
class _VBucket:
    seqno: int = 0
    vbuuid: int = 0
    past_vbuuids: tuple[int, ...] = ()
    snapshot: tuple[int, int] = (0, 0)
    keys: frozenset[tuple[int, bytes]] = frozenset()


@dataclass(slots=True)
class RowRules:
    vbuckets: dict[int, _VBucket] = field(default_factory=dict)

    def copy(self) -> RowRules:
        """For a checkpoint: what follows it may come again."""
        return RowRules(
            {
                number: _VBucket(one.seqno, one.vbuuid, one.past_vbuuids, one.snapshot, one.keys)
                for number, one in self.vbuckets.items()
            }
        )

    def check(self, rows: Iterable[Row], *, all_versions: bool) -> None:
        for row in rows:
            vbucket = self.vbuckets.setdefault(row["vbucket"], _VBucket())
            if row["op"] == "rollback":
                _check_rollback(vbucket, row)
            else:
                _check_change(vbucket, row, all_versions=all_versions)


def _check_change(vbucket: _VBucket, row: Row, *, all_versions: bool) -> None:
    seqno, snapshot = row["seqno"], (row["snapshot_start"], row["snapshot_end"])
    assert seqno > vbucket.seqno, f"seqno {seqno} after {vbucket.seqno}: {row}"
    assert snapshot[0] <= seqno <= snapshot[1], f"a change outside its snapshot: {row}"
    _check_branch(vbucket, row)
    if snapshot != vbucket.snapshot:
        vbucket.snapshot, vbucket.keys = snapshot, frozenset()
    if row["key"] is not None and not all_versions:
        key = (row["collection_id"], row["key"])
        assert key not in vbucket.keys, f"a key is twice in a snapshot: {row}"
        vbucket.keys |= {key}
    vbucket.seqno = seqno


def _check_rollback(vbucket: _VBucket, row: Row) -> None:
    told = json.loads(row["value"])
    assert row["seqno"] < told["from_seqno"], f"a rollback that takes nothing back: {row}"
    assert told["from_seqno"] >= vbucket.seqno, f"a rollback from before {vbucket.seqno}: {row}"
    _check_branch(vbucket, row)
    vbucket.seqno = row["seqno"]
    vbucket.snapshot, vbucket.keys = (row["seqno"], row["seqno"]), frozenset()


def _check_branch(vbucket: _VBucket, row: Row) -> None:
    vbuuid = row["vbuuid"]
    assert vbuuid not in vbucket.past_vbuuids, f"a branch that has ended: {row}"
    if vbuuid != vbucket.vbuuid:
        if vbucket.vbuuid:
            vbucket.past_vbuuids += (vbucket.vbuuid,)
        vbucket.vbuuid = vbuuid
