"""Which changes and system events a stream gets: all, those of some collections, or those of a scope.

A filter follows the system events that its stream passes: a collection of the scope may come, and any of them may go.
When all have gone, so has the stream's purpose. One that lets everything pass has nothing to follow, so that the
streams of a connection can share it.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np

from headwater.protocol.kernels.memory import Bytes, Column
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import SystemEvent, SystemEventId
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, ScopeId, Seqno
from headwater.protocol.system_events import (
    FLATBUFFERS_VERSION,
    CollectionCreated,
    CollectionDropped,
    EncodedEvent,
    Event,
    ScopeDropped,
    decode_event,
    encode_event,
)


class StreamFilter:
    """See the module."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        collections: tuple[CollectionId, ...] | None = None,
        scope: ScopeId | None = None,
        knows_collections: bool = True,
    ) -> None:
        self.collections = None if collections is None else frozenset(collections)
        self.scope = scope
        self.knows_collections = knows_collections
        """A consumer that does not gets the default collection, and no system events."""
        self._live = set(self.collections or ())
        if scope is not None:
            self._live = {c.id for holder, c in manifest.collections() if holder.id == scope}
        self._is_scope_dropped = False
        self._wanted: Column | None = None
        self._wanted_as_of: Manifest | None = None
        """The manifest under which this is what is wanted; None where that has to be found again."""

    @property
    def lets_all_pass(self) -> bool:
        return self.collections is None and self.scope is None

    @property
    def is_empty(self) -> bool:
        """Nothing will ever pass again."""
        return self._is_scope_dropped or (self.collections is not None and not self._live)

    def wanted(self, manifest: Manifest) -> Column | None:
        """The ids of the collections whose changes pass now, ascending, or None for all."""
        if self._wanted_as_of is not manifest:
            ids = self._wanted_ids(manifest)
            self._wanted = None if ids is None else np.array(sorted(ids), dtype=np.uint32)
            self._wanted_as_of = manifest
        return self._wanted

    def _wanted_ids(self, manifest: Manifest) -> set[CollectionId] | None:
        if not self.knows_collections:
            return {DEFAULT_COLLECTION}
        if not self.lets_all_pass:
            return self._live
        if not manifest.has_dropped:
            return None
        return {collection.id for _, collection in manifest.collections()}

    def concerns(self, event: Event) -> bool:
        """Whether an event that the stream has come to passes. The filter follows what it says."""
        if not self.knows_collections:
            return False
        if self.scope is not None:
            return self._follow_scope(event)
        if self.collections is None:
            return True
        if not isinstance(event, CollectionCreated | CollectionDropped):
            return False
        concerns = event.collection_id in self.collections
        if concerns and isinstance(event, CollectionDropped):
            self._live.discard(event.collection_id)
            self._wanted_as_of = None
        return concerns

    def _follow_scope(self, event: Event) -> bool:
        if event.scope_id != self.scope:
            return False
        if isinstance(event, CollectionCreated):
            self._live.add(event.collection_id)
        elif isinstance(event, CollectionDropped):
            self._live.discard(event.collection_id)
        self._is_scope_dropped |= isinstance(event, ScopeDropped)
        self._wanted_as_of = None
        return True


# --- system events ------------------------------------------------------------------------------------------------
#
# Every vbucket has the same events, at seqnos of its own. So what an event says is decoded once, and kept by its bytes.


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

    def message(self, seqno: Seqno, *, as_flatbuffers: bool) -> SystemEvent:
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
