"""The loop of a landing: lands batch after batch in the tables, until it is stopped or everything is landed.

A batch starts where the tables end, contains what its tasks read up to the ends of their snapshots, and is one commit
of `changes` with the offset that each vbucket has reached. A turn of the loop requests the bucket's high seqnos,
plans, runs one job over the shares, commits, merges the documents when `MergeClock` says so, and tidies up.

`LandingQuery` runs it in a thread of the driver; other threads read its status, request a merge, or stop it. It keeps
no state that the tables do not have: after a failure it reopens them and resumes from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake.exceptions import DeltaError

from headwater import errors, telemetry
from headwater.client.offsets import Offsets
from headwater.client.read_options import Start
from headwater.client.retries import Backoff
from headwater.lake.catalogs import CatalogKeeper
from headwater.lake.chosen_rows import ChosenRows
from headwater.lake.commits import CommittedBatch, begin_batch, commit_batch, first_documents, merge
from headwater.lake.delta_log import LOG_RETENTION_DAYS, TableCommit
from headwater.lake.documents_merge import Merged
from headwater.lake.iceberg import IcebergChanges, IcebergDocuments, IcebergSettings
from headwater.lake.lake import Lake
from headwater.lake.location import lake_error
from headwater.lake.set_aside import SHOWN_MAX, SetAside, set_aside_error
from headwater.lake.upkeep import (
    DEAD_BYTES_DEFAULT,
    JOIN_BYTES,
    VACUUM_HOURS_DEFAULT,
    DeadBytes,
    DeadFiles,
    check_retention,
    clean_logs,
    grow_groups,
    join_changes,
    switch_modes,
    trim_changes,
    vacuum,
)
from headwater.landing.bucket_watch import BucketWatch, Cut
from headwater.landing.planning import (
    Freshness,
    LandingLag,
    MergeClock,
    VBucketRange,
    given_offsets,
    high_offsets,
    limit_ranges,
    plan_ranges,
    rows_of_bytes,
)
from headwater.landing.source_options import SourceOptions
from headwater.landing.tasks import JobRunner, LandedShare, LandShare
from headwater.log_fields import LogEvent, fields
from headwater.options import suggest_keywords
from headwater.phrases import counted, counted_changes
from headwater.protocol.numbers import Seqno, VBucketId

JOIN_BATCHES = 64
"""The number of batches after which small files of `changes` are joined."""
TIDY_EVERY_S = 6 * 3600.0
"""How often old changes are folded and old files deleted, which examines all files. The time is counted across runs,
so that short runs do it, too."""
FAILURES_MAX = 5
"""How many batches in a row may fail because a Spark process died. The next such failure ends the landing."""
ROOM_WAIT_S_MAX = 120.0
"""How long a landing without an interval waits for room on a full disk. One with an interval waits without a limit."""
CUTS_MISSED_MAX = 5
"""How many batches in a row may miss the moment for their cut. The next one ends the landing."""
ADVICE = (
    "merges of documents take more than half of the time, or later than --fresh allows; with --merge-on-read they cost "
    "what has changed, and not what the files hold"
)
_RETRY_S_MIN, _RETRY_S_MAX = 1.0, 30.0
_WAKE_S = 0.25

logger = logging.getLogger(__name__)


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """How long to keep old files, changes and log entries, and how many bytes of old files."""

    files_hours: int = VACUUM_HOURS_DEFAULT
    """How long to keep files that no table needs any more, in hours."""
    dead_bytes: str = DEAD_BYTES_DEFAULT
    """The limit for their total size per table: `4x` for a multiple of the live table, or a size such as `10GB`."""
    changes_days: int | None = None
    """Fold `changes` older than this to the newest version of each document; None keeps all versions."""
    log_days: int = LOG_RETENTION_DAYS
    """How long to keep entries of the tables' logs, and with them readable versions, in days."""

    def __post_init__(self) -> None:
        check_retention(self.files_hours)
        DeadBytes.parse(self.dead_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingStatus:
    """The state of a landing at one moment. The command line, metrics, JSON lines and dashboard show these numbers.

    None means unknown. Totals count the tables, not only this run.
    """

    is_active: bool
    doing: str
    """`waiting`, `reading`, `merging`, `retrying`, `waiting for room`, `tidying up`,
    `registering` or `stopped`."""
    batch: int
    """The number of the last batch in the tables; -1 if there is none."""
    rows: int | None
    """Rows landed in `changes`, across all runs."""
    rollbacks: int | None
    """Rollbacks of vbuckets landed, across all runs."""
    documents: int
    """Rows of all tables of documents."""
    tables: int
    """Collections that have tables."""
    lag_seqnos: int | None
    """Seqnos that the bucket has and `changes` lacks."""
    lag_s: float | None
    """Everything written to the bucket longer ago than this is in `changes`."""
    documents_age_s: float | None
    """Everything written to the bucket longer ago than this is in `documents`."""
    last_batch_s: float | None
    """How long the last batch of this run took, without merging."""
    last_merge_s: float | None
    failures: int
    """Failures in a row."""
    failure: str | None = None
    """The last failure, until a turn succeeds."""
    tables_set_aside: int = 0
    """Tables that are set aside because of a fault, and lack changes that the others have."""
    set_aside: tuple[SetAside, ...] = ()
    """The first of these tables."""
    live_bytes: int | None = None
    """The size of the tables' current files; None before the first turn."""
    dead_bytes: int | None = None
    """The size of files that are kept for earlier versions, or that no commit has named."""
    tables_unregistered: int | None = None
    """Tables that are missing or outdated in the catalog; None without a catalog."""
    catalog_failure: str | None = None
    """The failure of the first of these tables, and what to do; None if none has failed."""
    pending: int | None = None
    """Changes in `changes` that are not merged into `documents` yet."""
    advice: str | None = None
    """What to change if merges can't achieve the `Freshness`; set when that is first detected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedBatch:
    """A batch that has been landed."""

    batch_id: int
    """Its number in the tables."""
    rows: int
    rollbacks: Mapping[int, int]
    merges: int
    """Groups of vbuckets that were merged after the batch."""
    tables: tuple[str, ...]
    """The collections that have a table now."""
    rows_by_table: Mapping[str, int]
    """Changes of documents, by collection."""
    system_events: int
    """Events of created, changed or dropped collections and scopes, one for each vbucket."""
    read_again: frozenset[int]
    """Vbuckets that will be read again from 0: a rollback went further back than `changes` reaches."""
    offsets: Offsets
    took_s: float
    """The time that it took, without merging."""
    status: LandingStatus

    @property
    def changes(self) -> int:
        """The number of changes of documents."""
        return sum(self.rows_by_table.values())


class LandingLoop:
    """Lands batch after batch, in the thread that calls `run`."""

    def __init__(
        self,
        lake: Lake,
        options: SourceOptions,
        runner: JobRunner,
        *,
        every_s: float | None,
        fresh: Freshness,
        upkeep: Upkeep,
        iceberg: IcebergSettings | None,
        chosen: ChosenRows,
        keeper: CatalogKeeper | None = None,
        grows: bool,
        is_consistent: bool = False,
        on_landed: Callable[[LandedBatch], None],
    ) -> None:
        """Without `every_s`, it ends when everything is landed that the bucket had at the first turn. If it `grows`,
        tables that have become large are cut into more groups. If it `is_consistent`, a batch ends where the bucket
        was at one moment, and only such states are merged."""
        self._lake = lake
        self._options = options
        self._runner = runner
        self._every_s = every_s
        self._upkeep = upkeep
        self._dead_files = DeadFiles(DeadBytes.parse(upkeep.dead_bytes), keep_hours=upkeep.files_hours)
        self._file_bytes: tuple[int | None, int | None] = None, None
        """Live and dead bytes, as of the last turn."""
        self._chosen = chosen
        self._grows = grows
        self._is_consistent = is_consistent
        self._is_at_cut = False
        """Whether the tables have the state of the bucket at one moment, as far as this run knows."""
        self._cuts_missed = 0
        self._on_landed = on_landed
        self._keeper = keeper
        self._iceberg_settings = iceberg
        self._iceberg: tuple[IcebergChanges, IcebergDocuments] | None = None
        self._open_iceberg(lake)
        self._stopping = threading.Event()
        self._watch = BucketWatch(options, sleep=self._pause)
        self._clock = MergeClock(fresh)
        self.lag = LandingLag(lake.held_offsets(), as_of_s=lake.state.as_of_s)
        self._last_read: dict[VBucketId, int] = {}
        self._target: dict[VBucketId, Seqno] | None = None
        self._numbers = _TableNumbers.of(lake)
        self._doing = "waiting"
        self._failures = 0
        self._failed: errors.HeadwaterError | None = None
        """The failure of the last turn: the tables have to be opened again."""
        self._failure: errors.HeadwaterError | None = None
        """The same, until a turn succeeds."""
        self._full_since_s = 0.0
        """Since when the disk has been full, if that is the failure."""
        self._merge_is_asked = False
        self._waiting_since_s: float | None = None
        """Since when changes landed by this run have waited to be merged; None if none wait."""
        self._last_batch_s: float | None = None
        self._last_merge_s: float | None = None
        self._advice: str | None = None

    # --- for other threads --------------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Stop as soon as possible. A batch that is not committed yet is dropped."""
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.close()

    def ask_for_merge(self) -> bool:
        """Request a merge of pending changes, whatever `Freshness` says. Returns whether any are pending."""
        self._merge_is_asked = self._numbers.has_pending
        return self._merge_is_asked

    def status(self, *, is_active: bool) -> LandingStatus:
        """Return the current state."""
        now_s = time.time()
        numbers, lag_s = self._numbers, self.lag.seconds(now_s)
        in_catalog = None if self._keeper is None else self._keeper.status()
        age_s = lag_s
        if numbers.has_pending or numbers.set_aside:
            merged_s = numbers.documents_as_of_s
            age_s = None if merged_s is None else max(0.0, now_s - merged_s)
        return LandingStatus(
            is_active=is_active,
            doing=self._doing if is_active else "stopped",
            batch=numbers.batch,
            rows=numbers.rows,
            rollbacks=numbers.rollbacks,
            documents=numbers.documents,
            tables=numbers.tables,
            lag_seqnos=self.lag.seqnos,
            lag_s=lag_s,
            documents_age_s=age_s,
            last_batch_s=self._last_batch_s,
            last_merge_s=self._last_merge_s,
            failures=self._failures,
            failure=None if self._failure is None else str(self._failure),
            tables_set_aside=len(numbers.set_aside),
            set_aside=numbers.set_aside[:SHOWN_MAX],
            live_bytes=self._file_bytes[0],
            dead_bytes=self._file_bytes[1],
            pending=numbers.pending,
            advice=self._advice,
            tables_unregistered=None if in_catalog is None else in_catalog.missing,
            catalog_failure=None if in_catalog is None else in_catalog.failure,
        )

    def check_set_aside(self) -> None:
        """Raise `TablesSetAside` if any table is set aside."""
        if aside := self._numbers.set_aside:
            raise set_aside_error(aside)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Land until everything is landed, or until it is stopped. Raises the error that ends it earlier, and
        `TablesSetAside` if everything is landed except for some tables."""
        backoff = Backoff(delay_s_min=_RETRY_S_MIN, delay_s_max=_RETRY_S_MAX, random=lambda: 1.0)
        try:
            while not self._stopping.is_set():
                began_s = time.monotonic()
                try:
                    if self._failed is not None:
                        self._reopen()
                    has_read = self._turn()
                    self._bound_dead_files()
                    if not self._lake.has_pending:
                        # Only now: repeated failures of a merge count, even if batches succeed in between.
                        self._failures, self._failure = 0, None
                    if self._every_s is not None:
                        self._wait(began_s + self._every_s)
                    elif not has_read or self._is_at_cut:
                        self._merge()
                        self._bound_dead_files()
                        break
                except (errors.HeadwaterError, *_OF_LIBRARIES) as error:
                    if self._stopping.is_set():
                        return
                    self._failures += 1
                    cause = self._recover(error)
                    delay_s = backoff.delay_s(self._failures)
                    self._report_failure(cause, delay_s)
                    self._pause(delay_s)
            if self._every_s is None and not self._stopping.is_set():
                if self._keeper is not None:
                    self._doing = "registering"
                    self._keeper.settle()
                self.check_set_aside()
        except BaseException:
            if not self._stopping.is_set():
                raise
        finally:
            self._doing = "stopped"
            if self._keeper is not None:
                self._keeper.close()
            self._watch.close()

    def _recover(self, error: Exception) -> errors.HeadwaterError:
        """Return the cause of a failure. Raises it unless retrying may help: a Spark worker or executor died, the
        store did not answer, the disk is full, or another tool has rearranged a table. Our other errors are final,
        because retries for them took place where they were raised."""
        if isinstance(error, errors.SparkEnded):
            raise error
        # If the lake is gone, any operation may have failed first.
        self._lake.changes.check_there()
        cause = lake_error(error, self._lake.location.uri)
        if isinstance(self._failure, errors.LakeFull) and not isinstance(cause, errors.LakeFull):
            self._failures = 1
        if isinstance(cause, errors.LakeFull):
            waited_s = time.monotonic() - self._full_since_s if isinstance(self._failure, errors.LakeFull) else 0.0
            is_final = self._every_s is None and waited_s > ROOM_WAIT_S_MAX
        else:
            can_get_better = isinstance(cause, errors.LakeInUse | errors.LakeUnreachable | errors.QueryFailed)
            is_final = isinstance(cause, errors.LakeTaken) or not can_get_better or self._failures > FAILURES_MAX
        if is_final:
            raise cause from error
        self._failed = cause
        return cause

    def _report_failure(self, cause: errors.HeadwaterError, delay_s: float) -> None:
        """Log a failure that is retried. A full disk is logged once, however often it is retried."""
        about = fields(event=LogEvent.BATCH_FAILED, duration_s=delay_s)
        if not isinstance(cause, errors.LakeFull):
            self._doing = "retrying"
            in_a_row = counted(self._failures, "failure")
            logger.warning(
                "batch failed, %s in a row, trying again in %.0f s: %s", in_a_row, delay_s, cause, extra=about
            )
        else:
            self._doing = "waiting for room"
            if not isinstance(self._failure, errors.LakeFull):
                self._full_since_s = time.monotonic()
                logger.warning("waiting for room: %s", cause, extra=about)
        self._failure = cause

    def _reopen(self) -> None:
        """Open the tables again: after a failure, only their state is valid, not the one in memory."""
        before = self._lake
        lake = Lake.open(
            before.location,
            bucket_uuid=before.facts.bucket_uuid,
            settings=before.settings,
            step=before.step,
            writer=before.writer,
            aside=before.aside,
        )
        if lake is None:
            raise before.location.gone()
        if isinstance(self._failed, errors.LakeInUse):
            # Either a tool has rearranged a table, or a store has kept our commit, lost its answer, and refused it
            # when it was sent again.
            lake.check_writer(before.last_batch)
        self._lake, self._failed, self._is_at_cut = lake, None, False
        self._numbers = _TableNumbers.of(lake)
        # The failed operation may have left files.
        self._dead_files.forget()
        self.lag.on_offsets(lake.held_offsets())
        self._open_iceberg(lake)

    def _open_iceberg(self, lake: Lake) -> None:
        if (settings := self._iceberg_settings) is not None:
            self._iceberg = (IcebergChanges.open(settings, lake), IcebergDocuments.open(settings, lake))

    def _publish(self, lake: Lake) -> None:
        """Register all tables in the catalog, and update the Iceberg tables from the Delta tables, if there are any.
        Before the first batch there is nothing to register."""
        if self._keeper is not None and lake.last_batch >= 0:
            self._keeper.offer(lake)
        for tables in self._iceberg or ():
            tables.catch_up(lake)

    def _wait(self, until_s: float) -> None:
        """Wait until the next batch is due. Merge pending changes if that is due earlier."""
        self._doing = "waiting"
        while (left_s := until_s - time.monotonic()) > 0 and not self._stopping.is_set():
            self._pause(min(left_s, _WAKE_S))
            self._merge_if_due()
            self._doing = "waiting"

    def _pause(self, seconds: float) -> None:
        """Sleep, or raise `_Stopped` as soon as the landing is stopped."""
        if self._stopping.wait(seconds):
            raise _Stopped

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Land what is new in the bucket. Returns whether there was anything."""
        lake = self._lake
        lake.refresh()
        if lake.try_set_aside():
            self._numbers = _TableNumbers.of(lake)
        switch_modes(lake, self._jobs)
        self._publish(lake)
        self._begin_at_start(lake)
        lake.step("plan")
        looked_s = time.time()
        held = lake.held_offsets()
        cut = self._watch.cut(held) if self._is_consistent else None
        survey = self._watch.survey(held) if cut is None else cut.survey
        highs = {vbucket: status.high_seqno for vbucket, status in survey.items()}
        self.lag.on_survey(survey, at_s=looked_s)
        if self._every_s is None and self._target is None and cut is None:
            self._target = highs
        ranges = plan_ranges(held, survey, boundaries=lake.boundaries, target=self._target)
        if not ranges:
            self._is_at_cut = self._is_consistent
            self._merge_if_due()
            return False
        chosen = limit_ranges(ranges, self._rows_max, last_read=self._last_read, row_share=self._watch.row_share.value)
        is_all = len(chosen) == len(ranges) and (self._target is None or self._target == highs)
        with self._span("headwater.land.batch", {"headwater.vbuckets": len(chosen)}) as span:
            self._take_batch(lake, chosen, cut, span, as_of_s=looked_s if is_all else self.lag.as_of_s)
        return True

    def _take_batch(
        self, lake: Lake, chosen: list[VBucketRange], cut: Cut | None, span: telemetry.Span, *, as_of_s: float | None
    ) -> None:
        """Land the planned ranges, and do what is due after a batch."""
        began_s = time.monotonic()
        self._doing = "reading"
        landed = self._land(lake, chosen, cut, as_of_s=as_of_s)
        if landed is None:
            return
        committed, written = landed
        span.set(
            {
                "headwater.batch": committed.number,
                "headwater.rows": committed.rows,
                "headwater.rollbacks": len(committed.rollbacks),
            }
        )
        self._is_at_cut = self._is_consistent and not committed.read_again
        self._last_batch_s = time.monotonic() - began_s
        # Update this before the lag: `processAllAvailable` asks for pending changes once the lag says that all is
        # landed.
        self._numbers = _TableNumbers.of(lake)
        self.lag.on_offsets(lake.held_offsets(), is_missing=bool(committed.read_again))
        if lake.has_pending and self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        merges = 0
        try:
            self._publish(lake)
            merges = self._merge(written) if written else self._merge_if_due()
            self._keep_tidy(lake, committed.number)
            self._numbers = _TableNumbers.of(lake)
        finally:
            # The batch is landed, even if this fails.
            self._report(committed, merges)

    def _span(self, name: str, about: telemetry.Attributes) -> AbstractContextManager[telemetry.Span]:
        where = {"db.namespace": self._options.settings.bucket, "headwater.lake": self._lake.location.uri}
        return telemetry.span(name, {**telemetry.SYSTEM, **where, **about}, no_faults=(_Stopped,))

    @property
    def _rows_max(self) -> int | None:
        return self._options.rows_per_trigger_max or rows_of_bytes(self._options.bytes_per_trigger_max)

    def _begin_at_start(self, lake: Lake) -> None:
        """If the landing does not start at the beginning, commit the start offsets before the first batch."""
        if self._options.start is Start.BEGINNING or lake.last_batch >= 0 or lake.state.offsets.offsets:
            return
        if isinstance(self._options.start, Offsets):
            self._options.start.check_bucket(lake.facts.bucket_uuid)
            start = given_offsets(self._options.start)
        elif isinstance(self._options.start, datetime):
            start = self._watch.find_start()
        else:
            start = high_offsets(lake.facts.bucket_uuid, self._watch.survey())
        lake.commit_changes(TableCommit(state=replace(lake.state, offsets=start)))

    def _land(
        self, lake: Lake, ranges: list[VBucketRange], cut: Cut | None, *, as_of_s: float | None
    ) -> tuple[CommittedBatch, list[Merged]] | None:
        """Run and commit a batch. Also returns documents that the tasks have already written. Returns None if the
        batch was given up and has to be planned again."""
        lake.step("plan tasks")
        batch = begin_batch(lake)
        first = first_documents(lake)
        group_of = None if first is None else lake.facts.group_of
        shares, bucket = self._watch.shares(ranges, lake.held_offsets(), group_of)
        held = batch.writer.held_seqnos
        tasks = [
            LandShare(
                options=self._options,
                bucket=bucket,
                ranges=share,
                chosen=self._chosen,
                first=first,
                is_cut=cut is not None,
                writer=replace(batch.writer, held_seqnos={it.vbucket: held.get(it.vbucket, -1) for it in share}),
            )
            for share in shares
        ]
        landed: list[LandedShare] = self._jobs(tasks)
        if not self._watch.still_selects(bucket):
            # A collection was recreated under its name during the batch, whose filter did not know the new id.
            return None
        if cut is not None and self._misses(cut, landed):
            return None
        reports = [share.report for share in landed]
        with self._span("headwater.land.commit", {"headwater.batch": batch.number}):
            committed = commit_batch(lake, batch, reports, self._jobs, as_of_s=as_of_s, before_s=self.lag.as_of_s)
        self._watch.row_share.on_batch(ranges, rows=committed.rows)
        lake.step("after the commit")
        self._last_read |= dict.fromkeys((it.vbucket for it in ranges), committed.number)
        return committed, [] if committed.rollbacks else [part for share in landed for part in share.documents]

    def _misses(self, cut: Cut, landed: Sequence[LandedShare]) -> bool:
        """Return whether the read data differs from the bucket at the cut. Raises if that happens too often."""
        missed = next((share.missed for share in landed if share.missed is not None), None)
        if missed is None and not self._watch.holds(cut):
            missed = "a collection was made, changed or dropped meanwhile"
        if missed is None:
            self._cuts_missed = 0
            return False
        self._cuts_missed += 1
        if self._cuts_missed > CUTS_MISSED_MAX:
            raise errors.NoConsistentCut(
                f"{self._cuts_missed} batches in a row could not be cut at one moment: {missed}",
                hint="Have the server keep its history for longer than a batch takes (--history-seconds and "
                "--history-bytes of headwater serve); where the first one takes long, land once without --consistent",
            )
        about = fields(event=LogEvent.BATCH_FAILED, reason=missed)
        logger.warning("batch given up, it can't be cut at one moment: %s", missed, extra=about)
        return True

    def _jobs(self, tasks: Sequence[Any]) -> list[Any]:
        if self._stopping.is_set():
            raise _Stopped
        return self._runner(tasks)

    # --- after a batch ------------------------------------------------------------------------------------------------

    def _merge_if_due(self) -> int:
        lake = self._lake
        if not lake.has_pending or (self._is_consistent and not self._is_at_cut):
            return 0
        # Changes left by an earlier run have waited long enough.
        waited_s = float("inf") if self._waiting_since_s is None else time.monotonic() - self._waiting_since_s
        is_due = self._clock.is_due(
            now_s=time.monotonic(),
            waited_s=waited_s,
            changed_bytes=lake.pending.size_bytes,
            expected_bytes=lake.merge_bytes,
        )
        if is_due or lake.pending.urgent or self._merge_is_asked:
            return self._merge()
        return 0

    def _merge(self, written: Sequence[Merged] = ()) -> int:
        """Merge all pending `changes` into the documents. Returns the number of merges."""
        if not self._lake.has_pending:
            return 0
        self._doing, began_s = "merging", time.monotonic()
        self._merge_is_asked = False
        waited_s = 0.0 if self._waiting_since_s is None else began_s - self._waiting_since_s
        with self._span("headwater.land.merge", {"headwater.bytes": self._lake.pending.size_bytes}) as span:
            merges = merge(self._lake, self._jobs, written)
            span.set({"headwater.merges": merges})
        self._waiting_since_s = None
        ended_s = time.monotonic()
        self._clock.on_merged(began_s=began_s, ended_s=ended_s, waited_s=waited_s)
        if self._clock.is_behind and self._advice is None and not self._lake.is_merged_on_read:
            self._advice = ADVICE
            logger.warning("%s", ADVICE, extra=fields(event=LogEvent.MERGES_SLOW))
        self._failures, self._failure = 0, None
        self._last_merge_s = ended_s - began_s
        self._numbers = _TableNumbers.of(self._lake)
        self._publish(self._lake)
        return merges

    def _keep_tidy(self, lake: Lake, number: int) -> None:
        if self._grows and lake.facts.grown(lake.documents) > lake.facts.groups:
            self._doing = "tidying up"
            grow_groups(lake, self._jobs)
        if number % JOIN_BATCHES == JOIN_BATCHES - 1:
            self._doing = "tidying up"
            join_changes(lake, self._jobs, bytes_max=JOIN_BYTES)
        if time.time() - lake.state.tidied_s < TIDY_EVERY_S:
            return
        self._doing = "tidying up"
        upkeep = self._upkeep
        if upkeep.changes_days is not None:
            trim_changes(lake, datetime.now(UTC) - timedelta(days=upkeep.changes_days), self._jobs)
        vacuum(lake, retention_hours=upkeep.files_hours)
        clean_logs(lake, retention_days=upkeep.log_days, bound=self._dead_files.bound)
        self._dead_files.forget()
        lake.commit_changes(TableCommit(state=replace(lake.state, tidied_s=time.time())))

    def _bound_dead_files(self) -> None:
        self._dead_files.keep_within_bound(self._lake)
        self._file_bytes = self._dead_files.live_bytes, self._dead_files.dead_bytes

    def _report(self, committed: CommittedBatch, merges: int) -> None:
        assert self._last_batch_s is not None, "a batch has just been landed"
        landed = LandedBatch(
            batch_id=committed.number,
            rows=committed.rows,
            rollbacks=committed.rollbacks,
            merges=merges,
            tables=tuple(sorted(self._lake.tables)),
            rows_by_table=committed.rows_by_table,
            system_events=committed.system_events,
            read_again=committed.read_again,
            offsets=self._lake.held_offsets(),
            took_s=self._last_batch_s,
            status=self.status(is_active=True),
        )
        logger.info(
            "batch %d landed: %s, %s",
            landed.batch_id,
            counted_changes(landed.changes, landed.system_events),
            counted(len(landed.rollbacks), "rollback"),
            extra=fields(
                event=LogEvent.BATCH_LANDED,
                batch=landed.batch_id,
                changes=landed.changes,
                system_events=landed.system_events,
                rollbacks=len(landed.rollbacks),
                duration_s=round(landed.took_s, 3),
            ),
        )
        self._on_landed(landed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableNumbers:
    """The numbers that the tables record. The loop's thread makes this, and any thread may read it."""

    batch: int
    rows: int | None
    rollbacks: int | None
    documents: int
    tables: int
    has_pending: bool
    pending: int
    documents_as_of_s: float | None
    """Everything written before this time is in `documents`; used if something is pending or set aside."""
    set_aside: tuple[SetAside, ...]

    @classmethod
    def of(cls, lake: Lake) -> _TableNumbers:
        set_aside = lake.aside.tables
        times = [lake.documents_as_of_s(name) for name in lake.pending.names | {table.name for table in set_aside}]
        return cls(
            batch=lake.last_batch,
            rows=None if lake.state.totals is None else lake.state.totals.rows,
            rollbacks=None if lake.state.totals is None else lake.state.totals.rollbacks,
            documents=lake.documents,
            tables=len(lake.tables),
            has_pending=lake.has_pending,
            pending=lake.pending.rows.total(),
            documents_as_of_s=None if None in times else min((at for at in times if at is not None), default=None),
            set_aside=set_aside,
        )


_OF_LIBRARIES = (OSError, MemoryError, DeltaError, pa.ArrowException)
"""Errors that are translated to ours. Any other error is a bug, and ends the landing with its traceback."""


class _Stopped(Exception):
    """The user has stopped the landing. This is not a failure."""
