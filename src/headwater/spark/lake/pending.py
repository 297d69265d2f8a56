"""What of `changes` is not merged yet, counted by table and group: merges are planned by these numbers.

The counts follow the commits. When a lake is opened they are taken from `changes` once, out of a few columns of the
files that may hold something unmerged. They need not be exact: what a merge does is decided by the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from headwater.spark.lake.change_files import COLLECTION_GONE, ROLLBACK, ChangeReport
from headwater.spark.lake.data_files import DataFile, numbers, read_files
from headwater.spark.lake.layout import LakeFacts, TablePlace

_COLUMNS = ("vbucket", "collection_id", "op", "batch")
_EVERY_TABLE = -1


@dataclass(slots=True)
class Pending:
    """Changes that wait to be merged."""

    rows: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(table, group) → changes of documents."""
    urgent: set[tuple[str, int]] = field(default_factory=set)
    """(table, group) where it can't wait: documents may have to go, or to come back."""
    since_s: dict[str, float | None] = field(default_factory=dict)
    """By table: nothing that was written before this time is pending, as far as that is known."""

    @property
    def names(self) -> set[str]:
        """The tables that have something pending."""
        return {name for name, _ in [*self.rows, *self.urgent]}

    def add(self, report: ChangeReport, names: Mapping[int, str], facts: LakeFacts, *, since_s: float | None) -> None:
        """Count what a batch has brought. `names` has the tables by collection id, those of the batch among them;
        `since_s` is the time that the tables held everything of before the batch."""
        before = self.names
        for (id_, group), count in report.document_rows.items():
            self.rows[names[id_], group] += count
        self.urgent |= {(names[id_], group) for id_, group in report.collections_gone}
        rolled = {int(facts.group_of(vbucket)) for vbucket in report.rollbacks}
        self.urgent |= {(name, group) for name in set(names.values()) for group in rolled}
        for name in self.names - before:
            self.since_s.setdefault(name, since_s)

    def has(self, name: str, group: int) -> bool:
        return self.rows[name, group] > 0 or (name, group) in self.urgent

    def forget(self, name: str) -> None:
        """It has been merged."""
        for counted in [key for key in self.rows if key[0] == name]:
            del self.rows[counted]
        self.urgent = {key for key in self.urgent if key[0] != name}
        self.since_s.pop(name, None)


def count_pending(
    place: TablePlace,
    files: Iterable[DataFile],
    facts: LakeFacts,
    names: Mapping[int, str],
    merged_at: Callable[[str, int], int],
) -> Pending:
    """Count what lies behind the batch that each table and group was merged at."""
    pending = Pending()
    least = min((merged_at(name, group) for name in set(names.values()) for group in range(facts.groups)), default=-1)
    waiting = [file for file in files if file.may_hold("batch", low=least + 1)]
    for _, rows in read_files(place, waiting, _COLUMNS):
        for id_, group, op, batch, count in _counts(rows, facts):
            tables = set(names.values()) if id_ == _EVERY_TABLE else {names[id_]} if id_ in names else set()
            for name in tables:
                if batch <= merged_at(name, group):
                    continue
                if op == ROLLBACK or op in COLLECTION_GONE:
                    pending.urgent.add((name, group))
                elif id_ != _EVERY_TABLE:
                    pending.rows[name, group] += count
    return pending


def _counts(rows: pa.Table, facts: LakeFacts) -> Iterator[tuple[int, int, str, int, int]]:
    """How often each collection, group, operation and batch is there together."""
    counted = pa.table(
        {
            "id": numbers(rows, "collection_id", null=_EVERY_TABLE),
            "group": facts.group_of(numbers(rows, "vbucket").astype(np.int64)),
            "op": rows.column("op").cast(pa.string()),
            "batch": rows.column("batch"),
        }
    )
    grouped = counted.group_by(["id", "group", "op", "batch"], use_threads=False).aggregate([([], "count_all")])
    for row in grouped.to_pylist():
        yield row["id"], row["group"], row["op"], row["batch"], row["count_all"]
