"""The landing pipeline: copies a bucket into Delta tables, batch by batch, exactly once.

`Landing` has the settings of a landing. `start` checks them, creates the tables' directory, and returns a
`LandingQuery`, which has the methods of Spark's StreamingQuery. `loop` does the work on the driver; `tasks` and the
lake do it in the tasks. `headwater.landing.land` and the command line call this.

The tables are the only state: a run that died has either committed a batch or not, and the next run resumes after the
last commit. So no state may be kept outside of them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from headwater.client.blocking_bucket import Surveyor, bootstrap, look_at_bucket
from headwater.client.collection_names import CollectionNames
from headwater.errors import HeadwaterError, InvalidInput, LakeError, LakeFull, LakeGone, LakeUnreachable
from headwater.lake.catalogs import Catalog, CatalogKeeper, CatalogSettings
from headwater.lake.chosen_rows import ChosenRows, Transform
from headwater.lake.iceberg import IcebergSettings, load_catalog_of
from headwater.lake.lake import Lake, LakeSettings, landed_selection
from headwater.lake.lake_look import LANDING_EVERY_S, LandingNote, html_facts, keep_landing
from headwater.lake.layout import STATE_FOLDER, DocumentForm, TableKind, groups_for
from headwater.lake.location import OWN_FOLDER, Location
from headwater.lake.set_aside import AsideTables
from headwater.lake.table_state import Selection
from headwater.landing.bucket_watch import BucketWatch, SeenCollection
from headwater.landing.loop import LandedBatch, LandingLoop, LandingStatus, Upkeep
from headwater.landing.planning import Freshness
from headwater.landing.source_options import Conditions, Mode, SourceOptions, ValueForm
from headwater.landing.tasks import JobRunner, SessionRunner
from headwater.log_fields import LogEvent, fields
from headwater.options import parse_interval_s
from headwater.phrases import counted

LAG_EVERY_S = 1.0
"""How often the bucket's high seqnos are requested, for the lag."""
_PROGRESS_KEPT = 100
_CANCEL_EVERY_S = 0.5
_POLL_S = 0.05
_FAILURE_CHARS_MAX = 1000

logger = logging.getLogger(__name__)

