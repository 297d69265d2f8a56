"""The rules that a client's batches keep, whatever happens to its connections. They share no code with the client.

* Seqnos of a vbucket rise, from one read to the next as well, unless a rollback takes it back.
* A change lies in its snapshot, and a snapshot has a key once, unless all versions were asked for.
* Snapshots follow each other. Where they are promised to be complete, nothing comes between the parts of one, and a
  batch does not end inside of one, unless it is too large for a batch. A consumer that has left inside of a snapshot
  may find a longer one, or none, when it comes back.
* Nothing is read on a branch that another one has taken the place of.
* A rollback says truly from where it goes back, and comes before anything of the new branch.
* The offsets stand behind the last change that was handed out, never before it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.consumer_state import Row

Offset = tuple[int, int, int, int]
"""vbuuid, seqno, snapshot start and end."""


def offsets_of_json(text: str) -> dict[int, Offset]:
    """Read saved offsets by the form that is documented for them."""
    rows = json.loads(text)["offsets"]
    return {
        row[0]: (int(row[1]), int(row[2]), int(row[3]), int(row[4]) if len(row) > 4 else int(row[2])) for row in rows
    }


@dataclass(slots=True)
class _VBucket:
    seqno: int = 0
    """Up to here everything has been handed out."""
    vbuuid: int = 0
    past_vbuuids: set[int] = field(default_factory=set)
    snapshot: tuple[int, int] = (0, 0)
    keys: set[tuple[Any, ...]] = field(default_factory=set)
    """Of the snapshot."""
    was_left: bool = False
    """The consumer has left since the last change, and come back."""


class StreamRules:
    """Follows a consumer over all its reads, and raises where a rule is broken."""

    def __init__(self, *, complete_snapshots: bool, whole_in_step: bool = False, all_versions: bool = False) -> None:
        self._complete_snapshots = complete_snapshots
        self._all_versions = all_versions
        self._whole_in_step = complete_snapshots and whole_in_step
        self._vbuckets: defaultdict[int, _VBucket] = defaultdict(_VBucket)

    def left(self) -> None:
        """The consumer leaves. When it comes back, it goes on from the last offsets."""
        for vbucket in self._vbuckets.values():
            vbucket.was_left = True

    def pretend_branch(self, vbucket: int, vbuuid: int) -> None:
        """The consumer will say that it has read this branch, and only that."""
        self._vbuckets[vbucket].vbuuid = vbuuid

    def check(self, rows: Iterable[Row], offsets: Mapping[int, Offset]) -> None:
        """A batch or a change, and where the client says that it stands behind it."""
        for row in rows:
            vbucket = self._vbuckets[row["vbucket"]]
            if row["op"] == "rollback":
                self._check_rollback(vbucket, row)
            else:
                self._check_change(vbucket, row)
        for number, offset in offsets.items():
            self._check_offset(number, self._vbuckets[number], offset)

    def _check_change(self, vbucket: _VBucket, row: Row) -> None:
        seqno, snapshot = row["seqno"], (row["snapshot_start"], row["snapshot_end"])
        assert seqno > vbucket.seqno, f"seqno {seqno} after {vbucket.seqno}: {row}"
        assert snapshot[0] <= seqno <= snapshot[1], f"a change outside its snapshot: {row}"
        self._check_branch(vbucket, row["vbuuid"], row)
        if snapshot != vbucket.snapshot:
            self._check_next_snapshot(vbucket, snapshot, row)
            vbucket.snapshot, vbucket.keys = snapshot, set()
        if row["key"] is not None and not self._all_versions:
            key = (row["collection_id"], row["key"])
            assert key not in vbucket.keys, f"a key is twice in a snapshot: {row}"
            vbucket.keys.add(key)
        vbucket.seqno, vbucket.was_left = seqno, False

    def _check_next_snapshot(self, vbucket: _VBucket, snapshot: tuple[int, int], row: Row) -> None:
        assert snapshot[1] > vbucket.seqno, f"snapshots go back: {row}"
        if self._complete_snapshots and not vbucket.was_left:
            # Its last seqnos may have had nothing to see in them.
            assert snapshot[0] >= vbucket.snapshot[1], f"{vbucket.snapshot} was not complete: {row}"

    def _check_branch(self, vbucket: _VBucket, vbuuid: int, where: object) -> None:
        assert vbuuid not in vbucket.past_vbuuids, f"a branch that has ended: {where}"
        if vbuuid != vbucket.vbuuid:
            if vbucket.vbuuid:
                vbucket.past_vbuuids.add(vbucket.vbuuid)
            vbucket.vbuuid = vbuuid

    def _check_rollback(self, vbucket: _VBucket, row: Row) -> None:
        told = json.loads(row["value"])
        # It may have been further than the last change: what lies between had nothing to see in it.
        assert told["from_seqno"] >= vbucket.seqno, f"a rollback from {told['from_seqno']} at {vbucket.seqno}: {row}"
        assert told["old_vbuuid"] == vbucket.vbuuid, f"a rollback of another branch than {vbucket.vbuuid}: {row}"
        assert told["new_vbuuid"] == row["vbuuid"], row
        assert row["seqno"] < told["from_seqno"], f"a rollback that takes nothing back: {row}"
        assert row["key"] is None, row
        self._check_branch(vbucket, row["vbuuid"], row)
        vbucket.seqno, vbucket.was_left = row["seqno"], False
        vbucket.snapshot, vbucket.keys = (row["seqno"], row["seqno"]), set()

    def _check_offset(self, number: int, vbucket: _VBucket, offset: Offset) -> None:
        vbuuid, seqno, start, end = offset
        where = f"the offset {offset} of vbucket {number}, which is at {vbucket.seqno}"
        assert start <= seqno <= end, where
        # The same is true of this.
        assert seqno >= vbucket.seqno, where
        assert seqno == end or not self._whole_in_step, where
        if seqno:
            self._check_branch(vbucket, vbuuid, where)
        vbucket.seqno = seqno
