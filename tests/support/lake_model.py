"""A bucket in memory, with failovers, and the rows that a reader of it would return.

It knows nothing of tables: tests compare the tables with it. Every vbucket has one list of changes, its current
branch. A failover cuts the list and starts a new branch.
"""

from __future__ import annotations

import itertools
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder
from deltalake.schema import PrimitiveType

from headwater.client.batches import RAW_SCHEMA
from headwater.client.offsets import Offsets
from headwater.lake import data_files
from headwater.lake.change_files import ChangeReport
from headwater.lake.commits import Batch, CommittedBatch, begin_batch, commit_batch, merge
from headwater.lake.data_files import FileReader, RollingWriter
from headwater.lake.deletion_vectors import INLINE_BYTES_MAX, VectorWriter
from headwater.lake.delta_log import DeltaLog, TableCommit
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake, LakeSettings, Runner, run_here
from headwater.lake.layout import XATTRS, TableKind, history_schema
from headwater.lake.typed_columns import TypedColumns
from headwater.lake.verify import LakeChecks, Verification, judged_facts, verdict
from headwater.lake.verify_group import Counts, GroupReport, judge_group, scan_changes
from headwater.lake.verify_scan import Findings
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

BUCKET_UUID = "5ab1e"
EPOCH_NS = 1_700_000_000_000_000_000
REMOVALS = ("deletion", "expiration")
ENDS = ("collection_dropped", "collection_created")


@dataclass(frozen=True, slots=True)
class Change:
    seqno: int
    op: str
    collection_id: int
    key: bytes | None = None
    value: bytes | None = None
    is_json: bool = True
    flags: int = 0
    expiry: int = 0
    rev: int = 1
    cas: int = 0
    xattrs: tuple[tuple[str, bytes], ...] = ()


@dataclass(slots=True)
class ModelVBucket:
    vbuuid: int
    branches: list[tuple[int, int]] = field(default_factory=list)
    """The earlier branches, newest first: vbuuid, and the seqno at which each began."""
    began_at: int = 0
    """Where the current branch began."""
    changes: list[Change] = field(default_factory=list)
    high_seqno: int = 0
    sent_seqno: int = 0
    """How far, and on which branch, the reader has returned changes."""
    sent_vbuuid: int = 0
    fork_seqno: int | None = None
    """The earliest seqno at which the history has diverged since then."""
    whole_seqnos: list[int] = field(default_factory=lambda: [0])
    """The ends of the returned snapshots: only there is the state known."""

    def upto(self, seqno: int) -> list[Change]:
        return [change for change in self.changes if change.seqno <= seqno]


def documents(changes: Iterable[Change]) -> dict[tuple[int, bytes], Change]:
    """Return the documents that changes leave, by collection and key."""
    found: dict[tuple[int, bytes], Change] = {}
    for change in changes:
        if change.op in ENDS:
            found = {place: it for place, it in found.items() if place[0] != change.collection_id}
        elif change.key is not None:
            place = change.collection_id, change.key
            found.pop(place, None)
            if change.op == "mutation":
                found[place] = change
    return found


