"""Typed columns: their SQL notation, conversion of JSON values to typed arrays, and the inference of types.

The command line takes texts such as `name STRING, age INT NOT NULL, tags ARRAY<STRING>, home STRUCT<city: STRING>`,
tables keep them in their properties, and messages name types this way. The types are those of Spark that JSON has
values for.

A STRING takes any value: a string as it is, all else as its JSON text, as Spark's `from_json` does. No other type takes
a value that it would have to change: an INT takes 7 and neither 7.0 nor "7". A DOUBLE takes the nearest number that it
can represent, as all readers of JSON do, but no whole number that needs more than 64 bits: such a number is more often
an identifier than an amount, and the nearest one would be another identifier. A TIMESTAMP is a string in ISO 8601, in
UTC if it names no zone. An array, a map or a struct takes a value only if it takes all of its contents; members of an
object that a struct does not have are ignored. If members share a name the last counts, as in readers of JSON.

The same text must always give the same value: `typed_columns` parses documents with this, and `verify` compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidColumns
from headwater.lake.json_fields import (
    Form,
    JsonKind,
    JsonMembers,
    JsonValues,
    Marks,
    Numbers,
    find_members,
    list_members,
)

COLUMNS_MAX = 2000
NAME_BYTES_MAX = 255
"""The maximum of a column's name: the limit of the catalogs of Hive and Glue."""
_DEPTH_MAX = 16
_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<word>\w+)|(?P<sign>[<>(),:]))", re.ASCII)
_FORBIDDEN = re.compile(r"[ ,;{}()\n\t=\0]")
"""Characters that Parquet files and Delta tables do not permit in column names. delta-rs cuts a name off at NUL."""
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
_SIMPLE: dict[str, pa.DataType] = {name.lower(): type_ for type_, name in _NAMES.items()} | {
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "real": pa.float32(),
}


