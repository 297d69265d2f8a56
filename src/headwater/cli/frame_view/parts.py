"""The parts of a frame: what the annotated print and the JSON print are both made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headwater.cli.frame_view.meanings import number_meaning
from headwater.protocol.capture import CapturedFrame
from headwater.protocol.messages.layout import Layout

ITEMS_SHOWN_MAX = 32
"""Entries of a list in a value, such as a failover log, that the annotated print shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One field: its name, its place in the frame, what is there and what that means."""

    name: str
    offset: int | None = None
    """None for what has no place of its own, such as a field inside a compressed value."""
    width_bytes: int = 0
    number: int | None = None
    text: str = ""
    """What is shown where the field is no number."""
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueView:
    """A frame's value as it can be shown: the document without its compression and attributes, or the fields."""

    document: bytes = b""
    inflated_bytes: int | None = None
    xattrs: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] | None = None
    """What a structured value holds, for JSON."""
    parts: tuple[Part, ...] = ()
    """The same for the annotated print."""
    is_secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameView:
    """A frame understood as far as it can be. Where its message is malformed, `error` says how."""

    captured: CapturedFrame
    opcode: str
    title: str
    header: tuple[Part, ...]
    datatype_names: tuple[str, ...] = ()
    frame_infos: tuple[Part, ...] = ()
    extras: tuple[Part, ...] = ()
    key_name: str = "Key"
    key: bytes
    collection_id: int | None = None
    value: ValueView
    more: dict[str, Any] = field(default_factory=dict)
    """What JSON tells besides, such as vbucket or status."""
    error: str = ""


def layout_parts(layout: Layout, data: bytes, offset: int) -> Iterator[Part]:
    """The fields of a layout, over and over as long as `data` holds it. `offset` is that of `data` in the frame."""
    if not layout.size_bytes:
        return
    repeats = len(data) // layout.size_bytes
    for index in range(min(repeats, ITEMS_SHOWN_MAX)):
        numbers = layout.unpack(data, index * layout.size_bytes)
        at = offset + index * layout.size_bytes
        for layout_field in layout.fields:
            number = numbers[layout_field.name]
            yield Part(
                name=layout_field.name,
                offset=at,
                width_bytes=layout_field.width_bytes,
                number=number,
                meaning=number_meaning(layout_field.name, number),
            )
            at += layout_field.width_bytes
    if repeats > ITEMS_SHOWN_MAX:
        yield Part(name="...", text=f"{repeats - ITEMS_SHOWN_MAX} more of these")


def numbers_of(parts: Iterable[Part]) -> dict[str, int | str]:
    return {part.name: part.text if part.number is None else int(part.number) for part in parts}
