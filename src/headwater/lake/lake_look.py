"""A lake as people see it: the state of its tables, what has happened to them, and samples of their rows.

`LakeWatch` looks repeatedly, for the lake's page (`headwater.lake_page`); `look_at_lake` looks once, for notebooks.
Both only read. All information comes from the tables and from the notes beside them, so it is valid for a lake at rest,
after a restart, and while another process lands.

`health_of_landing` decides whether a landing is healthy, and what to do if not: from its notes beside the tables, or
from the landing itself if it runs in this process. A landing's page shows the verdict; `headwater health` prints it.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater import findings
from headwater.errors import InvalidInput, LakeError
from headwater.findings import Finding, Level
from headwater.lake.collection_tables import CollectionTables
from headwater.lake.column_values import type_name
from headwater.lake.data_files import DataFile, FileReader, filtered, numbers
from headwater.lake.delta_log import DeltaLog
from headwater.lake.lake import Lake, landed_selection
from headwater.lake.layout import TableKind, documents_schema
from headwater.lake.location import OWN_FOLDER, Location
from headwater.lake.set_aside import SHOWN_MAX, AsideTables
from headwater.lake.timeline import BatchEvent, Event, RollbackEvent, Timeline
from headwater.lake.variants import VARIANT, document_texts
from headwater.lake.verify import Verification
from headwater.phrases import counted

# --- notes beside the tables ------------------------------------------------------------------------------------------
#
# The last verdict of `verify`, and the state of the landing. The tables are the only state that a landing depends on: a
# note may be missing, old or damaged, and then its content is unknown. Notes are for people who look at a lake that
# another process, or none, writes to. `headwater verify` and `headwater.spark.verify` write the verdict, `LandingQuery`
# writes its own state, and the lake's page and notebooks show both.

NOTE_BYTES_MAX = 64 * 1024
FINDINGS_NOTED_MAX = 20
_SENTENCE_CHARS_MAX = 500
LANDING_EVERY_S = 5.0
"""How often a running landing writes its note. Beside a batch's commit this costs nothing, even in an object store."""
LANDING_SILENT_S = 30.0
"""A landing that has written no note for this long has stopped, or can't write."""
_VERDICT = f"{OWN_FOLDER}/verified.json"
_LANDING = f"{OWN_FOLDER}/landing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a `verify` run."""

    time_s: float
    """When the run ended."""
    is_equal: bool
    sentence: str
    landed: int
    pending: int
    differing: int
    compared: str
    """What was compared, such as "all collections"."""
    findings: tuple[str, ...] = ()
    """The first findings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingNote:
    """The state of a landing when it last wrote its note."""

    time_s: float
    started_s: float
    source: str
    """The address of the bucket, without a user."""
    bucket: str
    host: str
    every_s: float | None
    """The interval between batches in seconds; None if the landing ends when everything is landed."""
    is_running: bool
    failure: str | None = None
    """The error that ended it; None if it was stopped normally."""
    page: str | None = None
    """The address of its own page."""
    node_page: str | None = None
    """The dashboard of the node that it reads from, if that is one of ours."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """The members of `LandingStatus`."""

    def state_at(self, now_s: float) -> str:
        """Return `running`, `silent` if a running landing's note is overdue, `stopped` or `failed`."""
        if not self.is_running:
            return "stopped" if self.failure is None else "failed"
        return "running" if now_s - self.time_s < LANDING_SILENT_S else "silent"


def keep_verdict(location: Location, found: Verification, *, compared: str) -> str | None:
    """Write a note of the result of `verify`. If that fails, returns why instead of raising: a user who may read a lake
    need not be allowed to write to it, and the verdict is still true."""
    sentences = tuple(one.sentence[:_SENTENCE_CHARS_MAX] for one in found.findings[:FINDINGS_NOTED_MAX])
    verdict = Verdict(
        time_s=time.time(),
        is_equal=found.is_equal,
        sentence=found.sentence,
        landed=found.landed,
        pending=found.pending,
        differing=found.differing,
        compared=compared,
        findings=sentences,
    )
    try:
        location.write(_VERDICT, json.dumps(asdict(verdict)).encode())
    except (OSError, LakeError) as error:
        return f"the verdict could not be noted in {location.uri}: {error}"
    return None