class ModelBucket:
    """The bucket, and a reader of it."""

    def __init__(self, vbuckets: int) -> None:
        self._vbuuids = itertools.count(2**63 + 1)
        """Too large for a signed number, like half of all vbuuids."""
        self._times = itertools.count(1)
        self.has_xattrs = False
        """Whether readers request extended attributes."""
        self.vbuckets = [ModelVBucket(vbuuid=next(self._vbuuids)) for _ in range(vbuckets)]
        self.names: dict[int, tuple[str, str]] = {0: ("_default", "_default")}

    # --- what happens in it ---------------------------------------------------------------------------------------

    def change(
        self,
        vbucket: int,
        op: str,
        collection_id: int,
        key: bytes | None = None,
        value: bytes | None = None,
        *,
        is_json: bool = True,
        flags: int = 0,
        expiry: int = 0,
        xattrs: tuple[tuple[str, bytes], ...] = (),
    ) -> Change:
        place = self.vbuckets[vbucket]
        place.high_seqno += 1
        change = Change(
            seqno=place.high_seqno,
            op=op,
            collection_id=collection_id,
            key=key,
            value=value,
            is_json=is_json,
            flags=flags,
            expiry=expiry,
            rev=place.high_seqno,
            cas=0 if key is None else EPOCH_NS + next(self._times) * 1_000_000,
            xattrs=xattrs,
        )
        place.changes.append(change)
        return change

    def advance_time(self, *, hours: int) -> None:
        """Let changes from now on have a later time."""
        self._times = itertools.count(next(self._times) + hours * 3_600_000)

    def event(self, op: str, collection_id: int) -> None:
        """Send an event of a collection to all vbuckets."""
        for vbucket in range(len(self.vbuckets)):
            self.change(vbucket, op, collection_id)

    def fail_over(self, vbucket: int, seqno: int) -> None:
        """Let another copy take over, which has the changes up to a seqno."""
        place = self.vbuckets[vbucket]
        place.changes = place.upto(seqno)
        place.high_seqno = seqno
        before = [(place.vbuuid, place.began_at), *place.branches]
        place.branches = [it for it in before if it[1] <= seqno]
        place.vbuuid, place.began_at = next(self._vbuuids), seqno
        if seqno < place.sent_seqno:
            place.fork_seqno = seqno if place.fork_seqno is None else min(seqno, place.fork_seqno)

    def failover_logs(self) -> dict[VBucketId, FailoverLog]:
        return {
            VBucketId(number): FailoverLog.of(
                FailoverEntry(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno))
                for vbuuid, seqno in [(it.vbuuid, it.began_at), *it.branches]
            )
            for number, it in enumerate(self.vbuckets)
        }

    # --- what a reader sees ---------------------------------------------------------------------------------------

    def rows(
        self, vbucket: int, *, back_seqnos: int = 0, deduplicated: bool = False, careless: bool = False
    ) -> list[dict[str, object]]:
        """Return the next rows of a vbucket: everything new, preceded by a rollback if there was one.

        The rollback goes to the end of the last snapshot that is at least `back_seqnos` before the fork. A careless
        one goes exactly to that seqno, even inside a snapshot.
        """
        place = self.vbuckets[vbucket]
        start = place.sent_seqno
        rows = []
        if place.fork_seqno is not None:
            start = max(0, place.fork_seqno - back_seqnos)
            if not careless:
                start = max(seqno for seqno in place.whole_seqnos if seqno <= start)
            place.whole_seqnos = [seqno for seqno in place.whole_seqnos if seqno <= start]
            rows.append(self._rollback_row(vbucket, start))
        new = [change for change in place.changes if change.seqno > start]
        if deduplicated:
            newest = {(change.collection_id, change.key): change for change in new}
            new = [change for change in new if change.key is None or newest[change.collection_id, change.key] is change]
        return [*rows, *(self.row(vbucket, change, start) for change in new)]

    def mark_sent(self, vbuckets: Iterable[int]) -> None:
        for vbucket in vbuckets:
            place = self.vbuckets[vbucket]
            place.sent_seqno, place.sent_vbuuid, place.fork_seqno = place.high_seqno, place.vbuuid, None
            place.whole_seqnos.append(place.high_seqno)

    def mark_unread(self, vbucket: int) -> None:
        """Let the reader start again from the beginning."""
        place = self.vbuckets[vbucket]
        place.sent_seqno, place.sent_vbuuid, place.fork_seqno = 0, 0, None
        place.whole_seqnos = [0]

    def offsets(self, sending: Sequence[int] = ()) -> Offsets:
        """Return the reader's offsets, or those after the new rows of some vbuckets."""
        found = {}
        for number, place in enumerate(self.vbuckets):
            is_new = number in sending
            seqno = Seqno(place.high_seqno if is_new else place.sent_seqno)
            vbuuid = Vbuuid(place.vbuuid if is_new else place.sent_vbuuid)
            if vbuuid:
                found[VBucketId(number)] = StreamOffset(
                    vbuuid=vbuuid, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno
                )
        return Offsets(BUCKET_UUID, found)

    def sent_documents(self) -> dict[tuple[int, int, bytes], Change]:
        """Return the documents of the returned changes, by vbucket, collection and key. Do not call this between a
        failover and the reader's next read of the vbucket."""
        return {
            (number, *place): change
            for number, vbucket in enumerate(self.vbuckets)
            for place, change in documents(vbucket.upto(vbucket.sent_seqno)).items()
        }

    def row(self, vbucket: int, change: Change, snapshot_start: int) -> dict[str, object]:
        """Return a change as the reader returns it."""
        scope, collection = self.names[change.collection_id]
        return {
            "vbucket": vbucket,
            "vbuuid": self.vbuckets[vbucket].vbuuid,
            "seqno": change.seqno,
            "rev": change.rev,
            "op": change.op,
            "scope": scope,
            "collection": collection,
            "collection_id": change.collection_id,
            "key": change.key,
            "value": change.value,
            "datatype": int(change.is_json and change.op == "mutation"),
            "flags": change.flags,
            "expiry": change.expiry,
            "cas": change.cas,
            "changed_at": changed_at(change),
            "snapshot_start": snapshot_start,
            "snapshot_end": self.vbuckets[vbucket].high_seqno,
            **({"xattrs": change.xattrs} if self.has_xattrs else {}),
        }

    def _rollback_row(self, vbucket: int, kept: int) -> dict[str, object]:
        place = self.vbuckets[vbucket]
        details = {"from_seqno": place.sent_seqno, "old_vbuuid": place.sent_vbuuid, "new_vbuuid": place.vbuuid}
        row = dict.fromkeys(("rev", "datatype", "flags", "expiry", "cas"), 0)
        return {
            **row,
            "op": "rollback",
            "vbucket": vbucket,
            "vbuuid": place.vbuuid,
            "seqno": kept,
            "value": json.dumps(details).encode(),
            "snapshot_start": kept,
            "snapshot_end": kept,
        }


