"""Spans of a test, kept in memory by OpenTelemetry's SDK."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Traces:
    """What was recorded. In the SDK's types, some attributes may be None that an ended span always has."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def spans(self, name: str | None = None) -> list[Any]:
        """Return the spans in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if name in (None, span.name)]
