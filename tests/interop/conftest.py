"""One node for all tests with the Python SDK, and a cluster object connected to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from couchbase.cluster import Cluster
from couchbase.collection import Collection

from support.node_process import PASSWORD, USER, NodeProcess
from support.sdk import connected


@pytest.fixture(scope="session")
def sdk_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("sdk") / "data", "--bucket", "default", "--bucket", "other") as node:
        yield node.start()
        assert node.is_running
        assert node.stop() == 0
        assert "Traceback" not in node.log(), node.log()


@pytest.fixture(scope="session")
def cluster(sdk_node: NodeProcess) -> Iterator[Cluster]:
    with connected(sdk_node, USER, PASSWORD) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def collection(cluster: Cluster) -> Collection:
    return cluster.bucket("default").default_collection()


_numbers = itertools.count()


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"key-{next(_numbers)}"
