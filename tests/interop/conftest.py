"""One node for all tests with the Python SDK, and a cluster object connected to it; for some of them three nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from couchbase.cluster import Cluster
from couchbase.collection import Collection

from headwater.testing.cluster import HeadwaterCluster
from headwater.testing.nursery import Nursery
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
    with connected(sdk_node.url, USER, PASSWORD) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every vbucket is on all three."""
    folder = tmp_path_factory.mktemp("three")
    with (
        Nursery(tmp_path_factory.mktemp("nursery")) as nursery,
        HeadwaterCluster(nursery, folder, nodes=3, replicas=2, vbuckets=32) as nodes,
        connected(nodes.url.removesuffix("/default"), nodes.user, nodes.password) as cluster,
    ):
        yield cluster
        for node in nodes.nodes:
            assert "Traceback" not in node.log, node.log


@pytest.fixture(scope="session", params=["cluster", "three_nodes"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """One node, then three."""
    cluster: Cluster = request.getfixturevalue(request.param)
    return cluster


@pytest.fixture(scope="session")
def documents(any_cluster: Cluster) -> Collection:
    """The default collection, on one node and on three."""
    return any_cluster.bucket("default").default_collection()


@pytest.fixture(scope="session")
def collection(cluster: Cluster) -> Collection:
    return cluster.bucket("default").default_collection()


_numbers = itertools.count()


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"key-{next(_numbers)}"
