"""Marking what a rollback took back: of some vbuckets, everything above a seqno that came before the rollback.

A file that holds such rows is written again with the mark set. The rows stay: `changes` tells what was once believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.protocol.kernels.memory import Column
from headwater.spark.lake.data_files import DataFile, FileReader, FileWriter, numbers
from headwater.spark.lake.layout import LakeFacts, TablePlace
from headwater.spark.lake.schemas import CHANGE_RANGES, changes_schema

Rollbacks = dict[int, int]
"""By vbucket: the last seqno that is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voided:
    """A file with dead rows in it, and the one to put in its place; none where it had no dead rows after all."""

    file: DataFile
    replacement: DataFile | None
    torn: frozenset[int] = frozenset()
    """Vbuckets with a rollback into the middle of a snapshot that the file has rows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidTask:
    """Mark the dead rows of one file."""

    place: TablePlace
    facts: LakeFacts
    file: DataFile
    rollbacks: Rollbacks

    def run(self) -> Voided:
        limits = np.full(self.facts.vbuckets, np.iinfo(np.int64).max)
        for vbucket, kept in self.rollbacks.items():
            limits[vbucket] = kept
        torn: set[int] = set()
        with FileReader(self.place, self.file.path) as reader:
            deaths = [_newly_dead(reader, row_group, limits, torn) for row_group in reader.row_groups]
            if not any(dead.any() for dead in deaths):
                return Voided(file=self.file, replacement=None)
            schema = changes_schema(xattrs=self.facts.xattrs)
            writer = FileWriter(self.place, schema, ranges=CHANGE_RANGES, prefix="changes")
            index = schema.get_field_index("void")
            for row_group, dead in zip(reader.row_groups, deaths, strict=True):
                rows = reader.read(row_group, schema.names)
                void = np.asarray(rows.column("void").to_numpy()) | dead
                writer.write_row_group(rows.set_column(index, schema.field(index), pa.array(void)))
        return Voided(file=self.file, replacement=writer.close(), torn=frozenset(torn))


def _newly_dead(reader: FileReader, row_group: int, limits: NDArray[np.int64], torn: set[int]) -> NDArray[np.bool_]:
    rows = reader.read(row_group, ["vbucket", "seqno", "snapshot_start", "void"])
    vbuckets = numbers(rows, "vbucket")
    dead: NDArray[np.bool_] = numbers(rows, "seqno") > limits[vbuckets]
    dead &= ~np.asarray(rows.column("void").to_numpy())
    torn |= torn_vbuckets(vbuckets[dead], numbers(rows, "snapshot_start")[dead], limits)
    return dead


def torn_vbuckets(vbuckets: Column, snapshot_starts: Column, kept: Column) -> set[int]:
    """The vbuckets of dead rows whose snapshot began before the seqno that is kept, given by vbucket.

    In a snapshot each key is there once, in its newest version. Of one that goes on beyond the seqno, versions up to it
    may be missing for newer ones that are dead now: nobody can tell what the vbucket was at that seqno.
    """
    return {int(vbucket) for vbucket in np.unique(vbuckets[snapshot_starts < kept[vbuckets]])}


def may_hold_dead_rows(file: DataFile, rollbacks: Rollbacks) -> bool:
    """Whether a file can hold what the rollbacks took back, by what the log tells of it."""
    return any(
        file.may_hold("vbucket", low=vbucket, high=vbucket) and file.may_hold("seqno", low=kept + 1)
        for vbucket, kept in rollbacks.items()
    )
