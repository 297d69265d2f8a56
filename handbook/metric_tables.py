"""Tables of metrics and of the log: from the collectors that Prometheus reads, from what is written below a reader's
numbers, and from the fields and events of the log.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, cast, get_args, get_type_hints

from prometheus_client.metrics_core import Metric

from handbook.markdown import code, table, written_below
from headwater.cli.land import LandingMetrics
from headwater.client.metrics import ReaderMetrics
from headwater.client.prometheus import READER_LABELS, ReaderCollector
from headwater.log_fields import Fields, LogEvent
from headwater.node.http.dashboard.metrics import NodeCollector
from headwater.spark.landing_loop import LandingStatus


class _NoNode:
    """Stands for a node: without buckets a collector has all families, and no numbers for them."""

    server_version = ""
    is_ready = False

    def uptime_s(self) -> float:
        return 0.0


def client_metrics_table() -> str:
    return _families(ReaderCollector().describe(), common=READER_LABELS)


def node_metrics_table() -> str:
    return _families(NodeCollector(cast(Any, _NoNode()), ()).collect())


def landing_metrics_table() -> str:
    # What is not known would leave its metric out.
    status = LandingStatus(**dict.fromkeys((field.name for field in fields(LandingStatus)), cast(Any, 0)))
    return _families(LandingMetrics("", lambda: status, page="").collect(), common=("bucket",))


def _families(families: Iterable[Metric], common: Sequence[str] = ()) -> str:
    """The labels of each but those that all of them have, which the page names at once."""
    rows = []
    for one in families:
        name = f"{one.name}_total" if one.type == "counter" else one.name
        labels = [code(label) for label in cast(Any, one)._labelnames if label not in common]
        rows.append((code(name), one.type, ", ".join(labels), one.documentation))
    if not any(labels for _, _, labels, _ in rows):
        return table(("metric", "type", "meaning"), [(name, kind, meaning) for name, kind, _, meaning in rows])
    return table(("metric", "type", "labels", "meaning"), rows)


def reader_numbers_table() -> str:
    """What `ReaderMetrics.snapshot` has, in its order."""
    source = textwrap.dedent(inspect.getsource(ReaderMetrics.__init__))
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    meanings = written_below(definition.body) | _SUMMED_UP
    names = ReaderMetrics("", "").snapshot(vbuckets=True)
    return table(("number", "meaning"), [(code(name), meanings[name]) for name in names])


_SUMMED_UP = {
    "lag": "`total_seqnos`, `max_seqnos` and `vbuckets_unknown`, see below.",
    "vbuckets": "Only with `snapshot(vbuckets=True)`: for each vbucket the seqnos handed out, received and known to"
    " exist, and its lag.",
}
"""What a snapshot makes of other numbers."""


def log_fields_table() -> str:
    hints = get_type_hints(Fields, include_extras=True)
    return table(("field", "what it is"), [(code(name), get_args(hint)[1]) for name, hint in hints.items()])


def log_events_table() -> str:
    return table(("event", "what has happened"), [(code(event), meaning) for event, meaning in _events()])


def _events() -> Iterator[tuple[LogEvent, str]]:
    """Each event, with the text that stands below it in the source."""
    [source] = ast.parse(inspect.getsource(LogEvent)).body
    assert isinstance(source, ast.ClassDef)
    for member, text in pairwise(source.body):
        if isinstance(member, ast.Assign):
            assert isinstance(member.targets[0], ast.Name)
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            yield LogEvent[member.targets[0].id], str(text.value.value).rstrip(".")