def changed_at(change: Change) -> datetime | None:
    if change.cas == 0:
        return None
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=change.cas // 1000)


def batches(rows: Sequence[dict[str, object]], size: int) -> Iterator[pa.RecordBatch]:
    """Yield rows as a reader's batches."""
    has_xattrs = any("xattrs" in row for row in rows)
    schema = RAW_SCHEMA.append(XATTRS) if has_xattrs else RAW_SCHEMA
    plain = pa.schema([pa.field(f.name, _plain(f.type), f.nullable) for f in schema])
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        columns = [pa.array([row.get(field.name) for row in part], field.type) for field in plain]
        columns = [
            column.dictionary_encode().cast(field.type) if pa.types.is_dictionary(field.type) else column
            for column, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


# The rules for a lake, checked without any of its own code except for reading tables.


Row = dict[str, Any]
Place = tuple[int, int, bytes]
"""Vbucket, collection and key."""


def table_rows(directory: Path) -> list[Row]:
    """Return the rows of a table, as any reader gets them, or none if there is no table."""
    if not (directory / "_delta_log").exists():
        return []
    return read_rows(DeltaTable(directory))


def read_rows(table: DeltaTable, columns: Sequence[str] | None = None) -> list[Row]:
    """Return some columns of an open table, or all. delta-rs reads tables with deletion vectors only by queries."""
    if not table.protocol().reader_features:
        return list(table.to_pyarrow_table(columns=None if columns is None else list(columns)).to_pylist())
    query = f"SELECT {', '.join(columns or '*')} FROM t"
    return list(pa.table(QueryBuilder().register("t", table).execute(query).read_all()).to_pylist())


class Follower:
    """A copy of a table, kept equal only by its change feed, as deltalake reads it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.version = DeltaTable(directory).version()
        self.rows = self._table()
        self.seen: Counter[str] = Counter()
        """How many changes the feed has reported, by type."""

    def _table(self) -> dict[Place, Row]:
        return {place_of(row): _data(row) for row in table_rows(self._directory)}

    def follow(self) -> None:
        """Apply the changes since the last call, and compare. Every row of the feed must fit: a removed row is one
        that the copy has, and an update changes something."""
        table, since = DeltaTable(self._directory), self.version
        self.version = table.version()
        feed = [] if self.version == since else pa.table(table.load_cdf(since + 1, self.version)).to_pylist()
        gone: dict[Place, Row] = {}
        for change in sorted(feed, key=lambda it: (it["_commit_version"], _LEAVES.index(it["_change_type"]) // 2)):
            kind, place, row = change["_change_type"], place_of(change), _data(change)
            self.seen[kind] += 1
            if kind in _LEAVES[:2]:
                assert self.rows.pop(place) == row, f"{kind} of another row: {place}"
                gone[place] = row
            else:
                assert place not in self.rows, f"{kind} of a row that is there: {place}"
                assert kind == "insert" or gone[place] != row, f"an update of nothing: {place}"
                self.rows[place] = row
        assert self.rows == self._table()


_LEAVES = ("delete", "update_preimage", "insert", "update_postimage")
"""The first two remove a row; they are applied before the others, which add one."""


def _data(row: Row) -> Row:
    """Return a row without the columns for its location. A column that was added later is null in it."""
    beside = ("vbucket_group", "_change_type", "_commit_version", "_commit_timestamp")
    return {name: value for name, value in row.items() if value is not None and name not in beside}


def place_of(row: Row) -> Place:
    key = row["key_bytes"] if row["key_bytes"] is not None else row["key"].encode()
    return row["vbucket"], row["collection_id"], key


def check_documents(rows: Iterable[Row], expected: dict[Place, Change], *, variants: bool = False) -> None:
    """Check that the rows are exactly these documents, as texts or as variants."""
    found: dict[Place, Row] = {}
    for row in rows:
        assert place_of(row) not in found, f"two rows of {place_of(row)}"
        found[place_of(row)] = row
    assert found.keys() == expected.keys()
    for place, row in found.items():
        change = expected[place]
        text = document_text(row)
        value = row["content"] if text is None else text.encode()
        assert (row["seqno"], row["rev"], row["cas"]) == (change.seqno, change.rev, change.cas), place
        assert (row["flags"], row["expiry"]) == (change.flags, change.expiry), place
        assert row["datatype"] == int(change.is_json), place
        is_json = is_variant(change) if variants else change.is_json and _is_text(change.value)
        assert (text is not None) == is_json, place
        assert isinstance(row["document"], dict) == (variants and is_json), place
        if isinstance(row["document"], dict):
            assert is_same(said(value or b""), said(change.value or b"")), place
        else:
            assert value == change.value, place
        assert row["changed_at"] == changed_at(change), place


def document_text(row: Row) -> str | None:
    """Return the JSON of a document, decoded by PySpark if it is a variant."""
    from pyspark.sql.types import VariantVal

    document = row["document"]
    if not isinstance(document, dict):
        return None if document is None else str(document)
    with localcontext(prec=64):  # PySpark would otherwise round decimals of more than 28 digits
        return str(VariantVal(document["value"], document["metadata"]).toJson())


def is_variant(change: Change) -> bool:
    """Return whether a variant can represent the whole document."""
    try:
        return change.is_json and said(change.value or b"") is not None
    except ValueError:
        return False


def said(text: bytes | str) -> list[Any]:
    """Parse JSON into a list, with numbers as they are written. Raises `ValueError` for JSON that a variant would
    change, but not for a number with more digits than a double has."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a name twice")
        return dict(pairs)

    def constant(text: str) -> None:
        raise ValueError(text)

    text = text if isinstance(text, str) else text.decode()
    found = json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=constant, object_pairs_hook=members)
    json.dumps(found, default=str, ensure_ascii=False).encode()  # An unpaired surrogate is not a character
    return [found]


