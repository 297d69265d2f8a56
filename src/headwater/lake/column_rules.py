"""Rules for inferred columns: which fields get one, under which name, and where values go that it can't hold.

Patterns match the names of fields, as the documents have them. `*` stands for any text and `?` for one character; in a
rename, `*` stands for the same text in the new name. A field that no rename matches keeps its name. If two fields would
get the same name, the one that appeared first has the column, and the other is in the document only.

A table keeps its rules in a property. Rules that are not given stay as they are; when the rules change, the table's
documents are parsed again, once. `typed_columns` applies the rules.
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
"""The maximum per rule. Each pattern is tried with the name of each field."""
RESERVED = frozenset({*documents_schema(xattrs=False).names, XATTRS.name, GROUP.name})
"""The names of the tables' own columns."""


class OnMismatch(StrEnum):
    """Where a value goes whose type differs from its column's."""

    REJECT = "reject"
    """Nowhere: its column is null, and the table of rejects lists it."""
    COLUMN = "column"
    """Into a text column beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRules:
    """The rules for a table's inferred columns. A rule that is None leaves the table's own rule as it is."""

    on_mismatch: OnMismatch | str | None = None
    """By default such a value is rejected."""
    include: Sequence[str] | None = None
    """Patterns of fields: only these get columns. By default all do."""
    exclude: Sequence[str] | None = None
    """Patterns of fields that get no columns."""
    rename: Sequence[Sequence[str]] | None = None
    """Patterns of fields, and the names of their columns. The first that matches counts."""

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
        """Return the name of the column that a field may have, or None if it gets no column."""
        if not self._is_chosen(field):
            return None
        for old, new in self.rename or ():
            if (match := _regex(old).fullmatch(field)) is not None:
                return new.replace("*", match[1]) if "*" in new else new
        # A name that a rename gives to another field is taken, even if this field appears first.
        return None if any(field.lower() == new.lower() for _, new in self.rename or ()) else field

    @property
    def has_columns_beside(self) -> bool:
        return self.on_mismatch == OnMismatch.COLUMN

    def with_asked(self, asked: ColumnRules) -> ColumnRules:
        """Return these rules, with those that `asked` gives in their place."""
        return replace(self, **{name: value for name, value in asdict(asked).items() if value is not None})

    @property
    def text(self) -> str:
        """The rules in the form that a table keeps, without defaults. Equivalent rules have equal texts."""
        said = {name: value for name, value in asdict(self).items() if value and value != OnMismatch.REJECT}
        return json.dumps(said, sort_keys=True) if said else ""

    @classmethod
    def from_text(cls, text: str | None) -> ColumnRules:
        """Parse `text`. Raises `ValueError` if it did not come from here."""
        said = json.loads(text) if text else {}
        if not isinstance(said, dict) or not said.keys() <= {it.name for it in fields(cls)}:
            raise ValueError(f"{text!r} are no rules of columns")
        return cls(**said)


@lru_cache(maxsize=8 * PATTERNS_MAX)
def _regex(pattern: str) -> re.Pattern[str]:
    """Compile a pattern, with a regex group for each `*`."""
    return re.compile("".join({"*": "(.*)", "?": "."}.get(char) or re.escape(char) for char in pattern), re.DOTALL)


def rules_of(table: str, rules: Mapping[str, ColumnRules]) -> ColumnRules:
    """Return the rules for a table: its own rules take precedence over those for all tables."""
    of_all, of_one = (rules.get(name, ColumnRules()) for name in (EVERY_COLLECTION, table))
    return of_all.with_asked(of_one)


def choose_rules(**said: Mapping[str, str]) -> dict[str, ColumnRules]:
    """Parse a user's rules, given as texts by rule and table. Commas separate patterns; a rename is `old AS new`."""
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
