"""Typed columns: fields of documents as columns of their table.

A field that is missing or null gives null. One that the column's type can't hold makes the document not fit: then all
typed columns of it are null, and `rejects` has it with the reason. The document itself stays where it is.

A STRING takes any value: a string as it is, all else as its JSON text, as Spark's `from_json` does. No other type takes
what it would have to change: an INT takes 7 and neither 7.0 nor "7". A TIMESTAMP is a string as ISO 8601 writes it, in
UTC where it names no zone.

`collection_tables` keeps the definition with the table, merges parse with it, and `verify` parses again. The same text
must always give the same columns: they are compared.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from numpy.typing import NDArray

from headwater.errors import InvalidColumns
from headwater.lake.json_fields import Form, JsonFields, JsonKind, find_fields, integers, texts
from headwater.lake.layout import GROUP, XATTRS, documents_schema

COLUMNS_MAX = 2000
_Marks = NDArray[np.bool_]
_RESERVED = {*documents_schema(xattrs=False).names, XATTRS.name, GROUP.name}
_ABSENT = (JsonKind.MISSING, JsonKind.NULL)
_STRINGS = (JsonKind.STRING, JsonKind.ESCAPED_STRING)
_NUMBERS = (JsonKind.INTEGER, JsonKind.REAL)
_KIND_NAMES = {
    **dict.fromkeys(_ABSENT, "nothing"),
    **dict.fromkeys((JsonKind.TRUE, JsonKind.FALSE), "a boolean"),
    **dict.fromkeys(_NUMBERS, "a number"),
    **dict.fromkeys(_STRINGS, "a string"),
    JsonKind.OBJECT: "an object",
    JsonKind.ARRAY: "an array",
}
_ROWS_A_TIME = 64 * 1024
_DEPTH_MAX = 16
_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<word>\w+)|(?P<sign>[<>(),:]))", re.ASCII)
_FORBIDDEN = re.compile(r"[ ,;{}()\n\t=]")
"""What Parquet files and Delta tables do not have in the name of a column."""
_SIMPLE: dict[str, pa.DataType] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_NAMES = {
    pa.string(): "STRING",
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.date32(): "DATE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
}


@dataclass(frozen=True, slots=True)
class ColumnDef:
    """A column of a table: it holds the field of that name."""

    name: str
    type: pa.DataType
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """Documents in columns."""

    columns: dict[str, pa.ChunkedArray]
    reasons: pa.ChunkedArray
    """By document: why it does not fit; null where it does."""


@dataclass(frozen=True)
class TypedColumns:
    """The typed columns of a table. `ddl` is as `to_ddl` writes it."""

    ddl: str

    @classmethod
    def from_ddl(cls, ddl: str) -> TypedColumns:
        columns = parse_columns(ddl)
        for column in columns:
            if column.name.lower() in _RESERVED:
                raise InvalidColumns(
                    f"the table has a column {column.name!r} of its own",
                    hint="Leave this field in `document`: get_json_object reads it from there",
                )
        return cls(to_ddl(columns))

    @cached_property
    def definitions(self) -> list[ColumnDef]:
        return parse_columns(self.ddl)

    @cached_property
    def schema(self) -> pa.Schema:
        # Also what is required is null where a document does not fit.
        return pa.schema([pa.field(column.name, column.type) for column in self.definitions])

    def parse(self, documents: pa.Array | pa.ChunkedArray) -> Parsed:
        """The columns of documents; null stands for one that is not JSON."""
        names = [column.name for column in self.definitions]
        parts = [
            self._parse_part(documents.slice(start, _ROWS_A_TIME), names)
            for start in range(0, len(documents), _ROWS_A_TIME)
        ]
        return Parsed(
            {
                column.name: pa.chunked_array([columns[column.name] for columns, _ in parts], column.type)
                for column in self.definitions
            },
            pa.chunked_array([reasons for _, reasons in parts], pa.string()),
        )

    def _parse_part(
        self, documents: pa.Array | pa.ChunkedArray, names: Sequence[str]
    ) -> tuple[dict[str, pa.Array], pa.Array]:
        """`names` are those that the fields have in the documents."""
        if isinstance(documents, pa.ChunkedArray):
            documents = documents.combine_chunks()
        is_json = np.asarray(documents.is_valid())
        fields = find_fields(documents.fill_null(""), names)
        reasons = np.full(len(documents), None, dtype=object)
        reasons[fields.forms == Form.OTHER_JSON] = "it is JSON, but no object"
        reasons[fields.forms == Form.MALFORMED] = "it is called JSON, but can't be read as such"
        reasons[~is_json] = "it is not JSON"
        columns = {}
        for number, column in enumerate(self.definitions):
            values, bad = _column_values(column, _Field.of(fields, number))
            columns[column.name] = values
            _add_reasons(reasons, bad, column, fields.kinds[number])
        self._parse_slowly(documents, fields.forms == Form.ESCAPED_NAMES, columns, reasons)
        fits = pa.array(_is_open(reasons))
        return (
            {name: pc.if_else(fits, values, pa.scalar(None, values.type)) for name, values in columns.items()},
            pa.array(reasons, pa.string()),
        )

    def _parse_slowly(
        self, documents: pa.Array, which: _Marks, columns: dict[str, pa.Array], reasons: NDArray[np.object_]
    ) -> None:
        """Documents whose fields have escapes in their names are written again with numbers for names."""
        if not which.any():
            return
        numbers = {column.name: str(number) for number, column in enumerate(self.definitions)}
        plain = [_renamed(text, numbers) for text in documents.filter(pa.array(which)).to_pylist()]
        parsed, found = self._parse_part(pa.array(plain, pa.string()), [*numbers.values()])
        for name, values in columns.items():
            columns[name] = pc.replace_with_mask(values, pa.array(which), parsed[name])
        reasons[which] = found.to_numpy(zero_copy_only=False)


def _renamed(document: str, names: Mapping[str, str]) -> str:
    """An object with only those fields that have a new name, by that name."""
    try:
        return json.dumps({names[name]: value for name, value in json.loads(document).items() if name in names})
    except (ValueError, RecursionError):
        return "no JSON"


def _is_open(reasons: NDArray[np.object_]) -> _Marks:
    """By document: nothing speaks against it so far."""
    marks: _Marks = np.equal(reasons, np.array(None, dtype=object))
    return marks


def _add_reasons(reasons: NDArray[np.object_], bad: _Marks, column: ColumnDef, kinds: NDArray[np.uint8]) -> None:
    for kind in np.unique(kinds[bad]).tolist():
        found = _KIND_NAMES[JsonKind(kind)]
        marks = bad & (kinds == kind) & _is_open(reasons)
        reasons[marks] = f"column {column.name}: {type_name(column.type)} can't hold {found} like this"
    if column.is_required:
        absent = np.isin(kinds, _ABSENT) & _is_open(reasons)
        reasons[absent] = f"column {column.name}: it must not be missing or null"


# --- one field of many documents --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    fields: JsonFields
    number: int

    @classmethod
    def of(cls, fields: JsonFields, number: int) -> _Field:
        return cls(fields, number)

    @property
    def kinds(self) -> NDArray[np.uint8]:
        kinds: NDArray[np.uint8] = self.fields.kinds[self.number]
        return kinds

    def is_one_of(self, *kinds: JsonKind) -> _Marks:
        return np.isin(self.kinds, kinds)

    def texts(self, wanted: _Marks) -> pa.Array:
        """The values as they are written; strings without their quotes, and what is escaped in them still so."""
        return texts(self.fields.data, self.fields.starts[self.number], self.fields.ends[self.number], wanted)

    def integers(self) -> tuple[NDArray[np.int64], _Marks]:
        wanted = self.is_one_of(JsonKind.INTEGER)
        return integers(self.fields.data, self.fields.starts[self.number], self.fields.ends[self.number], wanted)


def _column_values(column: ColumnDef, field: _Field) -> tuple[pa.Array, _Marks]:
    """The values of a column, and a mark where a value is there that the type can't hold."""
    is_there = ~field.is_one_of(*_ABSENT)
    type_ = column.type
    if pa.types.is_string(type_):
        values, good = _strings(field, is_there)
    elif pa.types.is_boolean(type_):
        good = field.is_one_of(JsonKind.TRUE, JsonKind.FALSE)
        values = pa.array(field.is_one_of(JsonKind.TRUE), mask=~good)
    elif pa.types.is_integer(type_):
        values, good = _integers(field, type_)
    elif pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        good = field.is_one_of(*_NUMBERS)
        values, good = _cast(field.texts(good), type_)
        if pa.types.is_floating(type_):
            good &= np.asarray(pc.fill_null(pc.is_finite(values), False))
    elif pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        wanted, _ = _strings(field, field.is_one_of(*_STRINGS))
        values, good = _times(wanted, type_) if pa.types.is_timestamp(type_) else _cast(wanted, type_)
    else:
        wanted = JsonKind.ARRAY if pa.types.is_list(type_) else JsonKind.OBJECT
        values, good = _halved(field.texts(field.is_one_of(wanted)), type_, _parse_nested)
    return values, is_there & ~good


