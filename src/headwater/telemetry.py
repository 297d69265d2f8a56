"""OpenTelemetry: spans of longer work, and the metrics that Prometheus gets. No other module uses OpenTelemetry.

Without `opentelemetry-api` (the extra `otel`) everything here does nothing; with the API alone its spans do nothing. A
program that wants them configures OpenTelemetry's SDK, or is started by `opentelemetry-instrument`. Spans are for
batches, merges, commits and tasks, never for a document. `docs/guides/telemetry.md` lists them with their attributes.

Attributes hold names, places and counts: no password, no key and no value of a document. An error is recorded with its
class, and with its message if it is one of ours: the message of a library may quote data that it has read.

Tasks get the trace context of their batch as the text of a `traceparent` header (W3C Trace Context). If the process of
a task has an SDK, it records the task's span. Most Spark workers have none: for those, the driver records the span from
the times that come back with the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from headwater._version import __version__
from headwater.errors import HeadwaterError, QueryFailed

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, Observation

    from headwater.metric_kinds import MetricFamily

Attributes = Mapping[str, str | bool | int | float]

SCOPE = "headwater"
"""The instrumentation scope of everything recorded here: the name of our tracer and of our meter."""
SYSTEM = {"db.system.name": "couchbase"}
_TRACEPARENT = "traceparent"
_COLLECT_EVERY_S = 0.5
"""An export reads one metric after the other. All are collected together, at most this often."""
_UNITS = {"_seconds": "s", "_bytes": "By"}


@cache
def _is_there() -> bool:
    """Whether the API is installed. It is imported with the first span, not with this module."""
    try:
        from opentelemetry import metrics, trace  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


@cache
def _tracer() -> trace.Tracer:
    from opentelemetry import trace

    # If the program sets a provider later, the tracer takes it from then on.
    return trace.get_tracer(SCOPE, __version__)


# --- spans ------------------------------------------------------------------------------------------------------------


class Span:
    """The record of one piece of work. Without OpenTelemetry, it records nothing."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span | None) -> None:
        self._span = span

    @property
    def is_recording(self) -> bool:
        return self._span is not None and self._span.is_recording()

    def set(self, attributes: Attributes) -> None:
        """Add attributes that are known by now."""
        if self._span is not None:
            self._span.set_attributes(dict(attributes))

    def fail(self, error: BaseException) -> None:
        """Record the error that the work failed with."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        kind, about = type(error).__qualname__, {"exception.type": type(error).__qualname__}
        # `QueryFailed` repeats the message of a library or of a user's function.
        if isinstance(error, HeadwaterError) and not isinstance(error, QueryFailed):
            about["exception.message"] = str(error)
        self._span.set_attribute("error.type", kind)
        self._span.add_event("exception", about)
        self._span.set_status(Status(StatusCode.ERROR, about.get("exception.message", kind)))


_NO_SPAN = Span(None)


@contextmanager
def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    parent: str | None = None,
    no_faults: tuple[type[BaseException], ...] = (),
) -> Iterator[Span]:
    """Record the block as a span. Spans that begin inside of it, in the same thread or task, are its children.

    Args:
        name: The kind of work. There are few names: what differs is an attribute.
        attributes: What is known already.
        parent: The `traceparent` of the parent span, if that is in another process.
        no_faults: Exceptions that do not mean a fault. All other errors are recorded.
    """
    if not _is_there():
        yield _NO_SPAN
        return
    how: dict[str, Any] = {"record_exception": False, "set_status_on_exception": False}
    context = None if parent is None else _context_of(parent)
    with _tracer().start_as_current_span(name, context, attributes=attributes, **how) as started:
        shown = Span(started)
        try:
            yield shown
        except no_faults:
            raise
        except Exception as error:
            shown.fail(error)
            raise


def traceparent() -> str | None:
    """The current span of this thread, as W3C Trace Context writes it; None outside of spans."""
    if not _is_there():
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_TRACEPARENT)


def _context_of(parent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({_TRACEPARENT: parent})


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecorded:
    """Work that was done in a process that records no spans."""

    name: str
    attributes: Attributes
    began_ns: int
    ended_ns: int = field(default_factory=time.time_ns)

    def record(self, failure: BaseException | None = None) -> None:
        """Record the work now, as a child of the current span of this thread."""
        if not _is_there():
            return
        started = _tracer().start_span(self.name, attributes=self.attributes, start_time=self.began_ns)
        if failure is not None:
            Span(started).fail(failure)
        started.end(end_time=self.ended_ns)


# --- metrics ----------------------------------------------------------------------------------------------------------


class Collector(Protocol):
    """The interface of a collector of `prometheus_client`."""

    def describe(self) -> Iterable[MetricFamily]: ...

    def collect(self) -> Iterable[MetricFamily]: ...


class _Collected:
    """Keeps the numbers of a collector, because OpenTelemetry reads one metric after the other."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._lock = threading.Lock()
        self._families: dict[str, MetricFamily] = {}
        self._collected_s = float("-inf")

    def samples(self, name: str) -> Sequence[tuple[float, dict[str, str]]]:
        with self._lock:
            if time.monotonic() - self._collected_s > _COLLECT_EVERY_S:
                self._families = {family.name: family for family in self._collector.collect()}
                self._collected_s = time.monotonic()
            family = self._families.get(name)
        return [] if family is None else [(sample.value, sample.labels) for sample in family.samples]


def observe(collector: Collector) -> None:
    """Export the Prometheus metrics of a collector to OpenTelemetry, as long as the process runs.

    `headwater_land_lag_seconds` becomes `headwater.land.lag_seconds`, with the labels as attributes and a unit.
    """
    if not _is_there():
        return
    from opentelemetry import metrics

    meter, collected = metrics.get_meter(SCOPE, __version__), _Collected(collector)
    for family in collector.describe():
        make: Callable[..., object] = (
            meter.create_observable_counter if family.type == "counter" else meter.create_observable_gauge
        )
        make(
            ".".join(family.name.split("_", 2)),
            callbacks=[partial(_observations, collected, family.name)],
            unit=next((unit for ending, unit in _UNITS.items() if family.name.endswith(ending)), ""),
            description=family.documentation,
        )


def _observations(collected: _Collected, name: str, options: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    return [Observation(value, labels) for value, labels in collected.samples(name)]