def read_verdict(location: Location) -> Verdict | None:
    """Return the last result of `verify`; None if unknown."""
    members = _read(location, _VERDICT)
    try:
        return None if members is None else Verdict(**{**members, "findings": tuple(members["findings"])})
    except (TypeError, KeyError):
        return None


def keep_landing(location: Location, note: LandingNote) -> None:
    """Write a note of a landing's state. Raises `LakeError` or `OSError` if the lake can't be written."""
    location.write(_LANDING, json.dumps(asdict(note)).encode())


def read_landing(location: Location) -> LandingNote | None:
    """Return the last landing's note; None if unknown."""
    members = _read(location, _LANDING)
    try:
        return None if members is None else LandingNote(**members)
    except TypeError:
        return None


def _read(location: Location, path: str) -> dict[str, Any] | None:
    try:
        with location.open_input(path) as file:
            if file.size() > NOTE_BYTES_MAX:
                return None
            members = json.loads(file.read())
    except (OSError, ValueError, LakeError):
        return None
    return members if isinstance(members, dict) else None


# --- the look ---------------------------------------------------------------------------------------------------------

COLUMNS_SHOWN_MAX = 300
TABLES_SHOWN_MAX = 400
SAMPLE_ROWS = 20
SAMPLE_BYTES = 4 * 1024 * 1024
"""How many uncompressed bytes of a table are read for a sample."""
CELL_CHARS_MAX = 200
UNDONE_ROWS_MAX = 200
UNDONE_FILES_MAX = 8
"""Files of `changes` that are searched for rows that a rollback has undone."""
PENDING_ROWS_MAX = 2_000_000
"""If more changes may be pending, they are not counted: counting reads them."""
RATE_S = 60.0
_WHOLE_S = 60.0
"""How often the tables of documents are read although `changes` is unchanged: another tool may have written to them."""


# --- how it stands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLook:
    """One table."""

    kind: TableKind
    name: str
    """The collection, as `scope.collection`; empty for `changes`."""
    rows: int
    size_bytes: int
    files: int
    columns: tuple[tuple[str, str], ...]
    """Names and types as SQL writes them."""
    typed: str | None
    """For `documents`: where the typed columns come from, such as "inferred"."""
    batch: int
    """The last batch that it holds."""
    changed_s: float | None
    """When its newest file was written."""
    pending: int | None
    """For `documents`: changes that wait to be merged; None if unknown or not applicable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeLook:
    """A lake at one moment. `None` means unknown."""

    time_s: float
    uri: str
    bucket_uuid: str
    vbuckets: int
    selection: str
    batch: int
    """The last batch; -1 if there is none."""
    rows: int | None
    """Rows ever landed in `changes`."""
    rollbacks: int | None
    """Rollbacks of vbuckets ever landed."""
    as_of_s: float | None
    """Everything that was written to the bucket before this time is in `changes`."""
    documents_as_of_s: float | None
    """Everything that was written to the bucket before this time is in `documents`."""
    rows_per_s: float | None
    """The rate of rows landed in the last minute."""
    documents: int
    """Rows of all tables of documents."""
    collections: int
    """The number of collections that have tables."""
    tables: tuple[TableLook, ...]
    tables_more: int
    """How many tables are not listed."""
    events: tuple[Event, ...]
    """Newest first."""
    verdict: Verdict | None
    landing: LandingNote | None
    unreadable: tuple[str, ...] = ()
    """A sentence for each table that can't be shown, with the reason."""

    @property
    def is_merged(self) -> bool:
        """Whether `documents` has all that `changes` has."""
        pending = [table.pending for table in self.tables if table.kind is TableKind.DOCUMENTS]
        return not any(pending) and None not in pending and not self.tables_more and not self.unreadable

    @property
    def is_landing(self) -> bool:
        """Whether a landing has recently reported that it runs."""
        note = self.landing
        return note is not None and note.is_running and self.time_s - note.time_s < LANDING_SILENT_S

    def __repr__(self) -> str:
        return (
            f"<LakeLook of {self.uri}: batch {self.batch}, {counted(self.documents, 'document')} in "
            f"{counted(self.collections, 'collection')}, {'a landing runs' if self.is_landing else 'at rest'}>"
        )

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        verdict = "never, as far as is known" if self.verdict is None else self.verdict.sentence
        facts = [
            ("landing", "runs" if self.is_landing else "does not run, as far as is known"),
            ("landed up to", _moment(self.as_of_s)),
            ("documents up to", _moment(self.documents_as_of_s)),
            ("verified", verdict),
            *(("can't be read", sentence) for sentence in self.unreadable),
        ]
        rollbacks = [event for event in self.events if isinstance(event, RollbackEvent)][:3]
        facts += [(f"rollback at {_moment(event.time_s)}", event.why) for event in rollbacks]
        rows = [
            (f"{table.kind}/{table.name}".rstrip("/"), f"{table.rows:,}", f"{table.size_bytes:,}", str(table.batch))
            for table in self.tables
        ]
        return html_facts(self.uri, facts) + _html_rows(("table", "rows", "bytes", "batch"), rows)


