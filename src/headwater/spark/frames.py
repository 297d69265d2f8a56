"""Data frames for programs: a bucket as a frame, the documents of a lake, and changes for custom sinks.

`apply_changes` is for `foreachBatch` on a stream of `dcp`. Such a stream repeats rows after a crash, may contain a
change and its rollback in one batch, and has rollbacks as rows. An exact sink has to store its offsets, `(vbucket,
vbuuid, seqno)`, together with what it has written. The helper does the rest: it reads the batch once, drops rows that
the sink already has and rows that are void, and passes the rollbacks separately, to be undone first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType

from headwater.client.offsets import Offsets
from headwater.errors import InvalidInput
from headwater.lake.change_files import add_rollback
from headwater.lake.documents_merge import merged_rows
from headwater.lake.location import Location
from headwater.lake.variants import VARIANT
from headwater.landing.landed_documents import OpenCollection
from headwater.landing.source_options import (
    DOCUMENT_COLUMNS,
    FRAME_KEYWORDS,
    SOURCE_OPTIONS,
    Conditions,
    FrameKeywords,
    Mode,
    source_texts,
)
from headwater.options import list_keywords
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark import register
from headwater.spark.executors import prepare_workers, use_shipped_kernels
from headwater.spark.query_errors import in_one_sentence, is_ours, query_error
from headwater.spark.rows import as_spark_variants
from headwater.spark.versions import VariantType

_PLACES = "places.json"
_SUMMARY_DDL = "vbucket INT, first_vbuuid BIGINT, begins_at BIGINT, vbuuid BIGINT, seqno BIGINT, rolled_back_to BIGINT"
_SUMMARY = pa.schema(
    [
        ("vbucket", pa.int32()),
        ("first_vbuuid", pa.int64()),
        ("begins_at", pa.int64()),
        ("vbuuid", pa.int64()),
        ("seqno", pa.int64()),
        ("rolled_back_to", pa.int64()),
    ]
)
_NEEDED = frozenset({"vbucket", "vbuuid", "seqno", "op", "snapshot_start"})
"""The columns that determine the position of a row."""
_VBUCKETS_MAX = 0x10000
_U64 = 2**64 - 1
"""Spark's numbers are signed; this mask makes them unsigned."""


# --- a bucket ---------------------------------------------------------------------------------------------------------


@list_keywords(FRAME_KEYWORDS)
def read(
    spark: SparkSession, url: str, *, schema: StructType | str | None = None, **source: Unpack[FrameKeywords]
) -> DataFrame:
    """Read the changes of a bucket as a frame: `read(spark, "couchbase://host/bucket", collections=["shop.orders"],
    columns=["key", "value"], where="op = 'mutation'")`. With `mode="documents"`, read its documents.

    The keywords are options of the `dcp` source, in Python's spelling.

    Args:
        schema: For `mode="documents"`, the fields of the documents with their types.
        where: Any condition in SQL. Spark applies what the source can't.

    Returns:
        The frame. Spark reads the bucket when the frame is used.

    Raises:
        HeadwaterError: An option can't be used, or the bucket can't be read.
    """
    texts = source_texts(url, source, function="read", known=FrameKeywords.__annotations__, beside=("schema",))
    if "PYSPARK_PYTHON" not in os.environ:
        register(spark)  # Spark would look for the source with the first python3 on the path
    columns = SOURCE_OPTIONS["columns"].parse(texts.pop("columns", ""))
    where = texts.get("where", "")
    is_left_to_spark = not _is_for_source(where, is_of_documents=texts.get("mode") == Mode.DOCUMENTS)
    # A condition that Spark applies may need columns that the caller does not want.
    looked_at: set[str] = set()
    if is_left_to_spark:
        del texts["where"]
        looked_at |= {*re.findall(r"\w+", where.lower())}

    def load(names: Iterable[str]) -> DataFrame:
        reader = spark.read.format("dcp") if schema is None else spark.read.format("dcp").schema(schema)
        try:
            return reader.options(**texts, columns=",".join(names)).load()
        except PySparkException as error:
            raise (query_error(error) if is_ours(error) else error) from None

    frame = load([] if looked_at else columns)
    if columns and looked_at:
        frame = load([*columns, *(name for name in frame.columns if name in looked_at and name not in columns)])
    if is_left_to_spark:
        frame = frame.where(where)
    return frame.select(*columns) if columns and looked_at else frame


def _is_for_source(where: str, *, is_of_documents: bool) -> bool:
    """Return whether the source can apply a condition. One on fields that are columns of the frame is left to Spark,
    because these columns have types of their own, such as times."""
    try:
        conditions = Conditions.parse(where)
    except InvalidInput:
        return False
    return not is_of_documents or (conditions.columns <= {*DOCUMENT_COLUMNS} and not conditions.need_values)


# --- documents --------------------------------------------------------------------------------------------------------


