"""A table against the bucket, key by key: what is equal, what is wrong, and what the table can't know yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headwater.lake.verify_hashes import HashedRows, hash_changes
from headwater.lake.verify_judging import (
    BucketDocuments,
    BucketReading,
    Judged,
    Standing,
    StreamRolledBack,
    ends_of,
    judge,
)
from headwater.lake.verify_scan import FINDINGS_MAX, NOT_NAMED, Finding, FindingKind, Findings
from support.lake_model import Change, ModelBucket, batches

GROUP = range(2, 4)
"""The vbuckets of the group."""
HOTELS, ROUTES = 8, 9
NAMES = {HOTELS: ("inventory", "hotel"), ROUTES: ("inventory", "route")}
AT_NOTHING = ends_of(HashedRows(), GROUP)


def change(key: str, seqno: int, op: str = "mutation", *, value: bytes = b"{}", collection: int = HOTELS) -> Change:
    return Change(seqno=seqno, op=op, collection_id=collection, key=key.encode(), value=value, cas=seqno, rev=1)


def event(op: str, seqno: int, collection: int = HOTELS) -> Change:
    return Change(seqno=seqno, op=op, collection_id=collection)


def rows_of(*changes: Change, vbucket: int = 2) -> HashedRows:
    model = ModelBucket(8)
    model.names.update(NAMES)
    rows = [model.row(vbucket, it, 0) for it in changes]
    return HashedRows.joined([hash_changes(batch, xattrs=False) for batch in batches(rows, 100)])


def bucket_of(*changes: Change, vbucket: int = 2, live_ids: frozenset[int] | None = None) -> BucketDocuments:
    model = ModelBucket(8)
    model.names.update(NAMES)
    reading = BucketReading(GROUP, xattrs=False)
    for batch in batches([model.row(vbucket, it, 0) for it in changes], 2):
        reading.add(batch)
    rows, ends = reading.finish()
    return BucketDocuments.of(rows, ends, GROUP, live_ids=live_ids)


def at(*seqnos: int, rolled: Sequence[bool] = (False, False)) -> Standing:
    """The places of a table in the two vbuckets."""
    return Standing(seqnos=np.array(seqnos, dtype=np.int64), is_rolled=np.array(rolled, dtype=np.bool_))


def judged(
    bucket: BucketDocuments, rows: HashedRows, standing: Standing, ids: frozenset[int] = frozenset(NAMES)
) -> Judged:
    return judge(bucket, rows, standing, ids=ids, landed_ends=AT_NOTHING)


def verdicts(found: Judged) -> list[str]:
    """Of each row of the table."""
    kinds = {
        "equal": found.is_equal,
        "differs": found.differs,
        "extra": found.is_extra,
        "twice": found.is_twice,
        "ending": found.is_ending,
    }
    shown = [[name for name, marks in kinds.items() if marks[row]] for row in range(len(found.is_equal))]
    assert all(len(names) <= 1 for names in shown), "one thing is true of a row, or nothing"
    return ["".join(names) for names in shown]


A, B = change("a", 3), change("b", 5)


def test_each_fault_has_its_name() -> None:
    removed = change("r", 6, "deletion")
    bucket = bucket_of(A, B, removed, change("m", 7))
    table = rows_of(A, replace(B, value=b"[]"), replace(removed, op="mutation", seqno=4), change("x", 8), A)
    found = judged(bucket, table, at(9, 9))
    assert verdicts(found) == ["equal", "differs", "extra", "extra", "twice"]
    assert bucket.rows.seqnos[found.missing].tolist() == [7]


@pytest.mark.parametrize("place", [4, 5, 6])
def test_what_is_newer_than_the_table_is_pending(place: int) -> None:
    """The table has an older version of `b`, which it may have as long as it has not reached the newer one."""
    bucket = bucket_of(A, B)
    found = judged(bucket, rows_of(A, replace(B, seqno=2, value=b"[]")), at(place, 9))
    assert verdicts(found) == ["equal", "" if place < 5 else "differs"]
    assert int(bucket.is_pending(at(place, 9)).sum()) == (1 if place < 5 else 0)
    assert len(found.missing) == 0
    removed = bucket_of(A, replace(B, op="deletion"))
    found = judged(removed, rows_of(A, replace(B, seqno=2)), at(place, 9))
    assert verdicts(found) == ["equal", "" if place < 5 else "extra"]
    behind = judged(bucket, rows_of(A, B), at(place, 9))
    assert verdicts(behind) == ["equal", "extra" if place < 5 else "equal"], "nothing can be there yet"


def test_a_table_that_has_not_begun_is_pending_as_a_whole_and_has_no_rows() -> None:
    bucket = bucket_of(A, B)
    found = judged(bucket, rows_of(change("x", 1), A), at(0, 9))
    assert verdicts(found) == ["extra", "extra"]
    assert len(found.missing) == 0
    assert bucket.is_pending(at(0, 9)).all()


def test_each_vbucket_has_its_own_place() -> None:
    bucket = bucket_of(A, B, vbucket=3)
    assert len(judged(bucket, HashedRows(), at(9, 0)).missing) == 0
    assert len(judged(bucket, HashedRows(), at(0, 3)).missing) == 1
    assert len(judged(bucket, HashedRows(), at(0, 9)).missing) == 2


def test_a_vbucket_that_was_rolled_back_is_not_judged() -> None:
    bucket = bucket_of(A, B)
    standing = at(9, 9, rolled=(True, False))
    found = judged(bucket, rows_of(A, change("x", 8), replace(B, value=b"[]")), standing)
    assert verdicts(found) == ["", "", ""]
    assert len(found.missing) == 0
    assert not bucket.is_pending(standing).any()
    assert at(9, 9).also_rolled([0]).is_rolled.tolist() == [True, False]


def test_rows_that_belong_elsewhere_are_extra() -> None:
    bucket = bucket_of(A, B)
    assert verdicts(judged(bucket, rows_of(A, vbucket=7), at(9, 9))) == ["extra"]
    assert verdicts(judged(bucket, rows_of(A, vbucket=7), at(0, 0))) == ["extra"]
    assert verdicts(judged(bucket, rows_of(A), at(9, 9), ids=frozenset({ROUTES}))) == ["extra"]


# --- collections that end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["collection_dropped", "collection_created"])
def test_the_end_of_a_collection_takes_what_is_older(op: str) -> None:
    """The bucket may still send it, or have forgotten it."""
    route = change("a", 4, collection=ROUTES)
    for still_there in (True, False):
        bucket = bucket_of(*([A] if still_there else []), route, event(op, 6), change("n", 7))
        table = rows_of(A, route, change("n", 7))
        assert verdicts(judged(bucket, table, at(9, 9))) == ["extra", "equal", "equal"]
        pending = judged(bucket, rows_of(A, route), at(5, 9))
        assert verdicts(pending) == ["" if still_there else "ending", "equal"]
        count = int(bucket.is_pending(at(5, 9)).sum()) + int(pending.is_ending.sum())
        assert count == 2, "the document of the collection that ended, and the new one"


def test_an_end_that_was_not_seen_is_pending_unless_it_was_landed() -> None:
    """A read of some collections does not get the end of one that is dropped."""
    bucket = bucket_of(live_ids=frozenset({ROUTES}))
    begun = ends_of(rows_of(event("collection_created", 1)), GROUP)
    landed = ends_of(rows_of(event("collection_created", 1), event("collection_dropped", 6)), GROUP)
    standing = at(9, 9)
    table, ids = rows_of(A), frozenset({HOTELS})
    assert verdicts(judge(bucket, table, standing, ids=ids, landed_ends=AT_NOTHING)) == ["ending"]
    assert verdicts(judge(bucket, table, standing, ids=ids, landed_ends=begun)) == ["ending"]
    assert verdicts(judge(bucket, table, standing, ids=ids, landed_ends=landed)) == ["extra"]
    still = bucket_of(live_ids=frozenset({HOTELS, ROUTES}))
    assert verdicts(judge(still, table, standing, ids=ids, landed_ends=AT_NOTHING)) == ["extra"]


# --- reading the bucket ----------------------------------------------------------------------------------------------


def test_a_rollback_in_the_stream_asks_for_another_read() -> None:
    model = ModelBucket(8)
    model.change(2, "mutation", 0, b"a", b"{}")
    model.mark_sent([2])
    model.fail_over(2, 0)
    reading = BucketReading(GROUP, xattrs=False)
    (batch,) = batches(model.rows(2), 10)
    with pytest.raises(StreamRolledBack) as raised:
        reading.add(batch)
    assert raised.value.vbuckets == {2}


def test_a_stream_names_its_collections() -> None:
    model = ModelBucket(8)
    model.names.update(NAMES)
    reading = BucketReading(GROUP, xattrs=False)
    rows = [model.row(2, it, 0) for it in (A, change("r", 4, collection=ROUTES), event("collection_dropped", 5))]
    for batch in batches(rows, 10):
        reading.add(batch)
    assert reading.names == {HOTELS: "inventory.hotel", ROUTES: "inventory.route"}
    documents, ends = reading.finish()
    assert documents.seqnos.tolist() == [3, 4]
    assert ends.seqnos(vbuckets=np.array([2, 2]), ids=np.array([HOTELS, ROUTES])).tolist() == [5, 0]


# Findings are few, whatever their number, and their sentences say all that is known.


def finding(what: str, kind: FindingKind = FindingKind.DIFFERS, table: str = "changes") -> Finding:
    return Finding(kind=kind, table=table, what=what, says="is wrong", vbucket=3, seqno=17)


def test_a_sentence_says_what_and_where() -> None:
    one = finding("key")
    assert one.sentence == "changes: key is wrong (vbucket 3, seqno 17)"
    rewritten = Finding(
        kind=FindingKind.EXTRA, table="documents/a.b", what="key", says="is wrong", file="part-1", engine="duck 1.0"
    )
    assert rewritten.sentence == ("documents/a.b: key is wrong (file part-1, rewritten by another engine, duck 1.0)")
    bare = Finding(kind=FindingKind.MISSING_FILE, table="changes", what="part-1", says="is not there")
    assert bare.sentence == "changes: part-1 is not there"


def test_the_first_are_kept_and_all_are_counted() -> None:
    findings, others = Findings(), Findings()
    findings.add(*(finding(f"a-{number}") for number in range(15)), count=100)
    others.add(*(finding(f"b-{number}") for number in range(15)), count=50)
    others.add(finding("c", FindingKind.MISSING))
    findings.merge(others)
    assert findings.counts == {(FindingKind.DIFFERS, "changes"): 150, (FindingKind.MISSING, "changes"): 1}
    shown = [one.what for one in findings.first()]
    assert shown == ["c", *(f"a-{number}" for number in range(15)), *(f"b-{number}" for number in range(5))]


def test_a_file_that_several_tasks_report_is_one() -> None:
    findings = Findings()
    for _ in range(3):
        report = Findings()
        report.add(*(finding(f"part-{number}", FindingKind.DAMAGED_FILE) for number in range(FINDINGS_MAX + 5)))
        findings.merge(report)
    assert findings.counts == {(FindingKind.DAMAGED_FILE, "changes"): FINDINGS_MAX + 5}
    assert len(findings.first()) == FINDINGS_MAX


def test_names_come_later() -> None:
    findings = Findings()
    findings.add(finding(NOT_NAMED))
    findings.name({(3, 17): "key", (3, 18): "other"})
    (one,) = findings.first()
    assert one.what == "key"
    findings = Findings()
    findings.add(finding(NOT_NAMED))
    findings.name({(4, 17): "key"})
    assert findings.first()[0].what == NOT_NAMED
