"""One Spark session and one node for all tests here: starting them takes longer than most of the tests."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.spark.session import start_session
from headwater.spark.versions import VERSION
from support.landings import SourceBucket, SparkNode
from support.object_store import S3Server

BUCKETS = 25
"""Of one node, each for one test: each takes a part of the addresses that a process can have."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the session: `scripts/run-tests` runs these in one process, and the others beside it."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("session")
        for mark in item.iter_markers("spark_versions"):
            item.user_properties.append(("spark_versions", mark.args[0]))  # `scripts/spark-versions` reads it
            since = mark.kwargs.get("since", "3.5")
            if tuple(map(int, since.split("."))) > VERSION:
                item.add_marker(pytest.mark.skip(reason=f"PySpark has it since {since}"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    session = start_session(master="local[2]", memory="1g", log_folder=tmp_path_factory.mktemp("spark") / "täglich neu")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    """With the bucket `lakes`."""
    with S3Server() as running:
        running.make_bucket("lakes")
        yield running


@pytest.fixture(scope="session")
def _buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[SourceBucket]]:
    with ExitStack() as nodes:
        yield _new_buckets(tmp_path_factory.mktemp("nodes"), nodes)


def _new_buckets(folder: Path, nodes: ExitStack) -> Iterator[SourceBucket]:
    """Buckets without end, on as many nodes as are needed for them."""
    names = [f"bucket-{number}" for number in range(BUCKETS)]
    for number in itertools.count():
        node = nodes.enter_context(SparkNode(folder / f"data-{number}", buckets=names))
        yield from (SourceBucket(node, name) for name in names)


@pytest.fixture
def other_bucket(_buckets: Iterator[SourceBucket]) -> SourceBucket:
    """A second one."""
    return next(_buckets)


@pytest.fixture
def bucket(_buckets: Iterator[SourceBucket]) -> Iterator[SourceBucket]:
    """A new one of the shared node, which must be left running."""
    bucket = next(_buckets)
    yield bucket
    bucket.close()
