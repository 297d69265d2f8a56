"""DCP messages about the connection: open, control, noop, buffer-ack."""

from __future__ import annotations

from headwater.protocol.messages.base import PlainResponse, Request, message
from headwater.protocol.messages.layout import Layout, u32
from headwater.protocol.numbers import OpenIntFlag
from headwater.protocol.opcodes import Opcode

__all__ = ["BufferAck", "Control", "DcpNoop", "Open", "OpenFlags", "PlainResponse"]


class OpenFlags(OpenIntFlag):
    PRODUCER = 0x01
    """The receiver is to produce. Without it the receiver becomes a consumer."""
    NOTIFIER = 0x02
    INCLUDE_XATTRS = 0x04
    NO_VALUE = 0x08
    COLLECTIONS = 0x10
    INCLUDE_DELETE_TIMES = 0x20
    NO_VALUE_WITH_UNDERLYING_DATATYPE = 0x40
    INCLUDE_DELETED_USER_XATTRS = 0x100
    SKIP_DELETES_IN_INITIAL_BACKFILL = 0x200


@message
class Open(Request):
    """Make this connection a DCP connection and name it."""

    opcode = Opcode.DCP_OPEN
    layouts = (Layout(u32("seqno"), u32("flags", OpenFlags)),)

    seqno: int = 0
    """Reserved; 0."""
    flags: OpenFlags = OpenFlags.PRODUCER
    key: bytes
    """The connection's name."""
    value: bytes = b""
    """Optional JSON, such as the consumer's name for durable writes."""


@message
class Control(Request):
    """Set one parameter of the connection."""

    opcode = Opcode.DCP_CONTROL

    key: bytes
    value: bytes


@message
class DcpNoop(Request):
    """Are you alive? The response echoes the opaque."""

    opcode = Opcode.DCP_NOOP


@message
class BufferAck(Request):
    """The consumer has taken this many bytes; the producer may send as many more. No response."""

    opcode = Opcode.DCP_BUFFER_ACK
    layouts = (Layout(u32("acked_bytes")),)

    acked_bytes: int