def _strings(field: _Field, wanted: _Marks) -> tuple[pa.Array, _Marks]:
    values = field.texts(wanted)
    escaped = wanted & field.is_one_of(JsonKind.ESCAPED_STRING)
    good = wanted.copy()
    if escaped.any():
        plain = [_unescaped(text) for text in values.filter(pa.array(escaped)).to_pylist()]
        values = pc.replace_with_mask(values, pa.array(escaped), pa.array(plain, values.type))
        good[escaped] = [text is not None for text in plain]
    return values.cast(pa.string()), good


def _unescaped(text: str) -> str | None:
    """What a string with escapes says; None where it says half of a character."""
    try:
        plain: str = json.loads(f'"{text}"', strict=False)
        plain.encode()
    except ValueError:
        return None
    return plain


def _integers(field: _Field, type_: pa.DataType) -> tuple[pa.Array, _Marks]:
    numbers, good = field.integers()
    limits = np.iinfo(type_.to_pandas_dtype())
    good &= (numbers >= limits.min) & (numbers <= limits.max)
    return pa.array(numbers.astype(type_.to_pandas_dtype()), mask=~good), good


def _times(values: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Marks]:
    has_zone = pc.match_substring_regex(values, r"(?:[Zz]|[+-]\d\d:?(?:\d\d)?)$")
    is_zoned = pc.fill_null(has_zone, False)
    is_zoned = pc.and_(is_zoned, pc.fill_null(pc.match_substring(values, ":"), False))
    nothing = pa.scalar(None, values.type)
    zoned, good_zoned = _cast(pc.if_else(is_zoned, values, nothing), type_)
    plain, good_plain = _cast(pc.if_else(is_zoned, nothing, values), pa.timestamp("us"))
    return pc.if_else(is_zoned, zoned, plain.cast(pa.int64()).cast(type_)), good_zoned | good_plain


