"""One class a packet of the UPR draft, `decode_packet`, and the table it looks the class up in.

A packet's class says what its body holds, in wire order: `extras_layout`, `key_field`, then a value that is a
document's (`value_field`) or a `value_layout` over and over. The lengths of a received packet must be those
of its class. Fields are named as the draft names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from headwater.errors import LengthMismatch, LocalProtocolError, MalformedMessage, UnknownOpcode
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Magic
from headwater.protocol.frames import HEADER_BYTES, Frame
from headwater.protocol.messages.base import NO_FIELDS, Layout, u8, u16, u32, u64
from headwater.protocol.messages.dcp_streams import decode_failover_log, encode_failover_log
from headwater.protocol.numbers import KEY_BYTES_MAX, SEQNO_MAX, Cas, OpenIntEnum, Seqno, VBucketId, Vbuuid

# The numbers of the UPR draft: opcodes (byte 1) and what byte 5 says under each of them.


class UprOpcode(IntEnum):
    """All there are. memcached gives the same numbers to SET, ADD, REPLACE, DELETE and INCREMENT."""

    REQUEST = 1
    RESPONSE = 2
    STREAM_BEGIN = 3
    STREAM_MESSAGE = 4
    STREAM_CLOSE = 5

    @property
    def magic(self) -> Magic:
        """Only a request has the request magic: what a producer sends answers one, stream messages too."""
        return Magic.REQUEST if self is UprOpcode.REQUEST else Magic.RESPONSE


class RequestType(IntEnum):
    STREAM_REQUEST = 1
    FAILOVER_LOG_REQUEST = 2


class ResponseType(IntEnum):
    OK = 1
    NOT_MY_VBUCKET = 2
    """The failover log response is drawn with this number, too; see the package's own page for who is who."""
    ROLLBACK = 3


class StreamMessageType(IntEnum):
    SNAPSHOT_START = 1
    SNAPSHOT_END = 2
    MUTATION = 3
    DELETION = 4
    EXPIRATION = 5
    FLUSH = 6


class StreamEndReason(OpenIntEnum):
    """Why a stream ended. A number the draft does not know is kept: the stream has ended all the same."""

    OK = 1
    STATE_CHANGED = 2


FAILOVER_LOG_PAIRS_MAX = 1024
"""The draft's own limit, far above what a vbucket keeps today (`limits.FAILOVER_LOG_ENTRIES_MAX`)."""

_OPCODES = frozenset(UprOpcode)
_HEADER_NUMBERS = Layout(u8("request_type"), u16("vbucket"), u32("request_id"), u64("cas"))
_NO_ANSWER = "Close the connection: the UPR draft has no response that refuses a packet"

# Where a fault in the lengths lies: the offsets of the header's length fields.
_KEY_LENGTH_AT = 2
_EXTRA_LENGTH_AT = 4
_REQUEST_TYPE_AT = 5
_TOTAL_BODY_AT = 8

