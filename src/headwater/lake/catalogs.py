"""Registering the tables of a lake in a catalog, and keeping the entries up to date.

    keeper = CatalogKeeper(catalog, schema="shop")
    keeper.offer(lake)             # after each commit: the keeper registers what has changed
    keeper.settle()                # at the end: wait until everything offered has been tried

A catalog is anything with `register`, which creates or updates an entry, and does nothing if the entry is correct.
Unity Catalog and AWS Glue are asked over a network; `headwater.spark.session` has the catalog of a Spark session.

A catalog never stops or delays a landing: a thread of the keeper makes the requests. If one fails, the keeper retries
the missing tables with growing pauses, and the landing reports the failure.

The keeper never changes an entry that points to another place or that another program has created. It keeps the entry
of a dropped collection, because the table stays, too.

`CatalogSettings` is the only code that parses what a user gives: `unity://host:8080/main`, `unitys://host/main`,
`glue://`, `spark`. None of these contains credentials: the token for Unity Catalog comes from the environment, and Glue
uses the environment variables of the AWS tools.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPException
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import quote, unquote

from headwater.client.retries import Backoff
from headwater.errors import CatalogError, CatalogUnreachable, HeadwaterError, InvalidInput
from headwater.http import ask
from headwater.lake.delta_log import DeltaLog
from headwater.lake.lake import Lake
from headwater.lake.layout import TableKind
from headwater.log_fields import LogEvent, fields
from headwater.options import suggest_keywords
from headwater.phrases import install_command, printable

logger = logging.getLogger(__name__)

RETRY_S_MIN, RETRY_S_MAX = 5.0, 300.0
"""The pause after a failed round, which grows with each failure."""
CHECK_EVERY_S = 3600.0
"""How often correct entries are checked again, since someone may have dropped one."""
SETTLE_S_MAX = 60.0
_NAME_CHARS_MAX = 128
"""The limit of old Hive metastores. Glue and Unity Catalog permit 255."""
_DIGEST_CHARS = 16
_REASON_CHARS_MAX = 500
_STOP_S_MAX = 2.0

MADE_BY = "headwater.table"
"""A property that marks an entry as ours. Its value is the table in the lake, such as `documents/shop.orders`."""
FINGERPRINT = "headwater.entry"
"""A property of our entries: a hash of what we registered, because catalogs may rewrite types and texts."""


# --- names ------------------------------------------------------------------------------------------------------------


def plain_name(text: str) -> str:
    """Replace each character that would make engines require quotes around the name."""
    return re.sub("[^A-Za-z0-9_]", "_", text)


def entry_name(table: str) -> str:
    """Return the catalog's name for a table: `documents_shop_orders` for `documents/shop.orders`.

    Names are lower case, with letters, digits and `_` only: catalogs ignore case, and some permit no other characters.
    A name that is too long is cut, and its digest appended.
    """
    name = plain_name(table).lower()
    if len(name) <= _NAME_CHARS_MAX:
        return name
    digest = hashlib.sha256(table.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[: _NAME_CHARS_MAX - _DIGEST_CHARS - 1]}_{digest}"


# --- entries ----------------------------------------------------------------------------------------------------------

_SQL_TYPES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}
"""Types that SQL names differently from Delta."""


def sql_type(type_: Any, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a type of Delta's schema as Spark and Hive write it; `names` replaces the names of simple types."""
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
    """A column in Delta's schema: one member of its `fields`, as JSON."""

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
    """What we want the catalog to say about a table."""

    table: str
    """Its name in the lake: `changes`, or a kind and a collection, such as `documents/shop.orders`."""
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
        """The properties that mark an entry as ours."""
        return {MADE_BY: self.table, FINGERPRINT: self.fingerprint}

    def is_current(self, full_name: str, *, uri: str, properties: Mapping[str, str]) -> bool:
        """Whether an existing entry can stay: it is correct, or another program made it and may have its
        reasons. Raises `CatalogError` if the entry points to another place."""
        if _same_place(uri) != _same_place(self.uri):
            raise CatalogError(
                f"the catalog has {full_name} already, and it is at {printable(uri) or 'an unknown place'}, not at "
                f"{self.uri}",
                hint="Drop it there if it is no longer needed, or give another --schema",
            )
        return MADE_BY not in properties or properties.get(FINGERPRINT) == self.fingerprint


def _same_place(uri: str) -> str:
    """Return one spelling for all spellings of a URI. No path of a lake contains anything that looks like an escape."""
    scheme, colon, rest = unquote(uri).partition(":")
    if not colon:
        scheme, rest = "file", uri
    same = {"s3a": "s3", "s3n": "s3", "abfs": "abfss"}.get(scheme.lower(), scheme.lower())
    return f"{same}:/{rest.strip('/')}"


