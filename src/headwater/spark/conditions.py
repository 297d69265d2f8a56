"""Conditions on rows that `dcp` applies itself, so that what does not meet them is not read, or not handed to Spark.

They are on five columns, and all of them must hold. `vbucket` and `key` choose the vbuckets that are read, `scope` and
`collection` what the server sends of them (in a read that is no stream), and the tasks filter by the rest. They come
from the option `where`, as a text, and from Spark, which hands the filters of a query to a source (`pushFilters`).

Each is kept as the values that a column may have. That is all that `=` and `IN` need, and vbuckets have so few numbers
that `<` and `BETWEEN` can be written like this, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import vbucket_of
from headwater.client.read_options import ReadOptions
from headwater.protocol.numbers import VBucketId

TEXT_CHARS_MAX = 65_536
"""Of the option `where`."""
_VBUCKETS_MAX = 65_536
"""Their numbers have 16 bits."""
TEXT_COLUMNS = ("op", "scope", "collection", "key")

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<": int.__lt__,
    "<=": int.__le__,
    ">": int.__gt__,
    ">=": int.__ge__,
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """By column, the values that it may have. A column that is not named may have any. Null is none of them."""

    allowed: Mapping[str, frozenset[Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.allowed)

    def __and__(self, other: Conditions) -> Conditions:
        both = {name: self.allowed.get(name, values) & values for name, values in other.allowed.items()}
        return Conditions({**self.allowed, **both})

    @classmethod
    def one(cls, column: str, operator: str, values: Collection[Any]) -> Conditions | None:
        """A single condition; None for one that can't be applied here. `values` are one, or several for `IN`."""
        if operator in _COMPARISONS:
            (bound,) = values
            if column != "vbucket" or not _is_whole(bound):
                return None
            compare = _COMPARISONS[operator]
            return cls({column: frozenset(number for number in range(_VBUCKETS_MAX) if compare(number, bound))})
        is_fitting = _is_whole if column == "vbucket" else _is_text
        if column not in ("vbucket", *TEXT_COLUMNS) or operator not in ("=", "IN") or not all(map(is_fitting, values)):
            return None
        return cls({column: frozenset(values)})

    @classmethod
    def parse(cls, text: str) -> Conditions:
        """Conditions as SQL writes them, with `AND` between them; `ValueError` for anything else."""
        conditions = cls()
        at, end = 0, len(text.rstrip())
        if end > TEXT_CHARS_MAX:
            raise ValueError(text)
        while at < end:
            match = _CONDITION.match(text, at, end)
            found = None if match is None else _of_match(match)
            if match is None or found is None:
                raise ValueError(text)
            conditions &= found
            at = match.end()
            # Behind an AND there must be another condition.
            if (match["more"] is not None) == (at >= end):
                raise ValueError(text)
        return conditions

    # --- what is read -------------------------------------------------------------------------------------------------

    def vbuckets(self, count: int) -> list[VBucketId] | None:
        """Those of `count` vbuckets that can hold such rows; None for all.

        A document is in the vbucket that its key hashes to: clients look for it nowhere else.
        """
        chosen = set(range(count))
        if "vbucket" in self.allowed:
            chosen &= self.allowed["vbucket"]
        keys = self.allowed.get("key")
        if keys is not None and not any(map(may_be_escaped, keys)):
            chosen &= {int(vbucket_of(key.encode(), count)) for key in keys}
        return None if len(chosen) == count else [VBucketId(vbucket) for vbucket in sorted(chosen)]

    def selection(self, options: ReadOptions, view: BucketView, ids: Collection[int]) -> ReadOptions | None:
        """The options for a server that leaves other collections out; None where nothing is left to be read.

        `ids` are the collections that the options select by themselves, where they do.
        """
        scopes, collections = self.allowed.get("scope"), self.allowed.get("collection")
        if scopes is None and collections is None:
            return options
        is_of_all = not options.scopes and not options.collections
        wanted = tuple(
            f"{scope.name}.{held.name}"
            for scope, held in view.manifest.collections()
            if (is_of_all or held.id in ids)
            and (scopes is None or scope.name in scopes)
            and (collections is None or held.name in collections)
        )
        if not view.has_collections:
            return options if wanted else None
        if is_of_all and collections is None:
            # Whole scopes: their own events do not come with their collections.
            there = tuple(scope.name for scope in view.manifest.scopes if scopes is None or scope.name in scopes)
            return replace(options, scopes=there) if there else None
        return replace(options, scopes=(), collections=wanted) if wanted else None


def may_be_escaped(key: str) -> bool:
    """Whether a text in the column `key` may stand for bytes that are no text, which are shown with escapes."""
    return "\\" in key


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# --- as a text --------------------------------------------------------------------------------------------------------

# What Spark may take in two ways, by its settings, is taken in none: escapes and doubled quotes in a text.
_LITERAL = r"(?:'[^'\\]*'(?!')|-?[0-9]{1,9}\b)"
_CONDITION = re.compile(
    rf"""\s*(?P<column>[a-z]+)\s*(?:
        (?P<operator>=|<=|>=|<|>)\s*(?P<value>{_LITERAL})
        | \bIN\s*\(\s*(?P<values>{_LITERAL}(?:\s*,\s*{_LITERAL})*)\s*\)
        | \bBETWEEN\s+(?P<least>{_LITERAL})\s+AND\s+(?P<most>{_LITERAL})
    )(?P<more>\s+AND\b)?\s*""",
    re.IGNORECASE | re.VERBOSE,
)
_LITERALS = re.compile(_LITERAL)


def _of_match(match: re.Match[str]) -> Conditions | None:
    column = match["column"].lower()
    if match["least"] is not None:
        above = Conditions.one(column, ">=", _literals(match["least"]))
        below = Conditions.one(column, "<=", _literals(match["most"]))
        return None if above is None or below is None else above & below
    if match["values"] is not None:
        return Conditions.one(column, "IN", _literals(match["values"]))
    return Conditions.one(column, match["operator"], _literals(match["value"]))


def _literals(text: str) -> list[str | int]:
    return [found[1:-1] if found.startswith("'") else int(found) for found in _LITERALS.findall(text)]
