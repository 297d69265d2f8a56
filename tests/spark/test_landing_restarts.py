"""What a pipeline finds when it is started: its own tables and checkpoint in any state, or somebody else's."""

from __future__ import annotations

import contextlib
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from simulated_landing import SimulatedLanding, without_spark
from spark_node import SourceBucket

from headwater.errors import InvalidInput, LakeOutOfStep, UnknownCollection, UnknownScope
from headwater.spark.lake.lake import Lake
from headwater.spark.lake.merge_plan import MergeRules
from headwater.spark.lake.tasks import run_here
from headwater.spark.lake.trimming import trim_changes
from headwater.spark.own_folder import OWN_FOLDER

KEYS = 3
SELDOM_MERGE = MergeRules(fraction=1)


class Crash(BaseException):
    """The end of the process."""


@pytest.fixture
def pipeline(bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedLanding:
    without_spark(monkeypatch)
    return SimulatedLanding(bucket, tmp_path / "lake")


def put(pipeline: SimulatedLanding, name: str, count: int = 5) -> None:
    pipeline.bucket.put([b"%s-%d" % (name.encode(), number) for number in range(count)], b'{"in":"%s"}' % name.encode())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- tables that somebody else has changed meanwhile --------------------------------------------------------------


def test_tables_that_were_merged_between_two_landings(pipeline: SimulatedLanding) -> None:
    """The second landing must look at them anew: what the first has left in memory is out of date."""
    pipeline.rules = SELDOM_MERGE
    for name in ("a", "b", "c"):
        put(pipeline, "always the same")
        put(pipeline, name)
        pipeline.land()
        pipeline.landing.merge_all(pipeline.spark)
        pipeline.check_equal()


def test_a_directory_that_was_emptied_between_two_landings(pipeline: SimulatedLanding) -> None:
    put(pipeline, "a")
    pipeline.land()
    shutil.rmtree(pipeline.folder)
    pipeline.land()
    pipeline.check_equal()


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_lost_is_no_loss(pipeline: SimulatedLanding) -> None:
    put(pipeline, "a")
    pipeline.land()
    shutil.rmtree(pipeline.folder / OWN_FOLDER)
    put(pipeline, "b")
    pipeline.land()
    pipeline.check_equal()
    assert sum(batch.rows for batch in pipeline.batches) == 5, "nothing is read again"


def test_the_first_batch_of_a_new_checkpoint_is_repeated(pipeline: SimulatedLanding) -> None:
    put(pipeline, "a")
    pipeline.land()
    for crash_before in ("log commit", "commit changes", "run task"):
        shutil.rmtree(pipeline.folder / OWN_FOLDER)
        put(pipeline, crash_before)
        crash_at(pipeline, crash_before)
        put(pipeline, f"after {crash_before}")
        pipeline.land()
        pipeline.check_equal()


def crash_at(pipeline: SimulatedLanding, step: str) -> None:
    def crash(name: str) -> None:
        if name == step:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        without_spark(patch, crash)
        pipeline.step = crash
        with pytest.raises(Crash):
            pipeline.land()
        pipeline.step = lambda name: None


def test_a_checkpoint_without_its_tables(pipeline: SimulatedLanding) -> None:
    put(pipeline, "a")
    pipeline.land()
    for name in ("changes", "documents"):
        shutil.rmtree(pipeline.folder / name)
    before = content(pipeline.folder)
    put(pipeline, "b")
    with pytest.raises(LakeOutOfStep, match=f"{OWN_FOLDER}/checkpoint-1"):
        pipeline.land()
    assert content(pipeline.folder) == before
    # It does what it is told.
    shutil.rmtree(pipeline.folder / OWN_FOLDER / "checkpoint-1")
    pipeline.land()
    pipeline.check_equal()


def test_tables_from_a_backup(pipeline: SimulatedLanding, tmp_path: Path) -> None:
    """They are older than the checkpoint says."""
    put(pipeline, "a")
    pipeline.land()
    shutil.copytree(pipeline.folder, tmp_path / "backup")
    put(pipeline, "b")
    pipeline.land()
    for name in ("changes", "documents"):
        shutil.rmtree(pipeline.folder / name)
        shutil.copytree(tmp_path / "backup" / name, pipeline.folder / name)
    before = content(pipeline.folder)
    with pytest.raises(LakeOutOfStep, match=f"{OWN_FOLDER}/checkpoint-1"):
        pipeline.landing.prepare()
    assert content(pipeline.folder) == before
    shutil.rmtree(pipeline.folder / OWN_FOLDER / "checkpoint-1")
    pipeline.land()
    pipeline.check_equal()


def test_a_checkpoint_from_a_backup(pipeline: SimulatedLanding, tmp_path: Path) -> None:
    """The tables are newer than the checkpoint says."""
    put(pipeline, "a")
    pipeline.land()
    shutil.copytree(pipeline.folder / OWN_FOLDER, tmp_path / "backup")
    for name in ("b", "c"):
        put(pipeline, name)
        pipeline.land()
    shutil.rmtree(pipeline.folder / OWN_FOLDER)
    shutil.copytree(tmp_path / "backup", pipeline.folder / OWN_FOLDER)
    put(pipeline, "d")
    with pytest.raises(LakeOutOfStep, match=f"{OWN_FOLDER}/checkpoint-1"):
        pipeline.land()


# --- a beginning that was cut off ---------------------------------------------------------------------------------


def test_a_crash_while_the_tables_were_made(pipeline: SimulatedLanding) -> None:
    """delta-rs makes directories and a temporary file before there is a table."""
    log = pipeline.folder / "changes" / "_delta_log"
    log.mkdir(parents=True)
    (log / "_commit_0a1b.json.tmp").write_text("{")
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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"collections": "inventory.hotel"}, UnknownScope),
        ({"collections": "_default.hotel"}, UnknownCollection),
        ({"scopes": "inventory"}, UnknownScope),
    ],
)
def test_an_unknown_collection_leaves_no_tables(
    pipeline: SimulatedLanding, options: dict[str, str], error: type[Exception]
) -> None:
    pipeline.options = options
    with pytest.raises(error):
        pipeline.landing.prepare()
    assert not pipeline.folder.exists()


