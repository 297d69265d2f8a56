"""The lake as its driver sees it: batches, replays, refusals, merges and what they cost."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import (
    ColumnsChanged,
    InvalidInput,
    LakeDamaged,
    LakeInUse,
    LakeOfOtherBucket,
    LakeOutOfStep,
    LakeTaken,
)
from headwater.lake import layout
from headwater.lake.change_files import ChangeReport
from headwater.lake.commits import begin_batch, commit_batch, commit_merges, first_documents, merge, plan_merges
from headwater.lake.documents_merge import MergeTask, merged_rows
from headwater.lake.lake import Lake, LakeSettings, landed_selection, run_here
from headwater.lake.upkeep import grow_groups, join_files
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.executors import result_batch, results_of
from support.lake_model import (
    BUCKET_UUID,
    HOTEL,
    ModelBucket,
    SmallLake,
    batches,
    check_documents,
    check_inferred,
    check_no_duplicates,
    check_sorted,
    lake_of_before,
    merging,
    verify_model,
    with_columns,
)

DEFAULT = "_default._default"


def keys(rows: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(row["key"] for row in rows)


@pytest.mark.usefixtures("large_tables")
def test_a_batch_is_landed_and_merged(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", "b")
    small.write(3, "c", collection=HOTEL)
    committed = small.land()
    assert committed.rows == 3
    assert committed.rows_by_table == {DEFAULT: 2, "inventory.hotel": 1}
    assert keys(small.rows(f"documents/{DEFAULT}")) == ["a", "b"]
    assert keys(small.rows("documents/inventory.hotel")) == ["c"]
    assert small.rows("documents/inventory.hotel")[0]["vbucket_group"] == 1
    assert small.lake.held_offsets() == small.bucket.offsets()
    assert small.lake.held_offsets("inventory.hotel") == small.bucket.offsets()


def test_the_next_batch_begins_where_the_tables_end(tmp_path: Path) -> None:
    """The tables are the only memory: rows that they hold are refused, whoever brings them again."""
    small = SmallLake(tmp_path)
    small.write(0, "a")
    rows = small.bucket.rows(0)
    small.land()
    for lake in (small.lake, small.reopen()):
        batch = begin_batch(lake)
        assert batch.number == 1
        with pytest.raises(LakeOutOfStep, match="seqno 1 of vbucket 0 arrived again"):
            batch.writer.write(batches(rows, 10))


def test_a_batch_without_rows_moves_the_offsets(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a")
    small.land()
    moved = StreamOffset.whole(Vbuuid(7), Seqno(5))
    commit_batch(small.lake, small.begin(), [ChangeReport(reached={VBucketId(2): moved})])
    assert small.reopen().held_offsets() == small.bucket.offsets().updated({VBucketId(2): moved})
    assert small.lake.last_batch == 1


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_lake_of_something_else_is_refused(tmp_path: Path) -> None:
    assert Lake.open(str(tmp_path)) is None
    SmallLake(tmp_path)
    with pytest.raises(LakeOfOtherBucket, match="'other'"):
        Lake.open(str(tmp_path), bucket_uuid="other")
    for facts, error, says in (
        ({"bucket_uuid": "other", "vbuckets": 4}, LakeOfOtherBucket, "'other'"),
        ({"bucket_uuid": BUCKET_UUID, "vbuckets": 8}, LakeDamaged, "4 vbuckets, not for 8"),
        ({"bucket_uuid": BUCKET_UUID, "vbuckets": 4, "xattrs": True}, ColumnsChanged, "without xattrs"),
    ):
        with pytest.raises(error, match=says):
            Lake.create(str(tmp_path), **facts)  # type: ignore[arg-type]
    Lake.create(str(tmp_path / "named"), bucket_uuid="one", bucket_name="shop at one:1", vbuckets=4)
    with pytest.raises(LakeOfOtherBucket, match=r"the bucket shop at one:1 \(uuid 'one'\), and not cart at two:2"):
        Lake.open(str(tmp_path / "named"), bucket_uuid="two", bucket_name="cart at two:2")


def test_two_that_land_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a")
    late = small.begin()
    report = small.write_batch(late, [0])
    other = SmallLake(tmp_path, bucket=small.bucket)
    other.land()
    with pytest.raises(LakeInUse):
        commit_batch(small.lake, late, [report])
    assert keys(small.rows("changes")) == ["a"]
    small.write(0, "b")
    with pytest.raises(LakeTaken, match="another landing"):
        small.land()
    other.land()
    assert keys(small.rows(f"documents/{DEFAULT}")) == ["a", "b"]


# --- merging ------------------------------------------------------------------------------------------------------


def fill(small: SmallLake, rows: int) -> None:
    for number in range(rows):
        small.write(number % 4, f"key-{number}")


def files_of(small: SmallLake) -> set[str]:
    documents = small.lake.tables[DEFAULT].documents
    assert documents is not None
    return {file.path for file in documents.log.files()}


def test_only_files_with_replaced_documents_are_written_again(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, groups=1)
    for number in range(3):
        small.write(0, *(f"key-{number}-{n}" for n in range(10 * (number + 1))))
        small.land()
    before = files_of(small)
    small.write(0, *(f"new-{n}" for n in range(20)))
    small.land()
    assert before < files_of(small), "new documents are appended"
    small.write(0, "key-1-3")
    small.land()
    assert len(before - files_of(small)) == 1


def test_an_idle_table_says_that_it_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.lake.commits._IDLE_BATCHES_MAX", 3)
    small = SmallLake(tmp_path)
    small.write(0, "a", collection=HOTEL)
    small.land()
    for number in range(6):
        small.write(0, f"b{number}")
        small.land()
    assert small.lake.tables["inventory.hotel"].merged_at(0) > 0
    assert small.reopen().held_offsets("inventory.hotel").vbuckets == small.bucket.offsets().vbuckets


def test_a_table_that_is_lost_is_built_again(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=merging(history=True))
    fill(small, 20)
    small.land()
    small.write(0, "key-0", value=b"{}")
    small.land()
    shutil.rmtree(tmp_path / "documents" / DEFAULT)
    small.reopen()
    check_documents(small.documents_now(), small.bucket.sent_documents())
    merge(small.lake)
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())


def test_a_collection_without_documents_has_a_table(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.bucket.event("collection_created", HOTEL)
    small.land()
    assert (tmp_path / "documents" / "inventory.hotel" / "_delta_log").exists()
    assert small.documents_now("inventory.hotel") == []


def test_a_name_that_was_told_once_is_known_from_then_on(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", collection=HOTEL)
    small.land()
    small.bucket.names[HOTEL] = (None, None)  # type: ignore[assignment]
    small.write(0, "b", collection=HOTEL)
    small.land()
    assert keys(small.rows("documents/inventory.hotel")) == ["a", "b"]


# --- rollbacks ----------------------------------------------------------------------------------------------------


def test_a_rollback_is_undone_everywhere(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=merging(history=True))
    small.write(0, "kept", "changed", "removed")
    small.write(1, "other")
    small.land()
    small.write(0, "changed", value=b'{"n": 2}')
    small.write(0, "created")
    small.bucket.change(0, "deletion", 0, b"removed")
    small.land()
    assert keys(small.rows(f"documents/{DEFAULT}")) == ["changed", "created", "kept", "other"]
    small.bucket.fail_over(0, 3)
    committed = small.land()
    assert committed.rollbacks == {0: 3}
    assert keys(small.rows(f"documents/{DEFAULT}")) == ["changed", "kept", "other", "removed"]
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())
    changes = small.rows("changes")
    assert sorted(row["seqno"] for row in changes if row["void"]) == [4, 5, 6]
    check_no_duplicates(changes)
    history = small.rows(f"history/{DEFAULT}")
    assert sorted((row["key"], row["is_current"], row["valid_to"]) for row in history) == [
        (key, True, None) for key in ("changed", "kept", "other", "removed")
    ]


def test_a_rollback_writes_only_those_files_again_that_it_must(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    for vbucket in (0, 0, 3):
        small.write(vbucket, "a")
        small.land([vbucket])
    before = {file.path for file in small.lake.changes.files()}
    small.bucket.fail_over(0, 1)
    small.land()
    after = {file.path for file in small.lake.changes.files()}
    assert len(before - after) == 1


def test_a_rollback_into_the_middle_of_a_snapshot_is_not_trusted(tmp_path: Path) -> None:
    """The version of `a` at seqno 2 was never handed out, for it had a newer one in its snapshot. That one is dead. All
    of the vbucket is void: what came in earlier batches, and in this one."""
    small = SmallLake(tmp_path)
    small.write(0, "earlier")
    small.write(2, "other")
    small.land()
    small.write(0, "a", "b", "a")
    small.land(deduplicated=True)
    small.bucket.fail_over(0, 3)
    small.write(0, "c")
    assert small.land(careless=True).read_again == {0}
    assert keys(small.rows(f"documents/{DEFAULT}")) == ["other"]
    assert keys(row for row in small.rows("changes") if not row["void"] and row["key"]) == ["other"]
    assert VBucketId(0) not in small.lake.held_offsets(), "the next batch reads it from 0"


# --- where the work is done ---------------------------------------------------------------------------------------


def run_elsewhere(tasks: Sequence[Any]) -> list[Any]:
    """As on Spark: every task goes through bytes, and comes back in any order."""
    carried = [pickle.loads(pickle.dumps(task)) for task in tasks]
    answers = [result_batch(task.run(), number).to_pylist()[0] for number, task in enumerate(carried)]
    return results_of((row["number"], row["result"]) for row in reversed(answers))


def test_all_work_can_be_done_in_other_processes(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=with_columns(merging(history=True), {"*": "n INT"}))
    fill(small, 20)
    small.land(run=run_elsewhere)
    small.bucket.fail_over(0, 2)
    small.write(0, "again")
    small.land(run=run_elsewhere)
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())
    small.write(0, "new")
    small.land(merges=False)
    tasks: list[MergeTask] = pickle.loads(pickle.dumps(small.lake.read_tasks(DEFAULT)))
    rows = [row for task in tasks for table in merged_rows(task) for row in table.to_pylist()]
    check_documents(rows, small.bucket.sent_documents())


def test_a_merge_can_not_be_committed_over_a_newer_batch(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a")
    small.land(merges=False)
    tasks = plan_merges(small.lake)
    results = run_here(tasks)
    small.write(0, "b")
    small.land(merges=False)
    with pytest.raises(AssertionError, match="since the merges were planned"):
        commit_merges(small.lake, tasks, results)


@pytest.mark.usefixtures("large_tables")
@pytest.mark.parametrize(
    ("held_bytes_max", "merged_groups"), [(1 << 20, []), (1, [0, 1])], ids=["in memory", "too much of it"]
)
def test_the_first_documents_are_not_read_back(tmp_path: Path, held_bytes_max: int, merged_groups: list[int]) -> None:
    small = SmallLake(tmp_path, settings=LakeSettings(cluster_by={DEFAULT: ("y",)}))
    for vbucket in range(4):
        small.write(vbucket, f"a{vbucket}", f"b{vbucket}", value=b'{"n": 1, "x": true}')
        small.write(vbucket, f"b{vbucket}", value=b'{"n": 2, "y": "%d"}' % -vbucket)
        small.write(vbucket, f"c{vbucket}", collection=HOTEL, value=b"no JSON")
        small.bucket.change(vbucket, "deletion", 0, f"a{vbucket}".encode(), b"")
    assert land_first(small, held_bytes_max=held_bytes_max) == merged_groups
    tables = [DEFAULT, "inventory.hotel"]
    check_documents([row for it in tables for row in small.rows(f"documents/{it}")], small.bucket.sent_documents())
    check_inferred(tmp_path, DEFAULT)
    check_sorted(tmp_path / "documents" / DEFAULT, ["y"])
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    assert first_documents(small.lake) is None
    small.write(0, "later", value=b'{"n": 3}')
    small.land()
    assert verify_model(small.lake, small.bucket).findings.first() == ()


@pytest.mark.usefixtures("large_tables")
def test_first_documents_with_columns_that_others_do_not_agree_with_are_merged(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", value=b'{"n": 1}')
    small.write(3, "b", value=b'{"n": 2.5}')
    assert land_first(small) == [0], "the other group has the wider type"
    assert {row["key"]: row["n"] for row in small.rows(f"documents/{DEFAULT}")} == {"a": 1.0, "b": 2.5}
    check_inferred(tmp_path, DEFAULT)


def test_after_a_rollback_the_first_documents_are_merged(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", "b")
    before = small.bucket.rows(0)
    small.bucket.mark_sent([0])
    small.bucket.fail_over(0, 1)
    rows = [*before, *small.bucket.rows(0)]
    assert [row["op"] for row in rows].count("rollback") == 1
    first = first_documents(small.lake)
    assert first is not None
    held = first.hold()
    assert first.write(small.begin().writer.write(batches(rows, 100), held.take), held) == []


def land_first(small: SmallLake, **limits: Any) -> list[int]:
    """Land with a task for each group. Returns the groups that had to be merged."""
    batch, first = small.begin(), first_documents(small.lake)
    assert first is not None
    first = replace(first, **limits)
    reports, written = [], []
    for group in range(small.lake.facts.groups):
        sending = small.lake.facts.vbuckets_of(group)
        held = first.hold()
        rows = [row for vbucket in sending for row in small.bucket.rows(vbucket)]
        report = batch.writer.write(batches(rows, 3), held.take)
        report.reached = small.reached(sending)
        reports.append(report)
        written += first.write(report, held)
    commit_batch(small.lake, batch, reports)
    small.bucket.mark_sent(range(4))
    merged = []

    def run(tasks: Sequence[Any]) -> list[Any]:
        merged.extend(sorted(task.group for task in tasks))
        return run_here(tasks)

    merge(small.lake, run, written)
    return merged


def test_xattrs_come_along(tmp_path: Path) -> None:
    bucket = ModelBucket(4)
    bucket.has_xattrs = True
    small = SmallLake(tmp_path, bucket=bucket, settings=merging(history=True))
    bucket.change(0, "mutation", 0, b"a", b"{}", xattrs=(("_sync", b"{}"),))
    small.write(0, "b")
    small.land()
    for table in (f"documents/{DEFAULT}", f"history/{DEFAULT}", "changes"):
        found = sorted((row["key"], row["xattrs"]) for row in small.rows(table))
        assert found == [("a", [("_sync", b"{}")]), ("b", [])]


def test_a_query_that_failed_half_way_is_completed_by_the_next_in_the_same_process(tmp_path: Path) -> None:
    """Between the tables of two new collections. The object knows both, and counts anew what is pending."""
    small = SmallLake(tmp_path)
    small.write(0, "a")
    small.write(0, "b", collection=HOTEL)

    def fail(name: str) -> None:
        if name == "create documents inventory.hotel":
            raise RuntimeError(name)

    small.lake.step = fail
    with pytest.raises(RuntimeError):
        small.land()
    small.lake.step = lambda name: None
    small.bucket.mark_sent(range(4))
    merge(small.lake)
    assert keys(small.rows(f"documents/{DEFAULT}")) == ["a"]
    assert keys(small.rows("documents/inventory.hotel")) == ["b"]


# --- as of a batch ------------------------------------------------------------------------------------------------


def test_all_collections_are_read_as_of_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged or not, and whatever rollbacks, joins and more groups have made of the tables since."""
    monkeypatch.setattr(layout, "GROUP_DOCUMENTS", 1)
    small = SmallLake(tmp_path)
    expected = []
    for number in range(6):
        small.write(number % 4, "a", f"b-{number}", value=b'{"n": %d}' % number)
        if number % 2:
            small.write(0, f"c-{number}", collection=HOTEL)
        if number == 4:
            small.bucket.fail_over(1, 2)
        small.land(merges=number != 2)
        expected.append(small.bucket.sent_documents())
        if number == 4:
            grow_groups(small.lake)
            assert small.lake.facts.groups == 4
            join_files(small.lake)
    small.bucket.fail_over(0, 1)
    small.land()
    for number, documents in enumerate(expected):
        lake = Lake.open(str(tmp_path), as_of_batch=number)
        assert lake is not None
        for name, id_ in ((DEFAULT, 0), ("inventory.hotel", HOTEL)):
            rows = [row for rows in lake.documents_now(name) for row in rows.to_pylist()] if name in lake.tables else []
            check_documents(rows, {place: change for place, change in documents.items() if place[1] == id_})
    assert len(expected[-1]) != len(small.bucket.sent_documents())


