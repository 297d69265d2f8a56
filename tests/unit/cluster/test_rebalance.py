"""Takeovers that fail together are told together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headwater.cluster.nodes import NodePort
from headwater.cluster.planning import Move
from headwater.cluster.rebalance import Takeovers, joined_failures
from headwater.errors import HostUnreachable, NoAnswer, Overtaken
from headwater.protocol.cluster_config import PublishedConfig
from headwater.protocol.numbers import VBucketId

DOWN = HostUnreachable("b can't be reached: nobody listens", hint="Start it")
SILENT = NoAnswer("c has not answered", hint="Wait")


class Publisher:
    """Takes every change, and no node has to know of it."""

    async def publish(self, change: Callable[[PublishedConfig], PublishedConfig]) -> None:
        await asyncio.sleep(0)


def port_of(name: str) -> NodePort:
    raise {"b": DOWN, "c": SILENT}[name]


def move(vbucket: int, source: str) -> Move:
    return Move(vbucket=VBucketId(vbucket), source=source, before=(source,), after=("a",))


def test_all_that_went_wrong_is_told_and_of_which_vbuckets() -> None:
    takeovers = Takeovers(Publisher(), port_of)
    with pytest.raises(HostUnreachable) as raised:
        asyncio.run(takeovers.run([move(7, "b"), move(3, "c"), move(5, "b")]))
    assert raised.value.reason == (
        "3 of 3 vbuckets were not handed over (3, 5, 7): b can't be reached: nobody listens; c has not answered"
    )
    assert raised.value.hint == "Start it"


def test_how_many_there_were() -> None:
    told = joined_failures({VBucketId(9): SILENT}, of=8)
    assert str(told) == "1 of 8 vbuckets were not handed over (9): c has not answered. Wait"


@pytest.mark.parametrize("cause", [Overtaken("a", revision=4), KeyError("a fault of ours"), asyncio.CancelledError()])
def test_what_the_others_come_from_is_told_as_it_is(cause: BaseException) -> None:
    assert joined_failures({VBucketId(1): DOWN, VBucketId(2): cause}, of=2) is cause
