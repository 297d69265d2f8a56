"""Findings are few, whatever their number, and their sentences say all that is known."""

from __future__ import annotations

from headwater.lake.judging import FINDINGS_MAX, NOT_NAMED, Finding, FindingKind, Findings


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


def test_nothing_is_counted_for_nothing() -> None:
    findings = Findings()
    findings.add(count=7)
    assert not findings.counts
