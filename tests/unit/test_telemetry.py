"""Spans and metrics with OpenTelemetry's SDK, and that there is nothing without its API."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import StatusCode
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headwater import telemetry
from headwater.errors import HeadwaterError, InvalidInput, QueryFailed
from headwater.lake.lake import TaskOutcome, results, run_task
from headwater.metric_kinds import MetricFamily
from support.traces import Traces


def test_without_the_api_there_is_nothing() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from headwater import telemetry
with telemetry.span("x", {"a": 1}) as span:
    span.set({"b": 2})
    span.fail(ValueError())
assert not span.is_recording and telemetry.traceparent() is None
telemetry.Unrecorded(name="x", attributes={}, began_ns=0).record()
telemetry.observe(None)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    # And it is not loaded before there is a span.
    loaded = "import sys, headwater.landing.loop; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", loaded], check=True)


@pytest.mark.parametrize(
    ("error", "about"),
    [
        (InvalidInput("no such bucket", hint="Make it"), {"exception.message": "no such bucket. Make it"}),
        (QueryFailed("could not parse 'the text of a document'"), {}),
        (ValueError("the text of a document"), {}),
    ],
)
def test_errors_are_recorded_without_what_they_may_quote(
    traces: Traces, error: Exception, about: dict[str, str]
) -> None:
    with pytest.raises(type(error)), telemetry.span("x"):
        raise error
    [span] = traces.spans()
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, type(error).__name__)
    [event] = span.events
    assert event.attributes == {"exception.type": type(error).__name__, **about}
    assert "document" not in span.to_json()


def test_an_order_to_stop_is_no_error(traces: Traces) -> None:
    with pytest.raises(ZeroDivisionError), telemetry.span("x", no_faults=(ZeroDivisionError,)):
        raise ZeroDivisionError
    assert traces.spans()[0].status.is_unset


class Divides:
    def __init__(self, by: int) -> None:
        self.by = by

    def run(self) -> float:
        return 1 / self.by


@pytest.mark.parametrize("is_recorded_there", [True, False])
def test_tasks_are_children_of_who_wants_them_wherever_they_run(
    traces: Traces, is_recorded_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with telemetry.span("batch") as batch:
        parent = telemetry.traceparent()
        with monkeypatch.context() as elsewhere:
            if not is_recorded_there:
                elsewhere.setattr(telemetry, "_is_there", lambda: False)
            outcomes: list[TaskOutcome] = [run_task(Divides(by), parent) for by in (1, 0)]
        assert batch.is_recording
        with pytest.raises(HeadwaterError):
            results(outcomes)
    good, bad, whole = traces.spans()
    for span in (good, bad):
        assert (span.name, span.parent.span_id) == ("headwater.task", whole.context.span_id)
        assert span.attributes["headwater.task"] == "Divides"
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time
    assert (good.status.is_unset, bad.attributes["error.type"]) == (True, "QueryFailed")


class Numbers:
    """A collector of one landing and its lag."""

    def __init__(self) -> None:
        self.collected = 0

    def describe(self) -> Iterable[MetricFamily]:
        yield CounterMetricFamily("headwater_land_rows_total", "Rows.", labels=("bucket",))
        yield GaugeMetricFamily("headwater_land_lag_seconds", "Lag.", labels=("bucket",))

    def collect(self) -> Iterable[MetricFamily]:
        self.collected += 1
        for family in self.describe():
            family.add_metric(("travel",), 7)
            yield family


def test_the_numbers_of_prometheus_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, numbers = InMemoryMetricReader(), Numbers()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    telemetry.observe(numbers)
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    found = data.resource_metrics[0].scope_metrics[0].metrics
    seen = [(one.name, one.unit, type(one.data).__name__, one.data.data_points[0].value) for one in found]
    assert seen == [("headwater.land.rows", "", "Sum", 7), ("headwater.land.lag_seconds", "s", "Gauge", 7)]
    assert found[0].data.data_points[0].attributes == {"bucket": "travel"}
    assert numbers.collected == 1, "once for all of them"