class Catalog(Protocol):
    """Where tables are registered. Only one thread uses it."""

    def register(self, schema: str, entry: TableEntry) -> None:
        """Create or update the entry of a table; do nothing if it is correct. Creates the schema if it is missing.

        Raises `CatalogUnreachable` if no other table could be registered now either, and another `HeadwaterError` if
        only this table can't be registered.
        """


def _tables_of(lake: Lake) -> Iterator[tuple[str, DeltaLog]]:
    """Yield all tables, older collections first: if two tables have the same entry name, the older one keeps it."""
    yield str(TableKind.CHANGES), lake.changes
    for tables in sorted(lake.tables.values(), key=lambda it: (min(it.ids, default=0), it.name)):
        for table in tables.there:
            yield f"{table.kind}/{tables.name}", table.log


# --- the keeper -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CatalogStatus:
    """How many tables of a lake are missing from its catalog, and why."""

    missing: int
    """Tables that are not in the catalog, or only in an earlier form."""
    failure: str | None
    """Why the first of them is missing, and what to do; None if nothing has failed."""


@dataclass
class CatalogKeeper:
    """Keeps the tables of one lake registered, in its own thread."""

    catalog: Catalog
    schema: str
    clock: Callable[[], float] = time.monotonic
    _offered: dict[str, TableEntry] = field(default_factory=dict)
    """By table: the entry to register."""
    _versions: dict[str, int] = field(default_factory=dict)
    """By table: the version of its log that was last offered."""
    _registered: dict[str, TableEntry] = field(default_factory=dict)
    _failures: dict[str, HeadwaterError] = field(default_factory=dict)
    _rounds_failed: int = 0
    """Consecutive failed rounds."""
    _retry_s: float = 0.0
    _is_unreachable: bool = False
    """Whether the last round could not reach the catalog."""
    _checked_s: float = 0.0
    _unchecked: set[str] = field(default_factory=set)
    """Registered tables that the hourly check has not reached yet. They count as registered until their check fails."""
    _is_closing: bool = False
    _asked: int = 0
    """Number of calls of `settle`."""
    _answered: int = 0
    """The last of these calls for which a whole round has run since."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def offer(self, lake: Lake) -> None:
        """Register the current form of the tables soon. The keeper's thread does it: the caller does not wait."""
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
        """Wait until everything offered has been tried, at most `timeout_s`."""
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._is_closing or self._answered >= asked or not self._wanting(), timeout_s
            )

    def close(self) -> None:
        """End the thread. Abandons a request in progress."""
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
            return CatalogStatus(
                len(missing), f"{first} is not up to date in the catalog: {str(error)[:_REASON_CHARS_MAX]}"
            )

    def _wanting(self) -> list[TableEntry]:
        return [entry for table, entry in self._offered.items() if self._registered.get(table) != entry]

    # --- in its thread ------------------------------------------------------------------------------------------------

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
            # A failure of one table does not delay the others.
            return [] if self._is_unreachable else [it for it in self._wanting() if it.table not in self._failures]
        if now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            self._unchecked = {*self._registered}
        return self._to_ask()

    def _to_ask(self) -> list[TableEntry]:
        """Return the entries that are not registered yet, and those to be checked again."""
        checked = [entry for table, entry in self._registered.items() if table in self._unchecked]
        return [*self._wanting(), *(it for it in checked if self._offered[it.table] == it)]

    def _pause_s(self) -> float:
        now_s = self.clock()
        until_s = self._checked_s + CHECK_EVERY_S
        return max(0.0, (min(until_s, self._retry_s) if self._to_ask() else until_s) - now_s)

    def _register(self, entries: list[TableEntry]) -> None:
        """Run one round. After a request finds the catalog unreachable, the round skips the remaining entries."""
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
            # A bug in a catalog's library, or in ours, must not end the thread.
            reason = printable(" ".join(str(error).split()))[:_REASON_CHARS_MAX]
            return CatalogError(
                f"{type(error).__name__}: {reason}", hint="If this persists, report it: this is a fault of Headwater"
            )
        return None

    def _fail(self, table: str, error: HeadwaterError) -> None:
        """Record a failure. A repeated identical failure is logged only once."""
        before = self._failures.get(table)
        self._failures[table] = error
        if before is None or str(before) != str(error):
            logger.warning(
                "%s is not up to date in the catalog, and is tried again: %s",
                *(table, error),
                extra=fields(event=LogEvent.TABLE_NOT_REGISTERED, table=table, reason=error.reason),
            )


