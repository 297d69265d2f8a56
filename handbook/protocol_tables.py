"""Tables of the protocol: the fields of every DCP message, from the codec's layouts, and what a node serves.

What a node serves comes from the tables by which it does: messages by the right they need, controls, HELLO features.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from handbook.markdown import code, sentence, table, written_below
from headwater.node.auth.users import Action
from headwater.node.kv.handlers import HANDLERS
from headwater.node.kv.handlers.connection import SERVED_FEATURES
from headwater.node.kv.permissions import NEEDED, NEEDS_NO_LOGIN
from headwater.node.producer.controls import CONTROLS, Controls
from headwater.protocol.features import Opcode
from headwater.protocol.messages import base
from headwater.protocol.messages.base import Message, Request


def message_tables() -> str:
    return "\n\n".join(_sections())


def _sections() -> Iterator[str]:
    for opcode in sorted(opcode for opcode in Opcode if opcode.name.startswith("DCP_")):
        request = base.REQUESTS.get(opcode)
        if request is None:
            continue
        yield f"## 0x{opcode:02x} {opcode.name}"
        # Where nothing is written, a dataclass has its signature.
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
    Action.SECURITY: "that of a full admin",
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
