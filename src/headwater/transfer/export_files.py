"""What `headwater export` writes: live documents as JSON lines, CSV or Parquet, in files that appear once whole.

Texts are put together as columns, with no Python object per document. A line has the form that `json_lines` describes,
which `headwater load` reads again; without keys it is the document itself. What a format can't hold is left out,
counted by reason, and never lost in silence. `cli.export` reads the bucket into a `spool`, and writes its documents
with this.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pj
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.durable_files import sync_folder
from headwater.errors import InvalidInput, StoreFull
from headwater.lake.column_ddl import COLUMNS_MAX, ColumnDef, is_column_name
from headwater.lake.json_fields import JsonKind, find_fields, integers
from headwater.lake.layout import split_texts
from headwater.lake.typed_columns import Misfits, TypedColumns
from headwater.phrases import counted, escaped_bytes
from headwater.protocol.kernels.decode import binary_column
from headwater.transfer.change_lines import AS_JSON, judge_values
from headwater.transfer.json_lines import EXPIRY_MEMBER, FLAGS_MEMBER, IN_BASE64, KEY_MEMBER, MEMBERS, VALUE_MEMBER
from headwater.transfer.set_frames import JSON_FLAGS
from headwater.transfer.table_json import JSON_TEXT, joined, quoted, text_bytes

SUFFIXES = (".jsonl", ".csv", ".parquet")
_TEXT = pa.large_string()
_OBJECT = r"^\s*\{"
_EMPTY_OBJECT = r"^\s*\{\s*\}\s*$"
_OUR_NAMES = rf'"(?:{"|".join(map(re.escape, MEMBERS))})"\s*:'


# --- files that appear when they are whole ----------------------------------------------------------------------------


class OutputFiles:
    """A folder for what is being written, next to where it belongs. It is gone in the end, whatever happens."""

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
                f"{self._target} can't be written to: {error.strerror}", hint="Check the path and the rights"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)

    @property
    def work(self) -> Path:
        assert self._work is not None
        return self._work

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A new file, called `name` in a directory. It is at its place after `publish`."""
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
        """Put all files where they belong."""
        for path, place in self._whole:
            path.replace(place)
        with contextlib.suppress(OSError):
            sync_folder(self._target)
        return [place for _, place in self._whole]

    def _check(self, place: Path) -> None:
        if place.exists() and not self._overwrite:
            raise InvalidInput(f"{place} is there already", hint="Give another place, or --overwrite")


# --- what a format can't hold -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class LeftOut:
    """Counts by reason, with one key for each."""

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
        """Returns how many documents were put in."""
        is_json = are_json(batch)
        if self._with_key:
            lines = _with_heads(_heads(batch), batch.column("value"), is_json)
        else:
            lines = _texts(self._only_json(batch, is_json).column("value"))
        self._file.write(_lines(lines))
        return len(lines)

    def end(self) -> None:
        """Nothing stands behind the last line."""

    def _only_json(self, batch: pa.RecordBatch, is_json: NDArray[np.bool_]) -> pa.RecordBatch:
        if is_json.all():
            return batch
        self._left_out.note("it is not JSON", batch.column("key").filter(pa.array(~is_json)))
        return batch.filter(pa.array(is_json))


