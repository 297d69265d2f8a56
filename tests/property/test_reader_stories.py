"""The reader in the corners that random runs seldom reach, step by step against the same cluster in memory."""

from __future__ import annotations

import json

import pytest

from headwater.client.links import CloseConnection, OpenConnection
from headwater.client.read_options import End, ReadOptions, Snapshots
from headwater.errors import AuthenticationFailed, BucketReplaced, UnexpectedMessage
from headwater.protocol.messages import Response
from headwater.protocol.messages.dcp_changes import SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import StreamEndReason, StreamRequest, StreamRequestResponse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status
from support.reader_world import VBUCKETS, Connection, Run, Stream, arrive, ask, connect, run_of_one_node

FIRST = VBucketId(0)


def write(run: Run, count: int, vbucket: VBucketId = FIRST) -> None:
    history = run.cluster.vbuckets[vbucket].history
    history += [(b"key%d" % (len(history) + n), b"value") for n in range(count)]


def drain(run: Run) -> None:
    while run.reader.has_pieces:
        run.consumer.take(run.reader.take())


def test_a_vbucket_that_is_left_and_followed_again_while_it_is_being_asked_for() -> None:
    """The answer to the first request must not close the stream of the second."""
    run = run_of_one_node()
    connect(run)
    run.reader.close_vbuckets([FIRST], keep_offsets=True)
    run.reader.follow({FIRST: StreamOffset()}, now_s=run.now_s)
    ask(run)
    arrive(run)
    write(run, 3)
    run.settle()
    run.check()


def test_a_stream_that_ends_well_is_at_its_end_though_its_last_seqnos_were_hidden() -> None:
    run = run_of_one_node(end={FIRST: Seqno(50)}, buffer_bytes=1 << 20)
    run.reader = run.new_reader({FIRST: StreamOffset()})
    write(run, 60)
    connection = connect(run)
    arrive(run)  # the high seqnos
    arrive(run)  # the stream
    for _ in range(4):
        connection.pump()
    connection.end_stream(FIRST, StreamEndReason.OK)
    arrive(run)
    drain(run)
    assert run.reader.is_finished
    place, rows = run.reader.offsets[FIRST], sorted(run.consumer.rows[FIRST])
    assert place.is_complete
    assert place.seqno >= 50
    assert rows == list(range(1, len(rows) + 1))
    assert 0 < len(rows) < 50


def test_a_stream_whose_collections_are_gone_hands_out_what_it_held() -> None:
    run = run_of_one_node(buffer_bytes=1 << 20)
    run.reader = run.new_reader({FIRST: StreamOffset()})
    write(run, 60)
    connection = connect(run)
    arrive(run)
    for _ in range(4):
        connection.pump()
    connection.end_stream(FIRST, StreamEndReason.FILTER_EMPTY)
    arrive(run)
    drain(run)
    assert run.reader.is_finished
    assert run.consumer.rows[FIRST]


def test_an_end_that_is_lowered_while_the_stream_is_on_its_way_to_it() -> None:
    """The history became shorter between the question for the high seqnos and the stream."""
    run = run_of_one_node(end=End.NOW)
    run.reader = run.new_reader({FIRST: StreamOffset()})
    write(run, 20)
    connect(run)
    del run.cluster.vbuckets[FIRST].history[10:]
    arrive(run)  # the high seqno is 20, the stream is asked for up to there
    arrive(run)
    run.now_s += run.options.poll_interval_s
    ask(run)  # a poll, answered before the first change
    arrive(run)
    for _ in range(200):
        run.step()
        if run.reader.is_finished:
            break
    assert run.reader.is_finished
    assert len(run.consumer.rows[FIRST]) == 10


def test_a_poll_does_not_end_a_read_before_its_rollback_is_told() -> None:
    """The place is beyond the end that the new history has, and still the caller has to be told to go back."""
    run = run_of_one_node(end=End.NOW, snapshots=Snapshots.AS_THEY_COME, buffer_bytes=1 << 20)
    run.reader = run.new_reader({FIRST: StreamOffset()})
    write(run, 60)
    connection = connect(run)
    arrive(run)
    arrive(run)
    for _ in range(9):
        connection.pump()
    arrive(run)
    drain(run)
    assert 10 < run.reader.offsets[FIRST].seqno < 60
    vbucket = run.cluster.vbuckets[FIRST]
    del vbucket.history[10:]
    vbucket.log = vbucket.log.branch(Vbuuid(99), at_seqno=vbucket.high)
    connection.is_cut = True
    arrive(run)
    run.now_s += 1
    connect(run)
    run.now_s += run.options.poll_interval_s
    ask(run)  # the answer to the poll comes with the one that the stream is asked for after
    for _ in range(50):
        run.step()
    assert run.reader.is_finished
    assert run.consumer.rollbacks == 1
    assert len(run.consumer.rows[FIRST]) == 10


def test_a_map_of_another_bucket_fails_the_read_and_nothing_else() -> None:
    run = run_of_one_node()
    connection = connect(run)
    config = json.loads(run.cluster.config()) | {"uuid": "another", "rev": 9}
    config["vBucketServerMap"]["vBucketMap"] = [[0]]
    connection.cluster.config = lambda: json.dumps(config).encode()
    run.now_s += run.options.poll_interval_s
    ask(run)
    arrive(run)
    assert isinstance(run.reader.failure, BucketReplaced)


