"""The log of a Delta table: what is live, what has been done, and one way to change it.

A commit adds files and removes files, all or nothing, and says what it was by two means of Delta's own:

* *Application transactions*: a name and a number each. The log keeps the newest number of every name for ever, through
  checkpoints and cleaning. They say which batch is in the table, and how far it has been merged.
* *Commit metadata*: here the *state*, which is the offsets that the table holds, the collections that have been seen,
  and more. It is lost with the commit when the log is cleaned. So every commit of ours says it, and the tables forbid
  others to clean their logs by the way (`delta.enableExpiredLogCleanup`). `clean` does, after a commit that says it
  again.

A commit has the whole state only once in a while; the others have what is different from the last whole one, and its
version (`table_state`). Differences do not build on each other: the state is read from two entries of the log at most.

A commit that another writer got ahead of fails, and is not tried again: it was planned on a version that is out of
date.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Self
from zlib import error as ZlibError  # noqa: N812

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from headwater.errors import LakeDamaged, LakeError, LakeGone, LakeInUse
from headwater.lake.data_files import DataFile
from headwater.lake.layout import FORMAT_PROPERTY
from headwater.lake.location import Location
from headwater.lake.table_state import TableState, unpack_state
from headwater.phrases import printable

_STATE = "headwater.state"
_DIFFERENCE = "headwater.state.difference"
WHOLE_STATE_COMMITS = 64
"""One commit in so many has the whole state."""
_STATISTICS = "delta.dataSkippingStatsColumns"
"""The columns that the log has statistics of. Readers look at no others."""
_LOG_RETENTION = "delta.logRetentionDuration"
_TOMBSTONE_RETENTION = "delta.deletedFileRetentionDuration"
_TOMBSTONE_HOURS_DEFAULT = 7 * 24
"""Delta's own."""
_CHECKPOINT_ENTRIES_MAX = 1000
"""More entries than this are not read to find what was removed: a checkpoint comes after 100."""
LOG_RETENTION_DAYS = 30
_PROPERTIES = {
    "delta.enableExpiredLogCleanup": "false",
    _LOG_RETENTION: f"interval {LOG_RETENTION_DAYS} days",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCommit:
    """One change of a table."""

    add: Sequence[DataFile] = ()
    remove: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    state: TableState
    is_rearrangement: bool = False
    """The rows stay the same and only lie in other files: a reader that follows the table's changes can pass it
    over."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One commit, as its entry in the log has it."""

    version: int
    time_ms: int
    """0 where the writer has not said it."""
    state: TableState | None
    """What the table held after it; None in commits of others."""
    lines: Sequence[bytes] = field(repr=False)

    def actions(self, kind: str) -> list[dict[str, Any]]:
        """The actions of a kind, such as `add`, as Delta's protocol has them."""
        start = f'{{"{kind}":'.encode()
        return [json.loads(line)[kind] for line in self.lines if line.startswith(start)]


def _commit_info(lines: Iterable[bytes]) -> Mapping[str, Any]:
    """What a commit says beside its actions."""
    for line in lines:
        if line.startswith(b'{"commitInfo"'):
            found: dict[str, Any] = json.loads(line)["commitInfo"]
            return found
    return {}


class DeltaLog:
    """An open table. It shows the table as it was at the last `refresh` or commit."""

    def __init__(self, table: DeltaTable, location: Location, *, is_pinned: bool = False) -> None:
        self.location = location
        self._is_pinned = is_pinned
        """It shows one version for ever, and is not written to."""
        self._table = table
        self._identity = location.join("_delta_log").identity()
        self._files: tuple[int, dict[str, DataFile]] | None = None
        self._whole: tuple[int, TableState] | None = None
        """The newest version whose entry has the whole state, as far as it is known."""

    @classmethod
    def open(cls, location: Location, *, version: int | None = None) -> Self | None:
        """The table at a location, as it is or as a version was; or None where there is none."""
        try:
            with location.answering():
                table = DeltaTable(location.uri, version=version, storage_options=location.delta_options)
                return cls(table, location, is_pinned=version is not None)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            raise LakeDamaged(
                f"the log of the table at {location.uri} can't be read: {_one_line(error)}",
                hint="Bring its `_delta_log` back from a backup, or land into another directory",
            ) from error

    @classmethod
    def create(
        cls,
        location: Location,
        schema: pa.Schema,
        *,
        partition_by: Sequence[str] = (),
        ranges: Sequence[str],
        properties: Mapping[str, str],
        transactions: Mapping[str, int],
        state: TableState,
    ) -> Self:
        """Make a table with no rows. One that is there already is left as it is."""
        try:
            with location.answering():
                DeltaTable.create(
                    location.uri,
                    schema,
                    mode="ignore",
                    partition_by=list(partition_by),
                    configuration={**_PROPERTIES, _STATISTICS: _column_list(ranges), **properties},
                    storage_options=location.delta_options,
                    raise_if_key_not_exists=False,
                    commit_properties=_commit_properties(transactions, state),
                )
        except (DeltaError, OSError) as error:
            raise LakeError(
                f"the table at {location.uri} can't be made: {_one_line(error)}",
                hint="See that the directory can be written and has room, or give another one",
            ) from error
        log = cls.open(location)
        assert log is not None, "the table has just been made"
        return log

    # --- looking ------------------------------------------------------------------------------------------------------

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
        """The columns of the table, with those that it is partitioned by."""
        return pa.schema(self._table.schema())

    def refresh(self) -> None:
        if self._is_pinned:
            return
        self.check_there()
        try:
            with self.location.answering():
                self._table.update_incremental()
        except DeltaError as error:
            raise LakeDamaged(
                f"the log of the table at {self.location.uri} can't be read: {_one_line(error)}",
                hint="Bring its `_delta_log` back from a backup, or land into another directory",
            ) from error

    def check_there(self) -> None:
        """Raise `LakeGone` unless the log that was opened is still at its place: delta-rs does not look, and begins a
        new one there."""
        if self.location.join("_delta_log").identity() != self._identity:
            raise self.location.gone()

    def as_of(self, batch: int) -> Self | None:
        """The table as it was when it held no batch after this one; None where the log does not go back so far."""
        held = (entry.version for entry in self.entries() if entry.state is not None and entry.state.batch <= batch)
        version = next(held, None)
        return None if version is None else self.open(self.location, version=version)

    def missing_files(self) -> list[str]:
        """Live files that are not there: of an earlier version, upkeep may have deleted some."""
        folders = {file.path.rpartition("/")[0] for file in self.files()}
        there = {f"{folder}/{one.name}".lstrip("/") for folder in folders for one in self.location.entries(folder)}
        return [file.path for file in self.files() if file.path not in there]

    def is_current(self) -> bool:
        """Look again, and return whether the log goes on from the version that was open: it does not where the table
        was removed, or was put back to an earlier time."""
        try:
            self.refresh()
            self._lines_of(self.version)
        except (LakeDamaged, LakeGone, FileNotFoundError):
            return False
        return True

    def transaction(self, name: str) -> int | None:
        """The newest number of an application transaction."""
        return self._table.transaction_version(name)

    def files(self) -> list[DataFile]:
        """The live files, oldest first."""
        if self._files is None or self._files[0] != self.version:
            with self.location.answering():
                rows = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
            files = [_to_data_file(row) for row in rows]
            files.sort(key=lambda file: (file.modified_ms, file.path))
            self._files = self.version, {file.path: file for file in files}
        return list(self._files[1].values())

    def state(self) -> TableState:
        """What the table holds.

        Commits of others, such as an OPTIMIZE, do not say it: the newest that does, counts.
        """
        for state in self.states():
            return state
        raise LakeDamaged(
            f"the log of the table at {self.location.uri} no longer says which offsets the table holds",
            hint="The log was cleaned by another tool: bring it back from a backup, or land into another directory",
        )

    def states(self) -> Iterator[TableState]:
        """What the table held after each of its commits, newest first."""
        return (entry.state for entry in self.entries() if entry.state is not None)

    def entries(self) -> Iterator[LogEntry]:
        """The commits of the table, from the version that is open back to what the log has.

        The entries are read one by one: the history of delta-rs begins with the newest commit of all, which another
        process may have made since the table was opened.
        """
        whole = self._whole
        try:
            for version in range(self.version, -1, -1):
                lines = self._lines_of(version)
                metadata = _commit_info(lines)
                state: TableState | None = None
                with self._decoding():
                    if text := metadata.get(_STATE):
                        whole = version, (state := TableState.decode(text))
                    elif text := metadata.get(_DIFFERENCE):
                        members = unpack_state(text)
                        if whole is None or whole[0] != members["since"]:
                            earlier = _commit_info(self._lines_of(int(members["since"])))
                            whole = int(members["since"]), TableState.decode(earlier[_STATE])
                        state = TableState.decode_since(members, whole[1])
                if whole is not None and (self._whole is None or whole[0] > self._whole[0]):
                    self._whole = whole
                yield LogEntry(version, int(metadata.get("timestamp", 0)), state, lines)
        except FileNotFoundError:
            return

    def _lines_of(self, version: int) -> list[bytes]:
        """The entry of a version. Raises `FileNotFoundError` where it is gone."""
        return self.location.read(f"_delta_log/{version:020}.json").splitlines()

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, ZlibError) as error:
            raise LakeDamaged(
                f"the offsets in the log of the table at {self.location.uri} can't be read ({error!r})",
                hint="Bring the log back from a backup, or land into another directory",
            ) from error

    # --- changing -----------------------------------------------------------------------------------------------------

    def commit(self, commit: TableCommit) -> None:
        """Change the table. Either all of it is done, or nothing and an error is raised."""
        data_change = not commit.is_rearrangement
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            *(_to_add_action(file, data_change=data_change) for file in commit.add),
            *(
                RemoveAction(file.path, data_change, now_ms, file.size_bytes, dict(file.partition))
                for file in commit.remove
            ),
        ]
        state, is_whole = self._encoded(commit.state)
        # Planned on files that are gone, a commit would bring their rows back; delta-rs itself does not look.
        before, files = self.version, {file.path: file for file in self.files()}
        gone = [file.path for file in commit.remove if file.path not in files]
        assert not gone, f"files that are to be removed are not live: {gone}"
        with self._committing():
            self._table.create_write_transaction(
                actions,
                "append",
                self._table.schema(),
                self._table.metadata().partition_columns,
                commit_properties=_commit_properties(commit.transactions, commit.state, state),
            )
        if is_whole:
            self._whole = before + 1, commit.state
        self.refresh()
        if self.version == before + 1:
            # No other writer was there, so what is live need not be looked up again.
            removed = {file.path for file in commit.remove}
            kept = {path: file for path, file in files.items() if path not in removed}
            self._files = self.version, {**kept, **{file.path: file for file in commit.add}}

    def _encoded(self, state: TableState) -> tuple[dict[str, str], bool]:
        """The metadata that says what the table holds after the next commit, and whether it is the whole state."""
        has_differences = int(self.properties.get(FORMAT_PROPERTY) or 1) > 1
        if has_differences and self._whole is not None:
            version, earlier = self._whole
            text = state.encode_since(earlier, version)
            if text is not None and self.version + 1 - version < WHOLE_STATE_COMMITS:
                return {_DIFFERENCE: text}, False
        return {_STATE: state.encode()}, True

    def keep_statistics(self, ranges: Iterable[str], state: TableState) -> None:
        """Have readers look at the statistics of these columns: an earlier version had fewer, and typed columns may
        come later."""
        wanted = _column_list(ranges)
        if self.properties.get(_STATISTICS) != wanted:
            self.set_properties({_STATISTICS: wanted}, state)

    def add_columns(self, fields: Sequence[pa.Field], state: TableState) -> None:
        """Add columns, in one commit of metadata only: rows that are there have null in them."""
        with self._committing():
            self._table.alter.add_columns(
                Schema.from_arrow(pa.schema(fields)).fields, commit_properties=_commit_properties({}, state)
            )
        self.refresh()

    def set_properties(self, properties: Mapping[str, str], state: TableState) -> None:
        with self._committing():
            self._table.alter.set_table_properties(
                dict(properties), raise_if_not_exists=False, commit_properties=_commit_properties({}, state)
            )
        self.refresh()

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        self.check_there()
        try:
            with self.location.answering():
                yield
        except CommitFailedError as error:
            raise LakeInUse(
                f"another process has written to the table at {self.location.uri} meanwhile ({_one_line(error)})",
                hint="Let only one pipeline write to a directory, then start again: nothing is lost",
            ) from error
        except DeltaError as error:
            raise LakeError(
                f"the table at {self.location.uri} can't be written: {_one_line(error)}",
                hint="See that the directory can be written and has room, then start again: nothing is lost",
            ) from error

    def vacuum(self, state: TableState, *, retention_hours: int) -> int:
        """Delete files that no version of the last hours needs and that are older than that. Returns how many."""
        deleted: list[str] = []
        # Deleting makes entries in the log, also where there is nothing to delete. So it is asked first.
        for dry_run in (True, False):
            with self.location.answering():
                deleted = self._table.vacuum(
                    retention_hours=retention_hours,
                    dry_run=dry_run,
                    enforce_retention_duration=False,
                    full=True,
                    commit_properties=_commit_properties({}, state),
                )
            if not deleted:
                break
        self.refresh()
        return len(deleted)

    def removed_s(self) -> dict[str, float]:
        """When files were removed, by path, as far as the newest checkpoint and the entries since then say it."""
        found: dict[str, float] = {}
        checkpoint = -1
        with contextlib.suppress(FileNotFoundError):
            checkpoint = int(json.loads(self.location.read("_delta_log/_last_checkpoint"))["version"])
            with self.location.open_input(f"_delta_log/{checkpoint:020}.checkpoint.parquet") as file:
                removed = pq.ParquetFile(file).read(["remove.path", "remove.deletionTimestamp"]).column("remove")
            found = {it["path"]: it["deletionTimestamp"] / 1000 for it in removed.drop_null().to_pylist()}
        for entry in islice(self.entries(), _CHECKPOINT_ENTRIES_MAX):
            if entry.version <= checkpoint:
                break
            for action in entry.actions("remove"):
                found.setdefault(action["path"], action["deletionTimestamp"] / 1000)
        return found

    @property
    def tombstone_hours(self) -> int:
        """For how long checkpoints name files that were removed."""
        text = self.properties.get(_TOMBSTONE_RETENTION)
        match = re.fullmatch(r"interval (\d+) hours", text or "")
        return int(match[1]) if match else _TOMBSTONE_HOURS_DEFAULT

    def set_tombstone_hours(self, hours: int, state: TableState) -> None:
        self.set_properties({_TOMBSTONE_RETENTION: f"interval {hours} hours"}, state)

    def clean(self, state: TableState, *, retention_hours: int) -> None:
        """Delete entries of the log that are older than so many hours, after one that says what the table holds."""
        kept = f"interval {retention_hours} hours"
        if self.properties.get(_LOG_RETENTION) != kept:
            self.set_properties({_LOG_RETENTION: kept}, state)
        self._whole = None
        self.commit(TableCommit(state=state))
        with self.location.answering():
            self._table.create_checkpoint()
            self._table.cleanup_metadata()
        self.refresh()


