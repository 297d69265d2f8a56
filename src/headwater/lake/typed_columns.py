"""Typed columns: fields of documents as columns of their table.

A field that is missing or null gives null. One that the column's type can't hold gives null as well, in that column
alone, and `rejects` has the document with the field and the reason. The document itself stays where it is.

The columns of a table are *fixed*, as a user wrote them, or *inferred* from the documents: then a new field gets a
column before any document with it is merged, so that a column never misses an earlier value. A value that an inferred
column can't hold goes into a wider column beside it, if there is one (`_WIDER_KINDS`): `n` has the integers, `n_double`
the other numbers. Delta's type widening has no step from BIGINT to DOUBLE or from DATE to TIMESTAMP, and few engines
read it at all.

A value that none of these columns can hold is a misfit, or goes to a text column beside them (`n__string`), depending
on the table's rules (`ColumnRules`). That column is tried last, whenever it was added, so whether it holds a
value depends on the value alone.

`collection_tables` keeps the columns with the table, merges parse with them and find more of them (`ColumnGrowth`), and
`verify` parses again. The same text must always give the same columns, whichever are added later: they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, reduce
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidColumns
from headwater.lake.column_rules import RESERVED, ColumnRules
from headwater.lake.column_values import (
    BOOLEANS,
    NUMBERS,
    STRINGS,
    TIMESTAMP,
    ColumnDef,
    infer_type,
    is_column_name,
    joined_type,
    leaves,
    parse_columns,
    read_values,
    settled_type,
    to_ddl,
    type_name,
    values_by_name,
)
from headwater.lake.json_fields import (
    ABSENT,
    Form,
    JsonFields,
    JsonKind,
    JsonValues,
    Marks,
    Numbers,
    find_fields,
    list_fields,
)
from headwater.lake.layout import (
    DOCUMENT_RANGES,
    EVERY_COLLECTION,
    FEED_COLUMNS,
    has_bounds,
)

INFERRED_MAX = 256
"""The maximum of inferred columns. Further fields stay in `document`."""
LEAVES_MAX = 1000
"""The maximum of columns in the table's Parquet files. A nested field that would exceed it becomes JSON text."""
BESIDE_MAX = 64
"""How many of the inferred columns may be for values of another type."""
FieldTypes = Mapping[str, pa.DataType]
"""By field. The field's name followed by `_BESIDE` stands for its values of another type."""
_BESIDE = "\0"
"""No column has this character in its name."""
_KEY = "key"
_KIND_NAMES = {
    **dict.fromkeys(ABSENT, "nothing"),
    **dict.fromkeys(BOOLEANS, "a boolean"),
    **dict.fromkeys(NUMBERS, "a number"),
    **dict.fromkeys(STRINGS, "a string"),
    JsonKind.OBJECT: "an object",
    JsonKind.ARRAY: "an array",
}
_ROWS_A_TIME = 64 * 1024
_FIRST_ROWS = 512
_PASSED_MAX = 256
"""How many fields without a column are remembered by name while others are searched for."""
_SAMPLE_ROWS = 2048


class ColumnMode(StrEnum):
    """Where the typed columns of a table come from, if they are not fixed."""

    INFER = "infer"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Misfits:
    """What does not fit the columns, in the order of the documents: one value each, or a whole document."""

    rows: Numbers
    """The numbers of the documents."""
    fields: pa.Array
    """The fields of the values; null for a whole document."""
    reasons: pa.Array

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def joined(cls, parts: Sequence[Misfits], starts: Iterable[int]) -> Misfits:
        """Join the misfits of parts of the documents, given the number of each part's first document."""
        moved = [part.rows + start for part, start in zip(parts, starts, strict=True)]
        return cls(
            np.concatenate([np.zeros(0, dtype=np.int64), *moved]),
            pa.concat_arrays([pa.array([], pa.string()), *(part.fields for part in parts)]),
            pa.concat_arrays([pa.array([], pa.string()), *(part.reasons for part in parts)]),
        )


@dataclass(frozen=True, slots=True)
class Parsed:
    """Documents in columns."""

    columns: dict[str, pa.ChunkedArray]
    """Plain arrays for a part of the documents."""
    misfits: Misfits
    wanted: FieldTypes
    """Fields that need a new column, or a column of another type. Empty unless asked for."""


