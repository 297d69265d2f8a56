"""What a branch of history has lost: counted from evidence, unknown without it, and kept over restarts."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.node.history import EVENTS_MAX, GATHER_MS, BucketHistory, Kind
from headwater.protocol.messages.dcp_streams import Open, StreamRequest, StreamRequestResponse, VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from support.kv_harness import Client, Node
from support.store_harness import Clock, new_bucket, put, reopened

VBUCKETS = 4
ONE, TWO = VBucketId(1), VBucketId(2)
ACTIVE = np.full(VBUCKETS, VBucketState.ACTIVE, dtype=np.int64)


class World:
    """A bucket of copies, with a clock that a test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.bucket = new_bucket(clock=self.clock, vbuckets=VBUCKETS)
        for vbucket in range(VBUCKETS):
            for key in (b"a", b"b", b"c"):
                put(self.bucket, vbucket, key)
            self.bucket.set_vbucket_state(vbucket, VBucketState.REPLICA)
        self.bucket.commit_now()
        self.history = BucketHistory(self.bucket)

    def promote(self, vbucket: VBucketId, node: str = "two:11210") -> Vbuuid:
        """Returns the branch that ended."""
        before = self.bucket.vbuckets.facts[vbucket]
        self.bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
        self.history.promoted(vbucket, kept=Seqno(3), before=before, node=node)
        return before.failover_log.newest.vbuuid

    def hear(self, *seqnos: int) -> None:
        self.history.heard(states=ACTIVE, seqnos=np.array(seqnos, dtype=np.int64))

    def restart(self, *, in_order: bool = True) -> BucketHistory:
        self.bucket.put_rows(self.history.take_rows())
        self.bucket.commit_now()
        again = reopened(self.bucket)
        again.was_stopped_in_order = in_order
        return BucketHistory(again)


@pytest.fixture
def world() -> World:
    return World()


def sentences(history: BucketHistory) -> list[str]:
    return [event.sentence() for event in history.events]


def test_without_evidence_the_loss_is_unknown(world: World) -> None:
    world.promote(ONE)
    world.promote(TWO)
    assert sentences(world.history) == ["failover of two:11210: 2 vbuckets promoted, what was lost is unknown"]
    assert world.history.unknown_vbuckets == 2


def test_what_the_lost_node_last_had_is_the_measure(world: World) -> None:
    world.hear(3, 8, 3, 3)
    world.promote(ONE)
    world.promote(TWO)
    assert sentences(world.history) == [
        "failover of two:11210: 2 vbuckets promoted, at least 5 changes of 1 vbucket lost"
    ]
    assert (world.history.totals.lost_changes, world.history.totals.rolled_back) == (5, 1)
    assert {vbucket: branch.lost for vbucket, branch in world.history.newest_failovers().items()} == {1: 5, 2: 0}


def test_a_node_that_had_no_more_is_no_proof_that_nothing_was_lost(world: World) -> None:
    world.hear(3, 3, 3, 3)
    world.clock.advance(4_000 / 1000)
    world.promote(ONE)
    assert sentences(world.history) == [
        "failover of two:11210: 1 vbucket promoted, no lost change is known, 4 s after it was last heard"
    ]


def test_what_a_consumer_claims_is_shown_and_is_no_loss(world: World) -> None:
    """Whoever may stream could ask with any seqno, and have the node report billions of lost changes."""
    old = world.promote(ONE)
    revision = world.history.revision
    world.history.asked(ONE, vbuuid=old, seqno=Seqno(7))
    world.history.asked(ONE, vbuuid=old, seqno=Seqno(5))
    unknown = "failover of two:11210: 1 vbucket promoted, what was lost is unknown"
    assert sentences(world.history) == [
        f"{unknown}, consumers claim to have had 4 changes more; consumers rolled back 2 times"
    ]
    assert world.history.after(revision) == world.history.events, "viewers are not sent what was learned"
    assert (world.history.unknown_vbuckets, world.history.totals.lost_changes) == (1, 0)
    world.history.asked(ONE, vbuuid=old, seqno=Seqno(6), by_node=True)
    assert (
        "at least 3 changes of 1 vbucket lost, consumers claim to have had 1 change more" in sentences(world.history)[0]
    )


@pytest.mark.parametrize("seqno", [2, 3, 2**62], ids=["what was kept", "all that was kept", "no offset of a reader"])
def test_a_consumer_that_shows_no_loss_leaves_it_unknown(world: World, seqno: int) -> None:
    """It is sent back for another reason, such as deletions that were purged; or it makes its offset up."""
    old = world.promote(ONE)
    world.history.asked(ONE, vbuuid=old, seqno=Seqno(seqno))
    assert (world.history.unknown_vbuckets, world.history.totals.lost_changes) == (1, 0)
    assert "what was lost is unknown" in sentences(world.history)[0]


def test_the_lost_node_itself_says_what_it_had_when_it_comes_back(world: World) -> None:
    old = world.promote(ONE)
    world.history.asked(ONE, vbuuid=old, seqno=Seqno(10), by_node=True)
    assert sentences(world.history) == [
        "failover of two:11210: 1 vbucket promoted, at least 7 changes of 1 vbucket lost"
    ], "a copy is no consumer"


def test_a_consumer_of_no_branch_that_is_remembered_is_an_event_of_its_own(world: World) -> None:
    world.promote(ONE)
    world.history.asked(ONE, vbuuid=Vbuuid(4711), seqno=Seqno(900))
    assert [event.kind for event in world.history.events] == [Kind.FAILOVER, Kind.ANSWERED]
    assert world.history.totals.lost_changes == 0


