"""The streams of a connection take turns, and the connection tells whether another turn has something to send."""

from __future__ import annotations

import pytest

from headwater.node.producer.connection import ProducerConnection
from headwater.node.producer.outbound import Output
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages.dcp_changes import Mutation
from support.dcp_world import Consumer, World

VBUCKETS = 3
CHANGES = 4


@pytest.fixture
def consumer(world: World) -> Consumer:
    for vbucket in range(VBUCKETS):
        world.put(*(f"k{number}" for number in range(CHANGES)), vbucket=vbucket)
    world.settle()
    return world.consumer()


def producer_of(consumer: Consumer) -> ProducerConnection:
    assert consumer.session.dcp is not None
    return consumer.session.dcp


def vbuckets_of_turns(consumer: Consumer) -> list[int]:
    """The vbuckets of the changes that come, a turn of the smallest size after the other."""
    vbuckets: list[int] = []
    while producer_of(consumer).has_more:
        vbuckets += [message.vbucket for message in consumer.step() if isinstance(message, Mutation)]
    return vbuckets


def test_every_stream_has_its_turn(consumer: Consumer) -> None:
    for vbucket in range(VBUCKETS):
        consumer.open(vbucket=vbucket)
    assert vbuckets_of_turns(consumer) == [*range(VBUCKETS)] * CHANGES


def test_or_one_after_the_other_where_the_consumer_wants_that(consumer: Consumer) -> None:
    consumer.control("backfill_order", "sequential")
    for vbucket in range(VBUCKETS):
        consumer.open(vbucket=vbucket)
    assert vbuckets_of_turns(consumer) == sorted([*range(VBUCKETS)] * CHANGES)


def test_there_is_no_more_for_idle_streams_until_something_changes(world: World, consumer: Consumer) -> None:
    consumer.open()
    assert producer_of(consumer).has_more
    consumer.received()
    assert not producer_of(consumer).has_more
    world.write("new")
    assert consumer.brief() == ["marker 5..5", "set new@5"]
    assert not producer_of(consumer).has_more


def test_there_is_no_more_while_the_window_is_full(consumer: Consumer) -> None:
    consumer.control("connection_buffer_size", "100")
    consumer.open()
    sent = sum(len(frame.encode()) for frame in consumer.frames())
    assert not producer_of(consumer).has_more
    consumer.ack(sent)
    assert producer_of(consumer).has_more


def test_a_commit_wakes_the_streams_of_its_vbuckets_alone(world: World, consumer: Consumer) -> None:
    consumer.open(vbucket=0)
    consumer.open(vbucket=1)
    consumer.received()
    world.write("new", vbucket=1)
    producer, output = producer_of(consumer), Output()
    assert not producer.wake([2])
    assert producer.wake([1])
    producer.produce_into(output, 1 << 20, is_awake=True)
    assert consumer.decode(decode_frames(bytes(output.data)))[1].vbucket == 1
    assert not producer.has_more
