"""Takeover from end to end: the source's vbucket becomes dead, the copy active, and nothing is lost between them."""

from __future__ import annotations

import pytest

from headwater.errors import StoreError
from headwater.node.membership import end_takeovers
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_streams import SetVBucketState, StreamFlags, VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.status import Status
from support.dcp_world import COLLECTIONS, VBUCKET, Consumer, World, brief, changes, of_type, stream_request
from support.replication_world import Link, change_log, documents


def _states(*worlds: World) -> list[VBucketState | None]:
    return [world.bucket.vbuckets.state(VBUCKET) for world in worlds]


def test_a_takeover(world: World, replica: World) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    link.add(flags=StreamFlags.TAKEOVER)
    lines = [line for line in brief(link.passed) if not line.endswith("Response")]
    assert lines == ["marker 0..2", "set a@1", "set b@2", "state PENDING", "state ACTIVE", "end OK"]
    assert _states(world, replica) == [VBucketState.DEAD, VBucketState.ACTIVE]
    assert change_log(replica.bucket) == change_log(world.bucket)
    assert link.receiver.connection.streams == {}
    facts, source = replica.bucket.vbuckets.facts[0], world.bucket.vbuckets.facts[0]
    newest, *older = facts.failover_log.entries
    assert newest.seqno == 2
    assert tuple(older) == source.failover_log.entries


@pytest.mark.parametrize("keys", [(), ("a",)])
def test_a_takeover_of_a_copy_that_is_up_to_date(world: World, replica: World, keys: tuple[str, ...]) -> None:
    world.store(*keys)
    link = Link(world, replica)
    link.add()
    link.close_stream()
    link.run()
    link.add(flags=StreamFlags.TAKEOVER)
    assert _states(world, replica) == [VBucketState.DEAD, VBucketState.ACTIVE]


def test_a_takeover_while_writes_go_on(world: World, replica: World) -> None:
    """Every write that the source has answered is at the target, and from then on the target alone takes writes."""
    world.store(*(f"old{number}" for number in range(100)), value=bytes(500))
    link = Link(world, replica)
    source = world.node.client(features=COLLECTIONS)
    target = replica.node.client(features=COLLECTIONS)
    accepted: list[tuple[str, str]] = []
    link.add_stream(flags=StreamFlags.TAKEOVER)
    for number in range(400):
        key = f"w{number}".encode()
        statuses = []
        for name, client in (("source", source), ("target", target)):
            (answer,) = client.call_all(Set(vbucket=VBUCKET, key=b"\x00" + key, value=b"%d" % number))
            statuses.append(answer.status)
            if answer.status == Status.SUCCESS:
                accepted.append((name, key.decode()))
        assert statuses.count(Status.SUCCESS) <= 1, "one write, taken twice"
        link.step(2000)
        if number % 3 == 0:
            world.commit()
            replica.commit()
    link.run()
    assert _states(world, replica) == [VBucketState.DEAD, VBucketState.ACTIVE]
    taken_by = [name for name, _ in accepted]
    assert taken_by == sorted(taken_by), "the source takes nothing after the target has"
    assert {"source", "target"} == set(taken_by)
    held = {key.decode() for _, key in documents(replica.bucket)}
    assert {key for _, key in accepted} <= held
    assert {f"old{number}" for number in range(100)} <= held


def test_the_target_becomes_active_only_when_that_is_durable_at_both(world: World, replica: World) -> None:
    world.store("a")
    link = Link(world, replica)
    link.add_stream(flags=StreamFlags.TAKEOVER)
    for _ in range(10):
        link.step()
    assert _states(world, replica) == [VBucketState.ACTIVE, VBucketState.PENDING], "pending is not durable yet"
    replica.commit()
    for _ in range(10):
        link.step()
    assert _states(world, replica) == [VBucketState.DEAD, VBucketState.PENDING], "dead is not durable yet"
    world.commit()
    for _ in range(10):
        link.step()
    assert _states(world, replica) == [VBucketState.DEAD, VBucketState.ACTIVE]


