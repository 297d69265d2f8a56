"""A copy that holds what its producer does not is taken back, and asks again; one that was cut off goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headwater.errors import StoreError
from headwater.node.membership import roll_back_vbucket
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.base import Message
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.status import Status
from support.dcp_world import KEEP_NOTHING, VBUCKET, World, brief, of_type
from support.replication_world import WITH_EVERY_VERSION, Link, Receiver, change_log, documents, make_replica


def _rollbacks(messages: list[Message]) -> list[int]:
    answers = of_type(messages, dcp_streams.StreamRequestResponse)
    return [answer.rollback_seqno for answer in answers if answer.rollback_seqno is not None]


def _joined(source: World, target: World) -> Link:
    link = Link(source, target)
    link.add()
    return link


def _fail_over(world: World, to_seqno: int) -> None:
    """The source behaves as if a copy had been promoted that had come to this seqno only."""
    roll_back_vbucket(world.node.bucket_service, VBUCKET, Seqno(to_seqno))
    world.commit()


@WITH_EVERY_VERSION
def test_a_copy_that_is_ahead_is_taken_back_exactly(world: World, replica: World) -> None:
    world.store("a", "b", "a", "c", "b")
    link = _joined(world, replica)
    _fail_over(world, 3)
    link.run()
    assert link.receiver.connection.streams == {}, "the producer has ended the stream"
    world.write("d")
    link.passed.clear()
    link.add()
    assert _rollbacks(link.passed) == [3]
    assert brief(link.passed)[-2:] == ["marker 3..4", "set d@4"]
    assert change_log(replica.bucket) == change_log(world.bucket)
    assert documents(replica.bucket) == documents(world.bucket)
    assert (0, b"c") not in documents(replica.bucket)


@WITH_EVERY_VERSION
def test_before_the_history_window_a_copy_starts_again_from_nothing(world: World, replica: World) -> None:
    world.store("a", "b", "a", "c", "b")
    link = _joined(world, replica)
    replica.compact(KEEP_NOTHING)
    _fail_over(world, 3)
    link.run()
    world.write("d")
    link.passed.clear()
    link.add()
    assert _rollbacks(link.passed) == [3]
    assert "marker 0..4" in brief(link.passed)
    assert change_log(replica.bucket) == change_log(world.bucket)
    assert documents(replica.bucket) == documents(world.bucket)


def test_a_copy_of_another_history_starts_again_from_nothing(world: World, replica: World, tmp_path: Path) -> None:
    other = World(tmp_path / "other")
    make_replica(other, 2)
    other.set_state(dcp_streams.VBucketState.ACTIVE)
    other.store("x", "y")
    _joined(other, replica).cut()
    other.close()
    world.store("a")
    link = _joined(world, replica)
    assert _rollbacks(link.passed) == [0]
    assert change_log(replica.bucket) == change_log(world.bucket)
    assert [key for _, key in documents(replica.bucket)] == [b"a"]


def test_clients_of_the_copy_are_told_of_the_rollback(world: World, replica: World) -> None:
    world.store("a", "b", "c")
    link = _joined(world, replica)
    client = replica.consumer()
    client.stream()
    _fail_over(world, 1)
    link.run()
    link.add()
    assert client.brief() == ["end ROLLBACK"]


def test_a_copy_resumes_inside_a_snapshot_after_a_restart(world: World, replica: World) -> None:
    world.store(*(f"k{number}" for number in range(50)), value=bytes(2000))
    link = Link(world, replica)
    link.add_stream()
    while replica.high_seqno() < 10:
        link.step(5000)
        replica.commit()
    link.cut()
    held = replica.high_seqno()
    assert 10 <= held < 50
    replica.node.reopen(in_order=False)
    assert replica.high_seqno() == held
    world.write("late")
    receiver = Receiver(replica)
    receiver.open()
    receiver.send(dcp_streams.AddStream(vbucket=VBUCKET))
    (request,) = receiver.received()
    snapshot = (request.start_seqno, request.snapshot_start_seqno, request.snapshot_end_seqno)
    assert snapshot == (held, 0, 50)
    assert request.vbuuid == world.vbuuid()
    receiver.close()
    again = _joined(world, replica)
    assert _rollbacks(again.passed) == []
    assert len(of_type(again.passed, dcp_streams.StreamRequestResponse)) == 1
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_a_copy_whose_snapshot_is_not_shared_goes_back_to_where_it_began(world: World, replica: World) -> None:
    world.store("a", "b")
    link = _joined(world, replica)
    world.write(*(f"k{number}" for number in range(50)), value=bytes(2000))
    while replica.high_seqno() < 10:
        link.step(5000)
        replica.commit()
    link.cut()
    _fail_over(world, 40)
    again = _joined(world, replica)
    assert _rollbacks(again.passed) == [2]
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_what_has_not_become_durable_is_asked_for_again(world: World, replica: World) -> None:
    world.store("a", "b")
    link = _joined(world, replica)
    world.write("c", "d")
    link.step(), link.step()
    assert replica.high_seqno() == 4
    link.cut()
    replica.node.reopen(in_order=False)
    assert replica.high_seqno() == 2
    _joined(world, replica)
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_the_branch_that_is_asked_with_is_that_of_what_is_held(world: World, replica: World) -> None:
    """A producer that does not know the newest branch may share all that the copy holds."""
    world.store("a", "b")
    _joined(world, replica).cut()
    facts = replica.bucket.vbuckets.facts[0]
    newer = facts.failover_log.branch(Vbuuid(0xAAAA), at_seqno=Seqno(2))
    replica.set_failover_log(newer)
    link = _joined(world, replica)
    assert _rollbacks(link.passed) == []


# --- a producer that asks too much --------------------------------------------------------------------------------


def _asked(replica: World) -> tuple[Receiver, dcp_streams.StreamRequest]:
    receiver = Receiver(replica)
    receiver.open()
    receiver.send(dcp_streams.AddStream(vbucket=VBUCKET, opaque=3))
    (request,) = receiver.received()
    assert isinstance(request, dcp_streams.StreamRequest)
    return receiver, request


def _demand(receiver: Receiver, request: dcp_streams.StreamRequest, seqno: int) -> list[Message]:
    answer = dcp_streams.StreamRequestResponse(
        opaque=request.opaque, status=Status.ROLLBACK, rollback_seqno=Seqno(seqno)
    )
    receiver.send(answer)
    return receiver.received()


@WITH_EVERY_VERSION
def test_rollback_again_and_again(world: World, replica: World) -> None:
    world.store("a", "b", "c", "d")
    _joined(world, replica).cut()
    receiver, request = _asked(replica)
    for seqno in (3, 2, 1, 0):
        (request,) = _demand(receiver, request, seqno)
        assert (request.start_seqno, request.snapshot_start_seqno, request.snapshot_end_seqno) == (seqno,) * 3
        assert replica.high_seqno() == seqno
    assert request.vbuuid == 0, "it has nothing left that a branch could be about"
    log = (FailoverEntry(vbuuid=Vbuuid(5), seqno=Seqno(0)),)
    receiver.send(dcp_streams.StreamRequestResponse(opaque=request.opaque, failover_log=log))
    (answer,) = receiver.received()
    assert isinstance(answer, dcp_streams.AddStreamResponse)
    facts = replica.bucket.vbuckets.facts[0]
    assert facts.failover_log == FailoverLog(log)


@pytest.mark.parametrize("seqno", [2, 9])
def test_a_rollback_that_leads_nowhere_is_the_last(world: World, replica: World, seqno: int) -> None:
    world.store("a", "b")
    _joined(world, replica).cut()
    receiver, request = _asked(replica)
    (answer,) = _demand(receiver, request, seqno)
    assert (answer.opaque, answer.status) == (3, Status.ROLLBACK)
    assert replica.high_seqno() == 2


def test_a_producer_that_says_rollback_to_0_to_a_copy_that_holds_nothing(replica: World) -> None:
    receiver, request = _asked(replica)
    (answer,) = _demand(receiver, request, 0)
    assert answer.status == Status.ROLLBACK


def test_a_rollback_that_the_disk_refuses(world: World, replica: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store("a", "b")
    _joined(world, replica).cut()
    receiver, request = _asked(replica)

    def fail(*_: object) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(replica.bucket.engine, "write", fail)
    (answer,) = _demand(receiver, request, 1)
    assert answer.status == Status.ETMPFAIL
    assert replica.high_seqno() == 2
    assert replica.node.bucket_service.receivers == {}


def test_a_vbucket_that_became_active_is_not_rolled_back(world: World, replica: World) -> None:
    world.store("a", "b")
    _joined(world, replica).cut()
    receiver, request = _asked(replica)
    replica.set_state(dcp_streams.VBucketState.ACTIVE)
    (answer,) = _demand(receiver, request, 1)
    assert answer.status == Status.NOT_MY_VBUCKET
    assert replica.high_seqno() == 2


def test_the_purge_seqno_that_was_seen_is_told(world: World, replica: World) -> None:
    world.store("a", "b")
    _joined(world, replica).cut()
    facts = replica.bucket.vbuckets.facts[0]
    assert facts is not None
    replica.bucket.set_vbucket_facts(0, replace(facts, purge_seqno=Seqno(7)))
    _, request = _asked(replica)
    assert request.value == b'{"purge_seqno":"7"}'
