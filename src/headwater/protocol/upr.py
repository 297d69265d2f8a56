"""The UPR draft: DCP's forerunner, the same ideas in another wire format (the seed "UPR Transport Specification").

The header is memcached's 24 bytes, so `frames` cuts it; its meaning is the draft's own:

    byte  1      opcode: 1 request, 2 response, 3 stream begin, 4 stream message, 5 stream close
    byte  5      request type: which request, response or stream message it is, or why a stream ends
    bytes 6-7    vbucket, in responses too
    bytes 12-15  request id

In a `Frame` these are `opcode`, `datatype`, `specific` and `opaque`.

A consumer sends requests. A producer answers each one, and a stream request that it grants also with a stream: begin,
then snapshots, each between a start and an end, then stream end. All of that has the response magic and the request's
id. The opcodes have the numbers of memcached opcodes: a listener speaks either UPR or memcached, because no byte of a
packet says which.

The draft contradicts itself. What is settled here, and why (the errata of its drawings are listed
in `tests/vectors/seeds/ERRATA.md`):

* Lengths. We send the drawn layout with lengths that are true. A received packet whose lengths are not those
  of its layout is refused, and so are the lengths the draft prints: 8 too long, or 0 where data follows.
* UprRollback seqno and failover log are in the value. Their packets print an extras length of 0.
* Response type 2 is "not my vbucket" in the list of types and in one drawing, and the failover log response
  in another. The body decides: without one it is `UprNotMyVBucket`, with one it is `UprFailoverLogResponse`.
* A failover log thus has 1 to 1024 pairs, as one of the draft's sentences has it. The other allows none,
  which cannot be distinguished from "not my vbucket" and is not needed: every vbucket has a history with a name.
* `UprNotMyVBucket` answers a failover log request as well; the draft draws it for stream requests only.
* `UprStreamOk` has no body. DCP has the failover log there; in UPR a consumer has to request it.
* Opcode 3 is called stream begin in the list of opcodes and stream start above its drawing, opcode 5 stream
  close and stream end. The packets are `UprStreamBegin` (start is what a snapshot does) and `UprStreamEnd` (as in
  the text).
* A group id may be empty, since a stream may have no name. It is sent as the key and has a key's limit of 250
  bytes. A document's key has at least one byte.
* UprDeletion and expiration have no value: none is drawn.
* An unknown opcode or type is refused, because the layout of its body is unknown. An unknown reason of a stream
  end is kept. The CAS of a packet about no document ought to be 0; another number is kept and encoded again.

A packet's class says what its body holds, in wire order: the layout of its extras, the field that is its key, then a
value, which is a document's or a repeated `value_layout`. Classes and fields have the draft's names; a prefix
distinguishes the classes from DCP's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from headwater.errors import LengthMismatch, LocalProtocolError, MalformedMessage, RemoteProtocolError, UnknownOpcode
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import NOTHING_NEGOTIATED, Magic, Negotiated, OpenIntEnum
from headwater.protocol.frames import Frame
from headwater.protocol.messages.base import Layout, WireMessage, u8, u16, u32, u64
from headwater.protocol.messages.dcp_streams import decode_failover_log, encode_failover_log
from headwater.protocol.numbers import KEY_BYTES_MAX, SEQNO_MAX, Cas, Seqno, VBucketId, Vbuuid

# --- the numbers of the draft: opcodes (byte 1) and what byte 5 says under each of them -------------------------------


class UprOpcode(IntEnum):
    """All opcodes of the draft. memcached gives the same numbers to SET, ADD, REPLACE, DELETE and INCREMENT."""

    REQUEST = 1
    RESPONSE = 2
    STREAM_BEGIN = 3
    STREAM_MESSAGE = 4
    STREAM_CLOSE = 5

    @property
    def magic(self) -> Magic:
        """Only a request has the request magic: what a producer sends answers one, stream messages too."""
        return Magic.REQUEST if self is UprOpcode.REQUEST else Magic.RESPONSE


class UprRequestType(IntEnum):
    STREAM_REQUEST = 1
    FAILOVER_LOG_REQUEST = 2


class UprResponseType(IntEnum):
    OK = 1
    NOT_MY_VBUCKET = 2
    """The failover log response has this number, too; the docstring of the module says how to distinguish them."""
    ROLLBACK = 3


class UprStreamMessageType(IntEnum):
    SNAPSHOT_START = 1
    SNAPSHOT_END = 2
    MUTATION = 3
    DELETION = 4
    EXPIRATION = 5
    FLUSH = 6


class UprStreamEndReason(OpenIntEnum):
    """Why a stream ended. A number that the draft does not define is kept: the stream has ended all the same."""

    OK = 1
    STATE_CHANGED = 2


FAILOVER_LOG_PAIRS_MAX = 1024
"""The draft's own limit, far above what a vbucket keeps today (`FAILOVER_LOG_ENTRIES_MAX`)."""

