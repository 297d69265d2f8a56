"""What numbers mean, in words, and bytes as something that can be printed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import IntFlag
from typing import Any

from headwater.protocol.limits import RELATIVE_EXPIRY_S_MAX
from headwater.protocol.numbers import SEQNO_MAX, OpenIntEnum

_TIMES = frozenset({"expiry", "delete_time", "item_exp"})
_END_SEQNOS = frozenset({"end_seqno", "end_by_seqno"})
_PLAIN = frozenset("\t\n\r")


def number_meaning(name: str, number: int) -> str:
    """What a field's number means: flags and enumerations by name, times as dates, large numbers in decimal."""
    if isinstance(number, IntFlag):
        return flag_names(number)
    if isinstance(number, OpenIntEnum):
        return number.name
    if name in _END_SEQNOS and number == SEQNO_MAX:
        return "no end"
    if name in _TIMES and number:
        return time_meaning(number)
    return str(number) if number > 9 and not name.endswith("flags") else ""


def flag_names(flags: IntFlag) -> str:
    """The flags that are set, and in hex the bits that have no name."""
    names = [member.name or "" for member in type(flags) if member in flags]
    known = sum(member for member in type(flags))
    unknown = int(flags) & ~known
    return " | ".join([*names, f"0x{unknown:x}"] if unknown else names)


def time_meaning(time_s: int) -> str:
    if time_s <= RELATIVE_EXPIRY_S_MAX:
        return f"in {time_s} s"
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- bytes --------------------------------------------------------------------------------------------------------


def as_text(data: bytes) -> str | None:
    """The text that bytes are, or None where they are none: not UTF-8, or with control characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in _PLAIN for char in text) else None


def shorten(data: bytes, bytes_max: int) -> bytes:
    """The first bytes, not cut within a character where they are text."""
    if len(data) <= bytes_max:
        return data
    cut = bytes_max
    while cut > max(0, bytes_max - 3) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return data[:cut]


def show_bytes(data: bytes, bytes_max: int) -> str:
    """Bytes for a reader: JSON as it is, other text in quotes, binary in hex; long ones shortened.

    Nothing that a terminal would obey gets through: a captured key may hold escape sequences.
    """
    shown = shorten(data, bytes_max)
    left_out = f" ... {len(data) - len(shown)} more bytes" if len(shown) < len(data) else ""
    text = as_text(shown)
    if text is None:
        return (f"0x{shown.hex()}" if shown else "") + left_out
    line = text.translate({ord("\t"): r"\t", ord("\n"): r"\n", ord("\r"): r"\r"})
    return (line if line.startswith(("{", "[")) else f'"{line}"') + left_out


# --- structures ---------------------------------------------------------------------------------------------------


def as_json(value: Any, bytes_max: int) -> Any:
    """A message's attribute as JSON can hold it: enumerations by name, flags as numbers, bytes as text or hex."""
    if isinstance(value, OpenIntEnum):
        return value.name
    if isinstance(value, bytes):
        shown = shorten(value, bytes_max)
        text = as_text(shown)
        return f"0x{shown.hex()}" if text is None else text
    if isinstance(value, tuple):
        return [as_json(item, bytes_max) for item in value]
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name), bytes_max) for field in fields(value)}
    return int(value) if isinstance(value, IntFlag) else value


def in_words(value: Any, bytes_max: int) -> str:
    """A message's attribute on one line."""
    if isinstance(value, OpenIntEnum):
        return value.name
    if isinstance(value, IntFlag):
        return flag_names(value) or "0"
    if isinstance(value, bytes):
        return show_bytes(value, bytes_max)
    if isinstance(value, tuple):
        return ", ".join(in_words(item, bytes_max) for item in value)
    if is_dataclass(value):
        return " ".join(f"{field.name}={in_words(getattr(value, field.name), bytes_max)}" for field in fields(value))
    return str(value)