C = TypeVar("C")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def packet(cls: type[C]) -> type[C]:
    """Make a class a packet: a value, with its fields given by name."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@packet
class Packet:
    """What all packets share: the header, and a body that is empty unless the class says otherwise."""

    opcode: ClassVar[UprOpcode]
    subtype: ClassVar[int] = 0
    extras_layout: ClassVar[Layout] = NO_FIELDS
    key_field: ClassVar[str | None] = None
    key_required: ClassVar[bool] = False
    value_layout: ClassVar[Layout] = NO_FIELDS
    value_field: ClassVar[str | None] = None

    vbucket: VBucketId = VBucketId(0)
    """In requests and responses alike: where memcached has a response's status, UPR has the vbucket."""
    request_id: int = 0
    """The request that this packet is, or answers. A stream's packets bear the id of its stream request."""
    cas: Cas = Cas(0)
    """The document's; 0 in packets about no document, though a number found there is kept."""

    @property
    def request_type(self) -> int:
        """Byte 5, which goes by this name in every packet of the draft."""
        return self.subtype

    def encode_key(self) -> bytes:
        key: bytes = getattr(self, self.key_field) if self.key_field else b""
        if self.key_required and not key:
            raise LocalProtocolError(f"{type(self).__name__} must have a {self.key_field}")
        if len(key) > KEY_BYTES_MAX:
            raise LocalProtocolError(f"a {self.key_field} of {len(key)} bytes exceeds {KEY_BYTES_MAX}")
        return key

    def encode_value(self) -> bytes:
        return b""

    def to_frame(self) -> Frame:
        # The frame packs the header's numbers without a look at their range.
        _HEADER_NUMBERS.pack(self)
        return Frame(
            magic=self.opcode.magic,
            opcode=self.opcode,
            datatype=self.request_type,
            specific=self.vbucket,
            opaque=self.request_id,
            cas=self.cas,
            extras=self.extras_layout.pack(self),
            key=self.encode_key(),
            value=self.encode_value(),
        )

    def encode(self) -> bytes:
        return self.to_frame().encode()

    @classmethod
    def decode_extras(cls, extras: bytes) -> dict[str, Any]:
        if len(extras) != cls.extras_layout.size_bytes:
            # The draft's own packets say 8 bytes more than they draw. Whoever believes them has taken 8 bytes
            # of the key, and as many of the next packet.
            raise LengthMismatch(
                f"{cls.__name__} must have extras of {cls.extras_layout.size_bytes} bytes, not {len(extras)}",
                offset=_EXTRA_LENGTH_AT,
            )
        return dict(cls.extras_layout.unpack(extras))

    @classmethod
    def decode_key(cls, key: bytes) -> dict[str, Any]:
        if cls.key_field is None:
            if key:
                raise LengthMismatch(f"{cls.__name__} must not have a key", offset=_KEY_LENGTH_AT)
            return {}
        if cls.key_required and not key:
            raise LengthMismatch(f"{cls.__name__} must have a {cls.key_field}", offset=_KEY_LENGTH_AT)
        if len(key) > KEY_BYTES_MAX:
            raise MalformedMessage(
                f"a {cls.key_field} of {len(key)} bytes exceeds {KEY_BYTES_MAX}",
                offset=_KEY_LENGTH_AT,
                hint=_NO_ANSWER,
            )
        return {cls.key_field: key}

    @classmethod
    def decode_value(cls, value: bytes) -> dict[str, Any]:
        if value:
            raise LengthMismatch(
                f"{cls.__name__} must not have a value, but {len(value)} bytes are left of its body",
                offset=_TOTAL_BODY_AT,
            )
        return {}

    @classmethod
    def decode_request_type(cls, request_type: int) -> dict[str, Any]:
        """The fields that byte 5 holds: none but for a stream end, as it has named the class already."""
        return {}

    @classmethod
    def from_frame(cls, frame: Frame) -> Self:
        """The packet of a frame that is known to be of this class, as `decode_packet` finds out."""
        return cls(
            vbucket=VBucketId(frame.specific),
            request_id=frame.opaque,
            cas=Cas(frame.cas),
            **cls.decode_request_type(frame.datatype),
            **cls.decode_extras(frame.extras),
            **cls.decode_key(frame.key),
            **cls.decode_value(frame.value),
        )


# --- requests -----------------------------------------------------------------------------------------------


@packet
class StreamRequest(Packet):
    """Ask for the changes of one vbucket."""

    opcode = UprOpcode.REQUEST
    subtype = RequestType.STREAM_REQUEST
    extras_layout = Layout(u64("start_by_seqno"), u64("end_by_seqno"), u64("vbucket_uuid"), u64("high_seqno"))
    key_field = "group_id"

    start_by_seqno: Seqno = Seqno(0)
    """The last seqno the consumer has."""
    end_by_seqno: Seqno = SEQNO_MAX
    vbucket_uuid: Vbuuid = Vbuuid(0)
    high_seqno: Seqno = Seqno(0)
    """Where the branch `vbucket_uuid` began: the high seqno when that uuid was made."""
    group_id: bytes = b""
    """A name for the stream; it may have none."""


@packet
class FailoverLogRequest(Packet):
    """Ask for the failover log of one vbucket."""

    opcode = UprOpcode.REQUEST
    subtype = RequestType.FAILOVER_LOG_REQUEST


# --- responses ----------------------------------------------------------------------------------------------


@packet
class StreamOk(Packet):
    """The stream is granted, and begins."""

    opcode = UprOpcode.RESPONSE
    subtype = ResponseType.OK


