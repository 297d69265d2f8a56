"""What has happened to a lake, from the logs of its tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headwater.lake import timeline as timeline_module
from headwater.lake.timeline import BatchEvent, Event, MergeEvent, RollbackEvent, Timeline, UpkeepEvent
from headwater.lake.upkeep import join_files
from support.lake_model import HOTEL, SmallLake, lake_of_before, merging, with_columns

DEFAULT = "_default._default"


def events_of(small: SmallLake) -> list[Event]:
    timeline = Timeline()
    timeline.look(small.lake)
    return timeline.events


def test_batches_and_merges_are_events(small: SmallLake) -> None:
    small.write(0, "a", "b")
    small.write(1, "c", collection=HOTEL)
    small.land()
    small.write(0, "d")
    small.land(merges=False)
    newest, merge, first = events_of(small)
    assert isinstance(newest, BatchEvent)
    assert (newest.batch, newest.rows) == (1, 1)
    assert newest.took_s is not None
    assert isinstance(merge, MergeEvent)
    assert (merge.batch, merge.tables, merge.files) == (0, (DEFAULT, "inventory.hotel"), 2), "one event, of two commits"
    assert isinstance(first, BatchEvent)
    assert (first.batch, first.rows) == (0, 3)


def test_a_rollback_says_what_it_undid(small: SmallLake) -> None:
    small.write(0, "a")
    small.write(1, "b")
    small.land()
    small.write(0, "c", "d")
    small.land()
    small.bucket.fail_over(0, 1)
    small.write(0, "e")
    small.land()
    # Commits that are no batches say the rollbacks of the last batch again.
    join_files(small.lake)
    [rollback] = [event for event in events_of(small) if isinstance(event, RollbackEvent)]
    assert (rollback.batch, rollback.vbuckets, rollback.undone) == (2, 1, 2)
    [part] = rollback.parts
    assert (part.vbucket, part.from_seqno, part.kept_seqno, part.reached_seqno) == (0, 3, 1, 2)
    assert part.is_new_branch
    assert (
        rollback.why
        == "A failover, a crash or a restore: 1 vbucket went on from an earlier seqno, on a new branch of history."
    )


def test_a_vbucket_that_is_read_again_is_named_as_such(small: SmallLake) -> None:
    small.write(0, "a", "b", "a")
    small.land(deduplicated=True)
    small.bucket.fail_over(0, 2)
    small.write(0, "c")
    small.land(careless=True)
    [rollback] = [event for event in events_of(small) if isinstance(event, RollbackEvent)]
    assert rollback.why == "1 vbucket went back further than the tables reach: read again from 0."


def test_looking_again_and_again_finds_the_same_as_looking_once(small: SmallLake) -> None:
    timeline = Timeline()
    for number in range(6):
        small.write(number % 4, f"key-{number}")
        small.land(merges=number % 2 == 1)
        if number == 3:
            small.bucket.fail_over(3, 0)
        timeline.look(small.lake)
    join_files(small.lake)
    timeline.look(small.lake)
    seen = timeline.events
    assert seen == events_of(small)
    assert any(isinstance(event, UpkeepEvent) for event in seen) or len(small.lake.changes.files()) == 6


def test_batches_do_not_push_a_rollback_out(small: SmallLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "EVENTS_MAX", 2)
    small.write(0, "a")
    small.land()
    small.bucket.fail_over(0, 0)
    for number in range(4):
        small.write(0, f"b-{number}")
        small.land()
    assert [event.kind for event in events_of(small)] == ["merge", "batch", "rollback"]


def test_tables_from_a_backup_have_the_events_of_their_time(small: SmallLake, tmp_path: Path) -> None:
    timeline = Timeline()
    small.write(0, "a")
    small.land()
    shutil.copytree(small.directory, tmp_path / "backup")
    before = events_of(small)
    small.write(0, "b")
    small.land()
    timeline.look(small.lake)
    shutil.rmtree(small.directory)
    shutil.copytree(tmp_path / "backup", small.directory)
    timeline.look(small.reopen())
    assert timeline.events == before


def test_what_an_earlier_version_did_not_count_is_unknown(tmp_path: Path) -> None:
    earlier = lake_of_before(tmp_path, with_columns(merging(), {"*": "n INT"}))
    batches = [event for event in events_of(earlier) if isinstance(event, BatchEvent)]
    assert {event.rows for event in batches} == {None}
