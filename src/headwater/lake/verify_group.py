"""Judging one group of vbuckets of all tables: the work of one task of `headwater verify`.

The bucket's stream of the group comes first, then `changes`, then the tables of each collection. A task keeps only the
hashes of rows, so its memory is some sixty bytes for each row of the group, and one row group of a file.

* `changes`: its newest versions that are not void are the documents of the bucket, at the offset of `changes`; no seqno
  is alive twice; and the record is possible (`verify_changes`).
* `documents`: its rows are the documents of the bucket, at the table's offset, and those that result from `changes`.
  Typed columns equal what the document beside them contains.
* `rejects`: exactly the values of `documents` that do not fit the typed columns, each with its reason.
* `history`: its current rows are the documents of the bucket, at the history's offset. Its versions are those in
  `changes`, and are valid as long as it says (`verify_changes`). Typed columns equal what the document contains.

`verify` makes a `GroupCheck` for each group on the driver; a `GroupReport` returns what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.lake.change_rows import MUTATION, ROLLBACK, Barriers
from headwater.lake.column_rules import OnMismatch
from headwater.lake.data_files import DataFile, filtered
from headwater.lake.layout import (
    FIELD,
    GROUP,
    IS_CURRENT,
    LakeFacts,
    TableKind,
    documents_schema,
    history_schema,
    rejects_schema,
    table_name,
)
from headwater.lake.location import Location
from headwater.lake.typed_columns import TypedColumns
from headwater.lake.variants import document_texts
from headwater.lake.verify_changes import NO_END, ChangesRecord, LandedVersions, ScannedChanges, Versions, judge_record
from headwater.lake.verify_hashes import NO_TIME, HashedRows, Hashes, HashIndex, Marks, hash_documents, int64s
from headwater.lake.verify_judging import (
    SEQNO_BITS,
    BucketDocuments,
    BucketReading,
    Judged,
    Numbers,
    Rejected,
    Standing,
    TypedCheck,
    are_typed_otherwise,
    by_id,
    is_inside,
    judge,
    judge_rejects,
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

# --- the input of a task, made on the driver --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableCheck:
    """A table's part of a group: its live files, and its offsets."""

    location: Location
    files: tuple[DataFile, ...]
    standing: Standing
    merged: int
    """The last batch that is in it."""
    groups: int = 1
    """Of the table, by which it is partitioned."""
    owned: frozenset[str] | None = None
    """The paths of files whose statistics are judged with this group; None for all."""
    around: range = range(0)
    """The vbuckets whose rows its files have. Files of a table with fewer groups than the lake also have rows of other
    groups, which are judged with those."""
    odd: frozenset[str] = frozenset()
    """Paths of files in groups that the table does not have: all of their rows are judged here."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CollectionCheck:
    """The existing tables of a collection."""

    name: str
    ids: frozenset[int]
    columns: TypedColumns | None = None
    history_columns: TypedColumns | None = None
    has_all_typed: bool = False
    """Whether every version in the history has its values in the typed columns."""
    is_unparsed: bool = False
    """Whether the documents wait to be parsed for other columns: then typed columns and rejects are not judged."""
    documents: TableCheck | None = None
    history: TableCheck | None = None
    rejects: TableCheck | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupCheck:
    """Everything to judge in a group."""

    facts: LakeFacts
    group: int
    changes: TableScan
    """The files of `changes` that may hold rows of the group."""
    collections: tuple[CollectionCheck, ...]
    made_upto: int = -1
    """Collections with changes up to this batch must have their tables."""
    record: ChangesRecord
    """What the rows of `changes` are judged by."""
    is_selection: bool = False
    """Whether other collections in `changes` are ignored."""
    left_out: frozenset[int] = frozenset()
    """Vbuckets that could not be read to an end from the bucket."""

    @property
    def vbuckets(self) -> range:
        return self.facts.vbuckets_of(self.group)

    @staticmethod
    def edges_of(facts: LakeFacts, group: int) -> tuple[float, float]:
        """Return the lowest and the highest vbucket whose rows this group judges. Rows in vbuckets that the bucket does
        not have are judged with the first group and with the last."""
        first = float("-inf") if group == 0 else facts.vbuckets_of(group).start
        return first, float("inf") if group == facts.groups - 1 else facts.vbuckets_of(group).stop - 1

    def reading(self) -> BucketReading:
        """Return the object that takes the bucket's stream of the group."""
        return BucketReading(self.vbuckets, xattrs=self.facts.xattrs, form=self.facts.document)

    def leaving_out(self, vbuckets: frozenset[int]) -> GroupCheck:
        """Return the same check without some vbuckets."""
        if not vbuckets:
            return self
        here = [vbucket - self.vbuckets.start for vbucket in vbuckets]

        def rolled(table: TableCheck | None) -> TableCheck | None:
            return None if table is None else replace(table, standing=table.standing.also_rolled(here))

        return replace(
            self,
            record=replace(self.record, standing=self.record.standing.also_rolled(here)),
            collections=tuple(
                replace(it, documents=rolled(it.documents), history=rolled(it.history)) for it in self.collections
            ),
            left_out=vbuckets,
        )


