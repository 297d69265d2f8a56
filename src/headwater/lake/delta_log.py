"""The log of a Delta table: what is live, what has been done, and the one way to change it.

A commit adds and removes files atomically, and describes itself by two features of Delta:

* *Application transactions*: a name and a number each. The log keeps the newest number of every name for ever, through
  checkpoints and cleaning. They record which batch is in the table, and how far it has been merged.
* *Commit metadata*: here the name of a file with the *state*: the offsets that the table holds, the collections that
  have been seen, and more. It is lost with the commit when the log is cleaned. So every commit of ours names such a
  file, and the tables forbid other writers to clean the log as a side effect (`delta.enableExpiredLogCleanup`). `clean`
  cleans it, after a commit that names a state again.

The file of a state is written before its commit, under a unique name. A crash between the two leaves a file that no
commit names, and the table holds what it held before. Files are kept as long as the log reaches back, and for
`WHOLE_STATE_COMMITS` versions more (`clean`), so no other commit has to be read to know that a file is dead.

Only one file in `WHOLE_STATE_COMMITS` has the whole state; the others have the difference from the last whole one, and
its name (`table_state`). Differences do not build on each other: the state is read from two files at most. Earlier
versions had the state in the metadata itself; such commits are still read, but no longer written.

A commit fails if another writer was faster, and is not retried: its plan is based on an outdated version.

This module writes commits of rows as log entries itself, each by an exclusive create (`Location.create`): delta-rs can
express neither the deletion vector of a file nor the files of the change data feed. It does not return the vectors of
live files either, so these are read from the log as well. delta-rs does all else: metadata, checkpoints, cleaning.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
import uuid
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import Any, Self
from zlib import error as ZlibError  # noqa: N812

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import VariantType

from headwater._version import __version__
from headwater.errors import LakeDamaged, LakeError, LakeGone, LakeInUse, LakeUnreachable
from headwater.lake.data_files import DataFile
from headwater.lake.deletion_vectors import DeletionVector
from headwater.lake.layout import (
    FEED_PROPERTY,
    FORMAT_PROPERTY,
    FORMAT_VERSION,
    STATE_FOLDER,
    TableKind,
    commented,
    table_description,
)
from headwater.lake.location import Location
from headwater.lake.table_state import TableState, unpack_state
from headwater.lake.variants import VARIANT
from headwater.phrases import printable

_STATE_FILE = "headwater.state.file"
_STATE = "headwater.state"
_DIFFERENCE = "headwater.state.difference"
"""Of earlier versions: the state itself, or its difference from that of another version."""
WHOLE_STATE_COMMITS = 64
"""One in this many commits has the whole state. The commits after it, up to the next one, need its file."""
_STATE_NAME = re.compile(r"(\d{20})-[0-9a-f]{16}\.json\.gz")
_ENTRY_NAME = re.compile(r"(\d{20})\.json")
_READS_AT_ONCE = 16
"""The maximum of log entries that are read in parallel from an object store, after the first few."""
_STATISTICS = "delta.dataSkippingStatsColumns"
"""The columns that the log has statistics of. Readers use no others."""
_LOG_RETENTION = "delta.logRetentionDuration"
_TOMBSTONE_RETENTION = "delta.deletedFileRetentionDuration"
_TOMBSTONE_HOURS_DEFAULT = 7 * 24
"""Delta's own default."""
_VECTORS = "deletionVectors"
_USES_VECTORS = "delta.enableDeletionVectors"
_WRITER_FEATURES = frozenset(
    {"appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "timestampNtz",
     "variantType", _VECTORS}
)  # fmt: skip
"""Table features under which our commits are correct. We do not meet what others require of writers."""
_WRITER_VERSION_MAX = 4
"""The last protocol version before table features that requires nothing beyond those."""
_CHECKPOINT_INTERVAL = "delta.checkpointInterval"
_CHECKPOINT_INTERVAL_DEFAULT = 100
"""The default of delta-rs."""
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
_CHECKPOINT_ENTRIES_MAX = 1000
"""The maximum of entries read to find removed files: normally a checkpoint comes after 100."""
LOG_RETENTION_DAYS = 30
_PROPERTIES = {
    "delta.enableExpiredLogCleanup": "false",
    _LOG_RETENTION: f"interval {LOG_RETENTION_DAYS} days",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCommit:
    """One change of a table."""

    add: Sequence[DataFile] = ()
    """A file that is in `remove` as well, with another vector, gets more dead rows."""
    remove: Sequence[DataFile] = ()
    """As the log has them, with the vectors that they had."""
    cdc: Sequence[DataFile] = ()
    """Files of the change data feed, under `_change_data`. They belong to this commit alone, and are not live."""
    transactions: Mapping[str, int] = field(default_factory=dict)
    state: TableState
    is_rearrangement: bool = False
    """Whether rows have only moved to other files: readers that follow the table's changes can skip the commit."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One commit, as its entry in the log describes it."""

    version: int
    time_ms: int
    """0 if the writer did not record it."""
    state: TableState | None
    """What the table held after it; None in commits of others."""
    lines: Sequence[bytes] = field(repr=False)

    def actions(self, kind: str) -> list[dict[str, Any]]:
        """Return the actions of a kind, such as `add`, as Delta's protocol defines them."""
        start = f'{{"{kind}":'.encode()
        return [json.loads(line)[kind] for line in self.lines if line.startswith(start)]

    def landed_at(self, batch: int) -> list[datetime]:
        """For a commit of `changes`: return the earliest and latest landing time of its batch, from the statistics of
        each file that has rows of that batch alone. A commit may also rewrite older rows."""
        found = []
        for action in self.actions("add"):
            stats = json.loads(action.get("stats") or "{}")
            bounds = [stats.get(name, {}) for name in ("minValues", "maxValues")]
            if all(it.get("batch") == batch and "landed_at" in it for it in bounds):
                found += [datetime.fromisoformat(it["landed_at"]) for it in bounds]
        return found


def _commit_info(lines: Iterable[bytes]) -> Mapping[str, Any]:
    """Return a commit's own metadata."""
    found: dict[str, Any] = next((json.loads(it)["commitInfo"] for it in lines if it.startswith(b'{"commitInfo"')), {})
    return found


class DeltaLog:
    """An open table. It shows the table as of the last `refresh` or commit."""

    def __init__(self, table: DeltaTable, location: Location, *, is_pinned: bool = False) -> None:
        self.location = location
        self._is_pinned = is_pinned
        """Whether it shows one version for ever, and is not written to."""
        self._table = table
        self._identity = location.join("_delta_log").identity()
        self._files: tuple[int, dict[str, DataFile]] | None = None
        self._whole: _WholeState | None = None
        """The newest whole state, if known."""

    @classmethod
    def open(cls, location: Location, *, version: int | None = None) -> Self | None:
        """Open the table at a location, as it is or as of a version. Returns None if there is none."""
        try:
            with location.answering():
                table = DeltaTable(location.uri, version=version, storage_options=location.delta_options)
                return cls(table, location, is_pinned=version is not None)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            raise _unreadable(location, error) from error

    @classmethod
    def create(
        cls,
        location: Location,
        schema: pa.Schema,
        *,
        description: str | None = None,
        partition_by: Sequence[str] = (),
        ranges: Sequence[str],
        properties: Mapping[str, str],
        transactions: Mapping[str, int],
        state: TableState,
    ) -> Self:
        """Create a table with no rows. Returns an existing table as it is."""
        try:
            with location.answering():
                location.make()
                if (found := cls.open(location)) is not None:
                    return found
                said, _ = _write_state(location, 0, state, None)
                DeltaTable.create(
                    location.uri,
                    _delta_schema(schema),
                    mode="ignore",
                    partition_by=list(partition_by),
                    description=description,
                    configuration={
                        **_PROPERTIES,
                        _STATISTICS: _column_list(ranges),
                        **properties,
                        FORMAT_PROPERTY: str(FORMAT_VERSION),
                    },
                    storage_options=location.delta_options,
                    raise_if_key_not_exists=False,
                    commit_properties=_commit_properties(said, transactions),
                )
        except (DeltaError, OSError) as error:
            raise LakeError(
                f"the table at {location.uri} can't be created: {_one_line(error)}",
                hint="Check that the directory is writable and has free space, or give another one",
            ) from error
        log = cls.open(location)
        assert log is not None, "the table has just been made"
        return log

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        version = self._table.version()
        assert version is not None, "an open table has a version"
        return version

    @property
    def properties(self) -> Mapping[str, str | None]:
        return self._table.metadata().configuration

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table, including the partition columns."""
        return pa.schema(self._table.schema())

    @property
    def description(self) -> str:
        """The table's description; empty if it has none."""
        return self._table.metadata().description or ""

    @property
    def columns(self) -> list[dict[str, Any]]:
        """The fields of the schema, in the JSON form of Delta and Spark."""
        fields: list[dict[str, Any]] = json.loads(self._table.schema().to_json())["fields"]
        return fields

    def refresh(self) -> None:
        if self._is_pinned:
            return
        self.check_there()
        try:
            with self.location.answering():
                self._table.update_incremental()
        except DeltaError as error:
            raise _unreadable(self.location, error) from error

    def check_there(self) -> None:
        """Raise `LakeGone` unless the opened log is still at its place: delta-rs does not check, and begins a new one
        there."""
        if self.location.join("_delta_log").identity() != self._identity:
            raise self.location.gone()

    def as_of(self, batch: int) -> Self | None:
        """Open the table as of the last version without a batch after this one; None if the log does not go back so
        far."""
        held = (entry.version for entry in self.entries() if entry.state is not None and entry.state.batch <= batch)
        version = next(held, None)
        return None if version is None else self.open(self.location, version=version)

    def missing_files(self) -> list[str]:
        """Return live files that no longer exist: upkeep may have deleted some of an earlier version."""
        needed = [path for file in self.files() for path in (file.path, file.vector_path) if path is not None]
        folders = {path.rpartition("/")[0] for path in needed}
        there = {f"{folder}/{one.name}".lstrip("/") for folder in folders for one in self.location.entries(folder)}
        return [path for path in needed if path not in there]

    def is_current(self) -> bool:
        """Refresh, and return whether the log continues from the version that was open. It does not if the table was
        removed, or restored to an earlier time."""
        try:
            self.refresh()
            self._lines_of(self.version)
        except (LakeDamaged, LakeGone, FileNotFoundError):
            return False
        return True

    def transaction(self, name: str) -> int | None:
        """Return the newest number of an application transaction."""
        return self._table.transaction_version(name)

    def files(self) -> list[DataFile]:
        """Return the live files, oldest first."""
        if self._files is None or self._files[0] != self.version:
            with self.location.answering():
                rows = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
                vectors = self._vectors() if self.may_have_vectors else {}
            files = [_to_data_file(row, vectors.get(row["path"])) for row in rows]
            files.sort(key=lambda file: (file.modified_ms, file.path))
            self._files = self.version, {file.path: file for file in files}
        return list(self._files[1].values())

    @property
    def may_have_vectors(self) -> bool:
        """Whether the protocol of the table includes deletion vectors: only then may a file have one."""
        return _VECTORS in (self._table.protocol().reader_features or ())

    def _vectors(self) -> dict[str, DeletionVector]:
        """Return the vectors of the live files, by path: the known ones, updated with later entries of the log."""
        if self._files is not None and self._files[0] < self.version:
            known = {path: file.vector for path, file in self._files[1].items() if file.vector is not None}
            with contextlib.suppress(FileNotFoundError):
                return self._vectors_since(self._files[0], known)
        version, paths = self._checkpoint()
        known = {}
        for path in paths:
            with self.location.open_input(path) as file:
                added = pq.ParquetFile(file).read(["add.path", "add.deletionVector"]).column("add")
            known |= _vectors_of(action for action in added.to_pylist() if action is not None)
        try:
            return self._vectors_since(version, known)
        except FileNotFoundError as error:
            raise _unreadable(self.location, error) from error

    def _vectors_since(self, version: int, known: dict[str, DeletionVector]) -> dict[str, DeletionVector]:
        """Update the vectors of a version to the present."""
        for later in range(version + 1, self.version + 1):
            entry = LogEntry(later, 0, None, self._lines_of(later))
            changed = {action["path"] for kind in ("remove", "add") for action in entry.actions(kind)}
            kept = {path: vector for path, vector in known.items() if path not in changed}
            known = kept | _vectors_of(entry.actions("add"))
        return known

    def _checkpoint(self) -> tuple[int, list[str]]:
        """Return the newest checkpoint up to the open version, and its files; -1 if there is none."""
        found: dict[int, list[str]] = {}
        expected: dict[int, int] = {}
        for entry in self.location.entries("_delta_log"):
            if (match := _CHECKPOINT.fullmatch(entry.name)) and int(match[1]) <= self.version:
                found.setdefault(int(match[1]), []).append(f"_delta_log/{entry.name}")
                expected[int(match[1])] = int(match[2] or 1)
        whole = [version for version, paths in found.items() if len(paths) == expected[version]]
        newest = max(whole, default=-1)
        return newest, found.get(newest, [])

    def state(self) -> TableState:
        """Return what the table holds.

        Commits of other tools, such as an OPTIMIZE, do not record it: the newest commit that does counts.
        """
        for state in self.states():
            return state
        raise LakeDamaged(
            f"the log of the table at {self.location.uri} no longer has the offsets of the table",
            hint="Another tool has cleaned the log: restore it from a backup, or land into another directory",
        )

    def states(self) -> Iterator[TableState]:
        """Yield what the table held after each of its commits, newest first."""
        return (entry.state for entry in self.entries() if entry.state is not None)

    def entries(self, *, with_states: bool = True) -> Iterator[LogEntry]:
        """Yield the commits of the table, from the open version back to the oldest in the log.

        The entries are read one by one: the history of delta-rs begins with the newest commit of all, which another
        process may have made since the table was opened. With `with_states=False` their states are None.
        """
        whole, is_newest = self._whole, True
        for read in self._read_back(with_states=with_states):
            metadata, state = read.metadata, None
            if with_states and metadata.keys() & {_STATE_FILE, _STATE, _DIFFERENCE}:
                try:
                    state, whole = self._state_said(read, whole)
                except FileNotFoundError as error:
                    # Older entries or states may have been cleaned in the meantime.
                    if not is_newest or _STATE_FILE not in metadata:
                        return
                    name = metadata[_STATE_FILE]
                    raise self._lost_state(f"{STATE_FOLDER} lacks {name}, or the file that it names") from error
                is_newest = False
                if whole.version > (-1 if self._whole is None else self._whole.version):
                    self._whole = whole
            yield LogEntry(read.version, int(metadata.get("timestamp", 0)), state, read.lines)

    def _state_said(self, read: _ReadEntry, whole: _WholeState | None) -> tuple[TableState, _WholeState]:
        """Return the state that a commit names, and the whole state that it builds on, which may be known already.
        Raises `FileNotFoundError` if a file is gone."""
        if isinstance(read.state, FileNotFoundError):
            raise read.state
        with self._decoding():
            members = unpack_state(read.state)
            if "since" not in members:
                file = read.metadata.get(_STATE_FILE)
                found = _WholeState(read.version if file is None else file, TableState.decode(members))
                return found.state, found
            since: str | int = members["since"]
            if whole is None or whole.place != since:
                if isinstance(since, int):
                    data = b64decode(_commit_info(self._lines_of(since))[_STATE])
                else:
                    data = self._read_state(since)
                whole = _WholeState(since, TableState.decode(unpack_state(data)))
            return TableState.decode_since(members, whole.state), whole

    def _read_back(self, *, with_states: bool) -> Iterator[_ReadEntry]:
        """Yield the entries and their states, from the open version back. In an object store, where each read takes its
        time, each round reads twice as many at once as the last."""

        def read(version: int) -> _ReadEntry | None:
            try:
                lines = self._lines_of(version)
            except FileNotFoundError:
                return None
            metadata, state = _commit_info(lines), b""
            if with_states:
                with self._decoding():
                    if file := metadata.get(_STATE_FILE):
                        try:
                            state = self._read_state(file)
                        except FileNotFoundError as error:
                            return _ReadEntry(version, lines, metadata, error)
                    else:
                        state = b64decode(metadata.get(_STATE) or metadata.get(_DIFFERENCE) or "")
            return _ReadEntry(version, lines, metadata, state)

        version, count = self.version, 1
        while version >= 0:
            versions = range(version, max(version - count, -1), -1)
            if count == 1:
                found = [read(version)]
            else:
                with ThreadPoolExecutor(count) as threads:
                    found = [*threads.map(read, versions)]
            for entry in found:
                if entry is None:
                    return
                yield entry
            version -= count
            count = 1 if self.location.is_local else min(2 * count, _READS_AT_ONCE)

    def _read_state(self, name: str) -> bytes:
        if not _STATE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a state")
        return self.location.read(f"{STATE_FOLDER}/{name}")

    def _lines_of(self, version: int) -> list[bytes]:
        """Return the entry of a version. Raises `FileNotFoundError` if it is gone."""
        return self.location.read(f"_delta_log/{version:020}.json").splitlines()

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, ZlibError) as error:
            raise self._lost_state(f"its log or a file in {STATE_FOLDER} is damaged ({error!r})") from error

    def _lost_state(self, why: str) -> LakeDamaged:
        return LakeDamaged(
            f"the state of the table at {self.location.uri} can't be read: {why}",
            hint="Restore it from a backup, or remove the table's directory: the next run rebuilds it. For `changes`, "
            "land into another directory",
        )

    # --- changing -----------------------------------------------------------------------------------------------------

    def commit(self, commit: TableCommit) -> None:
        """Change the table. Either the whole commit succeeds, or nothing changes and an error is raised."""
        # If its plan used files that are gone, the commit would bring their rows back.
        before, files = self.version, {file.path: file for file in self.files()}
        gone = [file.path for file in commit.remove if file.path not in files or files[file.path].vector != file.vector]
        assert not gone, f"files that are to be removed are not live: {gone}"
        assert self.may_have_vectors or not any(file.vector for file in commit.add), "the protocol has no vectors"
        self._check_protocol()
        self._append(commit)
        if self.version == before + 1:
            # No other writer intervened, so the live files need not be read again.
            added, removed = {file.path: file for file in commit.add}, {file.path for file in commit.remove}
            kept = {path: file for path, file in files.items() if path in added or path not in removed}
            # A file with more dead rows keeps its place.
            self._files = self.version, kept | added
        if (self.version + 1) % int(self.properties.get(_CHECKPOINT_INTERVAL) or _CHECKPOINT_INTERVAL_DEFAULT) == 0:
            with self._writing():
                self._table.create_checkpoint()

    def _actions(self, commit: TableCommit, said: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the actions of a commit as Delta's protocol defines them ("Actions"). Each is a line of its entry."""
        now_ms, data_change = int(time.time() * 1000), not commit.is_rearrangement
        partition_by = json.dumps(self._table.metadata().partition_columns)
        yield {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": "WRITE",
                "operationParameters": {"mode": "Append", "partitionBy": partition_by},
                "engineInfo": f"headwater:{__version__}",
                # Makes each entry unique.
                "txnId": str(uuid.uuid4()),
                **said,
            }
        }
        for file in commit.remove:
            removed = {"deletionTimestamp": now_ms, "extendedFileMetadata": True, **_vector_member(file)}
            yield {"remove": {**_file_members(file, data_change), **removed}}
        for file in commit.add:
            added = {"modificationTime": file.modified_ms, "stats": file.stats(), **_vector_member(file)}
            yield {"add": {**_file_members(file, data_change), **added}}
        for file in commit.cdc:
            yield {"cdc": _file_members(file, False)}
        for name, number in commit.transactions.items():
            yield {"txn": {"appId": name, "version": number, "lastUpdated": now_ms}}

    def _put_entry(self, version: int, entry: bytes) -> None:
        path = f"_delta_log/{version:020}.json"
        try:
            self.location.create(path, entry)
        except (FileExistsError, LakeUnreachable) as error:
            # A store may do what was asked although its answer is lost: this may be our own entry.
            with contextlib.suppress(FileNotFoundError, LakeUnreachable):
                if self.location.read(path) == entry:
                    return
            if isinstance(error, LakeUnreachable):
                raise
            raise self._in_use(f"version {version} already exists") from error

    def _check_protocol(self) -> None:
        """Raise unless our commits do all that the table requires of writers. Other programs may have changed that."""
        protocol = self._table.protocol()
        version, features = protocol.min_writer_version, {*(protocol.writer_features or ())}
        if version > 7 or (version < 7 and version > _WRITER_VERSION_MAX) or features - _WRITER_FEATURES:
            what = ", ".join(sorted(features - _WRITER_FEATURES)) or f"version {version} of Delta's protocol"
            raise LakeError(
                f"the table at {self.location.uri} can't be written: another program has turned on {what}",
                hint="Turn it off there, or land into another directory",
            )

    def keep_statistics(self, ranges: Iterable[str], state: TableState) -> None:
        """Make readers use the statistics of these columns: an earlier version had fewer, and typed columns may come
        later."""
        wanted = _column_list(ranges)
        if self.properties.get(_STATISTICS) != wanted:
            self.set_properties({_STATISTICS: wanted}, state)

    def keep_description(self, kind: TableKind, collection: str, state: TableState) -> None:
        """Add a description and column comments: earlier versions did not. Keeps what another program has written."""
        if not self.description:
            text, schema = table_description(kind, collection), commented(self.schema, kind)
            self._check_protocol()
            described = self._metadata_action(description=text, schemaString=_delta_schema(schema).to_json())
            self._append(TableCommit(state=state), described)

    @property
    def _has_format(self) -> bool:
        """Whether the table has the current format number, so that no earlier version takes it for its own."""
        return int(self.properties.get(FORMAT_PROPERTY) or 1) >= FORMAT_VERSION

    def _metadata_action(self, properties: Mapping[str, str] | None = None, **members: Any) -> dict[str, Any]:
        """Return the table's metadata with some properties and members changed, and the current format number."""
        metadata = self._table.metadata()
        described = {
            "id": str(metadata.id),
            "name": metadata.name,
            "description": metadata.description,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": self._table.schema().to_json(),
            "partitionColumns": metadata.partition_columns,
            "createdTime": metadata.created_time,
            "configuration": {**metadata.configuration, FORMAT_PROPERTY: str(FORMAT_VERSION), **(properties or {})},
        }
        return {"metaData": described | members}

    def add_columns(self, fields: Sequence[pa.Field], state: TableState) -> None:
        """Add columns, in a commit of metadata only: existing rows have null in them."""
        if not self._has_format:
            self._append(TableCommit(state=state))
        with self._committing(state) as said:
            columns = Schema.from_arrow(pa.schema(fields)).fields
            self._table.alter.add_columns(columns, commit_properties=_commit_properties(said))

    def set_vectors(self, enabled: bool, state: TableState) -> None:
        """Turn deletion vectors on or off. To turn them off, no file may have one. Readers that don't know vectors
        refuse the table while they are on.

        delta-rs would also turn on another feature, which shuts out more readers, and never turns one off.
        """
        assert enabled or not any(file.vector for file in self.files()), "a file has a vector"
        protocol, metadata = self._table.protocol(), self._table.metadata()
        readers, writers = {*(protocol.reader_features or ())}, {*(protocol.writer_features or ())}
        if protocol.min_writer_version < 7:
            # What versions before 7 required implicitly must be named from 7 on (PROTOCOL.md, "Table Features").
            writers = {"appendOnly", "invariants"} if protocol.min_writer_version > 1 else set()
            writers |= {"changeDataFeed"} if metadata.configuration.get(FEED_PROPERTY) == "true" else set()
        for features in (readers, writers):
            (features.add if enabled else features.discard)(_VECTORS)
        versions: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
        if readers:
            versions = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": sorted(readers)}
        elif writers - {"appendOnly", "invariants"}:
            versions["minWriterVersion"] = 7
        if versions["minWriterVersion"] == 7:
            versions["writerFeatures"] = sorted(writers)
        self._check_protocol()
        described = self._metadata_action({_USES_VECTORS: str(enabled).lower()})
        self._append(TableCommit(state=state), {"protocol": versions}, described)

    def _append(self, commit: TableCommit, *others: Mapping[str, Any]) -> None:
        """Write the next entry, with other actions after those of the commit, then refresh."""
        if not self._has_format and not any("metaData" in action for action in others):
            others = (*others, self._metadata_action())
        with self._committing(commit.state) as said:
            actions = (*self._actions(commit, said), *others)
            entry = "".join(f"{json.dumps(action, separators=(',', ':'))}\n" for action in actions)
            self._put_entry(self.version + 1, entry.encode())

    def set_properties(self, properties: Mapping[str, str], state: TableState) -> None:
        with self._committing(state) as said:
            self._table.alter.set_table_properties(
                {**properties, FORMAT_PROPERTY: str(FORMAT_VERSION)},
                raise_if_not_exists=False,
                commit_properties=_commit_properties(said),
            )

    @contextlib.contextmanager
    def _committing(self, state: TableState) -> Iterator[dict[str, str]]:
        """Write the state that the table will hold, let the caller commit metadata that names it, then refresh."""
        with self._writing():
            said, whole = _write_state(self.location, self.version + 1, state, self._whole)
            yield said
        self.refresh()
        self._whole = whole

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self.check_there()
        try:
            with self.location.answering():
                yield
        except CommitFailedError as error:
            raise self._in_use(_one_line(error)) from error
        except DeltaError as error:
            raise LakeError(
                f"the table at {self.location.uri} can't be written: {_one_line(error)}",
                hint="Check that the directory is writable and has free space, then start again: nothing is lost",
            ) from error

    def _in_use(self, reason: str) -> LakeInUse:
        return LakeInUse(
            f"another process has written to the table at {self.location.uri} meanwhile ({reason})",
            hint="Let only one pipeline write to a directory, then start again: nothing is lost",
        )

    def died_s(self) -> dict[str, float]:
        """Return when files died, in seconds by path, according to the newest checkpoint and the entries since then:
        removed files, replaced vectors, and files of the change data feed, which belong to one version alone."""
        found: dict[str, float] = {}
        checkpoint, paths = self._checkpoint()
        for path in paths:
            with self.location.open_input(path) as file:
                columns = ["remove.path", "remove.deletionTimestamp", "remove.deletionVector"]
                removed = pq.ParquetFile(file).read(columns).column("remove")
            _note_removals(found, removed.drop_null().to_pylist())
        for entry in islice(self.entries(with_states=False), _CHECKPOINT_ENTRIES_MAX):
            if entry.version <= checkpoint:
                break
            _note_removals(found, entry.actions("remove"))
            found |= {action["path"]: entry.time_ms / 1000 for action in entry.actions("cdc")}
        return found

    def fed_since(self, version: int) -> dict[str, int]:
        """Return the bytes of each file of the change data feed that was written after a version, by path."""
        if self.properties.get(FEED_PROPERTY) != "true":
            return {}
        later = takewhile(lambda entry: entry.version > version, self.entries(with_states=False))
        return {action["path"]: action["size"] for entry in later for action in entry.actions("cdc")}

    @property
    def tombstone_hours(self) -> int:
        """How many hours checkpoints keep the names of removed files."""
        text = self.properties.get(_TOMBSTONE_RETENTION)
        match = re.fullmatch(r"interval (\d+) hours", text or "")
        return int(match[1]) if match else _TOMBSTONE_HOURS_DEFAULT

    def set_tombstone_hours(self, hours: int, state: TableState) -> None:
        self.set_properties({_TOMBSTONE_RETENTION: f"interval {hours} hours"}, state)

    def clean(self, state: TableState, *, retention_hours: int) -> None:
        """Delete log entries older than `retention_hours`, after a commit that records the table's state, and delete
        states that no entry needs any more."""
        kept = f"interval {retention_hours} hours"
        if self.properties.get(_LOG_RETENTION) != kept:
            self.set_properties({_LOG_RETENTION: kept}, state)
        self.commit(TableCommit(state=state))
        with self.location.answering():
            self._table.create_checkpoint()
            self._table.cleanup_metadata()
        self.refresh()
        logged = [int(match[1]) for it in self.location.entries("_delta_log") if (match := _ENTRY_NAME.match(it.name))]
        needed = min(logged, default=0) - WHOLE_STATE_COMMITS
        names = [entry.name for entry in self.location.entries(STATE_FOLDER)]
        # A process that dies while it writes a state leaves it under a longer name.
        dead = [name for name in names if (match := _STATE_NAME.search(name)) and int(match[1]) < needed]
        self.location.delete([f"{STATE_FOLDER}/{name}" for name in dead])


