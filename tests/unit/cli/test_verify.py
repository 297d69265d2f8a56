"""What `headwater verify` prints of a verification, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headwater.cli import verify as command
from headwater.lake.location import Location
from headwater.lake.verify import CollectionVerdict, Limits, Verification
from headwater.lake.verify_scan import Finding, FindingKind
from support.cases import case, case_apart

ORDERS = CollectionVerdict(name="shop.orders", landed=98_765, pending=300, differing=0)
ITEMS = CollectionVerdict(name="shop.items", landed=1_235, pending=12, differing=0)
EQUAL = Verification(collections=(ITEMS, ORDERS))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is noted in the lake, which is there."""
    (tmp_path / "lake").mkdir()
    monkeypatch.chdir(tmp_path)


def finding(kind: FindingKind = FindingKind.DIFFERS, what: str = "order-1", table: str = "changes") -> Finding:
    return Finding(kind=kind, table=table, what=what, says="is wrong", vbucket=3, seqno=17)


def unequal(*findings: Finding, differing: int = 0, rolled_back: tuple[int, ...] = (), more: int = 0) -> Verification:
    counts: dict[tuple[FindingKind, str], int] = {}
    for one in findings:
        counts[one.kind, one.table] = counts.get((one.kind, one.table), more) + 1
    collection = CollectionVerdict(name="shop.orders", landed=5, pending=0, differing=differing)
    return Verification(collections=(collection,), findings=findings, counts=counts, rolled_back=rolled_back)


def run(monkeypatch: pytest.MonkeyPatch, found: Verification, *options: str) -> Result:
    asked: dict[str, Any] = {}

    def compare(settings: object, location: Location, **options: Any) -> Verification:
        asked.update(options, location=location)
        return found

    monkeypatch.setattr(command, "compare", compare)
    result = CliRunner().invoke(command.verify, ["couchbase://localhost/shop", "lake", *options])
    assert asked["location"] == Location.of("lake")
    return result


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_a_table_with_a_row_for_each_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, EQUAL)
    lines = result.output.splitlines()
    assert cells(lines[1]) == ["collection", "landed", "pending", "differing"]
    assert [cells(line) for line in lines if line.startswith("│")] == [
        ["shop.items", "1,235", "12", "0"],
        ["shop.orders", "98,765", "300", "0"],
        ["total", "100,000", "312", "0"],
    ]
    assert lines[-1] == "Equal: 100,000 documents in 2 collections; 312 newer changes are pending."
    assert result.exit_code == 0


def test_findings_are_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = unequal(
        finding(),
        finding(FindingKind.DAMAGED_FILE, "part-1.parquet"),
        finding(what="[bold]\x1b[31m"),
        differing=3,
        more=5,
    )
    result = run(monkeypatch, found)
    lines = result.output.splitlines()
    assert "changes: order-1 is wrong (vbucket 3, seqno 17)" in lines
    assert "changes: [bold]?[31m is wrong (vbucket 3, seqno 17)" in lines, "a terminal obeys no key"
    assert "changes: 5 more of the kind 'differs'" in lines
    assert lines[-1] == "Not equal: 3 documents differ, 6 files are damaged."
    assert result.exit_code == 1


@case(Verification(collections=()), "Equal: 0 documents in 0 collections.")
@case(
    Verification(collections=(CollectionVerdict(name="a.b", landed=1, pending=1, differing=0),)),
    "Equal: 1 document in 1 collection; 1 newer change is pending.",
)
@case(unequal(finding(), differing=1), "Not equal: 1 document differs.")
@case(unequal(finding()), "Not equal: 1 fault.")
@case(unequal(finding(FindingKind.MISSING_FILE)), "Not equal: 1 file is missing.")
@case(unequal(finding(FindingKind.MISSING_TABLE)), "Not equal: 1 table is missing.")
@case(unequal(finding(FindingKind.STATISTICS)), "Not equal: the statistics in the logs are wrong in 1 place.")
@case(
    unequal(finding(FindingKind.NEVER_LANDED)),
    "Not equal: no landing has succeeded yet: see why it fails, and land again.",
)
@case(
    unequal(finding(FindingKind.ROLLBACK_PENDING), rolled_back=(3, 4)),
    "Not equal: a failover took back changes of 2 vbuckets that the tables hold: land again.",
)
def test_all_of_it_in_one_sentence(found: Verification, sentence: str) -> None:
    assert found.sentence == sentence


@case_apart(
    {"pending_max": 311},
    ("Behind: 312 newer changes are pending, and at most 311 may be; 100,000 documents in 2 collections are equal."),
)
@case_apart(
    {"age_s_max": 60.0},
    "Behind: the oldest has waited for 75 s, and may for 60 s; 100,000 documents in 2 collections are equal.",
)
@case_apart({"pending_max": 312, "age_s_max": 75.0}, EQUAL.sentence)
def test_too_far_behind_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], sentence: str
) -> None:
    found = replace(EQUAL, waiting_s=75.0, limits=Limits(**limits))
    assert found.sentence == sentence
    result = run(monkeypatch, found)
    assert result.output.splitlines()[-1] == sentence
    assert result.exit_code == (3 if found.is_behind else 0)
    assert found.is_equal


def test_a_difference_counts_for_more_than_being_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(unequal(finding(), differing=1), collections=(ORDERS,), limits=Limits(pending_max=0))
    assert run(monkeypatch, found).exit_code == 1
    assert found.sentence == "Not equal: 1 fault; behind: 300 newer changes are pending, and at most 0 may be."


def test_the_limits_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(command, "compare", lambda *_, **options: asked.update(options) or EQUAL)
    arguments = ["couchbase://localhost/shop", "lake", "--max-pending", "5", "--max-age", "2m"]
    assert CliRunner().invoke(command.verify, arguments).exit_code == 0
    assert asked["limits"] == Limits(pending_max=5, age_s_max=120.0)


def test_json_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run(monkeypatch, EQUAL, "--json").stdout)
    assert found == {
        "equal": True,
        "behind": False,
        "landed": 100_000,
        "pending": 312,
        "waiting_s": None,
        "differing": 0,
        "collections": {
            "shop.items": {"landed": 1_235, "pending": 12, "differing": 0},
            "shop.orders": {"landed": 98_765, "pending": 300, "differing": 0},
        },
        "counts": [],
        "findings": [],
        "rolled_back": [],
        "sentence": "Equal: 100,000 documents in 2 collections; 312 newer changes are pending.",
    }


def test_json_has_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, unequal(finding(), differing=1, more=7), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["counts"] == [{"kind": "differs", "table": "changes", "count": 8}]
    assert found["findings"] == [
        {
            "kind": "differs",
            "table": "changes",
            "what": "order-1",
            "column": None,
            "vbucket": 3,
            "seqno": 17,
            "file": None,
            "sentence": "changes: order-1 is wrong (vbucket 3, seqno 17)",
        }
    ]


def test_the_table_is_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    name = "a-scope-with-a-long-name.a-collection-with-a-long-name"
    found = Verification(collections=(CollectionVerdict(name=name, landed=10**9, pending=0, differing=0),))
    assert name in run(monkeypatch, found).output
    assert "1,000,000,000" in run(monkeypatch, found).output


def test_no_spark_is_loaded_unless_it_is_asked_for() -> None:
    """Loading it takes as long as comparing a million documents."""
    program = "import sys, headwater.cli.verify; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
