"""What happens to the node itself: it is killed, or stands still, or is restarted while the consumer is away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.client.kv_connection import KvConnection, Timeouts
from headwater.client.reader import REFUSALS_MAX
from headwater.client.settings import ClientSettings
from headwater.client.survey import AsyncSurveyor
from headwater.errors import BucketNotReady, ConnectionFailed, UnknownBucket
from headwater.protocol.messages.dcp_streams import Control, Open, StreamRequest
from headwater.protocol.messages.documents import Delete, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from support.cases import case_apart
from support.fake_servers import Peer, answering, serving
from support.fault_proxy import Action, ProxiedBucket, ProxiedNode, Stall, Way
from support.followed_client import FollowedClient
from support.node_process import PASSWORD, USER
from support.oracle import differences, offsets_of_json, streamed_documents
from support.random_writes import RandomWrites, write_fences

SEED = 5
KILLS = 3
POLLS_MAX = 400
"""Far more than it takes until a deletion is purged."""
NOOP_INTERVAL_S = 1
"""The least that the protocol has. A silence of two of these is a dead connection."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ProxiedNode]:
    with ProxiedNode(tmp_path / "data") as node:
        yield node


@pytest.fixture
def bucket(node: ProxiedNode) -> ProxiedBucket:
    return ProxiedBucket(node)


def check_state(bucket: ProxiedBucket, consumer: FollowedClient) -> None:
    wrong = differences(consumer.state.documents(), streamed_documents(bucket))
    assert not wrong, "\n".join(wrong)


# --- killed -------------------------------------------------------------------------------------------------------