def test_the_same_a_while_later_is_another_event(world: World) -> None:
    world.promote(ONE)
    world.clock.advance((GATHER_MS + 1) / 1000)
    world.promote(TWO)
    world.promote(VBucketId(3), node="three:11210")
    assert [(event.node, event.count) for event in world.history.events] == [
        ("two:11210", 1), ("two:11210", 1), ("three:11210", 1),
    ]  # fmt: skip


def test_a_rebalance_is_one_event_of_each_kind(world: World) -> None:
    for vbucket in range(VBUCKETS):
        world.history.changed_states("active", "dead", [vbucket])
        world.history.taken_over(VBucketId(vbucket), node="two:11210")
        world.history.changed_states("dead", "replica", [vbucket])
        world.clock.advance(GATHER_MS / 2000)
    assert sentences(world.history) == [
        "vbuckets changed their state: 4 active → dead, 4 dead → replica",
        "4 vbuckets taken over from two:11210, with all changes",
    ]
    assert [event.count for event in world.history.events] == [VBUCKETS, VBUCKETS]


def test_a_drill_on_one_vbucket_twice_is_two_events(world: World) -> None:
    for kept, had in ((1, 3), (0, 1)):
        world.history.rolled_back(ONE, kept=Seqno(kept), had=Seqno(had), is_drill=True)
    assert sentences(world.history) == [
        "drill: 1 vbucket rolled back, 2 changes of 1 vbucket lost",
        "drill: 1 vbucket rolled back, 1 change of 1 vbucket lost",
    ]


def test_everything_is_there_after_a_restart(world: World) -> None:
    world.hear(3, 8, 3, 3)
    old = world.promote(ONE)
    world.bucket.commit_now()
    again = world.restart()
    assert sentences(again) == sentences(world.history)
    assert again.totals == world.history.totals
    again.asked(ONE, vbuuid=old, seqno=Seqno(9), by_node=True)
    assert again.totals.lost_changes == 6, "a copy that comes after the restart is not matched with its branch"


def test_a_crash_is_an_event(world: World) -> None:
    world.bucket.set_vbucket_state(ONE, VBucketState.ACTIVE)
    world.bucket.commit_now()
    (sentence,) = sentences(world.restart(in_order=False))
    assert sentence == (
        "started after a crash, or from a copy of the data: 1 vbucket began a branch, "
        "only what was not durable, or is newer than the copy, is lost"
    )


def test_the_events_of_a_cluster_begin_with_its_forming(world: World) -> None:
    world.history.changed_nodes(None, ["one", "two"], has_vbuckets=True)
    world.history.changed_states("active", "dead", [ONE])
    world.clock.advance(GATHER_MS / 1000 + 1)
    world.history.changed_states("dead", "replica", [ONE])
    world.history.changed_nodes(["one", "two"], ["two", "six"], has_vbuckets=True)
    assert sentences(world.history) == [
        "the cluster was formed of 2 nodes: one, two",
        "vbuckets changed their state: 1 dead → replica",
        "node six joined the cluster",
        "node one is out of the cluster",
    ]


def test_old_events_go_from_memory_and_from_disk(world: World) -> None:
    for number in range(EVENTS_MAX + 5):
        world.history.noted_node(f"node two does not answer ({number})", node="two")
    again = world.restart()
    assert [event.number for event in again.events] == list(range(6, EVENTS_MAX + 6))


def test_a_loss_that_is_unknown_stays_so_when_its_event_is_forgotten(world: World) -> None:
    world.promote(ONE)
    for number in range(EVENTS_MAX):
        world.history.noted_node(f"node two does not answer ({number})", node="two")
    assert world.history.events[0].kind is Kind.FAILOVER, "what is of less matter is forgotten first"
    for _ in range(EVENTS_MAX):
        world.history.rolled_back(TWO, kept=Seqno(3), had=Seqno(3), is_drill=True)
    assert Kind.FAILOVER not in {event.kind for event in world.history.events}
    assert world.restart().unknown_vbuckets == 1


def test_the_handlers_report_a_promotion_and_who_has_more(node: Node, client: Client) -> None:
    """From the requests of a coordinator and of a consumer to the sentence."""
    for key in (b"a", b"b"):
        client.succeed(Set(vbucket=ONE, key=key, value=b"1"))
    facts = node.bucket.vbuckets.facts[ONE]
    assert facts is not None
    for state in (VBucketState.REPLICA, VBucketState.ACTIVE):
        client.succeed(SetVBucket(vbucket=ONE, state=state))
    request = StreamRequest(
        vbucket=ONE, start_seqno=Seqno(5), vbuuid=facts.failover_log.newest.vbuuid,
        snapshot_start_seqno=Seqno(4), snapshot_end_seqno=Seqno(9),
    )  # fmt: skip
    for name, lost, claimed in ((b"ahead", 0, 7), (b"replication:two->one:default", 7, 0)):
        consumer = node.client()
        consumer.succeed(Open(key=name))
        answer = consumer.call(request)
        assert isinstance(answer, StreamRequestResponse)
        assert answer.status == Status.ROLLBACK
        (event,) = node.bucket_service.history.events
        assert (event.kind, event.answers) == (Kind.FAILOVER, 1)
        assert (event.lost_changes, event.claimed_changes) == (lost, claimed)