def _cast(values: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Marks]:
    return _halved(values, type_, lambda part, wanted: part.cast(wanted))


def _halved(values: pa.Array, type_: pa.DataType, convert: Any) -> tuple[pa.Array, _Marks]:
    """Convert texts all at once, and where that fails, by halves: few are ever bad.

    Gives the values, null where they can't be converted, and a mark on those that were.
    """
    try:
        return convert(values, type_), np.asarray(values.is_valid())
    except pa.ArrowInvalid:
        if len(values) == 1:
            return pa.nulls(1, type_), np.zeros(1, dtype=np.bool_)
    half = len(values) // 2
    parts = [_halved(part, type_, convert) for part in (values.slice(0, half), values.slice(half))]
    return pa.concat_arrays([part for part, _ in parts]), np.concatenate([good for _, good in parts])


def _parse_nested(values: pa.Array, type_: pa.DataType) -> pa.Array:
    """Objects and arrays with Arrow's own reader, which takes one text a line."""
    # A line end can't be inside a string of JSON, so it may become a space.
    lines = pc.replace_substring_regex(values.fill_null("null"), r"[\r\n]", " ")
    text = b"".join(b'{"v":%s}\n' % line.encode() for line in lines.to_pylist())
    options = pj.ParseOptions(explicit_schema=pa.schema([pa.field("v", type_)]), unexpected_field_behavior="ignore")
    block = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parsed = pj.read_json(io.BytesIO(text), read_options=block, parse_options=options)
    if parsed.num_rows != len(values):
        raise pa.ArrowInvalid("a text has more than one value")
    return parsed.column("v").combine_chunks()


# --- columns from what the documents have -----------------------------------------------------------------------------


def infer_columns(documents: Iterable[str | None]) -> TypedColumns | None:
    """Columns for the fields that some documents have; None where there are none.

    Whole numbers make a BIGINT, others a DOUBLE, strings a STRING, booleans a BOOLEAN; what is mixed or nested becomes
    a STRING with its JSON text. A field is left out where a table can't have a column of its name.
    """
    kinds: dict[str, set[type]] = {}
    for text in documents:
        try:
            document = json.loads(text or "null")
        except (ValueError, RecursionError):
            continue
        for name, value in document.items() if isinstance(document, dict) else ():
            kinds.setdefault(name, set()).update([] if value is None else [type(value)])
    taken = set(_RESERVED)
    columns = []
    for name, found in kinds.items():
        if found and is_column_name(name) and name.lower() not in taken:
            taken.add(name.lower())
            columns.append(ColumnDef(name, _type_for(found)))
    return TypedColumns(to_ddl(columns)) if columns else None


def _type_for(found: set[type]) -> pa.DataType:
    if found == {bool}:
        return pa.bool_()
    if found == {int}:
        return pa.int64()
    return pa.float64() if found <= {int, float} else pa.string()


# --- columns as SQL writes them ---------------------------------------------------------------------------------------
#
# `name STRING, age INT NOT NULL, tags ARRAY<STRING>, home STRUCT<city: STRING>`. The types are Spark's, as far as JSON
# has a value for them.


