"""Delete what no table needs: dead files, by hours and by bytes, and old entries of the logs.

A file is *dead* if the newest version of its table does not need it: a commit has removed it, no live file has its
deletion vector in it, it is of the change data feed, or no commit has ever named it. Dead files are kept so
that earlier versions can be read, for some hours (`vacuum`) and up to some bytes (`DeadFiles`), whichever ends first. A
merge writes files again that hold a changed document, so a small table with many changes leaves many times its own size
behind in an hour.

What is never deleted: a live file; a file that was removed within `READERS_S_MIN`, for readers that have just opened
the version before; and a file that no commit has named yet within `VACUUM_HOURS_MIN`: what an executor has written and
the driver has not committed yet looks just like what never will be.

Dead bytes are counted from the lists of live files, which the logs have in memory: what was live before and is not now
has been removed. The store is listed once for each table, and again after `vacuum`: that finds what earlier runs and
crashes have left.

Cleaning a log takes the commit metadata of its old entries away. So it ends with an entry that says again what the
table holds, and that one stays.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Self

from headwater.errors import InvalidInput
from headwater.lake.delta_log import LOG_RETENTION_DAYS, DeltaLog
from headwater.lake.lake import Lake
from headwater.lake.layout import FEED_FOLDER, STATE_FOLDER
from headwater.lake.location import Location
from headwater.lake.table_state import TableState
from headwater.options import parse_bytes

VACUUM_HOURS_MIN = 1
"""Longer than any batch takes from its first file to its commit."""
VACUUM_HOURS_DEFAULT = 7 * 24
READERS_S_MIN = 120.0
"""A removed file is kept for so long, whatever its bytes: readers of the versions of this time have it open, or are
about to open it."""
DEAD_BYTES_DEFAULT = "4x"
DEAD_BYTES_MIN = 16 * 1024 * 1024
"""What a table may have where the bound is a multiple: many versions of a small table cost nothing."""
LOG_BYTES_MIN = 64 * 1024 * 1024
"""What a log may have at least."""
_DELETIONS_MAX = 1000
"""Files of one table that are deleted at a time; the next turn deletes more."""
_DATA_FILE = re.compile(r"\.parquet$|(^|/)deletion_vector_[^/]*\.bin$")
_TIMES = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DeadBytes:
    """How many bytes of dead files each table may have."""

    times: float
    """So many times the bytes of its live files…"""
    least_bytes: int
    """…and at least this."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """`4x` for a multiple of the live table, or a size such as `10GB`."""
        if match := _TIMES.fullmatch(text.strip()):
            return cls(float(match[1]), DEAD_BYTES_MIN)
        try:
            return cls(0.0, parse_bytes(text))
        except ValueError as error:
            raise InvalidInput(
                f"{text!r} is not a limit in bytes",
                hint="Write 4x for four times the live table, or a size such as 10GB",
            ) from error

    def of(self, live_bytes: int) -> int:
        return max(int(self.times * live_bytes), self.least_bytes)


@dataclass(frozen=True, slots=True)
class _DeadFile:
    size_bytes: int
    since_s: float
    """When it was removed; when it was written, if no commit has named it."""
    kept_until_s: float


@dataclass(slots=True)
class _TableFiles:
    """The files of a table."""

    log: DeltaLog
    version: int = -1
    live: dict[str, int] = field(default_factory=dict)
    """Path → bytes."""
    dead: dict[str, _DeadFile] = field(default_factory=dict)
    """By path, those first that died first."""

    @property
    def dead_bytes(self) -> int:
        return sum(file.size_bytes for file in self.dead.values())

    def look(self, now_s: float) -> None:
        """Note the files that were live at the last look and are not now."""
        if self.version == self.log.version:
            return
        before, self.live = self.live, _live(self.log)
        died = {path: before[path] for path in before.keys() - self.live.keys()}
        if self.version >= 0:
            died |= self.log.fed_since(self.version)
        self.version = self.log.version
        for path, size_bytes in died.items():
            self.dead[path] = _DeadFile(size_bytes, now_s, now_s + READERS_S_MIN)
        # A version that has been restored has files that were dead.
        for path in self.dead.keys() & self.live.keys():
            del self.dead[path]

    def list(self) -> None:
        """Find the dead files of earlier runs."""
        died_s = self.log.died_s()
        found = {}
        for path, size_bytes, written_s in _data_files(self.log.location):
            if path not in self.live:
                since_s = died_s.get(path)
                until_s = written_s + VACUUM_HOURS_MIN * 3600 if since_s is None else since_s + READERS_S_MIN
                found[path] = _DeadFile(size_bytes, since_s or written_s, until_s)
        self.dead = dict(sorted(found.items(), key=lambda item: item[1].since_s))

    def delete(self, bytes_max: int, now_s: float) -> int:
        """Delete what died first until no more bytes are dead than may be. Returns how many files are gone."""
        excess_bytes = self.dead_bytes - bytes_max
        if excess_bytes <= 0:
            return 0
        # Another program may have restored an earlier version meanwhile.
        self.log.refresh()
        self.look(now_s)
        chosen: list[str] = []
        for path, file in self.dead.items():
            if excess_bytes <= 0 or len(chosen) == _DELETIONS_MAX:
                break
            if file.kept_until_s <= now_s:
                chosen.append(path)
                excess_bytes -= file.size_bytes
        return self._delete(chosen)

    def delete_older(self, before_s: float) -> int:
        """Delete what died before a time. Returns how many files are gone."""
        return self._delete([path for path, file in self.dead.items() if file.since_s < before_s])

    def _delete(self, chosen: Sequence[str]) -> int:
        self.log.location.delete(chosen)
        for path in chosen:
            del self.dead[path]
        return len(chosen)

    def keep_tombstones(self, state: TableState, *, keep_hours: int, has_deleted: bool, now_s: float) -> None:
        """Have checkpoints name removed files for as long as these are there, and not for much longer: a checkpoint
        would have the names of a week's files otherwise, though they are deleted within minutes."""
        if not self.dead:
            return
        oldest_h = (now_s - next(iter(self.dead.values())).since_s) / 3600
        wanted = min(2 ** math.ceil(math.log2(max(1.0, 2 * oldest_h))), keep_hours)
        now = self.log.tombstone_hours
        if now < min(2 * oldest_h, keep_hours) or (has_deleted and now > 4 * wanted):
            self.log.set_tombstone_hours(wanted, state)


