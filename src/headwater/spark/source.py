"""The data source `dcp`: `spark.read.format("dcp")` and `spark.readStream.format("dcp")`.

Spark makes one stream reader for planning, which lives as long as the query, and pickles others for the tasks. So a
reader stores only options, and creates everything else when it is first needed.

Spark requires the end of a batch before it is read, and logs it. So an offset has the planned seqno of every vbucket;
the task reads on to the end of the snapshot and reports the offset that it has reached (`ReachedOffsets`). The next
plan starts there. An offset also records where its batch started, as the start of its snapshot, if that is known: a
batch that Spark repeats after a crash starts at the same offset, and so does a later rollback.

A repeated batch may contain newer versions than the first attempt, and reach further. A sink that has stored the first
attempt and skips the second by its number must not miss the additional rows. So the offsets reached by a repeated
batch do not count: the next one starts at the planned end, and returns the rows after it again.

Spark plans the end of a batch before it is read, and a snapshot that is still being written goes beyond that end. The
batch includes the rows after it, so the next batch must start after them, or they would come twice. Spark's API has no
way to report from a task to the planner. So the planner listens on a port, and every attempt at a task opens a
connection while it reads: it sends one line when it starts, and one when it has read everything, which is
acknowledged.

Reports only avoid repeated rows. If one is missing (the executor can't reach the port) or two attempts differ (it is
unknown whose rows were used), the next batch starts at the planned end.

The listener accepts only connections with its token, on the address from which this machine reaches the bucket.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headwater.client.connection_string import Address
from headwater.client.offsets import Offsets
from headwater.client.read_options import Start
from headwater.errors import InvalidInput, InvalidOffsets
from headwater.landing import planning
from headwater.landing.bucket_watch import BucketWatch, PlannedBucket
from headwater.landing.source_options import DOCUMENT_COLUMNS, Conditions, Mode, SourceOptions, ValueForm
from headwater.log_fields import LogEvent, fields
from headwater.phrases import did_you_mean
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.spark import versions
from headwater.spark.query_errors import in_one_sentence

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

logger = logging.getLogger(__name__)

CONNECT_S_MAX = 5.0
ANSWER_S_MAX = 10.0
LINE_BYTES_MAX = 8 * 1024 * 1024
"""Enough for the offsets of 65,536 vbuckets."""
_TOKEN_BYTES = 16
_TAKEN = b".\n"

_Reached = dict[VBucketId, StreamOffset]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTo:
    """Where the attempts at one task report. Sent with the task."""

    host: str
    port: int
    token: str
    task: int

    @contextlib.contextmanager
    def attempt(self, reached: Callable[[], tuple[Mapping[VBucketId, StreamOffset], int]]) -> Iterator[None]:
        """Wraps the read of a task. At its end, `reached` returns its offsets and number of rows. If the planner can't
        be reached, there is no report."""
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((self.host, self.port), CONNECT_S_MAX)
            connection.settimeout(ANSWER_S_MAX)
            connection.sendall(_line({"token": self.token, "task": self.task, "attempt": _attempt_number()}))
        except OSError as error:
            logger.info(
                "the planner at %s can't be reached, so rows may come again: %s",
                *(f"{self.host}:{self.port}", error),
                extra=fields(event=LogEvent.PLANNER_UNREACHABLE, address=f"{self.host}:{self.port}"),
            )
        try:
            yield
            if connection is not None:
                with contextlib.suppress(OSError):
                    offsets, rows = reached()
                    connection.sendall(_line({"reached": Offsets("", offsets).to_json(), "rows": rows}))
                    connection.recv(len(_TAKEN))
        finally:
            if connection is not None:
                connection.close()


class ReachedOffsets:
    """The planner's side: collects the reports of the last batch's tasks."""

    def __init__(self, bucket: Address) -> None:
        """`bucket` is any address of the bucket's nodes."""
        self._attempts: dict[int, list[_Reached | None]] = {}
        """By task, what each attempt has reached; None while it reads, and forever if it was interrupted."""
        self._rows: dict[int, int] = {}
        """By task, how many rows an attempt had."""
        self._next_task = 0
        self._lock = threading.Lock()
        self._token = secrets.token_hex(_TOKEN_BYTES)
        host = _own_address(bucket)
        self._server = _ReportServer((host, 0), self)
        self._address = host, self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="reached offsets", daemon=True).start()

    def expect(self, tasks: int) -> list[ReportTo]:
        """Start a batch of this many tasks. Drops earlier reports, and refuses late ones."""
        host, port = self._address
        with self._lock:
            first, self._next_task = self._next_task, self._next_task + tasks
            self._attempts = {task: [] for task in range(first, first + tasks)}
            self._rows = {}
        return [ReportTo(host=host, port=port, token=self._token, task=task) for task in range(first, first + tasks)]

    def rows(self) -> int | None:
        """Return the number of rows of the batch; None if a task has not reported."""
        with self._lock:
            return sum(self._rows.values()) if len(self._rows) == len(self._attempts) else None

    def take(self) -> _Reached:
        """Return the offsets that are certain: all attempts at their task have ended with the same ones.

        An attempt that is not the first shows that there was another, whose rows may have been used.
        """
        with self._lock:
            attempts, self._attempts = list(self._attempts.values()), {}
        known: _Reached = {}
        for reported in attempts:
            if reported and reported[0] is not None and all(offsets == reported[0] for offsets in reported):
                known |= reported[0]
        return known

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- one connection -----------------------------------------------------------------------------------------------

    def on_begin(self, message: Any) -> tuple[int, int] | None:
        """An attempt starts. Returns its task and number, or None for an unexpected one."""
        if not isinstance(message, dict) or not secrets.compare_digest(str(message.get("token")), self._token):
            return None
        with self._lock:
            attempts = self._attempts.get(message.get("task", -1))
            if attempts is None:
                return None
            attempts.append(None)
            if message.get("attempt") != 0:
                return None
            return message["task"], len(attempts) - 1

    def on_end(self, attempt: tuple[int, int], message: Any) -> None:
        offsets = dict(Offsets.from_json(message["reached"]).offsets)
        with self._lock:
            if attempt[0] in self._attempts:
                self._attempts[attempt[0]][attempt[1]] = offsets
                self._rows[attempt[0]] = int(message["rows"])


