"""What a node serves, from the tables by which it does: messages by the right they need, controls, HELLO features."""

from __future__ import annotations

import ast
import inspect

from handbook.markdown import code, table
from handbook.written_below import written_below
from headwater.node.auth.users import Action
from headwater.node.kv.handlers import HANDLERS
from headwater.node.kv.handlers.connection import SERVED_FEATURES
from headwater.node.kv.permissions import NEEDED, NEEDS_NO_LOGIN
from headwater.node.producer.controls import CONTROLS, Controls
from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import Request

_RIGHTS = {
    None: "none, not even a log-in",
    Action.USE: "to use the bucket",
    Action.READ: "to read",
    Action.WRITE: "to write",
    Action.STREAM: "to stream",
    Action.ADMIN: "to administer",
}


def commands_table() -> str:
    """Every message of a key-value connection, by opcode within its right."""
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