@packet
class NotMyVBucket(Packet):
    """The vbucket is not here: the answer to either request."""

    opcode = UprOpcode.RESPONSE
    subtype = ResponseType.NOT_MY_VBUCKET


@packet
class FailoverLogResponse(Packet):
    """The branches of the vbucket's history, at least one."""

    opcode = UprOpcode.RESPONSE
    subtype = ResponseType.NOT_MY_VBUCKET
    value_layout = Layout(u64("vbucket_uuid"), u64("high_seqno"))

    failover_log: tuple[FailoverEntry, ...]

    def encode_value(self) -> bytes:
        if not 1 <= len(self.failover_log) <= FAILOVER_LOG_PAIRS_MAX:
            raise LocalProtocolError(
                f"a failover log has 1 to {FAILOVER_LOG_PAIRS_MAX} pairs, not {len(self.failover_log)}",
                hint="Answer NotMyVBucket where there is no failover log",
            )
        return encode_failover_log(self.failover_log)

    @classmethod
    def decode_value(cls, value: bytes) -> dict[str, Any]:
        pairs, left = divmod(len(value), cls.value_layout.size_bytes)
        if left or not pairs:
            raise LengthMismatch(
                f"a failover log of {len(value)} bytes is no whole number of 16-byte pairs",
                offset=_TOTAL_BODY_AT,
            )
        if pairs > FAILOVER_LOG_PAIRS_MAX:
            raise MalformedMessage(
                f"a failover log of {pairs} pairs exceeds {FAILOVER_LOG_PAIRS_MAX}",
                offset=_TOTAL_BODY_AT,
                hint=_NO_ANSWER,
            )
        return {"failover_log": decode_failover_log(value)}


@packet
class Rollback(Packet):
    """The consumer must drop what it has after `rollback_seqno` and ask again."""

    opcode = UprOpcode.RESPONSE
    subtype = ResponseType.ROLLBACK
    value_layout = Layout(u64("rollback_seqno"))

    rollback_seqno: Seqno

    def encode_value(self) -> bytes:
        return self.value_layout.pack(self)

    @classmethod
    def decode_value(cls, value: bytes) -> dict[str, Any]:
        if len(value) != cls.value_layout.size_bytes:
            raise LengthMismatch(f"a rollback seqno of {len(value)} bytes, not 8", offset=_TOTAL_BODY_AT)
        return dict(cls.value_layout.unpack(value))


# --- the stream ---------------------------------------------------------------------------------------------


@packet
class StreamBegin(Packet):
    """The first packet of a stream. Its byte 5 is 0."""

    opcode = UprOpcode.STREAM_BEGIN


@packet
class SnapshotStart(Packet):
    """No key occurs twice from here to the snapshot's end."""

    opcode = UprOpcode.STREAM_MESSAGE
    subtype = StreamMessageType.SNAPSHOT_START


@packet
class SnapshotEnd(Packet):
    opcode = UprOpcode.STREAM_MESSAGE
    subtype = StreamMessageType.SNAPSHOT_END


@packet
class Change(Packet):
    """What mutation, deletion and expiration share."""

    opcode = UprOpcode.STREAM_MESSAGE
    extras_layout = Layout(u64("by_seqno"), u64("rev_seqno"), u32("item_flags"), u32("item_exp"), u32("lock_time"))
    key_field = "key"
    key_required = True

    by_seqno: Seqno
    rev_seqno: int
    item_flags: int = 0
    item_exp: int = 0
    lock_time: int = 0
    key: bytes


@packet
class Mutation(Change):
    subtype = StreamMessageType.MUTATION
    value_field = "value"

    value: bytes = b""

    def encode_value(self) -> bytes:
        return self.value

    @classmethod
    def decode_value(cls, value: bytes) -> dict[str, Any]:
        return {"value": value}


@packet
class Deletion(Change):
    subtype = StreamMessageType.DELETION


@packet
class Expiration(Change):
    subtype = StreamMessageType.EXPIRATION


@packet
class Flush(Packet):
    """All documents of the vbucket are gone."""

    opcode = UprOpcode.STREAM_MESSAGE
    subtype = StreamMessageType.FLUSH


