"""Packets of the UPR draft as views. They have the same frames, and other names for nearly everything."""

from __future__ import annotations

from typing import Any

from headwater.cli.frame_view.header import HeaderWords, header_parts
from headwater.cli.frame_view.meanings import as_json
from headwater.cli.frame_view.parts import FrameView, Part, ValueView, layout_parts
from headwater.cli.frame_view.values import value_offset
from headwater.errors import RemoteProtocolError
from headwater.protocol.capture import CapturedFrame
from headwater.protocol.frames import HEADER_BYTES, Frame
from headwater.protocol.upr import FailoverLogResponse, Packet, Rollback, StreamEnd, UprOpcode, decode_packet

_OPCODE_NAMES = {int(opcode): opcode.name for opcode in UprOpcode}


def view_upr_frame(captured: CapturedFrame, *, value_bytes_max: int) -> FrameView:
    frame = captured.frame
    packet: Packet | None = None
    error = ""
    try:
        packet = decode_packet(frame)
    except RemoteProtocolError as fault:
        error = fault.reason
    opcode = _OPCODE_NAMES.get(frame.opcode, f"UNKNOWN_0x{frame.opcode:02x}")
    name = type(packet).__name__ if packet is not None else ""
    return FrameView(
        captured=captured,
        opcode=opcode,
        title=f"UPR {name or opcode}",
        header=header_parts(frame, _words(frame, opcode, packet)),
        extras=_extras_parts(frame, packet),
        key_name="Group ID" if packet is not None and packet.key_field == "group_id" else "Key",
        key=frame.key,
        value=_value(frame, packet, value_bytes_max),
        more={"packet": name, "vbucket": frame.specific, "request_type": frame.datatype},
        error=error,
    )


def _words(frame: Frame, opcode: str, packet: Packet | None) -> HeaderWords:
    meaning = packet.reason.name if isinstance(packet, StreamEnd) else type(packet).__name__ if packet else ""
    return HeaderWords(
        opcode_meaning=f"UPR {opcode}",
        byte_5="Request type",
        byte_5_meaning=meaning,
        bytes_6_7="Vbucket",
        bytes_6_7_meaning=str(frame.specific) if frame.specific > 9 else "",
        opaque="Request ID",
        opaque_meaning=str(frame.opaque),
    )


def _extras_parts(frame: Frame, packet: Packet | None) -> tuple[Part, ...]:
    if packet is not None:
        return tuple(layout_parts(packet.extras_layout, frame.extras, HEADER_BYTES))
    if not frame.extras:
        return ()
    text = f"0x{frame.extras.hex()}"
    return (Part(name="extras", offset=HEADER_BYTES, width_bytes=len(frame.extras), text=text),)


def _value(frame: Frame, packet: Packet | None, bytes_max: int) -> ValueView:
    members: dict[str, Any]
    if isinstance(packet, FailoverLogResponse):
        members = {"failover_log": packet.failover_log}
    elif isinstance(packet, Rollback):
        members = {"rollback_seqno": packet.rollback_seqno}
    else:
        return ValueView(document=frame.value)
    return ValueView(
        fields={name: as_json(value, bytes_max) for name, value in members.items()},
        parts=tuple(layout_parts(packet.value_layout, frame.value, value_offset(frame))),
    )
