"""Judging one group of vbuckets of all tables: the work of one task of `headwater verify`.

The bucket's stream of the group comes first, then `changes`, then the tables of each collection. What is kept of a row
are its hashes, so a task's memory is that of the group's rows, some sixty bytes each, and one row group of a file.

* `changes`: its newest versions that are not void are the documents of the bucket, at the place that `changes` is at;
  and no seqno is alive twice.
* `documents`: its rows are the documents of the bucket, at the place that the table is at. Typed columns say what the
  document beside them says.
* `rejects`: exactly those rows of `documents` that do not fit the typed columns, each with its reason.
* `history`: its current rows are the documents of the bucket, at the place that it is at. No two versions of a document
  hold at once, and its versions are those that `changes` has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.lake.change_rows import MUTATION, ROLLBACK, Barriers
from headwater.lake.check_plan import (
    CollectionCheck,
    GroupCheck,
    Locators,
    ScannedRows,
    TableCheck,
    TableRows,
    TableScan,
)
from headwater.lake.data_files import FileReader, filtered
from headwater.lake.digests import (
    HashedRows,
    Hashes,
    HashIndex,
    Marks,
    hash_changes,
    hash_documents,
    hash_texts,
    int64s,
    op_codes,
)
from headwater.lake.judging import (
    FINDINGS_MAX,
    NOT_NAMED,
    SEQNO_BITS,
    Bucket,
    BucketReading,
    Finding,
    FindingKind,
    Findings,
    Judged,
    Numbers,
    by_id,
    ends_of,
    is_inside,
    judge,
    table_label,
    twice,
)
from headwater.lake.layout import (
    IS_CURRENT,
    REJECTS_SCHEMA,
    TableKind,
    TablePlace,
    changes_schema,
    documents_schema,
    history_schema,
    table_name,
)
from headwater.lake.typed_columns import TypedColumns

# Is a history sound in itself, and does it have the versions that `changes` has?
#
# A version holds from its seqno up to the seqno that ended it. Of one document no two versions hold at once, and the
# one that is current has no end. Every mutation in `changes` that is not void is a version, up to the batch that the
# history is merged at; and every version is one of those, unless old changes have been folded.


NO_END = -1
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Versions:
    """The rows of a history."""

    rows: HashedRows
    locators: Locators
    ends: Numbers
    """By row: the seqno that ended it, or `NO_END`."""
    is_current: Marks
    """By row: as the table is partitioned."""

    @classmethod
    def joined(cls, parts: list[Versions]) -> Versions:
        return cls(
            rows=HashedRows.joined([part.rows for part in parts]),
            locators=np.concatenate([np.zeros(0, dtype=np.int64), *(part.locators for part in parts)]),
            ends=np.concatenate([np.zeros(0, dtype=np.int64), *(part.ends for part in parts)]),
            is_current=np.concatenate([np.zeros(0, dtype=np.bool_), *(part.is_current for part in parts)]),
        )


def faults_of_validity(versions: Versions) -> Iterator[tuple[Marks, str]]:
    """Marks on versions that can't be as they are, and what to say of them."""
    has_end = versions.ends != NO_END
    yield versions.is_current & has_end, "is current, and has an end"
    yield ~versions.is_current & ~has_end, "is not current, and has no end"
    yield has_end & (versions.ends <= versions.rows.seqnos), "ends before it begins"
    yield _overlapping(versions), "begins before the version before it ends"


def _overlapping(versions: Versions) -> Marks:
    rows = versions.rows
    marks = np.zeros(len(rows), dtype=np.bool_)
    order = np.lexsort((rows.seqnos, rows.keys[:, 1], rows.keys[:, 0]))
    before, after = order[:-1], order[1:]
    is_same = (rows.keys[before] == rows.keys[after]).all(axis=1)
    ends = np.where(versions.ends == NO_END, _FOREVER, versions.ends)
    marks[after[is_same & (ends[before] > rows.seqnos[after])]] = True
    return marks


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LandedVersions:
    """What a history has to hold by `changes`."""

    rows: HashedRows
    """Changes of the collection's documents that are not void."""
    batches: Numbers
    merged: int
    """The last batch that is in the history."""
    is_open: Marks
    """By vbucket of the group: a rollback that is not in the history yet has changed what `changes` says of it."""
    vbuckets: range

    def lost(self, versions: Versions) -> Marks:
        """A mark on the changes that are not among the versions."""
        marks: Marks = (self.rows.ops == MUTATION) & (self.batches <= self.merged) & ~self._is_open(self.rows)
        found = HashIndex(versions.rows.hashes, versions.rows.seqnos).find(self.rows.hashes)
        return marks & (found < 0)

    def unknown(self, versions: Versions) -> Marks:
        """A mark on the versions that are not among the changes."""
        found = HashIndex(self.rows.hashes, self.rows.seqnos).find(versions.rows.hashes)
        return (found < 0) & ~self._is_open(versions.rows)

    def _is_open(self, rows: HashedRows) -> Marks:
        inside = is_inside(rows.vbuckets, self.vbuckets)
        is_open: Marks = self.is_open[np.where(inside, rows.vbuckets - self.vbuckets.start, 0)] & inside
        return is_open