@dataclass(frozen=True, slots=True)
class _WholeState:
    """A state, and where it is stored as a whole."""

    place: str | int
    """The name of its file; for earlier versions, the version whose entry contains it."""
    state: TableState

    @property
    def version(self) -> int:
        return self.place if isinstance(self.place, int) else int(self.place.partition("-")[0])


@dataclass(frozen=True, slots=True)
class _ReadEntry:
    """An entry of the log as it was read, with its encoded state, which is empty in commits of others."""

    version: int
    lines: Sequence[bytes]
    metadata: Mapping[str, Any]
    state: bytes | FileNotFoundError


def _write_state(
    location: Location, version: int, state: TableState, whole: _WholeState | None
) -> tuple[dict[str, str], _WholeState | None]:
    """Write the file of a state, for the commit that makes a version. Returns the commit's metadata about the state,
    and the whole state for later differences. The readable members are for `DESCRIBE HISTORY`."""
    data, name = None, f"{version:020}-{secrets.token_hex(8)}.json.gz"
    if whole is not None and isinstance(whole.place, str) and version - whole.version < WHOLE_STATE_COMMITS:
        data = state.encode_since(whole.state, whole.place)
    if data is None:
        data, whole = state.encode(), _WholeState(name, state)
    location.write(f"{STATE_FOLDER}/{name}", data)
    said = {_STATE_FILE: name, "headwater.batch": str(state.batch)}
    if state.as_of_s is not None:
        said["headwater.as_of"] = datetime.fromtimestamp(state.as_of_s, UTC).isoformat(timespec="milliseconds")
    return said, whole


