"""What a newer config makes of the vbuckets of a node, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.node.membership import apply_config, replicated
from headwater.node.service import BucketService
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.receiving import begin_snapshot
from support.cases import case
from support.store_harness import new_bucket, put

HERE, OTHER, THIRD, NO_NODE = 0, 1, 2, -1
NODES = tuple(NodeAddress(host="127.0.0.1", kv_port=port) for port in (1000, 2000, 3000))
ACTIVE, REPLICA, PENDING, DEAD = VBucketState


def a_bucket(state: VBucketState | None) -> BucketService:
    bucket = new_bucket(vbuckets=1, state=None if state is None else ACTIVE)
    if state is not None:
        put(bucket, 0, b"a")
        bucket.set_vbucket_state(0, state)
    bucket.commit_now()
    return BucketService(bucket=bucket)


def config(row: tuple[int, int], **parts: Any) -> PublishedConfig:
    return PublishedConfig(
        **{"revision": 1, "bucket": "default", "uuid": "ab", "nodes": NODES, "replicas": 1, "rows": (row,), **parts}
    )


# Its active node: the config reports a promotion, and makes none.
@case(ACTIVE, (HERE, OTHER), {}, ACTIVE, False)
@case(REPLICA, (HERE, OTHER), {}, REPLICA, False)
@case(None, (HERE, OTHER), {}, None, False)
# A replica.
@case(None, (OTHER, HERE), {}, REPLICA, False)
@case(REPLICA, (OTHER, HERE), {}, REPLICA, False)
@case(ACTIVE, (OTHER, HERE), {}, REPLICA, False)
@case(DEAD, (OTHER, HERE), {}, REPLICA, False)
@case(PENDING, (OTHER, HERE), {}, REPLICA, False)
# No other node is active, so this one is not demoted.
@case(ACTIVE, (NO_NODE, HERE), {}, ACTIVE, False)
# Building.
@case(None, (OTHER, THIRD), {"building": {0: (HERE,)}}, REPLICA, False)
@case(DEAD, (OTHER, THIRD), {"building": {0: (HERE,)}}, REPLICA, False)
# Neither: it goes once the config is settled.
@case(ACTIVE, (OTHER, THIRD), {}, DEAD, False)
@case(REPLICA, (OTHER, THIRD), {}, REPLICA, False)
@case(REPLICA, (OTHER, THIRD), {"settled": True}, REPLICA, True)
@case(ACTIVE, (OTHER, THIRD), {"settled": True}, DEAD, True)
@case(ACTIVE, (NO_NODE, NO_NODE), {"settled": True}, ACTIVE, False)
# On its way: the takeover decides.
@case(ACTIVE, (OTHER, THIRD), {"handing_over": {0: HERE}}, ACTIVE, False)
@case(PENDING, (OTHER, THIRD), {"handing_over": {0: HERE}}, PENDING, False)
@case(DEAD, (HERE, OTHER), {"handing_over": {0: OTHER}}, DEAD, False)
@case(None, (OTHER, THIRD), {"handing_over": {0: HERE}}, REPLICA, False)
def test_states(
    state: VBucketState | None,
    row: tuple[int, int],
    parts: dict[str, Any],
    after: VBucketState | None,
    is_removed: bool,
) -> None:
    service = a_bucket(state)
    surplus = apply_config(service, config(row, **parts), HERE)
    assert service.bucket.vbuckets.state(0) == after
    assert surplus == ([0] if is_removed else [])


@pytest.mark.parametrize(("state", "after"), [(ACTIVE, DEAD), (PENDING, DEAD), (REPLICA, REPLICA), (None, None)])
def test_a_removed_node_takes_no_writes_and_keeps_data(state: VBucketState | None, after: VBucketState | None) -> None:
    service = a_bucket(state)
    assert apply_config(service, config((OTHER, THIRD), settled=True), None) == []
    assert service.bucket.vbuckets.state(0) == after


def test_an_active_copy_that_is_demoted_has_everything_it_has() -> None:
    service = a_bucket(ACTIVE)
    apply_config(service, config((OTHER, HERE)), HERE)
    facts = service.bucket.vbuckets.facts[0]
    assert (facts.snapshot_start_seqno, facts.snapshot_end_seqno) == (1, 1)
    assert facts.topology is None


def test_the_active_copy_knows_its_chain() -> None:
    service = a_bucket(ACTIVE)
    apply_config(service, config((HERE, NO_NODE)), HERE)
    facts = service.bucket.vbuckets.facts[0]
    assert facts.topology == (["127.0.0.1:1000", None],)


def test_durable_writes_wait_while_a_vbucket_is_handed_over() -> None:
    service = a_bucket(REPLICA)
    apply_config(service, config((OTHER, HERE), handing_over={0: HERE}), HERE)
    service.bucket.set_vbucket_state(0, ACTIVE)
    facts = service.bucket.vbuckets.facts[0]
    assert facts.topology == (["127.0.0.1:1000", "127.0.0.1:2000"],), "a majority needs the node that is dead by now"


@case(REPLICA, (OTHER, HERE), {}, {OTHER: [0]})
@case(REPLICA, (OTHER, THIRD), {"building": {0: (HERE,)}}, {OTHER: [0]})
@case(REPLICA, (OTHER, HERE), {"handing_over": {0: HERE}}, {})
@case(REPLICA, (HERE, OTHER), {}, {})
@case(ACTIVE, (OTHER, HERE), {}, {})
@case(REPLICA, (NO_NODE, HERE), {}, {})
@case(REPLICA, (OTHER, THIRD), {}, {})
def test_what_is_streamed(
    state: VBucketState, row: tuple[int, int], parts: dict[str, Any], sources: dict[int, list[int]]
) -> None:
    assert replicated(a_bucket(state), config(row, **parts), HERE) == sources
    assert replicated(a_bucket(state), config(row, **parts), None) == {}


def test_a_dead_copy_that_has_half_of_a_snapshot_is_not_taken_for_whole() -> None:
    """It was to take over when its node was failed over. Taken back, it has to get the rest before it may count."""
    service = a_bucket(REPLICA)
    begin_snapshot(service.bucket, 0, start=Seqno(1), end=Seqno(9), has_history=False, purge_seqno=Seqno(0))
    service.bucket.set_vbucket_state(0, PENDING)
    apply_config(service, config((OTHER, THIRD)), None)
    assert service.bucket.vbuckets.state(0) == DEAD
    apply_config(service, config((OTHER, HERE)), HERE)
    facts = service.bucket.vbuckets.facts[0]
    assert (facts.state, facts.snapshot_start_seqno, facts.snapshot_end_seqno) == (REPLICA, 1, 9)


def test_a_frozen_vbucket_stays_as_it_is_and_is_streamed_by_nobody() -> None:
    source, target = (HERE, OTHER), (OTHER, HERE)
    for state, row in ((ACTIVE, source), (DEAD, source), (PENDING, target), (ACTIVE, target)):
        service = a_bucket(state)
        before = service.bucket.vbuckets.facts[0]
        frozen = config(row, handing_over={0: row[0]})
        assert apply_config(service, frozen, HERE) == []
        assert service.bucket.vbuckets.facts[0] == before
        assert replicated(service, frozen, HERE) == {}
