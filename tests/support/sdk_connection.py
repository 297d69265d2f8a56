"""The SDK's cluster object, connected to a node for as long as a block of code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions

from support.node_process import NodeProcess

READY_TIMEOUT = timedelta(seconds=30)


@contextmanager
def connected(node: NodeProcess, user: str, password: str) -> Iterator[Cluster]:
    cluster = Cluster(node.url, ClusterOptions(PasswordAuthenticator(user, password)))
    try:
        cluster.wait_until_ready(READY_TIMEOUT)
        yield cluster
    finally:
        cluster.close()
