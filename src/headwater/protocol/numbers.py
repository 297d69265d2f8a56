"""Numbers: the kinds of integers DCP is made of, the limits on what comes from outside, collection ids as LEB128.

The type checker keeps the kinds apart. Everything in the package may import this module; it imports none but the
errors.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NewType, Self

from headwater.errors import LocalProtocolError, MalformedLeb128

VBucketId = NewType("VBucketId", int)
Seqno = NewType("Seqno", int)
Vbuuid = NewType("Vbuuid", int)
Cas = NewType("Cas", int)
CollectionId = NewType("CollectionId", int)
ScopeId = NewType("ScopeId", int)
ManifestUid = NewType("ManifestUid", int)

SEQNO_MAX = Seqno(2**64 - 1)
"""As the end of a stream request: never end."""

DEFAULT_COLLECTION = CollectionId(0)
DEFAULT_SCOPE = ScopeId(0)


class OpenIntEnum(IntEnum):
    """An enumeration that keeps numbers it does not know.

    Servers grow new opcodes, statuses and reasons; a client that fails on them is broken by the next release.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int) or value < 0:
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_0x{value:02x}"
        member._value_ = value
        return member

    @property
    def is_known(self) -> bool:
        return self._name_ in type(self).__members__


class OpenIntFlag(IntFlag):
    """Flags that keep bits they do not know, without remembering every combination a peer has sent.

    The standard library holds each value it has seen for ever, and a peer has 2**32 of them to send.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self:
        flags: Self = super()._missing_(value)
        known_bits = sum(int(flag) for flag in cls)
        if flags.value & ~known_bits:
            cls._value2member_map_.pop(flags.value, None)
        return flags


# --- a limit on everything that comes from outside; names end in their unit -------------------------------------------


KEY_BYTES_MAX = 250
"""A key without its collection id; the LEB128 prefix is counted apart (`kv_engine/docs/DocumentSizeLimits.md`)."""

LEB128_BYTES_MAX = 5
"""32 bits, seven to a byte."""

VALUE_BYTES_MAX = 20 * 1024 * 1024
"""A document's value, xattrs included."""

RELATIVE_EXPIRY_S_MAX = 30 * 24 * 60 * 60
"""An expiry up to this counts from now; a larger one is a date, in seconds since 1970."""

XATTR_SECTION_BYTES_MAX = 1024 * 1024
XATTR_NAME_BYTES_MAX = 16

CONNECTION_NAME_BYTES_MAX = 200

FRAME_BODY_BYTES_MAX = VALUE_BYTES_MAX + 64 * 1024
"""A value plus room for key, extras and framing extras. A header that announces more is refused before its body is
buffered."""

FAILOVER_LOG_ENTRIES_MAX = 25
"""What a real server keeps (`max_failover_entries`)."""

STREAM_REQUEST_VALUE_BYTES_MAX = 1024 * 1024
"""Far above any filter: a million bytes name more than fifty thousand collections."""

STREAMS_PER_VBUCKET_MAX = 64
"""Streams with a `sid` on one vbucket of one connection."""

STREAM_ID_MAX = 0xFFFF
CONNECTION_BUFFER_BYTES_MAX = 2**32 - 1


# --- collection ids as unsigned LEB128, the prefix of every key on a collection-aware connection ----------------------
#
# kv_engine, docs/Collections.md. Seven bits to a byte, least significant first; the top bit says
# that another byte follows. Ids have 32 bits, so at most five bytes. Only the shortest form is taken: two spellings of
# one id would make two keys of one document.


_U32_MAX = 2**32 - 1


def encode_collection_id(collection_id: int) -> bytes:
    if not 0 <= collection_id <= _U32_MAX:
        raise LocalProtocolError(f"{collection_id} is not a 32-bit collection id")
    encoded = bytearray()
    while collection_id > 0x7F:
        encoded.append(collection_id & 0x7F | 0x80)
        collection_id >>= 7
    encoded.append(collection_id)
    return bytes(encoded)


def decode_collection_id(data: bytes, offset: int = 0) -> tuple[CollectionId, int]:
    """The id that starts at `offset`, and the offset of what follows it."""
    value = 0
    for index in range(LEB128_BYTES_MAX):
        if offset + index >= len(data):
            raise MalformedLeb128("the collection id is cut off", offset=offset + index)
        byte = data[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            if byte == 0 and index > 0:
                raise MalformedLeb128("the collection id is not in its shortest form", offset=offset)
            if value > _U32_MAX:
                raise MalformedLeb128("the collection id exceeds 32 bits", offset=offset)
            return CollectionId(value), offset + index + 1
    raise MalformedLeb128(f"the collection id exceeds {LEB128_BYTES_MAX} bytes", offset=offset)
