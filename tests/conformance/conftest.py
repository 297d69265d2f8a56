"""Worlds for the conformance suite: a bucket with a node around it, and consumers that speak bytes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# The node in a process without sockets, which the tests of the key-value front end use as well.
from support.dcp_world import World
from support.replication_world import make_replica


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "data")
    yield world
    world.close()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[World]:
    """A second node, all of whose vbuckets are copies."""
    replica = World(tmp_path / "replica")
    make_replica(replica)
    yield replica
    replica.close()