_HEADER_NUMBERS = Layout(u8("request_type"), u16("vbucket"), u32("request_id"), u64("cas"))
_NO_ANSWER = "Close the connection: the UPR draft has no response that refuses a packet"
_LENGTH_AT = {"key": 2, "extras": 4, "value": 8}
"""The offset of a fault in a part's length: that of the header's length field."""
_REQUEST_TYPE_AT = 5

P = TypeVar("P", bound="UprPacket")


PACKETS: dict[tuple[UprOpcode, int], type[UprPacket]] = {}
"""The packets by opcode and byte 5. `decode_packet` knows two that these numbers do not name: a stream end, where byte
5 is the reason, and the failover log response, which has the numbers of `UprNotMyVBucket`."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def packet(opcode: UprOpcode, subtype: int = 0) -> Callable[[type[P]], type[P]]:
    """Make a class a packet and enter it under its numbers, unless another class has them."""

    def make(cls: type[P]) -> type[P]:
        made: type[P] = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        made.learn_shape()
        made.opcode, made.subtype = opcode, subtype
        PACKETS.setdefault((opcode, subtype), made)
        return made

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class UprPacket(WireMessage):
    """What all packets share: the header, and lengths that must be those of the layout."""

    opcode: ClassVar[UprOpcode]
    subtype: ClassVar[int]

    vbucket: VBucketId = VBucketId(0)
    """The vbucket, in responses, too: UPR has it where memcached has a response's status."""
    request_id: int = 0
    """The request that this packet is, or answers. A stream's packets carry the id of its stream request."""
    cas: Cas = Cas(0)
    """The document's; 0 in packets about no document, though a number found there is kept."""

    @property
    def request_type(self) -> int:
        """Byte 5, which goes by this name in every packet of the draft."""
        return self.subtype

    @property
    def draft_name(self) -> str:
        return type(self).__name__.removeprefix("Upr")

    @classmethod
    def malformed(cls, part: str, reason: str) -> RemoteProtocolError:
        # The draft's own packets print lengths that are 8 more than they draw. A receiver that believes them has taken
        # 8 bytes of the key, and as many of the next packet.
        return LengthMismatch(reason, offset=_LENGTH_AT[part])

    def to_frame(self) -> Frame:
        self.check_parts()
        # The frame packs the header's numbers without checking their range.
        _HEADER_NUMBERS.pack(self)
        key = self.encode_key()
        if len(key) > KEY_BYTES_MAX:
            raise LocalProtocolError(f"a {self.key_field} of {len(key)} bytes exceeds {KEY_BYTES_MAX}")
        return Frame(
            magic=self.opcode.magic,
            opcode=self.opcode,
            datatype=self.request_type,
            specific=self.vbucket,
            opaque=self.request_id,
            cas=self.cas,
            extras=self.encode_extras(),
            key=key,
            value=self.encode_value(),
        )

    @classmethod
    def from_frame(cls, frame: Frame) -> Self:
        """Decode the packet in a frame that is known to be of this class (`decode_packet`)."""
        header = {"vbucket": VBucketId(frame.specific), "request_id": frame.opaque, "cas": Cas(frame.cas)}
        return cls(**cls.decode_body(frame, NOTHING_NEGOTIATED, header | cls.decode_request_type(frame.datatype)))

    @classmethod
    def decode_key(cls, key: bytes, negotiated: Negotiated) -> dict[str, Any]:
        if cls.key_field is not None and len(key) > KEY_BYTES_MAX:
            reason = f"a {cls.key_field} of {len(key)} bytes exceeds {KEY_BYTES_MAX}"
            raise MalformedMessage(reason, offset=_LENGTH_AT["key"], hint=_NO_ANSWER)
        return super(UprPacket, cls).decode_key(key, negotiated)

    @classmethod
    def decode_request_type(cls, request_type: int) -> dict[str, Any]:
        """Return the fields that byte 5 holds: one in a stream end, none in others, where it selects the class."""
        return {}


# --- requests -----------------------------------------------------------------------------------------------


@packet(UprOpcode.REQUEST, UprRequestType.STREAM_REQUEST)
class UprStreamRequest(UprPacket):
    """Ask for the changes of one vbucket."""

    layouts = (Layout(u64("start_by_seqno"), u64("end_by_seqno"), u64("vbucket_uuid"), u64("high_seqno")),)
    key_field = "group_id"

    start_by_seqno: Seqno = Seqno(0)
    """The last seqno the consumer has."""
    end_by_seqno: Seqno = SEQNO_MAX
    vbucket_uuid: Vbuuid = Vbuuid(0)
    high_seqno: Seqno = Seqno(0)
    """Where the branch `vbucket_uuid` began: the high seqno when that uuid was made."""
    group_id: bytes = b""
    """A name for the stream; it may have none."""


@packet(UprOpcode.REQUEST, UprRequestType.FAILOVER_LOG_REQUEST)
class UprFailoverLogRequest(UprPacket):
    """Ask for the failover log of one vbucket."""


# --- responses ----------------------------------------------------------------------------------------------


@packet(UprOpcode.RESPONSE, UprResponseType.OK)
class UprStreamOk(UprPacket):
    """The stream is granted, and begins."""


