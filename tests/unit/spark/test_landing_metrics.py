"""What the landing pipeline counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from headwater.client.offsets import Offsets
from headwater.spark.landing import LandedBatch
from headwater.spark.landing_metrics import LandingMetrics


def batch(rows: int, *, rollbacks: dict[int, int] | None = None) -> LandedBatch:
    return LandedBatch(
        batch_id=0,
        rows=rows,
        rollbacks=rollbacks or {},
        merges=2,
        tables=("a.b", "a.c"),
        rows_by_table={"a.b": rows},
        must_read_again=False,
        offsets=Offsets("uuid"),
        took_s=1.5,
    )


def lines(metrics: LandingMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    told = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.split(" ") for line in told)}


def test_before_the_first_batch() -> None:
    assert lines(LandingMetrics("travel")) == {
        'headwater_land_rows_total{bucket="travel"}': 0,
        'headwater_land_batches_total{bucket="travel"}': 0,
        'headwater_land_merges_total{bucket="travel"}': 0,
        'headwater_land_rollbacks_total{bucket="travel"}': 0,
        'headwater_land_tables{bucket="travel"}': 0,
        'headwater_land_last_batch_seconds{bucket="travel"}': 0,
    }


def test_batches_add_up() -> None:
    metrics = LandingMetrics("travel")
    metrics.on_batch(batch(10))
    metrics.on_batch(batch(5, rollbacks={1: 7, 2: 0}))
    metrics.lag = 3
    assert lines(metrics) == {
        'headwater_land_rows_total{bucket="travel"}': 15,
        'headwater_land_batches_total{bucket="travel"}': 2,
        'headwater_land_merges_total{bucket="travel"}': 4,
        'headwater_land_rollbacks_total{bucket="travel"}': 2,
        'headwater_land_tables{bucket="travel"}': 2,
        'headwater_land_last_batch_seconds{bucket="travel"}': 1.5,
        'headwater_land_lag_seqnos{bucket="travel"}': 3,
    }