def is_same(one: Any, other: Any) -> bool:
    """Return whether both are the same: numbers are equal, or the same double with no more digits than doubles have."""
    if isinstance(one, Decimal) and isinstance(other, Decimal):
        return one == other or (float(one) == float(other) and len(one.as_tuple().digits) <= 17)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) and type(one) is type(other)


def _is_text(value: bytes | None) -> bool:
    try:
        return value is not None and value.decode() is not None
    except UnicodeDecodeError:
        return False


def check_no_duplicates(changes: Iterable[Row]) -> None:
    """Check that no change is live twice."""
    alive = [row for row in changes if not row["void"] and row["op"] != "rollback"]
    counts = Counter((row["vbucket"], row["vbuuid"], row["seqno"]) for row in alive)
    assert [place for place, count in counts.items() if count > 1] == []
    seqnos = Counter((row["vbucket"], row["seqno"]) for row in alive)
    assert [place for place, count in seqnos.items() if count > 1] == []


def check_sorted(table: Path, cluster_by: Sequence[str]) -> None:
    """Check that the rows of every file are sorted by the columns in `cluster_by` that the file has and whose
    values have an order, and then by key. Nulls come last."""
    for path in DeltaTable(table).file_uris():
        rows = pq.read_table(path, partitioning=None)
        names = [it for it in cluster_by if it in rows.schema.names and not _is_unordered(rows.schema.field(it).type)]
        places = [
            tuple((row[name] is None, row[name]) for name in [*names, "key"])
            for row in rows.select([*names, "key"]).to_pylist()
        ]
        assert places == sorted(places), path


