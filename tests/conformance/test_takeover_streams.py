"""Takeover: a stream that hands its vbucket over to the consumer (seed 002, flag 0x01)."""

from __future__ import annotations

import pytest

from headwater.errors import StoreError
from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_streams import SetVBucketState, StreamFlags, VBucketState
from headwater.protocol.status import Status
from support.dcp_world import Consumer, World, brief, changes, of_type, stream_request


def _answer_state(consumer: Consumer, messages: list[Message]) -> list[Message]:
    (state,) = of_type(messages, SetVBucketState)
    consumer.answer(state, Opcode.DCP_SET_VBUCKET_STATE)
    consumer.world.commit()
    return consumer.received()


def _open(world: World) -> tuple[Consumer, list[Message]]:
    consumer = world.consumer()
    consumer.open(flags=StreamFlags.TAKEOVER)
    return consumer, consumer.received()


@pytest.mark.parametrize("keys", [(), ("a", "b")])
def test_a_takeover_continues_after_the_answer_and_leaves_a_dead_vbucket(world: World, keys: tuple[str, ...]) -> None:
    world.store(*keys)
    consumer, messages = _open(world)
    items = ["marker 0..2", "set a@1", "set b@2"] if keys else []
    assert brief(messages) == [*items, "state PENDING"]
    assert consumer.received() == []
    assert world.bucket.vbuckets.state(0) == VBucketState.ACTIVE
    messages = _answer_state(consumer, messages)
    assert brief(messages) == ["state ACTIVE"]
    assert consumer.received() == []
    assert world.bucket.vbuckets.state(0) == VBucketState.DEAD
    assert brief(_answer_state(consumer, messages)) == ["end OK"]
    assert consumer.refused(stream_request()) == Status.NOT_MY_VBUCKET


@pytest.mark.parametrize("is_durable", [True, False])
def test_the_last_writes_are_sent_before_the_vbucket_becomes_active(world: World, is_durable: bool) -> None:
    world.store("a")
    consumer, messages = _open(world)
    world.put("late")
    if is_durable:
        world.commit()
    consumer.answer(of_type(messages, SetVBucketState)[0], Opcode.DCP_SET_VBUCKET_STATE)
    lines = consumer.brief()
    world.commit()
    assert lines + consumer.brief() == ["marker 2..2", "set late@2", "state ACTIVE"]


def test_a_takeover_ends_the_other_streams_of_the_vbucket(world: World) -> None:
    other = world.consumer()
    other.open()
    assert other.brief() == []
    consumer, messages = _open(world)
    _answer_state(consumer, messages)
    assert other.brief() == ["end STATE_CHANGED"]


def test_a_takeover_can_be_closed_while_it_waits(world: World) -> None:
    world.store("a")
    consumer, messages = _open(world)
    assert changes(brief(messages)) == ["set a@1"]
    assert consumer.close_stream() == Status.SUCCESS
    assert world.bucket.vbuckets.state(0) == VBucketState.ACTIVE


def test_an_answer_to_nothing_is_ignored(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    consumer.send(b"\x81\x5b" + bytes(22))
    assert consumer.received() == []
    assert not consumer.is_closed


def test_a_takeover_whose_disk_fails_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StoreError("the disk can't be read")

    consumer, messages = _open(world)
    assert brief(messages) == ["state PENDING"]
    world.store("late")
    monkeypatch.setattr(world.bucket.engine, "view", fail)
    assert consumer.brief() == ["end STATE_CHANGED"]