def _one_line(error: Exception) -> str:
    """What delta-rs says, which draws a tree of causes, in colours."""
    return printable(" ".join(_DRAWN.sub("", str(error)).split()))


_DRAWN = re.compile("\x1b\\[\\d+m|↳")


def _column_list(names: Iterable[str]) -> str:
    """As Delta writes a list of columns: names that are more than letters and digits are quoted."""
    return ",".join(name if name.isidentifier() else f"`{name.replace('`', '``')}`" for name in names)


def _commit_properties(
    transactions: Mapping[str, int], state: TableState, encoded: Mapping[str, str] | None = None
) -> CommitProperties:
    """`encoded` is the state where it is not to be written as a whole."""
    metadata = {**({_STATE: state.encode()} if encoded is None else encoded), "headwater.batch": str(state.batch)}
    if state.as_of_s is not None:
        metadata["headwater.as_of"] = datetime.fromtimestamp(state.as_of_s, UTC).isoformat(timespec="milliseconds")
    return CommitProperties(
        # What can be read by a person is for `DESCRIBE HISTORY`.
        custom_metadata=metadata,
        max_commit_retries=0,
        app_transactions=[Transaction(name, number) for name, number in transactions.items()],
    )


def _to_add_action(file: DataFile, *, data_change: bool) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values=dict(file.partition),
        modification_time=file.modified_ms,
        data_change=data_change,
        stats=file.stats(),
    )


def _to_data_file(row: Mapping[str, Any]) -> DataFile:
    columns = [name.removeprefix("min.") for name in row if name.startswith("min.")]
    ranges = {
        column: (row[f"min.{column}"], row[f"max.{column}"])
        for column in columns
        if row[f"min.{column}"] is not None and row[f"max.{column}"] is not None
    }
    nulls = {
        name.removeprefix("null_count."): count
        for name, count in row.items()
        if name.startswith("null_count.") and count is not None
    }
    partition = tuple(
        (name.removeprefix("partition."), _partition_text(value))
        for name, value in row.items()
        if name.startswith("partition.")
    )
    return DataFile(
        path=row["path"],
        size_bytes=row["size_bytes"],
        rows=row["num_records"] or 0,
        partition=partition,
        ranges=ranges,
        nulls=nulls,
        modified_ms=row["modification_time"],
    )


def _partition_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