OnBatch = Callable[[LandedBatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """The settings of a landing: a bucket, a directory, and how to land the bucket there."""

    source: Mapping[str, str]
    """Options of the `dcp` source."""
    into: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of the object store that contains `into`."""
    lake: LakeSettings = field(default_factory=LakeSettings)
    fresh: Freshness = field(default_factory=Freshness)
    upkeep: Upkeep = field(default_factory=Upkeep)
    groups: int | None = None
    """The number of parts of new tables, which is then fixed; None adapts it to the number of documents."""
    iceberg: IcebergSettings | None = None
    """Publish `changes` and `documents` as Iceberg tables, too."""
    catalog: CatalogSettings | None = None
    """Register all tables, and keep them registered."""
    transform: Transform | None = None
    """The function that changes pass through before they are written; see `headwater.lake.chosen_rows`."""
    consistent: bool = False
    """Make every version of `documents` a state that the bucket had. The server must keep history."""

    def prepare(self) -> Lake:
        """Check the bucket and the options, and open or create the tables. If a check fails, nothing is created."""
        options = SourceOptions.make(self.source)
        scopes, collections = options.read.scopes, options.read.collections
        if options.columns or options.mode is not Mode.CHANGES:
            raise InvalidInput("tables hold whole changes", hint="Omit the options columns and mode")
        if "op" in options.where.columns:
            raise InvalidInput(
                "the condition of a landing is on documents, and op says what a change is",
                hint="Leave op out of where: removals are always landed",
            )
        if options.value_form is not ValueForm.BINARY or options.read.no_value:
            raise InvalidInput(
                "tables hold the values of the bucket as they are", hint="Omit the options value and noValue"
            )
        if self.consistent and (options.rows_per_trigger_max or options.bytes_per_trigger_max):
            raise InvalidInput(
                "a batch that is cut at one moment has all vbuckets",
                hint="Omit the limit of a batch, or consistent",
            )
        if self.iceberg is not None and self.lake.merging.on_read:
            raise InvalidInput(
                "an Iceberg table has the very files of `documents`, and can't have their deletion vectors",
                hint="Omit merge-on-read or the Iceberg catalog",
            )
        if self.iceberg is not None and self.lake.document == DocumentForm.VARIANT:
            raise _no_iceberg_variants()
        transform = None if self.transform is None else self.transform.name
        location = Location.of(self.into, self.storage_options)
        # Raises if the bucket does not exist.
        bucket = bootstrap(options.settings).cluster_map
        if self.consistent:
            with contextlib.closing(BucketWatch(options)) as watch:
                watch.check_history()
        if self.iceberg is not None:
            load_catalog_of(self.iceberg, location)
        if self.catalog is not None and not self.catalog.needs_session:
            self.catalog.open_service(region=self.storage_options.get("aws_region"))
        location.check()
        named = options.settings.bucket_label
        lake = Lake.open(location, bucket_uuid=bucket.uuid, bucket_name=named, settings=self.lake, aside=AsideTables())
        if lake is not None:
            _check_same_options(lake, options, self.groups)
            lake.check_transform(transform)
            if self.iceberg is not None and lake.facts.document is DocumentForm.VARIANT:
                raise _no_iceberg_variants()
            return lake
        if scopes or collections:
            # Raises if a requested scope or collection does not exist.
            CollectionNames(look_at_bucket(options.settings).manifest).select(scopes=scopes, collections=collections)
        _check_empty(location)
        return Lake.create(
            location,
            bucket_uuid=bucket.uuid,
            bucket_name=named,
            vbuckets=bucket.vbuckets,
            groups=self.groups or groups_for(_documents(options)),
            xattrs=options.read.xattrs,
            transform=transform,
            selection=Selection.of(scopes, collections, system=options.system, where=options.where.text),
            settings=self.lake,
        )

    def start(
        self,
        runner: JobRunner,
        *,
        every: str | float | None = None,
        on_batch: OnBatch | None = None,
        lake: Lake | None = None,
    ) -> LandingQuery:
        """Land what the bucket has now and end. With `every`, such as "5 seconds" or 5.0, continue until stopped.

        `lake` is the result of `prepare`, for callers that do something in between.
        """
        every_s = parse_interval_s(every) if isinstance(every, str) else every
        options = SourceOptions.make(self.source)
        keeper = None
        if self.catalog is not None:
            keeper = CatalogKeeper(
                self._open_catalog(self.catalog, runner), self.catalog.schema_for(options.settings.bucket)
            )
        lake = lake or self.prepare()
        options = replace(options, seen=(*options.seen, *_seen_collections(lake, options)))
        # The source filters nothing: `ChosenRows` drops what the lake leaves out.
        options = replace(options, where=Conditions(), system=True)
        if self.consistent:
            options = replace(options, read=replace(options.read, history=True))
        query = LandingQuery(self, options, runner, lake, every_s=every_s, on_batch=on_batch, keeper=keeper)
        query.start()
        return query

    def _open_catalog(self, settings: CatalogSettings, runner: JobRunner) -> Catalog:
        if not settings.needs_session:
            return settings.open_service(region=self.storage_options.get("aws_region"))
        settings.check_runner(has_session=isinstance(runner, SessionRunner))
        assert isinstance(runner, SessionRunner), "it has just been checked"
        return runner.session_catalog(settings.name_in_session)


# --- checks before the start ------------------------------------------------------------------------------------------


def _check_same_options(lake: Lake, options: SourceOptions, groups: int | None) -> None:
    """Raise if the options differ from those of the tables: changes that were left out once are never landed later."""
    where = lake.location.uri
    if groups is not None and lake.facts.groups != min(groups, lake.facts.vbuckets):
        raise InvalidInput(f"the tables in {where} have {lake.facts.groups} groups", hint="Omit the number of groups")
    if lake.facts.xattrs != options.read.xattrs:
        had = "with" if lake.facts.xattrs else "without"
        raise InvalidInput(f"the tables in {where} were made {had} extended attributes", hint="Use xattrs as before")
    before = landed_selection(lake)
    now = Selection.of(options.read.scopes, options.read.collections)
    if before is not None and (before.scopes, before.collections) != (now.scopes, now.collections):
        raise InvalidInput(
            f"the tables in {where} were landed with {before}",
            hint="Use the same setting, or land into another directory",
        )
    before = before or Selection()
    if options.system and not before.system:
        # A landing keeps the settings with which it began.
        raise InvalidInput(
            f"the tables in {where} were landed without the records of the system",
            hint="Omit system, or land into another directory",
        )
    if not Conditions.parse(before.where).is_same(options.where):
        had = f"where {before.where}" if before.where else "without a condition"
        raise InvalidInput(
            f"the tables in {where} were landed {had}",
            hint="Use the same where, or land into another directory: what was left out once is never landed later",
        )


def _no_iceberg_variants() -> InvalidInput:
    return InvalidInput(
        "an Iceberg table has the very files of `documents`, and pyiceberg knows no variants",
        hint="Omit the Iceberg catalog, or land documents as string",
    )


def _documents(options: SourceOptions) -> int:
    """Return the number of documents in the bucket, or 0 if the server does not count them or is unreachable: the
    landing itself waits for missing nodes, but the number of groups is not worth a wait."""
    with contextlib.suppress(HeadwaterError), Surveyor(options.settings) as surveyor:
        return surveyor.documents()
    return 0


def _check_empty(into: Location) -> None:
    """Raise if the directory contains something else, which is most likely a mistake. Remains of an interrupted
    creation of the first table are allowed."""
    unfinished = {"_delta_log", STATE_FOLDER}
    others = [
        name
        for name in _names_in(into)
        if name != OWN_FOLDER and not (name == TableKind.CHANGES and set(_names_in(into.join(name))) <= unfinished)
    ]
    if others:
        raise InvalidInput(
            f"{into.uri} holds {others[0]!r} and no tables of a bucket", hint="Give an empty or a new directory"
        )


def _names_in(directory: Location) -> list[str]:
    """Return the names in a directory; empty if it does not exist."""
    try:
        return [entry.name for entry in directory.entries()]
    except OSError as error:
        raise InvalidInput(
            f"{directory.uri} can't be used: {error}", hint="Give a directory that can be written"
        ) from error


def _seen_collections(lake: Lake, options: SourceOptions) -> list[SeenCollection]:
    """Return the collections that existed when the tables were made. One that is missing now has been dropped."""
    wanted = [SeenCollection(str(name)) for name in (*options.read.scopes, *options.read.collections)]
    return [*wanted, *(SeenCollection(name, id_) for id_, name in lake.state.collections.items())] if wanted else []


def _or_unknown(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.1f}" if isinstance(number, float) else f"{number:,}"


# --- a running landing ------------------------------------------------------------------------------------------------


class LandingQuery:
    """A running landing, in a thread of the driver. It has the names of Spark's StreamingQuery."""

    def __init__(
        self,
        landing: Landing,
        options: SourceOptions,
        runner: JobRunner,
        lake: Lake,
        *,
        every_s: float | None,
        on_batch: OnBatch | None,
        keeper: CatalogKeeper | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"headwater land {landing.into}"
        self._into = landing.into
        self._options = options
        self._runner = runner
        self._on_batch = on_batch
        self._loop = LandingLoop(
            lake,
            options,
            runner,
            every_s=every_s,
            fresh=landing.fresh,
            upkeep=landing.upkeep,
            iceberg=landing.iceberg,
            chosen=ChosenRows.of(landed_selection(lake) or Selection(), landing.transform),
            keeper=keeper,
            grows=landing.groups is None,
            is_consistent=landing.consistent,
            on_landed=self._on_landed,
        )
        self._location = lake.location
        self._note = LandingNote(
            time_s=time.time(),
            started_s=time.time(),
            source=str(replace(options.settings.where, user=None, options=())),
            bucket=options.settings.bucket,
            host=socket.gethostname(),
            every_s=every_s,
            is_running=True,
        )
        self._noting = threading.Lock()
        self._progress: deque[dict[str, Any]] = deque(maxlen=_PROGRESS_KEPT)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._asking = threading.Thread(target=self._ask_for_lag, name=f"{self.name}: lag", daemon=True)

    def __repr__(self) -> str:
        status = self.landing_status
        lag = "unknown" if status.lag_seqnos is None else f"{status.lag_seqnos:,} seqnos"
        return f"<LandingQuery into {self._into}: {status.doing}, batch {status.batch}, lag {lag}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        status = self.landing_status
        facts = [
            ("doing", status.doing if self._failure is None else f"failed: {self._failure}"),
            *([("retrying because", status.failure)] if status.failure and self._failure is None else []),
            ("batch", f"{status.batch:,}"),
            ("documents", f"{status.documents:,} in {counted(status.tables, 'table')}"),
            ("lag", f"{_or_unknown(status.lag_s)} s, {_or_unknown(status.lag_seqnos)} seqnos"),
            ("documents are behind", f"{_or_unknown(status.documents_age_s)} s"),
            ("rollbacks", _or_unknown(status.rollbacks)),
            ("bytes", f"{_or_unknown(status.live_bytes)} live, {_or_unknown(status.dead_bytes)} dead"),
        ]
        return html_facts(self.name, facts)

    def say_where(self, *, page: str | None = None, node_page: str | None = None) -> None:
        """Record the URL of the landing's own page, and that of the node from which it reads."""
        with self._noting:
            self._note = replace(self._note, page=page or self._note.page, node_page=node_page or self._note.node_page)
        self._keep_note()

    def start(self) -> None:
        self._thread.start()
        self._asking.start()

    @property
    def isActive(self) -> bool:  # noqa: N802  (Spark's names)
        return self._thread.is_alive()

    def awaitTermination(self, timeout: float | None = None) -> bool:  # noqa: N802
        """Wait at most `timeout` seconds for the end. Returns whether it has come; raises the error that ended the
        landing."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def processAllAvailable(self) -> None:  # noqa: N802
        """Wait until everything that is in the bucket now is in all tables. Raises the error that ends the landing
        earlier, and `TablesSetAside` if some tables can't be updated."""
        asked_s = time.time()
        while not self.awaitTermination(_POLL_S):
            as_of_s = self._loop.lag.as_of_s
            if as_of_s is not None and as_of_s >= asked_s and not self._loop.ask_for_merge():
                self._loop.check_set_aside()
                return

    def stop(self) -> None:
        """Stop the landing. A batch that is not committed yet is dropped. `on_batch` may call this."""
        self._loop.stop()
        while self._thread.is_alive() and threading.current_thread() is not self._thread:
            # The runner may not know a job yet that is just starting, so cancel repeatedly.
            self._runner.cancel()
            self._thread.join(_CANCEL_EVERY_S)

    def exception(self) -> BaseException | None:
        """The error that ended the landing; None if it is running or has ended normally."""
        return self._failure

    @property
    def status(self) -> dict[str, Any]:
        status = self.landing_status
        return {
            "message": status.doing,
            "isDataAvailable": bool(status.lag_seqnos),
            "isTriggerActive": status.doing not in ("waiting", "stopped"),
        }

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        """The progress of the last batch; None if this run has not landed one."""
        return self._progress[-1] if self._progress else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:  # noqa: N802
        return [*self._progress]

    @property
    def landing_status(self) -> LandingStatus:
        """The current state."""
        return self._loop.status(is_active=self.isActive)

    @property
    def note(self) -> LandingNote:
        """The current state with the source and the failure, if any. After the end, its time is that of the end."""
        if not self._note.is_running:
            return self._note
        failure = None if self._failure is None else str(self._failure)[:_FAILURE_CHARS_MAX]
        is_running = self.isActive
        return replace(
            self._note,
            time_s=time.time(),
            is_running=is_running,
            failure=failure,
            status=asdict(self._loop.status(is_active=is_running)),
        )

    # --- its threads --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self._failure = error
        # If the store could not be reached for the tables, a note would only wait in vain again; a lake that is gone
        # has no place for one.
        if not isinstance(self._failure, LakeUnreachable | LakeGone):
            self._keep_note(is_running=False)

    def _keep_note(self, *, is_running: bool = True) -> None:
        """Write the status beside the tables. A failure of that does not end the landing."""
        with self._noting:
            if not self._note.is_running:
                return
            now = self.note
            self._note = replace(now, is_running=is_running, status={**now.status, "is_active": is_running})
            try:
                keep_landing(self._location, self._note)
            except (LakeFull, LakeGone):
                # The loop runs into the same error, and reports it.
                pass
            except (OSError, LakeError) as error:
                about = fields(event=LogEvent.LANDING_NOT_NOTED, error=type(error).__name__, reason=str(error))
                logger.warning("the landing could not note how it stands: %s", error, extra=about)

    def _on_landed(self, landed: LandedBatch) -> None:
        self._progress.append(
            {
                "id": self.id,
                "name": self.name,
                "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "batchId": landed.batch_id,
                "numInputRows": landed.rows,
                "batchDuration": round(landed.took_s * 1000),
                "rollbacks": len(landed.rollbacks),
                "merges": landed.merges,
                "status": asdict(landed.status),
            }
        )
        if self._on_batch is not None:
            self._on_batch(landed)

    def _ask_for_lag(self) -> None:
        """Request the high seqnos independently of batches, so that the lag also shows a batch that never ends."""
        surveyor: Surveyor | None = None
        noted_s = float("-inf")
        while self._thread.is_alive() and not self._loop.is_stopping:
            if time.monotonic() - noted_s >= LANDING_EVERY_S:
                self._keep_note()
                noted_s = time.monotonic()
            try:
                surveyor = surveyor or Surveyor(self._options.settings)
                self._loop.lag.on_high_seqnos(surveyor.high_seqnos())
            except HeadwaterError:
                # The batches report the error, and fail if it persists.
                self._loop.lag.on_unreachable()
                surveyor = None
            self._thread.join(LAG_EVERY_S)
        if surveyor is not None:
            surveyor.close()
