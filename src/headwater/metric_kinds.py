"""Families of Prometheus metrics, written as tables: a name, a sentence, and where the number comes from.

The client's readers, the node and the landing have one table each and collect it here. A scrape counts nothing: `read`
returns numbers that are kept anyway. A number that is None is unknown, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

S = TypeVar("S")
"""The object that the numbers are read from."""
MetricFamily = CounterMetricFamily | GaugeMetricFamily
MetricSamples = Iterable[tuple[tuple[str, ...], float | None]]
"""For each sample, the value of the family's own label, if it has one, and the number."""


@dataclass(frozen=True, slots=True)
class MetricKind(Generic[S]):
    """A family of metrics. One whose name ends with `_total` is a counter, the others are gauges."""

    name: str
    """Without the prefix that all families of a table share."""
    documentation: str
    read: Callable[[S], MetricSamples]
    label: str | None = None
    """The label by which its samples differ, in addition to those that all families of the table have."""

    def family(self, prefix: str, labels: Sequence[str]) -> MetricFamily:
        """The family, without samples."""
        make = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        return make(prefix + self.name, self.documentation, labels=(*labels, *((self.label,) if self.label else ())))


def one_number(read: Callable[[S], float | None]) -> Callable[[S], MetricSamples]:
    """Make the `read` of a family that has one number and no label of its own."""
    return lambda source: [((), read(source))]


def collect_metrics(
    kinds: Iterable[MetricKind[S]],
    sources: Sequence[tuple[tuple[str, ...], S]],
    *,
    prefix: str,
    labels: Sequence[str],
) -> Iterator[MetricFamily]:
    """All families of a table, each with the numbers of all sources. Each source comes with its values of `labels`."""
    for kind in kinds:
        family = kind.family(prefix, labels)
        for values, source in sources:
            for own, number in kind.read(source):
                if number is not None:
                    family.add_metric((*values, *own), number)
        yield family