def html_facts(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a small HTML table of names and values, for notebooks."""
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in facts)
    return f"<table><caption>{html.escape(title)}</caption><tbody>{rows}</tbody></table>"


def _html_rows(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _moment(time_s: float | None) -> str:
    return "unknown" if time_s is None else f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def look_at_lake(into: str | Location) -> LakeLook:
    """Look at a lake once."""
    return LakeWatch(Location.of(into)).look()


class LakeWatch:
    """Looks at a lake repeatedly. For one thread at a time."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._lake = self._open()
        self._timeline = Timeline()
        self._looked: LakeLook | None = None
        self._whole_s = 0.0
        self._is_settled = False
        """Whether nothing was pending."""

    def _open(self) -> Lake:
        lake = Lake.open(self.location, aside=AsideTables(is_logged=False))
        if lake is None:
            raise InvalidInput(
                f"{self.location.uri} does not contain the tables of a landing", hint="Give the directory of a landing"
            )
        return lake

    def look(self) -> LakeLook:
        """Return the state of the lake now."""
        now_s, version = time.time(), self._lake.changes.version
        has_news = not self._lake.changes.is_current() or self._lake.changes.version != version
        # The other tables can't have changed if `changes` has not and nothing is pending.
        if self._looked is None or has_news or not self._is_settled or now_s - self._whole_s >= _WHOLE_S:
            self._looked, self._whole_s = self._look_at_all(), now_s
        return replace(
            self._looked,
            time_s=now_s,
            rows_per_s=_rows_per_s(self._looked.events, now_s),
            verdict=read_verdict(self.location),
            landing=read_landing(self.location),
        )

    def _look_at_all(self) -> LakeLook:
        lake = self._lake = self._open()
        pending = _pending_rows(lake)
        self._is_settled = pending is not None and not pending
        selection, totals = landed_selection(lake), lake.state.totals
        self._timeline.look(lake)
        tables = [_table_look(TableKind.CHANGES, "", lake.changes, batch=lake.last_batch)]
        for name in sorted(lake.tables):
            waiting = None if pending is None else pending.get(name, 0)
            tables += _collection_looks(lake.tables[name], waiting, lake.last_batch)
        return LakeLook(
            time_s=0.0,
            uri=lake.location.uri,
            bucket_uuid=lake.facts.bucket_uuid,
            vbuckets=lake.facts.vbuckets,
            selection="unknown" if selection is None else str(selection),
            batch=lake.last_batch,
            rows=None if totals is None else totals.rows,
            rollbacks=None if totals is None else totals.rollbacks,
            as_of_s=lake.state.as_of_s,
            documents_as_of_s=_documents_as_of_s(lake, pending),
            rows_per_s=None,
            documents=lake.documents,
            collections=len(lake.tables),
            tables=tuple(tables[:TABLES_SHOWN_MAX]),
            tables_more=max(0, len(tables) - TABLES_SHOWN_MAX),
            events=tuple(self._timeline.events),
            verdict=None,
            landing=None,
            unreadable=tuple(table.reason for table in lake.aside.tables[:SHOWN_MAX]),
        )

    # --- samples ------------------------------------------------------------------------------------------------------

    def sample(self, kind: TableKind, name: str) -> Sample:
        """Return the newest rows among those read from the newest file of a table."""
        log = self._log_of(kind, name)
        files = sorted((file for file in log.files() if file.live_rows), key=lambda file: file.modified_ms)
        if not files:
            return Sample(columns=(), rows=(), of="no rows yet")
        with FileReader(log.location, files[-1]) as reader:
            rows = next(reader.batches(reader.row_groups[-1], bytes_max=SAMPLE_BYTES))
        newest = pc.sort_indices(rows, sort_keys=[("changed_at", "descending")])
        shown = rows.take(newest[:SAMPLE_ROWS])
        return _to_sample(shown.select(_sample_columns(kind, shown.schema.names)), "the newest file")

    def _log_of(self, kind: TableKind, name: str) -> DeltaLog:
        if kind is TableKind.CHANGES:
            return self._lake.changes
        tables = self._lake.tables.get(name)
        table = None if tables is None else tables.table_of(kind)
        if table is None:
            raise InvalidInput(f"there is no table {kind}/{name[:CELL_CHARS_MAX]}", hint="Load the page again")
        return table.log

    def undone(self, batch: int) -> Sample:
        """Return the changes that the rollbacks of a batch have undone, up to `UNDONE_ROWS_MAX`, if `changes`
        still has them."""
        found = [event for event in self._timeline.events if isinstance(event, RollbackEvent)]
        event = next((event for event in found if event.batch == batch), None)
        if event is None:
            raise InvalidInput(f"no rollback of batch {batch} is known", hint="Load the page again")
        log = self._lake.changes
        files = [file for file in log.files() if _may_be_undone(file, event)][-UNDONE_FILES_MAX:]
        parts: list[pa.Table] = []
        for file in reversed(files):
            parts += _undone_rows(log.location, file, event, self._lake.facts.vbuckets)
            if sum(part.num_rows for part in parts) >= UNDONE_ROWS_MAX:
                break
        if not parts:
            return Sample(columns=(), rows=(), of="no longer in `changes`")
        found_rows = pa.concat_tables(parts, promote_options="permissive")
        shown = found_rows[:UNDONE_ROWS_MAX]
        names = {(row["scope"], row["collection"], row["key"]) for row in shown.to_pylist()}
        documents = counted(len(names), "document")
        undone = shown.num_rows if event.undone is None else max(event.undone, shown.num_rows)
        few = "" if undone == shown.num_rows else f"{shown.num_rows:,} of "
        return _to_sample(shown, f"{few}{counted(undone, 'change')}, of {documents}")


def _may_be_undone(file: DataFile, event: RollbackEvent) -> bool:
    """Whether a file can hold rows that a rollback has undone, according to its ranges in the log."""
    return file.may_hold("batch", high=event.batch - 1) and any(
        file.may_hold("vbucket", low=part.vbucket, high=part.vbucket)
        and file.may_hold("seqno", low=part.kept_seqno + 1, high=part.from_seqno)
        for part in event.parts
    )


_UNDONE_SHOWN = ("changed_at", "op", "scope", "collection", "key", "vbucket", "seqno")


def _undone_rows(location: Location, file: DataFile, event: RollbackEvent, vbuckets: int) -> Iterator[pa.Table]:
    kept = np.full(vbuckets, np.iinfo(np.int64).max)
    for part in event.parts:
        kept[part.vbucket] = part.kept_seqno
    with FileReader(location, file) as reader:
        for row_group in reader.row_groups:
            rows = reader.read(row_group, [*_UNDONE_SHOWN, "batch", "void"])
            dead = numbers(rows, "seqno") > kept[numbers(rows, "vbucket")]
            dead &= np.asarray(rows.column("void").to_numpy()) & (numbers(rows, "batch") < event.batch)
            if dead.any():
                yield filtered(rows.select(_UNDONE_SHOWN), dead)


def _rows_per_s(events: Iterable[Event], now_s: float) -> float | None:
    """Return the rate of the last minute; None if a batch in it was not counted."""
    rows = [event.rows for event in events if isinstance(event, BatchEvent) and now_s - event.time_s < RATE_S]
    known = [count for count in rows if count is not None]
    return sum(known) / RATE_S if len(known) == len(rows) else None


def _pending_rows(lake: Lake) -> dict[str, int] | None:
    """Return how many changes wait to be merged, by collection; None if there may be too many to count."""
    merged = [at for tables in lake.tables.values() if tables.documents for at in tables.documents.merged.values()]
    waiting = [file for file in lake.changes.files() if file.may_hold("batch", low=min(merged, default=-1) + 1)]
    if sum(file.live_rows for file in waiting) > PENDING_ROWS_MAX:
        return None
    pending = lake.pending
    return {name: sum(count for (of, _), count in pending.rows.items() if of == name) for name in pending.names}


def _documents_as_of_s(lake: Lake, pending: dict[str, int] | None) -> float | None:
    """Return the time up to which `documents` has everything. Tables with nothing pending are as new as `changes`."""
    waiting = lake.tables if pending is None else {*pending, *(table.name for table in lake.aside.tables)}
    times = [
        lake.state.as_of_s,
        *(None if (table := lake.tables[name].documents) is None else table.state.as_of_s for name in waiting),
    ]
    known = [at for at in times if at is not None]
    return min(known) if len(known) == len(times) else None


def _collection_looks(tables: CollectionTables, pending: int | None, last_batch: int) -> list[TableLook]:
    looks = []
    for table in tables.there:
        kind, is_documents = table.kind, table is tables.documents
        columns = tables.columns
        typed = "no typed columns" if columns is None else "inferred" if columns.is_inferred else "fixed"
        batch = table.state.batch if kind is TableKind.REJECTS else min(table.merged.values(), default=-1)
        looks.append(
            _table_look(
                kind,
                tables.name,
                table.log,
                # Batches without rows for a table make no commit to it.
                batch=last_batch if is_documents and pending == 0 else batch,
                typed=typed if is_documents else None,
                pending=pending if is_documents else None,
            )
        )
    return looks


def _table_look(
    kind: TableKind, name: str, log: DeltaLog, *, batch: int, typed: str | None = None, pending: int | None = None
) -> TableLook:
    files = log.files()
    return TableLook(
        kind=kind,
        name=name,
        rows=sum(file.live_rows for file in files),
        size_bytes=sum(file.size_bytes for file in files),
        files=len(files),
        columns=tuple((field.name, _sql_type(field.type)) for field in [*log.schema][:COLUMNS_SHOWN_MAX]),
        typed=typed,
        batch=batch,
        changed_s=max((file.modified_ms for file in files), default=0) / 1000 or None,
        pending=pending,
    )


def _sql_type(type_: pa.DataType) -> str:
    if type_ == VARIANT:
        return "VARIANT"
    try:
        return type_name(type_)
    except (KeyError, ValueError, TypeError, AssertionError):
        return str(type_).upper()


# --- rows as text -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some rows of a table, as text. Long values are cut, and then end in `…`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    of: str
    """Where the rows come from."""


_CHANGES_SHOWN = ("changed_at", "op", "scope", "collection", "key", "value", "vbucket", "seqno", "batch", "void")
_SHOWN_FIRST = {
    TableKind.DOCUMENTS: ("key",),
    TableKind.HISTORY: ("key", "valid_from", "valid_to", "document"),
    TableKind.REJECTS: ("key", "field", "reason", "document"),
}
_SHOWN_LAST = {
    TableKind.DOCUMENTS: ("document", "changed_at"),
    TableKind.HISTORY: (),
    TableKind.REJECTS: ("changed_at",),
}
_TYPED_SHOWN_MAX = 24


def _sample_columns(kind: TableKind, names: Sequence[str]) -> list[str]:
    """Return the columns that a reader looks for first: the key, the typed columns, the document."""
    if kind is TableKind.CHANGES:
        return [name for name in _CHANGES_SHOWN if name in names]
    typed: list[str] = []
    if kind is TableKind.DOCUMENTS:
        own = {*documents_schema(xattrs=True).names}
        typed = [name for name in names if name not in own][:_TYPED_SHOWN_MAX]
    return [name for name in (*_SHOWN_FIRST[kind], *typed, *_SHOWN_LAST[kind]) if name in names]


def _to_sample(rows: pa.Table, of: str) -> Sample:
    if "document" in rows.schema.names:
        rows = rows.set_column(rows.schema.get_field_index("document"), "document", document_texts(rows["document"]))
    texts = [tuple(_text(value) for value in row.values()) for row in rows.to_pylist()]
    return Sample(columns=tuple(rows.schema.names), rows=tuple(texts), of=of)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        text = value[: 4 * CELL_CHARS_MAX].decode(errors="backslashreplace")
    elif isinstance(value, datetime):
        text = value.isoformat(sep=" ", timespec="milliseconds")
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= CELL_CHARS_MAX else text[:CELL_CHARS_MAX] + "…"


# --- the health of the landing ----------------------------------------------------------------------------------------


LAG_S_MAX = 300.0
"""A landing that lags more than this does not keep up, or is stuck."""
_AGAIN = "Start `headwater land` again: it resumes where the tables end"
_SEE_LOG = "Check the log of the landing"


def health_of_landing(
    state: str, note: LandingNote | None, *, lag_s: float | None, problem: str | None, verified: Verdict | None
) -> findings.Verdict:
    """Return the verdict on a landing.

    Args:
        state: The result of `LandingNote.state_at`, or `starting`, or `unknown` if there is no note.
        note: The landing's last note.
        lag_s: All that was written to the bucket longer ago than this is in `changes`; None if unknown.
        problem: Why the tables can't be read; None if they can.
        verified: The last result of `headwater verify`.
    """
    status = {} if note is None else note.status
    found = [*_ended(state, note)]
    if state == "running":
        found += _running(status, lag_s)
    found += _tables(status)
    # A landing that is starting has not created its tables yet.
    if problem is not None and state != "starting":
        do = "Check the location and the rights of this user on it"
        found.append(Finding(check="tables", level=Level.BAD, text=f"The tables can't be read: {problem}", do=do))
    if verified is not None and not verified.is_equal:
        text = f"The last verify, at {_moment(verified.time_s)}, found differences: {verified.sentence}"
        do = "Run `headwater verify` again, and `headwater repair` if they are still there"
        found.append(Finding(check="verified", level=Level.BAD, text=text, do=do))
    behind = "" if lag_s is None else f", {lag_s:,.0f} s behind the bucket"
    runs = f"the landing is running{behind}" if state == "running" else "the landing has landed everything"
    return findings.Verdict.of(found, well=f"Healthy: {runs}")


def _ended(state: str, note: LandingNote | None) -> Iterator[Finding]:
    """Yield why no landing is running, as far as known."""
    if note is None:
        text, do = "It is unknown whether a landing is running: there is no status file beside the tables", _SEE_LOG
        if state == "starting":
            text, do = "The landing is starting", "Wait a few seconds"
        yield Finding(check="running", level=Level.WARN, text=text, do=do)
    elif state == "failed":
        text = f"The landing failed at {_moment(note.time_s)}: {note.failure}"
        yield Finding(check="running", level=Level.BAD, text=text, do=f"Fix that. {_AGAIN}")
    elif state == "silent":
        text = f"No sign of the landing since {_moment(note.time_s)}: it was killed, or {note.host} can't write here"
        yield Finding(check="running", level=Level.BAD, text=text, do=_AGAIN)
    elif state == "stopped" and note.every_s is not None:
        # A landing without an interval ends when everything is landed.
        text = f"The landing was stopped at {_moment(note.time_s)}"
        yield Finding(check="running", level=Level.BAD, text=text, do=_AGAIN)


def _running(status: Mapping[str, Any], lag_s: float | None) -> Iterator[Finding]:
    if failures := int(status.get("failures") or 0):
        why = status.get("failure") or "its log says why"
        text = f"The landing failed {counted(failures, 'time')} in a row, and retries: {why}"
        yield Finding(check="failures", level=Level.WARN, text=text, do=_SEE_LOG)
    if lag_s is not None and lag_s > LAG_S_MAX:
        text, do = f"The landing is {lag_s:,.0f} s behind the bucket", "Give it more cores, or larger batches"
        yield Finding(check="lag", level=Level.WARN, text=text, do=do)


def _tables(status: Mapping[str, Any]) -> Iterator[Finding]:
    aside = status.get("set_aside") or ()
    for one in aside:
        text = f"The table of {one['name']} is set aside, and lacks changes that the others have: {one['reason']}"
        yield Finding(check="set-aside", level=Level.BAD, text=text, do=one["hint"])
    if more := int(status.get("tables_set_aside") or 0) - len(aside):
        text = f"{counted(more, 'more table')} set aside"
        yield Finding(check="set-aside", level=Level.BAD, text=text, do="The log of the landing names them")
    if said := status.get("catalog_failure"):
        yield Finding(check="catalog", level=Level.WARN, text=_sentence(said), do="The landing registers them later")
    if said := status.get("advice"):
        yield Finding(check="merges", level=Level.WARN, text="Merges do not keep up", do=_sentence(said))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]
