"""What a node's log carries for programs: the names of the fields, and the events."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import get_args, get_type_hints

from handbook.markdown import code, table
from headwater.log_fields import Fields, LogEvent


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
