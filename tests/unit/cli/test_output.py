"""What commands write: tables in a pipe, neither cut nor folded; rates; and the log, which strangers can't fill."""

from __future__ import annotations

import json
import logging

import pytest

from headwater.cli.cluster import _show
from headwater.cli.output import PEER_LINES_FREE, TEXT, JsonFormatter, PeerLimit, TextFormatter, documents_in
from headwater.cluster.nodes import ClusterStatus, NodeStatus
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from support.cases import case

HOST = "a-node-with-a-name-that-is-rather-long.somewhere.example.com"


def test_rows_and_sentences_are_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    node = NodeStatus(
        name=f"{HOST}:11210", http=f"{HOST}:8091", is_reachable=False, active=1, replica=0, building=0, behind=0,
        unknown=2,
    )  # fmt: skip
    status = ClusterStatus(
        bucket="travel",
        uuid="u",
        revision=7,
        replicas=1,
        vbuckets=1,
        settled=False,
        missing=1,
        orphans=1,
        nodes=(node,),
        copies=PublishedConfig(
            revision=7, bucket="travel", uuid="u", nodes=(NodeAddress(host=HOST, kv_port=11210),), rows=((0, -1),)
        ).copies([node.name]),
    )
    _show(status)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bucket travel, 1 vbucket with 1 replica, config 7"
    assert lines[1].split() == ["NODE", "HTTP", "ACTIVE", "REPLICA", "BUILDING", "BEHIND"]
    assert lines[2].split(maxsplit=6) == [node.name, node.http, "1", "0", "0", "?", "can't be reached"]
    assert lines[3:5] == [
        "no node that can be reached has the active copy of 1 of 1 vbucket",
        "of 2 replicas it is unknown how far they are",
    ]
    assert lines[5:] == ["no node has 1 vbucket", "1 replica missing: run `headwater cluster rebalance`"]


@case(3, 6.82, "3 documents in 6.82 s")
@case(1, 0.0, "1 document in 0.00 s")
@case(999, 2.0, "999 documents in 2.00 s")
@case(50_000, 0.99, "50,000 documents in 0.99 s")
@case(1000, 2.0, "1,000 documents in 2.00 s: 500 documents/s, 1.5 MB/s")
def test_what_is_told(documents: int, seconds: float, told: str) -> None:
    assert documents_in(documents, seconds, and_rate=", 1.5 MB/s") == told


def formatted(**members: object) -> dict[str, object]:
    record = logging.makeLogRecord({"name": "headwater.x", "levelname": "INFO", "created": 1.5, **members})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    told: dict[str, object] = json.loads(line)
    return told


def test_a_line_has_time_level_logger_and_message() -> None:
    assert formatted(msg="hello %s", args=("you",)) == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "info",
        "logger": "headwater.x",
        "message": "hello you",
    }


def test_fields_and_exceptions_are_members() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        told = formatted(msg="m", bucket="beer", seqno=3, exc_info=(ValueError, error, error.__traceback__))
    assert told["fields"] == {"bucket": "beer", "seqno": 3}
    assert "ValueError: two\nlines" in str(told["exception"])


def test_what_is_no_json_is_told_as_text() -> None:
    assert formatted(msg="m", thing={1, 2}.__class__)["fields"] == {"thing": "<class 'set'>"}


# --- what strangers have logged -----------------------------------------------------------------------------------


def record(message: str, created_s: float = 0.0, **about: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"msg": message, "name": "headwater", "levelname": "WARNING", "created": created_s, **about}
    )


@pytest.mark.parametrize("formatter", [TextFormatter(TEXT), JsonFormatter()])
def test_a_name_forges_no_line_and_reaches_no_terminal(formatter: logging.Formatter) -> None:
    line = formatter.format(record("connection 'a\n2026-01-01 CRITICAL all is lost\x1b[2J\x9b' opened"))
    assert line.isprintable()


def test_what_is_long_is_cut() -> None:
    line = JsonFormatter().format(record("x" * 100_000, bucket="\0" * 12_000))
    assert len(line) < 10_000
    assert "(12000 characters)" in line


def test_a_peer_has_so_many_lines_of_a_kind_and_they_are_counted() -> None:
    limit = PeerLimit()

    def is_logged(at_s: float, *, peer: str = "192.0.2.1", event: str = "denied") -> logging.LogRecord | None:
        written = record("it may not", at_s, peer=peer, event=event)
        return written if limit.filter(written) else None

    assert sum(is_logged(0.0) is not None for _ in range(1_000)) == PEER_LINES_FREE
    assert is_logged(0.0, peer="192.0.2.2")
    assert is_logged(0.0, event="login_failed")
    later = is_logged(1.0)
    assert later.getMessage() == "it may not (and 990 more like it before)"
    assert limit.filter(record("our own"))