def parse_columns(ddl: str) -> list[ColumnDef]:
    """Read the text."""
    return _Parser(ddl).columns()


def to_ddl(columns: list[ColumnDef]) -> str:
    """Write what `parse_columns` reads. Equal columns give equal texts."""
    return ", ".join(
        f"{_quoted(column.name)} {type_name(column.type)}{' NOT NULL' if column.is_required else ''}"
        for column in columns
    )


def type_name(type_: pa.DataType) -> str:
    """The type as SQL writes it."""
    if pa.types.is_decimal(type_):
        return f"DECIMAL({type_.precision},{type_.scale})"
    if pa.types.is_list(type_):
        return f"ARRAY<{type_name(type_.value_type)}>"
    if pa.types.is_struct(type_):
        return f"STRUCT<{', '.join(f'{_quoted(field.name)}: {type_name(field.type)}' for field in type_)}>"
    return _NAMES[type_]


def is_column_name(name: str) -> bool:
    """Whether a table can have a column of this name."""
    return bool(name) and _FORBIDDEN.search(name) is None


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name.replace('`', '``')}`"


class _Parser:
    """Reads from left to right, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def columns(self) -> list[ColumnDef]:
        found = [self._column()]
        while self._takes(","):
            found.append(self._column())
        if self._text[self._at :].strip():
            raise self._unexpected("a comma or the end")
        names = [column.name.lower() for column in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidColumns(f"the column {twice!r} is there twice", hint="Upper and lower case make no difference")
        if len(found) > COLUMNS_MAX:
            raise InvalidColumns(f"there are more than {COLUMNS_MAX} columns", hint="Take those that are queried")
        return found

    def _column(self) -> ColumnDef:
        name = self._name()
        type_ = self._type(0)
        is_required = self._takes_word("not")
        if is_required and not self._takes_word("null"):
            raise self._unexpected("NULL")
        return ColumnDef(name, type_, is_required)

    def _type(self, depth: int) -> pa.DataType:
        if depth > _DEPTH_MAX:
            raise InvalidColumns(f"a type is nested more than {_DEPTH_MAX} deep", hint="Make the column a STRING")
        start = self._at
        word = self._word("a type").lower()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if word in ("decimal", "dec", "numeric"):
            return self._decimal()
        if word == "array":
            self._expect("<")
            item = self._type(depth + 1)
            self._expect(">")
            return pa.list_(item)
        if word == "struct":
            return self._struct(depth)
        self._at = start
        raise InvalidColumns(
            f"{word.upper()} is no type that a field of JSON can have",
            hint="Take STRING, BOOLEAN, INT, BIGINT, DOUBLE, DECIMAL(p,s), DATE, TIMESTAMP, ARRAY<…> or STRUCT<…>",
        )

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._takes("("):
            precision = self._number()
            if self._takes(","):
                scale = self._number()
            self._expect(")")
        if not (1 <= precision <= 38 and scale <= precision):
            raise InvalidColumns(f"there is no DECIMAL({precision},{scale})", hint="It has 1 to 38 digits in all")
        return pa.decimal128(precision, scale)

    def _struct(self, depth: int) -> pa.DataType:
        self._expect("<")
        fields = []
        while True:
            name = self._name()
            self._takes(":")
            fields.append(pa.field(name, self._type(depth + 1)))
            if not self._takes(","):
                break
        self._expect(">")
        return pa.struct(fields)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match["sign"]:
            raise self._unexpected("the name of a column")
        self._at = match.end()
        name = match["word"] or match["quoted"][1:-1].replace("``", "`")
        if not is_column_name(name):
            raise InvalidColumns(f"a table can't have a column {name!r}", hint="Leave the field in `document`")
        return name

    def _word(self, what: str) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None or not match["word"]:
            raise self._unexpected(what)
        self._at = match.end()
        return match["word"]

    def _number(self) -> int:
        word = self._word("a number")
        if not word.isdecimal():
            raise self._unexpected("a number")
        return int(word)

    def _takes(self, sign: str) -> bool:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match["sign"] != sign:
            return False
        self._at = match.end()
        return True

    def _takes_word(self, word: str) -> bool:
        match = _TOKEN.match(self._text, self._at)
        if match is None or (match["word"] or "").lower() != word:
            return False
        self._at = match.end()
        return True

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._unexpected(f"`{sign}`")

    def _unexpected(self, wanted: str) -> InvalidColumns:
        rest = self._text[self._at :].strip()[:20] or "the end"
        return InvalidColumns(
            f"the columns {self._text!r} should have {wanted} before {rest!r}",
            hint="Write them as `name STRING, age INT`",
        )
