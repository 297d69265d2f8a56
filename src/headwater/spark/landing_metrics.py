"""What the landing pipeline counts, for Prometheus and for the line on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from headwater.spark.landing import LandedBatch


@dataclass(slots=True, eq=False)
class LandingMetrics:
    """The numbers since the start, as a plain object that is also a Prometheus collector."""

    bucket: str
    rows: int = 0
    batches: int = 0
    merges: int = 0
    rollbacks: int = 0
    tables: int = 0
    last_batch_s: float = 0.0
    lag: int | None = None
    """In seqnos; None while nobody knows."""

    def on_batch(self, batch: LandedBatch) -> None:
        self.rows += batch.rows
        self.batches += 1
        self.merges += batch.merges
        self.rollbacks += len(batch.rollbacks)
        self.tables = len(batch.tables)
        self.last_batch_s = batch.took_s

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client.REGISTRY.register`."""
        for name, what, value in (
            ("rows", "Rows landed in changes.", self.rows),
            ("batches", "Batches landed.", self.batches),
            ("merges", "Merges of groups of documents.", self.merges),
            ("rollbacks", "Vbuckets rolled back.", self.rollbacks),
        ):
            counter = CounterMetricFamily(f"headwater_land_{name}", what, labels=["bucket"])
            counter.add_metric([self.bucket], value)
            yield counter
        for name, what, gauge_value in (
            ("tables", "Collections that have a table.", self.tables),
            ("last_batch_seconds", "What the last batch took.", self.last_batch_s),
            ("lag_seqnos", "How far the tables are behind the bucket.", self.lag),
        ):
            if gauge_value is not None:
                gauge = GaugeMetricFamily(f"headwater_land_{name}", what, labels=["bucket"])
                gauge.add_metric([self.bucket], gauge_value)
                yield gauge
