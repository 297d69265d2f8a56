"""A table of fields for every DCP message, from the codec's layouts."""

from __future__ import annotations

from collections.abc import Iterator

from handbook.markdown import code, sentence, table
from headwater.protocol.features import Opcode
from headwater.protocol.messages import base
from headwater.protocol.messages.base import Message


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