@dataclass(frozen=True)
class TypedColumns:
    """The typed columns of a table."""

    definitions: tuple[ColumnDef, ...] = ()
    """Several of them may belong to one field: a value goes into the first that can hold it."""
    is_inferred: bool = False
    is_whole_row: bool = False
    """Whether a misfit nulls all columns of its row, as in tables of earlier versions."""
    rules: ColumnRules = ColumnRules()
    """The rules for inferred columns."""
    unused: tuple[ColumnDef, ...] = ()
    """Columns of the table that the rules no longer fill. They are null."""

    @classmethod
    def from_ddl(cls, ddl: str) -> TypedColumns:
        """Parse fixed columns.

        Args:
            ddl: The columns as SQL writes them, such as `name STRING, age INT NOT NULL`.

        Raises:
            InvalidColumns: The text can't be parsed, or a column has a name that the tables use themselves.
        """
        columns = parse_columns(ddl)
        for column in columns:
            if column.name.lower() in RESERVED:
                raise InvalidColumns(
                    f"the table already has a column {column.name!r} of its own",
                    hint="Omit this column, and read the field from `document` with get_json_object",
                )
        return cls(tuple(columns))

    @cached_property
    def ddl(self) -> str:
        """The columns as SQL writes them."""
        return to_ddl(self.definitions)

    @cached_property
    def schema(self) -> pa.Schema:
        # Required columns are nullable, too: they are null if a document does not fit.
        return pa.schema([pa.field(column.name, column.type) for column in self.definitions])

    @property
    def whole_schema(self) -> pa.Schema:
        """The schema with unused columns. Rows are written with them: a change feed must show when they become null."""
        return pa.schema([*self.schema, *(pa.field(column.name, column.type) for column in self.unused)])

    @cached_property
    def by_field(self) -> dict[str, list[ColumnDef]]:
        found: dict[str, list[ColumnDef]] = {}
        for column in self.definitions:
            found.setdefault(column.field, []).append(column)
        return found

    # --- parsing ------------------------------------------------------------------------------------------------------

    def parse(
        self,
        documents: pa.Array | pa.ChunkedArray,
        *,
        discovers: bool = False,
        unsettled: FieldTypes = MappingProxyType({}),
    ) -> Parsed:
        """Parse the columns of documents; null stands for a document that is not JSON.

        With `discovers`, also look for fields that need more columns. `unsettled` are fields whose column no table has
        yet, with the type of their values so far: they need another column if theirs can't hold all values.
        """
        starts = range(0, len(documents), _ROWS_A_TIME)
        parts = [
            self._parse_part(documents.slice(start, _ROWS_A_TIME), unsettled if discovers else None) for start in starts
        ]
        return Parsed(
            {
                column.name: pa.chunked_array([part.columns[column.name] for part in parts], column.type)
                for column in self.definitions
            },
            Misfits.joined([part.misfits for part in parts], starts),
            reduce(joined_fields, (part.wanted for part in parts), {}),
        )

    def _parse_part(self, documents: pa.Array | pa.ChunkedArray, unsettled: FieldTypes | None) -> Parsed:
        if isinstance(documents, pa.ChunkedArray):
            # Arrow would copy even a single chunk.
            documents = documents.chunk(0) if documents.num_chunks == 1 else documents.combine_chunks()
        is_json = np.asarray(documents.is_valid())
        texts = documents.fill_null("")
        fields = find_fields(texts, [*self.by_field])
        if (fields.forms != Form.OBJECT).any():
            fields.kinds[:, fields.forms != Form.OBJECT] = JsonKind.MISSING
        misfits = _FoundMisfits()
        misfits.add((fields.forms == Form.MALFORMED) & is_json, "it is called JSON, but can't be read as such")
        if not self.is_inferred:
            # Documents without fields miss nothing in inferred columns.
            misfits.add(fields.forms == Form.OTHER_JSON, "it is JSON, but no object")
            misfits.add(~is_json, "it is not JSON")
        arrays: dict[str, pa.Array] = {}
        wanted = {} if unsettled is None else self._new_fields(texts, fields)
        for number, (field, columns) in enumerate(self.by_field.items()):
            values = fields.values(number)
            left = _read_field(values, columns, arrays, has_beside=self.rules.has_columns_beside)
            if unsettled is not None:
                type_ = self._wanted_type(field, values, left, unsettled.get(field))
                if type_ is not None:
                    wanted[field] = type_
                if field not in unsettled and self._wants_beside(field, left, is_wider=type_ is not None):
                    wanted[f"{field}{_BESIDE}"] = pa.string()
            says = ", and there is no room for a column beside it" if self.rules.has_columns_beside else ""
            misfits.add_values(columns[0], left, says)
            if columns[0].is_required:
                says = f"column {columns[0].name}: it must not be missing or null"
                misfits.add(~values.is_there & (fields.forms == Form.OBJECT), says, field=field)
        found = misfits.found(first_only=self.is_whole_row)
        if self.is_whole_row:
            fits = np.ones(len(documents), dtype=np.bool_)
            fits[found.rows] = False
            for name, values in arrays.items():
                arrays[name] = pc.if_else(pa.array(fits), values, pa.scalar(None, values.type))
        return Parsed(arrays, found, wanted)

    # --- new columns --------------------------------------------------------------------------------------------------

    def _new_fields(self, texts: pa.Array, fields: JsonFields) -> dict[str, pa.DataType]:
        """Find fields that have a value, but no column.

        Documents are alike: the first of them contain nearly all names, and searching for names is quicker than listing
        them.
        """
        found: dict[str, pa.DataType] = {}
        passed: set[str] = set()

        def is_wanted(name: str) -> bool:
            if name in self.by_field or name in found:
                return False
            if self._may_have(name):
                return True
            if len(passed) < _PASSED_MAX:
                passed.add(name)
            return False

        room = INFERRED_MAX - len(self.definitions)
        others, rows = np.where(fields.forms == Form.OBJECT, fields.others, 0), _FIRST_ROWS
        while room > len(found) and (has_others := others > 0).any():
            texts = texts.filter(pa.array(has_others))
            members = list_fields(texts.slice(0, rows))
            is_there = members.values.is_there
            listed = values_by_name(
                members.names.of(is_there),
                members.values.of(is_there),
                names_max=room - len(found),
                wanted=is_wanted,
            )
            if not listed:
                # None of these has a field that may get a column, so neither have others with the same fields.
                texts, rows = texts.slice(rows), rows * 8
                others = find_fields(texts, [*passed.union(self.by_field, found)]).others
                continue
            looked_for = [*passed.union(self.by_field, found), *listed]
            fields = find_fields(texts, looked_for)
            for number, name in enumerate(listed, len(looked_for) - len(listed)):
                found[name] = infer_type(fields.values(number))
            others = fields.others
        return found

    def _may_have(self, field: str) -> bool:
        """Whether a field without a column may get one: engines ignore case."""
        name = None if field in self.by_field else self.rules.column_of(field)
        return name is not None and is_column_name(name) and name.lower() not in self._taken

    @cached_property
    def _taken(self) -> set[str]:
        there = (*self.definitions, *self.unused)
        return {*RESERVED, *FEED_COLUMNS, *(column.name.lower() for column in there)}

    @property
    def _leaves(self) -> int:
        return sum(leaves(column.type) for column in (*self.definitions, *self.unused))

    def _wanted_type(
        self, field: str, values: JsonValues, left: JsonValues, unsettled: pa.DataType | None
    ) -> pa.DataType | None:
        """Return the type of another column that a field needs, or of one to replace its unsettled one."""
        is_left = bool(left.is_there.any())
        if unsettled is None:
            return self._wider(field, left) if is_left else None
        # A nested value fits even if it has members that its column lacks.
        if not is_left and not pa.types.is_nested(unsettled):
            return None
        joined = joined_type(unsettled, infer_type(values))
        return None if joined == unsettled else joined

    def _wider(self, field: str, left: JsonValues) -> pa.DataType | None:
        """Return the type of a wider column for values that a field's columns can't hold; None if there is none."""
        columns = self.by_field[field]
        kinds = _wider_kinds(columns[0])
        values = left.of(left.is_one_of(*kinds))
        type_ = pa.float64() if kinds == NUMBERS else pa.string()
        if kinds == NUMBERS:
            values = values.of(read_values(values, type_)[1])
        if not len(values) or len(self.definitions) >= INFERRED_MAX:
            return None
        if kinds == STRINGS and infer_type(values) == TIMESTAMP:
            type_ = TIMESTAMP
        is_new = type_ not in [column.type for column in columns if not column.is_beside]
        return type_ if is_new and is_column_name(self._wider_name(field, type_)) else None

    def _wants_beside(self, field: str, left: JsonValues, *, is_wider: bool) -> bool:
        """Whether a field needs a column for values of another type. Values for a wider column wait for that one."""
        others = left.is_there & ~left.is_one_of(*_wider_kinds(self.by_field[field][0])) if is_wider else left.is_there
        return bool(others.any()) and self._beside(field) is not None

    def _beside(self, field: str) -> ColumnDef | None:
        """Return a column for values of another type, if the field may have one and has none."""
        columns = self.by_field.get(field, [])
        count = sum(column.is_beside for column in self.definitions)
        is_full = len(self.definitions) >= INFERRED_MAX or count >= BESIDE_MAX
        if not self.rules.has_columns_beside or not columns or is_full or any(it.is_beside for it in columns):
            return None
        name = self._free_name(f"{columns[0].name}__{type_name(pa.string()).lower()}")
        return ColumnDef(name, pa.string(), field=field, is_beside=True) if is_column_name(name) else None

    def _wider_name(self, field: str, type_: pa.DataType) -> str:
        """Return the name of a wider column, such as `n_double`."""
        first = self.by_field[field][0]
        return self._free_name(f"{first.name}_{'json' if pa.types.is_nested(first.type) else type_name(type_).lower()}")

    def _free_name(self, name: str) -> str:
        """Return the name, with a number appended if it is taken."""
        numbered = (f"{name}_{number}" for number in range(2, INFERRED_MAX + 2))
        return next(it for it in (name, *numbered) if it.lower() not in self._taken)

    def extended(self, wanted: FieldTypes) -> TypedColumns:
        """Return these columns with those that `parse` wanted, as far as a table may have them."""
        columns = self
        for field, type_ in wanted.items():
            if field.endswith(_BESIDE):
                beside = columns._beside(field.removesuffix(_BESIDE))
                if beside is not None:
                    columns = replace(columns, definitions=(*columns.definitions, beside))
                continue
            is_new = field not in columns.by_field
            if len(columns.definitions) >= INFERRED_MAX or (is_new and not columns._may_have(field)):
                continue
            settled = settled_type(type_)
            if pa.types.is_nested(settled) and leaves(settled) + columns._leaves > LEAVES_MAX:
                settled = pa.string()
            name = columns.rules.column_of(field) or field if is_new else columns._wider_name(field, settled)
            added = ColumnDef(name, settled, field=field)
            columns = replace(columns, definitions=(*columns.definitions, added))
        return columns


