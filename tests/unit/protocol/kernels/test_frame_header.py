"""What kernels know of a header is what the enumerations and the typed codec say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headwater.kernels.compiling import part_for_python
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import HEADER_BYTES, Frame, decode_frame, stream_id
from headwater.protocol.kernels import frame_runs as frame_header
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import Abort, Deletion, Expiration, Mutation, Prepare, SystemEvent
from support.cases import case

is_magic, is_document_change, stated_lengths = map(
    part_for_python, (frame_header.is_magic, frame_header.is_document_change, frame_header.stated_lengths)
)

CHANGE: dict[str, Any] = {"key": b"k", "seqno": 1, "rev_seqno": 1}


def decoded(message: Request) -> Frame:
    found = decode_frame(message.encode())
    return found[0]


def test_the_magics_are_those_of_the_enumeration() -> None:
    assert [byte for byte in range(256) if is_magic(np.uint8(byte))] == sorted(Magic)


def test_changes_of_documents_are_mutations_deletions_and_expirations() -> None:
    changes = [byte for byte in range(256) if is_document_change(np.uint8(byte))]
    assert changes == [Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION]


@pytest.mark.parametrize("magic", Magic)
def test_the_lengths_are_those_of_the_parts(magic: Magic) -> None:
    framing = b"\x00" * 5 if magic.is_flexible else b""
    frame = Frame(magic=magic, opcode=0, framing_extras=framing, extras=bytes(7), key=b"k" * 11, value=b"v" * 300)
    data = np.frombuffer(frame.encode(), dtype=np.uint8)
    assert stated_lengths(data, 0) == (len(framing), 7, 11, len(framing) + 7 + 11 + 300)
    assert len(data) == HEADER_BYTES + frame.body_bytes


@case(Mutation(**CHANGE), frame_header.MUTATION_EXTRAS_BYTES)
@case(Deletion(**CHANGE), frame_header.DELETION_EXTRAS_BYTES)
@case(Deletion(**CHANGE, delete_time=1), frame_header.TIMED_DELETION_EXTRAS_BYTES)
@case(Expiration(**CHANGE, delete_time=1), frame_header.EXPIRATION_EXTRAS_BYTES)
@case(Prepare(**CHANGE, durability=1), frame_header.PREPARE_EXTRAS_BYTES)
@case(Abort(key=b"k", prepared_seqno=1, abort_seqno=2), frame_header.ABORT_EXTRAS_BYTES)
@case(SystemEvent(seqno=1, event=0, version=0, key=b"k"), frame_header.SYSTEM_EVENT_EXTRAS_BYTES)
def test_extras_are_as_long_as_those_of_the_typed_messages(message: Request, expected: int) -> None:
    assert len(decoded(message).extras) == expected


def test_the_stream_id_is_framed_as_the_typed_codec_does() -> None:
    framing = decoded(Mutation(**CHANGE, frame_infos=(stream_id(0x1234),))).framing_extras
    assert framing == bytes([frame_header.STREAM_ID_KIND, 0x12, 0x34])
    assert len(framing) == frame_header.STREAM_ID_BYTES
