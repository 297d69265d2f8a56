"""Tables that are set aside: a fault of one table does not stop the others.

A table is set aside, with the reason and with what to do, if its log or files are damaged, if it can't be created, or
if it can't take what is to be merged into it. All other tables continue, and `changes` has everything: nothing that the
table misses is trimmed, and its changes are merged as soon as it is in order. It is retried after a while, and by every
new run. Faults of the whole lake, such as a store that does not answer or a full disk, set no table aside.

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
"""The pause before a table is retried, which grows with each failure."""
SHOWN_MAX = 16
"""How many tables are named in a list. All are counted."""
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
    """When it is retried."""
    failures: int
    """Consecutive failures."""


class AsideTables:
    """The tables of a lake that are set aside in one run of a landing, or in one look at a lake."""

    def __init__(self, clock: Callable[[], float] = time.time, *, is_logged: bool = True) -> None:
        self._clock = clock
        self._is_logged = is_logged
        self._tables: dict[str, SetAside] = {}
        self._tried: set[str] = set()
        """Tables that are being retried, until it is known whether they are in order."""

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, name: object) -> bool:
        """Whether a table is left out now."""
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
        """Let tables whose pause is over take part again. Returns their names."""
        now_s = self._clock()
        due = [name for name, table in self._tables.items() if table.retry_s <= now_s and name not in self._tried]
        self._tried.update(due)
        return due

    def settle(self) -> None:
        """Take tables off the list that were retried and not set aside again."""
        for name in self._tried:
            del self._tables[name]
            logger.info("%s is in order again", name, extra=fields(event=LogEvent.TABLE_RETURNED, table=name))
        self._tried.clear()


def set_aside_error(tables: Sequence[SetAside]) -> TablesSetAside:
    """Return one error for all of them."""
    first, *others = tables
    more = f"; {counted(len(others), 'more table')} {'is' if len(others) == 1 else 'are'} set aside" if others else ""
    return TablesSetAside(
        f"the table of {first.name} is set aside: {first.reason}{more}",
        hint=f"{first.hint}. All other tables have landed, and `changes` has what is missing",
    )


# --- faults of one table ----------------------------------------------------------------------------------------------

_OF_ALL = (
    *(LakeFull, LakeInUse, LakeUnreachable, LakeOfOtherBucket, QueryFailed, InvalidInput, ColumnsChanged),
    *(ConnectionError, TimeoutError, MemoryError),
)
"""Errors of the lake, its store, the machine, or the user's input."""
_OF_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
_OF_ONE = (
    *(HeadwaterError, DeltaError, pa.ArrowException, OSError),
    *(AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError),
)
_CAUSES_MAX = 8


def own_fault(error: BaseException) -> HeadwaterError | None:
    """Convert an error to the fault of one table; None if the error is not about that table."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < _CAUSES_MAX:
        chain.append(cause)
    if any(isinstance(it, _OF_ALL) or system_error(it) in _OF_MACHINE for it in chain):
        return None
    # The exception of a panic in delta-rs is no `Exception`, and can't be imported.
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