def test_a_takeover_that_is_cut_leaves_at_most_one_active(world: World, replica: World) -> None:
    world.store("a")
    for steps in range(12):
        link = Link(world, replica, name=f"link-{steps}")
        link.add_stream(flags=StreamFlags.TAKEOVER)
        for _ in range(steps):
            link.step()
            world.commit()
            replica.commit()
        link.cut()
        states = _states(world, replica)
        assert states.count(VBucketState.ACTIVE) <= 1
        if states == [VBucketState.DEAD, VBucketState.ACTIVE]:
            break
        if states[0] != VBucketState.ACTIVE:
            world.set_state(VBucketState.ACTIVE)
    assert change_log(replica.bucket) == change_log(world.bucket)


# --- A takeover that a newer config does not name any more: it ends where it is, and changes no state from then on --


SOURCE, TARGET = 0, 1
NODES = tuple(NodeAddress(host="127.0.0.1", kv_port=port) for port in (1000, 2000))
STEPS_MAX = 8


def config(world: World, handing_over: dict[int, int]) -> PublishedConfig:
    rows = ((SOURCE, TARGET),) * len(world.bucket.vbuckets)
    return PublishedConfig(
        revision=2, bucket="default", uuid="0", nodes=NODES, replicas=1, rows=rows, handing_over=handing_over
    )


def states(*worlds: World) -> list[VBucketState | None]:
    return [world.bucket.vbuckets.state(VBUCKET) for world in worlds]


@pytest.mark.parametrize("source_hears_first", [True, False])
@pytest.mark.parametrize("handing_over", [{}, {VBUCKET: SOURCE}], ids=["not named", "frozen"])
@pytest.mark.parametrize("steps", range(STEPS_MAX))
def test_nothing_changes_once_both_nodes_have_heard(
    world: World, replica: World, steps: int, handing_over: dict[int, int], source_hears_first: bool
) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    link.add_stream(flags=StreamFlags.TAKEOVER)

    def step() -> None:
        link.step()
        world.commit()
        replica.commit()

    for _ in range(steps):
        step()
    hears = [(world, SOURCE), (replica, TARGET)]
    for at, node in hears if source_hears_first else reversed(hears):
        end_takeovers(at.node.bucket_service, config(at, handing_over), node)
        if at is (world if source_hears_first else replica):
            # What was on its way when the first one heard of it gets to the second one.
            step()
    found = states(world, replica)
    assert found.count(VBucketState.ACTIVE) <= 1
    for _ in range(STEPS_MAX):
        step()
    assert states(world, replica) == found


def test_a_takeover_that_the_config_names_goes_on(world: World, replica: World) -> None:
    world.store("a")
    link = Link(world, replica)
    link.add_stream(flags=StreamFlags.TAKEOVER)
    link.step()
    for at, node in ((world, SOURCE), (replica, TARGET)):
        end_takeovers(at.node.bucket_service, config(at, {VBUCKET: TARGET}), node)
    link.run()
    assert states(world, replica) == [VBucketState.DEAD, VBucketState.ACTIVE]


def test_a_plain_copy_goes_on_whatever_is_handed_over(world: World, replica: World) -> None:
    link = Link(world, replica)
    link.add()
    for at, node in ((world, SOURCE), (replica, TARGET)):
        end_takeovers(at.node.bucket_service, config(at, {}), node)
    world.store("a")
    link.run()
    assert replica.high_seqno() == 1


def test_a_takeover_that_the_config_does_not_name_is_not_begun(world: World, replica: World) -> None:
    replica.node.bucket_service.config = config(replica, {})
    replica.node.bucket_service.this_node = TARGET
    link = Link(world, replica)
    assert link.refused(flags=StreamFlags.TAKEOVER) == Status.NOT_MY_VBUCKET
    link.add()


# --- takeover: a stream that hands its vbucket over to the consumer (seed 002, flag 0x01) ---------------------------


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
