"""Real nodes that tests of the client share. A test that harms a node starts one of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import checkpoint_samples, group_member_process
from support.fault_proxy import ProxiedNode
from support.node_process import NodeProcess


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedNode]:
    """A node behind a proxy, for all tests that leave it running."""
    with ProxiedNode(tmp_path_factory.mktemp("shared") / "data") as node:
        yield node


@pytest.fixture(scope="module")
def group_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """Each test has a group of its own."""
    yield from _node(tmp_path_factory, vbuckets=group_member_process.VBUCKETS)


@pytest.fixture(scope="module")
def checkpoint_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """Each test has a checkpoint of its own."""
    yield from _node(tmp_path_factory, vbuckets=checkpoint_samples.VBUCKETS)


def _node(folders: pytest.TempPathFactory, *, vbuckets: int) -> Iterator[NodeProcess]:
    with NodeProcess(folders.mktemp("node") / "data", "--vbuckets", str(vbuckets)) as node:
        yield node.start()
    assert "Traceback" not in node.log(), node.log()
