"""The catalogs that are asked over a network: Unity Catalog and AWS Glue; and how a user names one.

`CatalogSettings` is the only reader of what a user gives: `unity://host:8080/main`, `unitys://host/main`, `glue://`,
`spark`. Credentials are in none of these: a token for Unity Catalog is in the environment, and for Glue the environment
has what all AWS tools look for.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from headwater.errors import CatalogError, CatalogUnreachable, InvalidInput
from headwater.http.asking import ask
from headwater.lake.catalogs import Catalog, Column, TableEntry, entry_name, sql_type
from headwater.options import suggest_keywords
from headwater.phrases import install_command, printable

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
    """The schema that gets the tables, which is made where there is none; by default one with the bucket's name."""

    def __post_init__(self) -> None:
        if not {*"@?#;"}.isdisjoint(self.catalog):
            # It may be a password, or a token.
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
        """What was given of a catalog; None for none."""
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
        """The catalog of the session that is meant; None for its current one."""
        match = _SPARK.fullmatch(self.catalog)
        return None if match is None else match["name"]

    def check_runner(self, *, has_session: bool) -> None:
        """Raise `InvalidInput` where the tasks do not run on a session, and its catalog is meant."""
        if self.needs_session and not has_session:
            raise InvalidInput(
                "the catalog of a Spark session needs one",
                hint="Omit --runner local (in Python, use headwater.spark.land), or give unity:// or glue://",
            )

    def schema_for(self, bucket: str) -> str:
        return self.schema or entry_name(bucket)

    def open_service(self, region: str | None = None) -> Catalog:
        """The catalog, which is not asked yet. Raises `InvalidInput` where it can't be."""
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
    """A catalog of a Unity Catalog server, by version 2.1 of its REST API.

    The API has no request that changes a table's columns. So an entry of ours whose table has new columns is dropped
    and made again, which leaves the table's files alone.
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
        """What the server answers; None where it does not find something. Raises for any other refusal."""
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
    """What a catalog says itself, in one line."""
    text = " ".join(str(message or "").split()).rstrip(".")
    return f": {printable(text)[:_WORDS_MAX]}" if text else ""


def _unity_column(position: int, column: Column) -> dict[str, Any]:
    """A column as the API has it (`ColumnInfo`)."""
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
"""Codes that the next request will get as well."""


class GlueCatalog:
    """The Glue Data Catalog of an AWS account, which Athena, EMR, Redshift and others read. A schema is a database.

    An entry is what AWS documents for Delta tables that other programs than Athena make: the provider is `delta`, and
    the path is a parameter of the SerDe.
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
                # Each change would be one of the versions that Glue keeps of a table, whose number has a limit.
                self._ask("update_table", DatabaseName=schema, TableInput=table, SkipArchive=True)
        elif self._ask("create_table", DatabaseName=schema, TableInput=table) is None:
            self._ask("create_database", DatabaseInput={"Name": schema})
            self._ask("create_table", DatabaseName=schema, TableInput=table)

    def _ask(self, request: str, **members: Any) -> dict[str, Any] | None:
        """What Glue answers; None where it does not find something. Raises for any other refusal."""
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
    """Hive does not know all types."""
    return sql_type(column.type, {"timestamp_ntz": "timestamp", "variant": "binary"})