class UnsettledColumns(Exception):
    """Documents need other columns than those chosen for the documents before them."""


class ColumnGrowth:
    """The columns of a table, and those that documents need in addition while they are merged.

    A sample of the first batch is parsed in advance. Documents are alike, so the columns for the sample mostly suffice
    for all, and every document is parsed once.
    """

    def __init__(self, before: TypedColumns, *, sample_rows: int = _SAMPLE_ROWS) -> None:
        self._before = before
        self._sample_rows = sample_rows
        self.columns = before
        self.found: FieldTypes = {}
        """Fields that the table needs columns for."""
        self.is_settled = False
        """Whether no more columns can be added, because rows with the current ones have been written."""

    def parse(self, documents: pa.Array | pa.ChunkedArray) -> Parsed:
        """Parse documents. Raises `UnsettledColumns` if columns can be chosen only after all documents are parsed."""
        if not self._before.is_inferred:
            return self._before.parse(documents)
        if isinstance(documents, pa.ChunkedArray) and documents.num_chunks > 1:
            # Otherwise each parse would copy them into one chunk.
            documents = pa.chunked_array([documents.combine_chunks()])
        if self.columns is self._before and not self.is_settled and len(documents) > 4 * self._sample_rows:
            sample = pa.array(np.linspace(0, len(documents) - 1, self._sample_rows, dtype=np.int64))
            self._grow(self.columns.parse(documents.take(sample), discovers=True))
        for _ in range(INFERRED_MAX + 1):
            unsettled = {name: type_ for name, type_ in self.found.items() if name not in self._before.by_field}
            parsed = self.columns.parse(documents, discovers=True, unsettled=unsettled)
            if not self._grow(parsed):
                return parsed
        raise AssertionError("each round but the last has added a column")

    def _grow(self, parsed: Parsed) -> bool:
        """Add the wanted columns. Returns whether any were added."""
        self.found = joined_fields(self.found, parsed.wanted)
        before, self.columns = self.columns, self._before.extended(self.found)
        count = len(before.definitions)
        is_more = len(self.columns.definitions) > count
        if self.columns.definitions[:count] != before.definitions or (is_more and self.is_settled):
            raise UnsettledColumns
        return is_more


