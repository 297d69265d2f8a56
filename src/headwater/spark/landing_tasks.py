"""What a task of the landing does: it reads its share of a batch and writes it to files, in one Python process.

Between a source and a function Spark carries rows through Java: a Python process writes them as Arrow, Java makes rows
of that and Arrow of the rows, and another Python process reads it. For the landing that took more processor time than
reading the bucket and writing the files. So the landing has a source of its own (`share_source`), whose rows are no
changes: each of them is what one task has to read. The function that is given such a row reads the bucket itself.

All else stays with Spark and with the source `dcp`: which offsets a batch has, how it is planned and dealt out, and
that a task that fails is run again.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from headwater.spark.lake.change_files import ChangeWriter
from headwater.spark.lake.tasks import result_batch
from headwater.spark.share_source import SHARE, Share
from headwater.spark.task_read import read_plan
from headwater.spark.worker_heap import keep_loaded


@dataclass(frozen=True, slots=True)
class LandShares:
    """Made on the driver for one batch: `frame.mapInArrow(LandShares(writer), RESULT_DDL)` gives a report a task."""

    writer: ChangeWriter

    def __call__(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield result_batch(self.writer.write(_changes(rows)))
        keep_loaded("land")


def _changes(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        for pickled in batch.column(SHARE).to_pylist():
            share: Share = pickle.loads(pickled)
            yield from read_plan(share.plan, share.options, share.bucket)