def _live(log: DeltaLog) -> dict[str, int]:
    """The files that the newest version needs, and their bytes. Of a file of vectors that is where the last of those
    ends that are live: the log does not say more."""
    live = {file.path: file.size_bytes for file in log.files()}
    for file in log.files():
        if file.vector is not None and (path := file.vector.file) is not None:
            live[path] = max(live.get(path, 0), (file.vector.offset or 0) + file.vector.size_bytes)
    return live


def _data_files(location: Location, folder: str = "") -> Iterator[tuple[str, int, float]]:
    """Paths, bytes and times of the files of rows, of vectors and of the change data feed. What lies in folders such as
    `_delta_log` are none."""
    for entry in location.entries(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.changed_at is not None and _DATA_FILE.search(path):
            yield path, entry.size_bytes, entry.changed_at.timestamp()
        elif entry.changed_at is None and (path == FEED_FOLDER or not entry.name.startswith("_")):
            yield from _data_files(location, path)


class DeadFiles:
    """The dead files of all tables of a lake. For the one driver that lands into it."""

    def __init__(self, bound: DeadBytes, *, keep_hours: int) -> None:
        self.bound = bound
        self._keep_hours = keep_hours
        self._tables: dict[str, _TableFiles] = {}

    @property
    def live_bytes(self) -> int:
        return sum(sum(table.live.values()) for table in self._tables.values())

    @property
    def dead_bytes(self) -> int:
        return sum(table.dead_bytes for table in self._tables.values())

    def forget(self) -> None:
        """Something else has deleted files, or has left some: list all of them again."""
        self._tables.clear()

    def keep_within_bound(self, lake: Lake, *, now_s: float | None = None) -> int:
        """Delete the dead files of each table that are too many, the oldest first. Returns how many files are gone."""
        now_s = time.time() if now_s is None else now_s
        deleted = 0
        for log, state, contained in logs(lake):
            with contained:
                table = self._tables.get(log.location.uri)
                if is_new := table is None:
                    table = self._tables[log.location.uri] = _TableFiles(log)
                table.log = log
                table.look(now_s)
                if is_new:
                    table.list()
                gone = table.delete(self.bound.of(sum(table.live.values())), now_s)
                table.keep_tombstones(state, keep_hours=self._keep_hours, has_deleted=gone > 0, now_s=now_s)
                deleted += gone
        return deleted


def check_retention(hours: int) -> None:
    """Raise `InvalidInput` unless files may be deleted after so many hours."""
    if hours < VACUUM_HOURS_MIN:
        raise InvalidInput(
            f"files of the last {hours} hours can't be deleted safely",
            hint=f"Keep files for at least {VACUUM_HOURS_MIN}h",
        )


def vacuum(lake: Lake, *, retention_hours: int = VACUUM_HOURS_DEFAULT) -> int:
    """Delete the files that are dead for longer than some hours. Returns how many."""
    check_retention(retention_hours)
    deleted = 0
    for log, _, contained in logs(lake):
        with contained:
            log.refresh()
            now_s = time.time()
            table = _TableFiles(log)
            table.look(now_s)
            table.list()
            deleted += table.delete_older(now_s - retention_hours * 3600)
    return deleted


def clean_logs(
    lake: Lake, *, retention_days: int = LOG_RETENTION_DAYS, bound: DeadBytes | None = None, now_s: float | None = None
) -> None:
    """Delete entries of the logs that are older than so many days, or that are more bytes than the bound of dead files.

    Versions before them can't be read afterwards.
    """
    bound = bound or DeadBytes.parse(DEAD_BYTES_DEFAULT)
    now_s = time.time() if now_s is None else now_s
    for log, state, contained in logs(lake):
        with contained:
            entries, states = (
                sorted(
                    (entry.changed_at.timestamp(), entry.size_bytes)
                    for entry in log.location.entries(folder)
                    if entry.changed_at is not None
                )
                for folder in ("_delta_log", STATE_FOLDER)
            )
            by_age = sorted([*entries, *states], reverse=True)
            hours = retention_days * 24
            left_bytes = max(bound.of(sum(file.size_bytes for file in log.files())), LOG_BYTES_MIN)
            if sum(size_bytes for _, size_bytes in by_age) > left_bytes:
                # To half of it, so that it is not cleaned each time.
                left_bytes //= 2
                for at_s, size_bytes in by_age:
                    left_bytes -= size_bytes
                    if left_bytes < 0:
                        hours = min(hours, max(VACUUM_HOURS_MIN, int((now_s - at_s) / 3600)))
                        break
            if entries and entries[0][0] < now_s - hours * 3600:
                log.clean(state, retention_hours=hours)


def logs(lake: Lake) -> Iterator[tuple[DeltaLog, TableState, AbstractContextManager[None]]]:
    """The logs of all tables, each with what its table holds, and what contains a fault of that table."""
    yield lake.changes, lake.state, nullcontext()
    for tables in lake.in_service:
        for table in tables.there:
            yield table.log, table.state, lake.containing(tables.name)
