"""Worlds for the conformance suite: a bucket with a node around it, and consumers that speak bytes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# The node in a process without sockets, which the tests of the key-value front end use as well.
from support.dcp_world import World
from support.node_process import NodeProcess
from support.replayed_sessions import PASSWORD, USER
from support.replication_world import Link, make_replica
from support.strict_server import V7_0_5, V8_0_2


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "data")
    yield world
    world.close()


@pytest.fixture(params=["8.0.2", pytest.param("7.0.5", marks=pytest.mark.soak)])
def replica(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A second node, all of whose vbuckets are copies. What passes between the two, real servers would take.

    With every run as 8.0.2 takes it; tests of any history ask for 7.0.5 as well.
    """
    monkeypatch.setattr(Link, "version", {"8.0.2": V8_0_2, "7.0.5": V7_0_5}[request.param])
    replica = World(tmp_path / "replica")
    make_replica(replica)
    yield replica
    replica.close()


@pytest.fixture
def node_of_8(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node with no bucket that speaks as 8.0, for recorded sessions to be played against."""
    with NodeProcess(tmp_path / "data", "--bare", "--speaks-as", "8.0", user=USER, password=PASSWORD) as node:
        yield node.start()
    assert "Traceback" not in node.log(), node.log()
