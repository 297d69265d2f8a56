"""Judging one group of vbuckets of all tables: the work of one task of `headwater verify`.

The bucket's stream of the group comes first, then `changes`, then the tables of each collection. What is kept of a row
are its hashes, so a task's memory is that of the group's rows, some sixty bytes each, and one row group of a file.

* `changes`: its newest versions that are not void are the documents of the bucket, at the offset that `changes` is at;
  and no seqno is alive twice.
* `documents`: its rows are the documents of the bucket, at the offset that the table is at. Typed columns say what the
  document beside them says.
* `rejects`: exactly the values of `documents` that do not fit the typed columns, each with its reason.
* `history`: its current rows are the documents of the bucket, at the offset that it is at. No two versions of a
  document hold at once, and its versions are those that `changes` has.

`verify` makes a `GroupCheck` for each group on the driver; what is wrong comes back as a `GroupReport`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.lake.change_rows import MUTATION, ROLLBACK, Barriers
from headwater.lake.data_files import DataFile, FileReader, filtered
from headwater.lake.layout import (
    FIELD,
    IS_CURRENT,
    LakeFacts,
    TableKind,
    changes_schema,
    documents_schema,
    history_schema,
    rejects_schema,
    table_name,
)
from headwater.lake.location import Location
from headwater.lake.typed_columns import TypedColumns
from headwater.lake.verify_hashes import HashedRows, Hashes, HashIndex, hash_changes, hash_documents, int64s, op_codes
from headwater.lake.verify_judging import (
    NO_END,
    SEQNO_BITS,
    BucketDocuments,
    BucketReading,
    Judged,
    LandedVersions,
    Numbers,
    Rejected,
    Standing,
    TypedCheck,
    Versions,
    by_id,
    ends_of,
    faults_of_validity,
    is_inside,
    judge,
    judge_rejects,
    stored_misfits,
    twice,
)
from headwater.lake.verify_scan import (
    FINDINGS_MAX,
    NOT_NAMED,
    Finding,
    FindingKind,
    Findings,
    ScannedRows,
    TableRows,
    TableScan,
    table_label,
)

# --- what is judged: all that a task needs, made on the driver --------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableCheck:
    """A table's part of a group: its live files, and how far it is."""

    location: Location
    files: tuple[DataFile, ...]
    standing: Standing
    merged: int
    """The last batch that is in it."""
    around: range = range(0)
    """The vbuckets that its files have rows of. Those of a table with fewer groups than the lake have rows of other
    groups as well, which are judged with these."""
    odd: frozenset[str] = frozenset()
    """Paths of files in groups that the table does not have: all of their rows are judged here."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CollectionCheck:
    """The tables of a collection, as far as they are there."""

    name: str
    ids: frozenset[int]
    columns: TypedColumns | None = None
    is_unparsed: bool = False
    """The documents wait to be parsed again, for other columns: neither those nor the rejects are judged."""
    documents: TableCheck | None = None
    history: TableCheck | None = None
    rejects: TableCheck | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupCheck:
    """All that is to be judged of a group."""

    facts: LakeFacts
    group: int
    changes: TableCheck
    collections: tuple[CollectionCheck, ...]
    live_ids: frozenset[int] | None = None
    """The collections that the bucket has, where that is known."""
    made_upto: int = -1
    """Collections with changes up to this batch have their tables."""
    is_trimmed: bool = False
    """Old rows of `changes` have been folded: what it lacks may have been there."""
    is_selection: bool = False
    """Other collections of `changes` than these are not looked at."""
    left_out: frozenset[int] = frozenset()
    """Vbuckets of which the bucket was not read to an end."""

    @property
    def vbuckets(self) -> range:
        return self.facts.vbuckets_of(self.group)

    @property
    def edges(self) -> tuple[float, float]:
        """The least and the highest vbucket whose rows are looked at. Rows of vbuckets that the bucket does not have
        are looked at with the first group and with the last."""
        first = float("-inf") if self.group == 0 else self.vbuckets.start
        return first, float("inf") if self.group == self.facts.groups - 1 else self.vbuckets.stop - 1

    def reading(self) -> BucketReading:
        """What the bucket's stream of the group is to be put into."""
        return BucketReading(self.vbuckets, xattrs=self.facts.xattrs)

    def leaving_out(self, vbuckets: frozenset[int]) -> GroupCheck:
        """The same, with nothing to be judged of some vbuckets."""
        if not vbuckets:
            return self
        here = [vbucket - self.vbuckets.start for vbucket in vbuckets]

        def rolled(table: TableCheck | None) -> TableCheck | None:
            return None if table is None else replace(table, standing=table.standing.also_rolled(here))

        return replace(
            self,
            changes=replace(self.changes, standing=self.changes.standing.also_rolled(here)),
            collections=tuple(
                replace(it, documents=rolled(it.documents), history=rolled(it.history)) for it in self.collections
            ),
            left_out=vbuckets,
        )


