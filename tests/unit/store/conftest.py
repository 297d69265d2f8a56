"""What most tests of the store use: a bucket of four active vbuckets, and its clock."""

from __future__ import annotations

import pytest

from headwater.store.bucket import Bucket
from support.store_harness import Clock, new_bucket


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bucket(clock: Clock) -> Bucket:
    return new_bucket(clock=clock)
