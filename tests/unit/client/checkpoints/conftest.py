"""A real node that the tests of one file share. Each test has a group of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoint_samples import VBUCKETS

from node_process import NodeProcess


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", "--vbuckets", str(VBUCKETS)) as node:
        yield node.start()
    assert "Traceback" not in node.log(), node.log()
