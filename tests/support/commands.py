"""Buckets of a real node with known documents, and `headwater tail` on them in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.cli.management import Answer, Management
from headwater.client.batches import raw_schema
from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_connection import KvConnection
from headwater.protocol.messages.documents import Delete, Set
from headwater.protocol.messages.subdocument import PathFlags, SubdocDictUpsert
from headwater.protocol.numbers import CollectionId, VBucketId
from support.forked_program import HEADWATER, start_program
from support.node_process import PASSWORD, USER, NodeProcess

VBUCKETS = 16
LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
END_S_MAX = 300.0
"""Far longer than any of it takes, even if kernels must be compiled first."""


@contextmanager
def serving_buckets(tmp_path_factory: pytest.TempPathFactory, *names: str) -> Iterator[NodeProcess]:
    """Run a node with these buckets, `default` by default. At the end, its log must have no traceback."""
    data = tmp_path_factory.mktemp("node") / "data"
    named = [word for name in names for word in ("--bucket", name)]
    with NodeProcess(data, "--vbuckets", str(VBUCKETS), *named).start() as started:
        yield started
        assert "Traceback" not in started.log()


@dataclass(frozen=True, slots=True)
class TailedBucket:
    """One bucket of the node."""

    node: NodeProcess
    name: str

    @property
    def url(self) -> str:
        return f"{self.node.url}/{self.name}"

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, *keys: str, value: bytes = b'{"legs":4}', collection: int = 0) -> None:
        with closing(self._connect()) as connection:
            for key in keys:
                where = VBucketId(vbucket_of(key.encode(), VBUCKETS))
                connection.request(
                    Set(vbucket=where, collection_id=CollectionId(collection), key=key.encode(), value=value)
                )

    def set_xattr(self, key: str, name: str, value: bytes) -> None:
        with closing(self._connect()) as connection:
            connection.request(
                SubdocDictUpsert(
                    vbucket=VBucketId(vbucket_of(key.encode(), VBUCKETS)),
                    collection_id=CollectionId(0),
                    key=key.encode(),
                    path=name.encode(),
                    new_value=value,
                    flags=PathFlags.XATTR,
                )
            )

    def delete(self, key: str) -> None:
        where = VBucketId(vbucket_of(key.encode(), VBUCKETS))
        with closing(self._connect()) as connection:
            connection.request(Delete(vbucket=where, collection_id=CollectionId(0), key=key.encode()))

    def fill(self, documents: int, value_bytes: int = 200) -> None:
        """Write `doc::1` to `doc::N`."""
        self.command("load", self.url, "--generate", str(documents), "--value-bytes", str(value_bytes))

    def command(self, *arguments: str) -> str:
        """Run another Headwater command."""
        result = CliRunner().invoke(main, arguments, env=LOGIN)
        assert result.exit_code == 0, result.output
        return result.stdout

    def _connect(self) -> KvConnection:
        return self.node.connect(self.name)

    # --- tailing --------------------------------------------------------------------------------------------------

    def start(self, *options: str, **how: Any) -> subprocess.Popen[bytes]:
        """Start `headwater tail` on this bucket."""
        return start_tail(self.url, *options, **how)

    def tail_process(self, *options: str) -> bytes:
        """Return what it prints up to its end."""
        with self.start("--to", "now", *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            stdout, stderr = process.communicate(timeout=END_S_MAX)
        assert (process.returncode, stderr) == (0, b""), stderr.decode()
        return stdout

    def tail(self, *options: str) -> bytes:
        """Run it in this process, which takes no time to start. Returns what it prints."""
        result = CliRunner().invoke(main, ["tail", self.url, "--to", "now", *options], env=LOGIN)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return result.stdout_bytes

    def lines(self, *options: str) -> list[dict[str, Any]]:
        """Return the changes that it prints up to its end."""
        return json_lines(self.tail("--json", *options))

    def keys(self, *options: str) -> list[str]:
        return [line["key"] for line in self.lines(*options)]


def start_tail(*arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **LOGIN, "COLUMNS": "", **how.pop("env", {})}
    return start_program(
        *HEADWATER,
        "tail",
        *arguments,
        env={name: value for name, value in environment.items() if value},
        bufsize=0,  # a test reads some of the output, and `communicate` gets all of the rest
        **how,
    )


def json_lines(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def documents(count: int) -> list[str]:
    """Return the keys that `fill` writes, sorted."""
    return sorted(f"doc::{number}" for number in range(1, count + 1))


def places(lines: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    for line in lines:
        yield line["vbucket"], line["seqno"]


# Batches of changes, in which a test sets only the members that it needs.


CAS = 1_763_194_560_123_456_789 >> 16 << 16

_DOCUMENT = {
    "vbucket": 7, "vbuuid": 2**64 - 1, "seqno": 41, "rev": 3, "op": "mutation", "scope": "_default",
    "collection": "_default", "collection_id": 0, "key": b"fox", "value": b'{"legs":4}', "datatype": 1,
    "flags": 33554432, "expiry": 0, "cas": CAS, "snapshot_start": 0, "snapshot_end": 100, "xattrs": None,
}  # fmt: skip


def document(**members: Any) -> dict[str, Any]:
    """Return the row of a change of a document."""
    cas = members.get("cas", CAS)
    return {**_DOCUMENT, "changed_at": (cas >> 16 << 16) // 1000 if cas else None, **members}


def event(op: str, **members: Any) -> dict[str, Any]:
    nothing = {"key": None, "value": None, "datatype": 0, "flags": 0, "rev": 0, "cas": 0}
    return document(op=op, **{**nothing, **members})


def rollback(*, vbucket: int = 7, seqno: int = 40, from_seqno: int = 99) -> dict[str, Any]:
    details = {"from_seqno": from_seqno, "old_vbuuid": 5, "new_vbuuid": 6}
    nowhere = {"scope": None, "collection": None, "collection_id": None}
    place = {"vbucket": vbucket, "vbuuid": 6, "seqno": seqno, "snapshot_start": seqno, "snapshot_end": seqno}
    return event("rollback", value=json.dumps(details).encode(), **nowhere, **place)


def batch_of(*rows: dict[str, Any], xattrs: bool = False) -> pa.RecordBatch:
    schema = raw_schema(xattrs=xattrs)
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# The output or the error of a command that was invoked.


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def sentence(result: Result) -> str:
    """Return the single error sentence, without the word in front."""
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


# --- the management side of nodes ---------------------------------------------------------------------------------


Asked = list[tuple[str, str, Any]]
"""Method, path and form of each request."""


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Management, str, str], Answer]) -> Asked:
    """Make `answer` return the nodes' answers, by node, method and path. Returns a list that collects the requests."""
    asked: Asked = []

    def ask(management: Management, method: str, *path: str, form: dict[str, str] | None = None) -> Answer:
        asked.append((method, "/" + "/".join(path), form))
        return answer(management, *asked[-1][:2])

    monkeypatch.setattr(Management, "ask", ask)
    return asked
