"""The log of a real node as JSON: whatever happens, every line is an object, and what has happened is in its fields."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import AuthenticationFailed
from headwater.protocol.sasl import Credentials
from support.commands import VBUCKETS, TailedBucket
from support.node_process import NodeProcess, StartNode, run_serve

SOURCES = Path(headwater.__file__).parent
LOGGING = [f"logger.{level}" for level in ("info", "warning", "error", "exception", "critical")]


def lines_of(log: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    return lines


def about(node: NodeProcess, event: str) -> list[dict[str, Any]]:
    found = (line.get("fields", {}) for line in lines_of(node.log()))
    return [fields for fields in found if fields.get("event") == event]


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    return start_node("--log-format", "json", "--vbuckets", str(VBUCKETS))


def test_a_dcp_connection(node: NodeProcess) -> None:
    TailedBucket(node, "default").tail("--name", "a-reader")
    node.stop()
    [opened], [closed] = about(node, "dcp_opened"), about(node, "dcp_closed")
    assert opened["connection"].startswith("a-reader")
    assert {**opened, "event": "dcp_closed"} == closed
    assert (opened["bucket"], opened["peer"], opened["user"]) == ("default", "127.0.0.1", node.user)


def test_a_rollback_and_the_consumer_that_has_to_follow(node: NodeProcess, tmp_path: Path) -> None:
    bucket = TailedBucket(node, "default")
    bucket.write("fox", "fox", "fox")
    [vbucket] = {line["vbucket"] for line in bucket.lines("--checkpoint", str(tmp_path / "place"))}
    bucket.command("drill", "rollback", bucket.url, "--vbucket", str(vbucket), "--to", "1")
    bucket.tail("--checkpoint", str(tmp_path / "place"), "--name", "a-reader")
    node.stop()
    [rolled_back] = about(node, "rolled_back")
    assert (rolled_back["bucket"], rolled_back["vbucket"], rolled_back["user"]) == ("default", vbucket, node.user)
    assert (rolled_back["from_seqno"], rolled_back["seqno"]) == (3, 1)
    [demanded] = about(node, "rollback_demanded")
    assert (demanded["vbucket"], demanded["from_seqno"], demanded["seqno"]) == (vbucket, 3, 1)
    assert demanded["connection"].startswith("a-reader")


def test_a_wrong_password(node: NodeProcess) -> None:
    with pytest.raises(AuthenticationFailed):
        KvConnection.open(node.address, Login(credentials=Credentials("mallory", "guess"), bucket=None))
    node.stop()
    [failed] = about(node, "login_failed")
    assert (failed["user"], failed["peer"]) == ("mallory", "127.0.0.1")
    assert "guess" not in node.log()


def test_what_is_no_protocol(node: NodeProcess) -> None:
    import socket

    with socket.create_connection((node.address.host, node.address.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert connection.recv(1) == b""
    node.stop()
    [dropped] = about(node, "connection_dropped")
    assert (dropped["peer"], dropped["error"]) == ("127.0.0.1", "BadMagic")
    assert "magic" in dropped["reason"]


def test_the_password_that_was_made_is_not_in_the_log(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "data", "--log-format", "json", "--vbuckets", "4", user=None, as_json=False) as node:
        assert node.start().ready_line.startswith("ready couchbase://")
        node.stop()
    made = (tmp_path / "data" / "password").read_text().strip()
    assert made not in node.log()
    ready = about(node, "node_ready")
    assert ready[0]["dashboard"].startswith("http://")
    assert ready[1]["path"] == str(tmp_path / "data" / "password")


def test_the_least_that_is_logged(start_node: StartNode) -> None:
    node = start_node("--log-format", "json", "--log-level", "warning", "--vbuckets", "4")
    node.stop()
    assert node.log() == "", "that it is ready is no trouble"


def test_a_node_that_can_t_start(tmp_path: Path) -> None:
    done = run_serve("--data", str(tmp_path), "--vbuckets", "3", "--log-format", "json")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = lines_of(done.stderr)
    assert (line["level"], line["fields"]["event"]) == ("error", "node_failed")
    assert "take a power of two" in line["message"]


def test_the_nodes_of_a_cluster(tmp_path: Path) -> None:
    """All of them write to one standard error, and the config of each is told."""
    command = ["--data", str(tmp_path / "nodes"), "--nodes", "2", "--vbuckets", "8", "--log-format", "json"]
    with NodeProcess(tmp_path / "parent", *command) as cluster:
        cluster.start()
        assert cluster.stop() == 0
    configs = about(cluster, "cluster_config")
    assert {fields["bucket"] for fields in configs} == {"default"}
    assert sum(fields["vbuckets"] == 4 for fields in configs) >= 2, "each has a half in the end"


# --- the code -----------------------------------------------------------------------------------------------------


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(SOURCES.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in LOGGING:
                yield f"{path.relative_to(SOURCES)}:{call.lineno}", call


def test_every_message_has_fields() -> None:
    calls = list(log_calls())
    assert len(calls) > 20
    assert [place for place, call in calls if not any(keyword.arg == "extra" for keyword in call.keywords)] == []
