"""Deleting what no table needs any more: files that were removed or never committed, and old entries of the logs.

A file is deleted only if it is not live, no version within the retention time needs it, and it is older than that time
itself: what an executor has written and the driver has not committed yet looks just like what never will be.

Who cleans a log takes the commit metadata of its old entries away. So it ends with an entry that says again what the
table holds, and that one stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from headwater.errors import InvalidInput
from headwater.spark.lake.delta_log import LOG_RETENTION_DAYS, DeltaLog, TableState
from headwater.spark.lake.lake import Lake

VACUUM_HOURS_MIN = 1
"""Longer than any batch takes from its first file to its commit."""
VACUUM_HOURS_DEFAULT = 7 * 24


def vacuum(lake: Lake, *, retention_hours: int = VACUUM_HOURS_DEFAULT) -> int:
    """Delete the files that nobody needs, in all tables. Returns how many."""
    if retention_hours < VACUUM_HOURS_MIN:
        raise InvalidInput(
            f"files of the last {retention_hours} hours can't be deleted safely",
            hint=f"Give a retention of at least {VACUUM_HOURS_MIN} hours",
        )
    return sum(log.vacuum(state, retention_hours=retention_hours) for log, state in _logs(lake))


def clean_logs(lake: Lake) -> None:
    """Delete entries of the logs that are older than the tables' `delta.logRetentionDuration`."""
    oldest_s = time.time() - LOG_RETENTION_DAYS * 24 * 3600
    for log, state in _logs(lake):
        if log.has_entries_before(oldest_s):
            log.clean(state)


def _logs(lake: Lake) -> Iterator[tuple[DeltaLog, TableState]]:
    yield lake.changes, lake.state
    for tables in lake.tables.values():
        for table in (tables.documents, tables.history, tables.rejects):
            if table is not None:
                yield table.log, table.state
