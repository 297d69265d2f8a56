"""Layouts: the fixed-width, big-endian fields of an extras section (or of a structured value), by name.

A layout reads like the tables of the specification, and serves encoding, decoding and the annotated print alike.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwater.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class Field:
    """One integer of a layout: its name, its width and the type it is given."""

    name: str
    code: str
    convert: Callable[[int], int] = int

    @property
    def width_bytes(self) -> int:
        return struct.Struct(">" + self.code).size


def u8(name: str, convert: Callable[[int], int] = int) -> Field:
    return Field(name, "B", convert)


def u16(name: str, convert: Callable[[int], int] = int) -> Field:
    return Field(name, "H", convert)


def u32(name: str, convert: Callable[[int], int] = int) -> Field:
    return Field(name, "I", convert)


def u64(name: str, convert: Callable[[int], int] = int) -> Field:
    return Field(name, "Q", convert)


class Layout:
    """A sequence of fields."""

    __slots__ = ("_converted", "_names", "_struct", "fields", "size_bytes")

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        self._struct = struct.Struct(">" + "".join(field.code for field in fields))
        self.size_bytes = self._struct.size
        self._names = tuple(field.name for field in fields)
        self._converted = tuple((field.name, field.convert) for field in fields if field.convert is not int)

    def pack(self, message: object) -> bytes:
        """The message's attributes of these names, in this order."""
        try:
            return self._struct.pack(*[getattr(message, field.name) for field in self.fields])
        except struct.error as error:
            names = ", ".join(field.name for field in self.fields)
            raise LocalProtocolError(f"{type(message).__name__}: {error} (fields: {names})") from error

    def unpack(self, data: bytes, offset: int = 0) -> dict[str, int]:
        unpacked = dict(zip(self._names, self._struct.unpack_from(data, offset), strict=True))
        for name, convert in self._converted:
            unpacked[name] = convert(unpacked[name])
        return unpacked

    def repeat(self, data: bytes) -> Iterator[tuple[int, ...]]:
        """The layout over and over, as plain numbers; the caller has checked that the length is a multiple."""
        return self._struct.iter_unpack(data)


NO_FIELDS = Layout()
