"""The blocking client meets the same faults. It is the same reader, with a thread between it and the caller."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

import headwater
from headwater.errors import ConnectionFailed, RemoteProtocolError
from support.fault_proxy import FaultSchedule, ProxiedBucket, ProxiedNode
from support.followed_client import QUICK, READ_S_MAX, row_of, rows_of
from support.node_process import PASSWORD, USER
from support.oracle import ConsumerState, StreamRules, differences, offsets_of_json, streamed_documents
from support.random_writes import RandomWrites

SEEDS = range(700, 710)
OPERATIONS = 30


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedBucket]:
    with ProxiedNode(tmp_path_factory.mktemp("blocking") / "data", "--durability", "memory") as node:
        yield ProxiedBucket(node)


class BlockingConsumer(threading.Thread):
    """Reads until it has all that a writer has written, over some clients in turn. A daemon, as it might hang."""

    def __init__(self, bucket: ProxiedBucket, writes: RandomWrites, seed: int) -> None:
        super().__init__(name=f"consumer-{seed}", daemon=True)
        self.state = ConsumerState()
        self.error: BaseException | None = None
        self._bucket = bucket
        self._writes = writes
        self._dice = random.Random(seed)
        self._by_change = self._dice.random() < 0.5
        self._rules = StreamRules(complete_snapshots=True)
        self._saved: str | None = None

    def run(self) -> None:
        try:
            while not self._writes.fences.are_in(self.state):
                self._read(steps_max=self._dice.choice([3, 30, 10_000]))
        except BaseException as error:
            self.error = error

    def _read(self, *, steps_max: int) -> None:
        start = "beginning" if self._saved is None else headwater.Offsets.from_json(self._saved)
        with closing(self._connect()) as client:
            reading = (client.changes if self._by_change else client.batches)(start=start, **QUICK)
            for steps, step in enumerate(reading, 1):
                rows = [row_of(step)] if self._by_change else rows_of(step)
                self._saved = reading.offsets.to_json()
                self._rules.check(rows, offsets_of_json(self._saved))
                self.state.apply(rows)
                if steps == steps_max or self._writes.fences.are_in(self.state):
                    break
        self._rules.left()

    def _connect(self) -> headwater.blocking.Client:
        while True:
            client = headwater.blocking.connect(self._bucket.url, user=USER, password=PASSWORD)
            try:
                return client.__enter__()
            except (ConnectionFailed, RemoteProtocolError):
                continue


@pytest.mark.parametrize("seed", SEEDS)
def test_a_blocking_client_ends_with_what_is_stored(bucket: ProxiedBucket, seed: int) -> None:
    bucket.proxy.use(FaultSchedule(seed))
    with RandomWrites(bucket, seed, operations=OPERATIONS) as writes:
        consumer = BlockingConsumer(bucket, writes, seed)
        consumer.start()
        consumer.join(READ_S_MAX)
    assert not consumer.is_alive()
    if consumer.error is not None:
        raise consumer.error
    wrong = differences(consumer.state.documents(), streamed_documents(bucket))
    assert not wrong, "\n".join(wrong)
