"""Failovers as a consumer sees them: what the new history lacks is taken back, and nothing of it is missed.

The story is always the same. Documents A are on every copy of a vbucket. Documents B are on the active copy alone, and
that is lost. The copy that takes over goes on with documents C. So a consumer that has read A and B has to end with A
and C.

The trap is in documents that were written in A and again in B. A consumer that reads both in one snapshot gets the
newer version alone, so it has nothing to go back to, and a server that is asked for what comes after A does not send
the older version either. The consumer has to go back to before the snapshot.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import headwater
from headwater.protocol.messages.documents import Delete, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION
from support.fault_proxy import ProxiedBucket, ProxiedNode
from support.followed_client import QUICK, READ_S_MAX, FollowedClient, row_of
from support.node_process import PASSWORD, USER
from support.oracle import ConsumerState, differences, offsets_of_json, streamed_documents

VBUCKET = 2
OTHER_VBUCKET = 1
BUCKETS = 28
"""At least as many as there are tests: each has one of its own."""
TRAPS = 5
MANY_SNAPSHOTS = 120
SNAPSHOTS = pytest.mark.parametrize("snapshots", ["complete", "as-they-come"])


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[ProxiedBucket]]:
    names = [f"story-{number}" for number in range(BUCKETS)]
    with ProxiedNode(tmp_path_factory.mktemp("failover") / "data", vbuckets=4, buckets=names) as node:
        yield (ProxiedBucket(node, name) for name in names)


class Story:
    """A bucket with one vbucket that everything is about, and what is written to it."""

    def __init__(self, bucket: ProxiedBucket) -> None:
        self.bucket = bucket
        self.expected: dict[bytes, bytes] = {}
        """What the documents have to be in the end."""
        self._connection = bucket.connect_directly()

    def close(self) -> None:
        self._connection.close()

    def keys(self, prefix: str, count: int, vbucket: int = VBUCKET) -> list[bytes]:
        """Keys of the vbucket."""
        keys = (b"%s-%d" % (prefix.encode(), number) for number in itertools.count())
        return list(itertools.islice((key for key in keys if self.bucket.vbucket_of(key) == vbucket), count))

    def put(self, keys: list[bytes], value: str) -> int:
        """Returns the seqno that the vbucket has come to."""
        for key in keys:
            self.expected[key] = json.dumps(value).encode()
            self._connection.request(Set(value=self.expected[key], **self._place(key)))
        return self.bucket.high_seqnos(self._connection)[VBUCKET]

    def delete(self, keys: list[bytes]) -> None:
        for key in keys:
            del self.expected[key]
            self._connection.request(Delete(**self._place(key)))

    def _place(self, key: bytes) -> dict[str, Any]:
        return {"collection_id": DEFAULT_COLLECTION, "key": key, "vbucket": self.bucket.vbucket_of(key)}

    # --- its parts ------------------------------------------------------------------------------------------------

    def write_a(self) -> int:
        """Returns the last seqno that all copies have."""
        self.put(self.keys("other", 3, OTHER_VBUCKET), "other")
        return self.put([key for prefix in ("a", "trap", "doomed", "shared") for key in self.keys(prefix, TRAPS)], "A")

    def write_b(self, value: str = "B") -> int:
        """What will be lost, so that it is not expected. Returns the last seqno of it."""
        expected = dict(self.expected)
        self.put([*self.keys("b", 3), *self.keys("trap", TRAPS)], value)
        self.delete(self.keys("doomed", TRAPS))
        lost_seqno = self.put(self.keys("last-of-b", 1), value)
        self.expected = expected
        return lost_seqno

    def write_c(self, value: str = "C") -> int:
        return self.put([*self.keys("c", 3), *self.keys("shared", 2)], value)

    def fail_over(self, to_seqno: int) -> int:
        """Returns the new vbuuid."""
        told = self.bucket.roll_back(VBUCKET, to_seqno)
        assert told["rolled_back_to"] == to_seqno
        return told["vbuuid"]

    # --- what a consumer makes of it ------------------------------------------------------------------------------

    def has_b(self, value: str = "B") -> Callable[[ConsumerState], bool]:
        """A condition to read until: all of B is there."""
        last = self.keys("last-of-b", 1)[0]
        return lambda state: _values(state).get(last) == json.dumps(value).encode()

    def is_as_expected(self, vbuckets: Sequence[int] | None = None) -> Callable[[ConsumerState], bool]:
        """A condition to read until: the documents of these vbuckets are what they have to be by now, no more, no less.

        A consumer that never gets there shows in its last state what it has wrong.
        """
        wanted = self._of_vbuckets(self.expected, vbuckets)
        return lambda state: self._of_vbuckets(_values(state), vbuckets) == wanted

    def _of_vbuckets(self, values: dict[bytes, bytes], vbuckets: Sequence[int] | None) -> dict[bytes, bytes]:
        return {key: value for key, value in values.items() if vbuckets is None or self._vbucket_of(key) in vbuckets}

    def _vbucket_of(self, key: bytes) -> int:
        return self.bucket.vbucket_of(key)

    def check_stored(self, state: ConsumerState) -> None:
        """A consumer of everything holds what the node holds, in the same versions."""
        assert _values(state) == self.expected
        assert not differences(state.documents(), streamed_documents(self.bucket))


def _values(state: ConsumerState) -> dict[bytes, bytes]:
    return {key: document.value for (_, key), document in state.documents().items()}


@pytest.fixture
def story(buckets: Iterator[ProxiedBucket]) -> Iterator[Story]:
    story = Story(next(buckets))
    yield story
    story.close()


def rollbacks(state: ConsumerState) -> list[tuple[int, int, int]]:
    """Of every rollback the vbucket, the seqno that is kept, and the one from which it went back."""
    return [(row["vbucket"], row["seqno"], json.loads(row["value"])["from_seqno"]) for row in state.rollbacks]


def versions_of_traps(consumer: FollowedClient, story: Story) -> int:
    """How many versions of the trap documents the consumer has been given."""
    traps = set(story.keys("trap", TRAPS))
    return sum(row["key"] in traps for row in consumer.rows)


# --- while the consumer reads -------------------------------------------------------------------------------------


@SNAPSHOTS
def test_a_failover_under_a_stream(story: Story, snapshots: str) -> None:
    shared_seqno, lost_seqno = story.write_a(), story.write_b()
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)

    async def read() -> None:
        async with consumer.reading_on() as reading:
            await consumer.reaches(story.has_b(), reading)
            assert versions_of_traps(consumer, story) == TRAPS, "the trap is set: only the newer versions were sent"
            vbuuid = story.fail_over(shared_seqno)
            story.write_c()
            await consumer.reaches(story.is_as_expected(), reading)
            assert consumer.state.rollbacks[0]["vbuuid"] == vbuuid

    asyncio.run(read())
    assert rollbacks(consumer.state) == [(VBUCKET, 0, lost_seqno)]
    story.check_stored(consumer.state)


@SNAPSHOTS
def test_a_failover_to_where_the_consumer_has_been(story: Story, snapshots: str) -> None:
    """It has read A by itself, so it can go back to just that, and what it has of A is not sent again."""
    shared_seqno = story.write_a()
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)

    async def read() -> int:
        async with consumer.reading_on() as reading:
            await consumer.reaches(story.is_as_expected(), reading)
            lost_seqno = story.write_b()
            await consumer.reaches(story.has_b(), reading)
            story.fail_over(shared_seqno)
            story.write_c()
            await consumer.reaches(story.is_as_expected(), reading)
        return lost_seqno

    lost_seqno = asyncio.run(read())
    assert rollbacks(consumer.state) == [(VBUCKET, shared_seqno, lost_seqno)]
    assert versions_of_traps(consumer, story) == 2 * TRAPS
    story.check_stored(consumer.state)


@SNAPSHOTS
def test_two_failovers_under_a_stream(story: Story, snapshots: str) -> None:
    shared_seqno = story.write_a()
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)
    lost_seqnos = []

    async def read(shared_seqno: int) -> None:
        async with consumer.reading_on() as reading:
            for number in range(2):
                lost_seqnos.append(story.write_b(f"B{number}"))
                await consumer.reaches(story.has_b(f"B{number}"), reading)
                story.fail_over(shared_seqno)
                shared_seqno = story.write_c(f"C{number}")
            await consumer.reaches(story.is_as_expected(), reading)

    asyncio.run(read(shared_seqno))
    assert [(vbucket, lost) for vbucket, _, lost in rollbacks(consumer.state)] == [(VBUCKET, n) for n in lost_seqnos]
    story.check_stored(consumer.state)


@SNAPSHOTS
def test_a_failover_to_before_the_last_one(story: Story, snapshots: str) -> None:
    """The server has forgotten the branch that the consumer is on, but both know the one before."""
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)

    async def read() -> list[int]:
        early_seqno = story.write_a()
        async with consumer.reading_on() as reading:
            await consumer.reaches(story.is_as_expected(), reading)
            expected = dict(story.expected)
            shared_seqno = story.put(story.keys("later", 3), "A")
            await consumer.reaches(story.is_as_expected(), reading)
            story.write_b()
            await consumer.reaches(story.has_b(), reading)
            story.fail_over(shared_seqno)
            story.write_c()
            await consumer.reaches(story.is_as_expected(), reading)
            story.fail_over(early_seqno)
            story.expected = expected
            story.write_c("after all")
            await consumer.reaches(story.is_as_expected(), reading)
        return [shared_seqno, early_seqno]

    kept_seqnos = asyncio.run(read())
    assert [kept for _, kept, _ in rollbacks(consumer.state)] == kept_seqnos
    story.check_stored(consumer.state)


def test_a_failover_to_long_ago(story: Story) -> None:
    """After many snapshots, more than a client remembers the ends of. It may go back further than it has to."""
    story.write_a()
    consumer = FollowedClient(story.bucket.url)

    async def read() -> tuple[int, int]:
        async with consumer.reading_on() as reading:
            for number in range(MANY_SNAPSHOTS):
                if number == MANY_SNAPSHOTS // 3:
                    expected = dict(story.expected)
                seqno = story.put(story.keys("again", 3)[number % 3 :][:1], str(number))
                if number == MANY_SNAPSHOTS // 3 - 1:
                    shared_seqno = seqno
                await consumer.reaches(story.is_as_expected(), reading)
            story.fail_over(shared_seqno)
            story.expected = expected
            story.write_c()
            await consumer.reaches(story.is_as_expected(), reading)
        return shared_seqno, seqno

    shared_seqno, lost_seqno = asyncio.run(read())
    ((vbucket, kept_seqno, from_seqno),) = rollbacks(consumer.state)
    assert (vbucket, from_seqno) == (VBUCKET, lost_seqno)
    assert 0 < kept_seqno <= shared_seqno
    story.check_stored(consumer.state)


def test_a_failover_that_takes_nothing_from_the_consumer(story: Story) -> None:
    """It has nothing that is lost: it is put on the new branch, and nothing is rolled back."""
    shared_seqno = story.write_a()
    consumer = FollowedClient(story.bucket.url)

    async def read() -> int:
        async with consumer.reading_on() as reading:
            await consumer.reaches(story.is_as_expected(), reading)
            vbuuid = story.fail_over(shared_seqno)
            story.write_c()
            await consumer.reaches(story.is_as_expected(), reading)
        return vbuuid

    vbuuid = asyncio.run(read())
    assert rollbacks(consumer.state) == []
    assert consumer.rows[-1]["vbuuid"] == vbuuid
    story.check_stored(consumer.state)


# --- while the consumer is away -----------------------------------------------------------------------------------


@SNAPSHOTS
def test_a_failover_while_the_consumer_is_away(story: Story, snapshots: str) -> None:
    shared_seqno, lost_seqno = story.write_a(), story.write_b()
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)
    assert asyncio.run(consumer.read(story.has_b()))
    assert versions_of_traps(consumer, story) == TRAPS
    story.fail_over(shared_seqno)
    story.write_c()
    assert asyncio.run(consumer.read(story.is_as_expected()))
    assert rollbacks(consumer.state) == [(VBUCKET, 0, lost_seqno)]
    story.check_stored(consumer.state)


@SNAPSHOTS
def test_a_failover_to_where_the_consumer_has_been_before_it_went_away(story: Story, snapshots: str) -> None:
    """Saved offsets tell where the last snapshot began, so it can go back to that."""
    shared_seqno = story.write_a()
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)
    assert asyncio.run(consumer.read(story.is_as_expected()))
    lost_seqno = story.write_b()
    assert asyncio.run(consumer.read(story.has_b()))
    story.fail_over(shared_seqno)
    story.write_c()
    assert asyncio.run(consumer.read(story.is_as_expected()))
    assert rollbacks(consumer.state) == [(VBUCKET, shared_seqno, lost_seqno)]
    story.check_stored(consumer.state)


@SNAPSHOTS
def test_two_failovers_while_the_consumer_is_away(story: Story, snapshots: str) -> None:
    """Of the branch between them it has never heard."""
    shared_seqno, lost_seqno = story.write_a(), story.write_b()
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)
    assert asyncio.run(consumer.read(story.has_b()))
    story.fail_over(shared_seqno)
    expected = dict(story.expected)
    story.write_c("lost as well")
    story.expected = expected
    story.fail_over(shared_seqno)
    story.write_c()
    assert asyncio.run(consumer.read(story.is_as_expected()))
    assert rollbacks(consumer.state) == [(VBUCKET, 0, lost_seqno)]
    story.check_stored(consumer.state)


@SNAPSHOTS
def test_a_branch_that_the_server_does_not_know(story: Story, snapshots: str) -> None:
    """It may have been lost with all who knew of it. There is nothing to go back to but the beginning."""
    seqno = story.write_a()
    consumer = FollowedClient(story.bucket.url, snapshots=snapshots)
    assert asyncio.run(consumer.read(story.is_as_expected()))
    assert consumer.saved is not None
    vbuuid = offsets_of_json(consumer.saved)[VBUCKET][0]
    consumer.pretend_branch(VBUCKET, vbuuid=vbuuid ^ 1)
    story.put(story.keys("a", 1), "changed")
    assert asyncio.run(consumer.read(story.is_as_expected()))
    assert rollbacks(consumer.state) == [(VBUCKET, 0, seqno)]
    story.check_stored(consumer.state)


# --- change by change, with and without asyncio -------------------------------------------------------------------


@SNAPSHOTS
@pytest.mark.parametrize("stop_after", [1, 7, 20])
def test_a_failover_while_the_consumer_is_away_inside_a_snapshot(story: Story, stop_after: int, snapshots: str) -> None:
    """Change by change, a consumer may stop anywhere, and the offsets are a place to go on from."""
    shared_seqno = story.write_a()
    story.write_b()
    consumer = FollowedClient(story.bucket.url, by_change=True, snapshots=snapshots, vbuckets=[VBUCKET])
    asyncio.run(consumer.read(lambda state: False, steps_max=stop_after))
    assert consumer.saved is not None
    _, seqno, _, snapshot_end = offsets_of_json(consumer.saved)[VBUCKET]
    assert seqno < snapshot_end, "the consumer has left inside of a snapshot"
    story.fail_over(shared_seqno)
    story.write_c()
    assert asyncio.run(consumer.read(story.is_as_expected([VBUCKET])))
    assert rollbacks(consumer.state) == [(VBUCKET, 0, seqno)]


def test_the_blocking_client(story: Story) -> None:
    shared_seqno, lost_seqno = story.write_a(), story.write_b()
    state = ConsumerState()

    def read() -> None:
        has_b, is_as_expected = story.has_b(), None
        with headwater.blocking.connect(story.bucket.url, user=USER, password=PASSWORD) as client:
            for change in client.changes(**QUICK):
                state.apply([row_of(change)])
                if is_as_expected is None and has_b(state):
                    story.fail_over(shared_seqno)
                    story.write_c()
                    is_as_expected = story.is_as_expected()
                if is_as_expected is not None and is_as_expected(state):
                    return

    # A read that hangs fails the test, and is gone with it.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(READ_S_MAX)
    assert not thread.is_alive()
    assert rollbacks(state) == [(VBUCKET, 0, lost_seqno)]
    story.check_stored(state)
