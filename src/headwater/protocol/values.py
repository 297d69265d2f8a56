"""Values: the datatype byte, which says how to read a value, compression, and extended attributes.

The typed codec and the key-value commands use it, one value per call; for batches the kernels do the same. (kv_engine,
docs/Document.md.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from struct import Struct

import cramjam

from headwater.errors import LocalProtocolError, MalformedSnappy, MalformedXattrs
from headwater.protocol.numbers import VALUE_BYTES_MAX, XATTR_SECTION_BYTES_MAX


class Datatype(IntFlag):
    RAW = 0x00
    JSON = 0x01
    SNAPPY = 0x02
    XATTR = 0x04


# --- snappy: the raw block format that the SNAPPY datatype bit stands for ---------------------------------------------


def compress(value: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(value))


def decompressed_bytes(compressed: bytes) -> int:
    """Return the length that a block inflates to, which its first bytes state."""
    try:
        return cramjam.snappy.decompress_raw_len(compressed)
    except cramjam.DecompressionError as error:
        raise MalformedSnappy(f"the value is not snappy: {error}") from error


def decompress(compressed: bytes, *, bytes_max: int = VALUE_BYTES_MAX) -> bytes:
    """Return the inflated value. The stated length is compared with the limit before anything is allocated."""
    length = decompressed_bytes(compressed)
    if length > bytes_max:
        raise MalformedSnappy(f"the value would inflate to {length} bytes, above the limit of {bytes_max}")
    try:
        return bytes(cramjam.snappy.decompress_raw(compressed))
    except cramjam.DecompressionError as error:
        raise MalformedSnappy(f"the value is not snappy: {error}") from error


# --- extended attributes: the front of a value whose datatype has the XATTR bit ---------------------------------------
#
#     4 bytes    length of the section that follows
#     repeated   4 bytes length of a pair, then `name NUL json NUL`
#     the rest   the document's body
#
# (kv_engine, docs/Document.md, "XAttr - extended attributes".)


SYSTEM_PREFIX = "_"
"""Attributes with this prefix are of the system, and outlive the document in its tombstone."""

_LENGTH = Struct(">I")


@dataclass(frozen=True, slots=True)
class ValueParts:
    """A value split into its extended attributes, each still JSON text, and its body."""

    xattrs: Mapping[str, bytes]
    body: bytes


def encode_xattrs(parts: ValueParts) -> bytes:
    section = bytearray()
    for name, json_text in parts.xattrs.items():
        pair = name.encode() + b"\0" + json_text + b"\0"
        if pair.count(b"\0") != 2:
            raise LocalProtocolError(f"the extended attribute {name!r} holds a NUL byte")
        section += _LENGTH.pack(len(pair)) + pair
    if len(section) > XATTR_SECTION_BYTES_MAX:
        raise LocalProtocolError(f"{len(section)} bytes of extended attributes exceed {XATTR_SECTION_BYTES_MAX}")
    return _LENGTH.pack(len(section)) + bytes(section) + parts.body


def body_offset(value: bytes) -> int:
    """Return where the body starts after the section, whose length is checked against the value."""
    if len(value) < _LENGTH.size:
        raise MalformedXattrs("the value is too short for the length of its extended attributes")
    length: int = _LENGTH.unpack_from(value)[0]
    if length > XATTR_SECTION_BYTES_MAX:
        raise MalformedXattrs(f"{length} bytes of extended attributes exceed {XATTR_SECTION_BYTES_MAX}")
    if _LENGTH.size + length > len(value):
        raise MalformedXattrs(f"the extended attributes claim {length} bytes of a value of {len(value)}")
    return _LENGTH.size + length


def decode_xattrs(value: bytes) -> ValueParts:
    end = body_offset(value)
    xattrs: dict[str, bytes] = {}
    at = _LENGTH.size
    while at < end:
        if at + _LENGTH.size > end:
            raise MalformedXattrs("the length of an extended attribute is cut off", offset=at)
        pair_end = at + _LENGTH.size + _LENGTH.unpack_from(value, at)[0]
        if pair_end > end:
            raise MalformedXattrs("an extended attribute runs beyond its section", offset=at)
        name, json_text = _decode_pair(value[at + _LENGTH.size : pair_end], offset=at)
        if name in xattrs:
            raise MalformedXattrs(f"the extended attribute {name!r} stands twice", offset=at)
        xattrs[name] = json_text
        at = pair_end
    return ValueParts(xattrs, value[end:])


def keep_system_xattrs(value: bytes) -> bytes:
    """Return what stays of a value in the document's tombstone: the attributes of the system, or nothing."""
    kept = {name: text for name, text in decode_xattrs(value).xattrs.items() if name.startswith(SYSTEM_PREFIX)}
    return encode_xattrs(ValueParts(kept, b"")) if kept else b""


def _decode_pair(pair: bytes, *, offset: int) -> tuple[str, bytes]:
    if pair.count(b"\0") != 2 or not pair.endswith(b"\0"):
        raise MalformedXattrs("an extended attribute is not `name NUL json NUL`", offset=offset)
    name, json_text, _ = pair.split(b"\0")
    try:
        return name.decode(), json_text
    except UnicodeDecodeError as error:
        raise MalformedXattrs("the name of an extended attribute is not UTF-8", offset=offset) from error
