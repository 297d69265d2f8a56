"""pcapng files: blocks, of which those with packets matter.

dpkt's own reader takes every packet for one of the first interface, whose link type may be another one's (Wireshark
on loopback and Ethernet at once), passes over simple packet blocks, and parses options that nobody needs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct, unpack_from

from headwater.errors import CaptureError

SECTION_HEADER = 0x0A0D0D0A
_INTERFACE_DESCRIPTION = 1
_PACKET = 2
_SIMPLE_PACKET = 3
_ENHANCED_PACKET = 6

_BYTE_ORDERS = {b"\x1a\x2b\x3c\x4d": ">", b"\x4d\x3c\x2b\x1a": "<"}
_BLOCK_BYTES_MIN = 12
_SECTION_HEADER_BYTES_MIN = 28
_PACKET_DATA_AT = 28


def is_pcapng(data: bytes) -> bool:
    return data.startswith(SECTION_HEADER.to_bytes(4, "big")) and data[8:12] in _BYTE_ORDERS


def read_pcapng_packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The link type and the bytes of every packet."""
    order = ">"
    link_types: list[int] = []
    at = 0
    while at < len(data):
        if data[at : at + 4] == SECTION_HEADER.to_bytes(4, "big"):
            order, link_types = _byte_order(data, at), []
        kind, block_bytes = _block(data, at, order)
        if kind == _INTERFACE_DESCRIPTION and block_bytes >= 20:
            link_types.append(unpack_from(order + "H", data, at + 8)[0])
        elif kind in _PACKET_READERS:
            interface, packet = _PACKET_READERS[kind](data[at : at + block_bytes], order, at)
            if interface >= len(link_types):
                raise CaptureError(
                    f"the packet at byte {at} of the file names interface {interface}, which was not described",
                    hint="The file is damaged: capture again, or cut it before that byte",
                )
            yield link_types[interface], packet
        at += block_bytes


def _byte_order(data: bytes, at: int) -> str:
    order = _BYTE_ORDERS.get(data[at + 8 : at + 12])
    if order is None:
        raise _damaged(at)
    return order


def _block(data: bytes, at: int, order: str) -> tuple[int, int]:
    """The type and the length of the block at `at`, which is held against the file's end."""
    if at + _BLOCK_BYTES_MIN > len(data):
        raise _damaged(at)
    kind, block_bytes = unpack_from(order + "II", data, at)
    least = _SECTION_HEADER_BYTES_MIN if kind == SECTION_HEADER else _BLOCK_BYTES_MIN
    if block_bytes < least or block_bytes % 4 or at + block_bytes > len(data):
        raise _damaged(at)
    return kind, block_bytes


def _damaged(at: int) -> CaptureError:
    return CaptureError(
        f"the pcapng file is cut off or damaged at byte {at}",
        hint="Let the capture finish before you copy it, or repair it with `editcap`",
    )


def _enhanced_packet(block: bytes, order: str, at: int) -> tuple[int, bytes]:
    return _captured(block, Struct(order + "I"), order, at)


def _packet(block: bytes, order: str, at: int) -> tuple[int, bytes]:
    return _captured(block, Struct(order + "H"), order, at)


def _captured(block: bytes, interface: Struct, order: str, at: int) -> tuple[int, bytes]:
    if len(block) < _PACKET_DATA_AT + 4:
        raise _damaged(at)
    captured_bytes = unpack_from(order + "I", block, 20)[0]
    if _PACKET_DATA_AT + captured_bytes + 4 > len(block):
        raise _damaged(at)
    return interface.unpack_from(block, 8)[0], block[_PACKET_DATA_AT : _PACKET_DATA_AT + captured_bytes]


def _simple_packet(block: bytes, order: str, at: int) -> tuple[int, bytes]:
    if len(block) < 16:
        raise _damaged(at)
    original_bytes = unpack_from(order + "I", block, 8)[0]
    return 0, block[12 : min(12 + original_bytes, len(block) - 4)]


_PACKET_READERS = {
    _ENHANCED_PACKET: _enhanced_packet,
    _PACKET: _packet,
    _SIMPLE_PACKET: _simple_packet,
}
