"""A landing's numbers for Prometheus: what `LandingStatus` says at the moment that they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from headwater.spark.landing import LandingStatus

COUNTERS: tuple[tuple[str, str, Callable[[LandingStatus], int | None]], ...] = (
    ("rows", "Rows that were ever landed in changes.", lambda status: status.rows),
    ("batches", "Batches that were ever landed.", lambda status: status.batch + 1),
    ("rollbacks", "Rollbacks of vbuckets that were ever landed.", lambda status: status.rollbacks),
)
GAUGES: tuple[tuple[str, str, Callable[[LandingStatus], float | None]], ...] = (
    ("active", "1 while the landing runs.", lambda status: int(status.is_active)),
    ("tables", "Collections that have a table.", lambda status: status.tables),
    ("documents", "Rows of all tables of documents.", lambda status: status.documents),
    ("lag_seqnos", "Seqnos that the bucket has and changes does not.", lambda status: status.lag_seqnos),
    ("lag_seconds", "What was written longer ago than this is in changes.", lambda status: status.lag_s),
    (
        "documents_age_seconds",
        "What was written longer ago than this is in documents.",
        lambda status: status.documents_age_s,
    ),
    ("last_batch_seconds", "What the last batch took, without merging.", lambda status: status.last_batch_s),
    ("last_merge_seconds", "What the last merge of documents took.", lambda status: status.last_merge_s),
    ("failures", "Batches that have failed in a row.", lambda status: status.failures),
)


@dataclass(slots=True, eq=False)
class LandingMetrics:
    """A Prometheus collector. What is not known is left out."""

    bucket: str
    status: Callable[[], LandingStatus | None]
    """None while there is no landing yet."""

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client.REGISTRY.register`."""
        status = self.status()
        if status is None:
            return
        for name, what, count in COUNTERS:
            if (value := count(status)) is not None:
                counter = CounterMetricFamily(f"headwater_land_{name}", what, labels=["bucket"])
                counter.add_metric([self.bucket], value)
                yield counter
        for name, what, measure in GAUGES:
            if (number := measure(status)) is not None:
                gauge = GaugeMetricFamily(f"headwater_land_{name}", what, labels=["bucket"])
                gauge.add_metric([self.bucket], number)
                yield gauge
