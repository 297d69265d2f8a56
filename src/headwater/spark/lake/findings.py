"""What `headwater verify` finds: what is wrong, in which table, and with what, each in one plain sentence.

Of each kind and table the first few are kept, with the number of all of them. So a report is small, however much of a
table is wrong, and can be carried from an executor to the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headwater.spark.lake.layout import TableKind

FINDINGS_MAX = 20
"""Of one kind in one table that are kept."""
NOT_NAMED = "a document"
"""What a finding calls a document that only the bucket has, until its key has been looked up."""


class FindingKind(StrEnum):
    """What is wrong with it."""

    MISSING = "missing"
    """A document, a change or a version that the table has to hold."""
    EXTRA = "extra"
    """One that it must not hold."""
    DIFFERS = "differs"
    TWICE = "twice"
    TYPED_COLUMN = "typed column"
    """A typed column does not hold what the document says."""
    VALIDITY = "validity"
    """A version is current and has ended, or neither, or two of them hold at once."""
    MISSING_TABLE = "missing table"
    MISSING_FILE = "missing file"
    DAMAGED_FILE = "damaged file"
    DAMAGED_LOG = "damaged log"
    """The log of the table can't be read, so it is not known what belongs to the table."""
    ROLLBACK_PENDING = "rollback pending"
    """A failover took back changes that the table holds."""


_REPORTED_AGAIN = frozenset({FindingKind.MISSING_FILE, FindingKind.DAMAGED_FILE, FindingKind.MISSING_TABLE})
"""What is found by every task that meets it. There are few of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    table: str
    """Such as `changes` or `documents/shop.orders`."""
    what: str
    """A key, a file, or a vbucket."""
    says: str
    """The rest of the sentence."""
    vbucket: int | None = None
    seqno: int | None = None
    file: str | None = None
    """That holds it, from the table's directory on."""
    engine: str | None = None
    """What has written that file, where it was not Headwater."""

    @property
    def sentence(self) -> str:
        places = [
            f"{name} {value}"
            for name, value in (("vbucket", self.vbucket), ("seqno", self.seqno), ("file", self.file))
            if value is not None
        ]
        if self.engine is not None:
            places.append(f"rewritten by another engine, {self.engine}")
        where = f" ({', '.join(places)})" if places else ""
        return f"{self.table}: {self.what} {self.says}{where}"


def table_label(kind: TableKind, name: str | None = None) -> str:
    return str(kind) if name is None else f"{kind}/{name}"


@dataclass(slots=True)
class Findings:
    """Findings of any number, and the first of each kind and table."""

    kept: dict[tuple[FindingKind, str], list[Finding]] = field(default_factory=dict)
    counts: Counter[tuple[FindingKind, str]] = field(default_factory=Counter)

    def add(self, *found: Finding, count: int | None = None) -> None:
        """Take in some of one kind and table; `count` is how many there are, where these are the first only."""
        for one in found:
            self._keep(one)
        if found:
            self.counts[found[0].kind, found[0].table] += len(found) if count is None else count

    def merge(self, others: Findings) -> None:
        """Take in those of another report."""
        self.counts += others.counts
        for place, found in others.kept.items():
            for one in found:
                if one.kind in _REPORTED_AGAIN and any(one.what == known.what for known in self.kept.get(place, ())):
                    self.counts[place] -= 1
                else:
                    self._keep(one)

    def name(self, keys: Mapping[tuple[int, int], str]) -> None:
        """Put the keys of documents in, by vbucket and seqno, into those that have none yet."""

        def named(one: Finding) -> Finding:
            if one.what != NOT_NAMED or one.vbucket is None or one.seqno is None:
                return one
            return replace(one, what=keys.get((one.vbucket, one.seqno), NOT_NAMED))

        for place, found in self.kept.items():
            self.kept[place] = [named(one) for one in found]

    def _keep(self, finding: Finding) -> None:
        kept = self.kept.setdefault((finding.kind, finding.table), [])
        # What is reported again is kept until the last task has reported: else it would be counted twice.
        if len(kept) < FINDINGS_MAX or finding.kind in _REPORTED_AGAIN:
            kept.append(finding)

    def first(self) -> tuple[Finding, ...]:
        """In the order of the kinds, and no more than so many of each kind and table."""
        places = sorted(self.kept, key=lambda place: (_ORDER[place[0]], place[1]))
        return tuple(one for place in places for one in self.kept[place][:FINDINGS_MAX])


_ORDER = {kind: number for number, kind in enumerate(FindingKind)}