_BACKOFF = Backoff(delay_s_min=RETRY_S_MIN, delay_s_max=RETRY_S_MAX, random=lambda: 1.0)


def _same_name(table: str, other: str) -> CatalogError:
    return CatalogError(
        f"{table} would have the name {entry_name(table)} in the catalog, which {other} has",
        hint="Land the two collections separately, with a --schema each: catalogs take letters, digits and _, and do "
        "not tell upper case from lower case",
    )


# --- catalogs on the network ------------------------------------------------------------------------------------------


TOKEN_VARIABLE = "HEADWATER_CATALOG_TOKEN"
_GIVE = "Give unity://HOST:PORT/CATALOG, unitys://HOST/CATALOG, glue://, spark or spark:CATALOG"
_UNITY = re.compile(r"unity(?P<tls>s?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:(?P<port>\d{1,5}))?/(?P<name>[\w-]+)/?")
_GLUE = re.compile(r"glue://(?P<id>\d*)/?")
_SPARK = re.compile(r"spark(:(?P<name>[\w-]+))?")
_SCHEMA = re.compile(r"[A-Za-z0-9_]{1,128}")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_WORDS_MAX = 300


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSettings:
    """Where the tables of a lake are registered."""

    catalog: str
    """`unity://HOST:PORT/CATALOG`, `unitys://HOST/CATALOG`, `glue://`, or `spark` for the catalog of the session."""
    schema: str | None = None
    """The schema for the tables, created if it is missing; by default it has the bucket's name."""

    def __post_init__(self) -> None:
        if not {*"@?#;"}.isdisjoint(self.catalog):
            # These characters may introduce a password or a token.
            raise InvalidInput(
                "a catalog's URL can't contain a user or parameters", hint=f"Put a token into {TOKEN_VARIABLE}"
            )
        unity = _UNITY.fullmatch(self.catalog)
        if not (unity or _GLUE.fullmatch(self.catalog) or _SPARK.fullmatch(self.catalog)):
            raise InvalidInput(f"{printable(self.catalog)!r} is not a catalog", hint=_GIVE)
        if self.schema is not None and not _SCHEMA.fullmatch(self.schema):
            raise InvalidInput(
                f"{printable(self.schema)!r} can't be the name of a schema",
                hint="Use up to 128 letters, digits and underscores",
            )
        token = os.environ.get(TOKEN_VARIABLE, "") if unity else ""
        if not (token.isascii() and token.isprintable() and " " not in token):
            raise InvalidInput(f"{TOKEN_VARIABLE} is not a token", hint="Set it without spaces and line breaks")
        if token and unity and not unity["tls"] and unity["host"] not in _LOOPBACK:
            raise InvalidInput(
                "the token of the catalog would cross the network unencrypted",
                hint=f"Give unitys://, which uses TLS, or unset {TOKEN_VARIABLE}",
            )

    @classmethod
    def of(cls, catalog: str | None, schema: str | None) -> CatalogSettings | None:
        """Return the settings for the given options, or None if neither is given."""
        if catalog is not None:
            return cls(catalog=catalog, schema=schema)
        if schema is not None:
            raise InvalidInput("a schema was given without a catalog", hint=_GIVE)
        return None

    @property
    def needs_session(self) -> bool:
        """Whether it is the catalog of a Spark session."""
        return _SPARK.fullmatch(self.catalog) is not None

    @property
    def name_in_session(self) -> str | None:
        """The name of the catalog in the session; None for the session's current catalog."""
        match = _SPARK.fullmatch(self.catalog)
        return None if match is None else match["name"]

    def check_runner(self, *, has_session: bool) -> None:
        """Raise `InvalidInput` if the catalog is that of a Spark session but the tasks run without one."""
        if self.needs_session and not has_session:
            raise InvalidInput(
                "the catalog of a Spark session needs one",
                hint="Omit --runner local (in Python, use headwater.spark.land), or give unity:// or glue://",
            )

    def schema_for(self, bucket: str) -> str:
        return self.schema or entry_name(bucket)

    def open_service(self, region: str | None = None) -> Catalog:
        """Return the catalog without connecting to it. Raises `InvalidInput` if that is impossible."""
        if unity := _UNITY.fullmatch(self.catalog):
            return UnityCatalog.of(unity)
        glue = _GLUE.fullmatch(self.catalog)
        assert glue is not None, "what a session has is opened where the session is"
        return GlueCatalog(catalog_id=glue["id"] or None, region=region or os.environ.get("AWS_REGION"))


