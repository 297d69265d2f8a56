"""The pages, and the generators that fill their places."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from handbook import command_sections, drawings, error_tree, sizing, tables, walks

ROOT = Path(__file__).parents[1]
_PLACE = re.compile(r"(?P<open><!-- made: (?P<name>[a-z ]+) -->\n).*?(?P<close><!-- /made -->)", re.DOTALL)

MADE: dict[str, Callable[[], str]] = {
    "commands": command_sections.command_sections,
    "command list": command_sections.command_list,
    "management commands": command_sections.management_sections,
    "connection options": command_sections.connection_options,
    "retention options": command_sections.retention_options,
    "limit options": command_sections.limit_options,
    "connection states": drawings.connection_diagram,
    "consumer stream": drawings.consumer_diagram,
    "producer stream": drawings.producer_diagram,
    "stream ends": drawings.end_reasons,
    "snapshot drawing": drawings.snapshot_drawing,
    "failover drawing": drawings.failover_drawing,
    "rollback drawing": drawings.rollback_drawing,
    "errors": error_tree.error_tree,
    "status errors": error_tree.status_table,
    "error messages": error_tree.message_sections,
    "operators messages": error_tree.operators_messages,
    "dcp messages": tables.message_tables,
    "reader numbers": tables.reader_numbers_table,
    "client metrics": tables.client_metrics_table,
    "node metrics": tables.node_metrics_table,
    "landing metrics": tables.landing_metrics_table,
    "served commands": tables.commands_table,
    "served controls": tables.controls_table,
    "served features": tables.features_list,
    "client settings": tables.client_settings_table,
    "read options": tables.read_options_table,
    "source options": tables.source_options_table,
    "log fields": tables.log_fields_table,
    "log events": tables.log_events_table,
    "sizing": sizing.sizing_table,
    "sizing formulas": sizing.sizing_formulas,
    "nodes on one machine": sizing.nodes_table,
    "spark versions": tables.spark_versions_table,
    "speed": sizing.speed_sentence,
    "walk of a set": walks.set_walk,
    "walk of a rollback": walks.rollback_walk,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """Return the page with all of its places filled."""
    return _PLACE.sub(lambda match: f"{match['open']}\n{MADE[match['name']]().strip()}\n\n{match['close']}", text)


def places(text: str) -> list[str]:
    return [match["name"] for match in _PLACE.finditer(text)]
