"""A packet's fields as they lie on the wire: for a print, and to be held against the draft's tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.layout import Layout, u8, u16, u32, u64
from headwater.protocol.upr.packets import Packet

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
