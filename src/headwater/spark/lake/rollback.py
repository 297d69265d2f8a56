"""A rollback in a batch: which files hold what it took back, and whether it can be undone at all.

What is older than the retention of `changes` has been trimmed to the state that it left: of a key only the newest
version is there, and nothing of one that was removed. A rollback to a seqno inside that part can't be undone, for
versions that would be alive again are gone. Then all of the vbucket is void, and it has to be read again from 0. So it
is with a rollback into the middle of a snapshot (`void_rows.torn_vbuckets`), which a careful reader never asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headwater.spark.lake.data_files import DataFile, numbers, read_files
from headwater.spark.lake.layout import LakeFacts, TablePlace
from headwater.spark.lake.void_rows import Rollbacks, VoidTask, may_hold_dead_rows


def void_tasks(place: TablePlace, facts: LakeFacts, files: Iterable[DataFile], rollbacks: Rollbacks) -> list[VoidTask]:
    """The work of marking what rollbacks took back."""
    return [
        VoidTask(place=place, facts=facts, file=file, rollbacks=rollbacks)
        for file in files
        if may_hold_dead_rows(file, rollbacks)
    ]


def out_of_reach(place: TablePlace, files: Sequence[DataFile], rollbacks: Rollbacks, *, trimmed_batch: int) -> set[int]:
    """The vbuckets whose rollback goes behind what has been trimmed, up to a batch."""
    wanted = np.array(sorted(rollbacks))
    trimmed = [
        file
        for file in files
        if file.ranges.get("batch", (0, 0))[0] <= trimmed_batch
        and any(file.may_hold("vbucket", low=vbucket, high=vbucket) for vbucket in rollbacks)
    ]
    reach: dict[int, int] = {}
    for _, rows in read_files(place, trimmed, ["vbucket", "seqno", "batch", "void"]):
        vbuckets, seqnos = numbers(rows, "vbucket"), numbers(rows, "seqno")
        marks = np.isin(vbuckets, wanted) & (numbers(rows, "batch") <= trimmed_batch)
        marks &= ~np.asarray(rows.column("void").to_numpy())
        for vbucket in np.unique(vbuckets[marks]).tolist():
            highest = int(seqnos[marks & (vbuckets == vbucket)].max())
            reach[vbucket] = max(highest, reach.get(vbucket, 0))
    return {vbucket for vbucket, kept in rollbacks.items() if 0 < kept < reach.get(vbucket, 0)}
