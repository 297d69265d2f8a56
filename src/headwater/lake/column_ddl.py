"""Columns as SQL writes them: `name STRING, age INT NOT NULL, tags ARRAY<STRING>, home STRUCT<city: STRING>`.

The types are Spark's, as far as JSON has a value for them. The command line takes such texts, tables keep them in their
properties, and messages name types this way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from headwater.errors import InvalidColumns

COLUMNS_MAX = 2000
NAME_BYTES_MAX = 255
"""Of a column's name: what the catalogs of Hive and Glue take."""
_DEPTH_MAX = 16
_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<word>\w+)|(?P<sign>[<>(),:]))", re.ASCII)
_FORBIDDEN = re.compile(r"[ ,;{}()\n\t=\0]")
"""What Parquet files and Delta tables do not have in the name of a column. delta-rs cuts a name off at NUL."""
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
    """A column of a table, and the field of the documents that it holds."""

    name: str
    type: pa.DataType
    is_required: bool = False
    field: str = ""
    """Its name; by default that of the column."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.field or self.name)


def parse_columns(ddl: str) -> list[ColumnDef]:
    """Read the text."""
    return _Parser(ddl).columns()


def to_ddl(columns: Sequence[ColumnDef]) -> str:
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
    if pa.types.is_map(type_):
        return f"MAP<{type_name(type_.key_type)}, {type_name(type_.item_type)}>"
    if pa.types.is_struct(type_):
        return f"STRUCT<{', '.join(f'{_quoted(field.name)}: {type_name(field.type)}' for field in type_)}>"
    return _NAMES[type_]


def plain_type(type_: pa.DataType) -> pa.DataType:
    """The type as this module makes it: Delta and Parquet have other names for what is inside of lists and maps."""
    return _Parser(type_name(type_)).type()


def is_column_name(name: str) -> bool:
    """Whether a table can have a column of this name."""
    return bool(name) and _FORBIDDEN.search(name) is None and len(name.encode()) <= NAME_BYTES_MAX


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

    def type(self) -> pa.DataType:
        return self._type(0)

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
        if word == "map":
            return self._map(depth)
        if word == "struct":
            return self._struct(depth)
        self._at = start
        raise InvalidColumns(
            f"{word.upper()} is no type that a field of JSON can have",
            hint="Take STRING, BOOLEAN, INT, BIGINT, DOUBLE, DECIMAL(p,s), DATE, TIMESTAMP, ARRAY<…>, MAP<STRING, …> "
            "or STRUCT<…>",
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

    def _map(self, depth: int) -> pa.DataType:
        self._expect("<")
        if self._word("STRING").lower() != "string":
            raise InvalidColumns("the names of a MAP are of type STRING", hint="Write MAP<STRING, …>")
        self._expect(",")
        item = self._type(depth + 1)
        self._expect(">")
        return pa.map_(pa.string(), item)

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
