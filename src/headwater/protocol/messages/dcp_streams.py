"""DCP messages about a connection and its streams: open, control, noop, buffer-ack, and what opens and ends a stream.

The seeds "Add Stream" and "Stream Request" define their layouts, and for the others the pages of the same names in
kv_engine's docs/dcp/documentation/commands.
"""

from __future__ import annotations

from typing import Any

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Opcode, OpenIntEnum, OpenIntFlag
from headwater.protocol.features import VBucketState as VBucketState
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.base import Layout, Request, Response, ValueCodec, message, u8, u32, u64
from headwater.protocol.numbers import SEQNO_MAX, Seqno, Vbuuid
from headwater.protocol.status import Status


class OpenFlags(OpenIntFlag):
    PRODUCER = 0x01
    """The receiver becomes a producer; without this flag it becomes a consumer."""
    NOTIFIER = 0x02
    INCLUDE_XATTRS = 0x04
    NO_VALUE = 0x08
    COLLECTIONS = 0x10
    INCLUDE_DELETE_TIMES = 0x20
    NO_VALUE_WITH_UNDERLYING_DATATYPE = 0x40
    INCLUDE_DELETED_USER_XATTRS = 0x100
    SKIP_DELETES_IN_INITIAL_BACKFILL = 0x200


@message(Opcode.DCP_OPEN)
class Open(Request):
    """Make this connection a DCP connection and name it."""

    layouts = (Layout(u32("seqno"), u32("flags", OpenFlags)),)

    seqno: int = 0
    """Reserved; 0."""
    flags: OpenFlags = OpenFlags.PRODUCER
    key: bytes
    """The connection's name."""
    value: bytes = b""
    """Optional JSON, such as the consumer's name for durable writes."""


@message(Opcode.DCP_CONTROL)
class Control(Request):
    """Set one parameter of the connection."""

    key: bytes
    value: bytes


@message(Opcode.DCP_NOOP)
class DcpNoop(Request):
    """Check that the peer is alive. The response echoes the opaque."""


@message(Opcode.DCP_BUFFER_ACK)
class BufferAck(Request):
    """The consumer has processed this many bytes; the producer may send as many more. No response."""

    layouts = (Layout(u32("acked_bytes")),)

    acked_bytes: int


# --- streams ----------------------------------------------------------------------------------------------------------


class StreamFlags(OpenIntFlag):
    """The flags of add-stream and of stream-request (Add Stream; those from 0x40 on are in kv_engine's page only)."""

    TAKEOVER = 0x01
    DISK_ONLY = 0x02
    LATEST = 0x04
    NO_VALUE = 0x08
    ACTIVE_ONLY = 0x10
    STRICT_VBUUID = 0x20
    FROM_LATEST = 0x40
    IGNORE_PURGED_TOMBSTONES = 0x80
    CACHE_TRANSFER = 0x100


class StreamEndReason(OpenIntEnum):
    OK = 0
    CLOSED = 1
    STATE_CHANGED = 2
    DISCONNECTED = 3
    TOO_SLOW = 4
    BACKFILL_FAILED = 5
    ROLLBACK = 6
    FILTER_EMPTY = 7
    LOST_PRIVILEGES = 8


@message(Opcode.DCP_ADD_STREAM)
class AddStream(Request):
    """Make a consumer request a stream from its producer."""

    layouts = (Layout(u32("flags", StreamFlags)),)

    flags: StreamFlags = StreamFlags(0)


@message(Opcode.DCP_ADD_STREAM)
class AddStreamResponse(Response):
    layouts = (Layout(u32("stream_opaque")),)

    opcode: Opcode = Opcode.DCP_ADD_STREAM
    stream_opaque: int
    """The opaque of all messages of the new stream."""


@message(Opcode.DCP_CLOSE_STREAM)
class CloseStream(Request): ...


