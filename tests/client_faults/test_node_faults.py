"""What happens to the node itself: it is killed, or stands still, or is restarted while the consumer is away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from consumer_state import differences
from followed_client import FollowedClient
from proxied_node import ProxiedBucket, ProxiedNode
from random_writes import RandomWrites, write_fences
from stored_documents import streamed_documents

from headwater.errors import ConnectionFailed
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION

SEED = 5
KILLS = 3
NOOP_INTERVAL_S = 1
"""The least that the protocol has. A silence of two of these is a dead connection."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ProxiedNode]:
    with ProxiedNode(tmp_path / "data") as node:
        yield node


@pytest.fixture
def bucket(node: ProxiedNode) -> ProxiedBucket:
    return ProxiedBucket(node)


def check_state(bucket: ProxiedBucket, consumer: FollowedClient) -> None:
    wrong = differences(consumer.state.documents(), streamed_documents(bucket))
    assert not wrong, "\n".join(wrong)


# --- killed -------------------------------------------------------------------------------------------------------


def test_a_consumer_that_is_away_while_the_node_is_killed(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    """Every kill begins a new branch of history, but nothing that was streamed is ever taken back."""
    consumer = FollowedClient(bucket.url, snapshots="as-they-come")
    for kill in range(KILLS):
        with RandomWrites(bucket, SEED + kill, operations=40, with_rollbacks=False) as writes:
            asyncio.run(consumer.read(writes.fences.are_in, steps_max=3))
        node.node.kill()
        node.node.start()
    assert asyncio.run(consumer.read(writes.fences.are_in))
    check_state(bucket, consumer)
    assert not consumer.state.rollbacks


@pytest.mark.parametrize("snapshots", ["complete", "as-they-come"])
def test_a_node_that_is_killed_in_the_middle_of_a_stream(
    node: ProxiedNode, bucket: ProxiedBucket, snapshots: str
) -> None:
    """What the node had not answered may be lost, and the consumer must have none of that."""
    asyncio.run(read_through_kills(node, bucket, FollowedClient(bucket.url, snapshots=snapshots)))


async def read_through_kills(node: ProxiedNode, bucket: ProxiedBucket, consumer: FollowedClient) -> None:
    dice = random.Random(SEED)
    async with consumer.reading_on() as reading:
        for kill in range(KILLS):
            writes = Uninterrupted(bucket)
            writes.start()
            rows = consumer.state.rows + dice.randint(50, 300)
            await consumer.reaches(lambda state, rows=rows: state.rows >= rows, reading)
            node.node.kill()
            writes.join()
            await asyncio.to_thread(node.node.start)
            fences = await asyncio.to_thread(write_fences, bucket, b'"%d"' % kill)
            await consumer.reaches(fences.are_in, reading)
            check_state(bucket, consumer)
    assert not consumer.state.rollbacks


class Uninterrupted(threading.Thread):
    """Writes as fast as it can, until its connection breaks."""

    def __init__(self, bucket: ProxiedBucket) -> None:
        super().__init__(name="writer")
        self._bucket = bucket

    def run(self) -> None:
        with self._bucket.connect_directly() as connection, contextlib.suppress(ConnectionFailed):
            for number in itertools.count():
                key = b"key-%d" % (number % 50)
                place = {"collection_id": DEFAULT_COLLECTION, "key": key, "vbucket": self._bucket.vbucket_of(key)}
                connection.request(Set(value=b'{"number":%d}' % number, **place))


# --- standing still -----------------------------------------------------------------------------------------------


def test_a_node_that_stands_still(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    """Its connections stay open and nothing comes: noops find that out, and when it goes on, so does the read."""
    asyncio.run(read_through_standstill(node, bucket))


async def read_through_standstill(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    consumer = FollowedClient(bucket.url, noop_interval_s=NOOP_INTERVAL_S)
    first = write_fences(bucket, b'"first"')
    async with consumer.reading_on() as reading:
        await consumer.reaches(first.are_in, reading)
        connections = node.proxy.counts.connections
        os.kill(node.node.pid, signal.SIGSTOP)
        try:
            # It tries another connection, so it takes the one it has for dead.
            await consumer.reaches(lambda state: node.proxy.counts.connections > connections, reading)
        finally:
            os.kill(node.node.pid, signal.SIGCONT)
        second = await asyncio.to_thread(write_fences, bucket, b'"second"')
        await consumer.reaches(second.are_in, reading)
    check_state(bucket, consumer)
