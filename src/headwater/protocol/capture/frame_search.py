"""Where a frame may begin in bytes whose beginning is lost.

A header gives itself away: a known magic and opcode, a datatype of three bits, a vbucket or status below 1024, and
lengths that fit each other and the limit. Random bytes look so about once in fifty megabytes. Where the frame's
end is there to be seen, another such header must follow.
"""

from __future__ import annotations

import re

from headwater.errors import RemoteProtocolError
from headwater.protocol.frames import HEADER, HEADER_BYTES, decode_frame
from headwater.protocol.opcodes import Magic, Opcode, ServerOpcode

_MAGICS = re.compile(b"[" + b"".join(re.escape(bytes([magic])) for magic in Magic) + b"]")
_SERVER_MAGICS = frozenset({Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE})
_DATATYPE_MAX = 0x07
_SPECIFIC_MAX = 1023


def find_frame(data: bytes | bytearray) -> int | None:
    """The offset of the first thing that looks like a frame, or None while there is none."""
    for candidate in _MAGICS.finditer(data):
        at = candidate.start()
        if at + HEADER_BYTES > len(data):
            return None
        if _looks_like_frame(data, at):
            return at
    return None


def _looks_like_frame(data: bytes | bytearray, at: int) -> bool:
    if not _looks_like_header(data, at):
        return False
    end: int = at + HEADER_BYTES + HEADER.unpack_from(data, at)[6]
    return end + HEADER_BYTES > len(data) or _looks_like_header(data, end)


def _looks_like_header(data: bytes | bytearray, at: int) -> bool:
    magic, opcode, _, _, datatype, specific, *_ = HEADER.unpack_from(data, at)
    try:
        # A header alone is enough to be refused.
        decode_frame(data[at : at + HEADER_BYTES])
    except RemoteProtocolError:
        return False
    names = ServerOpcode if magic in _SERVER_MAGICS else Opcode
    return names(opcode).is_known and datatype <= _DATATYPE_MAX and specific <= _SPECIFIC_MAX