def test_a_batch_that_can_not_be_read(small: SmallLake) -> None:
    for key in ("a", "b", "c"):
        small.write(0, key)
        small.land()
    with pytest.raises(InvalidInput, match=r"as of batch 3\. The log has batches 0 to 2"):
        Lake.open(str(small.directory), as_of_batch=3)
    (file,) = [it for it in small.lake.changes.files() if it.may_hold("batch", high=0)]
    (small.directory / "changes" / file.path).unlink()
    with pytest.raises(InvalidInput, match="as of batch 1"):
        Lake.open(str(small.directory), as_of_batch=1)


# --- lake earlier -----------------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path) -> SmallLake:
    return lake_of_before(tmp_path, with_columns(merging(history=True), {"*": "n INT"}))


def test_what_it_does_not_say_is_not_known(earlier: SmallLake) -> None:
    lake = earlier.lake
    assert (lake.state.batch, lake.state.as_of_s, lake.state.totals, lake.state.rollbacks) == (1, None, None, None)
    assert lake.boundaries == {}, "its places are not the ends of snapshots"
    assert not lake.held_offsets()[VBucketId(0)].is_whole
    assert str(landed_selection(lake)) == "all collections"


def test_its_groups_are_merged_to_one_batch(earlier: SmallLake) -> None:
    documents = earlier.lake.tables[DEFAULT].documents
    assert documents is not None
    assert documents.merged == {0: 0, 1: 1}
    merge(earlier.lake)
    assert documents.merged == {0: 1, 1: 1}
    check_documents(earlier.rows(f"documents/{DEFAULT}"), earlier.bucket.sent_documents())


def test_it_is_landed_into_and_takes_rollbacks(earlier: SmallLake) -> None:
    earlier.write(0, "key-1", value=b'{"n": 3}')
    earlier.land([0])
    assert earlier.lake.boundaries == {VBucketId(0): [22], VBucketId(1): [0], VBucketId(2): [], VBucketId(3): [0]}
    assert earlier.reopen().boundaries == earlier.lake.boundaries
    earlier.bucket.fail_over(0, 21)
    earlier.bucket.fail_over(2, 1)
    earlier.write(2, "f", value=b'{"n": 4}')
    earlier.land()
    lake = Lake.open(str(earlier.directory))
    assert lake is not None
    assert lake.held_offsets() == earlier.bucket.offsets()
    check_documents(earlier.rows(f"documents/{DEFAULT}"), earlier.bucket.sent_documents())
    check_no_duplicates(earlier.rows("changes"))
    assert [row["key"] for row in earlier.rows(f"rejects/{DEFAULT}")] == []
    # The version before refuses it from now on: it would pass over what is in files.
    assert lake.changes.properties["headwater.format"] == "6"
