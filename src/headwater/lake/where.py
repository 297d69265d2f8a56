"""Conditions on changes and documents, as SQL writes them: parsed once by the driver, judged by tasks in whole batches.

    type = 'order' AND (total > 10 OR address.city IN ('Oslo', 'Bergen')) AND discount IS MISSING

A name is a field of the document, with dots for nested fields, or a column of the change (`COLUMNS`). A field with the
name of a column is written with `document` before it: `document.key`. sqlglot parses the text, and `Where.parse`
converts the result into the few kinds of conditions below, or reports which part it can't convert. These are sent to
the tasks, which need no parser.

The logic is SQL's, with three values. A comparison is unknown if the document has no such field, if the field is null,
or if its value has another type than the literal. `NOT` of unknown is unknown, and a row meets a condition only if it
is true. Two whole numbers are compared exactly if both fit signed 64 bits, and all other numbers as doubles. Texts are
compared by their UTF-8 bytes. `IS NULL` is true of a field that is null or missing, as a column of `documents` would
be; `IS MISSING` is not true of one that is null. A value that is not a JSON object has no fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.client.changes import split_keys
from headwater.errors import InvalidInput
from headwater.lake.column_values import BOOLEANS, NUMBERS, STRINGS, cast_texts
from headwater.lake.json_fields import Form, JsonKind, JsonValues, find_fields, find_members
from headwater.lake.layout import split_values

if TYPE_CHECKING:
    from sqlglot.expressions import Expr as SqlNode

TEXT_CHARS_MAX = 65_536
DEPTH_MAX = 64
"""The maximum nesting of brackets and NOTs, and the maximum length of a path."""

Literal: TypeAlias = bool | int | float | str
Rows: TypeAlias = Any
"""A record batch or a table, with the columns of the client's batches."""
Truth: TypeAlias = Any
"""An array of booleans; null means unknown."""


class _Type(StrEnum):
    NUMBER = "number"
    TEXT = "text"
    TIME = "time"
    BOOLEAN = "boolean"


COLUMNS: Mapping[str, _Type] = {
    **dict.fromkeys(("key", "scope", "collection", "op"), _Type.TEXT),
    **dict.fromkeys(("vbucket", "seqno", "rev", "cas", "collection_id", "datatype", "flags", "expiry"), _Type.NUMBER),
    "changed_at": _Type.TIME,
}
"""The columns of a change that conditions can use."""
_OTHER_COLUMNS = frozenset(
    {"value", "value_bytes", "key_bytes", "content", "document", "xattrs", "vbuuid", "snapshot_start", "snapshot_end"}
)
"""Columns of changes or of tables whose meaning would be unclear in a condition."""
_DOCUMENT = "document"
POSSIBLE = (
    "Possible are comparisons of a field or a column with a literal, IN, BETWEEN, LIKE, IS [NOT] NULL and "
    "IS [NOT] MISSING, joined by AND, OR and NOT"
)

# --- the kinds of conditions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operand:
    """A column of the change, or a path to a field of its document."""

    column: str = ""
    path: tuple[str, ...] = ()


class Operator(StrEnum):
    EQUAL = "="
    OTHER = "<>"
    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="


@dataclass(frozen=True, slots=True)
class Comparison:
    operand: Operand
    operator: Operator
    literal: Literal


@dataclass(frozen=True, slots=True)
class OneOf:
    operand: Operand
    literals: tuple[Literal, ...]
    has_null: bool = False
    """Null is among them: then the result is unknown unless another literal matches."""


@dataclass(frozen=True, slots=True)
class Like:
    operand: Operand
    pattern: str
    """In Arrow's form: a backslash escapes the next character."""


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand


@dataclass(frozen=True, slots=True)
class IsMissing:
    operand: Operand


@dataclass(frozen=True, slots=True)
class Not:
    part: Condition


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple[Condition, ...]


Condition: TypeAlias = Comparison | OneOf | Like | IsNull | IsMissing | Not | AllOf | AnyOf


