"""A takeover that a newer config does not name any more: it ends where it is, and changes no state from then on."""

from __future__ import annotations

import pytest

from headwater.node.replication.vbucket_states import end_takeovers
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.status import Status
from support.dcp_world import VBUCKET, World
from support.replication_world import Link

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
