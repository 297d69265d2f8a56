"""Rollbacks in `changes`: the commit that brings a rollback marks the rows that it took back as *void*.

A rollback of a vbucket keeps everything up to a seqno; what came before it above that seqno never happened. A file that
holds such rows is written again with the mark set. The rows stay: `changes` records what was once believed. The tables
of documents then drop what they hold of the vbucket and build it again from `changes` (`change_rows.Fold`).

`commits` calls this on the driver, `change_files` inside a batch. Nothing here commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.lake.data_files import DataFile, FileReader, FileWriter, numbers, read_files
from headwater.lake.layout import CHANGE_RANGES, LakeFacts, changes_schema
from headwater.lake.location import Location
from headwater.protocol.kernels.memory import Column

Rollbacks = dict[int, int]
"""By vbucket: the last seqno that is kept."""


def add_rollback(rollbacks: Rollbacks, vbucket: int, kept: int) -> None:
    """Of several rollbacks of a vbucket, the one that goes back furthest counts."""
    rollbacks[vbucket] = min(kept, rollbacks.get(vbucket, kept))


# --- on the driver ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidedFiles:
    """What a commit changes in `changes` so that everything that its rollbacks took back is marked."""

    add: list[DataFile]
    remove: list[DataFile]
    rows: int
    """How many rows of the live files are void by this that were not before."""
    wiped: frozenset[int]
    """Vbuckets that can't be rolled back: everything of them is void, and they have to be read again from 0."""


def void_rows(
    location: Location,
    facts: LakeFacts,
    *,
    live: Sequence[DataFile],
    added: Sequence[DataFile],
    rollbacks: Rollbacks,
    wiped: Iterable[int],
    run: Callable[[Sequence[VoidTask]], list[Voided]],
) -> VoidedFiles:
    """Mark what the rollbacks of a batch took back, in the live files of the table and in those that the batch adds.

    `wiped` are vbuckets that are known to be out of reach; those are added to them that turn out to be torn.
    """
    lost = set(wiped)
    while True:
        limits = {vbucket: 0 if vbucket in lost else kept for vbucket, kept in rollbacks.items()}
        # What a wiped vbucket has in this very batch goes as well: all of it is read again.
        tasks = [
            VoidTask(location=location, facts=facts, file=file, rollbacks=taken_back)
            for files, taken_back in ((live, limits), (added, dict.fromkeys(lost, 0)))
            for file in files
            if _may_hold_dead_rows(file, taken_back)
        ]
        results = run(tasks)
        torn = {vbucket for voided in results for vbucket in voided.torn}
        if torn <= lost:
            break
        lost |= torn
    replaced = {voided.file.path: voided.replacement for voided in results if voided.replacement is not None}
    kept_or_new = [replaced.pop(file.path, file) for file in added]
    removed = [file for file in live if file.path in replaced]
    paths = {file.path for file in live}
    rows = sum(voided.rows for voided in results if voided.file.path in paths)
    return VoidedFiles(add=[*kept_or_new, *replaced.values()], remove=removed, rows=rows, wiped=frozenset(lost))


def _may_hold_dead_rows(file: DataFile, rollbacks: Rollbacks) -> bool:
    """Whether a file can hold what the rollbacks took back, by what the log says of it."""
    return any(
        file.may_hold("vbucket", low=vbucket, high=vbucket) and file.may_hold("seqno", low=kept + 1)
        for vbucket, kept in rollbacks.items()
    )


