"""The pages, and what their places are filled with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from handbook.command_sections import (
    command_list,
    command_sections,
    connection_options,
    limit_options,
    management_sections,
    retention_options,
)
from handbook.drawings import (
    connection_diagram,
    consumer_diagram,
    end_reasons,
    failover_drawing,
    producer_diagram,
    rollback_drawing,
    snapshot_drawing,
)
from handbook.error_tree import error_tree, message_sections, operators_messages, status_table
from handbook.metric_tables import (
    client_metrics_table,
    landing_metrics_table,
    log_events_table,
    log_fields_table,
    node_metrics_table,
    reader_numbers_table,
)
from handbook.option_tables import (
    client_settings_table,
    old_spellings_table,
    read_options_table,
    source_options_table,
)
from handbook.protocol_tables import commands_table, controls_table, features_list, message_tables
from handbook.sizing import nodes_table, sizing_formulas, sizing_table, speed_sentence

ROOT = Path(__file__).parents[1]
_PLACE = re.compile(r"(?P<open><!-- made: (?P<name>[a-z ]+) -->\n).*?(?P<close><!-- /made -->)", re.DOTALL)

MADE: dict[str, Callable[[], str]] = {
    "commands": command_sections,
    "command list": command_list,
    "management commands": management_sections,
    "connection options": connection_options,
    "retention options": retention_options,
    "limit options": limit_options,
    "connection states": connection_diagram,
    "consumer stream": consumer_diagram,
    "producer stream": producer_diagram,
    "stream ends": end_reasons,
    "snapshot drawing": snapshot_drawing,
    "failover drawing": failover_drawing,
    "rollback drawing": rollback_drawing,
    "errors": error_tree,
    "status errors": status_table,
    "error messages": message_sections,
    "operators messages": operators_messages,
    "dcp messages": message_tables,
    "reader numbers": reader_numbers_table,
    "client metrics": client_metrics_table,
    "node metrics": node_metrics_table,
    "landing metrics": landing_metrics_table,
    "served commands": commands_table,
    "served controls": controls_table,
    "served features": features_list,
    "client settings": client_settings_table,
    "read options": read_options_table,
    "source options": source_options_table,
    "old spellings": old_spellings_table,
    "log fields": log_fields_table,
    "log events": log_events_table,
    "sizing": sizing_table,
    "sizing formulas": sizing_formulas,
    "nodes on one machine": nodes_table,
    "speed": speed_sentence,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """The page with all of its places filled."""
    return _PLACE.sub(lambda match: f"{match['open']}\n{MADE[match['name']]().strip()}\n\n{match['close']}", text)


def places(text: str) -> list[str]:
    return [match["name"] for match in _PLACE.finditer(text)]
