"""Which consumers may go on, and to where the others have to go back (`protocol.md`, rollback)."""

from __future__ import annotations

from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.messages.dcp_streams import StreamFlags, StreamRequestResponse
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.status import Status
from headwater.store.settling import roll_back
from support.dcp_world import PURGE_ALL, VBUCKET, World, resume

OLD, NEW = Vbuuid(0xAAAA), Vbuuid(0xBBBB)


def _answer(world: World, **fields: object) -> int | None:
    """The seqno to roll back to, or None where the stream is opened."""
    answer = world.consumer(enable_noop="true").request(**fields)
    assert isinstance(answer, StreamRequestResponse), answer
    if answer.status == Status.ROLLBACK:
        return answer.rollback_seqno
    assert answer.status == Status.SUCCESS
    return None


def test_a_consumer_with_nothing_has_nothing_to_roll_back(world: World) -> None:
    world.write("a")
    assert _answer(world) is None
    assert _answer(world, vbuuid=0xDEAD) is None
    assert _answer(world, vbuuid=0xDEAD, flags=StreamFlags.STRICT_VBUUID) == 0


def test_a_consumer_goes_back_to_where_its_branch_is_shared(world: World) -> None:
    """The two failover scenarios: the branch ends before the consumer's snapshot, or inside of it."""
    world.store(*(f"k{number}" for number in range(20)))
    world.set_failover_log(
        FailoverLog((FailoverEntry(vbuuid=NEW, seqno=Seqno(10)), FailoverEntry(vbuuid=OLD, seqno=Seqno(0))))
    )
    assert _answer(world, start_seqno=15, vbuuid=OLD, snapshot_start_seqno=12, snapshot_end_seqno=16) == 10
    assert _answer(world, start_seqno=9, vbuuid=OLD, snapshot_start_seqno=5, snapshot_end_seqno=14) == 5
    assert _answer(world, start_seqno=10, vbuuid=OLD) is None
    assert _answer(world, start_seqno=15, vbuuid=NEW) is None


def test_after_the_rollback_the_consumer_is_served(world: World) -> None:
    world.write("a", "b", "c")
    consumer = world.consumer()
    old = world.vbuuid()
    roll_back(world.bucket, VBUCKET, Seqno(1), branch=True)
    world.write("x")
    answer = consumer.request(start_seqno=3, vbuuid=old)
    assert (answer.status, answer.rollback_seqno) == (Status.ROLLBACK, 1)
    assert consumer.stream(start_seqno=1, vbuuid=old)[-1] == "set x@2"


def test_a_rollback_answer_opens_no_stream(world: World) -> None:
    world.write("a")
    consumer = world.consumer()
    consumer.request(start_seqno=1, vbuuid=0xDEAD)
    assert consumer.received() == []
    assert consumer.close_stream() == Status.KEY_ENOENT


# --- purged deletions ---------------------------------------------------------------------------------------------


def _purged(world: World) -> int:
    """A vbucket with purged deletions. Returns the purge seqno."""
    world.store("a", "b", "c")
    world.remove("a")
    world.remove("b")
    world.store("d")
    world.node.clock.advance(10)
    world.compact(PURGE_ALL)
    assert world.purge_seqno() == 5
    return world.purge_seqno()


def test_rollback_after_purge_unless_the_purge_seqno_is_the_same(world: World) -> None:
    purge_seqno = _purged(world)
    assert _answer(world, **resume(world, purge_seqno - 1)) == 0
    for known, expected in ((purge_seqno, None), (purge_seqno - 2, 0)):
        value = b'{"purge_seqno":"%d"}' % known
        assert _answer(world, **resume(world, purge_seqno - 1, value=value)) == expected


def _slow_while_purged(world: World, **fields: object) -> list[str]:
    """What comes of a stream that had "a" and not its deletion when that was purged."""
    world.store("a")
    consumer = world.consumer()
    consumer.stream(**fields)
    world.remove("a")
    world.store("b")
    world.node.clock.advance(10)
    world.compact(PURGE_ALL)
    assert world.purge_seqno() == 2
    return consumer.brief()


def test_a_stream_that_has_not_sent_a_deletion_when_it_is_purged_ends(world: World) -> None:
    assert _slow_while_purged(world) == ["end ROLLBACK"]
    assert _answer(world, **resume(world, 1)) == 0


def test_a_stream_that_ignores_purged_tombstones_goes_on(world: World) -> None:
    lines = _slow_while_purged(world, flags=StreamFlags.IGNORE_PURGED_TOMBSTONES)
    assert lines == ["marker 2..3", "set b@3"]


def test_a_stream_that_has_sent_the_deletion_before_it_is_purged_goes_on(world: World) -> None:
    world.store("a")
    world.remove("a")
    world.store("b")
    consumer = world.consumer()
    consumer.stream()
    world.node.clock.advance(10)
    world.compact(PURGE_ALL)
    world.write("c")
    assert consumer.brief() == ["marker 4..4", "set c@4"]