class _ReportServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], reached: ReachedOffsets) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.reached = reached
        super().__init__(address, _Attempt)


class _Attempt(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _ReportServer)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, InvalidOffsets):
            # A connection must send its token soon; after that, a task may be silent for hours while it reads.
            self.connection.settimeout(ANSWER_S_MAX)
            attempt = server.reached.on_begin(json.loads(self.rfile.readline(1024)))
            if attempt is None:
                return
            self.connection.settimeout(None)
            server.reached.on_end(attempt, json.loads(self.rfile.readline(LINE_BYTES_MAX)))
            self.wfile.write(_TAKEN)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _attempt_number() -> int:
    """The number of this attempt at a task, as Spark counts: 0 for the first."""
    context = TaskContext.get()
    return 0 if context is None else int(context.attemptNumber())


def _own_address(bucket: Address) -> str:
    """Return the address from which this machine reaches the bucket, as executors are likely to reach it there.
    Connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in bucket.host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((bucket.host, bucket.port or 1))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


# --- the source -------------------------------------------------------------------------------------------------------


# --- the columns that Spark sees --------------------------------------------------------------------------------------
#
# Spark has no unsigned integers: values that may exceed 63 bits (vbuuids, and by type seqnos, revisions and CAS) keep
# their 64 bits and are read as signed.

_VALUE_TYPES: dict[ValueForm, DataType] = {
    ValueForm.BINARY: BinaryType(),
    ValueForm.STRING: StringType(),
    ValueForm.VARIANT: versions.VariantType(),
}


def spark_schema(options: SourceOptions) -> StructType:
    """Return all columns, or those that the options name."""
    fields = [
        StructField("vbucket", IntegerType(), nullable=False),
        StructField("vbuuid", LongType(), nullable=False),
        StructField("seqno", LongType(), nullable=False),
        StructField("rev", LongType(), nullable=False),
        StructField("op", StringType(), nullable=False),
        StructField("scope", StringType()),
        StructField("collection", StringType()),
        StructField("collection_id", LongType()),
        StructField("key", StringType()),
        StructField("key_bytes", BinaryType()),
        StructField("value", _VALUE_TYPES[options.value_form]),
        StructField("datatype", ShortType(), nullable=False),
        StructField("flags", LongType(), nullable=False),
        StructField("expiry", LongType(), nullable=False),
        StructField("cas", LongType(), nullable=False),
        StructField("changed_at", TimestampType()),
        StructField("snapshot_start", LongType(), nullable=False),
        StructField("snapshot_end", LongType(), nullable=False),
    ]
    if options.value_form is not ValueForm.BINARY:
        fields.append(StructField("value_bytes", BinaryType()))
    if options.read.xattrs:
        fields.append(StructField("xattrs", MapType(StringType(), BinaryType())))
    by_name = {field.name: field for field in fields}
    for position, name in enumerate(options.columns):
        if name not in by_name:
            nearest = get_close_matches(name, by_name, n=1)
            hint = did_you_mean(nearest[0]) if nearest else f"There are {', '.join(by_name)}"
            raise InvalidInput(f"the dcp source has no column {name!r} with these options", hint=hint)
        if name in options.columns[:position]:
            raise InvalidInput(f"the column {name!r} is requested twice", hint="Name each column once")
    return StructType([by_name[name] for name in options.columns] or fields)


class DcpPartition(InputPartition):
    """What one task reads, and everything that it needs to know about the bucket."""

    def __init__(
        self, ranges: tuple[planning.VBucketRange, ...], bucket: PlannedBucket, report_to: ReportTo | None = None
    ) -> None:
        super().__init__((ranges, bucket, report_to))
        self.ranges = ranges
        self.bucket = bucket
        self.report_to = report_to


class DcpDataSource(DataSource):
    """Changes of a Couchbase bucket, as rows."""

    @classmethod
    def name(cls) -> str:
        return "dcp"

    @in_one_sentence()
    def schema(self) -> StructType:
        if self._checked.mode is Mode.DOCUMENTS:
            from headwater.spark.rows import inferred_schema

            return inferred_schema(self._checked)
        return spark_schema(self._checked)

    def reader(self, schema: StructType) -> DataSourceReader:
        # A reader that accepts filters fails the query if spark.sql.python.filterPushdown.enabled is off, which is
        # unknown here. But if it is on, and there are filters, a separate module of PySpark creates the readers.
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        is_given_filters = caller is not None and caller.f_globals.get("__name__") == _FILTERING_WORKER
        kind = DcpFilteringReader if is_given_filters else DcpBatchReader
        with in_one_sentence():
            return kind(self._options_for(schema), schema)

    @in_one_sentence()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  (Spark's name)
        if self._checked.mode is Mode.DOCUMENTS:
            raise InvalidInput("a stream has changes, not documents", hint="Omit the option mode, or use spark.read")
        return DcpStreamReader(self._options_for(schema), schema)

    def _options_for(self, schema: StructType) -> SourceOptions:
        """Return the options with the columns of the schema, if the user gave one."""
        if self._checked.mode is Mode.DOCUMENTS:
            from headwater.spark.rows import typed_columns_of

            typed_columns_of(schema)
            needs_values = self._checked.where.need_values or not {*schema.names} <= {*DOCUMENT_COLUMNS} - {"document"}
            read = replace(self._checked.read, no_value=not needs_values)
            return replace(self._checked, columns=tuple(schema.names), read=read)
        if schema == self.schema():
            return self._checked
        options = SourceOptions.make({**self.options, "columns": ",".join(schema.names)})
        for given, known in zip(schema, spark_schema(options), strict=True):
            if given.dataType != known.dataType:
                raise InvalidInput(
                    f"the column {given.name} is a {known.dataType.simpleString()}, and the schema has it as"
                    f" {given.dataType.simpleString()}",
                    hint="Use the types of the source, or omit the schema and cast",
                )
        return options

    @cached_property
    def _checked(self) -> SourceOptions:
        return SourceOptions.make(self.options)


class _DcpReader:
    """The parts that both kinds of readers share: the watch on the bucket, and the conversion to rows."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._spark_schema = schema
        self._watching: BucketWatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for the tasks, which plan nothing."""
        return {"_options": self._options, "_spark_schema": self._spark_schema}

    @property
    def _watch(self) -> BucketWatch:
        if self._watching is None:
            self._watching = BucketWatch(self._options)
        return self._watching

    def _check_offsets(self, given: Offsets) -> None:
        """Raise if they can't belong to this bucket."""
        given.check_bucket(self._watch.bucket_uuid)
        vbuckets = self._watch.vbuckets
        unknown = [vbucket for vbucket in given if vbucket >= vbuckets]
        if unknown:
            raise InvalidInput(
                f"there is no vbucket {unknown[0]}: the bucket has {vbuckets}", hint="Check the offsets that were given"
            )

    def _beginning(self) -> Offsets:
        """Return the start in `startingOffsets`, unless that is "now". Vbuckets without an entry start at 0."""
        vbuckets = map(VBucketId, range(self._watch.vbuckets))
        offsets = Offsets(self._watch.bucket_uuid, dict.fromkeys(vbuckets, planning.NOWHERE))
        if isinstance(self._options.start, datetime):
            return offsets.updated(self._watch.find_start().offsets)
        if isinstance(self._options.start, Offsets):
            self._check_offsets(self._options.start)
            return offsets.updated(planning.given_offsets(self._options.start).offsets)
        return offsets

    def _rows(self, partition: InputPartition, *, fails_on_rollback: bool) -> Iterator[pa.RecordBatch]:
        # Imported here, because every query starts a new planner process, which reads nothing.
        from headwater.landing.tasks import ShareReading
        from headwater.spark.executors import keep_loaded, use_shipped_kernels
        from headwater.spark.rows import DocumentRows, SparkRows

        assert isinstance(partition, DcpPartition)
        use_shipped_kernels()
        with in_one_sentence():
            if self._options.mode is Mode.DOCUMENTS:
                yield from DocumentRows(self._options, self._spark_schema).read(partition.ranges, partition.bucket)
                keep_loaded("documents")
                return
            rows = SparkRows(self._options, versions.to_arrow_schema(self._spark_schema))
            reading = ShareReading(
                options=self._options,
                bucket=partition.bucket,
                ranges=partition.ranges,
                fails_on_rollback=fails_on_rollback,
            )
            if partition.report_to is None:
                yield from map(rows.convert, reading)
            else:
                with partition.report_to.attempt(lambda: (reading.reached, reading.rows)):
                    yield from map(rows.convert, reading)
        keep_loaded("read")