def _is_unordered(type_: pa.DataType) -> bool:
    return pa.types.is_nested(type_) or pa.types.is_boolean(type_)


def check_inferred(lake: Path, table: str, kind: str = "documents") -> None:
    """Check that the inferred columns hold all fields of the documents, each value once; that `rejects` has exactly
    the values that they can't hold; and that the sums match those of the texts."""
    schema = DeltaTable(lake / kind / table).schema()
    own = {*history_schema(xattrs=False).names, "vbucket_group", "is_current"}
    columns: dict[str, list[str]] = {}
    types = {column.name: column.type for column in schema.fields}
    numbers = (PrimitiveType("long"), PrimitiveType("double"))
    for column in schema.fields:
        if column.name not in own:
            columns.setdefault(column.metadata.get("headwater.field", column.name), []).append(column.name)
    numeric = {it: [name for name in found if types[name] in numbers] for it, found in columns.items()}
    sums, text_sums = Counter[str](), Counter[str]()
    misfits: list[tuple[Place, str | None]] = []
    for row in table_rows(lake / kind / table):
        document = _object_of(document_text(row))
        if document is None:
            misfits.append((place_of(row), None))
            continue
        for field_name, found in columns.items():
            value = document.get(field_name)
            held = [row[name] for name in found if row[name] is not None]
            assert len(held) <= (value is not None), (field_name, found, value)
            if value is not None and not held:
                misfits.append((place_of(row), field_name))
            if type(value) in (int, float) and numeric[field_name] and held and type(held[0]) is not str:
                assert held == [value]
                text_sums[field_name] += value
            sums[field_name] += sum(row[name] or 0 for name in numeric[field_name])
        lower = {name.lower() for name in (*types, *columns)}
        assert {it.lower() for it, value in document.items() if value is not None} <= lower
    assert sums == text_sums
    if kind == "history":
        return
    rejects = [(place_of(row), row["field"]) for row in table_rows(lake / "rejects" / table)]
    assert Counter(rejects) == Counter(misfits)


def _object_of(text: str | None) -> dict[str, Any] | None:
    """Return the fields of a document; an empty dict if it is not an object, and None if it is invalid JSON."""
    if text is None:
        return {}
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else {}


Version = tuple[int, int, bytes, int, int | None]
"""Vbucket, collection, key, and the seqnos at which it began and ended."""


