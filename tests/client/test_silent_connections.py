"""Connections on which nothing comes any more, and which nobody closes: they are found out, wherever that happens."""

from __future__ import annotations

import asyncio

import pytest

from headwater.client.kv_connection import Timeouts
from support.fault_proxy import Action, ProxiedBucket, ProxiedNode, Stall, Way
from support.followed_client import FollowedClient
from support.random_writes import write_fences

NOOP_INTERVAL_S = 1
"""The least that the protocol has. A silence of two of these is a dead connection."""
TIMEOUTS = Timeouts(connect_s=1, answer_s=1)
FOUND_OUT_S_MAX = 12.0
"""Far more than these take, and less than what a client takes that has not been told of them."""


@pytest.mark.parametrize(
    ("connection", "way", "after_bytes"),
    [
        # The look at the bucket with which a read begins. The one before it is `connect`'s, and its caller's affair.
        (1, Way.TO_CLIENT, 100),
        # The connection of the streams: while it logs in, while it opens, and then.
        (2, Way.TO_CLIENT, 100),
        (2, Way.TO_SERVER, 100),
        (2, Way.TO_CLIENT, 1000),
        (2, Way.TO_SERVER, 700),
        (2, Way.TO_CLIENT, 2000),
        (2, Way.TO_SERVER, 1200),
    ],
)
def test_a_silent_connection_is_replaced(shared_node: ProxiedNode, connection: int, way: Way, after_bytes: int) -> None:
    bucket = ProxiedBucket(shared_node)
    fences = write_fences(bucket, b'"%d"' % after_bytes)

    def plan(number: int) -> tuple[Action, ...]:
        return (Stall(way, after_bytes),) if number == connection else ()

    bucket.proxy.use(plan)
    consumer = FollowedClient(bucket.url, timeouts=TIMEOUTS, noop_interval_s=NOOP_INTERVAL_S)
    assert asyncio.run(asyncio.wait_for(consumer.read(fences.are_in), FOUND_OUT_S_MAX))
    assert bucket.proxy.counts.connections > 3
