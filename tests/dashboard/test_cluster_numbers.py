"""What a dashboard makes of what other nodes tell: lags that are none of the clock's, and nodes that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from headwater.errors import HeadwaterError, MalformedMessage, NoAnswer
from headwater.node.history import BucketHistory
from headwater.node.http.dashboard.samples import UNKNOWN, ClusterNumbers, Counts, SentTo, VBucketNumbers
from headwater.node.replication.peers import PeerStatistics
from headwater.protocol.messages.dcp_streams import VBucketState
from support.store_harness import new_bucket

A, R, P, D = VBucketState.ACTIVE, VBucketState.REPLICA, VBucketState.PENDING, VBucketState.DEAD
VBUCKETS = 4


def counts(*numbers: int) -> Counts:
    return np.array(numbers, dtype=np.int64)


def numbers(states: Counts, seqnos: Counts, *, stream_lags: Counts | None = None) -> VBucketNumbers:
    nothing = counts(*(0 for _ in states))
    return VBucketNumbers(
        states=states,
        documents=nothing,
        seqnos=seqnos,
        stream_lags=nothing if stream_lags is None else stream_lags,
        is_held=False,
    )


class Neighbours:
    """A node with a real bucket, and other nodes that answer what a test says."""

    def __init__(self, states: Counts, seqnos: Counts) -> None:
        self.bucket = new_bucket(vbuckets=VBUCKETS, state=None)
        for vbucket, state in enumerate(states.tolist()):
            self.bucket.set_vbucket_state(vbucket, VBucketState(state))
        self.bucket.commit_now()
        self.set_seqnos(seqnos)
        self.answers: dict[str, Callable[[], Awaitable[VBucketNumbers]]] = {}
        self.asked = 0

    def set_seqnos(self, seqnos: Counts) -> None:
        self.bucket.numbers.durable_seqnos[:] = seqnos.astype(np.uint64)

    def names(self) -> list[str]:
        return list(self.answers)

    async def ask(self, node: str, group: str) -> Mapping[str, str]:
        assert group == "headwater-vbuckets"
        self.asked += 1
        return dict((await self.answers[node]()).encode())


def answering(told: VBucketNumbers) -> Callable[[], Awaitable[VBucketNumbers]]:
    async def answer() -> VBucketNumbers:
        return told

    return answer


async def silence() -> VBucketNumbers:
    raise NoAnswer("it says nothing")


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1000

    def __call__(self) -> int:
        return self.now_ms


class Noted:
    """A history that keeps the sentences about nodes."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def noted_node(self, text: str, *, node: str) -> None:
        self.events.append(text)

    def heard(self, *, states: object, seqnos: object) -> None:
        pass


def watch(node: Neighbours, events: list[str] | None = None, clock: Clock | None = None) -> ClusterNumbers:
    history = Noted([] if events is None else events)
    return ClusterNumbers(
        node.bucket, cast(PeerStatistics, node), now_ms=clock or Clock(), history=cast(BucketHistory, history)
    )


async def ask(cluster: ClusterNumbers) -> None:
    cluster.ask()
    await asyncio.gather(*cluster._asking.values())


# --- how they travel ----------------------------------------------------------------------------------------------


def test_numbers_arrive_as_they_were_sent() -> None:
    connections = (SentTo("to-search", 3, 2**40, 0.5), SentTo("land:é", 1, 0, 7))
    plain = numbers(counts(A, R, P, 0), counts(1, 2**40, 3, 0), stream_lags=counts(9, 0, 0, 0))
    sent = replace(plain, connections=connections)
    got = VBucketNumbers.decode(dict(sent.encode()), vbuckets=VBUCKETS)
    assert [one.tolist() for one in (got.states, got.seqnos, got.stream_lags)] == [
        one.tolist() for one in (sent.states, sent.seqnos, sent.stream_lags)
    ]
    assert got.connections == connections
    earlier = {name: text for name, text in plain.encode() if name != "connections"}
    assert VBucketNumbers.decode(earlier, vbuckets=VBUCKETS).connections == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"states": "1,1,1"},
        {"seqnos": ""},
        {"seqnos": "1,2,x,4"},
        {"documents": f"1,2,3,{2**70}"},
        {"states": None},
        {"connections": "[[1, 2, 3, 4]]"},
        {"connections": "7"},
        {"connections": "["},
    ],
)
def test_numbers_that_can_not_be_are_refused(changed: dict[str, str | None]) -> None:
    told = dict(numbers(counts(A, A, A, A), counts(1, 2, 3, 4)).encode()) | changed
    with pytest.raises(MalformedMessage):
        VBucketNumbers.decode({name: text for name, text in told.items() if text is not None}, vbuckets=VBUCKETS)


# --- lags ---------------------------------------------------------------------------------------------------------


async def test_a_copy_is_behind_by_what_its_active_one_has_more() -> None:
    node = Neighbours(states=counts(A, A, R, R), seqnos=counts(10, 20, 30, 40))
    node.answers["other"] = answering(
        numbers(counts(R, P, A, A), counts(7, 20, 35, 40), stream_lags=counts(0, 0, 2, 0))
    )
    cluster = watch(node)
    await ask(cluster)
    assert cluster.lags(counts(1, 0, 0, 0)).tolist() == [1, 0, 5, 0]
    rows = cluster.rows_of(cluster.peers["other"])
    assert rows[:, 3].tolist() == [3, 0, 2, 0]