def expected_history(delivered: Sequence[Sequence[Change]]) -> dict[Version, tuple[datetime | None, datetime | None]]:
    """Return the versions in the returned changes that still hold, with the times at which they began and ended."""
    versions: dict[Version, tuple[datetime | None, datetime | None]] = {}
    for vbucket, changes in enumerate(delivered):
        current: dict[tuple[int, bytes], Change] = {}
        for change in changes:
            if change.op in ENDS:
                ended = [place for place in current if place[0] == change.collection_id]
            else:
                ended = [(change.collection_id, change.key or b"")]
            for place in ended:
                if (begun := current.pop(place, None)) is not None:
                    versions[vbucket, *place, begun.seqno, change.seqno] = changed_at(begun), changed_at(change)
            if change.op == "mutation":
                current[change.collection_id, change.key or b""] = change
        for place, begun in current.items():
            versions[vbucket, *place, begun.seqno, None] = changed_at(begun), None
    return versions


def check_history(rows: Iterable[Row], expected: dict[Version, tuple[datetime | None, datetime | None]]) -> None:
    found: dict[Version, Row] = {}
    for row in rows:
        version = (*place_of(row), row["seqno"], row["valid_to_seqno"])
        assert version not in found
        found[version] = row
        assert row["is_current"] == (row["valid_to_seqno"] is None)
    assert found.keys() == expected.keys()
    for version, row in found.items():
        begun, ended = expected[version]
        assert row["valid_from"] == begun
        # The drop of a collection has no time: then it is that of the batch.
        assert row["valid_to"] == ended or (ended is None and row["valid_to"] is not None)


# A lake of a model bucket, for tests that land a few batches and check the result.


HOTEL = 8


def with_columns(settings: LakeSettings, columns: Mapping[str, str]) -> LakeSettings:
    """Return the settings with typed columns, by table or for `*`, given as SQL."""
    return replace(settings, columns={name: TypedColumns.from_ddl(ddl) for name, ddl in columns.items()})


def guide_feed(directory: Path, collection: str, *, after_batch: int) -> dict[str, str]:
    """Run the guide's query: how later batches have changed each document. Each document must appear once."""
    guide = (Path(__file__).parents[2] / "docs/guides/querying.md").read_text()
    (block,) = (block for block in guide.split("```") if "AS change_type" in block)
    scope, _, name = collection.partition(".")
    query = block[block.index("WITH") :].replace("> 41", f"> {after_batch}")
    query = query.replace("'shop'", f"'{scope}'").replace("'orders'", f"'{name}'")
    changes = DeltaTable(directory / "changes").to_pyarrow_dataset()
    rows = duckdb.sql(query).fetchall()
    del changes
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: row[1] for row in rows}


class SmallLake:
    """A bucket with a second collection besides the default one, and its lake."""

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
            str(directory),
            bucket_uuid=BUCKET_UUID,
            vbuckets=len(self.bucket.vbuckets),
            groups=groups,
            xattrs=self.bucket.has_xattrs,
            settings=settings,
            step=step,
        )

    def write(self, vbucket: int, *keys: str, collection: int = 0, value: bytes = b'{"n": 1}') -> None:
        for key in keys:
            self.bucket.change(vbucket, "mutation", collection, key.encode(), value)

    def begin(self) -> Batch:
        return begin_batch(self.lake)

    def reached(self, sending: Sequence[int]) -> dict[VBucketId, StreamOffset]:
        """Return the offsets after the changes of some vbuckets."""
        offsets = self.bucket.offsets(sending)
        return {VBucketId(vbucket): offsets[VBucketId(vbucket)] for vbucket in sending}

    def write_batch(self, batch: Batch, sending: Sequence[int], **reading: Any) -> ChangeReport:
        """Return the report of a task that reads the new changes of some vbuckets."""
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
        """Land the new changes of some vbuckets, or of all."""
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


def lake_of_before(directory: Path, settings: LakeSettings) -> SmallLake:
    """Return a lake made by the version before 0.2, with the bucket that it was landed from."""
    with tarfile.open(Path(__file__).parents[1] / "unit" / "lake" / "data" / "lake-of-version-0.tar.gz") as packed:
        packed.extractall(directory, filter="data")
    small = SmallLake(directory / "lake-of-before", settings=settings)
    small.write(0, *(f"key-{number}" for number in range(20)))
    small.write(2, "d")
    small.bucket.mark_sent(range(4))
    small.write(0, "key-0", value=b'{"n": 2}')
    small.write(2, "e", value=b'{"n": "no"}')
    small.bucket.mark_sent(range(4))
    return small