def operands_of(condition: Condition) -> Iterator[Operand]:
    """Yield all operands of a condition."""
    if isinstance(condition, Not):
        yield from operands_of(condition.part)
    elif isinstance(condition, AllOf | AnyOf):
        for part in condition.parts:
            yield from operands_of(part)
    else:
        yield condition.operand


@dataclass(frozen=True, slots=True)
class Where:
    """A text and its conditions, all of which must be true. Texts with equal conditions are equal."""

    text: str = field(compare=False)
    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a condition of SQL.

        Raises:
            InvalidInput: It is not such a condition, or a part of it is not supported.
        """
        return cls(text, _Parser(text).conditions())

    @property
    def columns(self) -> frozenset[str]:
        """The columns of changes that it uses."""
        return frozenset(it.column for one in self.conditions for it in operands_of(one) if it.column)

    def met(self, rows: Rows) -> NDArray[np.bool_]:
        """Mark the rows that meet it."""
        return met(self.conditions, rows)


def met(conditions: Sequence[Condition], rows: Rows) -> NDArray[np.bool_]:
    """Mark the rows that meet all of some conditions."""
    if not conditions:
        return np.ones(rows.num_rows, dtype=np.bool_)
    marks: NDArray[np.bool_] = np.asarray(pc.fill_null(_Judge(rows, conditions).truth(AllOf(tuple(conditions))), False))
    return marks


# --- from a text ------------------------------------------------------------------------------------------------------


class _Parser:
    """Converts what sqlglot has parsed."""

    def __init__(self, text: str) -> None:
        self._text = text

    def conditions(self) -> tuple[Condition, ...]:
        from sqlglot import errors

        if len(self._text) > TEXT_CHARS_MAX:
            raise InvalidInput(
                f"the condition has {len(self._text):,} characters, and may have {TEXT_CHARS_MAX:,}",
                hint="Name fewer values, or give them a field of their own",
            )
        try:
            found = self._condition(self._parsed(), 0)
        except errors.SqlglotError:
            raise self._refused(None, "is no condition of SQL") from None
        except RecursionError:
            raise self._refused(None, "is nested too deeply", hint="Write it with fewer brackets") from None
        return found.parts if isinstance(found, AllOf) else (found,)

    def _parsed(self) -> SqlNode:
        import sqlglot
        from sqlglot import expressions as sql

        # Brackets keep sqlglot from taking a word as the start of a statement.
        return sqlglot.parse_one(f"({self._text}\n)", dialect=_dialect(), into=sql.Condition).unnest()

    def _refused(self, part: SqlNode | None, why: str, *, hint: str = POSSIBLE) -> InvalidInput:
        shown = self._text if part is None else part.sql(dialect=_dialect())
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
        return InvalidInput(f"in the condition {self._text[:_SHOWN_CHARS]!r}, {shown!r} {why}", hint=hint)

    def _condition(self, node: SqlNode, depth: int) -> Condition:
        from sqlglot import expressions as sql

        if depth > DEPTH_MAX:
            raise RecursionError
        node = node.unnest()
        if isinstance(node, sql.And | sql.Or):
            kind = AllOf if isinstance(node, sql.And) else AnyOf
            # Without `flatten`, a long chain would be nested as deeply as it is long.
            parts = [self._condition(part, depth + 1) for part in node.flatten()]
            inner = (part.parts if isinstance(part, kind) else (part,) for part in parts)
            return kind(tuple(one for part in inner for one in part))
        if isinstance(node, sql.Not):
            return Not(self._condition(node.this, depth + 1))
        found = self._negated(node, self._plain(node))
        if found is None:
            raise self._refused(node, "can't be judged here")
        return found

    def _negated(self, node: SqlNode, found: Condition | None) -> Condition | None:
        inner = node.this if type(node).__name__ == "Escape" else node
        return Not(found) if found is not None and inner.args.get("negate") else found

    def _plain(self, node: SqlNode) -> Condition | None:
        """Convert a condition without inner conditions; return None if it is not supported."""
        from sqlglot import expressions as sql

        match node:
            case sql.EQ() | sql.NEQ() | sql.LT() | sql.LTE() | sql.GT() | sql.GTE() if _has_only(node):
                return self._comparison(node)
            case sql.In() if _has_only(node, "expressions") and node.expressions:
                operand = self._operand(node.this)
                literals = [self._literal(one, operand) for one in node.expressions]
                # Compare types as well: to Python, 1 and TRUE are equal.
                known = tuple({(type(one), one): one for one in literals if one is not None}.values())
                return OneOf(operand, known, has_null=None in literals)
            case sql.Between() if _has_only(node, "low", "high"):
                operand = self._operand(node.this)
                low, high = (self._not_null(node.args[name], operand) for name in ("low", "high"))
                least = Comparison(operand, Operator.GREATER_OR_EQUAL, low)
                return AllOf((least, Comparison(operand, Operator.LESS_OR_EQUAL, high)))
            case sql.Like() if _has_only(node, "negate"):
                return self._like(node, "")
            case sql.Escape() if isinstance(node.this, sql.Like) and _has_only(node.this, "negate"):
                return self._like(node.this, self._text_of(node.expression))
            case sql.Is() if _has_only(node):
                return self._is(node)
            case sql.Column() | sql.Dot():
                operand = self._operand(node)
                return None if operand.column else Comparison(operand, Operator.EQUAL, True)
        return None

    def _comparison(self, node: SqlNode) -> Comparison:
        from sqlglot import expressions as sql

        operator = Operator(_OPERATORS[type(node).__name__])
        left, right = node.this.unnest(), node.expression.unnest()
        are_names = [isinstance(one, sql.Column | sql.Dot) for one in (left, right)]
        if all(are_names):
            quoted = "Texts are written in single quotes, names in backticks or double quotes"
            raise self._refused(node, "compares two names", hint=f"{quoted}. {POSSIBLE}")
        if are_names[1]:
            left, right, operator = right, left, _TURNED[operator]
        operand = self._operand(left)
        literal = self._not_null(right, operand)
        if isinstance(literal, bool) and operator not in (Operator.EQUAL, Operator.OTHER):
            raise self._refused(node, "puts true and false in an order")
        return Comparison(operand, operator, literal)

    def _is(self, node: SqlNode) -> Condition | None:
        from sqlglot import expressions as sql

        asked = node.expression
        if isinstance(asked, sql.Null):
            return IsNull(self._operand(node.this))
        if isinstance(asked, sql.Column) and asked.name.lower() == "missing" and not asked.this.quoted:
            operand = self._operand(node.this)
            return IsNull(operand) if operand.column else IsMissing(operand)
        return None

    def _like(self, node: SqlNode, escape: str) -> Like:
        operand = self._operand(node.this)
        if operand.column and COLUMNS[operand.column] is not _Type.TEXT:
            raise self._refused(node, f"compares {operand.column}, which is no text, with a pattern")
        if len(escape) > 1:
            raise self._refused(node, "has more than one character after ESCAPE")
        pattern, signs = [], iter(self._text_of(node.expression))
        for sign in signs:
            if sign == escape:
                sign = next(signs, "")
                if not sign:
                    raise self._refused(node, "has nothing behind the last character of ESCAPE")
                pattern.append(f"\\{sign}" if sign in "%_\\" else sign)
            else:
                pattern.append("\\\\" if sign == "\\" else sign)
        return Like(operand, "".join(pattern))

    # --- names and literals -------------------------------------------------------------------------------------------

    def _operand(self, node: SqlNode) -> Operand:
        from sqlglot import expressions as sql

        node = node.unnest()
        names: list[str] = []
        inner = node
        while isinstance(inner, sql.Dot) and isinstance(inner.expression, sql.Identifier):
            names.insert(0, inner.expression.name)
            inner = inner.this
        if not isinstance(inner, sql.Column) or not all(isinstance(part, sql.Identifier) for part in inner.parts):
            raise self._refused(node, "is neither a field nor a column")
        names = [*(part.name for part in inner.parts), *names]
        if len(names) > DEPTH_MAX:
            raise self._refused(node, f"has more than {DEPTH_MAX} names")
        first = names[0].lower()
        if first == _DOCUMENT and len(names) > 1:
            return Operand(path=tuple(names[1:]))
        if first in COLUMNS and len(names) == 1:
            return Operand(column=first)
        if first in COLUMNS or first in _OTHER_COLUMNS:
            what = f"names the column {first}" + (", which has no parts" if first in COLUMNS else "")
            field_name = ".".join((_DOCUMENT, *names))
            raise self._refused(node, what, hint=f"Write {field_name} for the field of the document. {POSSIBLE}")
        return Operand(path=tuple(names))

    def _not_null(self, node: SqlNode, operand: Operand) -> Literal:
        literal = self._literal(node, operand)
        if literal is None:
            raise self._refused(node, "equals nothing, and is neither more nor less", hint="Write IS NULL")
        return literal

    def _literal(self, node: SqlNode, operand: Operand) -> Literal | None:
        """Return the value of a literal, or None for NULL. A column only takes literals of its own type."""
        from sqlglot import expressions as sql

        literal: Literal
        match node.unnest():
            case sql.Null():
                return None
            case sql.Boolean() as found:
                literal = bool(found.this)
            case sql.Literal(is_string=True):
                literal = self._text_of(node.unnest())
            case found:
                literal = self._number(found)
        type_ = COLUMNS.get(operand.column)
        if type_ is _Type.TIME and isinstance(literal, str):
            self._check_time(node, literal)
        elif type_ not in (None, _type_of(literal)):
            raise self._refused(node, f"is no {type_}, and the column {operand.column} is one")
        return literal

    def _text_of(self, node: SqlNode) -> str:
        from sqlglot import expressions as sql

        if not isinstance(node, sql.Literal) or not node.is_string:
            raise self._refused(node, "is no text")
        if "\\" in node.this:
            # Spark and other engines interpret it in one of two ways, depending on settings, so it is refused.
            raise self._refused(node, "has a backslash, which engines take differently", hint="Use LIKE with _ for it")
        return str(node.this)

    def _number(self, node: SqlNode) -> int | float:
        from sqlglot import expressions as sql

        sign = 1
        while isinstance(node, sql.Neg):
            sign, node = -sign, node.this.unnest()
        if not isinstance(node, sql.Literal) or node.is_string:
            raise self._refused(node, "is neither a text, a number, TRUE, FALSE nor NULL")
        is_whole = node.this.isdecimal()
        if not math.isfinite(float(node.this)):
            raise self._refused(node, "is too large for a number")
        return sign * (int(node.this) if is_whole else float(node.this))

    def _check_time(self, node: SqlNode, text: str) -> None:
        try:
            time_of(text)
        except ValueError:
            raise self._refused(node, "is no time", hint="Write one like '2026-11-18T06:00:00Z'") from None


_SHOWN_CHARS = 200
_OPERATORS = {"EQ": "=", "NEQ": "<>", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">="}
_TURNED = {
    Operator.EQUAL: Operator.EQUAL,
    Operator.OTHER: Operator.OTHER,
    Operator.LESS: Operator.GREATER,
    Operator.GREATER: Operator.LESS,
    Operator.LESS_OR_EQUAL: Operator.GREATER_OR_EQUAL,
    Operator.GREATER_OR_EQUAL: Operator.LESS_OR_EQUAL,
}
"""For a literal that precedes its name."""


def _has_only(node: SqlNode, *names: str) -> bool:
    """Whether a node has no other parts than these, so that none is ignored."""
    known = {"this", "expressions" if "expressions" in names else "expression", *names}
    return all(name in known for name, value in node.args.items() if value)


def _type_of(literal: Literal) -> _Type:
    if isinstance(literal, bool):
        return _Type.BOOLEAN
    return _Type.TEXT if isinstance(literal, str) else _Type.NUMBER


def time_of(text: str) -> datetime:
    """Parse a time in ISO 8601, in UTC if it names no zone; raises `ValueError` for anything else."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