class DcpBatchReader(_DcpReader, DataSourceReader):
    """Reads from `startingOffsets` to `endingOffsets`, or to now: each vbucket to the end of a snapshot."""

    @in_one_sentence()
    def partitions(self) -> Sequence[InputPartition]:
        is_from_now = self._options.start is Start.NOW
        start = None if is_from_now else self._beginning()
        survey = self._watch.survey()
        start = start or planning.high_offsets(self._watch.bucket_uuid, survey)
        end = self._options.end
        if end is not None:
            self._check_offsets(end)
            if isinstance(self._options.start, datetime):
                # If the first change since then is after the end, there is nothing to read.
                end = Offsets(
                    end.bucket_uuid, {it: at for it, at in end.offsets.items() if at.seqno >= start[it].seqno}
                )
        ranges = planning.plan_read(start, end, survey) if self._watch.select_by(self._options.where) else []
        shares, bucket = self._watch.shares(ranges, start)
        return [DcpPartition(share, bucket) for share in shares or [()]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # No later batch would deliver missing rows.
        return self._rows(partition, fails_on_rollback=True)


class DcpFilteringReader(DcpBatchReader):
    """The same for a query with filters, if Spark passes them."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Keep the filters that can be applied here, and return the others."""
        for one in filters:
            condition = _condition(one)
            # With `mode=documents`, any other column is a field.
            is_of_documents = self._options.mode is Mode.DOCUMENTS
            if condition is None or (is_of_documents and not condition.allowed.keys() <= {*DOCUMENT_COLUMNS}):
                yield one
            else:
                self._options = replace(self._options, where=self._options.where & condition)


_FILTERING_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
_OPERATORS: dict[type[Filter], str] = (
    {
        datasource.EqualTo: "=",
        datasource.In: "IN",
        datasource.LessThan: "<",
        datasource.LessThanOrEqual: "<=",
        datasource.GreaterThan: ">",
        datasource.GreaterThanOrEqual: ">=",
    }
    if versions.HAS_FILTERS
    else {}
)


def _condition(one: Any) -> Conditions | None:
    """Convert a filter of Spark to a condition; None if that is impossible."""
    operator = _OPERATORS.get(type(one))
    if operator is None or len(one.attribute) != 1:
        return None
    return Conditions.one(one.attribute[0], operator, one.value if operator == "IN" else [one.value])


class DcpStreamReader(_DcpReader, DataSourceStreamReader, versions.SupportsTriggerAvailableNow):
    """Reads changes continuously, in batches."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: dict[VBucketId, Seqno] | None = None
        self._survey: planning.Survey | None = None
        self._reports: ReachedOffsets | None = None
        self._plans = planning.StreamPlans()
        self._bucket: PlannedBucket | None = None
        """The bucket as the tasks of the newest batch saw it."""
        self._began: Offsets | None = None
        """Where the next batch starts, if known. PySpark before 4.2 does not pass it."""

    # --- planning, in one process for the whole query -----------------------------------------------------------------

    @in_one_sentence()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return offsets without vbuckets for a start at now or at a time: the first batch is empty, and ends at the
        start.

        Spark does not store this offset but asks again after a crash, when "now" would be later.
        """
        is_found = self._options.start is Start.NOW or isinstance(self._options.start, datetime)
        self._began = Offsets(self._watch.bucket_uuid) if is_found else self._beginning()
        return _to_spark(self._began)

    @in_one_sentence()
    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: versions.ReadLimit | None = None
    ) -> dict[str, Any]:
        began = self._began if start is None else _from_spark(start)
        if began is None:
            # A query resumes after a restart, with PySpark before 4.2. The first batch ends now, and its offset does
            # not say where each vbucket started: so it starts where the one before ended, wherever that was.
            ends = planning.high_offsets(self._watch.bucket_uuid, self._watch.survey())
            return _to_spark(
                ends.updated({it: replace(at, snapshot_start=Seqno(0)) for it, at in ends.offsets.items()})
            )
        began.check_bucket(self._watch.bucket_uuid)
        if not began.offsets and isinstance(self._options.start, datetime):
            return _to_spark(self._watch.find_start())
        reached: dict[VBucketId, StreamOffset] = {}
        if self._reports is not None:
            if (rows := self._reports.rows()) is not None:
                self._watch.row_share.on_batch(self._plans.chosen, rows=rows)
            reached = self._reports.take()
        if self._bucket is not None and not self._watch.still_selects(self._bucket):
            # A collection was recreated under its name during the batch: its first rows are after the planned end.
            reached = {}
        self._survey = self._watch.survey(began)
        end = self._plans.plan(
            began,
            self._survey,
            reached,
            target=self._target,
            rows_max=self._rows_max(limit),
            row_share=self._watch.row_share.value,
        )
        return _to_spark(end)

    @in_one_sentence()
    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return _to_spark(planning.high_offsets(self._watch.bucket_uuid, self._survey or self._watch.survey()))

    def getDefaultReadLimit(self) -> versions.ReadLimit:  # noqa: N802
        if self._options.rows_per_trigger_max is not None:
            return versions.ReadMaxRows(self._options.rows_per_trigger_max)
        if self._options.bytes_per_trigger_max is not None:
            return versions.ReadMaxBytes(self._options.bytes_per_trigger_max)
        return versions.ReadAllAvailable()

    def _rows_max(self, limit: versions.ReadLimit | None) -> int | None:
        if limit is None:  # PySpark before 4.2 has none
            return self._options.rows_per_trigger_max or planning.rows_of_bytes(self._options.bytes_per_trigger_max)
        if isinstance(limit, versions.ReadMaxRows):
            return limit.max_rows
        return planning.rows_of_bytes(limit.max_bytes) if isinstance(limit, versions.ReadMaxBytes) else None

    @in_one_sentence()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {vbucket: status.high_seqno for vbucket, status in self._watch.survey().items()}

    @in_one_sentence()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        began, ends = _from_spark(start), _from_spark(end)
        self._began = ends
        is_repeated = not self._plans.is_planned_here(ends)
        starts = began if is_repeated else self._plans.starts(began)
        ranges = self._plans.ranges(began, ends, lambda: self._watch.survey(began))
        shares, bucket = self._watch.shares(ranges, starts)
        self._bucket = bucket
        if is_repeated:
            return [DcpPartition(share, bucket) for share in shares]
        if self._reports is None:
            self._reports = ReachedOffsets(self._watch.cluster_map.nodes[0])
        reports = self._reports.expect(len(shares))
        return [DcpPartition(share, bucket, report_to) for share, report_to in zip(shares, reports, strict=True)]

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: there is nothing to release."""

    def stop(self) -> None:
        for opened in (self._watching, self._reports):
            if opened is not None:
                opened.close()

    # --- reading, in the tasks ----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows(partition, fails_on_rollback=False)


def _to_spark(offsets: Offsets) -> dict[str, Any]:
    """Spark compares offsets as text, so equal offsets must always be equal texts."""
    members: dict[str, Any] = json.loads(offsets.to_json())
    return members


def _from_spark(offset: dict[str, Any]) -> Offsets:
    return Offsets.from_json(json.dumps(offset))


# --- the lag of a query behind its bucket -----------------------------------------------------------------------------
#
# A Python source can't report its own metrics, but Spark tells listeners where a batch ended and where the source was
# at that time. The difference, in seqnos, is the lag.


OnLag = Callable[[str, int], None]
"""Called with the name or id of a query, and its lag in seqnos."""


def progress_lag(progress: Any) -> int | None:
    """Return the lag of a query with one `dcp` source, in seqnos; None if its progress has no offsets of ours.

    `progress` is Spark's object, or a dictionary of the same.
    """
    reported = progress if isinstance(progress, dict) else json.loads(progress.json)
    source = (reported.get("sources") or [{}])[0]
    offsets = (source.get("latestOffset"), source.get("endOffset"))
    try:
        newest, reached = (Offsets.from_json(at if isinstance(at, str) else json.dumps(at)) for at in offsets)
    except InvalidOffsets:
        return None
    return sum(
        max(0, offset.seqno - (reached[vbucket].seqno if vbucket in reached else 0))
        for vbucket, offset in newest.offsets.items()
    )


class LagListener(StreamingQueryListener):
    """Reports the lag of queries that read `dcp`, after each batch: `spark.streams.addListener(LagListener(print))`."""

    def __init__(self, on_lag: OnLag) -> None:
        self._on_lag = on_lag

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  (Spark's names)
        """Do nothing: no lag is known yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        lag = progress_lag(event.progress)
        if lag is not None:
            self._on_lag(event.progress.name or str(event.progress.id), lag)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Do nothing: without new data, the last lag is still valid."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Do nothing: the last report remains valid."""
