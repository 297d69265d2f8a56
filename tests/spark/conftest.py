"""One Spark session and one node for all tests here: starting them takes longer than most of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession
from spark_node import SourceBucket, SparkNode

from headwater.spark.session import start_session

BUCKETS = 24
"""At least as many as there are tests: each has one of its own."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    session = start_session(master="local[2]", memory="1g", log_folder=tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def _buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[SourceBucket]]:
    names = [f"bucket-{number}" for number in range(BUCKETS)]
    with SparkNode(tmp_path_factory.mktemp("node") / "data", buckets=names) as node:
        yield (SourceBucket(node, name) for name in names)


@pytest.fixture
def bucket(_buckets: Iterator[SourceBucket]) -> Iterator[SourceBucket]:
    """A new one of the shared node, which must be left running."""
    bucket = next(_buckets)
    yield bucket
    bucket.close()
