"""Tables in a pipe: neither cut nor folded, however narrow the terminal is said to be."""

from __future__ import annotations

import pytest

from headwater.cli.cluster import _show
from headwater.cluster.nodes import ClusterStatus, NodeStatus

HOST = "a-node-with-a-name-that-is-rather-long.somewhere.example.com"


def test_rows_and_sentences_are_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    node = NodeStatus(
        name=f"{HOST}:11210", http=f"{HOST}:8091", is_reachable=False, active=1, replica=0, building=0, behind=0
    )
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
    )
    _show(status)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bucket travel, 1 vbucket with 1 replica, config 7"
    assert lines[1].split() == ["NODE", "HTTP", "ACTIVE", "REPLICA", "BUILDING", "BEHIND"]
    assert lines[2].split(maxsplit=6) == [node.name, node.http, "1", "0", "0", "0", "can't be reached"]
    assert lines[3:] == ["no node has 1 vbucket", "1 replica missing: run `headwater cluster rebalance`"]
