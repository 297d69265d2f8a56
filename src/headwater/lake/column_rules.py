"""Rules for the columns that are inferred: which fields get one, under which name, and where values go that it can't
hold.

Patterns are on the names of fields, as the documents have them. `*` stands for any text and `?` for one character; in a
rename, `*` stands for the same text in the new name. A field that no rename names keeps its name. Where two fields come
to one name, the one that came up first has the column, and the other is in the document only.

A table keeps its rules in a property. What is not asked for stays as it is; where the rules change, the documents of
the table are parsed again, once. `typed_columns` applies them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from headwater.errors import InvalidColumns
from headwater.lake.column_values import NAME_BYTES_MAX, is_column_name
from headwater.lake.layout import EVERY_COLLECTION, FEED_COLUMNS, GROUP, XATTRS, documents_schema

PATTERNS_MAX = 256
"""Of one rule. Each is tried with the name of each field."""
RESERVED = frozenset({*documents_schema(xattrs=False).names, XATTRS.name, GROUP.name})
"""The names of the tables' own columns."""


class OnMismatch(StrEnum):
    """Where a value goes that is of another type than its column."""

    REJECT = "reject"
    """Nowhere: its column is null, and the table of rejects lists it."""
    COLUMN = "column"
    """Into a column of texts beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRules:
    """What is asked for of the columns of a table. None leaves a table as it is."""

    on_mismatch: OnMismatch | str | None = None
    """By default a value is rejected."""
    include: Sequence[str] | None = None
    """Patterns of fields: no others get columns. Without any, all do."""
    exclude: Sequence[str] | None = None
    """Patterns of fields that get no columns."""
    rename: Sequence[Sequence[str]] | None = None
    """Patterns of fields, and the names of their columns. The first that fits counts."""

    def __post_init__(self) -> None:
        if self.on_mismatch is not None and self.on_mismatch not in {*OnMismatch}:
            raise InvalidColumns(
                f"{self.on_mismatch!r} is not a rule for values of another type", hint=f"Use {' or '.join(OnMismatch)}"
            )
        for patterns in (self.include, self.exclude, [old for old, _ in self.rename or ()]):
            if len(patterns or ()) > PATTERNS_MAX:
                raise InvalidColumns(
                    f"a rule has more than {PATTERNS_MAX} patterns of fields", hint="Use * for several fields"
                )
            for pattern in patterns or ():
                if not pattern or len(pattern.encode()) > NAME_BYTES_MAX:
                    raise InvalidColumns(
                        f"{pattern!r} is not a pattern of field names",
                        hint=f"Name fields, with * for any text, in up to {NAME_BYTES_MAX} bytes: total, addr_*",
                    )
        self._check_renames()

    def _check_renames(self) -> None:
        seen: dict[str, str] = {}
        for old, new in self.rename or ():
            stars, is_pattern = old.count("*"), bool({*"*?"} & {*old})
            plain = new.replace("*", "x")
            if not is_column_name(plain) or "?" in new or ("*" in new and (stars != 1 or new.count("*") != 1)):
                raise InvalidColumns(
                    f"{old!r} can't be renamed to {new!r}",
                    hint="Write old AS new. Where new has a *, old has one as well; and a name has no space and none "
                    "of ,;{}()=",
                )
            if new.lower() in RESERVED or new.lower() in FEED_COLUMNS:
                raise InvalidColumns(
                    f"{old!r} can't be renamed to {new!r}: the table has a column of its own with that name",
                    hint="Choose another name",
                )
            if old == new or (not is_pattern and not self._is_chosen(old)):
                why = "has that name already" if old == new else "gets no column"
                raise InvalidColumns(f"{old!r} AS {new!r} renames nothing: it {why}", hint="Omit this rename")
            if (before := seen.get(new.lower())) is not None or (is_pattern and "*" not in new):
                both = f"{old!r} and {before!r}" if before is not None else f"all fields like {old!r}"
                raise InvalidColumns(f"two columns would have the name {new!r}: {both}", hint="Choose another name")
            seen[new.lower()] = old

    def _is_chosen(self, field: str) -> bool:
        is_included = not self.include or any(_regex(pattern).fullmatch(field) for pattern in self.include)
        return is_included and not any(_regex(pattern).fullmatch(field) for pattern in self.exclude or ())

    def column_of(self, field: str) -> str | None:
        """The name of the column that a field may have; None where it gets none."""
        if not self._is_chosen(field):
            return None
        for old, new in self.rename or ():
            if (match := _regex(old).fullmatch(field)) is not None:
                return new.replace("*", match[1]) if "*" in new else new
        # A name that was given to another field is taken, whichever of the two comes up first.
        return None if any(field.lower() == new.lower() for _, new in self.rename or ()) else field

    @property
    def has_columns_beside(self) -> bool:
        return self.on_mismatch == OnMismatch.COLUMN

    def with_asked(self, asked: ColumnRules) -> ColumnRules:
        """These, but for what is asked for."""
        return replace(self, **{name: value for name, value in asdict(asked).items() if value is not None})

    @property
    def text(self) -> str:
        """As a table keeps them, without what holds anyway. Rules that come to the same have one text."""
        said = {name: value for name, value in asdict(self).items() if value and value != OnMismatch.REJECT}
        return json.dumps(said, sort_keys=True) if said else ""

    @classmethod
    def from_text(cls, text: str | None) -> ColumnRules:
        """Raises `ValueError` for what no table has got from here."""
        said = json.loads(text) if text else {}
        if not isinstance(said, dict) or not said.keys() <= {it.name for it in fields(cls)}:
            raise ValueError(f"{text!r} are no rules of columns")
        return cls(**said)


@lru_cache(maxsize=8 * PATTERNS_MAX)
def _regex(pattern: str) -> re.Pattern[str]:
    """Of a pattern: a group for each `*`."""
    return re.compile("".join({"*": "(.*)", "?": "."}.get(char) or re.escape(char) for char in pattern), re.DOTALL)


def rules_of(table: str, rules: Mapping[str, ColumnRules]) -> ColumnRules:
    """What is asked for of a table: for all, and beyond that for this one."""
    of_all, of_one = (rules.get(name, ColumnRules()) for name in (EVERY_COLLECTION, table))
    return of_all.with_asked(of_one)


def choose_rules(**said: Mapping[str, str]) -> dict[str, ColumnRules]:
    """What a user says of the rules, by table: each as a text. Patterns have commas between them, and a rename is
    `old AS new`."""
    found: dict[str, dict[str, Any]] = {}
    for name, texts in said.items():
        for table, text in texts.items():
            found.setdefault(table, {})[name] = _choose(name, text)
    return {table: ColumnRules(**rules) for table, rules in found.items()}


def _choose(name: str, text: str) -> Any:
    if name == "on_mismatch":
        return text
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if name != "rename":
        return parts
    renames = [re.split(r"\s+as\s+", part, flags=re.IGNORECASE) for part in parts]
    if wrong := next((part for part, names in zip(parts, renames, strict=True) if len(names) != 2), None):
        raise InvalidColumns(f"{wrong!r} is not a rename", hint="Write old AS new, such as custId AS customer_id")
    return renames
