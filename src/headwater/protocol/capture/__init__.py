"""Captures: hex text, raw bytes, pcap and pcapng files, each as the same events, and the frames in them.

`read_capture` turns the bytes of a file into who sent what; `read_frames` cuts that into frames. Neither opens a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from headwater.protocol.capture.captured_frames import CapturedFrame, CaptureFault, read_frames
from headwater.protocol.capture.events import (
    UNKNOWN_FLOW,
    CaptureEvent,
    Chunk,
    ConnectionOpened,
    Direction,
    Flow,
    Gap,
    reassemble,
)
from headwater.protocol.capture.files import is_packet_capture, read_hex_text, read_segments
from headwater.protocol.features import Magic

__all__ = [
    "UNKNOWN_FLOW",
    "CaptureEvent",
    "CaptureFault",
    "CaptureFormat",
    "CapturedFrame",
    "Chunk",
    "ConnectionOpened",
    "Direction",
    "Flow",
    "Gap",
    "find_format",
    "read_capture",
    "read_frames",
]

_RAW_CHUNK_BYTES = 64 * 1024
_MAGICS = frozenset(Magic)


class CaptureFormat(Enum):
    HEX = "hex"
    RAW = "raw"
    PCAP = "pcap"
    """pcap or pcapng."""


def find_format(data: bytes) -> CaptureFormat:
    """The format by the first bytes. No magic of the protocol is a character that text begins with."""
    if is_packet_capture(data):
        return CaptureFormat.PCAP
    if data and data[0] in _MAGICS:
        return CaptureFormat.RAW
    return CaptureFormat.HEX


def read_capture(data: bytes, capture_format: CaptureFormat | None = None) -> Iterator[CaptureEvent]:
    """The events of a capture. Its format is found by its first bytes if none is given.

    Raises `CaptureError`, from the iterator, at the point where the input is not of that format.
    """
    capture_format = capture_format or find_format(data)
    if capture_format is CaptureFormat.PCAP:
        return reassemble(read_segments(data))
    if capture_format is CaptureFormat.HEX:
        return read_hex_text(data)
    return _read_raw(data)


def _read_raw(data: bytes) -> Iterator[CaptureEvent]:
    for at in range(0, len(data), _RAW_CHUNK_BYTES):
        yield Chunk(data=data[at : at + _RAW_CHUNK_BYTES])
