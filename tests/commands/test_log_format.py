"""The log of a node as a program reads it."""

from __future__ import annotations

import json

from support.node_process import StartNode


def test_a_node_writes_its_log_as_json(start_node: StartNode) -> None:
    node = start_node("--log-format", "json", "--vbuckets", "4")
    with node.connect() as connection:
        connection.close()
    node.stop()
    for line in node.log().splitlines():
        assert {"time", "level", "logger", "message"} <= json.loads(line).keys()


def test_the_least_that_is_logged(start_node: StartNode) -> None:
    node = start_node("--log-format", "json", "--log-level", "warning", "--vbuckets", "4")
    node.stop()
    assert node.log() == "", "that it is ready is no trouble"