# Do the typed columns say what the documents beside them say, and are the rejects those that do not fit?
#
# Documents are parsed once more, as the merge did that wrote them. What comes out must be what the columns hold, and
# the documents that do not fit must be the rows of `rejects`, each with the same reason.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rejected:
    """Documents that do not fit, as `documents` has them or as `rejects` does."""

    rows: HashedRows
    """Without extended attributes, which `rejects` does not have."""
    reasons: Hashes
    locators: Locators

    @classmethod
    def of(cls, rows: pa.Table, reasons: pa.Array | pa.ChunkedArray, locators: Locators) -> Rejected:
        return cls(rows=hash_documents(rows, xattrs=False), reasons=hash_texts(reasons), locators=locators)

    @classmethod
    def joined(cls, parts: list[Rejected]) -> Rejected:
        return cls(
            rows=HashedRows.joined([part.rows for part in parts]),
            reasons=np.concatenate([np.zeros((0, 2), dtype=np.uint64), *(part.reasons for part in parts)]),
            locators=np.concatenate([np.zeros(0, dtype=np.int64), *(part.locators for part in parts)]),
        )


class TypedCheck:
    """Goes over the rows of a table of documents."""

    def __init__(self, columns: TypedColumns | None) -> None:
        self._columns = columns
        self._rejected: list[Rejected] = []

    def take(self, rows: pa.Table, locators: Locators) -> Marks:
        """Returns a mark on rows whose typed columns do not hold what their document says."""
        if self._columns is None or rows.num_rows == 0:
            return np.zeros(rows.num_rows, dtype=np.bool_)
        parsed = self._columns.parse(rows.column("document"))
        wrong = np.zeros(rows.num_rows, dtype=np.bool_)
        for name, expected in parsed.columns.items():
            wrong |= _differing(rows.column(name), expected)
        unfit = np.asarray(parsed.reasons.is_valid())
        if unfit.any():
            marks = pa.array(unfit)
            self._rejected.append(Rejected.of(rows.filter(marks), parsed.reasons.filter(marks), locators[unfit]))
        return wrong

    @property
    def rejected(self) -> Rejected:
        """Those that do not fit, of all that were taken."""
        return Rejected.joined(self._rejected)


def _differing(stored: pa.ChunkedArray, expected: pa.ChunkedArray) -> Marks:
    """A mark on rows in which two columns of one type are not the same."""
    if stored.equals(expected):
        return np.zeros(len(stored), dtype=np.bool_)
    if pa.types.is_nested(stored.type):
        return _differing_nested(stored.combine_chunks(), expected.combine_chunks())
    is_other = pc.fill_null(pc.not_equal(stored, expected), False)
    return np.asarray(pc.or_(is_other, pc.not_equal(stored.is_null(), expected.is_null())))


