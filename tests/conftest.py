"""Fixtures that tests of all kinds may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from node_process import NodeProcess, StartNode


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Starts real nodes, on a folder of the test unless told another. They are gone when the test ends.

    A node that has met an error of its own shows it in its log as a traceback, and fails the test.
    """
    nodes: list[NodeProcess] = []

    with ExitStack() as stack:

        def start(*options: str, data: Path | None = None) -> NodeProcess:
            node = stack.enter_context(NodeProcess(data or tmp_path / f"data-{len(nodes)}", *options))
            nodes.append(node)
            return node.start()

        yield start
    for node in nodes:
        assert "Traceback" not in node.log(), node.log()