def mark_rows(
    log: DeltaLog, is_dead: Callable[[Row], bool], *, inline_bytes_max: int = INLINE_BYTES_MAX
) -> TableCommit:
    """Return a commit that marks rows, in the files that have such rows."""
    vectors, found = VectorWriter(log.location, inline_bytes_max=inline_bytes_max), []
    for file in log.files():
        rows = [row for part in data_files.read_files(log.location, [file]) for row in part.to_pylist()]
        kept = np.array([not is_dead(row) for row in rows])
        if not kept.all():
            with FileReader(log.location, file) as reader:
                found.append(data_files.Leaving.of(reader, kept))
    add = data_files.mark_rows(log.location, found, vectors)
    return TableCommit(add=add, remove=[it.file for it in found], state=log.state())


def use_vectors(lake: Lake) -> None:
    """Cut every file of the merged tables in two, and give both halves dead rows: copies of their first row. The
    contents of the tables stay the same. The vectors of rejects are in the log, all others in files."""
    for tables in lake.tables.values():
        for table in tables.there:
            log, add = table.log, []
            log.set_vectors(True, table.state)
            vectors = VectorWriter(log.location, inline_bytes_max=1024 if table.kind is TableKind.REJECTS else 0)
            dead = 0
            for file in log.files():
                with FileReader(log.location, file) as reader:
                    schema, rows = reader.schema, pa.concat_tables(map(reader.read, reader.row_groups))
                ranges = tables.ranges_of(table)
                there, half = [name for name in ranges if name in schema.names], rows.num_rows // 2
                for part in (rows.slice(0, half), rows.slice(half)):
                    dead += 1
                    writer = RollingWriter(log.location, schema, ranges=there, partition=file.partition)
                    writer.write(pa.concat_tables([part.slice(0, 1)] * dead + [part] if part.num_rows else [part]))
                    add += [replace(written, vector=vectors.write(np.arange(dead))) for written in writer.close()]
            vectors.close()
            table.commit(add=add, remove=log.files())


def merging(**rules: Any) -> LakeSettings:
    return LakeSettings(merging=MergeRules(**rules))


# `headwater verify` against a model of the bucket instead of a node: everything except the reading.


BATCH_ROWS = 3


def verify_model(lake: Lake, bucket: ModelBucket) -> GroupReport:
    """Return the findings in all groups. The offsets of the tables must be in the history of the model."""
    counts, findings = dict[str, Counts](), Findings()
    for report in judged_groups(lake, bucket).values():
        findings.merge(report.findings)
        for name, part in report.counts.items():
            counts.setdefault(name, Counts()).add(part)
    return GroupReport(counts, findings)


def compare_model(directory: Path, bucket: ModelBucket) -> Verification:
    """Like `compare` with a node."""
    lake = Lake.open(str(directory))
    assert lake is not None
    return verdict(checks_of(lake, bucket), judged_groups(lake, bucket))


def checks_of(lake: Lake, bucket: ModelBucket) -> LakeChecks:
    changes = sum(len(vbucket.changes) for vbucket in bucket.vbuckets)
    return LakeChecks(lake, facts=judged_facts(lake, changes=changes))


def judged_groups(lake: Lake, bucket: ModelBucket) -> dict[int, GroupReport]:
    reports, checks = {}, checks_of(lake, bucket)
    for group in range(checks.facts.groups):
        check = checks.of_group(group, lambda vbucket, place: False, failover_logs=bucket.failover_logs())
        reading = check.reading()
        for vbucket in check.vbuckets:
            rows = [bucket.row(vbucket, change, 0) for change in bucket.vbuckets[vbucket].changes]
            for batch in batches(rows, BATCH_ROWS):
                reading.add(batch)
        reports[group] = judge_group(check, reading, scan_changes(check))
    return reports