# --- the output of a task ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """The counts of a collection."""

    landed: int = 0
    """Documents that are equal in the bucket and in the table of documents."""
    pending: int = 0
    """Changes in the bucket that are newer than the table of documents."""
    differing: int = 0
    """Documents that are wrong in some table."""
    pending_since_us: int | None = None
    """When the oldest pending change was made."""

    def add(self, other: Counts) -> None:
        self.landed += other.landed
        self.pending += other.pending
        self.differing += other.differing
        known = [it for it in (self.pending_since_us, other.pending_since_us) if it is not None]
        self.pending_since_us = min(known, default=None)


@dataclass(slots=True)
class GroupReport:
    """The findings of a task. It is small, whatever the group holds."""

    counts: dict[str, Counts] = field(default_factory=dict)
    """By collection."""
    findings: Findings = field(default_factory=Findings)
    rolled_back: set[int] = field(default_factory=set)
    """Vbuckets that were left out because failovers interrupted every read."""
    change_rows: int = 0
    """Rows of `changes` in the vbuckets of the group that were landed, void or not."""


def scan_changes(check: GroupCheck) -> ScannedChanges:
    """Read the rows of `changes`. This takes long, but needs nothing from the bucket."""
    scan, edges = replace(check.changes, findings=Findings(), engines={}), GroupCheck.edges_of(check.facts, check.group)
    return ScannedChanges.read(scan, check.record, check.vbuckets, edges, facts=check.facts)


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


# --- all tables -------------------------------------------------------------------------------------------------------


