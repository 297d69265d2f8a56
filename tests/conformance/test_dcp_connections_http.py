"""The connections of a bucket and their streams, as JSON over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from headwater.protocol.messages.dcp_streams import Control, Open, StreamRequest
from headwater.protocol.numbers import Seqno, VBucketId
from support.cases import case
from support.node_process import PASSWORD, USER, NodeProcess


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("data"), "--vbuckets", "4") as node:
        yield node.start()
    assert "Traceback" not in node.log(), node.log()


def ask(node: NodeProcess, path: str = "/headwater/buckets/default/dcp") -> httpx.Response:
    return httpx.get(f"{node.http_url}{path}", auth=(USER, PASSWORD))


def test_a_connection_with_its_streams(node: NodeProcess) -> None:
    assert ask(node).json() == {"bucket": "default", "connections": []}
    assert ask(node, "/headwater/buckets/nowhere/dcp").status_code == 404
    with closing(node.connect()) as connection:
        connection.request(Open(key=b"spark"))
        connection.request(Control(key=b"enable_noop", value=b"true"))
        connection.request(StreamRequest(vbucket=VBucketId(1), opaque=0))
        connection.request(StreamRequest(vbucket=VBucketId(2), opaque=0, end_seqno=Seqno(9)))
        (told,) = ask(node).json()["connections"]
        (named,) = ask(node, "/headwater/buckets/default/dcp?connection=spark").json()["connections"]
        assert ask(node, "/headwater/buckets/default/dcp?connection=other").json()["connections"] == []
    assert {name: told[name] for name in ("name", "type", "noop_enabled", "num_streams")} == {
        "name": "spark",
        "type": "producer",
        "noop_enabled": True,
        "num_streams": 2,
    }
    assert 0 <= told["open_s"] < 60
    streams: list[dict[str, Any]] = told["streams"]
    assert [(stream["vbucket"], stream["end_seqno"], stream["backlog_items"]) for stream in streams] == [
        (1, None, 0),
        (2, 9, 0),
    ]
    assert named["streams"] == streams


@case("x", {"to": "0"}, "vbucket")
@case("65536", {"to": "0"}, "vbucket")
@case("1", {}, "to")
@case("1", {"to": "-1"}, "to")
@case("1", {"to": "1", "from": "2"}, "from")
@case("4", {"to": "0"}, "_")
@case("1", {"to": "1"}, "_")
def test_drills_that_are_refused(node: NodeProcess, path: str, form: dict[str, str], field: str) -> None:
    url = f"{node.http_url}/headwater/buckets/default/vbuckets/{path}/rollback"
    answer = httpx.post(url, data=form, auth=(USER, PASSWORD))
    assert (answer.status_code, answer.json()["errors"].keys()) == (400, {field})
