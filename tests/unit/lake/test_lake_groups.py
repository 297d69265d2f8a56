"""Tables that are cut into more groups: the same rows for every reader, at any moment, and what follows is right."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headwater.errors import LakeDamaged, LakeInUse
from headwater.lake import documents_merge, layout, verify
from headwater.lake.commits import merge, plan_merges
from headwater.lake.documents_merge import MergeRules
from headwater.lake.iceberg import IcebergSettings
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.layout import LakeFacts
from headwater.lake.typed_columns import TypedColumns
from headwater.lake.upkeep import grow_groups, grow_small_tables
from headwater.lake.verify import judged_facts
from headwater.lake.verify_scan import FindingKind
from support.lake_model import HOTEL, SmallLake, check_documents, check_sorted, verify_model

DEFAULT = "_default._default"
TABLES = [f"{kind}/{name}" for kind in ("documents", "history", "rejects") for name in (DEFAULT, "inventory.hotel")]
SETTINGS = LakeSettings(
    merging=MergeRules(history=True), columns={"*": TypedColumns.from_ddl("n INT")}, cluster_by={"*": ("n",)}
)


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GROUP_DOCUMENTS", 8)


@pytest.fixture
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("SMALL_GROUP_DOCUMENTS", 32), ("GROUP_DOCUMENTS", 10**6)):
        monkeypatch.setattr(layout, name, number)


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


def contents(small: SmallLake) -> list[str]:
    """The rows of all tables but `changes`, without the group that they are in."""
    rows = [{**row, "table": table} for table in TABLES for row in small.rows(table)]
    return sorted(repr({name: row[name] for name in row if name != "vbucket_group"}) for row in rows)


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


@pytest.mark.parametrize("commits", [0, 6, *(pytest.param(commits, marks=pytest.mark.soak) for commits in (1, 3))])
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
    assert grown.lake.facts.groups == (4 if commits else 1)
    assert grown.reopen().is_growing is False
    check(grown)


def test_a_merge_that_finds_other_groups_than_it_was_planned_for_is_not_made(grown: SmallLake) -> None:
    other = Lake.open(str(grown.directory), settings=SETTINGS)
    assert other is not None
    other.step = lambda name: None if "lake" not in name else pytest.fail("it goes no further")
    with pytest.raises(pytest.fail.Exception):
        grow_groups(other)
    with pytest.raises(LakeInUse, match="another landing has divided the tables"):
        plan_merges(grown.lake)
    merge(grown.reopen())
    check(grown)


def make_earlier(small: SmallLake) -> None:
    """As if the version before had made it."""
    delta = DeltaTable(small.directory / "changes")
    delta.alter.set_table_properties({"headwater.format": "2"}, raise_if_not_exists=False)
    small.reopen()


def test_a_lake_of_the_version_before_goes_on_and_says_when_it_has_grown(grown: SmallLake) -> None:
    make_earlier(grown)
    grow_groups(grown.lake)
    assert grown.reopen().changes.properties["headwater.format"] == "6"
    write(grown, 3)
    grown.write(0, "new", collection=9)
    grown.bucket.names[9] = ("inventory", "new")
    grown.land()
    check(grown)
    assert (grown.lake.tables["inventory.new"].groups, grown.lake.facts.groups) == (1, 4), "new tables are small ones"


# --- small tables -------------------------------------------------------------------------------------------------


def small_lake(folder: Path, *, documents: int = 2) -> SmallLake:
    """With 8 groups, and with documents in each of 16 vbuckets."""
    small = SmallLake(folder, vbuckets=16, groups=8, settings=SETTINGS)
    write_more(small, 0, documents)
    small.land()
    return small


def write_more(small: SmallLake, turn: int, documents: int = 2) -> None:
    for vbucket in range(16):
        for number in range(documents):
            small.write(vbucket, f"key-{turn}-{number}", value=b'{"n": "no"}' if number else b'{"n": %d}' % vbucket)


def groups(small: SmallLake) -> list[int]:
    """Of documents, history and rejects, as their files have it."""
    return [len({row["vbucket_group"] for row in small.rows(table)}) for table in TABLES[::2]]


@pytest.mark.usefixtures("_small_tables")
def test_a_small_table_has_one_group_and_more_as_it_grows(tmp_path: Path) -> None:
    small = small_lake(tmp_path)
    seen = [groups(small)]
    for turn in range(1, 5):
        reader, before = Lake.open(str(tmp_path), settings=SETTINGS), contents(small)
        write_more(small, turn)
        small.land(merges=False)
        grow_small_tables(small.lake)
        assert contents(small) == before
        assert reader is not None
        assert sum(rows.num_rows for rows in reader.documents_now(DEFAULT)) == 32 * turn
        merge(small.lake)
        seen.append(groups(small))
        assert [judged_facts(small.lake, changes=changes).groups for changes in (1, 10**9)] == [seen[-1][0], 8]
    assert seen == [[1] * 3, [2] * 3, [4] * 3, [4] * 3, [8] * 3]
    check(small)
    assert small.reopen().facts.groups == 8
    small.bucket.fail_over(3, 4)
    small.land()
    check(small)


@pytest.mark.usefixtures("_small_tables")
@pytest.mark.parametrize("commits", [1, *(pytest.param(commits, marks=pytest.mark.soak) for commits in (0, 2))])
def test_growth_of_a_small_table_that_is_cut_off_is_completed(tmp_path: Path, commits: int) -> None:
    small = small_lake(tmp_path)
    write_more(small, 1, 8)
    small.land(merges=False)
    before, steps = contents(small), iter(range(commits))

    def step(name: str) -> None:
        if name.startswith("regroup") and next(steps, None) is None:
            raise RuntimeError(name)

    small.lake.step = step
    with pytest.raises(RuntimeError):
        merge(small.lake)
    small.reopen()
    assert contents(small) == before
    check(small)
    merge(small.lake)
    assert groups(small) == [8] * 3
    check(small)


@pytest.mark.usefixtures("_small_tables")
def test_many_small_collections_have_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_merge, "TASK_TABLES_MAX", 4)
    small = SmallLake(tmp_path, vbuckets=16, groups=8)
    for number in range(5):
        small.bucket.names[20 + number] = ("shop", f"c{number}")
    for turn in range(2):
        for number in range(5):
            for vbucket in range(16 if not turn else 1):
                small.write(vbucket, "key", collection=20 + number)
        small.land(merges=False)
        tasks = plan_merges(small.lake)
        assert [(task.group, task.facts.groups, len(task.documents)) for task in tasks] == [(0, 1, 4), (0, 1, 1)]
        merge(small.lake)
        live = [DeltaTable(folder).file_uris() for folder in (tmp_path / "documents").iterdir()]
        assert [len(files) for files in live] == [1] * 5
    check(small)


@pytest.mark.usefixtures("_small_tables")
@pytest.mark.parametrize("place", ["vbucket_group=5", "vbucket_group=0"])
@pytest.mark.parametrize("judged_changes", [verify._JUDGED_CHANGES, 4])
def test_rows_in_a_place_that_is_not_theirs_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, judged_changes: int
) -> None:
    """Also in the files of a small table, which several tasks read where a task may judge few changes only."""
    monkeypatch.setattr(verify, "_JUDGED_CHANGES", judged_changes)
    small = small_lake(tmp_path)
    table = tmp_path / "documents" / DEFAULT
    rows = DeltaTable(table).to_pyarrow_table().slice(0, 1)
    group = int(place.partition("=")[2])
    rows = rows.set_column(rows.schema.get_field_index("vbucket"), "vbucket", pa.array([77], pa.int32()))
    rows = rows.set_column(rows.schema.get_field_index("vbucket_group"), "vbucket_group", pa.array([group], pa.int32()))
    write_deltalake(table, rows, mode="append")
    small.reopen()
    findings = verify_model(small.lake, small.bucket).findings
    assert [(one.kind, one.vbucket) for one in findings.first()] == [(FindingKind.EXTRA, 77)]


def test_a_table_whose_groups_do_not_go_with_the_lakes_is_not_read(tmp_path: Path) -> None:
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
    from headwater.lake.iceberg import IcebergDocuments

    documents = IcebergDocuments.open(settings, grown.lake)
    documents.catch_up(grown.lake)
    grow_groups(grown.lake)
    write(grown, 3)
    grown.land()
    documents.catch_up(grown.lake)
    rows = documents.tables[DEFAULT].scan().to_arrow()
    assert rows.num_rows == len(grown.rows(f"documents/{DEFAULT}"))