def test_a_consumer_that_is_away_while_the_node_is_killed(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    """Every kill begins a new branch of history, but nothing that was streamed is ever taken back."""
    consumer = FollowedClient(bucket.url, snapshots="as-they-come")
    for kill in range(KILLS):
        with RandomWrites(bucket, SEED + kill, operations=40, with_rollbacks=False) as writes:
            asyncio.run(consumer.read(writes.fences.are_in, steps_max=3))
        node.node.kill()
        node.node.start()
    assert asyncio.run(consumer.read(writes.fences.are_in))
    check_state(bucket, consumer)
    assert not consumer.state.rollbacks


@pytest.mark.parametrize("snapshots", ["complete", "as-they-come"])
def test_a_node_that_is_killed_during_a_stream(node: ProxiedNode, bucket: ProxiedBucket, snapshots: str) -> None:
    """What the node had not answered may be lost, and the consumer must have none of that."""
    asyncio.run(read_through_kills(node, bucket, FollowedClient(bucket.url, snapshots=snapshots)))


async def read_through_kills(node: ProxiedNode, bucket: ProxiedBucket, consumer: FollowedClient) -> None:
    dice = random.Random(SEED)
    async with consumer.reading_on() as reading:
        for kill in range(KILLS):
            writes = Uninterrupted(bucket)
            writes.start()
            rows = consumer.state.rows + dice.randint(50, 300)
            await consumer.reaches(lambda state, rows=rows: state.rows >= rows, reading)
            node.node.kill()
            writes.join()
            await asyncio.to_thread(node.node.start)
            fences = await asyncio.to_thread(write_fences, bucket, b'"%d"' % kill)
            await consumer.reaches(fences.are_in, reading)
            check_state(bucket, consumer)
    assert not consumer.state.rollbacks


class Uninterrupted(threading.Thread):
    """Writes as fast as it can, until its connection breaks."""

    def __init__(self, bucket: ProxiedBucket) -> None:
        super().__init__(name="writer")
        self._bucket = bucket

    def run(self) -> None:
        with self._bucket.connect_directly() as connection, contextlib.suppress(ConnectionFailed):
            for number in itertools.count():
                key = b"key-%d" % (number % 50)
                place = {"collection_id": DEFAULT_COLLECTION, "key": key, "vbucket": self._bucket.vbucket_of(key)}
                connection.request(Set(value=b'{"number":%d}' % number, **place))


# --- forgetting ---------------------------------------------------------------------------------------------------


def test_deletions_that_were_purged_while_the_consumer_was_away(tmp_path: Path) -> None:
    """Nobody can tell it of them any more, so it starts anew, and must not keep what it has."""
    forgetful = ("--purge-age-seconds", "0", "--history-seconds", "0", "--history-bytes", "0")
    with ProxiedNode(tmp_path / "data", *forgetful, "--compact-interval", "0.05", vbuckets=2) as node:
        bucket = ProxiedBucket(node)
        # Any key may be put in any vbucket: only clients mind.
        place = {"collection_id": DEFAULT_COLLECTION, "vbucket": VBucketId(0)}
        with bucket.connect_directly() as connection:
            connection.request(Set(key=b"doomed", value=b"{}", **place))
        fences = write_fences(bucket, b'"first"')
        consumer = FollowedClient(bucket.url)
        assert asyncio.run(consumer.read(fences.are_in))
        with bucket.connect_directly() as connection:
            connection.request(Delete(key=b"doomed", **place))
            purge(bucket, connection, consumer)
        fences = write_fences(bucket, b'"second"')
        assert asyncio.run(consumer.read(fences.are_in))
        assert [(row["vbucket"], row["seqno"]) for row in consumer.state.rollbacks] == [(0, 0)]
        check_state(bucket, consumer)


def purge(bucket: ProxiedBucket, connection: KvConnection, consumer: FollowedClient) -> None:
    """Have the deletions of vbucket 0 purged that came after what the consumer has."""
    # Only what is settled is compacted, and a drill settles everything, also where it takes nothing back.
    bucket.roll_back(1, bucket.high_seqnos(connection)[1])
    place = {"collection_id": DEFAULT_COLLECTION, "vbucket": VBucketId(0)}
    for number in range(POLLS_MAX):
        # There has to be something that is worth compacting.
        connection.request(Set(key=b"busy", value=b"%d" % number, **place))
        if has_to_start_again(bucket, consumer):
            return
        time.sleep(0.05)
    pytest.fail("the deletion was not purged")


def has_to_start_again(bucket: ProxiedBucket, consumer: FollowedClient) -> bool:
    """What the node says to someone at the place where the consumer is."""
    assert consumer.saved is not None
    vbuuid, number, _, _ = offsets_of_json(consumer.saved)[0]
    seqno = Seqno(number)
    with bucket.connect_directly() as connection:
        connection.request(Open(key=b"would-it-have-to"))
        connection.request(Control(key=b"enable_noop", value=b"true"))
        answer = connection.request(
            StreamRequest(
                vbuuid=Vbuuid(vbuuid), start_seqno=seqno, snapshot_start_seqno=seqno, snapshot_end_seqno=seqno
            )
        )
    return answer.status == Status.ROLLBACK


def test_a_consumer_behind_the_purge_seqno_that_has_seen_it(tmp_path: Path) -> None:
    """It was stopped inside a snapshot that was sent after the purge, so it has missed no deletion: it need not start
    again, though it is below the purge seqno."""
    forgetful = ("--purge-age-seconds", "0", "--history-seconds", "0", "--history-bytes", "0")
    with ProxiedNode(tmp_path / "data", *forgetful, "--compact-interval", "0.05", vbuckets=2) as node:
        bucket = ProxiedBucket(node)
        place = {"collection_id": DEFAULT_COLLECTION, "vbucket": VBucketId(0)}
        with bucket.connect_directly() as connection:
            for number in range(40):
                connection.request(Set(key=b"large-%d" % number, value=b"x" * 20_000, **place))
            connection.request(Set(key=b"doomed", value=b"{}", **place))
            other = FollowedClient(bucket.url, end="now")
            asyncio.run(other.read_to_end())
            connection.request(Delete(key=b"doomed", **place))
            purge(bucket, connection, other)
        consumer = FollowedClient(bucket.url, snapshots="as-they-come", buffer_bytes=64 * 1024, batch_bytes=1)
        assert not asyncio.run(consumer.read(lambda state: False, steps_max=1))
        assert consumer.saved is not None
        row = json.loads(consumer.saved)["offsets"][0]
        assert row[2] < row[5], "it is below the purge seqno that it was told"
        fences = write_fences(bucket, b'"second"')
        assert asyncio.run(consumer.read(fences.are_in))
        assert not consumer.state.rollbacks
        check_state(bucket, consumer)


# --- starting -----------------------------------------------------------------------------------------------------


def test_a_server_that_answers_before_it_has_made_its_bucket(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    """As real servers do after each restart. Who had the bucket waits for it; who never had it may have its name
    wrong."""
    asyncio.run(read_through_restart(node, bucket))


async def read_through_restart(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    settings = ClientSettings.make(bucket.url, user=USER, password=PASSWORD)
    consumer = FollowedClient(bucket.url)
    first = write_fences(bucket, b'"first"')
    surveyor = await AsyncSurveyor.open(settings)
    async with consumer.reading_on() as reading:
        await consumer.reaches(first.are_in, reading)
        port = node.proxy.server_port
        with serving(answering(lambda: Peer(bucket="another", password=PASSWORD))) as starting:
            node.proxy.server_port = starting.port
            node.proxy.cut_all()
            connections = node.proxy.counts.connections
            with pytest.raises(BucketNotReady):
                await surveyor.refresh_map()
            with pytest.raises(UnknownBucket) as first_contact:
                await AsyncSurveyor.open(settings)
            assert not first_contact.value.retriable
            await consumer.reaches(
                lambda state: node.proxy.counts.connections > connections + REFUSALS_MAX + 3, reading
            )
            node.proxy.server_port = port
        second = await asyncio.to_thread(write_fences, bucket, b'"second"')
        await consumer.reaches(second.are_in, reading)
        assert len(await surveyor.survey()) == bucket.vbuckets
    surveyor.close()
    check_state(bucket, consumer)


# --- standing still -----------------------------------------------------------------------------------------------


def test_a_node_that_stands_still(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    """Its connections stay open and nothing comes: noops find that out, and when it goes on, so does the read."""
    asyncio.run(read_through_standstill(node, bucket))


async def read_through_standstill(node: ProxiedNode, bucket: ProxiedBucket) -> None:
    consumer = FollowedClient(bucket.url, noop_interval_s=NOOP_INTERVAL_S)
    first = write_fences(bucket, b'"first"')
    async with consumer.reading_on() as reading:
        await consumer.reaches(first.are_in, reading)
        connections = node.proxy.counts.connections
        os.kill(node.node.pid, signal.SIGSTOP)
        try:
            # It tries another connection, so it takes the one it has for dead.
            await consumer.reaches(lambda state: node.proxy.counts.connections > connections, reading)
        finally:
            os.kill(node.node.pid, signal.SIGCONT)
        second = await asyncio.to_thread(write_fences, bucket, b'"second"')
        await consumer.reaches(second.are_in, reading)
    check_state(bucket, consumer)


# --- connections on which nothing comes any more, and which nobody closes: they are found out, wherever that happens --

"""The least that the protocol has. A silence of two of these is a dead connection."""
TIMEOUTS = Timeouts(connect_s=1, answer_s=1)
FOUND_OUT_S_MAX = 12.0
"""Far more than these take, and less than what a client takes that has not been told of them."""


# The look at the bucket with which a read begins. The one before it is `connect`'s, and its caller's affair.
@case_apart(1, Way.TO_CLIENT, 100)
# The connection of the streams: while it logs in, while it opens, and then.
@case_apart(2, Way.TO_CLIENT, 100)
@case_apart(2, Way.TO_SERVER, 100)
@case_apart(2, Way.TO_CLIENT, 1000)
@case_apart(2, Way.TO_SERVER, 700)
@case_apart(2, Way.TO_CLIENT, 2000)
@case_apart(2, Way.TO_SERVER, 1200)
def test_a_silent_connection_is_replaced(shared_node: ProxiedNode, connection: int, way: Way, after_bytes: int) -> None:
    bucket = ProxiedBucket(shared_node)
    fences = write_fences(bucket, b'"%d"' % after_bytes)

    def plan(number: int) -> tuple[Action, ...]:
        return (Stall(way, after_bytes),) if number == connection else ()

    bucket.proxy.use(plan)
    consumer = FollowedClient(bucket.url, timeouts=TIMEOUTS, noop_interval_s=NOOP_INTERVAL_S)
    assert asyncio.run(asyncio.wait_for(consumer.read(fences.are_in), FOUND_OUT_S_MAX))
    assert bucket.proxy.counts.connections > 3
