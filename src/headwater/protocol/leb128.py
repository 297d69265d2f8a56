"""Collection ids as unsigned LEB128, the prefix of every key on a collection-aware connection.

Seven bits to a byte, least significant first; the top bit says that another byte follows. Ids have 32 bits, so at
most five bytes. Only the shortest form is taken: two spellings of one id would make two keys of one document.
"""

from __future__ import annotations

from headwater.errors import LocalProtocolError, MalformedLeb128
from headwater.protocol.limits import LEB128_BYTES_MAX
from headwater.protocol.numbers import CollectionId

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