class _Judging:
    """The state of one task."""

    def __init__(self, check: GroupCheck, reading: BucketReading, changes: ScannedChanges) -> None:
        self._check = check
        self._vbuckets = check.vbuckets
        self._reading = reading
        inside = changes.inside()
        self._changes_read = len(inside) - int(_is_own_rollback(inside).sum())
        self._strangers = changes.of(~is_inside(changes.vbuckets, check.vbuckets) & ~changes.void)
        self._changes = judge_record(inside, check.record)
        self._ends = self._changes.ends
        known = {id_: collection.name for collection in check.collections for id_ in collection.ids}
        self._names = {**reading.names, **known}
        self._report = GroupReport(
            {collection.name: Counts() for collection in check.collections},
            changes.scan.findings,
            change_rows=self._changes_read,
        )
        self._wrong: dict[str, list[Hashes]] = {}
        """By collection: the keys of documents that are wrong in some table."""

    def run(self) -> GroupReport:
        self._check_seqnos(self._changes)
        self._judge_strangers()
        changes = self._changes.documents()
        documents, ends = self._reading.finish()
        of_bucket, of_changes = self._by_collection(documents.ids), self._by_collection(changes.ids)
        collections = {collection.name: collection for collection in self._check.collections}
        # Collections in the bucket or in `changes` that the log of `changes` has never named.
        for name in {*of_bucket, *(() if self._check.is_selection else of_changes)} - collections.keys():
            ids = frozenset(id_ for id_, named in self._names.items() if named == name)
            collections[name] = CollectionCheck(name=name, ids=ids)
        for name, collection in sorted(collections.items()):
            rows = documents.of(of_bucket.get(name, slice(0)))
            bucket = BucketDocuments.of(rows, ends, self._vbuckets, live_ids=self._check.record.live_ids)
            of_collection = changes.of(of_changes.get(name, slice(0)))
            self._judge_changes(collection, bucket, of_collection)
            bucket = bucket.as_documents()
            self._judge_documents(collection, bucket, of_collection.as_documents())
            if collection.history is not None:
                self._judge_history(collection, collection.history, bucket)
        for name, keys in self._wrong.items():
            self._counts(name).differing = len(HashIndex.of_all(keys))
        return self._report

    def _by_collection(self, ids: Numbers) -> dict[str, Any]:
        """Return the numbers of the rows of each collection. Several ids may have had one name."""
        found: dict[str, Any] = {}
        for id_, chosen in by_id(ids):
            name = self._names.setdefault(id_, table_name(None, None, id_))
            found[name] = np.concatenate([found[name], chosen]) if name in found else chosen
        return found

    # --- reporting ----------------------------------------------------------------------------------------------------

    def _counts(self, name: str) -> Counts:
        return self._report.counts.setdefault(name, Counts())

    def _found(
        self,
        collection: str,
        kind: FindingKind,
        rows: TableRows,
        says: str,
        *,
        column: str | None = None,
        of_table: str | None = None,
    ) -> None:
        rows.report(kind, says, column=column, of_table=of_table)
        if len(rows):
            self._wrong.setdefault(collection, []).append(rows.keys)

    def _missing(self, collection: str, label: str, rows: HashedRows, says: str) -> None:
        """Report documents of the bucket that a table lacks. Their keys are looked up later."""
        found = [
            Finding(kind=FindingKind.MISSING, table=label, what=NOT_NAMED, says=says, vbucket=vbucket, seqno=seqno)
            for vbucket, seqno in zip(
                rows.vbuckets[:FINDINGS_MAX].tolist(), rows.seqnos[:FINDINGS_MAX].tolist(), strict=True
            )
        ]
        if found:
            self._report.findings.add(*found, count=len(rows))
            self._report.findings.locate(label, np.unique(rows.vbuckets).tolist())
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
        scan = TableScan(
            Location(""), table_label(kind, name), schema, (), findings=self._report.findings, added=frozenset(added)
        )
        return scan if table is None else replace(scan, location=table.location, files=table.files, owned=table.owned)

    def _rows_of(self, scan: TableScan, table: TableCheck | None) -> Iterator[ScannedRows]:
        """Yield the rows of a table to judge here. Rows that belong to no group of it go to the first."""
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
        """Check that each seqno is one change or event. Rollbacks have the seqno that they kept."""
        rows = rows.of(rows.ops != ROLLBACK)
        again = rows.of(twice(rows.vbuckets.astype(np.int64) << SEQNO_BITS | rows.seqnos))
        says = "is there twice: another row has its seqno"
        # Events of scopes belong to no document.
        again.of(again.ids < 0).report(FindingKind.TWICE, says)
        documents = again.of(again.ids >= 0)
        for name, chosen in self._by_collection(documents.ids).items():
            self._found(name, FindingKind.TWICE, documents.of(chosen), says)

    def _judge_strangers(self) -> None:
        says = "is in a vbucket that the bucket does not have"
        for name, chosen in self._by_collection(self._strangers.ids).items():
            self._found(name, FindingKind.EXTRA, self._strangers.of(chosen), says)

    def _judge_changes(self, collection: CollectionCheck, bucket: BucketDocuments, rows: TableRows) -> None:
        """Fold `changes`, and compare the outcome."""
        index = HashIndex(rows.keys, rows.seqnos)
        live = _live(rows.of(index.newest), self._ends)
        standing = self._check.record.standing
        judged = judge(bucket, live, standing, ids=collection.ids, landed_ends=self._ends)
        self._add_judged(collection.name, live, bucket, judged)
        is_removal = ~bucket.is_live & (bucket.changed_at == bucket.rows.seqnos)
        removals = bucket.rows.of(is_removal & bucket.is_landed(standing))
        found = index.find(removals.keys)
        is_there = found >= 0
        is_there[is_there] = rows.seqnos[found[is_there]] == removals.seqnos[is_there]
        if self._check.record.trimmed_batch < 0:
            says = "was removed in the bucket, and its removal is not here"
            self._missing(collection.name, live.scan.label, removals.of(~is_there), says)
        there = rows.of(found[is_there])
        is_other = (there.hashes != removals.hashes[is_there]).any(axis=1)
        says = "is not removed as it is in the bucket"
        self._found(collection.name, FindingKind.DIFFERS, there.of(is_other), says)

    # --- documents and rejects ----------------------------------------------------------------------------------------

    def _judge_documents(self, collection: CollectionCheck, bucket: BucketDocuments, changes: ScannedChanges) -> None:
        table, counts = collection.documents, self._counts(collection.name)
        if table is None:
            counts.add(_pending(bucket, np.ones(len(bucket.rows), dtype=np.bool_)))
            self._check_is_new(collection, changes.batches)
            return
        facts, columns = self._check.facts, collection.columns
        typed_schema = None if columns is None else columns.schema
        schema = documents_schema(xattrs=facts.xattrs, form=facts.document, typed=typed_schema)
        added = columns.schema.names if columns is not None and columns.is_inferred else ()
        scan = self._scan(TableKind.DOCUMENTS, collection.name, schema, table, added=added)
        typed = TypedCheck(scan, columns)
        parts: list[TableRows] = []
        for part in self._rows_of(scan, table):
            rows = hash_documents(part.rows, xattrs=facts.xattrs).widened(TableRows, scan=scan, locators=part.locators)
            wrong = rows.of(typed.take(part.rows, part.locators))
            says = "has other values in its typed columns than in its document"
            self._found(collection.name, FindingKind.TYPED_COLUMN, wrong, says)
            self._check_partition(collection.name, table, part, rows)
            parts.append(rows)
        rows = TableRows.joined(parts, scan=scan)
        judged = judge(bucket, rows, table.standing, ids=collection.ids, landed_ends=self._ends)
        self._add_judged(collection.name, rows, bucket, judged)
        self._judge_by_changes(collection, table, rows, changes)
        counts.landed += int(judged.is_equal.sum())
        counts.add(_pending(bucket, bucket.is_pending(table.standing)))
        counts.pending += int(judged.is_ending.sum())
        is_merging = collection.rejects is not None and collection.rejects.merged > table.merged
        if not is_merging and not collection.is_unparsed:
            # A running merge commits the rejects before the documents.
            self._judge_rejects(collection, typed.rejected)

    def _check_partition(self, collection: str, table: TableCheck, part: ScannedRows, rows: TableRows) -> None:
        """Check that rows are in the group of their vbucket. Rows in other vbuckets are found without this check."""
        inside = is_inside(rows.vbuckets, self._vbuckets)
        groups = rows.vbuckets.astype(np.int64) * table.groups // self._check.facts.vbuckets
        wrong = inside & (groups != int(dict(part.file.partition)[GROUP.name]))
        says = "is in another group than its vbucket"
        self._found(collection, FindingKind.COLUMN, rows.of(wrong), says, column=GROUP.name)

    def _judge_by_changes(
        self, collection: CollectionCheck, table: TableCheck, rows: TableRows, changes: ScannedChanges
    ) -> None:
        """Check that the documents result from `changes`, even if the bucket has advanced since. Does not repeat what
        the comparison with the bucket has reported."""
        if not changes.is_readable:
            return
        merged = changes.upto(table.merged)
        ends = self._ends if table.merged >= self._check.record.last_batch else self._changes.upto(table.merged).ends
        live = _live(merged.of(HashIndex(merged.keys, merged.seqnos).newest), ends)
        is_open = (changes.rolled_back_at > table.merged) | table.standing.is_rolled
        wrong = HashIndex.of_all(self._wrong.get(collection.name, []))

        def is_judged(judged: HashedRows) -> Marks:
            inside = is_inside(judged.vbuckets, self._vbuckets)
            here = np.where(inside, judged.vbuckets - self._vbuckets.start, 0)
            marks: Marks = inside & ~is_open[here]
            return marks & (wrong.find(judged.keys) < 0) if len(wrong) else marks

        found = HashIndex(live.keys, live.seqnos).find(rows.keys)
        is_there, judged = found >= 0, is_judged(rows)
        at = found[is_there]
        is_same, is_branch = is_there.copy(), is_there.copy()
        is_same[is_there] = (live.hashes[at] == rows.hashes[is_there]).all(axis=1)
        is_branch[is_there] = live.vbuuids[at] == rows.vbuuids[is_there]
        is_seen = np.zeros(len(live), dtype=np.bool_)
        is_seen[at] = True
        for kind, marks, says, column in (
            (FindingKind.EXTRA, ~is_there, "is not among what `changes` leaves", None),
            (FindingKind.DIFFERS, is_there & ~is_same, "is not as it is in `changes`", None),
            (FindingKind.COLUMN, is_same & ~is_branch, "has another `vbuuid` than in `changes`", "vbuuid"),
        ):
            self._found(collection.name, kind, rows.of(judged & marks), says, column=column)
        lost, says = live.of(~is_seen & is_judged(live)), "is in `changes`, and not here"
        self._found(collection.name, FindingKind.MISSING, lost, says, of_table=rows.scan.label)

    def _check_is_new(self, collection: CollectionCheck, batches: Numbers) -> None:
        """Check that a missing table is one that is about to be created."""
        if (batches <= self._check.made_upto).any():
            label = table_label(TableKind.DOCUMENTS, collection.name)
            says = "is not there, and `changes` has changes of its collection; land again"
            kind = FindingKind.MISSING_TABLE
            self._report.findings.add(Finding(kind=kind, table=label, what="the table", says=says))

    def _judge_rejects(self, collection: CollectionCheck, expected: Rejected) -> None:
        with_field = collection.columns is None or not collection.columns.is_whole_row
        schema = rejects_schema(with_field=with_field, form=self._check.facts.document)
        scan = self._scan(TableKind.REJECTS, collection.name, schema, collection.rejects, added={FIELD.name})
        parts: list[Rejected] = []
        for part in self._rows_of(scan, collection.rejects):
            fields = part.rows.column(FIELD.name) if FIELD.name in schema.names else None
            parts.append(Rejected.read(scan, part.rows, fields, part.rows.column("reason"), part.locators))
            if collection.rejects is not None:
                self._check_partition(collection.name, collection.rejects, part, parts[-1])
        stored = Rejected.joined(parts, scan=scan)
        judged = judge_rejects(expected, stored)
        for kind, chosen, says, column in (
            (FindingKind.EXTRA, judged.extra, "has no such value that does not fit the typed columns", None),
            (FindingKind.DIFFERS, judged.differing, "is not as it is in the documents, or for another reason", None),
            (FindingKind.TWICE, judged.twice, "is there twice", None),
            (FindingKind.COLUMN, judged.other_branches, "has another `vbuuid` than in the documents", "vbuuid"),
        ):
            self._found(collection.name, kind, stored.of(chosen), says, column=column)
        lost, says = expected.of(judged.missing), "does not fit the typed columns, and is not here"
        self._found(collection.name, FindingKind.MISSING, lost, says, of_table=scan.label)

    # --- history ------------------------------------------------------------------------------------------------------

    def _judge_history(self, collection: CollectionCheck, table: TableCheck, bucket: BucketDocuments) -> None:
        name, facts = collection.name, self._check.facts
        plain, columns = history_schema(xattrs=facts.xattrs, form=facts.document), collection.history_columns
        typed_schema = None if columns is None else columns.schema
        schema = history_schema(xattrs=facts.xattrs, form=facts.document, typed=typed_schema)
        typed = schema.names[len(plain) :]
        if columns is not None and not collection.has_all_typed:
            # Versions from before a switch of the rules have what the old rules gave them.
            columns = replace(columns, rules=replace(columns.rules, on_mismatch=OnMismatch.COLUMN))
        scan = self._scan(TableKind.HISTORY, name, schema, table, added=typed)
        parts: list[Versions] = []
        for part in self._rows_of(scan, table):
            is_current = dict(part.file.partition)[IS_CURRENT.name] == "true"
            parts.append(
                hash_documents(part.rows, xattrs=facts.xattrs).widened(
                    Versions,
                    scan=scan,
                    locators=part.locators,
                    begun_us=int64s(part.rows, "valid_from", null=NO_TIME).copy(),
                    ended_us=int64s(part.rows, "valid_to", null=NO_TIME).copy(),
                    ends=int64s(part.rows, "valid_to_seqno", null=NO_END).copy(),
                    is_current=np.full(part.rows.num_rows, is_current, dtype=np.bool_),
                )
            )
            self._check_partition(name, table, part, parts[-1])
            if columns is not None and part.rows.num_rows:
                parsed = columns.parse(document_texts(part.rows.column("document")))
                held = replace(parsed, columns={name: parsed.columns[name] for name in typed})
                wrong = are_typed_otherwise(part.rows, held, may_be_null=not collection.has_all_typed)
                says = "has other values in its typed columns than in its document"
                self._found(name, FindingKind.TYPED_COLUMN, parts[-1].of(wrong), says)
        versions = Versions.joined(parts, scan=scan)
        current = versions.of(versions.is_current)
        judged = judge(bucket, current, table.standing, ids=collection.ids, landed_ends=self._ends)
        self._add_judged(name, current, bucket, judged)
        if not self._changes.is_readable:
            return
        changes = LandedVersions(
            self._changes,
            ids=collection.ids,
            merged=table.merged,
            trimmed_batch=self._check.record.trimmed_batch,
        )
        for marks, column, says in changes.faults_of_validity(versions):
            self._found(name, FindingKind.VALIDITY, versions.of(marks), says, column=column)
        faults = judged.differs, judged.is_extra, judged.is_twice
        reported = HashIndex.of_all([bucket.rows.keys[judged.missing], *(current.keys[marks] for marks in faults)])
        lost = changes.changes.of(changes.lost(versions) & (reported.find(changes.changes.keys) < 0))
        says = "has a version in `changes` that is not here"
        self._found(name, FindingKind.MISSING, lost, says, of_table=scan.label)
        unknown = versions.of(changes.unknown(versions) & (reported.find(versions.keys) < 0))
        self._found(name, FindingKind.EXTRA, unknown, "has a version that `changes` does not have")
        other, says = versions.of(changes.of_other_branches(versions)), "has another `vbuuid` than in `changes`"
        self._found(name, FindingKind.COLUMN, other, says, column="vbuuid")


def _live(newest: TableRows, ends: Barriers) -> TableRows:
    """Return those of the newest changes that are documents now."""
    ended = ends.seqnos(vbuckets=newest.vbuckets, ids=newest.ids)
    return newest.of((newest.ops == MUTATION) & (newest.seqnos > ended))


def _is_own_rollback(changes: ScannedChanges) -> Marks:
    """Mark the rows that a landing has written itself (`ChangeWriter.write_rollbacks_to_zero`): not counted."""
    marks: Marks = (changes.ops == ROLLBACK) & (changes.seqnos == 0) & (changes.vbuuids == 0)
    return marks


def _pending(bucket: BucketDocuments, marks: Marks) -> Counts:
    times = bucket.rows.times_us[marks]
    times = times[times != NO_TIME]
    return Counts(pending=int(marks.sum()), pending_since_us=int(times.min()) if len(times) else None)
