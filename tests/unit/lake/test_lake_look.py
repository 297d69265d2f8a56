"""A lake as people look at it, and the notes beside its tables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import InvalidInput
from headwater.lake import lake_look
from headwater.lake import timeline as timeline_module
from headwater.lake.commits import begin_batch, commit_batch, merge
from headwater.lake.lake_look import (
    LakeWatch,
    LandingNote,
    keep_landing,
    keep_verdict,
    look_at_lake,
    read_landing,
    read_verdict,
)
from headwater.lake.layout import TableKind
from headwater.lake.location import Location
from headwater.lake.timeline import BatchEvent, Event, MergeEvent, RollbackEvent, Timeline, UpkeepEvent
from headwater.lake.upkeep import join_files
from headwater.lake.verify import Verification
from support.lake_model import HOTEL, SmallLake, lake_of_before, merging, with_columns

DEFAULT = "_default._default"


def land_as_of(small: SmallLake, as_of_s: float) -> None:
    batch = begin_batch(small.lake)
    commit_batch(small.lake, batch, [small.write_batch(batch, [0])], as_of_s=as_of_s)
    small.bucket.mark_sent([0])


def pending(small: SmallLake) -> dict[str, int | None]:
    tables = look_at_lake(str(small.directory)).tables
    return {table.name: table.pending for table in tables if table.kind is TableKind.DOCUMENTS}


def test_documents_are_as_old_as_the_table_that_waits(small: SmallLake, monkeypatch: pytest.MonkeyPatch) -> None:
    small.write(0, "a")
    small.write(0, "h", collection=HOTEL)
    land_as_of(small, 100.0)
    merge(small.lake)
    assert look_at_lake(str(small.directory)).documents_as_of_s == 100.0
    small.write(0, "b", "c")
    land_as_of(small, 200.0)
    look = look_at_lake(str(small.directory))
    assert (look.as_of_s, look.documents_as_of_s, look.documents) == (200.0, 100.0, 2)
    assert pending(small) == {DEFAULT: 2, "inventory.hotel": 0}
    monkeypatch.setattr(lake_look, "PENDING_ROWS_MAX", 1)
    assert pending(small) == {DEFAULT: None, "inventory.hotel": None}, "counting them would read them"


def test_documents_age_from_the_last_look_that_found_nothing_new(small: SmallLake) -> None:
    small.write(0, "a")
    land_as_of(small, 100.0)
    merge(small.lake)
    small.write(0, "b")
    batch = begin_batch(small.lake)
    # The bucket was asked at 150, and had nothing that the tables did not: that made no commit.
    commit_batch(small.lake, batch, [small.write_batch(batch, [0])], as_of_s=200.0, before_s=150.0)
    assert small.lake.documents_as_of_s(DEFAULT) == 150.0


def test_a_watch_sees_what_others_commit(small: SmallLake) -> None:
    small.write(0, "a")
    small.land()
    watch = LakeWatch(Location.of(str(small.directory)))
    assert watch.look().batch == 0
    small.write(0, "b")
    small.land(merges=False)
    assert (watch.look().batch, watch.look().documents) == (1, 1)
    merge(small.lake)
    assert watch.look().documents == 2, "a merge is seen though no batch has come"


def test_samples_show_the_newest_rows_as_text(tmp_path: Path) -> None:
    small = SmallLake(tmp_path / "lake", settings=with_columns(merging(history=True), {DEFAULT: "n INT"}))
    small.write(0, "old", "new", value=b'{"n": 1}')
    small.write(1, "wrong", value=b'{"n": "%s"}' % (b"x" * 500))
    small.write(1, "binary", value=b"\xff\x00")
    small.land()
    watch = LakeWatch(Location.of(str(tmp_path / "lake")))
    changes = watch.sample(TableKind.CHANGES, "")
    [binary, wrong, *_] = [dict(zip(changes.columns, row, strict=True)) for row in changes.rows]
    assert (binary["key"], binary["value"]) == ("binary", "\\xff\x00")
    assert wrong["value"] is not None
    assert (len(wrong["value"]), wrong["value"][-1]) == (lake_look.CELL_CHARS_MAX + 1, "…")
    rejects = watch.sample(TableKind.REJECTS, DEFAULT)
    assert rejects.rows[1][: rejects.columns.index("reason")] == ("wrong", "n")
    assert watch.sample(TableKind.HISTORY, DEFAULT).columns == ("key", "valid_from", "valid_to", "document")
    with pytest.raises(InvalidInput, match="there is no table documents/nowhere"):
        watch.sample(TableKind.DOCUMENTS, "nowhere")


def test_what_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    earlier = lake_of_before(tmp_path, with_columns(merging(), {"*": "n INT"}))
    look = look_at_lake(str(earlier.directory))
    assert (look.rows, look.rollbacks, look.as_of_s, look.documents_as_of_s) == (None, None, None, None)
    assert (look.verdict, look.landing, look.is_landing) == (None, None, False)
    with pytest.raises(InvalidInput, match="does not contain the tables of a landing"):
        look_at_lake(str(tmp_path))


def test_a_notebook_shows_a_lake_and_obeys_nothing_in_it(tmp_path: Path) -> None:
    small = SmallLake(tmp_path / "<script>alert(1)</script>")
    small.write(0, "a")
    small.land()
    look = look_at_lake(str(small.directory))
    shown = look._repr_html_()
    assert "<script>" not in shown
    assert "<td>documents/_default._default</td><td>1</td>" in shown
    assert repr(look).endswith("batch 0, 1 document in 1 collection, at rest>")


def test_notes_are_read_back_and_damaged_ones_say_nothing(tmp_path: Path) -> None:
    location = Location.of(str(tmp_path))
    note = LandingNote(
        time_s=2.0, started_s=1.0, source="couchbase://h/b", bucket="b", host="h", every_s=None, is_running=True
    )
    keep_landing(location, note)
    assert read_landing(location) == note
    assert keep_verdict(location, Verification(collections=()), compared="all collections") is None
    verdict = read_verdict(location)
    assert verdict is not None
    assert (verdict.is_equal, verdict.sentence) == (True, "Equal: 0 documents in 0 collections.")
    damaged: Any
    for damaged in (b"", b"[]", b"{}", b'{"time_s": 1}', b"\xff", b" " * 100_000):
        for name in ("landing", "verified"):
            (tmp_path / "_headwater" / f"{name}.json").write_bytes(damaged)
        assert (read_landing(location), read_verdict(location)) == (None, None)


def test_a_verdict_that_can_t_be_noted_is_a_verdict_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "_headwater").write_text("no folder")
    problem = keep_verdict(Location.of(str(tmp_path)), Verification(collections=()), compared="all collections")
    assert problem is not None
    assert "could not be noted" in problem


# --- what has happened to a lake, from the logs of its tables ---------------------------------------------------------


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
        == "A failover, a crash or a restore: 1 vbucket continued from an earlier seqno, on a new branch of history."
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