def _delta_schema(schema: pa.Schema) -> Schema:
    """Convert a schema to the log's form: Arrow has no variants. delta-rs then requests the table feature."""

    def delta_field(field: pa.Field) -> Field:
        if field.type != VARIANT:
            return Field.from_arrow(field)
        metadata = {name.decode(): text.decode() for name, text in (field.metadata or {}).items()}
        return Field(field.name, VariantType(), nullable=field.nullable, metadata=metadata)

    return Schema([*map(delta_field, schema)])


def _unreadable(location: Location, error: Exception) -> LakeDamaged:
    return LakeDamaged(
        f"the log of the table at {location.uri} can't be read: {_one_line(error)}",
        hint="Restore its `_delta_log` from a backup, or land into another directory",
    )


def _one_line(error: Exception) -> str:
    """Return the message of delta-rs in one line: it draws a tree of causes, in colours."""
    return printable(" ".join(_DRAWN.sub("", str(error)).split()))


_DRAWN = re.compile("\x1b\\[\\d+m|↳")


def _column_list(names: Iterable[str]) -> str:
    """Format a list of columns as Delta does: names that are more than letters and digits are quoted."""
    return ",".join(name if name.isidentifier() else f"`{name.replace('`', '``')}`" for name in names)


def _commit_properties(said: Mapping[str, str], transactions: Mapping[str, int] | None = None) -> CommitProperties:
    """Return the properties for commits of delta-rs."""
    return CommitProperties(
        custom_metadata=dict(said),
        max_commit_retries=0,
        app_transactions=[Transaction(name, number) for name, number in (transactions or {}).items()],
    )


