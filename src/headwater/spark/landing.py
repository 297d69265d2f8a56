"""The landing pipeline: a bucket into Delta tables, batch by batch, exactly.

Spark's part is to remember which batch was begun (its checkpoint) and to run the work. What is landed is decided by the
tables alone: each batch is one commit of `changes` that carries the query's id and the batch's number, so a batch that
Spark repeats after a crash is found there and changes nothing. The documents follow from `changes`, at any later time.

Everything of ours lies in the tables' directory: the checkpoint, and the folder in which tasks tell the planner how far
they have read. A checkpoint that is lost is no loss: the next query begins where the tables end.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headwater.client.offsets import Offsets
from headwater.spark.checkpoint_log import CheckpointLog
from headwater.spark.connect_session import check_calls_back, hide_password
from headwater.spark.lake.batch_commit import Committed, begin_batch, commit_batch
from headwater.spark.lake.file_joining import join_files
from headwater.spark.lake.iceberg_changes import IcebergChanges, IcebergSettings, load_catalog_of
from headwater.spark.lake.lake import Lake, LakeSettings
from headwater.spark.lake.layout import GROUPS_DEFAULT
from headwater.spark.lake.merging import merge
from headwater.spark.lake.tasks import RESULT_DDL, results_of
from headwater.spark.lake.trimming import trim_changes
from headwater.spark.lake.vacuum import clean_logs, vacuum
from headwater.spark.landing_checks import (
    check_empty,
    check_fits,
    check_options,
    check_same_options,
    check_selection,
    has_ended,
    look_at_source,
    make_directory,
    seen_collections,
)
from headwater.spark.landing_tasks import LandShares
from headwater.spark.own_folder import OwnFolder, Selection
from headwater.spark.share_source import ShareSource
from headwater.spark.shipped_kernels import ship_kernels
from headwater.spark.source_options import SourceOptions
from headwater.spark.spark_runner import SparkRunner

JOIN_BATCHES = 64
"""After so many batches small files are joined. Which there are, the logs tell."""
TIDY_EVERY_S = 6 * 3600.0
"""How often old changes are folded and old files deleted: that takes a look at all files. It is counted over all runs,
so that runs which end soon do it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """How long old things are kept."""

    vacuum_hours: int = 7 * 24
    """Files that no table needs any more."""
    changes_days: int | None = None
    """`changes` older than this are folded to the newest version of each document; None keeps them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedBatch:
    """What is told of a batch that has been landed."""

    batch_id: int
    rows: int
    rollbacks: Mapping[int, int]
    merges: int
    tables: tuple[str, ...]
    """The collections that have a table by now."""
    rows_by_table: Mapping[str, int]
    """Changes of documents, by collection."""
    must_read_again: bool
    """A rollback went further back than `changes` reaches: the query ends, and the next one reads what is missing."""
    offsets: Offsets
    took_s: float


OnBatch = Callable[[LandedBatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLander:
    """What Spark calls for every batch. It is pickled where the session is a remote one."""

    into: str
    checkpoint: CheckpointLog
    bucket_uuid: str
    settings: LakeSettings
    upkeep: Upkeep
    iceberg: IcebergSettings | None = None
    on_batch: OnBatch | None = None
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Another one each time that the query is started."""

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        began = datetime.now(UTC)
        lake, iceberg = self._tables()
        run = SparkRunner(frame.sparkSession)
        batch = begin_batch(
            lake,
            query_id=self.checkpoint.query_id(),
            batch_id=batch_id,
            end=self.checkpoint.offsets(batch_id),
            start=self.checkpoint.start_of(batch_id),
        )
        if batch is not None:
            rows = frame.mapInArrow(LandShares(batch.writer), RESULT_DDL).collect()
            committed = commit_batch(lake, batch, results_of((row.number, row.result) for row in rows), run)
        else:
            committed = Committed(rows=0, rows_by_table={}, rollbacks={}, read_again=frozenset())
        if iceberg is not None:
            iceberg.catch_up(lake)
        merges = merge(lake, run)
        if batch_id % JOIN_BATCHES == JOIN_BATCHES - 1:
            join_files(lake, run)
        self._tidy_up(lake, run)
        if self.on_batch is not None:
            self.on_batch(
                LandedBatch(
                    batch_id=batch_id,
                    rows=committed.rows,
                    rollbacks=committed.rollbacks,
                    merges=merges,
                    tables=tuple(sorted(lake.tables)),
                    rows_by_table=committed.rows_by_table,
                    must_read_again=bool(committed.read_again),
                    offsets=lake.held_offsets(),
                    took_s=(datetime.now(UTC) - began).total_seconds(),
                )
            )

    def _tables(self) -> tuple[Lake, IcebergChanges | None]:
        """Opened once each time that the query is started: the next batch finds what the last one has left. What an
        earlier start has left may be out of date, or half done."""
        with _OPENING:
            opened = _OPENED.get(self.into)
            if opened is None or opened.run_id != self.run_id:
                lake = Lake.open(self.into, bucket_uuid=self.bucket_uuid, settings=self.settings)
                assert lake is not None, "it was made before the query began"
                iceberg = None if self.iceberg is None else IcebergChanges.open(self.iceberg, lake)
                opened = _OPENED[self.into] = _Opened(self.run_id, lake, iceberg)
            return opened.lake, opened.iceberg

    def _tidy_up(self, lake: Lake, run: SparkRunner) -> None:
        own = OwnFolder(self.into)
        if own.tidied_s_ago() < TIDY_EVERY_S:
            return
        if self.upkeep.changes_days is not None:
            trim_changes(lake, datetime.now(UTC) - timedelta(days=self.upkeep.changes_days), run)
        vacuum(lake, retention_hours=self.upkeep.vacuum_hours)
        clean_logs(lake)
        own.note_tidied()


