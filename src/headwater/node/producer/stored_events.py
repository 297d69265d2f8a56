"""System events as they are stored, and as consumers are told them.

Every vbucket has the same events, at seqnos of its own. So what an event says is decoded once, and kept by its bytes.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from headwater.protocol.kernels.memory import Bytes
from headwater.protocol.messages.dcp_system_event import SystemEvent, SystemEventId
from headwater.protocol.numbers import Seqno
from headwater.protocol.system_events import FLATBUFFERS_VERSION, EncodedEvent, Event, decode_event, encode_event

_KEPT_MAX = 1024
_HEADER = Struct(">xxHxxxxI12xQIB")
"""The key's length, the body's length, the seqno, the event's id and its version."""
_EXTRAS_BYTES = 13


class KnownEvent:
    """What an event says, whatever its vbucket and its seqno."""

    def __init__(self, stored: EncodedEvent) -> None:
        self.event: Event = decode_event(_message(stored, Seqno(0)))
        self._encoded: dict[bool, EncodedEvent] = {}
        if stored.version != FLATBUFFERS_VERSION:
            self._encoded[False] = stored

    def told(self, seqno: Seqno, *, as_flatbuffers: bool) -> SystemEvent:
        """The message for a consumer that has asked for this form."""
        encoded = self._encoded.get(as_flatbuffers)
        if encoded is None:
            encoded = self._encoded[as_flatbuffers] = encode_event(self.event, as_flatbuffers=as_flatbuffers)
        return _message(encoded, seqno)


def _message(encoded: EncodedEvent, seqno: Seqno) -> SystemEvent:
    return SystemEvent(
        seqno=seqno, event=encoded.event, version=encoded.version, key=encoded.key, value=encoded.value
    )  # fmt: skip


class EventInRun(NamedTuple):
    seqno: Seqno
    known: KnownEvent
    end: int
    """Where in the run the next change starts."""


def read_event(run: Bytes, at: int) -> EventInRun:
    """The system event of a stored run that starts at `at`."""
    key_bytes, body_bytes, seqno, event, version = _HEADER.unpack_from(run.data, at)
    body_at = at + _HEADER.size - _EXTRAS_BYTES
    end = body_at + body_bytes
    known = _known(event, version, key_bytes, run[body_at + _EXTRAS_BYTES : end].tobytes())
    return EventInRun(Seqno(seqno), known, end)


@lru_cache(_KEPT_MAX)
def _known(event: int, version: int, key_bytes: int, body: bytes) -> KnownEvent:
    return KnownEvent(
        EncodedEvent(event=SystemEventId(event), version=version, key=body[:key_bytes], value=body[key_bytes:])
    )