# --- what comes out ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """Of a collection."""

    landed: int = 0
    """Documents that are in the table of documents as they are in the bucket."""
    pending: int = 0
    """Changes in the bucket that are newer than what the table of documents holds."""
    differing: int = 0
    """Documents of which some table is wrong."""

    def add(self, other: Counts) -> None:
        self.landed += other.landed
        self.pending += other.pending
        self.differing += other.differing


@dataclass(slots=True)
class GroupReport:
    """What a task has found. It is small, whatever the group holds."""

    counts: dict[str, Counts] = field(default_factory=dict)
    """By collection."""
    findings: Findings = field(default_factory=Findings)
    rolled_back: set[int] = field(default_factory=set)
    """Vbuckets that were left out, since they lose changes again and again."""


def judge_group(check: GroupCheck, reading: BucketReading, changes: ScannedChanges) -> GroupReport:
    """Judge all tables by the bucket."""
    report = _Judging(check, reading, changes).run()
    for vbucket in sorted(check.left_out):
        report.rolled_back.add(vbucket)
        report.findings.add(
            Finding(
                kind=FindingKind.ROLLBACK_PENDING,
                table=table_label(TableKind.CHANGES),
                what=f"vbucket {vbucket}",
                says="lost changes to a failover each time that it was read; land again",
            )
        )
    return report


# --- changes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScannedChanges:
    """The rows of `changes` that are not void."""

    rows: TableRows
    """Of any kind, with vbuckets that the bucket does not have among them."""
    batches: Numbers
    rolled_back_at: Numbers
    """By vbucket of the group: the last batch that brought a rollback of it."""
    vbuckets: range

    @classmethod
    def read(cls, check: GroupCheck) -> ScannedChanges:
        """It takes long, and needs nothing of the bucket."""
        vbuckets, xattrs = check.vbuckets, check.facts.xattrs
        scan = TableScan(
            check.changes.location,
            table_label(TableKind.CHANGES),
            changes_schema(xattrs=xattrs),
            check.changes.files,
            Findings(),
        )
        first, last = check.edges

        def may_hold_ours(reader: FileReader, row_group: int) -> bool:
            low, high, _ = reader.range_of(row_group, "vbucket")
            return low <= last and high >= first

        parts: list[TableRows] = []
        batches = [np.zeros(0, dtype=np.int64)]
        rolled_back_at = np.full(len(vbuckets), -1, dtype=np.int64)
        for part in scan.read(may_hold_ours):
            homes, numbers = int64s(part.rows, "vbucket", null=-1), int64s(part.rows, "batch")
            # A rollback that another one made void counts as well: what it took back stays so.
            rollbacks = (op_codes(part.rows) == ROLLBACK) & is_inside(homes, vbuckets)
            np.maximum.at(rolled_back_at, homes[rollbacks] - vbuckets.start, numbers[rollbacks])
            kept = (homes >= first) & (homes <= last) & ~np.asarray(pc.fill_null(part.rows.column("void"), False))
            hashed = hash_changes(filtered(part.rows, kept), xattrs=xattrs)
            parts.append(TableRows(scan=scan, rows=hashed, locators=part.locators[kept]))
            batches.append(numbers[kept])
        return cls(
            rows=TableRows.joined(scan, parts),
            batches=np.concatenate(batches),
            rolled_back_at=rolled_back_at,
            vbuckets=vbuckets,
        )

    @property
    def ends(self) -> Barriers:
        """Of collections."""
        rows = self.rows.rows
        return ends_of(rows.of(is_inside(rows.vbuckets, self.vbuckets)), self.vbuckets)

    def documents(self) -> ScannedChanges:
        """The changes of documents."""
        ops = self.rows.rows.ops
        return self.of((ops >= MUTATION) & (ops < ROLLBACK))

    def of(self, chosen: Any) -> ScannedChanges:
        return replace(self, rows=self.rows.of(chosen), batches=self.batches[chosen])