def are_json(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Which values are JSON. A server that calls a value so may err."""
    values = batch.column("value")
    content, offsets = binary_column(values)
    forms = np.empty(len(values), dtype=np.uint8)
    is_there = values.is_valid().to_numpy(zero_copy_only=False)
    judge_values(content, offsets, is_there, batch.column("datatype").to_numpy(), forms)
    marks: NDArray[np.bool_] = forms == AS_JSON
    return marks


def _heads(batch: pa.RecordBatch) -> pa.Array:
    """What stands before the documents, up to where their members go on."""
    keys, are_texts = _key_texts(batch.column("key"))
    starts = _join(f'{{"{KEY_MEMBER}":', quoted(keys))
    if not pc.all(are_texts).as_py():
        in_base64 = pa.array([_base64(key) for key in batch.column("key").to_pylist()], _TEXT)
        starts = pc.if_else(are_texts, starts, _join(f'{{"{KEY_MEMBER}{IN_BASE64}":"', in_base64, '"'))
    flags = _member(FLAGS_MEMBER, batch.column("flags"), default=JSON_FLAGS)
    return _join(starts, flags, _member(EXPIRY_MEMBER, batch.column("expiry"), default=0))


def _member(name: str, numbers: pa.Array, *, default: int) -> pa.Array:
    """A member for every number but the default."""
    members = _join(f',"{name}":', numbers.cast(_TEXT))
    return pc.if_else(pc.equal(numbers, default), pa.scalar("", _TEXT), members)


def _with_heads(heads: pa.Array, values: pa.Array, is_json: NDArray[np.bool_]) -> pa.Array:
    if is_json.all():
        return _json_with_heads(heads, _texts(values))
    json_marks = pa.array(is_json)
    other_marks = pa.array(~is_json)
    texts = _json_with_heads(heads.filter(json_marks), _texts(values.filter(json_marks)))
    encoded = pa.array([_base64(value or b"") for value in values.filter(other_marks).to_pylist()], _TEXT)
    others = _join(heads.filter(other_marks), f',"{VALUE_MEMBER}{IN_BASE64}":"', encoded, '"}')
    order = np.empty(len(heads), dtype=np.int64)
    order[np.concatenate((np.flatnonzero(is_json), np.flatnonzero(~is_json)))] = np.arange(len(heads))
    return pa.concat_arrays([texts, others]).take(pa.array(order))


def _json_with_heads(heads: pa.Array, texts: pa.Array) -> pa.Array:
    if not len(heads):
        return pa.array([], _TEXT)
    are_members = pc.and_(pc.match_substring_regex(texts, _OBJECT), pc.invert(_have_our_names(texts)))
    are_empty = pc.match_substring_regex(texts, _EMPTY_OBJECT)
    # Behind the head comes what is behind the brace of the object.
    rests = pc.replace_substring_regex(texts, _OBJECT, "", max_replacements=1)
    between = pc.if_else(are_empty, pa.scalar("", _TEXT), pa.scalar(",", _TEXT))
    as_members = _join(heads, between, rests)
    if pc.all(are_members).as_py():
        return as_members
    return pc.if_else(are_members, as_members, _join(heads, f',"{VALUE_MEMBER}":', texts, "}"))


def _have_our_names(texts: pa.Array) -> pa.Array:
    """Which objects have a member that is called like one of ours."""
    marks = pc.match_substring_regex(texts, _OUR_NAMES)
    if not pc.any(marks).as_py():
        return marks
    # A look at all of it: the name may stand deep inside.
    return pa.array([mark and _has_our_name(text.as_py()) for mark, text in zip(marks.to_pylist(), texts, strict=True)])


def _has_our_name(text: str) -> bool:
    document = json.loads(text, parse_int=str)  # as Python reads no number of thousands of digits
    return isinstance(document, dict) and not document.keys().isdisjoint(MEMBERS)


def _key_texts(keys: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Keys as text, and which of them are: a key may be any bytes."""
    texts, _ = split_texts(keys)
    return texts.cast(_TEXT), pc.is_valid(texts)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _texts(values: pa.Array) -> pa.Array:
    """Texts on one line each. A line end can't be inside a string of JSON, so it may become a space."""
    texts = values.cast(_TEXT)
    if pc.any(pc.match_substring_regex(texts, "[\r\n]")).as_py():
        texts = pc.replace_substring_regex(texts, "[\r\n]", " ")
    return texts


def _join(*parts: Any) -> pa.Array:
    """At least one of the parts is a column."""
    return joined(parts, 0)


def _lines(texts: pa.Array) -> memoryview:
    """One behind the other, as they lie in memory."""
    return _bytes_of(_join(texts, "\n"))


def _bytes_of(texts: pa.Array) -> memoryview:
    if not len(texts):
        return memoryview(b"")
    content, edges = text_bytes(texts)
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
    """Which columns the documents of a collection make: a look at all of them, with no object per document.

    Whole numbers make a BIGINT, numbers a DOUBLE, `true` and `false` a BOOLEAN, strings a STRING. Where a field is of
    several kinds, or is an object or an array, its column has its JSON text.
    """

    _kinds: dict[str, set[JsonKind]] = field(default_factory=dict)
    _too_large: set[str] = field(default_factory=set)

    def note(self, documents: pa.Array) -> None:
        """`documents` are JSON, as text without nulls."""
        for name in _names(documents):
            self._kinds.setdefault(name, set())
        names = list(self._kinds)
        found = find_fields(documents, names)
        for number, name in enumerate(names):
            self._kinds[name].update(JsonKind(int(kind)) for kind in np.unique(found.kinds[number]))
            if JsonKind.INTEGER in self._kinds[name]:
                wanted = found.kinds[number] == JsonKind.INTEGER
                _, good = integers(found.data, found.starts[number], found.ends[number], wanted)
                if (wanted & ~good).any():
                    self._too_large.add(name)

    def columns(self, *, taken: str) -> TypedColumns | None:
        """None where there are no fields. `taken` is the name of a column that is there already."""
        found = [ColumnDef(name, self._type(name)) for name in self._usable(taken)]
        return TypedColumns(tuple(found)) if found else None

    def _usable(self, taken: str) -> Iterator[str]:
        seen = {taken.lower()}
        for name, kinds in self._kinds.items():
            if is_column_name(name) and name.lower() not in seen and kinds - _ABSENT and len(seen) <= COLUMNS_MAX:
                seen.add(name.lower())
                yield name

    def without_column(self, *, taken: str) -> list[str]:
        """Fields that no column can be made for: by their names, or because of another that differs in case only."""
        usable = set(self._usable(taken))
        return [name for name, kinds in self._kinds.items() if kinds - _ABSENT and name not in usable]

    def texts(self) -> list[str]:
        """Fields whose column has JSON text, because of what they hold."""
        return [
            name
            for name, kinds in self._kinds.items()
            if self._type(name) == pa.string() and not kinds - _ABSENT <= _STRINGS
        ]

    def nested(self) -> list[str]:
        """Fields whose column has JSON text in every row. In one of several kinds "1" and 1 look the same."""
        return [name for name, kinds in self._kinds.items() if _ABSENT < kinds | _ABSENT <= _NESTED | _ABSENT]

    def _type(self, name: str) -> pa.DataType:
        kinds = self._kinds[name] - _ABSENT
        if name in self._too_large:
            return pa.string()
        return next((type_ for these, type_ in _TYPES if kinds <= these), pa.string())


def scan_columns(batches: Iterable[pa.RecordBatch]) -> ColumnScan:
    """Look at all documents for the columns they make."""
    found = ColumnScan()
    for batch in batches:
        good = pa.array(are_json(batch))
        texts = batch.column("value").filter(good).cast(_TEXT)
        texts = texts.filter(pc.match_substring_regex(texts, r"^\s*\{"))
        if len(texts):
            found.note(texts)
    return found


def _names(documents: pa.Array) -> list[str]:
    """The names of all fields. Arrow's reader finds them, unless a field is of several kinds."""
    lines = pc.binary_join_element_wise(
        pc.replace_substring_regex(documents, "[\r\n]", " "),
        pa.scalar("\n", documents.type),
        pa.scalar("", documents.type),
    )
    text = bytes(_bytes_of(lines.cast(_TEXT)))
    try:
        table = pj.read_json(io.BytesIO(text), pj.ReadOptions(use_threads=False, block_size=len(text) + 1))
        return list(table.schema.names)
    except pa.ArrowInvalid:
        return list(dict.fromkeys(name for line in documents.to_pylist() for name in _names_in(line)))


def _names_in(line: str) -> list[str]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return list(document) if isinstance(document, dict) else []


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
        fields = [pa.field(KEY_MEMBER, pa.string(), nullable=False)] if with_key else []
        for column in columns.schema if columns is not None else ():
            fields.append(column.with_metadata(JSON_TEXT) if column.name in nested else column)
        self._schema = pa.schema(fields)
        self._writer: Any = (
            pq.ParquetWriter(file, self._schema, compression="zstd")
            if is_parquet
            else pa_csv.CSVWriter(file, self._schema)
        )

    def write(self, batch: pa.RecordBatch) -> int:
        """Returns how many documents were put in."""
        if self._with_key:
            _, are_texts = _key_texts(batch.column("key"))
            batch = self._only(batch, are_texts, "the key is not UTF-8")
        batch = self._only(batch, pa.array(are_json(batch)), "it is not JSON")
        texts = batch.column("value").cast(pa.string())
        is_object = pc.match_substring_regex(texts, r"^\s*\{")
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
            columns[KEY_MEMBER] = batch.column("key").cast(pa.string())
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
        """Of several values of a document that do not fit, the first counts."""
        rows, firsts = np.unique(misfits.rows, return_index=True)
        reasons = misfits.reasons.take(pa.array(firsts))
        for reason in pc.unique(reasons).to_pylist():
            chosen = pa.array(rows).filter(pc.equal(reasons, reason))
            self._left_out.note(reason, batch.column("key").take(chosen))
