"""The header of a frame as parts, in the names that the specification's drawings use."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.cli.frame_view.meanings import flag_names
from headwater.cli.frame_view.parts import Part
from headwater.protocol.datatype import Datatype
from headwater.protocol.frames import Frame
from headwater.protocol.status import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderWords:
    """What the header's fields are called where protocols differ, and what their numbers mean."""

    opcode_meaning: str
    byte_5: str
    byte_5_meaning: str
    bytes_6_7: str
    bytes_6_7_meaning: str
    opaque: str
    opaque_meaning: str = ""


def dcp_words(frame: Frame) -> HeaderWords:
    return HeaderWords(
        opcode_meaning=frame.opcode_name,
        byte_5="Data type",
        byte_5_meaning=flag_names(Datatype(frame.datatype)),
        bytes_6_7="Vbucket" if frame.magic.is_request else "Status",
        bytes_6_7_meaning=_decimal(frame.specific) if frame.magic.is_request else Status(frame.specific).name,
        opaque="Opaque",
    )


def header_parts(frame: Frame, words: HeaderWords) -> tuple[Part, ...]:
    return (
        _part("Magic", 0, 1, frame.magic, frame.magic.name),
        _part("Opcode", 1, 1, frame.opcode, words.opcode_meaning),
        *_length_parts(frame),
        _part("Extra length", 4, 1, len(frame.extras)),
        _part(words.byte_5, 5, 1, frame.datatype, words.byte_5_meaning),
        _part(words.bytes_6_7, 6, 2, frame.specific, words.bytes_6_7_meaning),
        _part("Total body", 8, 4, frame.body_bytes, _decimal(frame.body_bytes)),
        _part(words.opaque, 12, 4, frame.opaque, words.opaque_meaning),
        _part("CAS", 16, 8, frame.cas, _decimal(frame.cas)),
    )


def _length_parts(frame: Frame) -> tuple[Part, ...]:
    key_bytes = len(frame.key)
    if frame.magic.is_flexible:
        framing_bytes = len(frame.framing_extras)
        return (
            _part("Framing length", 2, 1, framing_bytes, _decimal(framing_bytes)),
            _part("Key length", 3, 1, key_bytes, _decimal(key_bytes)),
        )
    return (_part("Key length", 2, 2, key_bytes, _decimal(key_bytes)),)


def _part(name: str, offset: int, width_bytes: int, number: int, meaning: str = "") -> Part:
    return Part(name=name, offset=offset, width_bytes=width_bytes, number=number, meaning=meaning)


def _decimal(number: int) -> str:
    return str(number) if number > 9 else ""
