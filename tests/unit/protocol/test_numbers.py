"""Collection ids as unsigned LEB128: one spelling each, 32 bits, five bytes."""

from __future__ import annotations

import pytest

from headwater.errors import LocalProtocolError, MalformedLeb128
from headwater.protocol.frames import decode_collection_id, encode_collection_id
from support.cases import case


@case(0x00, "00")
@case(0x08, "08")
@case(0x7F, "7f")
@case(0x80, "8001")
@case(0xFF, "ff01")
@case(0x3FFF, "ff7f")
@case(0x4000, "808001")
@case(0x1FFFFF, "ffff7f")
@case(0x200000, "80808001")
@case(0xFFFFFFF, "ffffff7f")
@case(0x10000000, "8080808001")
@case(0xCAFEF00D, "8de0fbd70c")
@case(0xFFFFFFFF, "ffffffff0f")
def test_golden_bytes(collection_id: int, encoded: str) -> None:
    assert encode_collection_id(collection_id).hex() == encoded
    assert decode_collection_id(bytes.fromhex(encoded)) == (collection_id, len(encoded) // 2)


@case("", "cut off")
@case("80", "cut off")
@case("ffffffff", "cut off")
@case("8000", "shortest form")
@case("808000", "shortest form")
@case("ff8000", "shortest form")
@case("ffffffff10", "exceeds 32 bits")
@case("ffffffff7f", "exceeds 32 bits")
@case("8080808080", "exceeds 5 bytes")
@case("ffffffffff01", "exceeds 5 bytes")
def test_anything_else_is_refused(encoded: str, reason: str) -> None:
    with pytest.raises(MalformedLeb128, match=reason):
        decode_collection_id(bytes.fromhex(encoded))


def test_a_fault_is_told_at_its_place() -> None:
    for data, offset in ((b"xx\x80", 3), (b"xx\x80\x00", 2), (b"xx\xff\xff\xff\xff\x10", 2)):
        with pytest.raises(MalformedLeb128) as raised:
            decode_collection_id(data, 2)
        assert raised.value.offset == offset


@pytest.mark.parametrize("collection_id", [-1, 2**32])
def test_an_id_beyond_32_bits_is_our_own_fault(collection_id: int) -> None:
    with pytest.raises(LocalProtocolError, match="32-bit"):
        encode_collection_id(collection_id)
