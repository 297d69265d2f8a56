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

import pyarrow.fs as fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headwater.client.bootstrap import bootstrap
from headwater.client.bucket_view import look_at_bucket
from headwater.client.cluster_map import ClusterMap
from headwater.client.collection_names import CollectionNames
from headwater.client.offsets import Offsets
from headwater.errors import InvalidInput, LakeOutOfStep
from headwater.spark.checkpoint_log import CheckpointLog
from headwater.spark.lake.file_joining import join_files
from headwater.spark.lake.lake import Committed, Lake, LakeSettings
from headwater.spark.lake.layout import GROUPS_DEFAULT, TableKind, open_filesystem
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
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Another one each time that the query is started."""

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
        """Opened once each time that the query is started: the next batch finds what the last one has left. What an
        earlier start has left may be out of date, or half done."""
        with _OPENING:
            run_id, lake = _LAKES.get(self.into, (None, None))
            if lake is None or run_id != self.run_id:
                lake = Lake.open(self.into, bucket_uuid=self.bucket_uuid, settings=self.settings)
                assert lake is not None, "it was made before the query began"
                _LAKES[self.into] = self.run_id, lake
            return lake

    def _keep_up(self, lake: Lake, run: SparkRunner) -> None:
        join_files(lake, run)
        if self.upkeep.changes_days is not None:
            trim_changes(lake, datetime.now(UTC) - timedelta(days=self.upkeep.changes_days), run)
        vacuum(lake, retention_hours=self.upkeep.vacuum_hours)
        clean_logs(lake)


_LAKES: dict[str, tuple[str, Lake]] = {}
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
        """Look at the bucket and make the tables' directory. Everything that can't work is found out here, before
        anything is made."""
        options = SourceOptions.make(self.source)
        bucket = _look_at_bucket(options)
        lake = Lake.open(self.into, bucket_uuid=bucket.uuid, settings=self.lake)
        if lake is not None:
            self._check_xattrs(lake, options)
            _check_fits(self._newest_checkpoint(), lake)
            return lake
        self._check_empty()
        _make_directory(self.into)
        return Lake.create(
            self.into,
            bucket_uuid=bucket.uuid,
            vbuckets=bucket.vbuckets,
            groups=self.groups,
            xattrs=options.read.xattrs,
            settings=self.lake,
        )

    def _check_xattrs(self, lake: Lake, options: SourceOptions) -> None:
        if lake.facts.xattrs != options.read.xattrs:
            had = "with" if lake.facts.xattrs else "without"
            raise InvalidInput(
                f"the tables in {self.into} were made {had} extended attributes", hint="Use xattrs as before"
            )

    def _check_empty(self) -> None:
        """A directory that holds something else is most likely a mistake."""
        others = [name for name in _names_in(self.into) if name != OWN_FOLDER and not self._is_unfinished(name)]
        if others:
            raise InvalidInput(
                f"{self.into} holds {others[0]!r} and no tables of a bucket", hint="Give an empty or a new directory"
            )
        log = self._newest_checkpoint()
        if log.last_planned is not None:
            raise _out_of_step(log, f"belongs to tables that {self.into} no longer holds")

    def _is_unfinished(self, name: str) -> bool:
        """Whether it is what is left of the making of the first table, which was cut off."""
        return name == TableKind.CHANGES and set(_names_in(f"{self.into}/{name}")) <= {_DELTA_LOG}

    def start(
        self, spark: SparkSession, *, every: str | None = None, on_batch: OnBatch | None = None
    ) -> StreamingQuery:
        """Land what there is and end; with `every`, such as "5 seconds", go on until it is stopped.

        A query goes on with its own checkpoint if that fits the tables, and else with a new one.
        """
        lake = self.prepare()
        checkpoint = self._checkpoint(lake)
        source = {**self.source, "progressDir": f"{self._own_folder}/progress"}
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
        log = self._newest_checkpoint()
        return self._numbered_checkpoint(log.number + 1) if _has_ended(log, lake) else log

    def _newest_checkpoint(self) -> CheckpointLog:
        found = [name.removeprefix(_CHECKPOINT) for name in _names_in(self._own_folder) if name.startswith(_CHECKPOINT)]
        return self._numbered_checkpoint(max((int(number) for number in found if number.isdigit()), default=1))

    def _numbered_checkpoint(self, number: int) -> CheckpointLog:
        return CheckpointLog(f"{self._own_folder}/{_CHECKPOINT}{number}", number)

    @property
    def _own_folder(self) -> str:
        return f"{self.into.rstrip('/')}/{OWN_FOLDER}"

    def merge_all(self, spark: SparkSession) -> int:
        """Bring the documents up to what `changes` holds, whatever is pending. Returns the number of merges."""
        lake = Lake.open(self.into, settings=self.lake)
        return 0 if lake is None else lake.merge(SparkRunner(spark), force=True)


_CHECKPOINT = "checkpoint-"
_DELTA_LOG = "_delta_log"


def _look_at_bucket(options: SourceOptions) -> ClusterMap:
    """Raises where the bucket, or what is wanted of it, is not there."""
    cluster_map = bootstrap(options.settings).cluster_map
    scopes, collections = options.read.scopes, options.read.collections
    if scopes or collections:
        CollectionNames(look_at_bucket(options.settings).manifest).select(scopes=scopes, collections=collections)
    return cluster_map


def _names_in(directory: str) -> list[str]:
    filesystem, path = open_filesystem(directory)
    try:
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except OSError as error:
        raise InvalidInput(
            f"{directory} can't be used: {error}", hint="Give a directory that can be written"
        ) from error
    return sorted(entry.base_name for entry in found)


def _make_directory(directory: str) -> None:
    filesystem, path = open_filesystem(directory)
    try:
        filesystem.create_dir(path)
    except OSError as error:
        raise InvalidInput(
            f"{directory} can't be made: {error}", hint="Give a directory that can be written"
        ) from error


def _has_ended(log: CheckpointLog, lake: Lake) -> bool:
    return log.last_planned is not None and lake.state.ended_query == log.query_id()


def _check_fits(log: CheckpointLog, lake: Lake) -> None:
    """With a checkpoint of another time than the tables, changes would be missing or come twice."""
    if log.last_planned is None or _has_ended(log, lake):
        return
    landed = lake.changes.transaction(log.query_id())
    if landed is None:
        # Its first batch starts where the tables end, whatever that is.
        fits = log.last_planned == 0 and log.last_committed is None
    else:
        fits = (log.last_committed or 0) <= landed <= log.last_planned
    if not fits:
        raise _out_of_step(log, "is of another time than the tables")
    if landed is not None:
        try:
            lake.check_start(log.offsets(landed))
        except LakeOutOfStep as error:
            raise _out_of_step(log, f"is of another time than the tables: {error.reason}") from error


def _out_of_step(log: CheckpointLog, what: str) -> LakeOutOfStep:
    return LakeOutOfStep(
        f"the checkpoint {log.folder} {what}", hint=f"Remove {log.folder}: the next run goes on where the tables end"
    )


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
