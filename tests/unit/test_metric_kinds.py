"""Tables of metrics: the kind of a family, its labels, and numbers that are not known."""

from __future__ import annotations

from headwater.metric_kinds import MetricKind, collect_metrics, one_number

KINDS: tuple[MetricKind[dict[str, float | None]], ...] = (
    MetricKind("rows_total", "Rows.", one_number(lambda numbers: numbers["rows"])),
    MetricKind("lag", "Lag.", lambda numbers: [((name,), number) for name, number in numbers.items()], "of"),
)


def test_every_family_has_the_numbers_of_all_sources() -> None:
    sources = [(("beer",), {"rows": 3.0}), (("wine",), {"rows": None})]
    counter, gauge = collect_metrics(KINDS, sources, prefix="test_", labels=("bucket",))
    assert (counter.name, counter.type, gauge.name, gauge.type) == ("test_rows", "counter", "test_lag", "gauge")
    assert [(sample.labels, sample.value) for sample in counter.samples] == [({"bucket": "beer"}, 3)]
    assert [(sample.labels, sample.value) for sample in gauge.samples] == [({"bucket": "beer", "of": "rows"}, 3)]