@functools.cache
def _dialect() -> Any:
    """Return SQL with texts in single quotes (doubled inside) and names optionally in backticks or double quotes."""
    from sqlglot import tokens
    from sqlglot.dialects.dialect import Dialect

    class HeadwaterWhere(Dialect):
        class Tokenizer(tokens.Tokenizer):
            IDENTIFIERS = ['"', "`"]  # noqa: RUF012
            QUOTES = ["'"]  # noqa: RUF012
            STRING_ESCAPES = ["'"]  # noqa: RUF012

    return HeadwaterWhere


# --- in a task --------------------------------------------------------------------------------------------------------

_INT64 = np.iinfo(np.int64)
_COMPARE = {
    Operator.EQUAL: pc.equal,
    Operator.OTHER: pc.not_equal,
    Operator.LESS: pc.less,
    Operator.LESS_OR_EQUAL: pc.less_equal,
    Operator.GREATER: pc.greater,
    Operator.GREATER_OR_EQUAL: pc.greater_equal,
}


class _Judge:
    """Judges the rows of one batch."""

    def __init__(self, rows: Rows, conditions: Sequence[Condition]) -> None:
        self._rows = rows
        paths = {it.path for one in conditions for it in operands_of(one) if it.path}
        self._fields = _find_paths(rows, paths) if paths else {}
        self._numbers: dict[Operand, tuple[Any, ...]] = {}
        self._texts: dict[Operand, Any] = {}

    def truth(self, condition: Condition) -> Truth:
        match condition:
            case AllOf(parts):
                return functools.reduce(pc.and_kleene, map(self.truth, parts))
            case AnyOf(parts):
                return functools.reduce(pc.or_kleene, map(self.truth, parts))
            case Not(part):
                return pc.invert(self.truth(part))
            case IsNull(operand):
                values = self._fields.get(operand.path)
                return pc.is_null(self._column(operand)) if values is None else pa.array(~values.is_there)
            case IsMissing(operand):
                return pa.array(self._fields[operand.path].kinds == JsonKind.MISSING)
            case Like(operand, pattern):
                return pc.match_like(self._texts_of(operand), pattern)
            case Comparison(operand, operator, literal):
                return self._compared(operand, operator, literal)
            case OneOf(operand, literals, has_null):
                return self._one_of(operand, literals, has_null=has_null)

    def _unknown(self) -> Truth:
        return pa.nulls(self._rows.num_rows, pa.bool_())

    def _compared(self, operand: Operand, operator: Operator, literal: Literal) -> Truth:
        compare = _COMPARE[operator]
        if COLUMNS.get(operand.column) is _Type.TIME:
            return compare(self._column(operand), pa.scalar(time_of(str(literal)), _TIME))
        if isinstance(literal, bool):
            return compare(self._booleans_of(operand), literal)
        if isinstance(literal, str):
            return compare(self._texts_of(operand), literal)
        found = [
            compare(numbers, pa.scalar(literal, numbers.type))
            if _is_exact(literal, numbers.type)
            else compare(numbers.cast(pa.float64(), safe=False), float(literal))
            for numbers in self._numbers_of(operand)
        ]
        return pc.coalesce(*found)

    def _one_of(self, operand: Operand, literals: Iterable[Literal], *, has_null: bool) -> Truth:
        """Return what the comparisons with each of them, joined by OR, would."""
        by_type: dict[_Type, list[Literal]] = {}
        for literal in literals:
            by_type.setdefault(_type_of(literal), []).append(literal)
        found = [self._unknown()] if has_null else []
        for type_, group in by_type.items():
            if COLUMNS.get(operand.column) is _Type.TIME or type_ is _Type.BOOLEAN:
                found += [self._compared(operand, Operator.EQUAL, literal) for literal in group]
            elif type_ is _Type.TEXT:
                texts = self._texts_of(operand)
                found.append(_is_in(texts, pa.array(group, texts.type)))
            else:
                found.append(pc.coalesce(*(_is_number_in(numbers, group) for numbers in self._numbers_of(operand))))
        return functools.reduce(pc.or_kleene, found)

    # --- values of one type, null for those of others -----------------------------------------------------------------

    def _column(self, operand: Operand) -> Any:
        column = self._rows.column(operand.column)
        if operand.column == "key" and pa.types.is_binary(column.type):
            return split_keys(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)[0]
        return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column

    def _booleans_of(self, operand: Operand) -> Any:
        values = self._fields[operand.path]
        return pa.array(values.kinds == JsonKind.TRUE, mask=~values.is_one_of(*BOOLEANS))

    def _texts_of(self, operand: Operand) -> Any:
        if operand.column:
            return self._column(operand)
        if operand not in self._texts:
            values = self._fields[operand.path]
            self._texts[operand] = values.texts(values.is_one_of(*STRINGS))[0]
        return self._texts[operand]

    def _numbers_of(self, operand: Operand) -> tuple[Any, ...]:
        """Return whole numbers that fit signed 64 bits, and all others as doubles."""
        if operand.column:
            return (self._column(operand),)
        if operand not in self._numbers:
            values = self._fields[operand.path]
            whole, fits = values.integers()
            is_other = values.is_one_of(*NUMBERS) & ~fits
            found: tuple[Any, ...] = (pa.array(whole, mask=~fits),)
            if is_other.any():
                found += (cast_texts(values.texts(is_other)[0], pa.float64())[0],)
            self._numbers[operand] = found
        return self._numbers[operand]


