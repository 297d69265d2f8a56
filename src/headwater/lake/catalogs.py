"""Registering the tables of a lake in a catalog, and keeping them registered.

    keeper = CatalogKeeper(catalog, schema="shop")
    keeper.offer(lake)             # after each commit: what has changed since is registered
    keeper.settle()                # at the end: everything that was offered has been tried

A catalog is anything with `register`, which makes an entry or brings it up to date, and does nothing where it is right.
`catalog_services` has those that are asked over a network, and `headwater.spark.catalog` the one of a session.

What a catalog does never stops a landing, nor makes it wait: a thread of the keeper asks it. If that fails, the tables
that the catalog lacks are tried again, with longer and longer pauses, and the landing says so.

An entry that points to another place is never changed, nor is one that another program has made. An entry stays when
its collection is dropped: the table stays, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import unquote

from headwater.client.retries import Backoff
from headwater.errors import CatalogError, CatalogUnreachable, HeadwaterError
from headwater.lake.delta_log import DeltaLog
from headwater.lake.lake import Lake
from headwater.lake.layout import TableKind
from headwater.log_fields import LogEvent, fields
from headwater.phrases import printable

logger = logging.getLogger(__name__)

RETRY_S_MIN, RETRY_S_MAX = 5.0, 300.0
"""How long a catalog is left alone after a failure: longer each time."""
CHECK_EVERY_S = 3600.0
"""How often entries that are right are looked at again: someone may have dropped one."""
SETTLE_S_MAX = 60.0
_NAME_CHARS_MAX = 128
"""What an old Hive metastore takes. Glue and Unity Catalog take 255."""
_DIGEST_CHARS = 16
_REASON_CHARS_MAX = 500
_STOP_S_MAX = 2.0

MADE_BY = "headwater.table"
"""A property of an entry of ours: the table in the lake, such as `documents/shop.orders`."""
FINGERPRINT = "headwater.entry"
"""A property of an entry of ours: what it said when it was made. Catalogs may write types and texts in another way."""


# --- names ------------------------------------------------------------------------------------------------------------


def plain_name(text: str) -> str:
    """A name without what engines want quotes for."""
    return re.sub("[^A-Za-z0-9_]", "_", text)


def entry_name(table: str) -> str:
    """What a table such as `documents/shop.orders` is called in a catalog: `documents_shop_orders`.

    Catalogs do not tell upper case from lower case, and some take letters, digits and `_` only. A name that is too long
    is cut, and gets its digest.
    """
    name = plain_name(table).lower()
    if len(name) <= _NAME_CHARS_MAX:
        return name
    digest = hashlib.sha256(table.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[: _NAME_CHARS_MAX - _DIGEST_CHARS - 1]}_{digest}"


# --- entries ----------------------------------------------------------------------------------------------------------

_SQL_TYPES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}
"""Where SQL has another name than Delta."""


def sql_type(type_: Any, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """A type of Delta's schema as Spark and Hive write it; `names` are other names of simple types."""
    if isinstance(type_, str):
        return names.get(type_) or _SQL_TYPES.get(type_, type_)
    match type_["type"]:
        case "array":
            return f"array<{sql_type(type_['elementType'], names)}>"
        case "map":
            return f"map<{sql_type(type_['keyType'], names)},{sql_type(type_['valueType'], names)}>"
        case _:
            members = (f"{_quoted(it['name'])}:{sql_type(it['type'], names)}" for it in type_["fields"])
            return f"struct<{','.join(members)}>"


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name.replace('`', '``')}`"


@dataclass(frozen=True)
class Column:
    """A column as Delta's schema has it: one member of its `fields`, as JSON."""

    json: str

    @cached_property
    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = json.loads(self.json)
        return members

    @property
    def name(self) -> str:
        return str(self._members["name"])

    @property
    def type(self) -> Any:
        return self._members["type"]

    @property
    def is_nullable(self) -> bool:
        return bool(self._members["nullable"])

    @property
    def comment(self) -> str:
        return str(self._members["metadata"].get("comment", ""))


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """What a catalog is to say of a table."""

    table: str
    """In the lake: `changes`, or a kind and a collection, such as `documents/shop.orders`."""
    uri: str
    columns: tuple[Column, ...]
    comment: str

    @property
    def name(self) -> str:
        return entry_name(self.table)

    @cached_property
    def fingerprint(self) -> str:
        said = "\n".join((self.comment, *(column.json for column in self.columns)))
        return hashlib.sha256(said.encode()).hexdigest()[:_DIGEST_CHARS]

    @property
    def properties(self) -> dict[str, str]:
        """What marks an entry as ours."""
        return {MADE_BY: self.table, FINGERPRINT: self.fingerprint}

    def is_current(self, full_name: str, *, uri: str, properties: Mapping[str, str]) -> bool:
        """Whether an entry that is there can stay as it is: it is right, or it is another program's, which may have
        reasons for what it says. Raises `CatalogError` if it is of another table."""
        if _same_place(uri) != _same_place(self.uri):
            raise CatalogError(
                f"the catalog has {full_name} already, and it is at {printable(uri) or 'an unknown place'}, not at "
                f"{self.uri}",
                hint="Drop it there if it is no longer needed, or give another --schema",
            )
        return MADE_BY not in properties or properties.get(FINGERPRINT) == self.fingerprint


def _same_place(uri: str) -> str:
    """A URI in one of the spellings that it may have. No path of a lake has what looks like an escape."""
    scheme, colon, rest = unquote(uri).partition(":")
    if not colon:
        scheme, rest = "file", uri
    same = {"s3a": "s3", "s3n": "s3", "abfs": "abfss"}.get(scheme.lower(), scheme.lower())
    return f"{same}:/{rest.strip('/')}"


class Catalog(Protocol):
    """Where tables are registered. It is asked from one thread."""

    def register(self, schema: str, entry: TableEntry) -> None:
        """Make the entry of a table, or bring it up to date; do nothing where it is right. Makes the schema, too.

        Raises `CatalogUnreachable` if nothing else can be registered now either, and any other `HeadwaterError` for
        what is wrong with this one.
        """


def _tables_of(lake: Lake) -> Iterator[tuple[str, DeltaLog]]:
    """All tables, those of older collections first: where two have one name, the older one keeps it."""
    yield str(TableKind.CHANGES), lake.changes
    for tables in sorted(lake.tables.values(), key=lambda it: (min(it.ids, default=0), it.name)):
        for table in tables.there:
            yield f"{table.kind}/{tables.name}", table.log


# --- keeping them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CatalogStatus:
    """How the tables of a lake stand in its catalog."""

    missing: int
    """Tables that the catalog lacks, or has with what they were before."""
    failure: str | None
    """Why the first of them is missing, and what to do; None where nothing has failed."""


@dataclass
class CatalogKeeper:
    """Keeps the tables of one lake registered, from a thread of its own."""

    catalog: Catalog
    schema: str
    clock: Callable[[], float] = time.monotonic
    _offered: dict[str, TableEntry] = field(default_factory=dict)
    """By table: what the catalog is to say."""
    _versions: dict[str, int] = field(default_factory=dict)
    """By table: the version of its log that is offered."""
    _registered: dict[str, TableEntry] = field(default_factory=dict)
    _failures: dict[str, HeadwaterError] = field(default_factory=dict)
    _rounds_failed: int = 0
    """In a row."""
    _retry_s: float = 0.0
    _is_unreachable: bool = False
    """In the last round."""
    _checked_s: float = 0.0
    _unchecked: set[str] = field(default_factory=set)
    """Registered tables that the hourly check has not asked for yet. They count as registered until it fails."""
    _is_closing: bool = False
    _asked: int = 0
    """How often `settle` was called."""
    _answered: int = 0
    """The last of these calls that a whole round has followed."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def offer(self, lake: Lake) -> None:
        """Have what the tables are now in the catalog, soon. Takes no time of the caller's."""
        taken: dict[str, str] = {}
        with self._changed:
            for table, log in _tables_of(lake):
                other = taken.setdefault(entry_name(table), table)
                if other != table:
                    self._fail(table, _same_name(table, other))
                elif self._versions.get(table) != log.version:
                    columns = tuple(Column(json.dumps(it, sort_keys=True)) for it in log.columns)
                    entry = TableEntry(table=table, uri=log.location.full_uri, columns=columns, comment=log.description)
                    if self._offered.get(table) != entry:
                        self._offered[table] = entry
                    self._versions[table] = log.version
            if self._thread is None and not self._is_closing:
                landing = threading.current_thread().name
                self._checked_s = self.clock()
                self._thread = threading.Thread(target=self._run, name=f"{landing}: catalog", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, timeout_s: float = SETTLE_S_MAX) -> None:
        """Wait until everything that was offered has been tried, at most for so long."""
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._is_closing or self._answered >= asked or not self._wanting(), timeout_s
            )

    def close(self) -> None:
        """End the thread. A request that is under way is given up."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_S_MAX)

    def status(self) -> CatalogStatus:
        with self._changed:
            missing = {entry.table for entry in self._wanting()} | self._failures.keys()
            first = min(self._failures, default=None)
            if first is None:
                return CatalogStatus(len(missing), None)
            error = self._failures[first]
            return CatalogStatus(len(missing), f"{first} is not up to date in the catalog: {_sentence(error)}")

    def _wanting(self) -> list[TableEntry]:
        return [entry for table, entry in self._offered.items() if self._registered.get(table) != entry]

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closing and not (entries := self._due()):
                    self._changed.wait(self._pause_s())
                if self._is_closing:
                    return
                asked = self._asked
            self._register(entries)
            with self._changed:
                self._answered = asked
                self._changed.notify_all()

    def _due(self) -> list[TableEntry]:
        now_s = self.clock()
        if now_s < self._retry_s and self._asked == self._answered:
            # What is wrong with one table delays no other.
            return [] if self._is_unreachable else [it for it in self._wanting() if it.table not in self._failures]
        if now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            self._unchecked = {*self._registered}
        return self._to_ask()

    def _to_ask(self) -> list[TableEntry]:
        """What is not registered yet, and what is to be checked once more."""
        checked = [entry for table, entry in self._registered.items() if table in self._unchecked]
        return [*self._wanting(), *(it for it in checked if self._offered[it.table] == it)]

    def _pause_s(self) -> float:
        now_s = self.clock()
        until_s = self._checked_s + CHECK_EVERY_S
        return max(0.0, (min(until_s, self._retry_s) if self._to_ask() else until_s) - now_s)

    def _register(self, entries: list[TableEntry]) -> None:
        """One round. A catalog that can't be reached is not asked for the rest of them."""
        unreachable: HeadwaterError | None = None
        has_failed = False
        for entry in entries:
            error = unreachable
            if error is None:
                if self._is_closing:
                    return
                error = self._try(entry)
                unreachable = error if isinstance(error, CatalogUnreachable) else None
            with self._changed:
                self._unchecked.discard(entry.table)
                if error is not None:
                    has_failed = True
                    self._registered.pop(entry.table, None)
                    self._fail(entry.table, error)
                else:
                    self._registered[entry.table] = entry
                    if self._failures.pop(entry.table, None) is not None:
                        about = fields(event=LogEvent.TABLE_REGISTERED, table=entry.table)
                        logger.info("%s is in the catalog now", entry.table, extra=about)
        with self._changed:
            self._is_unreachable = unreachable is not None
            if has_failed:
                self._rounds_failed += 1
                self._retry_s = self.clock() + _BACKOFF.delay_s(self._rounds_failed)
            elif not self._wanting():
                self._rounds_failed, self._retry_s = 0, 0.0

    def _try(self, entry: TableEntry) -> HeadwaterError | None:
        try:
            self.catalog.register(self.schema, entry)
        except HeadwaterError as error:
            return error
        except Exception as error:
            # A fault of a catalog's library, or of ours, is no reason for the thread to end.
            reason = printable(" ".join(str(error).split()))[:_REASON_CHARS_MAX]
            return CatalogError(
                f"{type(error).__name__}: {reason}", hint="If this persists, report it: this is a fault of Headwater"
            )
        return None

    def _fail(self, table: str, error: HeadwaterError) -> None:
        """Note a failure. The same one is logged once."""
        before = self._failures.get(table)
        self._failures[table] = error
        if before is None or str(before) != str(error):
            logger.warning(
                "%s is not up to date in the catalog, and is tried again: %s",
                *(table, error),
                extra=fields(event=LogEvent.TABLE_NOT_REGISTERED, table=table, reason=error.reason),
            )


_BACKOFF = Backoff(delay_s_min=RETRY_S_MIN, delay_s_max=RETRY_S_MAX, random=lambda: 1.0)


def _sentence(error: HeadwaterError) -> str:
    return str(error)[:_REASON_CHARS_MAX]


def _same_name(table: str, other: str) -> CatalogError:
    return CatalogError(
        f"{table} would have the name {entry_name(table)} in the catalog, which {other} has",
        hint="Land the two collections separately, with a --schema each: catalogs take letters, digits and _, and do "
        "not tell upper case from lower case",
    )
