"""A lake of a model bucket, for tests that land a few batches and look at what that came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from headwater.lake.change_files import ChangeReport
from headwater.lake.commits import Batch, CommittedBatch, begin_batch, commit_batch, merge
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake, LakeSettings, Runner, run_here
from headwater.lake.typed_columns import TypedColumns
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.bucket_model import BUCKET_UUID, ModelBucket, batches
from support.lake_checks import Row, table_rows

HOTEL = 8


def with_columns(settings: LakeSettings, columns: Mapping[str, str]) -> LakeSettings:
    """The same with typed columns, by table or for `*`, as SQL writes them."""
    return replace(settings, columns={name: TypedColumns.from_ddl(ddl) for name, ddl in columns.items()})


class SmallLake:
    """A bucket with one collection beside the default one, and its lake."""

    def __init__(
        self,
        directory: Path,
        *,
        vbuckets: int = 4,
        groups: int = 2,
        settings: LakeSettings | None = None,
        bucket: ModelBucket | None = None,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.directory = directory
        self.bucket = bucket or ModelBucket(vbuckets)
        self.bucket.names[HOTEL] = ("inventory", "hotel")
        self.lake = Lake.create(
            str(directory), bucket_uuid=BUCKET_UUID, vbuckets=vbuckets, groups=groups, settings=settings, step=step
        )

    def write(self, vbucket: int, *keys: str, collection: int = 0, value: bytes = b'{"n": 1}') -> None:
        for key in keys:
            self.bucket.change(vbucket, "mutation", collection, key.encode(), value)

    def begin(self) -> Batch:
        return begin_batch(self.lake)

    def reached(self, sending: Sequence[int]) -> dict[VBucketId, StreamOffset]:
        """The places behind what some vbuckets have."""
        offsets = self.bucket.offsets(sending)
        return {VBucketId(vbucket): offsets[VBucketId(vbucket)] for vbucket in sending}

    def write_batch(self, batch: Batch, sending: Sequence[int], **reading: Any) -> ChangeReport:
        """What a task reports that reads what is new of some vbuckets."""
        rows = [row for vbucket in sending for row in self.bucket.rows(vbucket, **reading)]
        report = batch.writer.write(batches(rows, 100))
        report.reached = self.reached(sending)
        return report

    def land(
        self,
        sending: Sequence[int] | None = None,
        *,
        landed_at: datetime | None = None,
        merges: bool = True,
        run: Runner = run_here,
        **reading: Any,
    ) -> CommittedBatch:
        """Land what is new of some vbuckets, or of all."""
        sending = range(len(self.bucket.vbuckets)) if sending is None else sending
        batch = begin_batch(self.lake, landed_at=landed_at)
        committed = commit_batch(self.lake, batch, [self.write_batch(batch, sending, **reading)], run)
        self.bucket.mark_sent(sending)
        if merges:
            merge(self.lake, run)
        return committed

    def reopen(self, settings: LakeSettings | None = None) -> Lake:
        lake = Lake.open(str(self.directory), settings=settings or self.lake.settings)
        assert lake is not None
        self.lake = lake
        return lake

    def rows(self, table: str) -> list[Row]:
        return table_rows(self.directory / table)

    def documents_now(self, name: str = "_default._default") -> list[Row]:
        return [row for rows in self.lake.documents_now(name) for row in rows.to_pylist()]


def merging(**rules: Any) -> LakeSettings:
    return LakeSettings(merging=MergeRules(**rules))