ColumnChoice = TypedColumns | ColumnMode


def choose_columns(text: str) -> ColumnChoice:
    """Parse a user's choice of columns: `infer`, `none`, or the columns as SQL writes them."""
    word = text.strip().lower()
    return ColumnMode(word) if word in {*ColumnMode} else TypedColumns.from_ddl(text)


CLUSTER_COLUMNS_MAX = 4
"""The maximum of cluster columns: further ones have hardly any effect."""


def choose_cluster_columns(text: str) -> tuple[str, ...]:
    """Parse a user's cluster columns: names separated by commas. The key follows them in any case; names behind it are
    dropped."""
    names = [name.strip() for name in text.split(",")]
    names = names[: names.index(_KEY)] if _KEY in names else names
    if len(names) > CLUSTER_COLUMNS_MAX or len({*names}) < len(names) or not all(map(is_column_name, names)):
        raise InvalidColumns(
            f"documents can't be clustered by {text!r}",
            hint=f"Name one to {CLUSTER_COLUMNS_MAX} columns, each once, separated by commas: city,since",
        )
    return tuple(names)


def check_cluster_columns(table: str, names: Sequence[str], columns: ColumnChoice) -> None:
    """Raise `InvalidColumns` if a table can't be clustered by these columns. Inferred columns may appear later."""
    is_inferred = columns.is_inferred if isinstance(columns, TypedColumns) else columns is ColumnMode.INFER
    types = {it.name: it.type for it in columns.definitions} if isinstance(columns, TypedColumns) else {}
    usable = [*DOCUMENT_RANGES, *(name for name, type_ in types.items() if has_bounds(type_))]
    for name in names:
        if name not in usable and (not is_inferred or name in RESERVED):
            why = "its values have no order" if name in types or name in RESERVED else "there is no such column"
            raise InvalidColumns(
                f"{'tables' if table == EVERY_COLLECTION else table} can't be clustered by {name!r}: {why}",
                hint=f"Name a number, text, date or time: {', '.join(usable)}",
            )


