"""The search for the start of a read at a time, in a cluster that loses connections and branches meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from headwater.client import start_search
from headwater.client.pieces import Piece
from headwater.client.start_search import StartSearch, search_options
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.reader_world import VBUCKETS, Run, VBucket

ALL = {VBucketId(vbucket): StreamOffset() for vbucket in range(VBUCKETS)}
AT_NS = 1_800_000_000_000_000_000 >> 16 << 16
AT = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=AT_NS // 1000)
"""The time of a change, exactly."""
SECOND_NS = 1_000_000_000 >> 16 << 16
CHANGES_MAX = 120
SEEDS = range(8)
"""Each is as many vbuckets as the cluster has."""


class Gathering:
    """A caller that keeps what it is given until it looks at it."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def take(self, pieces: list[Piece]) -> None:
        self.pieces += pieces


def world(seed: int, *, disorder_s: int = 0) -> Run:
    """With changes before and after the time in every vbucket, or only on one side of it. Some keys come twice."""
    run = Run(seed)
    run.options = search_options(run.options)
    dice = run.rng
    for vbucket in run.cluster.vbuckets:
        count = dice.randint(0, CHANGES_MAX)
        older = dice.choice([0, count, dice.randint(0, count)])
        vbucket.history += [(b"key%d" % dice.randint(0, 10 * CHANGES_MAX), b"value") for _ in range(count)]
        for seqno in range(1, count + 1):
            early_s = dice.choice([0, disorder_s])
            vbucket.cas[seqno] = AT_NS + ((seqno - older - (seqno > older)) * 10 - early_s) * SECOND_NS
    return run


def search(run: Run, *, disturbances: int = 0) -> dict[VBucketId, StreamOffset]:
    gathering = run.consumer = Gathering()  # type: ignore[assignment]
    run.reader = run.new_reader(ALL)
    sought = StartSearch(AT, ALL, collections=True)
    steps = 0
    while not sought.is_finished:
        steps += 1
        assert steps < 5000, "it comes to an end"
        if disturbances and run.rng.random() < 0.2:
            disturbances -= 1
            run.rng.choice([run.cluster.cut, run.cluster.fail_over, run.cluster.rebalance])()
        run.step()
        while run.reader.has_pieces:
            gathering.take(run.reader.take())
        pieces, gathering.pieces = gathering.pieces, []
        run.reader.follow(sought.step(pieces, run.reader), now_s=run.now_s)
    assert run.reader.is_finished, "no stream is left open"
    return sought.found


def times(vbucket: VBucket) -> dict[int, bool]:
    """The newest versions of all keys by seqno, and whether each is of the time or of after it."""
    newest = {key: seqno for seqno, (key, _) in enumerate(vbucket.history, 1)}
    return {seqno: vbucket.cas[seqno] >= AT_NS for seqno in sorted(newest.values())}


def check(vbucket: VBucket, found: StreamOffset, *, may_be_early: bool = False) -> None:
    """Nothing that is new enough lies before the start, and what follows it first is new enough."""
    visible = times(vbucket)
    assert not any(is_new for seqno, is_new in visible.items() if seqno <= found.seqno)
    following = [is_new for seqno, is_new in visible.items() if seqno > found.seqno]
    assert may_be_early or not following or following[0]
    assert not found.seqno or found == StreamOffset.whole(vbucket.log.newest.vbuuid, found.seqno)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scanned", [1, 10])
def test_reads_start_at_the_first_change_of_the_time(seed: int, scanned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_search, "SCANNED_SEQNOS_MAX", scanned)
    monkeypatch.setattr(start_search, "MARGIN_S", seed % 2 * 50)
    run = world(seed, disorder_s=seed % 2 * 40)
    found = search(run)
    for number, vbucket in enumerate(run.cluster.vbuckets):
        check(vbucket, found[VBucketId(number)])


@pytest.mark.parametrize("seed", SEEDS)
def test_versions_from_elsewhere_do_not_mislead(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cluster was replicated into the bucket, after the time and with older versions."""
    monkeypatch.setattr(start_search, "SCANNED_SEQNOS_MAX", 5)
    run = world(seed)
    for vbucket in run.cluster.vbuckets:
        vbucket.history = [(b"key%d" % number, b"value") for number in range(CHANGES_MAX)]
        own = run.rng.randint(1, CHANGES_MAX // 2)
        imported = range(own + 1, own + CHANGES_MAX // 3)
        for seqno in range(1, CHANGES_MAX + 1):
            after_s = seqno * 100 - 10_000_000 if seqno in imported else (seqno - own // 2) * 100
            vbucket.cas[seqno] = AT_NS + after_s * SECOND_NS
    found = search(run)
    for number, vbucket in enumerate(run.cluster.vbuckets):
        check(vbucket, found[VBucketId(number)])


@pytest.mark.parametrize("seed", SEEDS)
def test_failovers_and_lost_connections_meanwhile(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that begins before a start that was found takes it back, as it does with any offset."""
    monkeypatch.setattr(start_search, "SCANNED_SEQNOS_MAX", 5)
    monkeypatch.setattr(start_search, "MARGIN_S", 0)
    run = world(seed)
    found = search(run, disturbances=8)
    for number, vbucket in enumerate(run.cluster.vbuckets):
        start = found[VBucketId(number)]
        if start.vbuuid in (0, vbucket.log.newest.vbuuid):
            check(vbucket, start)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scanned", [5, CHANGES_MAX])
def test_servers_that_refuse_starts_before_a_purge(seed: int, scanned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not say where it was, so that such a vbucket is read from its beginning: nothing is missed."""
    monkeypatch.setattr(start_search, "SCANNED_SEQNOS_MAX", scanned)
    monkeypatch.setattr(start_search, "MARGIN_S", 0)
    run = world(seed)
    for vbucket in run.cluster.vbuckets:
        vbucket.purge_seqno = Seqno(run.rng.randint(0, vbucket.high))
    found = search(run)
    for number, vbucket in enumerate(run.cluster.vbuckets):
        start, visible = found[VBucketId(number)], times(vbucket)
        check(vbucket, start, may_be_early=not start.seqno)
        last_old = max((seqno for seqno, is_new in visible.items() if not is_new), default=0)
        is_far_behind = last_old > vbucket.purge_seqno + start_search.SCANNED_SEQNOS_MAX
        assert start.seqno >= vbucket.purge_seqno if start.seqno else not is_far_behind
