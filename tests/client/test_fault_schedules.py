"""Whatever happens to its connections, a consumer ends with what the node holds. A seed replays a failure.

`HEADWATER_FAULT_SEED=17 python -m pytest tests/client/test_fault_schedules.py` runs one seed. The faults are the
same then, byte for byte; how far the writer is when they strike is up to the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.protocol.numbers import DEFAULT_COLLECTION
from support.fault_proxy import FaultSchedule, ProxiedBucket, ProxiedNode
from support.followed_client import FollowedClient
from support.machine import self_signed
from support.oracle import Document, Key, differences, streamed_documents
from support.random_writes import RandomWrites

SEEDS = 200
GROUP_SEEDS = 10
GROUPS_OF_EVERY_RUN = 2
"""The others are for `make soak`."""
TLS_SEEDS = range(500, 504)
OPERATIONS = 40
STOPS_MAX = 3
ONLY_COLLECTION = ("_default._default",)

_ONE_SEED = os.environ.get("HEADWATER_FAULT_SEED")
_GROUPS = (
    [range(int(_ONE_SEED), int(_ONE_SEED) + 1)]
    if _ONE_SEED is not None
    else [range(first, first + GROUP_SEEDS) for first in range(0, SEEDS, GROUP_SEEDS)]
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedNode]:
    # Streams see what is durable, however early a writer is answered.
    options = ("--durability", "memory")
    buckets = [f"group-{number}" for number in range(len(_GROUPS))]
    with ProxiedNode(tmp_path_factory.mktemp("schedules") / "data", *options, buckets=buckets) as node:
        yield node


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(
            number,
            id=f"seeds {seeds[0]} to {seeds[-1]}",
            marks=[pytest.mark.soak] if number >= GROUPS_OF_EVERY_RUN else [],
        )
        for number, seeds in enumerate(_GROUPS)
    ],
)
def test_any_faults_lead_to_what_is_stored(node: ProxiedNode, group: int) -> None:
    run_seeds(ProxiedBucket(node, f"group-{group}"), _GROUPS[group])


def test_any_faults_lead_to_what_is_stored_over_tls(tmp_path: Path) -> None:
    """They strike inside of TLS records and of the TLS handshake."""
    certificate = self_signed(tmp_path)
    with ProxiedNode(tmp_path / "data", "--durability", "memory", certificate=certificate) as node:
        run_seeds(ProxiedBucket(node), TLS_SEEDS)


def run_seeds(bucket: ProxiedBucket, seeds: Iterable[int]) -> None:
    failures = []
    for seed in seeds:
        schedule = FaultSchedule(seed)
        try:
            run_schedule(bucket, schedule)
        except Exception:
            failures.append(f"seed {seed} fails with\n{schedule.describe()}\n{traceback.format_exc()}")
    assert not failures, "\n".join(failures)


def run_schedule(bucket: ProxiedBucket, schedule: FaultSchedule) -> None:
    dice = random.Random(schedule.seed)
    options = random_options(dice)
    consumer = FollowedClient(bucket.url, tls=bucket.node.tls, **options)
    bucket.proxy.use(schedule)
    with RandomWrites(bucket, schedule.seed, operations=OPERATIONS) as writes:
        asyncio.run(read_with_stops(consumer, writes, dice))
    stored = checked_documents(bucket, writes)
    if "collections" in options:
        stored = {key: document for key, document in stored.items() if key[0] == DEFAULT_COLLECTION}
    wrong = differences(consumer.state.documents(), stored)
    assert not wrong, "\n".join(wrong)


def random_options(dice: random.Random) -> dict[str, Any]:
    """Small limits, so that small data meets them, and all that changes what is sent, or none of it."""
    options: dict[str, Any] = {
        "batch_bytes": dice.choice([1, 1000]), "buffer_bytes": dice.choice([1024, 20_000]),
        "held_bytes_max": dice.choice([0, 1000]), "connections_per_node": 2, "compression": True, "xattrs": True,
        "history": True, "collections": ONLY_COLLECTION, "by_change": True,
    }  # fmt: skip
    chosen = {name: value for name, value in options.items() if dice.random() < 0.4}
    return {**chosen, "snapshots": dice.choice(["complete", "complete", "as-they-come"])}


async def read_with_stops(consumer: FollowedClient, writes: RandomWrites, dice: random.Random) -> None:
    """Leave and come back a few times, and stay then until all is there."""
    for _ in range(dice.randint(0, STOPS_MAX)):
        if await consumer.read(writes.fences.are_in, steps_max=dice.choice([1, 3, 30])):
            return
    assert await consumer.read(writes.fences.are_in)


def checked_documents(bucket: ProxiedBucket, writes: RandomWrites) -> dict[Key, Document]:
    """What is stored. The judge is judged, too: streams and single reads say the same of a node."""
    stored = streamed_documents(bucket)
    fences = {key for key in stored if key[1] in writes.fences.keys}
    assert {key: (stored[key].cas, stored[key].value) for key in stored.keys() - fences} == writes.left
    return stored
