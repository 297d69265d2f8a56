"""The log as JSON: one object a line, whatever is in a message."""

from __future__ import annotations

import json
import logging

from headwater.cli.output import JsonFormatter
from node_process import StartNode


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