def documents(
    spark: SparkSession,
    into: str,
    collection: str,
    *,
    batch: int | None = None,
    columns: Sequence[str] = (),
    where: str = "",
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read the documents of a collection as of a batch on the executors, including changes that are not merged yet.

    Args:
        into: The directory that was landed into.
        collection: `scope.collection`.
        batch: The number of the batch, by default the last one. To combine several collections, use the same batch for
            all.
        columns: The columns to read; by default all except the one by which the table is partitioned.
        where: A condition in SQL. One on `key` and `vbucket` alone also limits what is read.
        storage_options: Options of the object store that contains `into`.

    Returns:
        The frame. It does not contain later batches of the landing.

    Raises:
        InvalidInput: The tables, a column or the batch does not exist.
    """
    opened = OpenCollection.open(into, collection, batch=batch, storage_options=storage_options)
    opened.check_columns(columns)
    schema = opened.schema
    read_columns, conditions = [*schema.names], Conditions()
    if columns:
        looked_at = {*columns, *re.findall(r"\w+", where)}
        # A quoted name may contain any characters.
        read_columns = [
            name for name in read_columns if name in looked_at or ("`" in where and not name.isidentifier())
        ]
    with contextlib.suppress(InvalidInput):
        conditions = Conditions.parse(where)
    tasks = tuple(map(pickle.dumps, opened.tasks(conditions)))
    prepare_workers(spark)
    frame = spark.range(0, len(tasks), 1, max(1, len(tasks)))
    read = _ReadDocuments(tasks, tuple(read_columns), conditions.allowed.get("key"))
    frame = frame.mapInArrow(read, _spark_schema(pa.schema([schema.field(name) for name in read_columns])))
    frame = frame.where(where) if where else frame
    return frame.select(*(f"`{name.replace('`', '``')}`" for name in columns)) if columns else frame


def _spark_schema(schema: pa.Schema) -> StructType:
    """Convert the columns to Spark's. A version without variants gets their two binaries."""
    return StructType(
        [
            StructField(name, VariantType()) if field.type == VARIANT and VariantType is not None else spark_field
            for name, field, spark_field in zip(schema.names, schema, from_arrow_schema(schema), strict=True)
        ]
    )


@dataclass(frozen=True, slots=True)
class _ReadDocuments:
    tasks: tuple[bytes, ...]
    columns: tuple[str, ...]
    keys: frozenset[str] | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                use_shipped_kernels()
                with in_one_sentence():
                    for rows in merged_rows(pickle.loads(self.tasks[number]), self.columns, self.keys):
                        yield from (as_spark_variants(batch) for batch in rows.to_batches())


# --- changes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRollback:
    """A rollback for a sink: its changes of `vbucket` above `seqno` are void."""

    vbucket: int
    seqno: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeBatch:
    """What a sink gets in addition to the changes."""

    batch_id: int
    """Spark's number. Don't skip batches by it: a repeated batch may contain more than the first attempt."""
    rollbacks: tuple[SinkRollback, ...]
    """Undo these before you apply the changes."""
    places: str
    """The sink's position after this batch. Store it with the data, in one transaction."""


Apply = Callable[[DataFrame, ChangeBatch], None]


def apply_changes(
    apply: Apply,
    *,
    places: str | Callable[[], str | None],
    storage_options: Mapping[str, str] | None = None,
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` on a stream of `dcp`. It calls `apply(changes, batch)` with each change
    only once, and the rollbacks separately.

    Args:
        apply: Called with the new changes of each batch, and a `ChangeBatch`.
        places: A function that returns the text that the sink has stored last (`batch.places`), or None; the sink is
            exact if it stores the text and the changes in one transaction. Or a folder, where the text is stored after
            `apply` has returned; then a crash in between repeats one batch.
        storage_options: Options of the object store that contains the folder.

    Returns:
        The function. It raises `InvalidInput` if the stream lacks columns that it needs.
    """
    return _Applying(apply, Location.of(places, storage_options) if isinstance(places, str) else places)


@dataclass(frozen=True, slots=True)
class _Applying:
    apply: Apply
    places: Location | Callable[[], str | None]

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        if missing := _NEEDED - {*frame.columns}:
            raise InvalidInput(
                f"apply_changes needs the column {min(missing)}, which the stream does not have",
                hint=f"Have {', '.join(sorted(_NEEDED))} among the columns of the stream",
            )
        # Persist it: each use of a stream's frame would read the bucket again, which may have changed.
        frame = frame.persist()
        try:
            text = _load(self.places) if isinstance(self.places, Location) else self.places()
            held = None if text is None else Offsets.from_json(text)
            rows = frame.mapInArrow(_summarize, _SUMMARY_DDL).collect()
            rollbacks = {row.vbucket: row.rolled_back_to for row in rows if row.rolled_back_to is not None}
            reached = {
                VBucketId(row.vbucket): StreamOffset.whole(Vbuuid(row.vbuuid & _U64), Seqno(row.seqno)) for row in rows
            }
            floors = {} if held is None else {int(vbucket): int(at.seqno) for vbucket, at in held.offsets.items()}
            for row in rows:
                offset = None if held is None else held.get(VBucketId(row.vbucket))
                is_other = offset is not None and offset.vbuuid != row.first_vbuuid & _U64
                if is_other and row.begins_at < floors[row.vbucket]:
                    # The query restarted on a branch that the sink does not have: all rows from here on are new.
                    floors[row.vbucket] = row.begins_at
                    add_rollback(rollbacks, row.vbucket, row.begins_at)
            newest = {
                vbucket: at
                for vbucket, at in reached.items()
                if vbucket in rollbacks or at.seqno > floors.get(int(vbucket), -1)
            }
            after = (held or Offsets("")).updated(newest).to_json()
            batch = ChangeBatch(
                batch_id=batch_id,
                rollbacks=tuple(
                    SinkRollback(vbucket=vbucket, seqno=kept) for vbucket, kept in sorted(rollbacks.items())
                ),
                places=after,
            )
            self.apply(frame.mapInArrow(_NewRows(floors, rollbacks), frame.schema), batch)
            if isinstance(self.places, Location):
                self.places.make()
                self.places.write(_PLACES, after.encode())
        finally:
            frame.unpersist()


def _summarize(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return for each vbucket of a partition where its rows end, and how far back its rollbacks go."""
    found: dict[int, dict[str, Any]] = {}
    for batch in batches:
        vbuckets = np.asarray(batch.column("vbucket"))
        # The rows of a vbucket are in order, so the last one is its position.
        vbuuids, seqnos, starts = (batch.column(name) for name in ("vbuuid", "seqno", "snapshot_start"))
        for vbucket, row in zip(*np.unique(vbuckets, return_index=True), strict=True):
            if int(vbucket) not in found:
                begun = {"first_vbuuid": vbuuids[row].as_py(), "begins_at": starts[row].as_py()}
                found[int(vbucket)] = {"vbucket": int(vbucket), "rolled_back_to": None, **begun}
        for vbucket, from_behind in zip(*np.unique(vbuckets[::-1], return_index=True), strict=True):
            row = len(vbuckets) - 1 - from_behind
            found[int(vbucket)] |= {"vbuuid": vbuuids[row].as_py(), "seqno": seqnos[row].as_py()}
        for row in np.flatnonzero(_is_rollback(batch)):
            summary, kept = found[int(vbuckets[row])], seqnos[row].as_py()
            before = summary["rolled_back_to"]
            summary["rolled_back_to"] = kept if before is None else min(kept, before)
    yield pa.RecordBatch.from_pylist([*found.values()], schema=_SUMMARY)


def _is_rollback(rows: pa.RecordBatch | pa.Table) -> np.ndarray:
    return np.array([op == "rollback" for op in rows.column("op").to_pylist()], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class _NewRows:
    """Selects the rows that the sink lacks, without those that a rollback in the same batch made void."""

    held: Mapping[int, int]
    """The highest seqno that the sink has, by vbucket."""
    rollbacks: Mapping[int, int]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        floors = np.full(_VBUCKETS_MAX, -1, dtype=np.int64)
        for vbucket, seqno in self.held.items():
            floors[vbucket] = seqno
        # Whether a row is void is known only after all rows of its vbucket: keep those with rollbacks until the end.
        waiting: dict[int, list[pa.RecordBatch]] = {vbucket: [] for vbucket in self.rollbacks}
        for batch in batches:
            vbuckets = np.asarray(batch.column("vbucket"))
            is_rolled = np.isin(vbuckets, [*waiting])
            for vbucket, kept in waiting.items():
                if (mine := vbuckets == vbucket).any():
                    kept.append(batch.filter(pa.array(mine)))
            is_new = np.asarray(batch.column("seqno")) > floors[vbuckets]
            yield batch.filter(pa.array(is_new & ~is_rolled))
        for vbucket, kept in waiting.items():
            if kept:
                yield from _without_void(pa.Table.from_batches(kept), int(floors[vbucket])).to_batches()


def _without_void(rows: pa.Table, held: int) -> pa.Table:
    """Return the rows of one vbucket in order, without rollbacks and the rows that these made void."""
    seqnos, keep, floor = rows.column("seqno").to_numpy(), np.zeros(rows.num_rows, dtype=np.bool_), held
    is_rollback = _is_rollback(rows)
    for row in range(rows.num_rows):
        if is_rollback[row]:
            keep[:row] &= seqnos[:row] <= seqnos[row]
            floor = min(floor, int(seqnos[row]))
        else:
            keep[row] = seqnos[row] > floor
    return rows.filter(pa.array(keep))


def _load(folder: Location) -> str | None:
    try:
        return folder.read(_PLACES).decode()
    except FileNotFoundError:
        return None
