"""Rules for the columns that are inferred: what a user asks for beyond the fields that come up.

A table keeps its rules in a property. What is not asked for stays as it is; where the rules change, the documents of
the table are parsed again, once. `typed_columns` applies them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum

from headwater.errors import InvalidColumns
from headwater.lake.layout import EVERY_COLLECTION


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

    def __post_init__(self) -> None:
        if self.on_mismatch is not None and self.on_mismatch not in {*OnMismatch}:
            raise InvalidColumns(
                f"{self.on_mismatch!r} says nothing of values of another type", hint=f"Use {' or '.join(OnMismatch)}"
            )

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


def rules_of(table: str, rules: Mapping[str, ColumnRules]) -> ColumnRules:
    """What is asked for of a table: for all, and beyond that for this one."""
    of_all, of_one = (rules.get(name, ColumnRules()) for name in (EVERY_COLLECTION, table))
    return of_all.with_asked(of_one)