def _differing_nested(stored: pa.Array, expected: pa.Array) -> Marks:
    """By halves: Arrow can say of arrays of lists and structs only whether they are the same as a whole."""
    if stored.equals(expected):
        return np.zeros(len(stored), dtype=np.bool_)
    if len(stored) == 1:
        return np.ones(1, dtype=np.bool_)
    half = len(stored) // 2
    return np.concatenate(
        [_differing_nested(stored[:half], expected[:half]), _differing_nested(stored[half:], expected[half:])]
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JudgedRejects:
    missing: Numbers
    """Places of those that have to be there."""
    extra: Numbers
    differing: Numbers
    twice: Numbers
    """Places of those that are there."""


def judge_rejects(expected: Rejected, stored: Rejected) -> JudgedRejects:
    """Compare the rejects of a table with what they have to be."""
    index = HashIndex(expected.rows.keys, expected.rows.seqnos)
    found = index.find(stored.rows.keys)
    is_there = found >= 0
    is_first = np.zeros(len(found), dtype=np.bool_)
    is_first[np.unique(found, return_index=True)[1]] = True
    at = found[is_there]
    is_same = np.zeros(len(found), dtype=np.bool_)
    is_same[is_there] = (stored.rows.hashes[is_there] == expected.rows.hashes[at]).all(axis=1)
    is_same[is_there] &= (stored.reasons[is_there] == expected.reasons[at]).all(axis=1)
    is_seen = np.zeros(len(expected.rows), dtype=np.bool_)
    is_seen[at] = True
    # A document that is twice in `documents` is said so there.
    return JudgedRejects(
        missing=np.flatnonzero(~is_seen & index.newest),
        extra=np.flatnonzero(~is_there),
        differing=np.flatnonzero(is_there & is_first & ~is_same),
        twice=np.flatnonzero(is_there & ~is_first),
    )


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


# --- changes --------------------------------------------------------------------------------------------------------


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
            check.changes.place,
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
            places, numbers = int64s(part.rows, "vbucket", null=-1), int64s(part.rows, "batch")
            # A rollback that another one made void counts as well: what it took back stays so.
            rollbacks = (op_codes(part.rows) == ROLLBACK) & is_inside(places, vbuckets)
            np.maximum.at(rolled_back_at, places[rollbacks] - vbuckets.start, numbers[rollbacks])
            kept = (places >= first) & (places <= last) & ~np.asarray(pc.fill_null(part.rows.column("void"), False))
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


# --- all tables -----------------------------------------------------------------------------------------------------


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
            bucket = Bucket.of(rows, ends, self._vbuckets, live_ids=self._check.live_ids)
            of_collection = changes.of(of_changes.get(name, slice(0)))
            self._judge_changes(collection, bucket, of_collection.rows)
            self._judge_documents(collection, bucket, of_collection.batches)
            if collection.history is not None:
                self._judge_history(collection, collection.history, bucket, of_collection)
        for name, keys in self._wrong.items():
            self._counts(name).differing = len(HashIndex.of_all(keys))
        return self._report

    def _by_collection(self, ids: Numbers) -> dict[str, Any]:
        """The places of each collection's rows. Several ids may have had one name."""
        found: dict[str, Any] = {}
        for id_, chosen in by_id(ids):
            name = self._names.setdefault(id_, table_name(None, None, id_))
            found[name] = np.concatenate([found[name], chosen]) if name in found else chosen
        return found

    # --- what is found ----------------------------------------------------------------------------------------------

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

    def _add_judged(self, collection: str, table: TableRows, bucket: Bucket, judged: Judged) -> None:
        for kind, marks, says in (
            (FindingKind.DIFFERS, judged.differs, "is not as it is in the bucket"),
            (FindingKind.EXTRA, judged.is_extra, "is not in the bucket"),
            (FindingKind.TWICE, judged.is_twice, "is there twice"),
        ):
            self._found(collection, kind, table.of(marks), says)
        self._missing(collection, table.scan.label, bucket.rows.of(judged.missing), "is in the bucket, and not here")

    def _scan(self, kind: TableKind, name: str, schema: pa.Schema, table: TableCheck | None) -> TableScan:
        place = TablePlace("") if table is None else table.place
        files = () if table is None else table.files
        return TableScan(place, table_label(kind, name), schema, files, self._report.findings)

    # --- each table -------------------------------------------------------------------------------------------------

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

    def _judge_changes(self, collection: CollectionCheck, bucket: Bucket, rows: TableRows) -> None:
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

    # --- documents and rejects --------------------------------------------------------------------------------------

    def _judge_documents(self, collection: CollectionCheck, bucket: Bucket, batches: Numbers) -> None:
        table, counts = collection.documents, self._counts(collection.name)
        if table is None:
            counts.pending += len(bucket.rows)
            self._check_is_new(collection, batches)
            return
        xattrs, columns = self._check.facts.xattrs, collection.columns
        schema = documents_schema(xattrs=xattrs, typed=None if columns is None else columns.schema)
        scan = self._scan(TableKind.DOCUMENTS, collection.name, schema, table)
        typed = TypedCheck(columns)
        parts: list[TableRows] = []
        for part in scan.read():
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
        if collection.rejects is None or collection.rejects.merged <= table.merged:
            # Else a merge is under way, which commits the rejects before the documents.
            self._judge_rejects(collection, scan, typed.rejected)

    def _check_is_new(self, collection: CollectionCheck, batches: Numbers) -> None:
        """A table that is not there has to be one that is about to be made."""
        if (batches <= self._check.made_upto).any():
            label = table_label(TableKind.DOCUMENTS, collection.name)
            says = "is not there, and `changes` has changes of its collection; land again"
            kind = FindingKind.MISSING_TABLE
            self._report.findings.add(Finding(kind=kind, table=label, what="the table", says=says))

    def _judge_rejects(self, collection: CollectionCheck, documents: TableScan, expected: Rejected) -> None:
        scan = self._scan(TableKind.REJECTS, collection.name, REJECTS_SCHEMA, collection.rejects)
        stored = Rejected.joined(
            [Rejected.of(part.rows, part.rows.column("reason"), part.locators) for part in scan.read()]
        )
        judged = judge_rejects(expected, stored)
        there = TableRows(scan=scan, rows=stored.rows, locators=stored.locators)
        for kind, places, says in (
            (FindingKind.EXTRA, judged.extra, "is not a document that does not fit the typed columns"),
            (FindingKind.DIFFERS, judged.differing, "is not as it is in the documents, or for another reason"),
            (FindingKind.TWICE, judged.twice, "is there twice"),
        ):
            self._found(collection.name, kind, there.of(places), says)
        lost = TableRows(scan=documents, rows=expected.rows, locators=expected.locators).of(judged.missing)
        if len(lost.rows):
            says = "does not fit the typed columns, and is not here"
            lost.report(FindingKind.MISSING, says, of_table=scan.label)
            self._wrong.setdefault(collection.name, []).append(lost.rows.keys)

    # --- history ----------------------------------------------------------------------------------------------------

    def _judge_history(
        self, collection: CollectionCheck, table: TableCheck, bucket: Bucket, changes: ScannedChanges
    ) -> None:
        xattrs = self._check.facts.xattrs
        scan = self._scan(TableKind.HISTORY, collection.name, history_schema(xattrs=xattrs), table)
        versions = Versions.joined([self._versions(part) for part in scan.read()])
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
