"""Messages about vbuckets as wholes: their states, their seqnos, their persistence; and collections.

The layouts are those of kv_engine's docs/BinaryProtocol.md and docs/Collections.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.errors import MalformedMessage
from headwater.protocol.features import Opcode
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.base import NO_FIELDS, Layout, Request, Response, message, u8, u16, u32, u64
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, CollectionId, ManifestUid, OpenIntEnum, Seqno, VBucketId, Vbuuid

# --- states -------------------------------------------------------------------------------------------------------


@message
class SetVBucket(Request):
    """Give a vbucket a state, making it where it does not exist. Servers before 5.0 took the state as 32 bits."""

    opcode = Opcode.SET_VBUCKET
    layouts = (Layout(u8("state", VBucketState)), Layout(u32("state", VBucketState)))

    state: VBucketState
    state_is_wide: bool = False
    value: bytes = b""
    """Optional JSON: the replication topology."""

    def layout(self) -> Layout:
        return self.layouts[1 if self.state_is_wide else 0]

    @classmethod
    def decode_extras(cls, extras: bytes) -> dict[str, Any]:
        known = super(SetVBucket, cls).decode_extras(extras)
        return {**known, "state_is_wide": len(extras) == cls.layouts[1].size_bytes}


@message
class GetVBucket(Request):
    opcode = Opcode.GET_VBUCKET


_STATE = Layout(u32("state", VBucketState))


@message
class GetVBucketResponse(Response):
    opcodes = (Opcode.GET_VBUCKET,)

    opcode: Opcode = Opcode.GET_VBUCKET
    state: VBucketState

    def encode_value(self) -> bytes:
        return _STATE.pack(self)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return dict(_STATE.unpack_whole(value, "a vbucket state"))


@message
class DeleteVBucket(Request):
    opcode = Opcode.DEL_VBUCKET

    value: bytes = b""
    """`async=0` waits until the files are gone."""


# --- seqnos -------------------------------------------------------------------------------------------------------


@message
class GetAllVbSeqnos(Request):
    """The high seqnos of all vbuckets, of those in one state, or of one collection."""

    opcode = Opcode.GET_ALL_VB_SEQNOS
    layouts = (NO_FIELDS, Layout(u32("state")), Layout(u32("state"), u32("collection")))

    state: int | None = None
    """A `VBucketState`, or 0 for all that are alive."""
    collection: CollectionId | None = None

    def layout(self) -> Layout:
        return self.layouts[(self.state is not None) + (self.collection is not None)]


_VB_SEQNO = Layout(u16("vbucket"), u64("seqno"))


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketSeqno:
    vbucket: VBucketId
    seqno: Seqno


@message
class GetAllVbSeqnosResponse(Response):
    opcodes = (Opcode.GET_ALL_VB_SEQNOS,)

    opcode: Opcode = Opcode.GET_ALL_VB_SEQNOS
    seqnos: tuple[VBucketSeqno, ...] = ()

    def encode_value(self) -> bytes:
        return b"".join(_VB_SEQNO.pack(entry) for entry in self.seqnos)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        if len(value) % _VB_SEQNO.size_bytes:
            raise MalformedMessage("vbucket seqnos are 10 bytes each", offset=HEADER_BYTES)
        return {
            "seqnos": tuple(
                VBucketSeqno(vbucket=VBucketId(vbucket), seqno=Seqno(seqno))
                for vbucket, seqno in _VB_SEQNO.repeat(value)
            )
        }


_VBUUID = Layout(u64("vbuuid"))


@message
class ObserveSeqno(Request):
    """How far has this vbucket persisted, on the branch of history that I know?"""

    opcode = Opcode.OBSERVE_SEQNO

    vbuuid: Vbuuid

    def encode_value(self) -> bytes:
        return _VBUUID.pack(self)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return dict(_VBUUID.unpack_whole(value, "a vbuuid"))


_OBSERVED = (u8("format"), u16("vbucket"), u64("vbuuid"), u64("persisted_seqno"), u64("current_seqno"))
_OBSERVED_LAYOUTS = {
    0: Layout(*_OBSERVED),
    1: Layout(*_OBSERVED, u64("old_vbuuid"), u64("last_received_seqno")),
}


@message
class ObserveSeqnoResponse(Response):
    """After a failover (format 1) it also names the old branch and how far the new one holds it."""

    opcodes = (Opcode.OBSERVE_SEQNO,)

    opcode: Opcode = Opcode.OBSERVE_SEQNO
    vbucket: VBucketId
    vbuuid: Vbuuid
    persisted_seqno: Seqno
    current_seqno: Seqno
    old_vbuuid: Vbuuid | None = None
    last_received_seqno: Seqno | None = None

    @property
    def format(self) -> int:
        return 0 if self.old_vbuuid is None else 1

    def encode_value(self) -> bytes:
        return _OBSERVED_LAYOUTS[self.format].pack(self)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        layout = _OBSERVED_LAYOUTS.get(value[0]) if value else None
        if layout is None or len(value) != layout.size_bytes:
            raise MalformedMessage(f"an observe-seqno answer of {len(value)} bytes", offset=HEADER_BYTES)
        observed: dict[str, Any] = layout.unpack(value)
        del observed["format"]
        return observed


# --- documents, and whether they are durable ----------------------------------------------------------------------

_OBSERVED_KEY = Layout(u16("vbucket"), u16("key_bytes"))
_OBSERVED_STATE = Layout(u8("state"), u64("cas"))
OBSERVED_KEYS_MAX = 2048
"""In one request. Each is looked up by itself, and others wait meanwhile."""


class KeyState(OpenIntEnum):
    NOT_PERSISTED = 0x00
    PERSISTED = 0x01
    NOT_FOUND = 0x80
    """There is none, or it was deleted and that is persisted."""
    LOGICALLY_DELETED = 0x81
    """It was deleted, which is not persisted yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedKey:
    """A document to ask for. Its key is that of the wire: with its collection id, where collections are negotiated."""

    vbucket: VBucketId
    key: bytes

    @property
    def key_bytes(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedDocument(ObservedKey):
    state: KeyState
    cas: Cas


@message
class Observe(Request):
    """Are these documents persisted, and which versions of them? The keys are in the value, whatever their vbuckets."""

    opcode = Opcode.OBSERVE

    keys: tuple[ObservedKey, ...]

    def encode_value(self) -> bytes:
        return b"".join(_OBSERVED_KEY.pack(key) + key.key for key in self.keys)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        keys: list[ObservedKey] = []
        at = 0
        while at < len(value):
            if len(keys) == OBSERVED_KEYS_MAX:
                raise MalformedMessage(f"Observe names at most {OBSERVED_KEYS_MAX} keys", offset=HEADER_BYTES)
            key, at = _observed_key(value, at)
            keys.append(ObservedKey(**key))
        if not keys:
            raise MalformedMessage("Observe must name a key", offset=HEADER_BYTES)
        return {"keys": tuple(keys)}


@message
class ObserveResponse(Response):
    """The documents in the order that they were asked for. The CAS of the header has times, which we leave at 0."""

    opcodes = (Opcode.OBSERVE,)

    opcode: Opcode = Opcode.OBSERVE
    documents: tuple[ObservedDocument, ...]

    def encode_value(self) -> bytes:
        return b"".join(
            _OBSERVED_KEY.pack(document) + document.key + _OBSERVED_STATE.pack(document) for document in self.documents
        )

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        documents = []
        at = 0
        while at < len(value):
            key, at = _observed_key(value, at)
            if len(value) - at < _OBSERVED_STATE.size_bytes:
                raise MalformedMessage(f"an observed document ends at {len(value)} bytes", offset=HEADER_BYTES)
            observed = _OBSERVED_STATE.unpack(value, at)
            at += _OBSERVED_STATE.size_bytes
            state, cas = KeyState(observed["state"]), Cas(observed["cas"])
            documents.append(ObservedDocument(**key, state=state, cas=cas))
        return {"documents": tuple(documents)}


def _observed_key(value: bytes, at: int) -> tuple[dict[str, Any], int]:
    """A vbucket and a key of it, and where they end."""
    if len(value) - at < _OBSERVED_KEY.size_bytes:
        raise MalformedMessage(f"an observed key starts {len(value) - at} bytes before the end", offset=HEADER_BYTES)
    found = _OBSERVED_KEY.unpack(value, at)
    at += _OBSERVED_KEY.size_bytes
    end = at + found["key_bytes"]
    if end > len(value):
        raise MalformedMessage(f"an observed key of {found['key_bytes']} bytes is cut off", offset=HEADER_BYTES)
    return {"vbucket": VBucketId(found["vbucket"]), "key": value[at:end]}, end


@message
class SeqnoPersistence(Request):
    """Answer once this seqno is on disk."""

    opcode = Opcode.SEQNO_PERSISTENCE
    layouts = (Layout(u64("seqno")),)

    seqno: Seqno


# --- collections --------------------------------------------------------------------------------------------------


@message
class SetCollectionsManifest(Request):
    opcode = Opcode.COLLECTIONS_SET_MANIFEST

    value: bytes
    """The manifest as JSON."""


@message
class GetCollectionsManifest(Request):
    opcode = Opcode.COLLECTIONS_GET_MANIFEST


@message
class GetCollectionId(Request):
    """The id of `scope.collection`, named in the value (older clients put it in the key)."""

    opcode = Opcode.COLLECTIONS_GET_ID

    key: bytes = b""
    value: bytes = b""


@message
class GetScopeId(GetCollectionId):
    opcode = Opcode.COLLECTIONS_GET_SCOPE_ID


@message
class GetCollectionIdResponse(Response):
    opcodes = (Opcode.COLLECTIONS_GET_ID, Opcode.COLLECTIONS_GET_SCOPE_ID)
    layouts = (Layout(u64("manifest_uid"), u32("id")),)

    manifest_uid: ManifestUid
    id: int
    """The collection's id, or the scope's."""
    value: bytes = b""
