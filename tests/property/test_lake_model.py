"""A lake against a model of the bucket, through rollbacks, replays and crashes between any two steps.

After every batch that was landed, however many attempts it took, the tables must hold what the model has: the documents
read in between and after a merge, the history, and `changes` with nothing in it alive twice. Small row groups, buffers
and files make every boundary come up soon.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headwater.client.offsets import Offsets
from headwater.lake import change_files, change_rows, data_files, history, layout, upkeep
from headwater.lake.column_rules import ColumnRules, OnMismatch
from headwater.lake.commits import begin_batch, commit_batch, merge
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.typed_columns import ColumnMode, TypedColumns
from headwater.lake.upkeep import DeadBytes, DeadFiles, grow_groups, join_files, trim_changes
from headwater.protocol.numbers import VBucketId
from support.lake_model import (
    BUCKET_UUID,
    Change,
    Follower,
    ModelBucket,
    Place,
    Row,
    batches,
    check_documents,
    check_history,
    check_inferred,
    check_no_duplicates,
    check_sorted,
    documents,
    expected_history,
    place_of,
    table_rows,
    verify_model,
)

VBUCKETS = 5
KEYS = [b"a", b"b", b"c", b"\xff\xfe", b"\\xff"]
VALUES = [
    b'{"n": 1}',
    b'{"n": "two"}',
    b'{"n": 2.5, "\\u00e4": 7}',
    b'{"n": 3, "\xc3\xa4": null}',
    b'{"n": -4, "at": 5, "m": {"z": null, "x": 2}}',
    b'{"n": 1e30, "at": "2024-01-01T01:00:00Z", "m": {"x": "y"}}',
    b'{"at": "2024-01-01", "m": {"x": 1}}',
    b'{"at": "soon", "m": [1], "N": true}',
    b'{"n": ',
    b"[]",
    b"\x00\xff",
    b"",
]
"""Fields come, change their type, and go."""
FITTING = {VALUES[0]: 1, VALUES[3]: 3, VALUES[4]: -4, VALUES[6]: None, VALUES[7]: None, b"{}": None}
"""What a fixed column `n BIGINT` holds, of all values that fit it."""
CLUSTER_BY = {"fixed": ("n",), "none": ("changed_at",), "inferred": ("at", "m", "n"), "switched": ("seqno",)}
RULES = [
    ColumnRules(),
    ColumnRules(on_mismatch=OnMismatch.COLUMN),
    ColumnRules(on_mismatch=OnMismatch.REJECT, exclude=["a*"], rename=[]),
    ColumnRules(exclude=[], rename=[("n", "number"), ("m*", "x_*")]),
]
NAMES = {8: ("inventory", "hotel"), 9: ("inventory", "route"), 10: ("inventory", "hotel")}
"""The third has the name of the first: it was dropped and made again."""

vbuckets = st.integers(0, VBUCKETS - 1)
crash_steps = st.sampled_from([None, None, 0, 1, 2, 3, 4, 5, 6, 8])


class Crash(Exception):
    """The process is gone."""


class CrashAt:
    """Lets some steps pass, and no more."""

    def __init__(self, steps: int | None) -> None:
        self._left = steps

    def __call__(self, name: str) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Crash(name)


class LakeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="lake-model-"))
        self.bucket = ModelBucket(VBUCKETS)
        self.delivered: list[list[Change]] = [[] for _ in range(VBUCKETS)]
        self.batches = 0
        self.patches = ExitStack()
        self.followers: dict[str, Follower] = {}

    @initialize(
        groups=st.sampled_from([1, 2, 4, 5]),
        small_group_documents=st.sampled_from([-1, 1, 4]),
        keep_bytes=st.sampled_from([0, 300, 2**40]),
        row_group_rows=st.sampled_from([2, 128]),
        buffer_bytes=st.sampled_from([200, 1000, 2**27]),
        columns=st.sampled_from(["fixed", "none", "inferred", "switched"]),
        is_clustered=st.booleans(),
        rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=3),
        modes=st.sampled_from([(False,), (True,), (True, None, False)]),
        has_feed=st.booleans(),
        document=st.sampled_from([*layout.DocumentForm]),
    )
    def begin(
        self,
        groups: int,
        small_group_documents: int,
        keep_bytes: int,
        row_group_rows: int,
        buffer_bytes: int,
        columns: str,
        is_clustered: bool,
        rules: list[ColumnRules],
        modes: tuple[bool | None, ...],
        has_feed: bool,
        document: layout.DocumentForm,
    ) -> None:
        self.has_variants = document is layout.DocumentForm.VARIANT
        self.groups, self.buffer_bytes, self.columns, self.modes = groups, buffer_bytes, columns, modes
        self.rules = rules
        for module, name, value in (
            (change_rows, "KEEP_BYTES", keep_bytes),
            (history, "FEED_HELD_BYTES", keep_bytes),
            (change_files, "ROW_GROUP_ROWS", row_group_rows),
            (change_files, "_GROUP_ROWS_MIN", row_group_rows),
            (data_files, "ROW_GROUP_ROWS", row_group_rows),
            (data_files, "KEYED_ROW_GROUP_ROWS", row_group_rows),
            (upkeep, "JOIN_FILES_MIN", 2),
            (upkeep, "JOIN_BYTES_A_TIME", 2000),
            (upkeep, "TRIM_ROWS_PER_DOCUMENT", 0),
            (layout, "GROUP_DOCUMENTS", 1),
            (layout, "SMALL_GROUP_DOCUMENTS", small_group_documents),
        ):
            self.patches.enter_context(patch.object(module, name, value))
        fixed = {"*": TypedColumns.from_ddl("n BIGINT")} if columns == "fixed" else {}
        merging = MergeRules(history=True, file_bytes=4000, change_feed=has_feed)
        infer = columns not in ("none", "switched")
        self.cluster_by = CLUSTER_BY[columns] if is_clustered else ()
        self.settings = LakeSettings(
            merging=merging, columns=fixed, infer=infer, cluster_by={"*": self.cluster_by}, document=document
        )
        self.bucket.names.update(NAMES)

    def teardown(self) -> None:
        self.patches.close()
        shutil.rmtree(self.directory)

    # --- the bucket -----------------------------------------------------------------------------------------------

    @rule(
        vbucket=vbuckets,
        keys=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), min_size=1, max_size=6),
        collection=st.sampled_from([0, 0, 8, 9, 10]),
        flags=st.sampled_from([0, 2**32 - 1]),
    )
    def write(self, vbucket: int, keys: list[tuple[bytes, bytes]], collection: int, flags: int) -> None:
        for key, value in keys:
            is_json = value not in (b"\x00\xff", b"")
            self.bucket.change(vbucket, "mutation", collection, key, value, is_json=is_json, flags=flags)

    @rule(
        vbucket=vbuckets,
        key=st.sampled_from(KEYS),
        collection=st.sampled_from([0, 0, 8, 9, 10]),
        op=st.sampled_from(["deletion", "expiration"]),
    )
    def remove(self, vbucket: int, key: bytes, collection: int, op: str) -> None:
        self.bucket.change(vbucket, op, collection, key)

    @rule(collection=st.sampled_from([8, 9, 10]), op=st.sampled_from(["collection_dropped", "collection_created"]))
    def end_collection(self, collection: int, op: str) -> None:
        self.bucket.event(op, collection)

    @rule(vbucket=vbuckets, part=st.floats(0, 1))
    def fail_over(self, vbucket: int, part: float) -> None:
        self.bucket.fail_over(vbucket, int(self.bucket.vbuckets[vbucket].high_seqno * part))

    # --- landing --------------------------------------------------------------------------------------------------

    @rule(
        chosen=st.sets(vbuckets, min_size=1),
        back_seqnos=st.sampled_from([0, 0, 1, 3, 1000]),
        crashes=st.lists(crash_steps, max_size=3),
        deduplicated=st.booleans(),
        merges=st.booleans(),
        join=st.booleans(),
        size=st.sampled_from([1, 2, 100]),
        goes_on=st.booleans(),
        careless=st.sampled_from([False, False, False, True]),
        follows=st.booleans(),
        parting=st.none() | st.tuples(vbuckets, st.floats(0, 1), st.lists(st.sampled_from(KEYS), max_size=3)),
    )
    def land(
        self,
        chosen: set[int],
        back_seqnos: int,
        crashes: list[int | None],
        deduplicated: bool,
        merges: bool,
        join: bool,
        size: int,
        goes_on: bool,
        careless: bool,
        follows: bool,
        parting: tuple[int, float, list[bytes]] | None,
    ) -> None:
        # What has parted must be looked at, or the model can't say what the tables should have.
        chosen |= {number for number, it in enumerate(self.bucket.vbuckets) if it.fork_seqno is not None}
        sending = sorted(chosen)
        reading: dict[str, Any] = {"back_seqnos": back_seqnos, "deduplicated": deduplicated, "careless": careless}
        rows = {v: self.bucket.rows(v, **reading) for v in sending}
        self.note_delivered(rows)
        if parting is not None and parting[0] in chosen:
            rows[parting[0]] += self.part_while_read(*parting, reading)
        lake = self.open(CrashAt(None))
        for attempt, crash in enumerate([*crashes, None]):
            try:
                if attempt and not goes_on:
                    lake = self.open(CrashAt(None))
                # Else the process goes on after a failure, with the same object.
                lake.step = CrashAt(crash)
                # What the tables hold is not read again.
                if lake.last_batch < self.batches:
                    self.attempt(lake, sending, rows, size)
                # As the pipeline does: what a rollback took back is not left in the tables.
                if merges or lake.pending.urgent:
                    merge(lake)
                if join:
                    join_files(lake, file_bytes=4000)
                break
            except Crash:
                continue
        self.batches += 1
        if self.batches == 2:
            self.settings = replace(self.settings, merging=replace(self.settings.merging, change_feed=True))
            if self.columns == "switched":
                self.settings = replace(self.settings, columns={"*": ColumnMode.INFER})
        self.bucket.mark_sent(sending)
        self.begin_again_where_wiped(lake, sending)
        self.check(merges=merges)
        if follows:
            self.follow()

    def follow(self) -> None:
        """Copies that know the change feed alone hold what the tables hold."""
        for follower in self.followers.values():
            follower.follow()
        for directory in (self.directory / "documents").glob("*"):
            if DeltaTable(directory).metadata().configuration.get(layout.FEED_PROPERTY) == "true":
                self.followers.setdefault(directory.name, Follower(directory))

    def begin_again_where_wiped(self, lake: Lake, sending: Sequence[int]) -> None:
        """A vbucket with a rollback that `changes` does not reach back to is read from 0 by the next batch."""
        wiped = [vbucket for vbucket in sending if lake.held_offsets().get(VBucketId(vbucket)) is None]
        for vbucket in wiped:
            self.bucket.mark_unread(vbucket)
            self.delivered[vbucket] = []

    @precondition(lambda self: self.batches)
    @rule(merges=st.booleans(), crash=crash_steps)
    def trim(self, merges: bool, crash: int | None) -> None:
        with contextlib.suppress(Crash):
            lake = self.open(CrashAt(crash))
            if merges:
                merge(lake)
            trim_changes(lake, datetime.now(UTC))

    @precondition(lambda self: self.batches)
    @rule()
    def delete_dead_files(self) -> None:
        """As if all of them were old: no table needs any."""
        self.follow()
        dead = DeadFiles(DeadBytes(0.0, 0), keep_hours=168)
        dead.keep_within_bound(self.open(CrashAt(None)), now_s=time.time() + 1e6)

    @precondition(lambda self: self.batches)
    @rule(crash=crash_steps)
    def grow(self, crash: int | None) -> None:
        """Readers see the same also where it has been cut off between two tables."""
        with contextlib.suppress(Crash):
            grow_groups(self.open(CrashAt(crash)), file_bytes=4000)
        # What has parted is looked at by the next batch; until then the model can't say what the tables should have.
        if all(it.fork_seqno is None for it in self.bucket.vbuckets):
            self.check(merges=False)

    def part_while_read(
        self, vbucket: int, part: float, keys: list[bytes], reading: dict[str, Any]
    ) -> list[dict[str, object]]:
        """After what has been read of it, a vbucket fails over, and what follows is read in the same batch."""
        self.bucket.mark_sent([vbucket])
        self.fail_over(vbucket, part)
        for key in keys:
            self.bucket.change(vbucket, "mutation", 0, key, b"{}")
        rows = self.bucket.rows(vbucket, **reading)
        self.note_delivered({vbucket: rows})
        return rows

    def open(self, step: CrashAt) -> Lake:
        rules = replace(self.settings.merging, on_read=self.modes[self.batches % len(self.modes)])
        asked = {"*": self.rules[self.batches % len(self.rules)]} if self.columns == "inferred" else {}
        return Lake.create(
            str(self.directory),
            bucket_uuid=BUCKET_UUID,
            vbuckets=VBUCKETS,
            groups=self.groups,
            settings=replace(self.settings, merging=rules, rules=asked),
            step=step,
        )

    def attempt(self, lake: Lake, sending: Sequence[int], rows: dict[int, list[dict[str, object]]], size: int) -> None:
        batch = begin_batch(lake)
        writer = replace(batch.writer, buffer_bytes=self.buffer_bytes)
        shares = [[v for v in sending if v % 2 == share] for share in (0, 1)]
        reports = [writer.write(batches([row for v in share for row in rows[v]], size)) for share in shares]
        places = self.bucket.offsets(sending)
        for report, share in zip(reports, shares, strict=True):
            report.reached = {VBucketId(v): places[VBucketId(v)] for v in share}
        lake.step("written")
        commit_batch(lake, batch, reports)

    def note_delivered(self, rows: dict[int, list[dict[str, object]]]) -> None:
        for vbucket, sent in rows.items():
            by_seqno = {change.seqno: change for change in self.bucket.vbuckets[vbucket].changes}
            for row in sent:
                if row["op"] == "rollback":
                    kept = row["seqno"]
                    assert isinstance(kept, int)
                    self.delivered[vbucket] = [it for it in self.delivered[vbucket] if it.seqno <= kept]
                else:
                    self.delivered[vbucket].append(by_seqno[row["seqno"]])

    # --- what must be true ----------------------------------------------------------------------------------------

    def check(self, *, merges: bool) -> None:
        expected = self.bucket.sent_documents()
        changes = table_rows(self.directory / "changes")
        check_no_duplicates(changes)
        lake = Lake.open(str(self.directory))
        assert lake.held_offsets() == self.bucket.offsets()
        now = [rows for name in lake.tables for rows in lake.documents_now(name)]
        check_documents((row for rows in now for row in rows.to_pylist()), expected, variants=self.has_variants)
        self.check_verified(lake)
        self.check_boundaries(lake)
        for name in lake.tables:
            self.check_offsets(name, lake.held_offsets(name))
        if merges:
            assert not lake.has_pending
            merged = [row for name in lake.tables for row in table_rows(self.directory / "documents" / name)]
            check_documents(merged, expected, variants=self.has_variants)
            for name in lake.tables:
                check_sorted(self.directory / "documents" / name, self.cluster_by)
            if self.columns == "fixed":
                self.check_fixed(merged, expected, lake)
            for name, table in lake.tables.items():
                has_all = not table.rules.exclude and (len(self.rules) == 1 or all(not it.rename for it in self.rules))
                if table.is_inferred and not lake.pending.has(name, 0) and has_all:
                    check_inferred(self.directory, name)
                    if self.columns == "inferred" and len(self.rules) == 1:
                        check_inferred(self.directory, name, "history")
            history = [row for name in lake.tables for row in table_rows(self.directory / "history" / name)]
            check_history(history, expected_history(self.delivered))

    def check_fixed(self, rows: list[Row], expected: dict[Place, Change], lake: Lake) -> None:
        """The column has the field where a document fits, and what does not fit is in `rejects`."""
        assert {place_of(row): row["n"] for row in rows} == {
            place: FITTING.get(change.value or b"") for place, change in expected.items()
        }
        rejects = [row for name in lake.tables for row in table_rows(self.directory / "rejects" / name)]
        unfit = {place: it for place, it in expected.items() if it.value not in FITTING}
        check_documents(rejects, unfit, variants=self.has_variants)
        assert all(row["reason"] for row in rejects)

    def check_boundaries(self, lake: Lake) -> None:
        """Where a rollback can go back to, all there was has been handed out; also for one that reads the log only."""
        for vbucket, place in enumerate(self.bucket.vbuckets):
            known = lake.boundaries.get(VBucketId(vbucket), [])
            assert sorted(known) == known
            assert {*known} <= {*place.whole_seqnos}
            assert VBucketId(vbucket) not in lake.held_offsets() or known[-1] == place.sent_seqno

    def check_offsets(self, name: str, offsets: Offsets) -> None:
        """A table, merged or not, holds just what its offsets say."""
        expected = {
            (int(vbucket), *place): change
            for vbucket, at in offsets.offsets.items()
            for place, change in documents(self.bucket.vbuckets[vbucket].upto(at.seqno)).items()
            if ".".join(self.bucket.names[place[0]]) == name
        }
        check_documents(table_rows(self.directory / "documents" / name), expected, variants=self.has_variants)

    def check_verified(self, lake: Lake) -> None:
        """`headwater verify` finds nothing wrong: what the tables have not reached is pending, the rest is equal."""
        report = verify_model(lake, self.bucket)
        assert report.findings.first() == ()
        landed = sum(counts.landed for counts in report.counts.values())
        pending = sum(counts.pending for counts in report.counts.values())
        held = [row for name in lake.tables for row in table_rows(self.directory / "documents" / name)]
        assert landed <= len(held)
        assert pending or landed == len(held)


LakeMachine.TestCase.settings = settings(
    max_examples=settings().max_examples // 4,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestLakeMachine = LakeMachine.TestCase
