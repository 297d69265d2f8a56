"""What a read says when it gives up: which vbucket, for how long, and what stands in its way now."""

from __future__ import annotations

from dataclasses import replace

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.links import LinkPool, PooledLink
from headwater.client.metrics import ReaderMetrics
from headwater.client.reader import GivingUp
from headwater.client.retries import Backoff
from headwater.client.vbucket_stream import StreamTerms, VBucketStream
from headwater.errors import ConnectionClosed, ConnectionFailed, HeadwaterError, HostUnreachable, TemporaryFailure
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status

ONE = VBucketId(1)
NODE = Address("node", 11210)
MAP = ClusterMap(epoch=1, revision=1, bucket="b", uuid="u", nodes=(NODE,), vbucket_nodes=((0,), (0,)))
CLOSED = ConnectionClosed("the server has closed the connection", hint="Look at the server's log")
REFUSED = HostUnreachable("node:11210 can't be reached: nobody listens", hint="Check the address")
BUSY = TemporaryFailure(Status.ETMPFAIL, "the stream of vbucket 1 was refused: ETMPFAIL")


BACKOFF = Backoff(delay_s_min=1.0, delay_s_max=8.0, random=lambda: 0.0)

TERMS = StreamTerms(metrics=ReaderMetrics("reader", "b"))


class Read:
    """A vbucket that waits from second 0, and a read that is patient for three seconds."""

    def __init__(self) -> None:
        self.pool = LinkPool(new_link=_no_link, backoff=BACKOFF)
        self.stream = VBucketStream(ONE, StreamOffset(), TERMS, now_s=0.0)
        self.giving_up = GivingUp(3.0, pool=self.pool, streams={ONE: self.stream})

    def slot(self) -> PooledLink:
        self.pool.get(NODE, 0, now_s=100.0)
        return next(iter(self.pool.slots.values()))

    def fails_with(self, cluster_map: ClusterMap = MAP) -> HeadwaterError:
        assert self.giving_up.overdue(cluster_map, None, 3.0) is None
        error = self.giving_up.overdue(cluster_map, None, 3.1)
        assert error is not None
        return error


def _no_link(slot: PooledLink, is_loopback: bool, now_s: float) -> None:
    raise AssertionError("nothing connects here")


def test_a_node_that_can_not_be_reached_any_more_is_the_reason_and_not_how_it_was_lost() -> None:
    read = Read()
    read.stream.retry(CLOSED, now_s=0.0, backoff=None)
    for error in (CLOSED, REFUSED):
        read.pool.drop(read.slot(), error, now_s=0.0)
    error = read.fails_with()
    assert type(error) is HostUnreachable
    assert error.reason == f"vbucket 1 has been unreachable for 3 seconds: {REFUSED.reason}"
    assert error.hint == REFUSED.hint


def test_a_node_that_is_there_and_refuses_the_stream_is_the_reason() -> None:
    read = Read()
    read.pool.drop(read.slot(), REFUSED, now_s=0.0)
    read.pool.on_ready(read.slot())
    read.stream.retry(BUSY, now_s=1.0, backoff=BACKOFF)
    error = read.fails_with()
    assert isinstance(error, TemporaryFailure)
    assert error.status == Status.ETMPFAIL
    assert error.reason == f"vbucket 1 has been unreachable for 3 seconds: {BUSY.reason}"


def test_a_vbucket_that_no_node_has() -> None:
    error = Read().fails_with(replace(MAP, vbucket_nodes=((0,), (-1,))))
    assert type(error) is ConnectionFailed
    assert error.reason == "vbucket 1 has been unreachable for 3 seconds: no node has it"
    assert error.hint


def test_a_node_that_says_nothing() -> None:
    assert Read().fails_with().reason == "vbucket 1 has been unreachable for 3 seconds: node:11210 has not answered"