def chosen_columns(choice: ColumnChoice, rules: ColumnRules) -> TypedColumns | None:
    """Return the columns that a new table starts with."""
    if isinstance(choice, TypedColumns):
        return choice
    return TypedColumns(is_inferred=True, rules=rules) if choice is ColumnMode.INFER else None


def joined_fields(one: FieldTypes, other: FieldTypes) -> FieldTypes:
    """Join what two parts of the documents want."""
    return {**one, **{name: joined_type(one.get(name, pa.null()), type_) for name, type_ in other.items()}}


_WIDER_KINDS: dict[int, tuple[JsonKind, ...]] = {
    pa.int64().id: NUMBERS,
    pa.date32().id: STRINGS,
    TIMESTAMP.id: STRINGS,
    pa.struct([]).id: (JsonKind.OBJECT,),
    pa.map_(pa.string(), pa.string()).id: (JsonKind.OBJECT,),
    pa.list_(pa.null()).id: (JsonKind.ARRAY,),
}
"""By type of an inferred column: kinds of JSON values that it may fail to hold and that get a wider column. Values of
other kinds are misfits, such as a string in a column of numbers."""


def _wider_kinds(column: ColumnDef) -> tuple[JsonKind, ...]:
    return _WIDER_KINDS.get(column.type.id, ())


def _read_field(
    values: JsonValues, columns: Sequence[ColumnDef], arrays: dict[str, pa.Array], *, has_beside: bool
) -> JsonValues:
    """Put the values of a field into its columns. Returns the values that no column took."""
    for number, column in enumerate(sorted(columns, key=lambda it: it.is_beside)):
        # A wider column takes some kinds only: earlier misfits of other kinds stay misfits.
        offered = values.where(values.is_one_of(*_wider_kinds(columns[0]))) if number else values
        if column.is_beside:
            offered = values if has_beside else values.where(np.zeros(len(values), dtype=np.bool_))
        arrays[column.name], taken = read_values(offered, column.type)
        values = values.where(~taken)
    return values


class _FoundMisfits:
    """Collects misfits."""

    def __init__(self) -> None:
        self._rows: list[Numbers] = []
        self._fields: list[str | None] = []
        self._reasons: list[str] = []

    def add(self, marks: Marks, reason: str, *, field: str | None = None) -> None:
        if marks.any():
            self._rows.append(np.flatnonzero(marks))
            self._fields.append(field)
            self._reasons.append(reason)

    def add_values(self, column: ColumnDef, left: JsonValues, says: str) -> None:
        """Add values that no column of their field took. They are reported for the field's first column, which stays
        the first whatever is added later."""
        for kind in np.unique(left.kinds[left.is_there]).tolist():
            reason = f"column {column.name}: {type_name(column.type)} can't hold {_KIND_NAMES[kind]} like this{says}"
            self.add(left.kinds == kind, reason, field=column.field)

    def found(self, *, first_only: bool) -> Misfits:
        """Return all misfits, or the first of each document."""
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *self._rows])
        numbers = np.repeat(np.arange(len(self._rows)), [len(marked) for marked in self._rows])
        order = np.argsort(rows, kind="stable")
        if first_only:
            order = order[np.unique(rows[order], return_index=True)[1]]
        chosen = pa.array(numbers[order])
        fields, reasons = (pa.array(texts, pa.string()).take(chosen) for texts in (self._fields, self._reasons))
        return Misfits(rows[order], fields, reasons)
