"""The plug-in itself: the fixtures, and the marker that selects the kind of node for a test.

It imports almost nothing, because pytest loads it in every run where Headwater is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headwater.testing.cluster import HeadwaterCluster
    from headwater.testing.node import HeadwaterNode
    from headwater.testing.nursery import Nursery

MARKER = "headwater"
LOG_LINES_MAX = 40
"""How many lines of each node's log a failed test shows."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "headwater(vbuckets=16, buckets=('default',), nodes=2, replicas=1, options=()): the node or the cluster that "
        "`headwater_node` or `headwater_cluster` is to be; options are those of `headwater serve`",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of its nodes to the report of a failed test."""
    report = yield
    if report.failed:
        report.sections += [(f"Log of {name}", log) for name, log in _logs(getattr(item, "funcargs", {}))]
    return report


def _logs(funcargs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the ends of the logs of all nodes among a test's fixtures, whatever their names are."""
    module = sys.modules.get("headwater.testing.node")
    if module is None:
        return
    for fixture, value in funcargs.items():
        among = getattr(value, "nodes", None)
        nodes = {f"{fixture}.nodes[{at}]": node for at, node in enumerate(among)} if isinstance(among, list) else {}
        for name, node in {fixture: value, **nodes}.items():
            lines = node.log.splitlines() if isinstance(node, module.HeadwaterNode) else []
            if lines:
                yield name, "\n".join(lines[-LOG_LINES_MAX:])


@pytest.fixture(scope="session")
def _headwater_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A process that has imported everything; each node is forked from it."""
    from headwater.testing.nursery import Nursery

    with Nursery(tmp_path_factory.mktemp("headwater-nursery")) as nursery:
        yield nursery


@pytest.fixture
def headwater_node(
    request: pytest.FixtureRequest, _headwater_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeadwaterNode]:
    """A separate node for this test, empty and on free ports."""
    from headwater.testing.node import HeadwaterNode

    with HeadwaterNode(
        _headwater_nursery, _folder(tmp_path_factory), **_wanted(request, "vbuckets", "buckets")
    ) as node:
        yield node


@pytest.fixture
def headwater_cluster(
    request: pytest.FixtureRequest, _headwater_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeadwaterCluster]:
    """A separate cluster for this test: nodes with replicas of each other's vbuckets."""
    from headwater.testing.cluster import HeadwaterCluster

    wanted = _wanted(request, "vbuckets", "nodes", "replicas")
    with HeadwaterCluster(_headwater_nursery, _folder(tmp_path_factory), **wanted) as cluster:
        yield cluster


def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headwater")


def _wanted(request: pytest.FixtureRequest, *names: str) -> dict[str, Any]:
    """Return the settings from the test's marker. Raises `UsageError` for unknown ones."""
    marker = request.node.get_closest_marker(MARKER)
    wanted = {} if marker is None else dict(marker.kwargs)
    unknown = sorted(wanted.keys() - {*names, "options"})
    if unknown or (marker is not None and marker.args):
        known = ", ".join([*names, "options"])
        raise pytest.UsageError(f"the marker headwater takes {known} by name here, and not {unknown or marker.args}")
    return wanted
