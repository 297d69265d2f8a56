"""Nodes for the tests of the key-value front end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.kv_harness import WITH_COLLECTIONS, Client, Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "data")
    yield node
    node.close()


@pytest.fixture
def client(node: Node) -> Client:
    return node.client()


@pytest.fixture
def collections_client(node: Node) -> Client:
    return node.client(features=WITH_COLLECTIONS)
