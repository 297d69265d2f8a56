"""What a node tells of its copies, by which a failover chooses: up to where one is whole, and on which branch."""

from __future__ import annotations

import pytest
from kv_harness import Client, Node
from test_statistics import statistics

from headwater.cluster.planning import Copy, most_advanced
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId, Vbuuid
from headwater.store.receiving import begin_snapshot, receive_change, take_failover_log

VB = VBucketId(1)
OLD, NEW = FailoverEntry(vbuuid=Vbuuid(11), seqno=Seqno(0)), FailoverEntry(vbuuid=Vbuuid(22), seqno=Seqno(4))


@pytest.fixture
def replica(node: Node) -> Node:
    node.bucket.set_vbucket_state(VB, VBucketState.REPLICA)
    return node


def receive(node: Node, *seqnos: int, start: int, end: int, has_history: bool) -> None:
    begin_snapshot(node.bucket, VB, start=Seqno(start), end=Seqno(end), has_history=has_history)
    for seqno in seqnos:
        change = Mutation(
            vbucket=VB, seqno=Seqno(seqno), rev_seqno=1, collection_id=CollectionId(0), key=b"%d" % seqno, value=b"{}"
        )
        receive_change(node.bucket, VB, change, end_seqno=Seqno(end))
    node.commit()


def told(client: Client) -> tuple[str, int, tuple[int, ...]]:
    state, seqno, branches = statistics(client, b"headwater-copies")[f"vb_{VB}"].split(" ")
    return state, int(seqno), tuple(int(branch) for branch in branches.split(","))


def test_a_copy_inside_of_a_deduplicated_snapshot_is_whole_up_to_its_start(replica: Node, client: Client) -> None:
    take_failover_log(replica.bucket, VB, (OLD,))
    receive(replica, 1, 2, start=0, end=2, has_history=False)
    assert told(client) == ("replica", 2, (11,))
    # Older versions of what comes at 9 are gone with the snapshot, and it has not come.
    receive(replica, 5, 7, start=2, end=9, has_history=False)
    assert told(client) == ("replica", 2, (11,))
    receive(replica, 9, start=7, end=9, has_history=False)
    assert told(client) == ("replica", 9, (11,))


def test_inside_of_a_snapshot_with_every_version_it_is_whole(replica: Node, client: Client) -> None:
    receive(replica, 1, 2, start=0, end=9, has_history=True)
    assert told(client)[1] == 2


def test_a_copy_is_on_no_branch_that_begins_behind_what_it_holds(replica: Node, client: Client) -> None:
    take_failover_log(replica.bucket, VB, (NEW, OLD))
    receive(replica, 1, 2, start=0, end=2, has_history=True)
    assert told(client) == ("replica", 2, (11,))
    receive(replica, 5, start=2, end=5, has_history=True)
    assert told(client) == ("replica", 5, (22, 11))


def test_an_active_vbucket_is_whole(replica: Node, client: Client) -> None:
    take_failover_log(replica.bucket, VB, (OLD,))
    receive(replica, 5, start=0, end=9, has_history=False)
    replica.bucket.set_vbucket_state(VB, VBucketState.ACTIVE)
    replica.commit()
    assert told(client)[:2] == ("active", 5)


def test_a_failover_takes_the_copy_that_is_whole(replica: Node, client: Client) -> None:
    """One that is being built from its start knows the newest branch by name, and holds little of it."""
    take_failover_log(replica.bucket, VB, (NEW, OLD))
    receive(replica, 5, 7, start=0, end=9, has_history=False)
    _, seqno, branches = told(client)
    copies = {"built": Copy(seqno=Seqno(seqno), branches=branches), "old": Copy(seqno=Seqno(3), branches=(11,))}
    assert most_advanced(["built", "old"], copies) == "old"
