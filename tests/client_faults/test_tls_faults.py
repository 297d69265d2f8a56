"""The same faults with TLS: they strike inside of its records and of its handshake, and are as little an obstacle."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest
from proxied_node import ProxiedBucket, ProxiedNode
from test_fault_schedules import run_schedule

from certificates import self_signed
from fault_proxy import FaultSchedule

SEEDS = range(500, 520)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedNode]:
    folder = tmp_path_factory.mktemp("tls")
    certificate = self_signed(folder)
    with ProxiedNode(folder / "data", "--durability", "memory", certificate=certificate) as node:
        yield node


def test_any_faults_lead_to_what_is_stored_over_tls(node: ProxiedNode) -> None:
    bucket = ProxiedBucket(node)
    failures = []
    for seed in SEEDS:
        schedule = FaultSchedule(seed)
        try:
            run_schedule(bucket, schedule)
        except Exception:
            failures.append(f"seed {seed} fails with\n{schedule.describe()}\n{traceback.format_exc()}")
    assert not failures, "\n".join(failures)