def out_of_reach(
    location: Location, files: Sequence[DataFile], rollbacks: Rollbacks, *, trimmed_batch: int
) -> set[int]:
    """The vbuckets whose rollback goes behind what has been trimmed, up to a batch.

    What has been trimmed is folded to the state that it left: of a key only the newest version is there, and nothing of
    one that was removed. Versions that would be alive again after such a rollback are gone.
    """
    wanted = np.array(sorted(rollbacks))
    trimmed = [
        file
        for file in files
        if file.ranges.get("batch", (0, 0))[0] <= trimmed_batch
        and any(file.may_hold("vbucket", low=vbucket, high=vbucket) for vbucket in rollbacks)
    ]
    reach: dict[int, int] = {}
    for rows in read_files(location, trimmed, ["vbucket", "seqno", "batch", "void"]):
        vbuckets, seqnos = numbers(rows, "vbucket"), numbers(rows, "seqno")
        marks = np.isin(vbuckets, wanted) & (numbers(rows, "batch") <= trimmed_batch)
        marks &= ~np.asarray(rows.column("void").to_numpy())
        for vbucket in np.unique(vbuckets[marks]).tolist():
            highest = int(seqnos[marks & (vbuckets == vbucket)].max())
            reach[vbucket] = max(highest, reach.get(vbucket, 0))
    return {vbucket for vbucket, kept in rollbacks.items() if 0 < kept < reach.get(vbucket, 0)}


# --- in a task --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Voided:
    """A file with dead rows in it, and the one to put in its place; none where it had no dead rows after all."""

    file: DataFile
    replacement: DataFile | None
    rows: int = 0
    """How many of its rows are dead now that were not before."""
    torn: frozenset[int] = frozenset()
    """Vbuckets with a rollback into the middle of a snapshot that the file has rows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidTask:
    """Mark the dead rows of one file."""

    location: Location
    facts: LakeFacts
    file: DataFile
    rollbacks: Rollbacks

    def run(self) -> Voided:
        limits = np.full(self.facts.vbuckets, np.iinfo(np.int64).max)
        for vbucket, kept in self.rollbacks.items():
            limits[vbucket] = kept
        torn: set[int] = set()
        with FileReader(self.location, self.file.path) as reader:
            deaths = [_newly_dead(reader, row_group, limits, torn) for row_group in reader.row_groups]
            if not any(dead.any() for dead in deaths):
                return Voided(file=self.file, replacement=None)
            schema = changes_schema(xattrs=self.facts.xattrs)
            writer = FileWriter(self.location, schema, ranges=CHANGE_RANGES, prefix="changes")
            index = schema.get_field_index("void")
            for row_group, dead in zip(reader.row_groups, deaths, strict=True):
                rows = reader.read(row_group, schema.names)
                void = np.asarray(rows.column("void").to_numpy()) | dead
                writer.write_row_group(rows.set_column(index, schema.field(index), pa.array(void)))
        rows_dead = sum(int(dead.sum()) for dead in deaths)
        return Voided(file=self.file, replacement=writer.close(), rows=rows_dead, torn=frozenset(torn))


def _newly_dead(reader: FileReader, row_group: int, limits: NDArray[np.int64], torn: set[int]) -> NDArray[np.bool_]:
    rows = reader.read(row_group, ["vbucket", "seqno", "snapshot_start", "void"])
    vbuckets = numbers(rows, "vbucket")
    dead: NDArray[np.bool_] = numbers(rows, "seqno") > limits[vbuckets]
    dead &= ~np.asarray(rows.column("void").to_numpy())
    torn |= torn_vbuckets(vbuckets[dead], numbers(rows, "snapshot_start")[dead], limits)
    return dead


def torn_vbuckets(vbuckets: Column, snapshot_starts: Column, kept: Column) -> set[int]:
    """The vbuckets of dead rows whose snapshot began before the seqno that is kept, given by vbucket.

    In a snapshot each key is there once, in its newest version (the seed "UPR Transport Specification", "Streams":
    unique keys). Of one that goes on beyond the seqno, versions up to it may be missing in favour of newer ones that
    are dead now, so the state of the vbucket at that seqno is not known. A careful reader never asks for such a
    rollback.
    """
    return {int(vbucket) for vbucket in np.unique(vbuckets[snapshot_starts < kept[vbuckets]])}
