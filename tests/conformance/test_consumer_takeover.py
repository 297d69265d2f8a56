"""Takeover from end to end: the source's vbucket becomes dead, the copy active, and nothing is lost between them."""

from __future__ import annotations

import pytest

from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.status import Status
from support.dcp_world import COLLECTIONS, VBUCKET, World, brief
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
