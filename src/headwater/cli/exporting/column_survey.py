"""Which columns the documents of a collection make: a look at all of them, with no object per document.

Whole numbers make a BIGINT, numbers a DOUBLE, `true` and `false` a BOOLEAN, strings a STRING. Where a field is of
several kinds, or is an object or an array, its column has its JSON text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from headwater.spark.lake.column_ddl import COLUMNS_MAX, ColumnDef, is_column_name, to_ddl
from headwater.spark.lake.json_fields import Kind, find_fields, integers
from headwater.spark.lake.typed_columns import TypedColumns

_ABSENT = frozenset({Kind.MISSING, Kind.NULL})
_TYPES: tuple[tuple[frozenset[Kind], pa.DataType], ...] = (
    (frozenset({Kind.TRUE, Kind.FALSE}), pa.bool_()),
    (frozenset({Kind.INTEGER}), pa.int64()),
    (frozenset({Kind.INTEGER, Kind.REAL}), pa.float64()),
)
_NESTED = frozenset({Kind.OBJECT, Kind.ARRAY})
_STRINGS = frozenset({Kind.STRING, Kind.ESCAPED_STRING})


@dataclass(slots=True)
class ColumnSurvey:
    """Told of all documents by `note`."""

    _kinds: dict[str, set[Kind]] = field(default_factory=dict)
    _too_large: set[str] = field(default_factory=set)

    def note(self, documents: pa.Array) -> None:
        """`documents` are JSON, as text without nulls."""
        for name in _names(documents):
            self._kinds.setdefault(name, set())
        names = list(self._kinds)
        found = find_fields(documents, names)
        for number, name in enumerate(names):
            self._kinds[name].update(Kind(int(kind)) for kind in np.unique(found.kinds[number]))
            if Kind.INTEGER in self._kinds[name]:
                wanted = found.kinds[number] == Kind.INTEGER
                _, good = integers(found.data, found.starts[number], found.ends[number], wanted)
                if (wanted & ~good).any():
                    self._too_large.add(name)

    def columns(self, *, taken: str) -> TypedColumns | None:
        """None where there are no fields. `taken` is the name of a column that is there already."""
        found = [ColumnDef(name, self._type(name)) for name in self._usable(taken)]
        return TypedColumns(to_ddl(found)) if found else None

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
        """Fields whose column has JSON text in every row. Of those of several kinds one can't tell "1" from 1."""
        return [name for name, kinds in self._kinds.items() if _ABSENT < kinds | _ABSENT <= _NESTED | _ABSENT]

    def _type(self, name: str) -> pa.DataType:
        kinds = self._kinds[name] - _ABSENT
        if name in self._too_large:
            return pa.string()
        return next((type_ for these, type_ in _TYPES if kinds <= these), pa.string())


def _names(documents: pa.Array) -> list[str]:
    """The names of all fields. Arrow's reader finds them, unless a field is of several kinds."""
    lines = pc.binary_join_element_wise(
        pc.replace_substring_regex(documents, "[\r\n]", " "),
        pa.scalar("\n", documents.type),
        pa.scalar("", documents.type),
    )
    text = "".join(lines.to_pylist()).encode() if len(lines) < 2 else _joined_bytes(lines)
    try:
        table = pj.read_json(io.BytesIO(text), pj.ReadOptions(use_threads=False, block_size=len(text) + 1))
        return list(table.schema.names)
    except pa.ArrowInvalid:
        return list(dict.fromkeys(name for line in documents.to_pylist() for name in _names_in(line)))


def _joined_bytes(lines: pa.Array) -> bytes:
    values = lines.cast(pa.large_string())
    _, offsets, data = values.buffers()
    places = np.frombuffer(offsets, dtype=np.int64)[values.offset : values.offset + len(values) + 1]
    return bytes(memoryview(data)[int(places[0]) : int(places[-1])])


def _names_in(line: str) -> list[str]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return list(document) if isinstance(document, dict) else []