def _file_members(file: DataFile, data_change: bool) -> dict[str, Any]:
    """Return the members that all actions on a file have."""
    return {
        "path": file.path,
        "partitionValues": dict(file.partition),
        "size": file.size_bytes,
        "dataChange": data_change,
    }


def _vector_member(file: DataFile) -> dict[str, Any]:
    return {} if file.vector is None else {"deletionVector": file.vector.to_action()}


def _vectors_of(added: Iterable[Mapping[str, Any]]) -> dict[str, DeletionVector]:
    """Return vectors by the paths of the files that have one."""
    return {
        action["path"]: DeletionVector.of_action(action["deletionVector"])
        for action in added
        if action.get("deletionVector") is not None
    }


def _note_removals(found: dict[str, float], removed: Iterable[Mapping[str, Any]]) -> None:
    """Record when files were removed. The last time counts: a file with more dead rows is removed and added again."""
    for action in removed:
        paths = [action["path"]]
        if (vector := action.get("deletionVector")) is not None:
            paths += [path] if (path := DeletionVector.of_action(vector).file) is not None else []
        for path in paths:
            found[path] = max(found.get(path, 0.0), action["deletionTimestamp"] / 1000)


def _to_data_file(row: Mapping[str, Any], vector: DeletionVector | None) -> DataFile:
    """Convert a flat row of delta-rs to a file."""

    def members(prefix: str) -> dict[str, Any]:
        return {name[len(prefix) :]: it for name, it in row.items() if name.startswith(prefix) and it is not None}

    least, highest = members("min."), members("max.")
    partition = {name[len("partition.") :]: it for name, it in row.items() if name.startswith("partition.")}
    return DataFile(
        path=row["path"],
        size_bytes=row["size_bytes"],
        rows=row["num_records"] or 0,
        partition=tuple((name, str(it).lower() if isinstance(it, bool) else str(it)) for name, it in partition.items()),
        ranges={name: (low, highest[name]) for name, low in least.items() if name in highest},
        nulls=members("null_count."),
        modified_ms=row["modification_time"],
        vector=vector,
    )
