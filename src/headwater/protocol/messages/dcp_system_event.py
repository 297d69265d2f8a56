"""The system-event message. What its key and value mean is `headwater.protocol.system_events`' business."""

from __future__ import annotations

from headwater.protocol.messages.base import Request, message
from headwater.protocol.messages.layout import Layout, u8, u32, u64
from headwater.protocol.numbers import OpenIntEnum, Seqno
from headwater.protocol.opcodes import Opcode


class SystemEventId(OpenIntEnum):
    COLLECTION_CREATED = 0
    COLLECTION_DROPPED = 1
    SCOPE_CREATED = 3
    SCOPE_DROPPED = 4
    COLLECTION_MODIFIED = 5


@message
class SystemEvent(Request):
    """A collection or a scope has come, gone or changed."""

    opcode = Opcode.DCP_SYSTEM_EVENT
    layouts = (Layout(u64("seqno"), u32("event", SystemEventId), u8("version")),)

    seqno: Seqno
    event: SystemEventId
    version: int = 0
    key: bytes = b""
    value: bytes = b""