def test_the_connection_to_a_node_that_has_left_is_closed() -> None:
    run = Run(0, connections_per_node=1)
    assert len(run.cluster.nodes) > 1
    for _ in range(20):
        run.step()
    assert {connection.node for connection in run.wires.values()} == set(range(len(run.cluster.nodes)))
    gone = len(run.cluster.nodes) - 1
    for vbucket in run.cluster.vbuckets:
        vbucket.node = 0
    run.cluster.nodes.pop()
    run.cluster.revision += 1
    for _ in range(40):
        run.step()
    assert gone not in {connection.node for connection in run.wires.values()}


class Insisting(Connection):
    """Demands a rollback whatever it is asked for."""

    def _open_stream(self, request: StreamRequest) -> Response:
        return StreamRequestResponse(opaque=request.opaque, status=Status.ROLLBACK, rollback_seqno=Seqno(0))


class Stuttering(Connection):
    """Begins a snapshot inside another."""

    def _begin_snapshot(self, stream: Stream) -> None:
        marker = SnapshotMarker(
            vbucket=stream.vbucket,
            opaque=stream.opaque,
            start_seqno=Seqno(0),
            end_seqno=Seqno(5),
            flags=SnapshotFlags.MEMORY,
        ).encode()
        stream.pending = [marker, marker]


@pytest.mark.parametrize("kind", [Insisting, Stuttering])
def test_repeated_protocol_errors_fail_the_read(kind: type[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.reader_world.Connection", kind)
    run = run_of_one_node(give_up_after_s=300.0)
    run.may_fail = True
    while run.reader.failure is None and run.now_s < 300:
        run.step()
    assert isinstance(run.reader.failure, UnexpectedMessage)


def test_one_refusal_of_a_node_is_not_the_end_of_a_read() -> None:
    """It may have left the cluster a moment ago. If it insists, and the map insists, too, the read fails."""
    run = run_of_one_node(reconnect_delay_s_max=10.0)
    refusals = 0
    while run.reader.failure is None:
        run.now_s += 11
        run.reader.tick(run.now_s)
        for command in run.reader.commands():
            if isinstance(command, OpenConnection):
                refusals += 1
                refusal = AuthenticationFailed(Status.AUTH_ERROR, "nobody knows you")
                run.reader.on_lost(command.id, refusal, now_s=run.now_s)
            else:
                assert isinstance(command, CloseConnection)
    assert refusals == 3
    assert isinstance(run.reader.failure, AuthenticationFailed)


def test_a_vbucket_that_moves_while_its_high_seqno_is_asked_for_is_asked_for_once() -> None:
    run = Run(0, end=End.NOW, connections_per_node=1, give_up_after_s=None)
    assert len(run.cluster.nodes) > 1
    run.reader = run.new_reader({FIRST: StreamOffset()})
    write(run, 5)
    ask(run)
    arrive(run)
    arrive(run)  # the question for the high seqnos has been answered, on the wire
    run.cluster.revision += 1
    run.cluster.vbuckets[FIRST].node = 1
    run.reader._on_map(run.decode_map(run.cluster.config()), run.now_s)
    ask(run)
    for _ in range(100):
        run.step()
        if run.reader.is_finished:
            break
    assert run.reader.is_finished
    assert run.reader.metrics.stream_requests == 1
    assert not run.reader.metrics.disconnects


# --- the reader against a cluster that fails over, rebalances and breaks, with a simulated clock: a seed a run --------
#
# Whatever happens, what the caller was given adds up to what the bucket holds once things are calm.

SEEDS = 200
SEEDS_A_TEST = 25
SEEDS_OF_EVERY_RUN = 50
"""The others are for the soak."""


def run_seed(seed: int) -> Run:
    run = Run(seed)
    for _ in range(120):
        for _ in range(run.rng.randint(0, 4)):
            run.disturb()
        run.step()
    run.settle()
    run.check()
    return run


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first < SEEDS_OF_EVERY_RUN else pytest.mark.soak)
        for first in range(0, SEEDS, SEEDS_A_TEST)
    ],
)
def test_the_caller_ends_up_with_what_the_bucket_holds(first: int) -> None:
    rollbacks = 0
    for seed in range(first, first + SEEDS_A_TEST):
        try:
            rollbacks += run_seed(seed).consumer.rollbacks
        except BaseException as error:
            error.add_note(f"seed {seed}: run_seed({seed}) replays it")
            raise
    assert rollbacks, "failovers took something back that was handed out"


@pytest.mark.parametrize("first", range(0, 50, SEEDS_A_TEST))
def test_a_read_that_has_an_end_comes_to_it_whatever_happens(first: int) -> None:
    """After a failover the end may lie beyond what the new history has."""
    for seed in range(first, first + SEEDS_A_TEST):
        run = Run(seed)
        for _ in range(60):
            run.cluster.write()
        run.options = ReadOptions(end=End.NOW, give_up_after_s=None, buffer_bytes=4096)
        run.reader = run.new_reader({VBucketId(vbucket): StreamOffset() for vbucket in range(VBUCKETS)})
        for _ in range(run.rng.randint(0, 40)):
            run.rng.choice([run.cluster.fail_over, run.cluster.rebalance, run.cluster.cut, run.step, run.step])()
        run.cluster.calm_down()
        for _ in range(600):
            run.step()
            if run.reader.is_finished:
                break
        assert run.reader.is_finished, f"seed {seed} does not come to its end"
        run.reader.close()
        assert all(file.closed for file in run.files)