# --- options that do not go with the tables ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"value": "string"}, {"value": "variant"}, {"noValue": "true"}])
def test_values_that_are_not_those_of_the_bucket(pipeline: SimulatedLanding, options: dict[str, str]) -> None:
    pipeline.options = options
    with pytest.raises(InvalidInput, match="as they are"):
        pipeline.land()
    assert not pipeline.folder.exists()


def test_other_collections_than_before(pipeline: SimulatedLanding) -> None:
    """What is left out once is never landed: the tables would be neither the bucket nor a part of it."""
    bucket = pipeline.bucket
    bucket.create_collection("_default.more")
    put(pipeline, "a")
    pipeline.land()
    before = content(pipeline.folder)
    for narrower in ({"collections": "_default.more"}, {"scopes": "_default"}):
        pipeline.options = narrower
        with pytest.raises(InvalidInput, match="were landed with all collections"):
            pipeline.land()
    assert content(pipeline.folder) == before


def test_more_collections_than_before(pipeline: SimulatedLanding) -> None:
    bucket = pipeline.bucket
    for name in ("_default.more", "_default.less"):
        bucket.create_collection(name)
        bucket.put([b"k"], b"{}", into=name)
    pipeline.options = {"collections": "_default.more,_default.less"}
    pipeline.land()
    assert {row["collection"] for row in pipeline.changes()} == {"more", "less"}
    pipeline.options = {"collections": "_default.less, _default.more"}
    pipeline.land()
    pipeline.options = {}
    with pytest.raises(InvalidInput, match=r"were landed with the collections _default\.less, _default\.more"):
        pipeline.land()


# --- a rollback beyond what `changes` holds -----------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, KEYS])
def test_a_rollback_beyond_what_changes_reaches_back_for(pipeline: SimulatedLanding, lost: int) -> None:
    """The vbucket is read again from 0, by another query with another checkpoint."""
    bucket = pipeline.bucket
    keys = bucket.keys("key", KEYS, vbucket=1)
    for number in range(6):
        bucket.put(keys, b'{"n":%d}' % number)
        pipeline.land()
    lake = Lake.open(str(pipeline.folder))
    assert lake is not None
    trim_changes(lake, datetime.now(UTC), run_here)
    bucket.fail_over(1, bucket.high_seqnos()[1] - lost)
    # Where the tables go back to what the copy had, there is nothing left to read, and no batch that would fail.
    expected = contextlib.nullcontext() if lost == KEYS else pytest.raises(LakeOutOfStep, match="can't go on")
    with expected:
        pipeline.land()
    assert pipeline.batches[-1].must_read_again
    pipeline.land()
    pipeline.check_equal()
    assert (pipeline.folder / OWN_FOLDER / "checkpoint-2").exists()
    put(pipeline, "later")
    pipeline.land()
    pipeline.check_equal()