# --- Unity Catalog ----------------------------------------------------------------------------------------------------

_API = "/api/2.1/unity-catalog"
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnityCatalog:
    """A catalog on a Unity Catalog server, through version 2.1 of its REST API.

    The API has no request that changes a table's columns. So when a table gets new columns, its entry is deleted and
    created again, which leaves the table's files alone.
    """

    host: str
    port: int
    name: str
    tls: ssl.SSLContext | None = None
    token: str | None = field(repr=False, default=None)

    @classmethod
    def of(cls, match: re.Match[str]) -> UnityCatalog:
        has_tls = bool(match["tls"])
        return cls(
            host=match["host"].strip("[]"),
            port=int(match["port"] or (443 if has_tls else 8080)),
            name=match["name"],
            tls=ssl.create_default_context() if has_tls else None,
            token=os.environ.get(TOKEN_VARIABLE) or None,
        )

    def register(self, schema: str, entry: TableEntry) -> None:
        full_name = f"{self.name}.{schema}.{entry.name}"
        found = self._ask("GET", "tables", full_name)
        if found is not None:
            uri, properties = str(found.get("storage_location") or ""), found.get("properties") or {}
            if entry.is_current(full_name, uri=uri, properties=properties):
                return
            self._ask("DELETE", "tables", full_name)
        table = {
            "name": entry.name,
            "catalog_name": self.name,
            "schema_name": schema,
            "table_type": "EXTERNAL",
            "data_source_format": "DELTA",
            "columns": [_unity_column(position, column) for position, column in enumerate(entry.columns)],
            "storage_location": entry.uri,
            "comment": entry.comment,
            "properties": entry.properties,
        }
        if self._ask("POST", "tables", members=table) is None:
            self._make_schema(schema)
            if self._ask("POST", "tables", members=table) is None:
                raise CatalogError(
                    f"Unity Catalog does not find the schema {self.name}.{schema} that it has just created",
                    hint="Check that the user may use it",
                )

    def _make_schema(self, schema: str) -> None:
        if self._ask("GET", "schemas", f"{self.name}.{schema}") is not None:
            return
        if self._ask("POST", "schemas", members={"name": schema, "catalog_name": self.name}) is None:
            raise CatalogUnreachable(
                f"Unity Catalog has no catalog {self.name}", hint="Create it, or give another one in --catalog"
            )

    def _ask(self, method: str, *path: str, members: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the server's answer, or None if the server reports "not found". Raises for any other refusal."""
        headers = {"Accept": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        body = None
        if members is not None:
            headers["Content-Type"], body = "application/json", json.dumps(members)
        target = "/".join((_API, *(quote(part, safe="") for part in path)))
        try:
            status, content = ask(self.host, self.port, method, target, headers=headers, body=body, tls=self.tls)
        except (OSError, HTTPException) as error:
            raise CatalogUnreachable(
                f"the catalog at {self.host}:{self.port} does not answer{_words(error)}",
                hint="Check the address in --catalog, and whether the server uses TLS: unity:// is for one that does "
                "not, unitys:// for one that does",
            ) from error
        said = content if isinstance(content, dict) else {}
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise CatalogUnreachable(
                f"Unity Catalog refuses the request ({status}){_words(said.get('message'))}",
                hint=f"Put a token that may create tables there into {TOKEN_VARIABLE}",
            )
        if not 200 <= status < 300:
            raise CatalogError(
                f"Unity Catalog answers {method} {path[0]} with status {status}{_words(said.get('message'))}",
                hint="Check the address in --catalog, and the catalog's log",
            )
        return said


def _words(message: object) -> str:
    """Return the catalog's own message in one line."""
    text = " ".join(str(message or "").split()).rstrip(".")
    return f": {printable(text)[:_WORDS_MAX]}" if text else ""


def _unity_column(position: int, column: Column) -> dict[str, Any]:
    """Return a column in the form of the API (`ColumnInfo`)."""
    kind = column.type if isinstance(column.type, str) else column.type["type"]
    members: dict[str, Any] = {
        "name": column.name,
        "type_text": sql_type(column.type),
        "type_json": column.json,
        "type_name": "INT" if kind == "integer" else kind.upper(),
        "position": position,
        "nullable": column.is_nullable,
    }
    if decimal := _DECIMAL.fullmatch(kind):
        members |= {"type_name": "DECIMAL", "type_precision": int(decimal[1]), "type_scale": int(decimal[2])}
    return members | ({"comment": column.comment} if column.comment else {})


# --- AWS Glue ---------------------------------------------------------------------------------------------------------

_GLUE_COMMENT_MAX = 255
_NOT_FOUND = "EntityNotFoundException"
_EXISTS = "AlreadyExistsException"
_OF_ALL = ("AccessDeniedException", "ExpiredTokenException", "UnrecognizedClientException", "InvalidSignatureException")
"""Error codes that the next request would get as well."""


class GlueCatalog:
    """The Glue Data Catalog of an AWS account, which Athena, EMR, Redshift and others read. A schema is a database.

    Entries follow the AWS documentation for Delta tables that programs other than Athena create: the provider is
    `delta`, and the path is a parameter of the SerDe.
    """

    def __init__(self, *, catalog_id: str | None, region: str | None) -> None:
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError, NoRegionError
        except ImportError as error:
            raise InvalidInput("Glue needs boto3", hint=f"Run {install_command('glue')}") from error
        self._client_error, self._own_error = ClientError, BotoCoreError
        config = Config(connect_timeout=10, read_timeout=40, retries={"total_max_attempts": 3, "mode": "standard"})
        try:
            self._client: Any = boto3.client("glue", region_name=region, config=config)
        except NoRegionError as error:
            raise InvalidInput("no region of AWS is known for Glue", hint="Set AWS_REGION") from error
        except BotoCoreError as error:
            raise InvalidInput(f"Glue can't be used: {error}", hint="Check the configuration of AWS") from error
        self._catalog = {"CatalogId": catalog_id} if catalog_id else {}

    def register(self, schema: str, entry: TableEntry) -> None:
        schema = schema.lower()
        found = self._ask("get_table", DatabaseName=schema, Name=entry.name)
        table = _glue_table(entry)
        if found is not None:
            uri = str(found["Table"].get("StorageDescriptor", {}).get("Location", ""))
            if not entry.is_current(f"{schema}.{entry.name}", uri=uri, properties=found["Table"].get("Parameters", {})):
                # Without SkipArchive, each change would add a version of the table, and Glue limits their number.
                self._ask("update_table", DatabaseName=schema, TableInput=table, SkipArchive=True)
        elif self._ask("create_table", DatabaseName=schema, TableInput=table) is None:
            self._ask("create_database", DatabaseInput={"Name": schema})
            self._ask("create_table", DatabaseName=schema, TableInput=table)

    def _ask(self, request: str, **members: Any) -> dict[str, Any] | None:
        """Return Glue's answer, or None if Glue reports "not found". Raises for any other refusal."""
        try:
            answer: dict[str, Any] = getattr(self._client, request)(**self._catalog, **members)
        except self._client_error as error:
            code, message = (error.response.get("Error", {}).get(it, "") for it in ("Code", "Message"))
            if code == _NOT_FOUND:
                return None
            if code == _EXISTS and request == "create_database":
                return {}
            raise (CatalogUnreachable if code in _OF_ALL else CatalogError)(
                f"Glue refuses {request} with {code}{_words(message)}",
                hint="Check the credentials of AWS, and that they permit glue:GetTable, CreateTable, UpdateTable and "
                "CreateDatabase",
            ) from error
        except self._own_error as error:
            raise CatalogUnreachable(
                f"Glue can't be asked{_words(error)}", hint="Check the credentials of AWS, and the way to it"
            ) from error
        return answer


def _glue_table(entry: TableEntry) -> dict[str, Any]:
    columns = [
        {"Name": it.name, "Type": _hive_type(it), "Comment": it.comment[:_GLUE_COMMENT_MAX]} for it in entry.columns
    ]
    uri = re.sub("^s3[an]:", "s3:", entry.uri)
    return {
        "Name": entry.name,
        "Description": entry.comment,
        "TableType": "EXTERNAL_TABLE",
        "Parameters": {
            "EXTERNAL": "TRUE",
            "classification": "delta",
            "spark.sql.sources.provider": "delta",
            **entry.properties,
        },
        "StorageDescriptor": {
            "Columns": columns,
            "Location": uri,
            "InputFormat": "org.apache.hadoop.mapred.SequenceFileInputFormat",
            "OutputFormat": "org.apache.hadoop.hive.ql.io.HiveSequenceFileOutputFormat",
            "SerdeInfo": {
                "SerializationLibrary": "org.apache.hadoop.hive.serde2.lazy.LazySimpleSerDe",
                "Parameters": {"path": uri, "serialization.format": "1"},
            },
        },
    }


def _hive_type(column: Column) -> str:
    """Return a column's type in SQL, with replacements for types that Hive does not know."""
    return sql_type(column.type, {"timestamp_ntz": "timestamp", "variant": "binary"})