@dataclass(frozen=True, slots=True)
class _Opened:
    run_id: str
    lake: Lake
    iceberg: IcebergChanges | None


_OPENED: dict[str, _Opened] = {}
"""By directory."""
_OPENING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A bucket, a directory, and how the one gets into the other. `start` makes a query of it."""

    source: Mapping[str, str]
    """Options of the `dcp` source."""
    into: str
    lake: LakeSettings = field(default_factory=LakeSettings)
    upkeep: Upkeep = field(default_factory=Upkeep)
    groups: int = GROUPS_DEFAULT
    iceberg: IcebergSettings | None = None
    """Have `changes` as an Iceberg table, too."""

    def prepare(self) -> Lake:
        """Look at the bucket and make the tables' directory. Everything that can't work is found out here, before
        anything is made."""
        options = SourceOptions.make(self.source)
        check_options(options)
        bucket = look_at_source(options)
        if self.iceberg is not None:
            load_catalog_of(self.iceberg, self.into)
        lake = Lake.open(self.into, bucket_uuid=bucket.uuid, settings=self.lake)
        own = OwnFolder(self.into)
        if lake is not None:
            check_same_options(lake, own, options)
            check_fits(own.newest_checkpoint(), lake)
            return lake
        check_selection(options)
        check_empty(self.into)
        make_directory(own.folder)
        own.write_selection(Selection.of(options))
        return Lake.create(
            self.into,
            bucket_uuid=bucket.uuid,
            vbuckets=bucket.vbuckets,
            groups=self.groups,
            xattrs=options.read.xattrs,
            settings=self.lake,
        )

    def start(
        self, spark: SparkSession, *, every: str | None = None, on_batch: OnBatch | None = None
    ) -> StreamingQuery:
        """Land what there is and end; with `every`, such as "5 seconds", go on until it is stopped.

        A query goes on with the newest checkpoint. One that was ended by a rollback that `changes` did not reach back
        for is followed by another, with a new checkpoint.
        """
        if on_batch is not None:
            check_calls_back(spark)
        lake = self.prepare()
        own = OwnFolder(self.into)
        checkpoint = own.newest_checkpoint()
        if has_ended(checkpoint, lake):
            checkpoint = own.next_checkpoint()
        source = {**self.source, "progressDir": own.progress}
        if seen := seen_collections(lake, SourceOptions.make(self.source)):
            source["seenCollections"] = ",".join(map(str, seen))
        if lake.last_batch >= 0:
            source["startingOffsets"] = lake.held_offsets().to_json()
        spark.dataSource.register(ShareSource)
        ship_kernels(spark)
        hide_password(spark)
        frame = spark.readStream.format(ShareSource.name()).options(**source).load()
        lander = BatchLander(
            into=self.into,
            checkpoint=checkpoint,
            bucket_uuid=lake.facts.bucket_uuid,
            settings=self.lake,
            upkeep=self.upkeep,
            iceberg=self.iceberg,
            on_batch=on_batch,
        )
        trigger: dict[str, Any] = {"availableNow": True} if every is None else {"processingTime": every}
        writer = frame.writeStream.foreachBatch(lander).option("checkpointLocation", checkpoint.folder)
        return writer.trigger(**trigger).start()

    def merge_all(self, spark: SparkSession) -> int:
        """Bring the documents up to what `changes` holds, whatever is pending. Returns the number of merges."""
        lake = Lake.open(self.into, settings=self.lake)
        return 0 if lake is None else merge(lake, SparkRunner(spark), force=True)


def land(
    spark: SparkSession,
    url: str,
    into: str,
    *,
    every: str | None = None,
    lake: LakeSettings | None = None,
    upkeep: Upkeep | None = None,
    iceberg: IcebergSettings | None = None,
    on_batch: OnBatch | None = None,
    **source: str,
) -> StreamingQuery:
    """Land a bucket: `land(spark, "couchbase://host/bucket", "/lake", user=…, password=…).awaitTermination()`.

    Further arguments are options of the `dcp` source. Returns the running query.
    """
    landing = Landing(
        source={"url": url, **source},
        into=into,
        lake=lake or LakeSettings(),
        upkeep=upkeep or Upkeep(),
        iceberg=iceberg,
    )
    return landing.start(spark, every=every, on_batch=on_batch)