# --- all tables -------------------------------------------------------------------------------------------------------


class _Judging:
    """One task at work."""

    def __init__(self, check: GroupCheck, reading: BucketReading, changes: ScannedChanges) -> None:
        self._check = check
        self._vbuckets = check.vbuckets
        self._reading = reading
        self._changes = changes
        self._ends = changes.ends
        known = {id_: collection.name for collection in check.collections for id_ in collection.ids}
        self._names = {**reading.names, **known}
        self._report = GroupReport(
            {collection.name: Counts() for collection in check.collections}, changes.rows.scan.findings
        )
        self._wrong: dict[str, list[Hashes]] = {}
        """By collection: the keys of documents of which some table is wrong."""

    def run(self) -> GroupReport:
        self._check_seqnos(self._changes.rows)
        changes = self._changes.documents()
        documents, ends = self._reading.finish()
        of_bucket, of_changes = self._by_collection(documents.ids), self._by_collection(changes.rows.rows.ids)
        collections = {collection.name: collection for collection in self._check.collections}
        # What the bucket has, or `changes`, and the log of `changes` has never named.
        for name in {*of_bucket, *(() if self._check.is_selection else of_changes)} - collections.keys():
            ids = frozenset(id_ for id_, named in self._names.items() if named == name)
            collections[name] = CollectionCheck(name=name, ids=ids)
        for name, collection in sorted(collections.items()):
            rows = documents.of(of_bucket.get(name, slice(0)))
            bucket = BucketDocuments.of(rows, ends, self._vbuckets, live_ids=self._check.live_ids)
            of_collection = changes.of(of_changes.get(name, slice(0)))
            self._judge_changes(collection, bucket, of_collection.rows)
            self._judge_documents(collection, bucket, of_collection.batches)
            if collection.history is not None:
                self._judge_history(collection, collection.history, bucket, of_collection)
        for name, keys in self._wrong.items():
            self._counts(name).differing = len(HashIndex.of_all(keys))
        return self._report

    def _by_collection(self, ids: Numbers) -> dict[str, Any]:
        """The rows of each collection, by number. Several ids may have had one name."""
        found: dict[str, Any] = {}
        for id_, chosen in by_id(ids):
            name = self._names.setdefault(id_, table_name(None, None, id_))
            found[name] = np.concatenate([found[name], chosen]) if name in found else chosen
        return found

    # --- what is found ------------------------------------------------------------------------------------------------

    def _counts(self, name: str) -> Counts:
        return self._report.counts.setdefault(name, Counts())

    def _found(self, collection: str, kind: FindingKind, rows: TableRows, says: str) -> None:
        if len(rows.rows):
            rows.report(kind, says)
            self._wrong.setdefault(collection, []).append(rows.rows.keys)

    def _missing(self, collection: str, label: str, rows: HashedRows, says: str) -> None:
        """What the bucket has, and a table lacks: it is named later."""
        found = [
            Finding(kind=FindingKind.MISSING, table=label, what=NOT_NAMED, says=says, vbucket=vbucket, seqno=seqno)
            for vbucket, seqno in zip(
                rows.vbuckets[:FINDINGS_MAX].tolist(), rows.seqnos[:FINDINGS_MAX].tolist(), strict=True
            )
        ]
        if found:
            self._report.findings.add(*found, count=len(rows))
            self._wrong.setdefault(collection, []).append(rows.keys)

    def _add_judged(self, collection: str, table: TableRows, bucket: BucketDocuments, judged: Judged) -> None:
        for kind, marks, says in (
            (FindingKind.DIFFERS, judged.differs, "is not as it is in the bucket"),
            (FindingKind.EXTRA, judged.is_extra, "is not in the bucket"),
            (FindingKind.TWICE, judged.is_twice, "is there twice"),
        ):
            self._found(collection, kind, table.of(marks), says)
        self._missing(collection, table.scan.label, bucket.rows.of(judged.missing), "is in the bucket, and not here")

    def _scan(
        self, kind: TableKind, name: str, schema: pa.Schema, table: TableCheck | None, *, added: Iterable[str] = ()
    ) -> TableScan:
        location = Location("") if table is None else table.location
        files = () if table is None else table.files
        return TableScan(location, table_label(kind, name), schema, files, self._report.findings, frozenset(added))

    def _rows_of(self, scan: TableScan, table: TableCheck | None) -> Iterator[ScannedRows]:
        """What is judged here of a table. Rows that are in no place of their own are judged with the first group."""
        own = self._vbuckets
        for part in scan.read():
            if table is None or table.around == own or part.file.path in table.odd:
                yield part
                continue
            homes = int64s(part.rows, "vbucket", null=-1)
            marks = is_inside(homes, own)
            if own.start == table.around.start:
                marks |= ~is_inside(homes, table.around)
            yield ScannedRows(part.file, filtered(part.rows, marks), part.locators[marks])

    # --- each table ---------------------------------------------------------------------------------------------------

    def _check_seqnos(self, rows: TableRows) -> None:
        """A seqno is one change, or one event. Rollbacks have the seqno of what they kept."""
        rows = rows.of(rows.rows.ops != ROLLBACK)
        again = rows.of(twice(rows.rows.vbuckets.astype(np.int64) << SEQNO_BITS | rows.rows.seqnos))
        says = "is there twice: another row has its seqno"
        for id_, chosen in by_id(again.rows.ids):
            if id_ < 0:
                # An event of a scope is no document's.
                again.of(chosen).report(FindingKind.TWICE, says)
            else:
                name = self._names.setdefault(id_, table_name(None, None, id_))
                self._found(name, FindingKind.TWICE, again.of(chosen), says)

    def _judge_changes(self, collection: CollectionCheck, bucket: BucketDocuments, rows: TableRows) -> None:
        """Fold what `changes` has, and compare what that leaves."""
        inside = is_inside(rows.rows.vbuckets, self._vbuckets)
        says = "is in a vbucket that the bucket does not have"
        self._found(collection.name, FindingKind.EXTRA, rows.of(~inside), says)
        rows = rows.of(inside)
        index = HashIndex(rows.rows.keys, rows.rows.seqnos)
        newest = rows.of(index.newest)
        ended = self._ends.seqnos(vbuckets=newest.rows.vbuckets, ids=newest.rows.ids)
        live = newest.of((newest.rows.ops == MUTATION) & (newest.rows.seqnos > ended))
        standing = self._check.changes.standing
        judged = judge(bucket, live.rows, standing, ids=collection.ids, landed_ends=self._ends)
        self._add_judged(collection.name, live, bucket, judged)
        if not self._check.is_trimmed:
            is_removal = ~bucket.is_live & (bucket.changed_at == bucket.rows.seqnos)
            removals = bucket.rows.of(is_removal & bucket.is_landed(standing))
            found = index.find(removals.keys)
            is_lost = found < 0
            is_lost[~is_lost] = rows.rows.seqnos[found[~is_lost]] != removals.seqnos[~is_lost]
            says = "was removed in the bucket, and its removal is not here"
            self._missing(collection.name, live.scan.label, removals.of(is_lost), says)

    # --- documents and rejects ----------------------------------------------------------------------------------------

    def _judge_documents(self, collection: CollectionCheck, bucket: BucketDocuments, batches: Numbers) -> None:
        table, counts = collection.documents, self._counts(collection.name)
        if table is None:
            counts.pending += len(bucket.rows)
            self._check_is_new(collection, batches)
            return
        xattrs, columns = self._check.facts.xattrs, collection.columns
        schema = documents_schema(xattrs=xattrs, typed=None if columns is None else columns.schema)
        added = columns.schema.names if columns is not None and columns.is_inferred else ()
        scan = self._scan(TableKind.DOCUMENTS, collection.name, schema, table, added=added)
        typed = TypedCheck(columns)
        parts: list[TableRows] = []
        for part in self._rows_of(scan, table):
            rows = TableRows(scan=scan, rows=hash_documents(part.rows, xattrs=xattrs), locators=part.locators)
            wrong = rows.of(typed.take(part.rows, part.locators))
            says = "has other values in its typed columns than in its document"
            self._found(collection.name, FindingKind.TYPED_COLUMN, wrong, says)
            parts.append(rows)
        rows = TableRows.joined(scan, parts)
        judged = judge(bucket, rows.rows, table.standing, ids=collection.ids, landed_ends=self._ends)
        self._add_judged(collection.name, rows, bucket, judged)
        counts.landed += int(judged.is_equal.sum())
        counts.pending += int(bucket.is_pending(table.standing).sum()) + int(judged.is_ending.sum())
        is_merging = collection.rejects is not None and collection.rejects.merged > table.merged
        if not is_merging and not collection.is_unparsed:
            # A merge that is under way commits the rejects before the documents.
            self._judge_rejects(collection, scan, typed.rejected)

    def _check_is_new(self, collection: CollectionCheck, batches: Numbers) -> None:
        """A table that is not there has to be one that is about to be made."""
        if (batches <= self._check.made_upto).any():
            label = table_label(TableKind.DOCUMENTS, collection.name)
            says = "is not there, and `changes` has changes of its collection; land again"
            kind = FindingKind.MISSING_TABLE
            self._report.findings.add(Finding(kind=kind, table=label, what="the table", says=says))

    def _judge_rejects(self, collection: CollectionCheck, documents: TableScan, expected: Rejected) -> None:
        schema = rejects_schema(with_field=collection.columns is None or not collection.columns.is_whole_row)
        scan = self._scan(TableKind.REJECTS, collection.name, schema, collection.rejects, added={FIELD.name})
        parts = self._rows_of(scan, collection.rejects)
        stored = Rejected.joined([stored_misfits(part.rows, part.locators) for part in parts])
        judged = judge_rejects(expected, stored)
        there = TableRows(scan=scan, rows=stored.rows, locators=stored.locators)
        for kind, rows, says in (
            (FindingKind.EXTRA, judged.extra, "has no such value that does not fit the typed columns"),
            (FindingKind.DIFFERS, judged.differing, "is not as it is in the documents, or for another reason"),
            (FindingKind.TWICE, judged.twice, "is there twice"),
        ):
            self._found(collection.name, kind, there.of(rows), says)
        lost = TableRows(scan=documents, rows=expected.rows, locators=expected.locators).of(judged.missing)
        if len(lost.rows):
            says = "does not fit the typed columns, and is not here"
            lost.report(FindingKind.MISSING, says, of_table=scan.label)
            self._wrong.setdefault(collection.name, []).append(lost.rows.keys)

    # --- history ------------------------------------------------------------------------------------------------------

    def _judge_history(
        self, collection: CollectionCheck, table: TableCheck, bucket: BucketDocuments, changes: ScannedChanges
    ) -> None:
        xattrs = self._check.facts.xattrs
        scan = self._scan(TableKind.HISTORY, collection.name, history_schema(xattrs=xattrs), table)
        versions = Versions.joined([self._versions(part) for part in self._rows_of(scan, table)])
        rows = TableRows(scan=scan, rows=versions.rows, locators=versions.locators)
        current = rows.of(versions.is_current)
        judged = judge(bucket, current.rows, table.standing, ids=collection.ids, landed_ends=self._ends)
        self._add_judged(collection.name, current, bucket, judged)
        for marks, says in faults_of_validity(versions):
            self._found(collection.name, FindingKind.VALIDITY, rows.of(marks), says)
        landed = LandedVersions(
            rows=changes.rows.rows,
            batches=changes.batches,
            merged=table.merged,
            is_open=changes.rolled_back_at > table.merged,
            vbuckets=self._vbuckets,
        )
        reported = HashIndex.of_all(
            [bucket.rows.keys[judged.missing], *(current.rows.keys[marks] for marks in judged.faults)]
        )
        lost = changes.rows.of(landed.lost(versions) & (reported.find(changes.rows.rows.keys) < 0))
        if len(lost.rows):
            lost.report(FindingKind.MISSING, "has a version in `changes` that is not here", of_table=scan.label)
            self._wrong.setdefault(collection.name, []).append(lost.rows.keys)
        if not self._check.is_trimmed:
            unknown = rows.of(landed.unknown(versions) & (reported.find(versions.rows.keys) < 0))
            self._found(collection.name, FindingKind.EXTRA, unknown, "has a version that `changes` does not have")

    def _versions(self, part: ScannedRows) -> Versions:
        is_current = dict(part.file.partition)[IS_CURRENT.name] == "true"
        return Versions(
            rows=hash_documents(part.rows, xattrs=self._check.facts.xattrs),
            locators=part.locators,
            ends=int64s(part.rows, "valid_to_seqno", null=NO_END),
            is_current=np.full(part.rows.num_rows, is_current, dtype=np.bool_),
        )