@packet
class StreamEnd(Packet):
    """The last packet of a stream. Byte 5 says why."""

    opcode = UprOpcode.STREAM_CLOSE

    reason: StreamEndReason = StreamEndReason.OK

    @property
    def request_type(self) -> int:
        return self.reason

    @classmethod
    def decode_request_type(cls, request_type: int) -> dict[str, Any]:
        return {"reason": StreamEndReason(request_type)}


# --- which packet a frame is --------------------------------------------------------------------------------

PACKETS: dict[tuple[UprOpcode, int], type[Packet]] = {
    (cls.opcode, cls.subtype): cls
    for cls in (
        StreamRequest,
        FailoverLogRequest,
        StreamOk,
        NotMyVBucket,
        Rollback,
        StreamBegin,
        SnapshotStart,
        SnapshotEnd,
        Mutation,
        Deletion,
        Expiration,
        Flush,
    )
}
"""The packets that opcode and byte 5 name. Apart from them: a stream end, where byte 5 is the reason, and the
failover log response, which shares its numbers with `NotMyVBucket`."""


def decode_packet(frame: Frame) -> Packet:
    """The packet a frame is.

    Raises `UnknownOpcode`, `LengthMismatch` where the lengths are not those of the packet's layout, or
    `MalformedMessage` for the wrong magic, an unknown type in byte 5, and what exceeds a limit.
    """
    if frame.opcode not in _OPCODES:
        raise UnknownOpcode(frame.opcode)
    opcode = UprOpcode(frame.opcode)
    if frame.magic is not opcode.magic:
        raise MalformedMessage(
            f"{opcode.name} comes with magic 0x{opcode.magic:02x}, not 0x{frame.magic:02x}", hint=_NO_ANSWER
        )
    return _packet_class(opcode, frame).from_frame(frame)


def _packet_class(opcode: UprOpcode, frame: Frame) -> type[Packet]:
    if opcode is UprOpcode.STREAM_CLOSE:
        return StreamEnd
    cls = PACKETS.get((opcode, frame.datatype))
    if cls is None:
        raise MalformedMessage(f"{opcode.name} has no type {frame.datatype}", offset=_REQUEST_TYPE_AT, hint=_NO_ANSWER)
    if cls is NotMyVBucket and frame.body_bytes:
        # One number for two responses: the one that says something is the failover log.
        return FailoverLogResponse
    return cls


# A packet's fields as they lie on the wire: for a print, and to be held against the draft's tables.


HEADER_LAYOUT = Layout(
    u8("magic"),
    u8("opcode"),
    u16("key_length"),
    u8("extra_length"),
    u8("request_type"),
    u16("vbucket"),
    u32("total_body"),
    u32("request_id"),
    u64("cas"),
)
"""The header in the draft's words. Frames read it in memcached's: datatype, vbucket or status, opaque."""


@dataclass(frozen=True, slots=True)
class WireField:
    """One field of one packet. `offset` counts from the packet's first byte."""

    name: str
    offset: int
    width_bytes: int
    value: int | bytes


def wire_fields(packet: Packet) -> tuple[WireField, ...]:
    """All fields in wire order, which cover every byte of the packet. An empty key or value has no field."""
    frame = packet.to_frame()
    key_at = HEADER_BYTES + len(frame.extras)
    value_at = key_at + len(frame.key)
    return (
        *_of_layout(HEADER_LAYOUT, frame.encode()[:HEADER_BYTES], 0),
        *_of_layout(packet.extras_layout, frame.extras, HEADER_BYTES),
        *_of_bytes(packet.key_field, frame.key, key_at),
        *_of_layout(packet.value_layout, frame.value, value_at),
        *_of_bytes(packet.value_field, frame.value, value_at),
    )


def _of_layout(layout: Layout, data: bytes, offset: int) -> Iterator[WireField]:
    """The layout as often as `data` holds it."""
    if not layout.fields:
        return
    for at in range(0, len(data), layout.size_bytes):
        numbers = layout.unpack(data, at)
        for field in layout.fields:
            yield WireField(field.name, offset, field.width_bytes, numbers[field.name])
            offset += field.width_bytes


def _of_bytes(name: str | None, data: bytes, offset: int) -> Iterator[WireField]:
    if name is not None and data:
        yield WireField(name, offset, len(data), data)
