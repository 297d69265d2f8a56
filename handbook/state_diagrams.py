"""State machines as Mermaid diagrams, drawn from the tables that the code runs by."""

from __future__ import annotations

import re
from collections import defaultdict
from enum import Enum
from typing import Any

from handbook.markdown import code, sentence, table
from headwater.protocol.states import CONSUMER_STREAM, END_REASONS, PRODUCER_ENDPOINT, PRODUCER_STREAM, Table

_EVENTS_SHOWN = 3
_CHANGES = {"Mutation", "Deletion", "Expiration", "SystemEvent", "Prepare", "Commit", "Abort", "SeqnoAdvanced"}


def producer_diagram() -> str:
    return _diagram(PRODUCER_STREAM, shortened={kind.__name__ for kind in END_REASONS}, short="any end")


def consumer_diagram() -> str:
    return _diagram(CONSUMER_STREAM, shortened=_CHANGES, short="changes")


def connection_diagram() -> str:
    return _diagram(PRODUCER_ENDPOINT, shortened=set(), short="")


def _diagram(machine: Table[Any], *, shortened: set[str], short: str) -> str:
    """Events with the same effect share an arrow; those in `shortened` are called `short` where all are there."""
    states = list(machine)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {_name(states[0])}"]
    for state in states:
        by_target: dict[Enum, list[str]] = defaultdict(list)
        for event, target in machine[state].items():
            by_target[target].append(event.__name__)
        for target, events in by_target.items():
            lines.append(f"    {_name(state)} --> {_name(target)}: {_label(events, shortened, short)}")
        if not machine[state]:
            lines.append(f"    {_name(state)} --> [*]")
    return "\n".join([*lines, "```"])


def _label(events: list[str], shortened: set[str], short: str) -> str:
    together = [event for event in events if event in shortened]
    others = [_words(event) for event in events if event not in shortened]
    if len(together) > _EVENTS_SHOWN:
        others.append(short)
    else:
        others += [_words(event) for event in together]
    if len(others) > _EVENTS_SHOWN + 1:
        more = len(others) - _EVENTS_SHOWN
        others = [*others[:_EVENTS_SHOWN], f"{more} more"]
    return ", ".join(others)


def _name(state: Enum) -> str:
    return state.name.lower()


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower().replace("dcp ", "")


def end_reasons() -> str:
    rows = [
        (str(int(reason)), code(reason.name), sentence(cause.__doc__))
        for cause, reason in sorted(END_REASONS.items(), key=lambda item: int(item[1]))
    ]
    return table(("reason", "name", "when"), rows)