_TIME = pa.timestamp("us", tz="UTC")


def _is_exact(literal: int | float, type_: pa.DataType) -> bool:
    """Whether whole numbers of a type can be compared with a literal in that type."""
    if not isinstance(literal, int) or not pa.types.is_integer(type_):
        return False
    bounds = np.iinfo(np.dtype(str(type_)))
    return int(bounds.min) <= literal <= int(bounds.max)


def _is_in(values: Any, wanted: pa.Array) -> Truth:
    """Whether each value is among the wanted ones; unknown for null."""
    return pc.if_else(pc.is_valid(values), pc.is_in(values, wanted), pa.scalar(None, pa.bool_()))


def _is_number_in(numbers: Any, literals: Sequence[Any]) -> Truth:
    if pa.types.is_floating(numbers.type):
        return _is_in(numbers, pa.array(map(float, literals), numbers.type))
    exact = [literal for literal in literals if _is_exact(literal, numbers.type)]
    others = [float(literal) for literal in literals if not _is_exact(literal, numbers.type)]
    found = _is_in(numbers, pa.array(exact, numbers.type))
    if not others:
        return found
    return pc.or_kleene(found, _is_in(numbers.cast(pa.float64(), safe=False), pa.array(others, pa.float64())))


def _find_paths(rows: Rows, paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], JsonValues]:
    """Return where the values of fields lie, by path. A value that is not an object has none."""
    texts, _ = split_values(rows.column("value"), np.asarray(rows.column("datatype").to_numpy()))
    texts = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    documents = pc.fill_null(texts, "")
    found: dict[tuple[str, ...], JsonValues] = {}

    def find(objects: JsonValues | None, above: tuple[str, ...], left: set[tuple[str, ...]]) -> None:
        names = sorted({path[0] for path in left})
        fields = find_fields(documents, names) if objects is None else find_members(objects, names)
        is_object = fields.forms == Form.OBJECT
        for number, name in enumerate(names):
            values, path = fields.values(number).where(is_object), (*above, name)
            found[path] = values
            if inside := {other[1:] for other in left if other[0] == name and len(other) > 1}:
                find(values, path, inside)

    find(None, (), {*paths})
    return found