@packet(UprOpcode.RESPONSE, UprResponseType.NOT_MY_VBUCKET)
class UprNotMyVBucket(UprPacket):
    """The vbucket is not here: the answer to either request."""


@packet(UprOpcode.RESPONSE, UprResponseType.NOT_MY_VBUCKET)
class UprFailoverLogResponse(UprPacket):
    """The branches of the vbucket's history, at least one."""

    value_layout = Layout(u64("vbucket_uuid"), u64("high_seqno"))

    failover_log: tuple[FailoverEntry, ...]

    def encode_value(self) -> bytes:
        if not 1 <= len(self.failover_log) <= FAILOVER_LOG_PAIRS_MAX:
            raise LocalProtocolError(
                f"a failover log has 1 to {FAILOVER_LOG_PAIRS_MAX} pairs, not {len(self.failover_log)}",
                hint="Answer UprNotMyVBucket where there is no failover log",
            )
        return encode_failover_log(self.failover_log)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        pairs, left = divmod(len(value), cls.value_layout.size_bytes)
        if left or not pairs:
            raise cls.malformed("value", f"a failover log of {len(value)} bytes is no whole number of 16-byte pairs")
        if pairs > FAILOVER_LOG_PAIRS_MAX:
            raise MalformedMessage(
                f"a failover log of {pairs} pairs exceeds {FAILOVER_LOG_PAIRS_MAX}",
                offset=_LENGTH_AT["value"],
                hint=_NO_ANSWER,
            )
        return {"failover_log": decode_failover_log(value)}


@packet(UprOpcode.RESPONSE, UprResponseType.ROLLBACK)
class UprRollback(UprPacket):
    """The consumer must drop what it has after `rollback_seqno` and ask again."""

    value_layout = Layout(u64("rollback_seqno"))

    rollback_seqno: Seqno


# --- the stream ---------------------------------------------------------------------------------------------


@packet(UprOpcode.STREAM_BEGIN)
class UprStreamBegin(UprPacket):
    """The first packet of a stream. Its byte 5 is 0."""


@packet(UprOpcode.STREAM_MESSAGE, UprStreamMessageType.SNAPSHOT_START)
class UprSnapshotStart(UprPacket):
    """No key occurs twice from here to the snapshot's end."""


@packet(UprOpcode.STREAM_MESSAGE, UprStreamMessageType.SNAPSHOT_END)
class UprSnapshotEnd(UprPacket): ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UprChange(UprPacket):
    """What mutation, deletion and expiration share."""

    layouts = (Layout(u64("by_seqno"), u64("rev_seqno"), u32("item_flags"), u32("item_exp"), u32("lock_time")),)

    by_seqno: Seqno
    rev_seqno: int
    item_flags: int = 0
    item_exp: int = 0
    lock_time: int = 0
    key: bytes


@packet(UprOpcode.STREAM_MESSAGE, UprStreamMessageType.MUTATION)
class UprMutation(UprChange):
    value: bytes = b""


@packet(UprOpcode.STREAM_MESSAGE, UprStreamMessageType.DELETION)
class UprDeletion(UprChange): ...


@packet(UprOpcode.STREAM_MESSAGE, UprStreamMessageType.EXPIRATION)
class UprExpiration(UprChange): ...


@packet(UprOpcode.STREAM_MESSAGE, UprStreamMessageType.FLUSH)
class UprFlush(UprPacket):
    """All documents of the vbucket are gone."""


@packet(UprOpcode.STREAM_CLOSE)
class UprStreamEnd(UprPacket):
    """The last packet of a stream. Byte 5 says why."""

    reason: UprStreamEndReason = UprStreamEndReason.OK

    @property
    def request_type(self) -> int:
        return self.reason

    @classmethod
    def decode_request_type(cls, request_type: int) -> dict[str, Any]:
        return {"reason": UprStreamEndReason(request_type)}


# --- which packet a frame is --------------------------------------------------------------------------------


def decode_packet(frame: Frame) -> UprPacket:
    """Return the packet in a frame.

    Raises `UnknownOpcode`, `LengthMismatch` if the lengths are not those of the packet's layout, or `MalformedMessage`
    for the wrong magic, an unknown type in byte 5, or a part that exceeds a limit.
    """
    try:
        opcode = UprOpcode(frame.opcode)
    except ValueError:
        raise UnknownOpcode(frame.opcode) from None
    if frame.magic is not opcode.magic:
        raise MalformedMessage(
            f"{opcode.name} comes with magic 0x{opcode.magic:02x}, not 0x{frame.magic:02x}", hint=_NO_ANSWER
        )
    if opcode is UprOpcode.STREAM_CLOSE:
        return UprStreamEnd.from_frame(frame)
    cls = PACKETS.get((opcode, frame.datatype))
    if cls is None:
        raise MalformedMessage(f"{opcode.name} has no type {frame.datatype}", offset=_REQUEST_TYPE_AT, hint=_NO_ANSWER)
    if cls is UprNotMyVBucket and frame.body_bytes:
        # Two responses have this number: the one with a body is the failover log.
        return UprFailoverLogResponse.from_frame(frame)
    return cls.from_frame(frame)
