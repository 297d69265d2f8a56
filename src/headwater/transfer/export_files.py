"""What `headwater export` writes: live documents as JSON lines, CSV or Parquet, in files that appear when complete.

Texts are assembled as columns, without a Python object per document. A line has the format that `json_lines`
describes, which `headwater load` can read; without keys, it is the document itself. Documents that a format can't
hold are left out and counted by reason, never dropped silently. `cli.export` puts every batch of a read into a
`DocumentSpool`, and at the end takes out the live documents of each collection. They are not known earlier, because
a rollback or the drop of a collection voids rows that arrived long before.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.ipc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.client.offsets import VBUCKETS_MAX
from headwater.durable_files import sync_folder
from headwater.errors import InvalidInput, StoreFull
from headwater.lake.column_values import COLUMNS_MAX, ColumnDef, is_column_name, values_by_name
from headwater.lake.json_fields import JsonKind, list_fields
from headwater.lake.layout import split_texts
from headwater.lake.typed_columns import Misfits, TypedColumns
from headwater.phrases import counted, escaped_bytes
from headwater.protocol.kernels.decode import binary_column
from headwater.transfer import json_lines
from headwater.transfer.change_lines import AS_JSON, judge_values
from headwater.transfer.set_frames import JSON_FLAGS
from headwater.transfer.tables import JSON_TEXT, joined, quoted

_Marks = NDArray[np.bool_]
_Numbers = NDArray[np.int64]

_DOCUMENT_OPS = ("mutation", "deletion", "expiration")
_VOIDING_OPS = ("rollback", "collection_created", "collection_dropped")
_NO_SNAPSHOT = np.uint64(2**64 - 1)
_LATER = ["identity", "vbucket", "seqno", "collection_id", "position"]
_KEPT = ("vbucket", "seqno", "collection_id", "key", "value", "datatype", "flags", "expiry")
POSITION = "position"


class DocumentSpool:
    """Stores batches, and returns the live documents of each collection. The caller must remove `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._survivors = Survivors()
        self._writers: dict[tuple[str, str], pa.RecordBatchFileWriter] = {}

    @property
    def rows(self) -> int:
        """The number of rows added, of all kinds."""
        return self._survivors.positions

    def add(self, batch: pa.RecordBatch) -> None:
        are_mutations, positions = self._survivors.note(batch)
        if not are_mutations.any():
            return
        for name, marks in _by_collection(batch, are_mutations):
            rows = batch.select(_KEPT).append_column(POSITION, pa.array(positions))
            try:
                self._writer(name, rows.schema).write_batch(rows if marks.all() else rows.filter(pa.array(marks)))
            except OSError as error:
                raise StoreFull(
                    f"{self._folder} can't take the documents: {error.strerror or error}",
                    hint="Export to a disk with more space: an export temporarily needs space for two copies of the "
                    "documents",
                ) from error

    def collections(self) -> list[tuple[str, str]]:
        """Return the collections that have had a document, in order, with their scopes, and stop accepting batches."""
        for writer in self._writers.values():
            writer.close()
        return sorted(self._writers)

    def documents(self, name: tuple[str, str]) -> Iterator[pa.RecordBatch]:
        """Yield the live documents of a collection, with `key`, `value`, `datatype`, `flags` and `expiry`."""
        with pa.memory_map(str(self._path(name))) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                alive = self._survivors.alive(batch, batch.column(POSITION).to_numpy())
                if alive.any():
                    yield batch if alive.all() else batch.filter(pa.array(alive))

    def _writer(self, name: tuple[str, str], schema: pa.Schema) -> pa.RecordBatchFileWriter:
        if name not in self._writers:
            self._writers[name] = pa.ipc.new_file(str(self._path(name)), schema)
        return self._writers[name]

    def _path(self, name: tuple[str, str]) -> Path:
        return self._folder / f"{name[0]}.{name[1]}.arrow"


def _by_collection(batch: pa.RecordBatch, wanted: np.ndarray) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """Yield the collections of a batch, with marks for the wanted rows in each."""
    ids = batch.column("collection_id").fill_null(0).to_numpy()
    for collection_id in np.unique(ids[wanted]):
        marks = wanted & (ids == collection_id)
        row = int(np.flatnonzero(marks)[0])
        scope, collection = (batch.column(name)[row].as_py() for name in ("scope", "collection"))
        # A dropped collection has no name, and none of its documents is live.
        if scope is not None and collection is not None:
            yield (scope, collection), marks


# --- which rows of a read still hold at its end -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Void:
    """Voids earlier rows of a vbucket: the rows before a position that are of one collection, or above a seqno."""

    before: int
    vbucket: int
    seqno: int
    collection_id: int | None


@dataclass(slots=True)
class Survivors:
    """Takes all batches in order by `note`; after the last, `alive` reports which rows are live. Rows are numbered.

    Inside a snapshot, a key occurs once. So only three later rows can void a row: a row of the same key in a later
    snapshot of its vbucket, a rollback of the vbucket, or an event that dropped or recreated its collection. Only
    those are kept in memory; a bucket without writes has a single snapshot per vbucket, and none of them.
    """

    positions: int = 0
    """The number of rows noted, which is the next position."""
    _voids: list[_Void] = field(default_factory=list)
    _later: list[pa.Table] = field(default_factory=list)
    _first_start: NDArray[np.uint64] = field(default_factory=lambda: np.full(VBUCKETS_MAX, _NO_SNAPSHOT))
    _first_end: NDArray[np.uint64] = field(default_factory=lambda: np.full(VBUCKETS_MAX, _NO_SNAPSHOT))
    _superseded: tuple[pa.Array, _Numbers] | None = None
    _has_later: _Marks = field(default_factory=lambda: np.zeros(VBUCKETS_MAX, dtype=np.bool_))

    def note(self, batch: pa.RecordBatch) -> tuple[_Marks, _Numbers]:
        """Note a batch. Returns marks for the rows that are mutations, and the positions of all rows."""
        positions = np.arange(self.positions, self.positions + batch.num_rows)
        self.positions += batch.num_rows
        ops = batch.column("op")
        is_op = {op: _is(ops, op) for op in ops.dictionary.to_pylist()}
        nowhere = np.zeros(batch.num_rows, dtype=np.bool_)
        for row in np.flatnonzero(np.logical_or.reduce([is_op.get(op, nowhere) for op in _VOIDING_OPS])):
            self._note_void(_void(batch, int(row), int(positions[row])))
        are_documents = np.logical_or.reduce([is_op.get(op, nowhere) for op in _DOCUMENT_OPS])
        self._note_later(batch, are_documents, positions)
        return is_op.get("mutation", nowhere), positions

    def _note_void(self, void: _Void) -> None:
        if void.collection_id is None:
            # A drop on the branch that the rollback abandons did not happen.
            self._voids = [
                other
                for other in self._voids
                if other.vbucket != void.vbucket or other.collection_id is None or other.seqno <= void.seqno
            ]
        self._voids.append(void)

    def _note_later(self, batch: pa.RecordBatch, are_documents: _Marks, positions: _Numbers) -> None:
        vbuckets = batch.column("vbucket").to_numpy()
        starts = batch.column("snapshot_start").to_numpy()
        ends = batch.column("snapshot_end").to_numpy()
        rows = np.flatnonzero(are_documents)
        seen, first_rows = np.unique(vbuckets[rows], return_index=True)
        new = self._first_end[seen] == _NO_SNAPSHOT
        self._first_start[seen[new]] = starts[rows[first_rows[new]]]
        self._first_end[seen[new]] = ends[rows[first_rows[new]]]
        is_later = are_documents & ((starts != self._first_start[vbuckets]) | (ends != self._first_end[vbuckets]))
        if is_later.any():
            self._has_later[vbuckets[is_later]] = True
            ids = batch.column("collection_id").fill_null(0)
            columns = [_identities(batch), batch.column("vbucket"), batch.column("seqno"), ids, pa.array(positions)]
            kept = pa.table(columns, names=_LATER)
            self._later.append(kept.filter(pa.array(is_later)))

    def alive(self, batch: pa.RecordBatch, positions: _Numbers) -> _Marks:
        """Return marks for the mutations that are live."""
        marks = ~self._void_marks(batch, positions)
        doubtful = marks & self._has_later[batch.column("vbucket").to_numpy()]
        if doubtful.any():
            keys, last = self._last_positions()
            found = pc.index_in(_identities(batch), value_set=keys)
            codes = pc.fill_null(found, -1).to_numpy()
            marks &= (codes < 0) | (last[codes] <= positions)
        return marks

    def _last_positions(self) -> tuple[pa.Array, _Numbers]:
        """Return the keys that occurred again in live rows, and the position of the last row of each."""
        if self._superseded is None:
            later = pa.concat_tables(self._later)
            holds = ~self._void_marks(later, later.column("position").to_numpy())
            last = later.filter(pa.array(holds)).group_by("identity").aggregate([("position", "max")])
            keys = last.column("identity").combine_chunks()
            self._superseded = keys, np.append(last.column("position_max").to_numpy(), -1)
        return self._superseded

    def _void_marks(self, rows: pa.RecordBatch | pa.Table, positions: _Numbers) -> _Marks:
        marks = np.zeros(rows.num_rows, dtype=np.bool_)
        if not self._voids:
            return marks
        vbuckets, seqnos, ids = (rows.column(name).to_numpy() for name in ("vbucket", "seqno", "collection_id"))
        for void in self._voids:
            hit = (positions < void.before) & (vbuckets == void.vbucket)
            if void.collection_id is None:
                hit &= seqnos > void.seqno
            else:
                hit &= ids == void.collection_id
            marks |= hit
        return marks


def _is(ops: pa.DictionaryArray, op: str) -> _Marks:
    marks: _Marks = ops.indices.to_numpy() == ops.dictionary.to_pylist().index(op)
    return marks


def _void(batch: pa.RecordBatch, row: int, position: int) -> _Void:
    vbucket, seqno, collection_id = (batch.column(name)[row].as_py() for name in ("vbucket", "seqno", "collection_id"))
    is_rollback = batch.column("op")[row].as_py() == "rollback"
    return _Void(before=position, vbucket=vbucket, seqno=seqno, collection_id=None if is_rollback else collection_id)


def _identities(batch: pa.RecordBatch) -> pa.Array:
    """Return the identity of each document: the collection's id and the key."""
    ids = batch.column("collection_id").fill_null(0).cast(pa.string()).cast(pa.binary())
    return pc.binary_join_element_wise(ids, batch.column("key").fill_null(b""), pa.scalar(b":", pa.binary()))


# --- the files --------------------------------------------------------------------------------------------------------

SUFFIXES = (".jsonl", ".csv", ".parquet")
_TEXT = pa.large_string()
_OBJECT = r"^\s*\{"
_EMPTY_OBJECT = r"^\s*\{\s*\}\s*$"
_OUR_NAMES = rf'"(?:{"|".join(map(re.escape, json_lines.MEMBERS))})"\s*:'


# --- files that appear when they are complete -------------------------------------------------------------------------


class OutputFiles:
    """A temporary folder for incomplete files, next to their destination. It is always removed at the end."""

    def __init__(self, into: Path, *, overwrite: bool) -> None:
        self.is_file = into.is_file() or (into.suffix.lower() in SUFFIXES and not into.is_dir())
        self._into = into
        self._overwrite = overwrite
        self._target = into.parent if self.is_file else into
        self._work: Path | None = None
        self._whole: list[tuple[Path, Path]] = []

    def __enter__(self) -> Self:
        if self.is_file:
            self._check(self._into)
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            self._work = Path(tempfile.mkdtemp(prefix=".headwater-export-", dir=self._target))
        except OSError as error:
            raise InvalidInput(
                f"{self._target} can't be written to: {error.strerror}", hint="Check the path and its permissions"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)

    @property
    def work(self) -> Path:
        assert self._work is not None
        return self._work

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file, called `name` in a directory. `publish` moves it to its place."""
        place = self._into if self.is_file else self._into / name
        self._check(place)
        path = self.work / f"new-{len(self._whole)}"
        try:
            with path.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreFull(
                f"{place} can't be written: {error.strerror or error}", hint="Check the disk and the space on it"
            ) from error
        self._whole.append((path, place))

    def publish(self) -> list[Path]:
        """Move all files to their places. Returns these."""
        for path, place in self._whole:
            path.replace(place)
        with contextlib.suppress(OSError):
            sync_folder(self._target)
        return [place for _, place in self._whole]

    def _check(self, place: Path) -> None:
        if place.exists() and not self._overwrite:
            raise InvalidInput(f"{place} already exists", hint="Give another file or directory, or --overwrite")


# --- documents that a format can't hold -------------------------------------------------------------------------------


@dataclass(slots=True)
class LeftOut:
    """The number of documents left out, by reason, with one key as an example for each."""

    documents: int = 0
    _reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, reason: str, keys: pa.Array) -> None:
        count, example = self._reasons.get(reason, (0, ""))
        self.documents += len(keys)
        self._reasons[reason] = count + len(keys), example or _shown(keys[0].as_py())

    def reasons(self) -> dict[str, int]:
        return {reason: count for reason, (count, _) in self._reasons.items()}

    def sentences(self) -> Iterator[str]:
        for reason, (count, example) in self._reasons.items():
            yield f"{counted(count, 'document')} left out, such as {example}: {reason}"


def _shown(key: bytes) -> str:
    return f"'{escaped_bytes(key)}'"


# --- JSON lines -------------------------------------------------------------------------------------------------------


class JsonLinesFile:
    """Writes batches of live documents to a file."""

    def __init__(self, file: BinaryIO, left_out: LeftOut, *, with_key: bool) -> None:
        self._file = file
        self._left_out = left_out
        self._with_key = with_key

    def write(self, batch: pa.RecordBatch) -> int:
        """Write a batch. Returns how many documents were written."""
        is_json = are_json(batch)
        if self._with_key:
            lines = _with_heads(_heads(batch), batch.column("value"), is_json)
        else:
            lines = _texts(self._only_json(batch, is_json).column("value"))
        self._file.write(_lines(lines))
        return len(lines)

    def end(self) -> None:
        """Do nothing: no text follows the last line."""

    def _only_json(self, batch: pa.RecordBatch, is_json: NDArray[np.bool_]) -> pa.RecordBatch:
        if is_json.all():
            return batch
        self._left_out.note("it is not JSON", batch.column("key").filter(pa.array(~is_json)))
        return batch.filter(pa.array(is_json))


def are_json(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return marks for the values that are JSON. The server's JSON bit may be wrong, so values are checked."""
    values = batch.column("value")
    content, offsets = binary_column(values)
    forms = np.empty(len(values), dtype=np.uint8)
    is_there = values.is_valid().to_numpy(zero_copy_only=False)
    judge_values(content, offsets, is_there, batch.column("datatype").to_numpy(), forms)
    marks: NDArray[np.bool_] = forms == AS_JSON
    return marks


def _heads(batch: pa.RecordBatch) -> pa.Array:
    """Return the text before each document, up to the point where its own members follow."""
    keys, are_texts = _key_texts(batch.column("key"))
    starts = _join(f'{{"{json_lines.KEY_MEMBER}":', quoted(keys))
    if not pc.all(are_texts).as_py():
        in_base64 = pa.array([_base64(key) for key in batch.column("key").to_pylist()], _TEXT)
        starts = pc.if_else(
            are_texts, starts, _join(f'{{"{json_lines.KEY_MEMBER}{json_lines.IN_BASE64}":"', in_base64, '"')
        )
    flags = _member(json_lines.FLAGS_MEMBER, batch.column("flags"), default=JSON_FLAGS)
    return _join(starts, flags, _member(json_lines.EXPIRY_MEMBER, batch.column("expiry"), default=0))


def _member(name: str, numbers: pa.Array, *, default: int) -> pa.Array:
    """Return a member for every number except the default."""
    members = _join(f',"{name}":', numbers.cast(_TEXT))
    return pc.if_else(pc.equal(numbers, default), pa.scalar("", _TEXT), members)


def _with_heads(heads: pa.Array, values: pa.Array, is_json: NDArray[np.bool_]) -> pa.Array:
    if is_json.all():
        return _json_with_heads(heads, _texts(values))
    json_marks = pa.array(is_json)
    other_marks = pa.array(~is_json)
    texts = _json_with_heads(heads.filter(json_marks), _texts(values.filter(json_marks)))
    encoded = pa.array([_base64(value or b"") for value in values.filter(other_marks).to_pylist()], _TEXT)
    others = _join(heads.filter(other_marks), f',"{json_lines.VALUE_MEMBER}{json_lines.IN_BASE64}":"', encoded, '"}')
    order = np.empty(len(heads), dtype=np.int64)
    order[np.concatenate((np.flatnonzero(is_json), np.flatnonzero(~is_json)))] = np.arange(len(heads))
    return pa.concat_arrays([texts, others]).take(pa.array(order))


def _json_with_heads(heads: pa.Array, texts: pa.Array) -> pa.Array:
    if not len(heads):
        return pa.array([], _TEXT)
    are_members = pc.and_(pc.match_substring_regex(texts, _OBJECT), pc.invert(_have_our_names(texts)))
    are_empty = pc.match_substring_regex(texts, _EMPTY_OBJECT)
    # The head is followed by the text after the object's opening brace.
    rests = pc.replace_substring_regex(texts, _OBJECT, "", max_replacements=1)
    between = pc.if_else(are_empty, pa.scalar("", _TEXT), pa.scalar(",", _TEXT))
    as_members = _join(heads, between, rests)
    if pc.all(are_members).as_py():
        return as_members
    return pc.if_else(are_members, as_members, _join(heads, f',"{json_lines.VALUE_MEMBER}":', texts, "}"))


def _have_our_names(texts: pa.Array) -> pa.Array:
    """Return marks for the objects that have a member with one of our names."""
    marks = pc.match_substring_regex(texts, _OUR_NAMES)
    if not pc.any(marks).as_py():
        return marks
    # Parse the object to be sure: the match may be inside a nested one.
    return pa.array([mark and _has_our_name(text.as_py()) for mark, text in zip(marks.to_pylist(), texts, strict=True)])


def _has_our_name(text: str) -> bool:
    document = json.loads(text, parse_int=str)  # Python refuses numbers with thousands of digits.
    return isinstance(document, dict) and not document.keys().isdisjoint(json_lines.MEMBERS)


def _key_texts(keys: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return keys as text, and marks for those that are UTF-8: a key may be any bytes."""
    texts, _ = split_texts(keys)
    return texts.cast(_TEXT), pc.is_valid(texts)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _texts(values: pa.Array) -> pa.Array:
    """Return each text on one line. A line break in JSON is never inside a string, so it may become a space."""
    texts = values.cast(_TEXT)
    if pc.any(pc.match_substring_regex(texts, "[\r\n]")).as_py():
        texts = pc.replace_substring_regex(texts, "[\r\n]", " ")
    return texts


def _join(*parts: Any) -> pa.Array:
    """Join texts by row. At least one of the parts is a column."""
    return joined(parts, 0)


def _lines(texts: pa.Array) -> memoryview:
    """Return all lines as one piece of memory."""
    return _bytes_of(_join(texts, "\n"))


def _bytes_of(texts: pa.Array) -> memoryview:
    if not len(texts):
        return memoryview(b"")
    content, edges = json_lines.text_bytes(texts)
    return content[edges[0] : edges[-1]].data


# --- columns: CSV and Parquet -----------------------------------------------------------------------------------------


_ABSENT = frozenset({JsonKind.MISSING, JsonKind.NULL})
_TYPES: tuple[tuple[frozenset[JsonKind], pa.DataType], ...] = (
    (frozenset({JsonKind.TRUE, JsonKind.FALSE}), pa.bool_()),
    (frozenset({JsonKind.INTEGER}), pa.int64()),
    (frozenset({JsonKind.INTEGER, JsonKind.REAL}), pa.float64()),
)
_NESTED = frozenset({JsonKind.OBJECT, JsonKind.ARRAY})
_STRINGS = frozenset({JsonKind.STRING, JsonKind.ESCAPED_STRING})


@dataclass(slots=True)
class ColumnScan:
    """Finds the columns for the documents of a collection by reading all of them, without an object per document.

    Whole numbers make a BIGINT, other numbers a DOUBLE, `true` and `false` a BOOLEAN, strings a STRING. If the
    values of a field are of several kinds, or are objects or arrays, its column has their JSON text.
    """

    _kinds: dict[str, set[JsonKind]] = field(default_factory=dict)
    _too_large: set[str] = field(default_factory=set)

    def note(self, documents: pa.Array) -> None:
        """Note the fields of documents, which are JSON objects as text, without nulls."""
        members = list_fields(documents)
        by_name = values_by_name(members.names, members.values, names_max=len(members.names))
        for name, values in by_name.items():
            self._kinds.setdefault(name, set()).update(map(JsonKind, np.unique(values.kinds).tolist()))
            _, fits = values.integers()
            if (values.is_one_of(JsonKind.INTEGER) & ~fits).any():
                self._too_large.add(name)

    def columns(self, *, taken: str) -> TypedColumns | None:
        """Return the columns, or None if there are no fields. `taken` is the name of a column that already exists."""
        found = [ColumnDef(name, self._type(name)) for name in self._usable(taken)]
        return TypedColumns(tuple(found)) if found else None

    def _usable(self, taken: str) -> Iterator[str]:
        seen = {taken.lower()}
        for name, kinds in self._kinds.items():
            if is_column_name(name) and name.lower() not in seen and kinds - _ABSENT and len(seen) <= COLUMNS_MAX:
                seen.add(name.lower())
                yield name

    def without_column(self, *, taken: str) -> list[str]:
        """Return the fields without a column: for their name, one that differs only in case, or the limit."""
        usable = set(self._usable(taken))
        return [name for name, kinds in self._kinds.items() if kinds - _ABSENT and name not in usable]

    def texts(self) -> list[str]:
        """Return the fields whose column has JSON text because of their values."""
        return [
            name
            for name, kinds in self._kinds.items()
            if self._type(name) == pa.string() and not kinds - _ABSENT <= _STRINGS
        ]

    def nested(self) -> list[str]:
        """Return the fields whose column has JSON text in every row. In a mixed column, "1" and 1 look the same."""
        return [name for name, kinds in self._kinds.items() if _ABSENT < kinds | _ABSENT <= _NESTED | _ABSENT]

    def _type(self, name: str) -> pa.DataType:
        kinds = self._kinds[name] - _ABSENT
        if name in self._too_large:
            return pa.string()
        return next((type_ for these, type_ in _TYPES if kinds <= these), pa.string())


def scan_columns(batches: Iterable[pa.RecordBatch]) -> ColumnScan:
    """Scan all documents for the columns they need."""
    found = ColumnScan()
    for batch in batches:
        good = pa.array(are_json(batch))
        texts = batch.column("value").filter(good).cast(_TEXT)
        texts = texts.filter(pc.match_substring_regex(texts, _OBJECT))
        if len(texts):
            found.note(texts)
    return found


class TableFile:
    """Writes batches of live documents to a CSV or a Parquet file."""

    def __init__(
        self,
        file: BinaryIO,
        left_out: LeftOut,
        columns: TypedColumns | None,
        *,
        nested: Collection[str],
        with_key: bool,
        is_parquet: bool,
    ) -> None:
        """`nested` are columns of JSON text, which a Parquet file marks as such."""
        self._left_out = left_out
        self._columns = columns
        self._with_key = with_key
        fields = [pa.field(json_lines.KEY_MEMBER, pa.string(), nullable=False)] if with_key else []
        for column in columns.schema if columns is not None else ():
            fields.append(column.with_metadata(JSON_TEXT) if column.name in nested else column)
        self._schema = pa.schema(fields)
        self._writer: Any = (
            pq.ParquetWriter(file, self._schema, compression="zstd")
            if is_parquet
            else pa_csv.CSVWriter(file, self._schema)
        )

    def write(self, batch: pa.RecordBatch) -> int:
        """Write a batch. Returns how many documents were written."""
        if self._with_key:
            _, are_texts = _key_texts(batch.column("key"))
            batch = self._only(batch, are_texts, "the key is not UTF-8")
        batch = self._only(batch, pa.array(are_json(batch)), "it is not JSON")
        texts = batch.column("value").cast(pa.string())
        is_object = pc.match_substring_regex(texts, _OBJECT)
        batch, texts = self._only(batch, is_object, "it is JSON, but no object"), texts.filter(is_object)
        columns: dict[str, Any] = {}
        if self._columns is not None:
            parsed = self._columns.parse(texts)
            columns = dict(parsed.columns)
            self._note_misfits(batch, parsed.misfits)
            marks = np.ones(batch.num_rows, dtype=np.bool_)
            marks[parsed.misfits.rows] = False
            fits = pa.array(marks)
            batch = batch.filter(fits)
            columns = {name: column.filter(fits) for name, column in columns.items()}
        if self._with_key:
            columns[json_lines.KEY_MEMBER] = batch.column("key").cast(pa.string())
        table = pa.table([columns[name] for name in self._schema.names], schema=self._schema)
        self._writer.write_table(table)
        return int(batch.num_rows)

    def end(self) -> None:
        self._writer.close()

    def _only(self, batch: pa.RecordBatch, good: pa.Array, reason: str) -> pa.RecordBatch:
        if pc.all(good).as_py() is not False:
            return batch
        self._left_out.note(reason, batch.column("key").filter(pc.invert(good)))
        return batch.filter(good)

    def _note_misfits(self, batch: pa.RecordBatch, misfits: Misfits) -> None:
        """Count each document once, by the first of its values that does not fit."""
        rows, firsts = np.unique(misfits.rows, return_index=True)
        reasons = misfits.reasons.take(pa.array(firsts))
        for reason in pc.unique(reasons).to_pylist():
            chosen = pa.array(rows).filter(pc.equal(reasons, reason))
            self._left_out.note(reason, batch.column("key").take(chosen))
