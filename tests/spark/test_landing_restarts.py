"""What a pipeline finds when it is started: its own tables and checkpoint in any state, or somebody else's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headwater.errors import InvalidInput, UnknownCollection, UnknownScope
from headwater.lake import layout
from headwater.lake.commits import merge
from headwater.lake.lake import Lake, run_here
from headwater.lake.upkeep import trim_changes
from support.cases import each
from support.driven_source import SimulatedLanding
from support.lake_model import table_rows
from support.landings import DEFAULT, NEVER_FRESH, SourceBucket, SparkNode, key_of

KEYS = 3


class Crash(BaseException):
    """The end of the process."""


@pytest.fixture
def pipeline(bucket: SourceBucket, tmp_path: Path) -> SimulatedLanding:
    return SimulatedLanding(bucket, tmp_path / "lake")


def put(pipeline: SimulatedLanding, name: str, count: int = 5) -> None:
    pipeline.bucket.put([b"%s-%d" % (name.encode(), number) for number in range(count)], b'{"in":"%s"}' % name.encode())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- tables that somebody else has changed meanwhile --------------------------------------------------------------


def test_tables_that_were_merged_between_two_landings(pipeline: SimulatedLanding) -> None:
    """The second landing must look at them again: what the first has left in memory is out of date."""
    pipeline.fresh = NEVER_FRESH
    for name in ("a", "b", "c"):
        put(pipeline, "always the same")
        put(pipeline, name)
        pipeline.land()
        lake = Lake.open(str(pipeline.folder))
        assert lake is not None
        merge(lake)
        pipeline.check_equal()


# --- crashes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", ["plan", "plan tasks", "run task", "commit changes", "after the commit", "run merges", "commit documents"]
)
def test_a_crash_is_made_up_for_by_the_next_run(pipeline: SimulatedLanding, step: str) -> None:
    put(pipeline, "a")
    pipeline.land()
    put(pipeline, "b")

    def crash(name: str) -> None:
        if name.startswith(step):
            raise Crash

    pipeline.step = crash
    with pytest.raises(Crash):
        pipeline.land()
    pipeline.step = lambda name: None
    put(pipeline, "c")
    pipeline.land()
    pipeline.check_equal()


def test_nothing_but_the_tables_is_needed(pipeline: SimulatedLanding, tmp_path: Path) -> None:
    """Beside them there are notes for people, which may be lost or wrong. What was landed since a backup is read again:
    there is no second memory that could be of another time."""
    put(pipeline, "a")
    pipeline.land()
    assert {path.name for path in pipeline.folder.iterdir()} == {"changes", "documents", "_headwater"}
    shutil.copytree(pipeline.folder, tmp_path / "backup")
    shutil.rmtree(pipeline.folder / "_headwater")
    (pipeline.folder / "_headwater").write_text("no folder")
    put(pipeline, "b")
    pipeline.land()
    pipeline.check_equal()
    for backup in (tmp_path / "backup", None):
        shutil.rmtree(pipeline.folder)
        if backup is not None:
            shutil.copytree(backup, pipeline.folder)
        put(pipeline, "c")
        pipeline.land()
        pipeline.check_equal()


# --- a beginning that was cut off ---------------------------------------------------------------------------------


def test_a_crash_while_the_tables_were_made(pipeline: SimulatedLanding) -> None:
    """There are directories, the state and a temporary file of delta-rs before there is a table."""
    log = pipeline.folder / "changes" / "_delta_log"
    log.mkdir(parents=True)
    (log / "_commit_0a1b.json.tmp").write_text("{")
    (log.parent / layout.STATE_FOLDER).mkdir()
    (log.parent / layout.STATE_FOLDER / f"{0:020}-{0:016}.json.gz").write_bytes(b"")
    put(pipeline, "a")
    pipeline.land()
    pipeline.check_equal()


@pytest.mark.parametrize("other", ["my-files/a.txt", "changes/a.parquet", "notes"])
def test_a_directory_with_something_else_in_it(pipeline: SimulatedLanding, other: str) -> None:
    path = pipeline.folder / other
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(InvalidInput, match="no tables of a bucket"):
        pipeline.land()
    assert content(pipeline.folder) == {other: b"mine"}


@each(
    ("options", "error", "sentence"),
    [
        ({"collections": "inventory.hotel"}, UnknownScope, "inventory"),
        ({"collections": "_default.hotel"}, UnknownCollection, "hotel"),
        ({"scopes": "inventory"}, UnknownScope, "inventory"),
        ({"value": "string"}, InvalidInput, "as they are"),
        ({"value": "variant"}, InvalidInput, "as they are"),
        ({"noValue": "true"}, InvalidInput, "as they are"),
    ],
)
def test_options_that_can_not_be_leave_no_tables(
    pipeline: SimulatedLanding, options: dict[str, str], error: type[Exception], sentence: str
) -> None:
    pipeline.options = options
    with pytest.raises(error, match=sentence):
        pipeline.land()
    assert not pipeline.folder.exists()


# --- options that do not go with the tables ------------------------------------------------------------------------


def test_a_lake_for_more_documents_has_more_groups(pipeline: SimulatedLanding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GROUPS_MIN", 1)
    monkeypatch.setattr(layout, "GROUP_DOCUMENTS", 2)
    put(pipeline, "a", count=5)
    assert replace(pipeline.landing, groups=None).prepare().facts.groups == 3


def test_other_collections_than_before(pipeline: SimulatedLanding) -> None:
    """What is left out once is never landed: the tables would be neither the bucket nor a part of it."""
    bucket = pipeline.bucket
    for name in ("_default.more", "_default.less"):
        bucket.create_collection(name)
        bucket.put([b"k"], b"{}", into=name)
    pipeline.options = {"collections": "_default.more,_default.less"}
    pipeline.land()
    assert {row["collection"] for row in pipeline.changes()} == {"more", "less"}
    pipeline.options = {"collections": "_default.less, _default.more"}
    pipeline.land()
    before = content(pipeline.folder)
    for other in ({}, {"collections": "_default.more"}, {"scopes": "_default"}):
        pipeline.options = other
        with pytest.raises(InvalidInput, match=r"were landed with the collections _default\.less, _default\.more"):
            pipeline.land()
    assert content(pipeline.folder) == before


# --- a rollback beyond what `changes` holds -----------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, KEYS])
def test_a_rollback_beyond_what_changes_reaches_back_for(pipeline: SimulatedLanding, lost: int) -> None:
    """The vbucket is read again from 0, by the next batch."""
    bucket = pipeline.bucket
    keys = bucket.keys("key", KEYS, vbucket=1)
    for number in range(6):
        bucket.put(keys, b'{"n":%d}' % number)
        pipeline.land()
    lake = Lake.open(str(pipeline.folder))
    assert lake is not None
    trim_changes(lake, datetime.now(UTC), run_here)
    bucket.fail_over(1, bucket.high_seqnos()[1] - lost)
    pipeline.land()
    assert pipeline.batches[0].read_again == {1}
    assert len(pipeline.batches) == 2
    pipeline.check_equal()
    put(pipeline, "later")
    pipeline.land()
    pipeline.check_equal()


# --- A bucket that is restored from an older copy: the tables lose what it has lost, and have what came instead -------


@pytest.mark.parametrize("crashes", [False, True], ids=["", "to before a crash"])
def test_tables_follow_a_restored_bucket(tmp_path: Path, crashes: bool) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    with SparkNode(data) as node:
        bucket = SourceBucket(node)
        pipeline = SimulatedLanding(bucket, tmp_path / "lake")

        def put(name: str, count: int) -> None:
            bucket.put([b"%s-%d" % (name.encode(), number) for number in range(count)], b'{"in":"%s"}' % name.encode())

        def stop() -> None:
            bucket.close()
            assert node.process.stop() == 0

        put("kept", 10)
        pipeline.land()
        stop()
        shutil.copytree(data, copy)
        node.process.start()
        if crashes:
            bucket.close()
            node.kill_and_restart()
        for name in ("lost", "lost as well"):
            put(name, 10)
            pipeline.land()
        stop()
        shutil.rmtree(data)
        shutil.copytree(copy, data)
        node.process.start()
        # Beyond the seqnos that the tables have.
        for name in ("instead", "and on", "and on still"):
            put(name, 10)
        pipeline.land()
        pipeline.check_equal()
        rows = table_rows(pipeline.folder / "documents" / DEFAULT)
        names = {key_of(row).rpartition(b"-")[0] for row in rows}
        assert names == {b"kept", b"instead", b"and on", b"and on still"}
        assert {vbucket for batch in pipeline.batches for vbucket in batch.rollbacks} == set(range(node.vbuckets))
        bucket.close()
