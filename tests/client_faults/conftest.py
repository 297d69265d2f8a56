"""Nodes behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from proxied_node import ProxiedNode


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedNode]:
    """One for all tests that leave it running."""
    with ProxiedNode(tmp_path_factory.mktemp("shared") / "data") as node:
        yield node