async def test_what_is_written_while_a_node_is_asked_is_no_lag() -> None:
    """The copies are as of the answer; what the active ones have got since the question is nothing that they lack."""
    node = Neighbours(states=counts(A, A, A, A), seqnos=counts(10, 10, 10, 10))

    async def late() -> VBucketNumbers:
        node.set_seqnos(counts(500, 500, 500, 500))
        return numbers(counts(R, R, R, R), counts(10, 12, 9, 0))

    node.answers["other"] = late
    cluster = watch(node)
    await ask(cluster)
    node.set_seqnos(counts(900, 900, 900, 900))
    rows = cluster.rows_of(cluster.peers["other"])
    assert rows[:, 3].tolist() == [0, 0, 1, 10]


async def test_between_two_other_nodes_a_copy_is_compared_with_what_the_third_has() -> None:
    node = Neighbours(states=counts(D, D, D, D), seqnos=counts(99, 99, 99, 99))
    node.answers["one"] = answering(numbers(counts(A, A, R, R), counts(5, 5, 5, 5)))
    node.answers["two"] = answering(numbers(counts(R, R, A, A), counts(4, 5, 6, 9)))
    cluster = watch(node)
    await ask(cluster)
    one, two = (cluster.rows_of(peer) for peer in cluster.peers.values())
    assert (one[2:, 3].tolist(), two[:2, 3].tolist()) == ([1, 4], [1, 0])


# --- nodes that do not answer -------------------------------------------------------------------------------------


async def test_of_a_node_that_does_not_answer_the_last_is_kept_and_lags_behind_it_are_not_known() -> None:
    events: list[str] = []
    clock = Clock()
    node = Neighbours(states=counts(A, A, R, R), seqnos=counts(10, 20, 30, 40))
    node.answers["other"] = answering(numbers(counts(R, R, A, A), counts(10, 20, 35, 40)))
    cluster = watch(node, events, clock)
    await ask(cluster)
    node.answers["other"] = silence
    for _ in range(3):
        clock.now_ms += 1000
        await ask(cluster)
    peer = cluster.peers["other"]
    assert (peer.error, peer.heard_ms) == ("it says nothing", 1000)
    assert cluster.rows_of(peer)[:, 3].tolist() == [UNKNOWN, UNKNOWN, 0, 0], "its copies may be gone"
    assert cluster.unreachable() == []
    clock.now_ms += 1
    assert cluster.unreachable() == [peer]
    assert cluster.lags(counts(0, 0, 0, 0)).tolist() == [0, 0, UNKNOWN, UNKNOWN]
    node.answers["other"] = answering(numbers(counts(R, R, A, A), counts(10, 20, 35, 40)))
    await ask(cluster)
    assert (peer.error, peer.heard_ms) == (None, 4001)
    assert events == ["node other does not answer", "node other answers again"]


async def test_one_that_is_slow_keeps_nobody_waiting_and_is_not_asked_twice() -> None:
    node = Neighbours(states=counts(A, A, A, A), seqnos=counts(1, 1, 1, 1))
    done = asyncio.Event()

    async def slow() -> VBucketNumbers:
        await done.wait()
        raise HeadwaterError("too late")

    node.answers["slow"] = slow
    node.answers["fast"] = answering(numbers(counts(R, R, R, R), counts(1, 1, 1, 1)))
    cluster = watch(node)
    for _ in range(3):
        cluster.ask()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert node.asked == 1 + 3
    assert cluster.peers["fast"].is_heard
    done.set()
    await asyncio.gather(*cluster._asking.values())
    assert cluster.peers["slow"].error == "too late"


async def test_a_node_that_has_left_is_forgotten() -> None:
    node = Neighbours(states=counts(A, A, A, A), seqnos=counts(1, 1, 1, 1))
    node.answers["other"] = silence
    cluster = watch(node)
    await ask(cluster)
    node.answers.clear()
    cluster.ask()
    assert cluster.peers == {}


async def test_a_tick_waits_a_moment_for_those_that_use_to_answer_and_not_for_others() -> None:
    node = Neighbours(states=counts(A, A, A, A), seqnos=counts(1, 1, 1, 1))
    is_over = asyncio.Event()

    async def later() -> VBucketNumbers:
        for _ in range(5):
            await asyncio.sleep(0)
        return numbers(counts(R, R, R, R), counts(2, 2, 2, 2))

    async def never() -> VBucketNumbers:
        await is_over.wait()
        raise HeadwaterError("too late")

    node.answers["usual"] = answering(numbers(counts(R, R, R, R), counts(1, 1, 1, 1)))
    cluster = watch(node)
    await ask(cluster)
    node.answers |= {"usual": later, "silent": never}
    cluster.ask()
    # That of the silent one would never come.
    await cluster.wait_for_answers(within_s=3600)
    told = cluster.peers["usual"].numbers
    assert told.seqnos.tolist() == [2, 2, 2, 2]
    is_over.set()
    await asyncio.gather(*cluster._asking.values())
