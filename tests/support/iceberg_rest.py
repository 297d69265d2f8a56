"""A small Iceberg REST service on loopback, over pyiceberg's catalog in a SQLite file."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog.rest import TableResponse
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, CommitTableResponse, Table

_STATUS: dict[type[Exception], int] = {
    NoSuchNamespaceError: 404, NoSuchTableError: 404,
    NamespaceAlreadyExistsError: 409, TableAlreadyExistsError: 409, CommitFailedException: 409,
}  # fmt: skip


@dataclass
class IcebergRestServer:
    """Runs until the `with` block ends."""

    folder: Path

    def __enter__(self) -> Self:
        rest = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = unquote(urlsplit(self.path).path).strip("/").split("/")[1:]
                try:
                    status, answer = 200, rest.answer(self.command, path, body)
                except tuple(_STATUS) as error:
                    status, name = _STATUS[type(error)], type(error).__name__.replace("Error", "Exception")
                    answer = json.dumps({"error": {"message": str(error), "type": name, "code": status}})
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer.encode())))
                self.end_headers()
                self.wfile.write(answer.encode() if self.command != "HEAD" else b"")

            do_POST = do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        uri = f"sqlite:///{self.folder}/rest.db?check_same_thread=false"
        self._catalog = SqlCatalog("rest", uri=uri, warehouse=f"file://{self.folder}/warehouse")
        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._catalog.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method: str, path: list[str], body: bytes) -> str:
        match method, path:
            case "GET", ["config"]:
                return json.dumps({"defaults": {}, "overrides": {}})
            case "POST", ["namespaces"]:
                members = json.loads(body)
                self._catalog.create_namespace(tuple(members["namespace"]), members.get("properties", {}))
                return json.dumps(members)
            case (("GET" | "HEAD"), ["namespaces", name]):
                self._catalog.load_namespace_properties(name)
                return json.dumps({"namespace": [name], "properties": {}})
            case "POST", ["namespaces", name, "tables"]:
                asked = json.loads(body)
                schema = Schema.model_validate(asked["schema"])
                return _table(self._catalog.create_table((name, asked["name"]), schema, properties=asked["properties"]))
            case (("GET" | "HEAD"), ["namespaces", name, "tables", table]):
                return _table(self._catalog.load_table((name, table)))
            case "POST", ["namespaces", name, "tables", table]:
                commit = CommitTableRequest.model_validate_json(body)
                done: CommitTableResponse = self._catalog.commit_table(
                    self._catalog.load_table((name, table)), commit.requirements, commit.updates
                )
                return done.model_dump_json()
        raise NoSuchTableError(f"{method} {'/'.join(path)}")


def _table(table: Table) -> str:
    return TableResponse(
        **{"metadata-location": table.metadata_location}, metadata=table.metadata, config={}
    ).model_dump_json()