@dataclass(frozen=True, slots=True)
class ColumnDef:
    """A column of a table, and the field of the documents that it holds."""

    name: str
    type: pa.DataType
    is_required: bool = False
    field: str = ""
    """The name of the field; by default that of the column."""
    is_beside: bool = False
    """Whether it holds the values that the field's other column can't hold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.field or self.name)


def parse_columns(ddl: str) -> list[ColumnDef]:
    """Parse columns from their SQL text."""
    return _Parser(ddl).columns()


def to_ddl(columns: Sequence[ColumnDef]) -> str:
    """Return the text that `parse_columns` reads. Equal columns give equal texts."""
    return ", ".join(
        f"{_quoted(column.name)} {type_name(column.type)}{' NOT NULL' if column.is_required else ''}"
        for column in columns
    )


def type_name(type_: pa.DataType) -> str:
    """Return the type as SQL writes it."""
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
    """Return the type as this module makes it: Delta and Parquet name the members of lists and maps differently."""
    return _Parser(type_name(type_)).type()


def is_column_name(name: str) -> bool:
    """Whether a table can have a column of this name."""
    return bool(name) and _FORBIDDEN.search(name) is None and len(name.encode()) <= NAME_BYTES_MAX


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name.replace('`', '``')}`"


class _Parser:
    """Parses from left to right, with one token of lookahead."""

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
            raise InvalidColumns(f"the column {twice!r} is there twice", hint="Column names are case-insensitive")
        if len(found) > COLUMNS_MAX:
            raise InvalidColumns(f"there are more than {COLUMNS_MAX} columns", hint="Name those that you query")
        return found

    def _column(self) -> ColumnDef:
        name = self._name()
        type_ = self.type()
        is_required = self._takes("not")
        if is_required and not self._takes("null"):
            raise self._unexpected("NULL")
        return ColumnDef(name, type_, is_required)

    def type(self, depth: int = 0) -> pa.DataType:
        if depth > _DEPTH_MAX:
            raise InvalidColumns(f"a type is nested more than {_DEPTH_MAX} deep", hint="Make the column a STRING")
        start = self._at
        word = self._word("a type").lower()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if word in ("decimal", "dec", "numeric"):
            return self._decimal()
        nested = {"array": self._array, "map": self._map, "struct": self._struct}.get(word)
        if nested is not None:
            self._expect("<")
            type_ = nested(depth + 1)
            self._expect(">")
            return type_
        self._at = start
        raise InvalidColumns(
            f"{word.upper()} is not a type of a JSON field",
            hint="Use STRING, BOOLEAN, INT, BIGINT, DOUBLE, DECIMAL(p,s), DATE, TIMESTAMP, ARRAY<…>, MAP<STRING, …> "
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
            raise InvalidColumns(f"there is no DECIMAL({precision},{scale})", hint="A DECIMAL has 1 to 38 digits")
        return pa.decimal128(precision, scale)

    def _array(self, depth: int) -> pa.DataType:
        return pa.list_(self.type(depth))

    def _map(self, depth: int) -> pa.DataType:
        if self._word("STRING").lower() != "string":
            raise InvalidColumns("the keys of a MAP must have type STRING", hint="Write MAP<STRING, …>")
        self._expect(",")
        return pa.map_(pa.string(), self.type(depth))

    def _struct(self, depth: int) -> pa.DataType:
        fields: list[pa.Field] = []
        while not fields or self._takes(","):
            name = self._name()
            self._takes(":")
            fields.append(pa.field(name, self.type(depth)))
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

    def _takes(self, wanted: str) -> bool:
        """Consume a sign or a word if it comes next; return whether it did."""
        match = _TOKEN.match(self._text, self._at)
        if match is None or (match["sign"] or (match["word"] or "").lower()) != wanted:
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


# --- values of columns ------------------------------------------------------------------------------------------------

BOOLEANS = (JsonKind.TRUE, JsonKind.FALSE)
NUMBERS = (JsonKind.INTEGER, JsonKind.REAL)
STRINGS = (JsonKind.STRING, JsonKind.ESCAPED_STRING)
TIMESTAMP = pa.timestamp("us", tz="UTC")
_DATE_PATTERN = r"^\d{4}-\d{2}-\d{2}$"
_TIME_START = r"^\d{4}-\d{2}-\d{2}"
_TIME_PATTERN = r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?(?:Z|[+-]\d{2}:?\d{2})?$"


def read_values(values: JsonValues, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    """Convert values to a type. Returns the array, null where a value does not fit, and a mark for each that fits."""
    if pa.types.is_string(type_):
        return _strings(values, values.is_there)
    if pa.types.is_boolean(type_):
        good = values.is_one_of(*BOOLEANS)
        return pa.array(values.kinds == JsonKind.TRUE, mask=~good), good
    if pa.types.is_integer(type_):
        return _integers(values, type_)
    if pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return _numbers(values, type_)
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        return _times(values, type_)
    if pa.types.is_struct(type_):
        return _structs(values, type_)
    return _lists(values, type_)


def _strings(values: JsonValues, wanted: Marks) -> tuple[pa.Array, Marks]:
    texts, good = values.texts(wanted)
    return texts.cast(pa.string()), good


def _integers(values: JsonValues, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    numbers, good = values.integers()
    narrow = numbers.astype(str(type_), copy=False)
    good &= narrow == numbers
    return pa.array(narrow, mask=None if good.all() else ~good), good


def _numbers(values: JsonValues, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    found, good = cast_texts(values.texts(values.is_one_of(*NUMBERS))[0], type_)
    if pa.types.is_floating(type_):
        good &= np.asarray(pc.fill_null(pc.is_finite(found), False))
        is_integer = values.kinds == JsonKind.INTEGER
        if is_integer.any():
            good &= values.integers()[1] | ~is_integer
        found = pc.if_else(pa.array(good), found, pa.scalar(None, type_))
    return found, good


def _times(values: JsonValues, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    texts, _ = _strings(values, values.is_one_of(*STRINGS))
    if pa.types.is_date(type_):
        return cast_texts(texts, type_)
    nothing = pa.scalar(None, texts.type)
    has_zone = pc.match_substring_regex(texts, r"(?:[Zz]|[+-]\d\d:?(?:\d\d)?)$")
    is_zoned = pc.and_(pc.fill_null(has_zone, False), pc.fill_null(pc.match_substring(texts, ":"), False))
    zoned, good_zoned = cast_texts(pc.if_else(is_zoned, texts, nothing), type_)
    plain, good_plain = cast_texts(pc.if_else(is_zoned, nothing, texts), pa.timestamp("us"))
    return pc.if_else(is_zoned, zoned, plain.cast(pa.int64()).cast(type_)), good_zoned | good_plain


def cast_texts(texts: pa.Array, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    """Convert texts all at once. If that fails, search for bad ones by halves: few texts that look good are bad.

    Returns the values, null where conversion failed, and a mark for each that was converted.
    """
    try:
        return texts.cast(type_), np.asarray(texts.is_valid())
    except pa.ArrowInvalid:
        if pa.types.is_temporal(type_):
            pattern = _DATE_PATTERN if pa.types.is_date(type_) else _TIME_START
            texts = pc.if_else(pc.match_substring_regex(texts, pattern), texts, pa.scalar(None, texts.type))
    return _cast_by_halves(texts, type_)


def _cast_by_halves(texts: pa.Array, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    try:
        return texts.cast(type_), np.asarray(texts.is_valid())
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return pa.nulls(1, type_), np.zeros(1, dtype=np.bool_)
    half = len(texts) // 2
    parts = [_cast_by_halves(part, type_) for part in (texts.slice(0, half), texts.slice(half))]
    return pa.concat_arrays([part for part, _ in parts]), np.concatenate([good for _, good in parts])


def _structs(values: JsonValues, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    members = find_members(values, [member.name for member in type_])
    good = (values.kinds == JsonKind.OBJECT) & (members.forms == Form.OBJECT)
    columns = []
    for number, member in enumerate(type_):
        inner = members.values(number)
        column, taken = read_values(inner, member.type)
        good &= taken | ~inner.is_there
        columns.append(column)
    return pa.StructArray.from_arrays(columns, fields=list(type_), mask=pa.array(~good)), good


def _lists(values: JsonValues, type_: pa.DataType) -> tuple[pa.Array, Marks]:
    """Read lists and maps: all their items as one long column, which is then cut."""
    is_map = pa.types.is_map(type_)
    kind = JsonKind.OBJECT if is_map else JsonKind.ARRAY
    item_type = type_.item_type if is_map else type_.value_type
    good = values.kinds == kind
    # Parquet can't store items inside a null, so leave bad values out and read the rest again.
    for _ in range(2):
        members = list_members(values.where(good), kind)
        names, named = members.names.texts(np.full(len(members.names), is_map))
        if is_map:
            members, names, named = _last_of_each_name(members, names, named)
        items, taken = read_values(members.values, item_type)
        is_bad = members.values.is_there & ~taken
        if is_map:
            is_bad |= ~named
        whole = good & members.is_whole & (_sums(is_bad, members.offsets) == 0)
        if (whole == good).all():
            break
        good = whole
    assert (whole == good).all(), "what was good beside a bad value is good without it"
    offsets = pa.array(members.offsets.astype(np.int32))
    mask = pa.array(~good)
    if is_map:
        return pa.MapArray.from_arrays(offsets, names.cast(pa.string()), items, type=type_, mask=mask), good
    return pa.ListArray.from_arrays(offsets, items, type=type_, mask=mask), good


def _last_of_each_name(members: JsonMembers, names: pa.Array, named: Marks) -> tuple[JsonMembers, pa.Array, Marks]:
    """Drop members that another one of the same name follows. DuckDB refuses tables whose maps have duplicate keys."""
    encoded = names.dictionary_encode()
    numbers = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    rows = np.repeat(np.arange(len(members.is_whole)), np.diff(members.offsets))
    places = rows * (len(encoded.dictionary) + 1) + numbers
    last = len(places) - 1 - np.unique(places[::-1], return_index=True)[1]
    if len(last) == len(places):
        return members, names, named
    kept = np.sort(last)
    offsets = np.searchsorted(kept, members.offsets).astype(np.int64)
    found = replace(members, offsets=offsets, names=members.names.of(kept), values=members.values.of(kept))
    return found, names.take(pa.array(kept)), named[kept]


def _sums(marks: Marks, offsets: Numbers) -> Numbers:
    """Count the marks between each offset and the next."""
    counted = np.zeros(len(marks) + 1, dtype=np.int64)
    np.cumsum(marks, out=counted[1:])
    sums: Numbers = counted[offsets[1:]] - counted[offsets[:-1]]
    return sums


# --- the types of values ----------------------------------------------------------------------------------------------
#
# A type stands for all values that it takes, so types can be joined: different processes look at parts of a table, and
# their results are combined. `null` is the type of a field without values so far, a struct without members that of
# `{}`; `settled_type` turns both into a type that a table can have.


MEMBERS_MAX = 64
"""Objects with more distinct names become a map: their names are data."""
NESTED_MAX = 4
"""Values nested deeper stay JSON text."""


def infer_type(values: JsonValues, depth: int = 0) -> pa.DataType:
    """Return the narrowest type that takes all of the values."""
    kinds = {JsonKind(int(kind)) for kind in np.unique(values.kinds)} - {JsonKind.MISSING, JsonKind.NULL}
    if not kinds:
        return pa.null()
    if kinds <= {*BOOLEANS}:
        return pa.bool_()
    if kinds <= {*NUMBERS}:
        type_ = pa.int64() if kinds == {JsonKind.INTEGER} else pa.float64()
        # A number that no numeric column holds is a misfit; nested, it would make the whole value around it one.
        return type_ if depth == 0 or (read_values(values, type_)[1] | ~values.is_there).all() else pa.string()
    if kinds <= {*STRINGS}:
        # Nested strings stay strings: a single odd date would make the whole value around it a misfit.
        return _string_type(values) if depth == 0 else pa.string()
    if kinds == {JsonKind.ARRAY} and depth < NESTED_MAX:
        return pa.list_(infer_type(list_members(values, JsonKind.ARRAY).values, depth + 1))
    if kinds == {JsonKind.OBJECT} and depth < NESTED_MAX:
        return _object_type(list_members(values, JsonKind.OBJECT), depth)
    return pa.string()


def _string_type(values: JsonValues) -> pa.DataType:
    """Return a date or timestamp type if all strings are written as such, otherwise string."""
    there = values.of(values.is_there)
    first, _ = there.of(np.zeros(1, dtype=np.int64)).texts(np.ones(1, dtype=np.bool_))
    if not pc.match_substring_regex(first, _TIME_START)[0].as_py():
        return pa.string()
    texts, _ = there.texts(np.ones(len(there), dtype=np.bool_))
    for pattern, type_ in ((_DATE_PATTERN, pa.date32()), (_TIME_PATTERN, TIMESTAMP)):
        looks_good = pc.fill_null(pc.match_substring_regex(texts, pattern), False)
        if pc.all(looks_good).as_py() and read_values(there, type_)[1].all():
            return type_
    return pa.string()


def _object_type(members: JsonMembers, depth: int) -> pa.DataType:
    by_name = values_by_name(members.names, members.values, names_max=MEMBERS_MAX + 1)
    if len(by_name) > MEMBERS_MAX or not _are_member_names(by_name):
        return pa.map_(pa.string(), infer_type(members.values, depth + 1))
    return pa.struct([(name, infer_type(values, depth + 1)) for name, values in by_name.items()])


def values_by_name(
    names: JsonValues,
    values: JsonValues,
    *,
    names_max: int,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, JsonValues]:
    """Return the values by the names beside them, in order of appearance: of the first `names_max` wanted names."""
    texts, _ = names.texts(np.ones(len(names), dtype=np.bool_))
    encoded = pc.dictionary_encode(texts)
    numbers = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    order = np.argsort(numbers, kind="stable")
    edges = np.searchsorted(numbers[order], np.arange(len(encoded.dictionary) + 1))
    known = ((at, name.as_py()) for at, name in enumerate(encoded.dictionary))
    chosen = islice(((at, name) for at, name in known if wanted(name)), names_max)
    return {name: values.of(order[edges[at] : edges[at + 1]]) for at, name in chosen}


def _are_member_names(names: Iterable[str]) -> bool:
    """Whether a struct can have members of these names. Engines ignore case."""
    names = [*names]
    return all(map(is_column_name, names)) and len({name.lower() for name in names}) == len(names)


def joined_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the narrowest type that takes all values of both types."""
    both = {one, other}
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if both == {pa.int64(), pa.float64()}:
        return pa.float64()
    if both == {pa.date32(), TIMESTAMP}:
        return TIMESTAMP
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(joined_type(one.value_type, other.value_type))
    if _is_object(one) and _is_object(other):
        return _joined_objects(one, other)
    return pa.string()


