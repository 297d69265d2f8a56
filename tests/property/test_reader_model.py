"""The reader against a cluster that fails over, rebalances and breaks, with a simulated clock: a seed a run.

Whatever happens, what the caller was given adds up to what the bucket holds once things are calm.
"""

from __future__ import annotations

import pytest

from headwater.client.read_options import End, ReadOptions
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.reader_world import VBUCKETS, Run

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
