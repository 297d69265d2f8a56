"""Messages about vbuckets as wholes: their states, their seqnos, their persistence; and collections.

The layouts are those of kv_engine's docs/BinaryProtocol.md and docs/Collections.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.errors import MalformedMessage
from headwater.protocol.features import Opcode, OpenIntEnum, VBucketState
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.base import (
    NO_FIELDS,
    Layout,
    Request,
    Response,
    ValueCodec,
    list_codec,
    message,
    take,
    u8,
    u16,
    u32,
    u64,
)
from headwater.protocol.numbers import Cas, CollectionId, ManifestUid, Seqno, VBucketId, Vbuuid

# --- states -------------------------------------------------------------------------------------------------------


@message(Opcode.SET_VBUCKET)
class SetVBucket(Request):
    """Set the state of a vbucket, and create it if it is missing. Servers before 5.0 took the state as 32 bits."""

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


@message(Opcode.GET_VBUCKET)
class GetVBucket(Request): ...


@message(Opcode.GET_VBUCKET)
class GetVBucketResponse(Response):
    value_layout = Layout(u32("state", VBucketState))

    opcode: Opcode = Opcode.GET_VBUCKET
    state: VBucketState


@message(Opcode.DEL_VBUCKET)
class DeleteVBucket(Request):
    value: bytes = b""
    """`async=0` waits until the files are gone."""


# --- seqnos -------------------------------------------------------------------------------------------------------


@message(Opcode.GET_ALL_VB_SEQNOS)
class GetAllVbSeqnos(Request):
    """The high seqnos of all vbuckets, of those in one state, or of one collection."""

    layouts = (NO_FIELDS, Layout(u32("state")), Layout(u32("state"), u32("collection")))

    state: int | None = None
    """A `VBucketState`, or 0 for all that are alive."""
    collection: CollectionId | None = None


_VB_SEQNO = Layout(u16("vbucket"), u64("seqno"))


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketSeqno:
    vbucket: VBucketId
    seqno: Seqno


def _decode_vb_seqnos(value: bytes) -> tuple[VBucketSeqno, ...]:
    if len(value) % _VB_SEQNO.size_bytes:
        raise MalformedMessage("vbucket seqnos are 10 bytes each", offset=HEADER_BYTES)
    return tuple(VBucketSeqno(vbucket=VBucketId(vb), seqno=Seqno(seqno)) for vb, seqno in _VB_SEQNO.repeat(value))


@message(Opcode.GET_ALL_VB_SEQNOS)
class GetAllVbSeqnosResponse(Response):
    value_codec = ValueCodec("seqnos", lambda seqnos: b"".join(map(_VB_SEQNO.pack, seqnos)), _decode_vb_seqnos)

    opcode: Opcode = Opcode.GET_ALL_VB_SEQNOS
    seqnos: tuple[VBucketSeqno, ...] = ()


@message(Opcode.OBSERVE_SEQNO)
class ObserveSeqno(Request):
    """How far a vbucket has persisted, on the branch of history that the client knows."""

    value_layout = Layout(u64("vbuuid"))

    vbuuid: Vbuuid


_OBSERVED = (u8("format"), u16("vbucket"), u64("vbuuid"), u64("persisted_seqno"), u64("current_seqno"))
_OBSERVED_LAYOUTS = {
    0: Layout(*_OBSERVED),
    1: Layout(*_OBSERVED, u64("old_vbuuid"), u64("last_received_seqno")),
}


@message(Opcode.OBSERVE_SEQNO)
class ObserveSeqnoResponse(Response):
    """After a failover (format 1) it also has the old branch, and how far the new one includes it."""

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

OBSERVED_KEYS_MAX = 2048
"""Limit for one request. Each document is looked up by itself, and other requests wait meanwhile."""


class KeyState(OpenIntEnum):
    NOT_PERSISTED = 0x00
    PERSISTED = 0x01
    NOT_FOUND = 0x80
    """There is no such document, or its deletion is persisted."""
    LOGICALLY_DELETED = 0x81
    """The document was deleted, which is not persisted yet."""


_OBSERVED_KEY = Layout(u16("vbucket"), u16("key_bytes"))
_OBSERVED_STATE = Layout(u8("state", KeyState), u64("cas", Cas))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedKey:
    """A document to ask about. Its key is as on the wire: with its collection id, if collections were negotiated."""

    vbucket: VBucketId
    key: bytes

    @property
    def key_bytes(self) -> int:
        return len(self.key)

    def encode(self) -> bytes:
        return _OBSERVED_KEY.pack(self) + self.key

    @classmethod
    def decode(cls, value: bytes, at: int) -> tuple[ObservedKey, int]:
        head, at = _OBSERVED_KEY.take(value, at)
        key, at = take(value, at, head["key_bytes"])
        return ObservedKey(vbucket=head["vbucket"], key=key), at


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedDocument(ObservedKey):
    state: KeyState
    cas: Cas

    def encode(self) -> bytes:
        return ObservedKey.encode(self) + _OBSERVED_STATE.pack(self)

    @classmethod
    def decode(cls, value: bytes, at: int) -> tuple[ObservedDocument, int]:
        key, at = ObservedKey.decode(value, at)
        state, at = _OBSERVED_STATE.take(value, at)
        return ObservedDocument(vbucket=key.vbucket, key=key.key, **state), at


@message(Opcode.OBSERVE)
class Observe(Request):
    """Whether documents are persisted, and in which versions. The keys are in the value, whatever their vbuckets."""

    value_codec = list_codec("keys", ObservedKey.encode, ObservedKey.decode, count_min=1, count_max=OBSERVED_KEYS_MAX)

    keys: tuple[ObservedKey, ...]


@message(Opcode.OBSERVE)
class ObserveResponse(Response):
    """The documents in the order of the request. The CAS of the header has times, which we leave at 0."""

    value_codec = list_codec("documents", ObservedDocument.encode, ObservedDocument.decode)

    opcode: Opcode = Opcode.OBSERVE
    documents: tuple[ObservedDocument, ...]


@message(Opcode.SEQNO_PERSISTENCE)
class SeqnoPersistence(Request):
    """Answer once this seqno is on disk."""

    layouts = (Layout(u64("seqno")),)

    seqno: Seqno


# --- collections --------------------------------------------------------------------------------------------------


@message(Opcode.COLLECTIONS_SET_MANIFEST)
class SetCollectionsManifest(Request):
    value: bytes
    """The manifest as JSON."""


@message(Opcode.COLLECTIONS_GET_MANIFEST)
class GetCollectionsManifest(Request): ...


@message(Opcode.COLLECTIONS_GET_ID)
class GetCollectionId(Request):
    """The id of `scope.collection`, named in the value (older clients put it in the key)."""

    key: bytes = b""
    value: bytes = b""


@message(Opcode.COLLECTIONS_GET_SCOPE_ID)
class GetScopeId(GetCollectionId): ...


@message(Opcode.COLLECTIONS_GET_ID, Opcode.COLLECTIONS_GET_SCOPE_ID)
class GetCollectionIdResponse(Response):
    layouts = (Layout(u64("manifest_uid"), u32("id")),)

    manifest_uid: ManifestUid
    id: int
    """The collection's id, or the scope's."""
    value: bytes = b""
