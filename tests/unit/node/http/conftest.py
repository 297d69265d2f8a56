"""A node with one bucket, and who asks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import create_bucket
from support.http_node import ENVIRONMENT, Client, Node


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(tmp_path / "buckets" / "beer")
    yield engine
    engine.close()


@pytest.fixture
def node(engine: LmdbEngine, tmp_path: Path) -> Node:
    facts = BucketFacts(name="beer", uuid="ab" * 16, vbuckets=4)
    bucket = create_bucket(engine, facts, environment=ENVIRONMENT, secret=(1, 2))
    for vbucket in range(4):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    bucket.commit_now()
    return Node(bucket, tmp_path)


@pytest.fixture
def ask(node: Node) -> Client:
    return Client(node)
