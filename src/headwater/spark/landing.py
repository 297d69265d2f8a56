"""The landing pipeline: a bucket into Delta tables, batch by batch, exactly.

Spark's part is to remember which batch was begun (its checkpoint) and to run the work. What is landed is decided by the
tables alone: each batch is one commit of `changes` that carries the query's id and the batch's number, so a batch that
Spark repeats after a crash is found there and changes nothing. The documents follow from `changes`, at any later time.

Everything of ours lies in the tables' directory: the checkpoint, and the folder in which tasks tell the planner how far
they have read. A checkpoint that is lost is no loss: the next query begins where the tables end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.fs as fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headwater.client.bootstrap import bootstrap
from headwater.client.offsets import Offsets
from headwater.errors import InvalidInput
from headwater.spark.checkpoint_log import CheckpointLog
from headwater.spark.lake.file_joining import join_files
from headwater.spark.lake.lake import Committed, Lake, LakeSettings
from headwater.spark.lake.layout import GROUPS_DEFAULT, open_filesystem
from headwater.spark.lake.tasks import RESULT_DDL, results_of
from headwater.spark.lake.trimming import trim_changes
from headwater.spark.lake.vacuum import clean_logs, vacuum
from headwater.spark.shipped_kernels import ship_kernels
from headwater.spark.source import DcpDataSource
from headwater.spark.source_options import SourceOptions
from headwater.spark.spark_runner import SparkRunner

OWN_FOLDER = "_headwater"
UPKEEP_BATCHES = 64
"""After so many batches small files are joined and old ones deleted."""


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
    on_batch: OnBatch | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        began = datetime.now(UTC)
        lake = self._lake()
        run = SparkRunner(frame.sparkSession)
        batch = lake.begin_batch(
            query_id=self.checkpoint.query_id(),
            batch_id=batch_id,
            end=self.checkpoint.offsets(batch_id),
            start=self.checkpoint.start_of(batch_id),
        )
        if batch is not None:
            rows = frame.mapInArrow(batch.writer, RESULT_DDL).collect()
            committed = lake.commit_batch(batch, results_of((row.number, row.result) for row in rows), run)
        else:
            committed = Committed(rows=0, rows_by_table={}, rollbacks={}, read_again=frozenset())
        merges = lake.merge(run)
        if batch_id % UPKEEP_BATCHES == UPKEEP_BATCHES - 1:
            self._keep_up(lake, run)
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

    def _lake(self) -> Lake:
        """Opened once in a process: the next batch finds what the last one has left."""
        with _OPENING:
            lake = _LAKES.get(self.into)
            if lake is None or lake.settings != self.settings:
                lake = Lake.open(self.into, bucket_uuid=self.bucket_uuid, settings=self.settings)
                assert lake is not None, "it was made before the query began"
                _LAKES[self.into] = lake
            return lake

    def _keep_up(self, lake: Lake, run: SparkRunner) -> None:
        join_files(lake, run)
        if self.upkeep.changes_days is not None:
            trim_changes(lake, datetime.now(UTC) - timedelta(days=self.upkeep.changes_days), run)
        vacuum(lake, retention_hours=self.upkeep.vacuum_hours)
        clean_logs(lake)


_LAKES: dict[str, Lake] = {}
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

    def prepare(self) -> Lake:
        """Look at the bucket and make the tables' directory. Everything that can't work is found out here."""
        options = SourceOptions.make(self.source)
        bucket = bootstrap(options.settings).cluster_map
        xattrs = options.read.xattrs
        lake = Lake.open(self.into, bucket_uuid=bucket.uuid, settings=self.lake)
        if lake is None:
            self._check_empty()
            lake = Lake.create(
                self.into,
                bucket_uuid=bucket.uuid,
                vbuckets=bucket.vbuckets,
                groups=self.groups,
                xattrs=xattrs,
                settings=self.lake,
            )
        if lake.facts.xattrs != xattrs:
            had = "with" if lake.facts.xattrs else "without"
            raise InvalidInput(
                f"the tables in {self.into} were made {had} extended attributes", hint="Use xattrs as before"
            )
        return lake

    def _check_empty(self) -> None:
        """A directory that holds something else is most likely a mistake."""
        filesystem, path = open_filesystem(self.into)
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        others = [entry.base_name for entry in found if entry.base_name != OWN_FOLDER]
        if others:
            raise InvalidInput(
                f"{self.into} holds {others[0]!r} and no tables of a bucket", hint="Give an empty or a new directory"
            )

    def start(
        self, spark: SparkSession, *, every: str | None = None, on_batch: OnBatch | None = None
    ) -> StreamingQuery:
        """Land what there is and end; with `every`, such as "5 seconds", go on until it is stopped.

        A query goes on with its own checkpoint if that fits the tables, and else with a new one.
        """
        lake = self.prepare()
        checkpoint = self._checkpoint(lake)
        source = {**self.source, "progressDir": f"{self.into.rstrip('/')}/{OWN_FOLDER}/progress"}
        if lake.last_batch >= 0:
            source["startingOffsets"] = lake.held_offsets().to_json()
        spark.dataSource.register(DcpDataSource)
        ship_kernels(spark)
        frame = spark.readStream.format("dcp").options(**source).load()
        lander = BatchLander(
            into=self.into,
            checkpoint=checkpoint,
            bucket_uuid=lake.facts.bucket_uuid,
            settings=self.lake,
            upkeep=self.upkeep,
            on_batch=on_batch,
        )
        trigger: dict[str, Any] = {"availableNow": True} if every is None else {"processingTime": every}
        writer = frame.writeStream.foreachBatch(lander).option("checkpointLocation", checkpoint.folder)
        return writer.trigger(**trigger).start()

    def _checkpoint(self, lake: Lake) -> CheckpointLog:
        """The newest checkpoint, unless its query was ended by a rollback that `changes` did not reach back for."""
        root = f"{self.into.rstrip('/')}/{OWN_FOLDER}"
        filesystem, path = open_filesystem(root)
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        numbers = [int(entry.base_name.removeprefix(_CHECKPOINT)) for entry in found if _is_checkpoint(entry.base_name)]
        newest = max(numbers, default=1)
        log = CheckpointLog(f"{root}/{_CHECKPOINT}{newest}")
        if log.exists and lake.state.ended_query == log.query_id():
            return CheckpointLog(f"{root}/{_CHECKPOINT}{newest + 1}")
        return log

    def merge_all(self, spark: SparkSession) -> int:
        """Bring the documents up to what `changes` holds, whatever is pending. Returns the number of merges."""
        lake = Lake.open(self.into, settings=self.lake)
        return 0 if lake is None else lake.merge(SparkRunner(spark), force=True)


_CHECKPOINT = "checkpoint-"


def _is_checkpoint(name: str) -> bool:
    return name.startswith(_CHECKPOINT) and name.removeprefix(_CHECKPOINT).isdigit()


def land(
    spark: SparkSession,
    url: str,
    into: str,
    *,
    every: str | None = None,
    lake: LakeSettings | None = None,
    upkeep: Upkeep | None = None,
    on_batch: OnBatch | None = None,
    **source: str,
) -> StreamingQuery:
    """Land a bucket: `land(spark, "couchbase://host/bucket", "/lake", user=…, password=…).awaitTermination()`.

    Further arguments are options of the `dcp` source. Returns the running query.
    """
    landing = Landing(source={"url": url, **source}, into=into, lake=lake or LakeSettings(), upkeep=upkeep or Upkeep())
    return landing.start(spark, every=every, on_batch=on_batch)
