"""Exports the metrics of readers to Prometheus.

There is no second set of counters: a scrape reads `ReaderMetrics`. All readers of a registry share one collector,
because a metric family may appear only once; the labels `reader` and `bucket` distinguish them.

To serve them, use `prometheus_client`: `start_http_server(9100, addr="127.0.0.1")` for a separate port (it listens on
all addresses unless given one), or `make_asgi_app()` inside a web application.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry

from headwater import telemetry
from headwater.client.metrics import ReaderMetrics
from headwater.errors import InvalidInput
from headwater.metric_kinds import MetricFamily, MetricKind, MetricSamples, collect_metrics

PREFIX = "headwater_client_"
READER_LABELS = ("reader", "bucket")

Numbers = Mapping[str, Any]
"""The result of `ReaderMetrics.snapshot`."""


class HasMetrics(Protocol):
    """A read: its batches or changes."""

    @property
    def metrics(self) -> ReaderMetrics: ...


# --- the families -------------------------------------------------------------------------------------------------


def _one(*path: str) -> Callable[[Numbers], MetricSamples]:
    """Read a single number, found under these nested names."""

    def read(numbers: Numbers) -> MetricSamples:
        found: Any = numbers
        for name in path:
            found = found[name]
        return [((), found)]

    return read


def _by(name: str) -> Callable[[Numbers], MetricSamples]:
    """Read numbers by label."""
    return lambda numbers: [((value,), number) for value, number in numbers[name].items()]


_KINDS: tuple[MetricKind[Numbers], ...] = (
    MetricKind("changes_total", "Rows returned, including rollbacks and events of collections.", _by("changes"), "op"),
    MetricKind("handed_out_bytes_total", "The size in memory of the returned batches.", _one("handed_out_bytes")),
    MetricKind("batches_total", "Batches returned.", _one("batches")),
    MetricKind("received_changes_total", "Changes received, including those received again.", _one("received_changes")),
    MetricKind("received_bytes_total", "Bytes received from the servers.", _one("received_bytes")),
    MetricKind("received_change_bytes_total", "Bytes received that were changes.", _one("received_change_bytes")),
    MetricKind("snapshots_total", "Snapshots begun.", _one("snapshots")),
    MetricKind("acks_total", "Flow-control acknowledgements sent.", _one("acks")),
    MetricKind("acked_bytes_total", "Bytes acknowledged to the servers.", _one("acked_bytes")),
    MetricKind(
        "buffered_bytes",
        "Bytes received and not returned yet; the state is `ready`, or `held` back.",
        lambda numbers: [(("ready",), numbers["ready_bytes"]), (("held",), numbers["held_bytes"])],
        "state",
    ),
    MetricKind("stream_requests_total", "Streams requested.", _one("stream_requests")),
    MetricKind("stream_ends_total", "Streams ended by a server.", _by("stream_ends"), "reason"),
    MetricKind("rollbacks_total", "Rollbacks demanded by a server.", _one("rollbacks")),
    MetricKind("reconnects_total", "Reconnections.", _by("reconnects"), "node"),
    MetricKind("disconnects_total", "Connections lost or failed.", _by("disconnects"), "error"),
    MetricKind("noops_total", "Noops answered.", _one("noops")),
    MetricKind("config_updates_total", "New cluster maps.", _one("config_updates")),
    MetricKind(
        "lag_seqnos",
        "Seqnos that the vbuckets have and the caller has not received. Absent unless known for all vbuckets.",
        _one("lag", "total_seqnos"),
    ),
    MetricKind("lag_max_seqnos", "The largest known lag of a vbucket.", _one("lag", "max_seqnos")),
    MetricKind("lag_unknown_vbuckets", "Vbuckets whose lag is unknown.", _one("lag", "vbuckets_unknown")),
    MetricKind(
        "vbucket_lag_seqnos",
        "Lag of a vbucket. Only if `register` is called with `per_vbucket`: 1,024 series for most buckets.",
        lambda numbers: [((vbucket,), each["lag_seqnos"]) for vbucket, each in numbers.get("vbuckets", {}).items()],
        "vbucket",
    ),
)


# --- the collector ------------------------------------------------------------------------------------------------


class ReaderCollector:
    """Exports readers to a registry. `register_metrics` makes one per registry."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, str], tuple[ReaderMetrics, bool]] = {}
        """By reader and bucket, with a flag: whether to export the lag of each vbucket."""

    @property
    def is_empty(self) -> bool:
        return not self._readers

    def add(self, metrics: ReaderMetrics, *, per_vbucket: bool = False) -> None:
        key = metrics.reader, metrics.bucket
        if key in self._readers:
            raise InvalidInput(
                f"a reader {metrics.reader!r} of bucket {metrics.bucket!r} is already registered",
                hint="Give each read its own name, or unregister the other one",
            )
        self._readers[key] = metrics, per_vbucket

    def remove(self, metrics: ReaderMetrics) -> None:
        key = metrics.reader, metrics.bucket
        if self._readers.get(key, (None, False))[0] is not metrics:
            raise InvalidInput(
                f"the reader {metrics.reader!r} of bucket {metrics.bucket!r} is not registered",
                hint="Unregister only registered readers, with the same registry",
            )
        del self._readers[key]

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the families without numbers, by which a registry detects duplicate names."""
        return (kind.family(PREFIX, READER_LABELS) for kind in _KINDS)

    def collect(self) -> Iterator[MetricFamily]:
        numbers = [
            (labels, metrics.snapshot(vbuckets=per_vbucket))
            for labels, (metrics, per_vbucket) in self._readers.copy().items()
        ]
        yield from collect_metrics(_KINDS, numbers, prefix=PREFIX, labels=READER_LABELS)


_collectors: WeakKeyDictionary[CollectorRegistry, ReaderCollector] = WeakKeyDictionary()
_lock = threading.Lock()


def register_metrics(
    source: ReaderMetrics | HasMetrics, *, registry: CollectorRegistry = REGISTRY, per_vbucket: bool = False
) -> None:
    """Export the metrics of a read to Prometheus until `unregister_metrics`. In the process's default registry, also
    export them to OpenTelemetry if that is installed.

    Args:
        source: The read, or its metrics.
        registry: The registry to export to; by default that of the process.
        per_vbucket: Also export the lag of every vbucket as a time series: 1,024 of them for most buckets.

    Raises:
        InvalidInput: A read with the same name and bucket is already registered.
    """
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = ReaderCollector()
            if registry is REGISTRY:
                telemetry.observe(collector)
        if collector.is_empty:
            registry.register(collector)
        collector.add(_metrics_of(source), per_vbucket=per_vbucket)


def unregister_metrics(source: ReaderMetrics | HasMetrics, *, registry: CollectorRegistry = REGISTRY) -> None:
    """Stop exporting a read. Raises `InvalidInput` if it is not registered with this registry."""
    with _lock:
        collector = _collectors.get(registry, ReaderCollector())
        collector.remove(_metrics_of(source))
        if collector.is_empty:
            # Keep the collector for the next read: an OpenTelemetry observer can't be removed.
            registry.unregister(collector)


def _metrics_of(source: ReaderMetrics | HasMetrics) -> ReaderMetrics:
    return source if isinstance(source, ReaderMetrics) else source.metrics
