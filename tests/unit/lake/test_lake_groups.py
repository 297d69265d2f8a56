"""Tables that are cut into more groups: the same rows for every reader, at any moment, and what follows is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headwater.errors import LakeDamaged, LakeInUse, LakeTooNew
from headwater.lake import layout
from headwater.lake.commits import merge, plan_merges
from headwater.lake.documents_merge import MergeRules
from headwater.lake.iceberg_changes import IcebergSettings
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.layout import LakeFacts
from headwater.lake.typed_columns import TypedColumns
from headwater.lake.upkeep import grow_groups
from support.lake_model import HOTEL, SmallLake, check_documents, check_sorted, verify_model

DEFAULT = "_default._default"
TABLES = [f"{kind}/{name}" for kind in ("documents", "history", "rejects") for name in (DEFAULT, "inventory.hotel")]
SETTINGS = LakeSettings(
    merging=MergeRules(history=True), columns={"*": TypedColumns.from_ddl("n INT")}, cluster_by={"*": ("n",)}
)


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GROUP_DOCUMENTS", 8)


def write(small: SmallLake, turn: int) -> None:
    for vbucket in range(8):
        for number in range(3):
            value = b'{"n": %d}' % (number - vbucket) if number else b'{"n": "no"}'
            small.write(vbucket, f"key-{number}-{turn % 2}", value=value)
        small.write(vbucket, f"hotel-{turn}", collection=HOTEL, value=b'{"n": "no"}')


@pytest.fixture
def grown(tmp_path: Path) -> SmallLake:
    """A lake with all tables, merged twice, and with changes that are pending."""
    small = SmallLake(tmp_path / "lake", vbuckets=8, groups=1, settings=SETTINGS)
    for turn in range(3):
        write(small, turn)
        small.land(merges=turn < 2)
    return small


def contents(small: SmallLake) -> dict[str, list[str]]:
    """By table: its rows, but for the group that they are in."""
    shown = {}
    for table in TABLES:
        rows: list[dict[str, Any]] = small.rows(table)
        shown[table] = sorted(repr({name: row[name] for name in row if name != "vbucket_group"}) for row in rows)
    return shown


def check(small: SmallLake) -> None:
    now = [row for name in small.lake.tables for row in small.documents_now(name)]
    check_documents(now, small.bucket.sent_documents())
    assert verify_model(small.lake, small.bucket).findings.first() == ()


def groups_of(small: SmallLake, table: str) -> dict[int, set[int]]:
    """By vbucket: the groups that its rows are in."""
    found: dict[int, set[int]] = {}
    for row in small.rows(table):
        found.setdefault(row["vbucket"], set()).add(row["vbucket_group"])
    return found


def test_all_tables_have_the_same_rows_in_more_groups(grown: SmallLake) -> None:
    before, reader = contents(grown), Lake.open(str(grown.directory))
    grow_groups(grown.lake)
    assert grown.lake.facts.groups == 4, "64 documents, and groups of 16 at most"
    assert contents(grown) == before
    assert all(groups_of(grown, table) == {vbucket: {vbucket // 2} for vbucket in range(8)} for table in TABLES)
    check(grown)
    assert reader is not None
    assert (reader.facts.groups, grown.reopen().facts.groups) == (1, 4)
    check(grown)
    version = grown.lake.changes.version
    grow_groups(grown.lake)
    assert grown.lake.changes.version == version, "there is nothing to do"
    grown.bucket.fail_over(3, 4)
    write(grown, 3)
    grown.land()
    check(grown)
    check_sorted(grown.directory / "documents" / DEFAULT, ["n"])
    assert all(groups_of(grown, table) == {vbucket: {vbucket // 2} for vbucket in range(8)} for table in TABLES)


@pytest.mark.parametrize("commits", [0, 1, 2, 4, 7])
def test_what_is_cut_off_is_completed_by_the_next_merge(grown: SmallLake, commits: int) -> None:
    left = commits

    def step(name: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(name)

    before, grown.lake.step = contents(grown), step
    with pytest.raises(RuntimeError):
        grow_groups(grown.lake)
    grown.reopen()
    assert grown.lake.facts.groups == 1
    assert contents(grown) == before
    check(grown)
    write(grown, 4)
    grown.land()
    assert grown.lake.facts.groups == (4 if commits > 1 else 1)
    assert grown.reopen().is_growing is False
    check(grown)


def test_a_merge_that_finds_other_groups_than_it_was_planned_for_is_not_made(grown: SmallLake) -> None:
    other = Lake.open(str(grown.directory), settings=SETTINGS)
    assert other is not None
    other.step = lambda name: None if "lake" not in name else pytest.fail("it goes no further")
    with pytest.raises(pytest.fail.Exception):
        grow_groups(other)
    with pytest.raises(LakeInUse, match="another landing has cut the tables"):
        plan_merges(grown.lake)
    merge(grown.reopen())
    check(grown)


def test_earlier_versions_refuse_a_lake_that_has_grown(grown: SmallLake, monkeypatch: pytest.MonkeyPatch) -> None:
    grow_groups(grown.lake)
    monkeypatch.setattr(layout, "GROWN_FORMAT", 2)
    with pytest.raises(LakeTooNew):
        grown.reopen()


def test_a_table_with_fewer_groups_than_the_lake_is_not_read(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, groups=4)
    small.write(0, "a")
    small.land()
    delta = DeltaTable(tmp_path / "documents" / DEFAULT)
    delta.alter.set_table_properties({"headwater.groups": "3"}, raise_if_not_exists=False)
    with pytest.raises(LakeDamaged, match=r"has 3 groups, and the lake 4\. Remove its directory"):
        small.reopen()


@pytest.mark.parametrize(("documents", "groups"), [(0, 3), (48, 3), (49, 6), (97, 12), (10**9, 12)])
def test_how_many_groups_there_should_be(documents: int, groups: int) -> None:
    assert LakeFacts(bucket_uuid="", vbuckets=1024, groups=3).grown(documents) == groups
    assert LakeFacts(bucket_uuid="", vbuckets=5, groups=3).grown(documents) == 3


def test_iceberg_tables_have_the_new_files(grown: SmallLake, settings: IcebergSettings) -> None:
    pytest.importorskip("pyiceberg")
    from headwater.lake.iceberg_documents import IcebergDocuments

    documents = IcebergDocuments.open(settings, grown.lake)
    documents.catch_up(grown.lake)
    grow_groups(grown.lake)
    write(grown, 3)
    grown.land()
    documents.catch_up(grown.lake)
    rows = documents.tables[DEFAULT].scan().to_arrow()
    assert rows.num_rows == len(grown.rows(f"documents/{DEFAULT}"))
