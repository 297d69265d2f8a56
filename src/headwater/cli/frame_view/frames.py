"""Views of captured frames: of DCP, of the key-value protocol around it, and of the UPR draft.

`headwater decode` asks for one view a frame. A malformed frame is shown as far as its layout is known, and never
raises.
"""

from __future__ import annotations

from typing import Any

from headwater.cli.frame_view.parts import (
    FrameView,
    HeaderWords,
    Part,
    ValueView,
    as_json,
    dcp_words,
    flag_names,
    frame_info_parts,
    header_parts,
    layout_parts,
    read_value,
    value_offset,
)
from headwater.errors import RemoteProtocolError, UnknownOpcode
from headwater.protocol.capture import CapturedFrame
from headwater.protocol.features import Magic, Opcode, ServerOpcode
from headwater.protocol.frames import HEADER_BYTES, Frame
from headwater.protocol.messages import REQUESTS, RESPONSES, SERVER_REQUESTS, Message, decode_message
from headwater.protocol.messages.base import NO_FIELDS, Layout
from headwater.protocol.status import Status
from headwater.protocol.upr import (
    UprFailoverLogResponse,
    UprOpcode,
    UprPacket,
    UprRollback,
    UprStreamEnd,
    decode_packet,
)
from headwater.protocol.values import Datatype


def view_dcp_frame(captured: CapturedFrame, *, value_bytes_max: int) -> FrameView:
    """The frame with all its fields named. A malformed message is shown as far as its layout is known."""
    frame = captured.frame
    message, error = _decode(captured)
    layout = _extras_layout(frame, message)
    try:
        value = read_value(frame, message, layout, bytes_max=value_bytes_max)
    except RemoteProtocolError as value_error:
        value = ValueView(document=frame.value)
        error = error or value_error.reason
    datatype = Datatype(frame.datatype)
    return FrameView(
        captured=captured,
        opcode=frame.opcode_name,
        title=f"{frame.opcode_name} {'command' if frame.magic.is_request else 'response'}",
        header=header_parts(frame, dcp_words(frame)),
        datatype_names=tuple(flag_names(datatype).split(" | ")) if datatype else (),
        frame_infos=frame_info_parts(frame),
        extras=_extras_parts(frame, layout),
        key=getattr(message, "key", frame.key) or b"",
        collection_id=getattr(message, "collection_id", None),
        value=value,
        more=_vbucket_or_status(frame),
        error=error,
    )


def _decode(captured: CapturedFrame) -> tuple[Message | None, str]:
    """The frame's message, and what is wrong with it. A named opcode that has no message here is no fault."""
    frame = captured.frame
    if frame.magic is Magic.SERVER_RESPONSE:
        return None, ""
    try:
        return decode_message(frame, captured.negotiated), ""
    except UnknownOpcode as error:
        names = ServerOpcode if frame.magic is Magic.SERVER_REQUEST else Opcode
        return None, "" if names(frame.opcode).is_known else error.reason
    except RemoteProtocolError as error:
        return None, error.reason


def _extras_layout(frame: Frame, message: Message | None) -> Layout:
    """The layout of the extras: the message's, or where it is malformed the one that its opcode and length fit."""
    cls = type(message) if message is not None else _message_class(frame)
    layouts = () if cls is None else cls.layouts
    return next((layout for layout in layouts if layout.size_bytes == len(frame.extras)), NO_FIELDS)


def _message_class(frame: Frame) -> type[Message] | None:
    if frame.magic is Magic.SERVER_REQUEST:
        return SERVER_REQUESTS.get(frame.opcode)
    if frame.magic is Magic.SERVER_RESPONSE:
        return None
    if frame.magic.is_request:
        return REQUESTS.get(frame.opcode)
    response = RESPONSES.get(frame.opcode)
    return response if response is not None and frame.specific in response.statuses else None


def _extras_parts(frame: Frame, layout: Layout) -> tuple[Part, ...]:
    offset = HEADER_BYTES + len(frame.framing_extras)
    if layout.size_bytes or not frame.extras:
        return tuple(layout_parts(layout, frame.extras, offset))
    text = f"0x{frame.extras.hex()}"
    return (Part(name="extras", offset=offset, width_bytes=len(frame.extras), text=text),)


def _vbucket_or_status(frame: Frame) -> dict[str, Any]:
    if frame.magic.is_request:
        return {"vbucket": frame.specific}
    return {"status": Status(frame.specific).name, "status_number": frame.specific}


# --- the UPR draft: the same frames, and other names for nearly everything ---------------------------------------


_OPCODE_NAMES = {int(opcode): opcode.name for opcode in UprOpcode}


def view_upr_frame(captured: CapturedFrame, *, value_bytes_max: int) -> FrameView:
    frame = captured.frame
    packet: UprPacket | None = None
    error = ""
    try:
        packet = decode_packet(frame)
    except RemoteProtocolError as fault:
        error = fault.reason
    opcode = _OPCODE_NAMES.get(frame.opcode, f"UNKNOWN_0x{frame.opcode:02x}")
    name = packet.draft_name if packet is not None else ""
    return FrameView(
        captured=captured,
        opcode=opcode,
        title=f"UPR {name or opcode}",
        header=header_parts(frame, _words(frame, opcode, packet)),
        extras=_upr_extras_parts(frame, packet),
        key_name="Group ID" if packet is not None and packet.key_field == "group_id" else "Key",
        key=frame.key,
        value=_value(frame, packet, value_bytes_max),
        more={"packet": name, "vbucket": frame.specific, "request_type": frame.datatype},
        error=error,
    )


def _words(frame: Frame, opcode: str, packet: UprPacket | None) -> HeaderWords:
    meaning = packet.reason.name if isinstance(packet, UprStreamEnd) else packet.draft_name if packet else ""
    return HeaderWords(
        opcode_meaning=f"UPR {opcode}",
        byte_5="Request type",
        byte_5_meaning=meaning,
        bytes_6_7="Vbucket",
        bytes_6_7_meaning=str(frame.specific) if frame.specific > 9 else "",
        opaque="Request ID",
        opaque_meaning=str(frame.opaque),
    )


def _upr_extras_parts(frame: Frame, packet: UprPacket | None) -> tuple[Part, ...]:
    if packet is not None:
        return tuple(layout_parts(packet.layout(), frame.extras, HEADER_BYTES))
    if not frame.extras:
        return ()
    text = f"0x{frame.extras.hex()}"
    return (Part(name="extras", offset=HEADER_BYTES, width_bytes=len(frame.extras), text=text),)


def _value(frame: Frame, packet: UprPacket | None, bytes_max: int) -> ValueView:
    members: dict[str, Any]
    if isinstance(packet, UprFailoverLogResponse):
        members = {"failover_log": packet.failover_log}
    elif isinstance(packet, UprRollback):
        members = {"rollback_seqno": packet.rollback_seqno}
    else:
        return ValueView(document=frame.value)
    return ValueView(
        fields={name: as_json(value, bytes_max) for name, value in members.items()},
        parts=tuple(layout_parts(packet.value_layout, frame.value, value_offset(frame))),
    )
