"""Tables that are set aside: what is wrong with one table stops no other.

A table whose log or files are damaged, that can't be made, or that can't take what is to be merged into it, is set
aside with the reason and with what to do. All other tables go on, and `changes` has everything: nothing that a table
misses is trimmed, and its changes are merged as soon as it is in order. It is tried again after a while, and by every
new run. What is wrong with the whole lake, such as a store that does not answer or a full disk, is no reason to set a
table aside.

`Lake` has the list, `commits` and `upkeep` put tables on it, and the landing shows it.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from traceback import extract_tb

import pyarrow as pa
from deltalake.exceptions import DeltaError

from headwater.client.retries import Backoff
from headwater.errors import (
    ColumnsChanged,
    HeadwaterError,
    InvalidInput,
    LakeError,
    LakeFull,
    LakeInUse,
    LakeOfOtherBucket,
    LakeUnreachable,
    QueryFailed,
    TablesSetAside,
)
from headwater.lake.location import lake_error, system_error
from headwater.log_fields import LogEvent, fields
from headwater.phrases import counted, printable

logger = logging.getLogger(__name__)

RETRY_S_MIN, RETRY_S_MAX = 30.0, 600.0
"""How long a table is left alone: longer each time that it fails."""
SHOWN_MAX = 16
"""So many tables are named where they are shown. All are counted."""
_REASON_CHARS_MAX = 500
_BACKOFF = Backoff(delay_s_min=RETRY_S_MIN, delay_s_max=RETRY_S_MAX, random=lambda: 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A table that is set aside."""

    name: str
    reason: str
    hint: str
    """What to do."""
    since_s: float
    retry_s: float
    """When it is tried again."""
    failures: int
    """In a row."""


class AsideTables:
    """The tables of a lake that are set aside, in one run of a landing, or in one look at a lake."""

    def __init__(self, clock: Callable[[], float] = time.time, *, is_logged: bool = True) -> None:
        self._clock = clock
        self._is_logged = is_logged
        self._tables: dict[str, SetAside] = {}
        self._tried: set[str] = set()
        """Those that take part again, until it shows whether they are in order."""

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, name: object) -> bool:
        """Whether a table takes no part now."""
        return name in self._tables and name not in self._tried

    @property
    def tables(self) -> tuple[SetAside, ...]:
        return tuple(self._tables[name] for name in sorted(self._tables))

    def put(self, name: str, fault: HeadwaterError) -> None:
        before, now_s = self._tables.get(name), self._clock()
        failures = 1 if before is None else before.failures + 1
        delay_s = _BACKOFF.delay_s(failures)
        self._tables[name] = SetAside(
            name=name,
            reason=fault.reason[:_REASON_CHARS_MAX],
            hint=fault.hint[:_REASON_CHARS_MAX],
            since_s=now_s if before is None else before.since_s,
            retry_s=now_s + delay_s,
            failures=failures,
        )
        self._tried.discard(name)
        if self._is_logged:
            logger.warning(
                "%s is set aside, and tried again in %.0f s: %s",
                *(name, delay_s, fault),
                extra=fields(event=LogEvent.TABLE_SET_ASIDE, table=name, reason=fault.reason, duration_s=delay_s),
            )

    def try_due(self) -> list[str]:
        """Let those take part again whose time has come. Returns their names."""
        now_s = self._clock()
        due = [name for name, table in self._tables.items() if table.retry_s <= now_s and name not in self._tried]
        self._tried.update(due)
        return due

    def settle(self) -> None:
        """Those that were tried and are not set aside again are in order."""
        for name in self._tried:
            del self._tables[name]
            logger.info("%s is in order again", name, extra=fields(event=LogEvent.TABLE_RETURNED, table=name))
        self._tried.clear()


def set_aside_error(tables: Sequence[SetAside]) -> TablesSetAside:
    """All of them in one sentence."""
    first, *others = tables
    more = f"; {counted(len(others), 'more table')} {'is' if len(others) == 1 else 'are'} set aside" if others else ""
    return TablesSetAside(
        f"the table of {first.name} is set aside: {first.reason}{more}",
        hint=f"{first.hint}. All other tables have landed, and `changes` has what is missing",
    )


# --- whose fault it is ------------------------------------------------------------------------------------------------

_OF_ALL = (
    *(LakeFull, LakeInUse, LakeUnreachable, LakeOfOtherBucket, QueryFailed, InvalidInput, ColumnsChanged),
    *(ConnectionError, TimeoutError, MemoryError),
)
"""About the lake, its store, the machine, or what was asked for."""
_OF_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
_OF_ONE = (
    *(HeadwaterError, DeltaError, pa.ArrowException, OSError),
    *(AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError),
)
_CAUSES_MAX = 8


def own_fault(error: BaseException) -> HeadwaterError | None:
    """An error as what is wrong with one table; None where it says nothing of that table."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < _CAUSES_MAX:
        chain.append(cause)
    if any(isinstance(it, _OF_ALL) or system_error(it) in _OF_MACHINE for it in chain):
        return None
    # What delta-rs raises for a panic is no `Exception`, and can't be imported.
    if not isinstance(error, _OF_ONE) and type(error).__name__ != "PanicException":
        return None
    hint = "This is a fault of Headwater: report it, and update when it is fixed"
    if isinstance(error, HeadwaterError | OSError | DeltaError):
        found = lake_error(error, "a folder of the table")
        if not isinstance(found, QueryFailed):
            return found
        hint = "See that the folders and files of the table can be read and written"
    text = printable(" ".join(str(error).split()))[: _REASON_CHARS_MAX // 2]
    steps = [step for step in extract_tb(error.__traceback__) if "headwater" in step.filename]
    where = f" ({PurePath(steps[-1].filename).name}, line {steps[-1].lineno})" if steps else ""
    return LakeError(f"{type(error).__name__}{text and ': '}{text}{where}", hint=hint)
