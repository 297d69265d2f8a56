"""Tables of options, metrics, the log and the protocol, each from the code that defines them.

Options come from the dataclasses, metrics from the collectors that Prometheus reads, and the meaning of a number
from the docstring below it. What a node serves comes from its own tables: messages by the privilege they need,
controls, HELLO features. `make spark-versions` has recorded what works with which PySpark.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from prometheus_client.metrics_core import Metric

from handbook.markdown import code, sentence, table, written_below
from headwater.cli.land import METRICS_LABELS, LandingCollector, LandingMetrics
from headwater.client.metrics import ReaderMetrics
from headwater.client.prometheus import READER_LABELS, ReaderCollector
from headwater.client.read_options import READ_OPTIONS
from headwater.client.settings import CONNECT_OPTIONS
from headwater.landing.loop import LandingStatus
from headwater.landing.source_options import SOURCE_OPTIONS
from headwater.log_fields import Fields, LogEvent
from headwater.node.auth.users import Action
from headwater.node.http.dashboard.dashboard import NodeCollector
from headwater.node.kv.handlers import HANDLERS, NEEDED, NEEDS_NO_LOGIN
from headwater.node.kv.handlers.connection import SERVED_FEATURES
from headwater.node.producer.controls import CONTROLS, Controls
from headwater.options import Option
from headwater.protocol.features import Opcode
from headwater.protocol.messages import base
from headwater.protocol.messages.base import Message, Request

# --- options -------------------------------------------------------------------------------------------------------


def read_options_table() -> str:
    return _spellings(READ_OPTIONS.values())


def client_settings_table() -> str:
    return _spellings(CONNECT_OPTIONS.values())


def _spellings(options: Iterable[Option]) -> str:
    rows = [
        (
            code(option.name) if option.python else "",
            code(option.in_spark) if option.spark else "",
            code(option.on_command_line) if option.commands else "",
            f"{code(option.type_name)}{f', {option.unit}' if option.unit else ''}",
            _default(option, option.default),
            option.help,
        )
        for option in options
    ]
    return table(("Python", "Spark", "command line", "type", "default", "meaning"), rows)


def source_options_table() -> str:
    rows = [
        (
            code(option.in_spark),
            _default(option, option.default if option.spark_default is None else option.spark_default),
            " ".join(filter(None, (option.help, option.spark_note))),
        )
        for option in SOURCE_OPTIONS.values()
    ]
    return table(("option", "default", "meaning"), rows)


def _default(option: Option, default: object) -> str:
    """Return a default as one would write it in Spark or on the command line."""
    if option.default_words is not None:
        return option.default_words
    if default is None:
        return "none"
    return code(str(default).lower() if isinstance(default, bool) else str(default))


# --- metrics and the log -------------------------------------------------------------------------------------------


class _NoNode:
    """Stands for a node: without buckets, a collector has all families, but no samples."""

    server_version = ""
    is_ready = False

    def uptime_s(self) -> float:
        return 0.0


def client_metrics_table() -> str:
    return _families(ReaderCollector().describe(), common=READER_LABELS)


def node_metrics_table() -> str:
    return _families(NodeCollector(cast(Any, _NoNode()), ()).collect())


def landing_metrics_table() -> str:
    # An unknown value would leave its metric out.
    status = LandingStatus(**dict.fromkeys((field.name for field in fields(LandingStatus)), cast(Any, 0)))
    landing = LandingMetrics("", lambda: status, page="")
    return _families(LandingCollector(landing).collect(), common=METRICS_LABELS)


def _families(families: Iterable[Metric], common: Sequence[str] = ()) -> str:
    """Return the families with their labels, except those that all of them have, which the page names once."""
    rows = []
    for one in families:
        name = f"{one.name}_total" if one.type == "counter" else one.name
        labels = [code(label) for label in cast(Any, one)._labelnames if label not in common]
        rows.append((code(name), one.type, ", ".join(labels), one.documentation))
    if not any(labels for _, _, labels, _ in rows):
        return table(("metric", "type", "meaning"), [(name, kind, meaning) for name, kind, _, meaning in rows])
    return table(("metric", "type", "labels", "meaning"), rows)


def reader_numbers_table() -> str:
    """Return the numbers of `ReaderMetrics.snapshot`, in its order."""
    source = textwrap.dedent(inspect.getsource(ReaderMetrics.__init__))
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    meanings = written_below(definition.body) | _SUMMED_UP
    names = ReaderMetrics("", "").snapshot(vbuckets=True)
    return table(("number", "meaning"), [(code(name), meanings[name]) for name in names])


_SUMMED_UP = {
    "lag": "`total_seqnos`, `max_seqnos` and `vbuckets_unknown`, see below.",
    "vbuckets": "Only with `snapshot(vbuckets=True)`: for each vbucket the seqnos returned, received and known to"
    " exist, and its lag.",
}
"""Numbers that a snapshot derives from others."""


def log_fields_table() -> str:
    hints = get_type_hints(Fields, include_extras=True)
    return table(("field", "what it is"), [(code(name), get_args(hint)[1]) for name, hint in hints.items()])


def log_events_table() -> str:
    return table(("event", "what has happened"), [(code(event), meaning) for event, meaning in _events()])


def _events() -> Iterator[tuple[LogEvent, str]]:
    """Yield each event with the docstring below it in the source."""
    [source] = ast.parse(inspect.getsource(LogEvent)).body
    assert isinstance(source, ast.ClassDef)
    for member, text in pairwise(source.body):
        if isinstance(member, ast.Assign):
            assert isinstance(member.targets[0], ast.Name)
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            yield LogEvent[member.targets[0].id], str(text.value.value).rstrip(".")


# --- the protocol --------------------------------------------------------------------------------------------------


def message_tables() -> str:
    return "\n\n".join(_message_sections())


def _message_sections() -> Iterator[str]:
    for opcode in sorted(opcode for opcode in Opcode if opcode.name.startswith("DCP_")):
        request = base.REQUESTS.get(opcode)
        if request is None:
            continue
        yield f"## 0x{opcode:02x} {opcode.name}"
        # A dataclass without a docstring has its signature instead.
        if not (request.__doc__ or "").startswith(f"{request.__name__}("):
            yield sentence(request.__doc__)
        yield _parts(request)
        response = base.RESPONSES.get(opcode)
        if response is not None and response.layouts[0].fields:
            yield f"The response, `{response.__name__}`:"
            yield _parts(response)


def _parts(kind: type[Message]) -> str:
    rows = []
    for number, layout in enumerate(kind.layouts, start=1):
        which = f"extras, form {number}" if len(kind.layouts) > 1 else "extras"
        if not layout.fields:
            rows.append((which, "none", ""))
            continue
        fields = ", ".join(f"{code(field.name)} {field.width_bytes * 8} bits" for field in layout.fields)
        rows.append((which, f"{layout.size_bytes} bytes", fields))
    for part in ("key", "value"):
        if part in kind._may_have:
            needed = "needed" if part in kind._must_have else "optional"
            of = "with the collection's id before it, where collections are negotiated" if part == "key" else ""
            rows.append((part, needed, of if "collection_id" in kind._may_have else ""))
    return f"`headwater.protocol.{kind.__name__}`\n\n" + table(("part", "", "fields"), rows)


_RIGHTS = {
    None: "none, not even a log-in",
    Action.USE: "to use the bucket",
    Action.READ: "to read",
    Action.WRITE: "to write",
    Action.STREAM: "to stream",
    Action.ADMIN: "to administer",
    Action.NODE: "of a node, or a full admin",
    Action.SECURITY: "of a full admin",
}


def commands_table() -> str:
    """Return every message of a key-value connection, by opcode within its privilege."""
    rows = []
    for right, words in _RIGHTS.items():
        served = sorted(int(message.opcode) for message in HANDLERS if _needed(message) is right)
        rows.append((words, ", ".join(f"{_name(opcode)} {code(f'0x{opcode:02x}')}" for opcode in served)))
    return table(("right", "messages"), rows)


def _needed(message: type[Request]) -> Action | None:
    return None if message in NEEDS_NO_LOGIN else NEEDED.get(message, Action.READ)


def _name(opcode: int) -> str:
    return Opcode(opcode).name.lower().replace("_", "-")


def controls_table() -> str:
    [definition] = ast.parse(inspect.getsource(Controls)).body
    assert isinstance(definition, ast.ClassDef)
    meanings = written_below(definition.body)
    return table(("control", "meaning"), [(code(key), meanings[field]) for key, (field, _) in CONTROLS.items()])


def features_list() -> str:
    names = (
        f"{feature.name.lower().replace('_', '-')} {code(f'0x{feature:02x}')}" for feature in sorted(SERVED_FEATURES)
    )
    return ", ".join(names) + "."


# --- versions of PySpark ---------------------------------------------------------------------------------------------

TRIED = Path(__file__).parents[1] / "docs" / "internals" / "spark-versions.json"
_FEATURES = {
    "land": "`land`",
    "verify": "`verify`",
    "documents": "`documents`",
    "spark-submit": "`spark-submit`",
    "dcp, batch": "`dcp`, batch",
    "dcp, stream": "`dcp`, stream",
    "Spark Connect": "Spark Connect",
    "pushed filters": "pushed filters",
    "pipelines": "pipelines",
}
"""The features, by the names in the marks of tests."""
_STATES = {"passed": "yes", "failed": "**fails**", "skipped": "–"}


def spark_versions_table() -> str:
    rows = [
        (
            *(result["versions"][name] for name in ("pyspark", "python", "pandas")),
            *(_STATES.get(result["features"].get(name, ""), "untried") for name in _FEATURES),
            result["date"],
        )
        for result in json.loads(TRIED.read_text(encoding="utf-8"))
    ]
    return table(("PySpark", "Python", "pandas", *_FEATURES.values(), "tried on"), rows)