@message(Opcode.DCP_STREAM_REQUEST)
class StreamRequest(Request):
    """Ask a producer for the changes of one vbucket."""

    layouts = (
        Layout(
            u32("flags", StreamFlags),
            u32("reserved"),
            u64("start_seqno"),
            u64("end_seqno"),
            u64("vbuuid"),
            u64("snapshot_start_seqno"),
            u64("snapshot_end_seqno"),
        ),
    )

    flags: StreamFlags = StreamFlags(0)
    reserved: int = 0
    start_seqno: Seqno = Seqno(0)
    """The last seqno the consumer has."""
    end_seqno: Seqno = SEQNO_MAX
    vbuuid: Vbuuid = Vbuuid(0)
    snapshot_start_seqno: Seqno = Seqno(0)
    snapshot_end_seqno: Seqno = Seqno(0)
    value: bytes = b""
    """JSON, see `stream_requests.StreamRequestValue`."""


FAILOVER_ENTRY = Layout(u64("vbuuid"), u64("seqno"))
ROLLBACK_VALUE = Layout(u64("rollback_seqno"))


def encode_failover_log(entries: tuple[FailoverEntry, ...]) -> bytes:
    return b"".join(FAILOVER_ENTRY.pack(entry) for entry in entries)


def decode_failover_log(value: bytes) -> tuple[FailoverEntry, ...]:
    if len(value) % FAILOVER_ENTRY.size_bytes:
        raise MalformedMessage(
            f"a failover log of {len(value)} bytes is no whole number of 16-byte entries", offset=HEADER_BYTES
        )
    return tuple(
        FailoverEntry(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno)) for vbuuid, seqno in FAILOVER_ENTRY.repeat(value)
    )


_FAILOVER_LOG = ValueCodec("failover_log", encode_failover_log, decode_failover_log)


@message(Opcode.DCP_STREAM_REQUEST)
class StreamRequestResponse(Response):
    """The failover log on success, the seqno to roll back to on ROLLBACK."""

    statuses = frozenset({Status.SUCCESS, Status.ROLLBACK})
    value_layout = ROLLBACK_VALUE

    opcode: Opcode = Opcode.DCP_STREAM_REQUEST
    failover_log: tuple[FailoverEntry, ...] = ()
    rollback_seqno: Seqno | None = None

    def encode_value(self) -> bytes:
        if (self.status == Status.ROLLBACK) != (self.rollback_seqno is not None):
            raise LocalProtocolError("a rollback seqno belongs to the status ROLLBACK and to no other")
        return encode_failover_log(self.failover_log) if self.rollback_seqno is None else ROLLBACK_VALUE.pack(self)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        # Stream Request: an OK response includes the failover log, a rollback response the seqno to roll back to.
        if known["status"] != Status.ROLLBACK:
            return {"failover_log": decode_failover_log(value)}
        return super(StreamRequestResponse, cls).decode_value(value, known)


@message(Opcode.DCP_GET_FAILOVER_LOG)
class GetFailoverLog(Request): ...


@message(Opcode.GET_FAILOVER_LOG)
class GetFailoverLogByKv(GetFailoverLog):
    """The same on a connection that is not a DCP connection."""


@message(Opcode.DCP_GET_FAILOVER_LOG, Opcode.GET_FAILOVER_LOG)
class GetFailoverLogResponse(Response):
    value_codec = _FAILOVER_LOG

    opcode: Opcode = Opcode.DCP_GET_FAILOVER_LOG
    failover_log: tuple[FailoverEntry, ...] = ()


@message(Opcode.DCP_STREAM_END)
class StreamEnd(Request):
    layouts = (Layout(u32("reason", StreamEndReason)),)

    reason: StreamEndReason = StreamEndReason.OK


@message(Opcode.DCP_SET_VBUCKET_STATE)
class SetVBucketState(Request):
    """In a takeover, sets the state of the consumer's vbucket. Answered with an empty response."""

    layouts = (Layout(u8("state", VBucketState)),)

    state: VBucketState