def _is_object(type_: pa.DataType) -> bool:
    return bool(pa.types.is_struct(type_) or pa.types.is_map(type_))


def _joined_objects(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        members = {member.name: member.type for member in one}
        for member in other:
            members[member.name] = joined_type(members.get(member.name, pa.null()), member.type)
        if len(members) <= MEMBERS_MAX and _are_member_names(members):
            return pa.struct([*members.items()])
    items = [
        item
        for type_ in (one, other)
        for item in ([type_.item_type] if pa.types.is_map(type_) else [member.type for member in type_])
    ]
    return pa.map_(pa.string(), reduce(joined_type, items, pa.null()))


def settled_type(type_: pa.DataType) -> pa.DataType:
    """Return a type that a table can have. If nothing is known, it is STRING, which takes every value."""
    if pa.types.is_list(type_):
        return pa.list_(settled_type(type_.value_type))
    if pa.types.is_map(type_):
        return pa.map_(pa.string(), settled_type(type_.item_type))
    if pa.types.is_struct(type_) and type_.num_fields:
        return pa.struct([(member.name, settled_type(member.type)) for member in type_])
    return pa.string() if pa.types.is_null(type_) or pa.types.is_struct(type_) else type_


def leaves(type_: pa.DataType) -> int:
    """Return how many columns a Parquet file has for a type."""
    if pa.types.is_list(type_):
        return leaves(type_.value_type)
    if pa.types.is_map(type_):
        return 1 + leaves(type_.item_type)
    return sum(leaves(member.type) for member in type_) if pa.types.is_struct(type_) else 1
