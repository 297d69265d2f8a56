"""One way to run a transition table.

A machine is an enum of states and a table: state → event type → next state. What is not in the table is not allowed.
Events are types: the messages themselves where a message is the event, small classes where something else is.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from headwater.errors import UnexpectedMessage

S = TypeVar("S", bound=Enum)

Table = Mapping[S, Mapping[type[Any], S]]


def transition(table: Table[S], state: S, event: type[Any]) -> S:
    """The state after `event`, or `UnexpectedMessage` where the table has none."""
    allowed = table[state]
    if event in allowed:
        return allowed[event]
    names = ", ".join(sorted(kind.__name__ for kind in allowed)) or "nothing"
    raise UnexpectedMessage(f"{event.__name__} in state {state.name}, which allows {names}")


def all_events(table: Table[S]) -> frozenset[type[Any]]:
    """Every event the machine knows, in any state."""
    return frozenset(event for row in table.values() for event in row)
