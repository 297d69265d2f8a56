"""A small Unity Catalog server on loopback. The real one needs Java, and is in no registry that tests may use.

It answers Headwater's requests as version 2.1 of the API specifies (`api/all.yaml` of unitycatalog), and refuses
members that are missing, unknown, or of another type. It can be made to fail, and to require a token.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_API = "/api/2.1/unity-catalog/"
_NAME_CHARS_MAX = 255
_TYPE_NAMES = {
    *("BOOLEAN", "BYTE", "SHORT", "INT", "LONG", "FLOAT", "DOUBLE", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "STRING"),
    *("BINARY", "DECIMAL", "INTERVAL", "ARRAY", "STRUCT", "MAP", "VARIANT", "CHAR", "NULL", "USER_DEFINED_TYPE"),
}
_COLUMN: dict[str, type] = {
    "name": str, "type_text": str, "type_json": str, "type_name": str, "type_precision": int, "type_scale": int,
    "position": int, "comment": str, "nullable": bool,
}  # fmt: skip
_TABLE: dict[str, type] = {
    "name": str, "catalog_name": str, "schema_name": str, "table_type": str, "data_source_format": str,
    "columns": list, "storage_location": str, "comment": str, "properties": dict,
}  # fmt: skip
_SCHEMA: dict[str, type] = {"name": str, "catalog_name": str, "comment": str, "properties": dict}
_NEEDED = {"name", "catalog_name", "schema_name", "table_type", "data_source_format", "columns", "storage_location"}
_NEEDED_OF_COLUMN = {"name", "type_text", "type_json", "type_name", "position", "nullable"}
"""The API calls some of these optional, but the server's database does not accept a column without them."""


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def _check(members: Any, known: dict[str, type], needed: set[str]) -> None:
    if not isinstance(members, dict) or not needed <= members.keys() <= known.keys():
        raise _Refused(400, "INVALID_ARGUMENT", f"members {sorted(members)}, and {sorted(needed)} are needed")
    for name, value in members.items():
        if type(value) is not known[name]:
            raise _Refused(400, "INVALID_ARGUMENT", f"{name} is {value!r}")
    if not 0 < len(members["name"]) <= _NAME_CHARS_MAX or any(char in members["name"] for char in ". /"):
        raise _Refused(400, "INVALID_ARGUMENT", f"the name {members['name']!r}")


@dataclass
class UnityServer:
    """Runs until the `with` block ends."""

    token: str | None = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By full name."""
    schemas: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    fails: bool = False
    """Whether to answer everything with status 500."""

    def __enter__(self) -> Self:
        unity = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, members = unity.answer(self.command, self.path, self.headers.get("Authorization"), body)
                answer = json.dumps(members).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def catalog(self) -> str:
        """The value of `--catalog`."""
        return f"unity://127.0.0.1:{self.port}/main"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, method: str, target: str, login: str | None, body: bytes) -> tuple[int, dict[str, Any]]:
        path = unquote(urlsplit(target).path).removeprefix(_API)
        self.requests.append((method, path))
        try:
            if self.fails:
                raise _Refused(500, "INTERNAL", "the database is away")
            if self.token is not None and login != f"Bearer {self.token}":
                raise _Refused(401, "UNAUTHENTICATED", "no token, or a wrong one")
            kind, _, name = path.partition("/")
            return 200, self._do(method, kind, name, json.loads(body) if body else None)
        except _Refused as refused:
            return refused.status, {"error_code": refused.code, "message": str(refused), "details": []}

    def _do(self, method: str, kind: str, name: str, members: Any) -> dict[str, Any]:
        match method, kind:
            case "POST", "schemas":
                _check(members, _SCHEMA, {"name", "catalog_name"})
                if members["catalog_name"] != "main":
                    raise _Refused(404, "NOT_FOUND", f"Catalog not found: {members['catalog_name']}")
                self.schemas.add(members["name"])
                return dict(members)
            case "GET", "schemas" if name.removeprefix("main.") in self.schemas:
                return {"name": name.partition(".")[2], "catalog_name": "main"}
            case "POST", "tables":
                return self._create(members)
            case "GET", "tables" if name in self.tables:
                return self.tables[name]
            case "DELETE", "tables" if name in self.tables:
                del self.tables[name]
                return {}
            case "POST", "temporary-table-credentials":
                return {"expiration_time": 1 << 42}
        raise _Refused(404, "NOT_FOUND", f"{method} {kind}: not found: {name}")

    def _create(self, members: Any) -> dict[str, Any]:
        _check(members, _TABLE, _NEEDED)
        catalog, schema, name = (members[it] for it in ("catalog_name", "schema_name", "name"))
        if catalog != "main" or schema not in self.schemas:
            raise _Refused(404, "NOT_FOUND", f"Schema not found: {catalog}.{schema}")
        if (members["table_type"], members["data_source_format"]) != ("EXTERNAL", "DELTA"):
            raise _Refused(400, "INVALID_ARGUMENT", "not an external table of Delta")
        for position, column in enumerate(members["columns"]):
            _check(column, _COLUMN, _NEEDED_OF_COLUMN)
            said = json.loads(column["type_json"])
            if (
                column["position"] != position
                or column["type_name"] not in _TYPE_NAMES
                or said["name"] != column["name"]
            ):
                raise _Refused(400, "INVALID_ARGUMENT", f"the column {column}")
        full_name = f"{catalog}.{schema}.{name}"
        if full_name in self.tables:
            raise _Refused(409, "ALREADY_EXISTS", f"Table already exists: {full_name}")
        self.tables[full_name] = {
            **members,
            "table_id": f"id-{len(self.requests)}",
            "created_at": 1_000,
            "updated_at": 1_000,
        }
        return self.tables[full_name]
