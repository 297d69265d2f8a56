"""A landing's numbers, as Prometheus gets them."""

from __future__ import annotations

from dataclasses import fields, replace

from prometheus_client import CollectorRegistry, generate_latest

from headwater.cli.land import COUNTERS, GAUGES, LandingMetrics
from headwater.spark.landing import LandingStatus

STATUS = LandingStatus(
    is_active=True, doing="waiting", batch=11, rows=1200, rollbacks=3, documents=900, tables=2, lag_seqnos=17,
    lag_s=2.5, documents_age_s=4.5, last_batch_s=0.3, last_merge_s=1.1, failures=0,
)  # fmt: skip


def lines(status: LandingStatus | None) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(LandingMetrics("travel", lambda: status))
    shown = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in (line.split(" ") for line in shown)}


def test_the_numbers_are_those_of_the_status() -> None:
    assert lines(STATUS) == {
        "headwater_land_rows_total": 1200,
        "headwater_land_batches_total": 12,
        "headwater_land_rollbacks_total": 3,
        "headwater_land_active": 1,
        "headwater_land_tables": 2,
        "headwater_land_documents": 900,
        "headwater_land_lag_seqnos": 17,
        "headwater_land_lag_seconds": 2.5,
        "headwater_land_documents_age_seconds": 4.5,
        "headwater_land_last_batch_seconds": 0.3,
        "headwater_land_last_merge_seconds": 1.1,
        "headwater_land_failures": 0,
    }
    assert len(COUNTERS) + len(GAUGES) == len(fields(LandingStatus)) - 1, "all of it but the words"


def test_what_is_not_known_is_left_out() -> None:
    shown = lines(replace(STATUS, rows=None, lag_seqnos=None, lag_s=None, documents_age_s=None, last_merge_s=None))
    assert not {name for name in shown if "lag" in name or "age" in name or "merge" in name or "rows" in name}
    assert lines(None) == {}
