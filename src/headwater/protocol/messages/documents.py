"""Key-value messages about one document: get, store, delete, counters, append, touch, lock, metadata; and range scans.

A quiet request is the same message under another opcode: the server answers it only if it has something to say (a miss
for stores, a hit for gets). The layouts are those of kv_engine's docs/BinaryProtocol.md.

A range scan returns keys or documents of one collection in one vbucket, in the order of the keys, or a sample of them.
JSON creates it, any number of requests continue it, and it ends when it is complete, cancelled or too old. The layouts
are those of kv_engine's docs/range_scans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.protocol.features import Opcode, OpenIntFlag
from headwater.protocol.frames import decode_leb128, encode_leb128
from headwater.protocol.messages.base import (
    NO_FIELDS,
    Layout,
    Request,
    Response,
    message,
    octets,
    take,
    u8,
    u16,
    u32,
    u64,
)
from headwater.protocol.numbers import Cas, CollectionId, Seqno, Vbuuid
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype

_FLAGS = Layout(u32("flags"))
_STORE = Layout(u32("flags"), u32("expiry"))
_EXPIRY = Layout(u32("expiry"))
_COUNTER = Layout(u64("delta"), u64("initial"), u32("expiry"))
_MUTATION_TOKEN = Layout(u64("vbuuid"), u64("seqno"))

COUNTER_MUST_EXIST = 0xFFFFFFFF
"""As the expiry of a counter request: fail if the document does not exist."""


@message(Opcode.GET)
class Get(Request):
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.GETQ)
class GetQuiet(Get): ...


@message(Opcode.GETK)
class GetWithKey(Get): ...


@message(Opcode.GETKQ)
class GetWithKeyQuiet(Get): ...


@message(Opcode.GET_REPLICA)
class GetReplica(Get): ...


@message(Opcode.GET_EX)
class GetEx(Get):
    """A document with its extended attributes in one value. The peer has agreed to accept all datatypes."""


@message(Opcode.GET_EX_REPLICA)
class GetExReplica(GetEx): ...


@message(Opcode.SET)
class Set(Request):
    layouts = (_STORE,)

    flags: int = 0
    expiry: int = 0
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message(Opcode.SETQ)
class SetQuiet(Set): ...


@message(Opcode.ADD)
class Add(Set): ...


@message(Opcode.ADDQ)
class AddQuiet(Set): ...


@message(Opcode.REPLACE)
class Replace(Set): ...


@message(Opcode.REPLACEQ)
class ReplaceQuiet(Set): ...


@message(Opcode.DELETE)
class Delete(Request):
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.DELETEQ)
class DeleteQuiet(Delete): ...


@message(Opcode.INCREMENT)
class Increment(Request):
    layouts = (_COUNTER,)

    delta: int = 1
    initial: int = 0
    expiry: int = 0
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.INCREMENTQ)
class IncrementQuiet(Increment): ...


@message(Opcode.DECREMENT)
class Decrement(Increment): ...


@message(Opcode.DECREMENTQ)
class DecrementQuiet(Increment): ...


@message(Opcode.APPEND)
class Append(Request):
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message(Opcode.APPENDQ)
class AppendQuiet(Append): ...


@message(Opcode.PREPEND)
class Prepend(Append): ...


@message(Opcode.PREPENDQ)
class PrependQuiet(Append): ...


@message(Opcode.TOUCH)
class Touch(Request):
    layouts = (_EXPIRY,)

    expiry: int = 0
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.GAT)
class GetAndTouch(Touch): ...


@message(Opcode.GATQ)
class GetAndTouchQuiet(Touch): ...


@message(Opcode.GET_LOCKED)
class GetLocked(Request):
    """Get and lock. Without a lock time the server uses its default."""

    layouts = (NO_FIELDS, Layout(u32("lock_time_s")))

    lock_time_s: int | None = None
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.UNLOCK_KEY)
class Unlock(Request):
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.GET_META)
class GetMeta(Request):
    """The metadata of a document, deleted ones included. Version 2 adds the datatype to the answer."""

    layouts = (NO_FIELDS, Layout(u8("version")))

    version: int | None = None
    collection_id: CollectionId | None = None
    key: bytes


@message(Opcode.GETQ_META)
class GetMetaQuiet(GetMeta): ...


@message(Opcode.GET_RANDOM_KEY)
class GetRandomKey(Request):
    """Any document of a collection; of the default one if none is named. The answer has its key."""

    layouts = (NO_FIELDS, Layout(u32("collection")), Layout(u32("collection"), u8("include_xattrs")))

    collection: CollectionId | None = None
    include_xattrs: int | None = None
    """Whether the answer has the extended attributes, if HELLO has negotiated that it may."""


# --- responses ----------------------------------------------------------------------------------------------------


@message(
    Opcode.GET,
    Opcode.GETQ,
    Opcode.GETK,
    Opcode.GETKQ,
    Opcode.GET_REPLICA,
    Opcode.GET_EX,
    Opcode.GET_EX_REPLICA,
    Opcode.GAT,
    Opcode.GATQ,
    Opcode.GET_LOCKED,
    Opcode.GET_RANDOM_KEY,
)
class GetResponse(Response):
    """A document. It has the key only if the request asked for it (`GETK`), or did not name it (a random one)."""

    layouts = (_FLAGS,)

    flags: int = 0
    collection_id: CollectionId | None = None
    key: bytes = b""
    value: bytes = b""

    @classmethod
    def decode_key(cls, key: bytes, negotiated: Any) -> dict[str, Any]:
        return super(GetResponse, cls).decode_key(key, negotiated) if key else {}


@message(
    Opcode.SET,
    Opcode.SETQ,
    Opcode.ADD,
    Opcode.ADDQ,
    Opcode.REPLACE,
    Opcode.REPLACEQ,
    Opcode.DELETE,
    Opcode.DELETEQ,
    Opcode.APPEND,
    Opcode.APPENDQ,
    Opcode.PREPEND,
    Opcode.PREPENDQ,
    Opcode.SET_WITH_META,
    Opcode.SETQ_WITH_META,
    Opcode.ADD_WITH_META,
    Opcode.ADDQ_WITH_META,
    Opcode.DEL_WITH_META,
    Opcode.DELQ_WITH_META,
)
class StoreResponse(Response):
    """A write was accepted. With MUTATION_SEQNO negotiated it has the write's place in the vbucket's history."""

    layouts = (NO_FIELDS, _MUTATION_TOKEN)

    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None


@message(Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ)
class CounterResponse(Response):
    layouts = (NO_FIELDS, _MUTATION_TOKEN)
    value_layout = Layout(u64("count"))

    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None
    count: int


_META = (u32("deleted"), u32("flags"), u32("expiry"), u64("rev_seqno"))


@message(Opcode.GET_META, Opcode.GETQ_META)
class GetMetaResponse(Response):
    layouts = (Layout(*_META), Layout(*_META, u8("document_datatype")))

    deleted: int = 0
    flags: int = 0
    expiry: int = 0
    rev_seqno: int = 0
    document_datatype: int | None = None


# --- documents with metadata of another cluster --------------------------------------------------------------------
# The extras have four lengths: options and the length of extended metadata are optional. The layouts are those of
# kv_engine's engines/ep/docs/protocol/set_with_meta.md and del_with_meta.md; the numbers of the options are those of
# the second, which servers use (the first one has an older SKIP_CONFLICT_RESOLUTION).


class MetaOptions(OpenIntFlag):
    """What a write with metadata requests."""

    FORCE = 0x01
    """No conflict resolution, and copies that are not active accept it, too."""
    FORCE_ACCEPT = 0x02
    """Required if the last write wins, and refused if revisions decide."""
    REGENERATE_CAS = 0x04
    """The server gives the version its own CAS. Only without conflict resolution."""
    SKIP_CONFLICT_RESOLUTION = 0x08
    IS_EXPIRATION = 0x10
    """The document is deleted because it has expired."""


_WITH_META = (u32("flags"), u32("expiry"), u64("rev_seqno"), u64("meta_cas", Cas))
_OPTIONS = u32("options", MetaOptions)
_META_BYTES = u16("extended_meta_bytes")


@message(Opcode.SET_WITH_META)
class SetWithMeta(Request):
    """Store a document with its metadata, unless the existing one wins."""

    layouts = (
        Layout(*_WITH_META),
        Layout(*_WITH_META, _META_BYTES),
        Layout(*_WITH_META, _OPTIONS),
        Layout(*_WITH_META, _OPTIONS, _META_BYTES),
    )

    flags: int = 0
    expiry: int = 0
    """A time; for a deletion, when it was deleted."""
    rev_seqno: int
    meta_cas: Cas
    """The CAS of the version. The CAS in the header is that of the version to replace, as with other writes."""
    options: MetaOptions | None = None
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""
    extended_meta: bytes | None = None
    """Follows the value. Servers ignore it from 4.6 on; None if not even its length is sent."""

    @property
    def extended_meta_bytes(self) -> int | None:
        return None if self.extended_meta is None else len(self.extended_meta)

    def encode_value(self) -> bytes:
        return self.value + (self.extended_meta or b"")

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        extended = known.pop("extended_meta_bytes", None)
        if extended is None:
            return {"value": value}
        if extended > len(value):
            raise cls.malformed("value", f"extended metadata of {extended} bytes in a value of {len(value)}")
        cut = len(value) - extended
        return {"value": value[:cut], "extended_meta": value[cut:]}


@message(Opcode.SETQ_WITH_META)
class SetWithMetaQuiet(SetWithMeta): ...


@message(Opcode.ADD_WITH_META)
class AddWithMeta(SetWithMeta):
    """The same, only if there is no document."""


@message(Opcode.ADDQ_WITH_META)
class AddWithMetaQuiet(SetWithMeta): ...


@message(Opcode.DEL_WITH_META)
class DeleteWithMeta(SetWithMeta):
    """Delete a document, leaving a tombstone with this metadata. The value has the attributes that outlive it."""


@message(Opcode.DELQ_WITH_META)
class DeleteWithMetaQuiet(SetWithMeta): ...


# --- range scans ------------------------------------------------------------------------------------------------------


SCAN_ID_BYTES = 16

_SCAN_ID = octets("scan_id", SCAN_ID_BYTES)


@message(Opcode.RANGE_SCAN_CREATE)
class RangeScanCreate(Request):
    """Begin a scan. The value is JSON: the collection, whether keys are enough, the range or the sample."""

    value: bytes


@message(Opcode.RANGE_SCAN_CREATE)
class RangeScanCreateResponse(Response):
    """The name of the scan, for the requests that follow."""

    value_layout = Layout(_SCAN_ID)

    opcode: Opcode = Opcode.RANGE_SCAN_CREATE
    scan_id: bytes


@message(Opcode.RANGE_SCAN_CONTINUE)
class RangeScanContinue(Request):
    """The next part of a scan. A bound of 0 is no bound; a server may return less than requested."""

    layouts = (Layout(_SCAN_ID, u32("items_max"), u32("time_ms_max"), u32("bytes_max")),)

    scan_id: bytes
    items_max: int = 0
    time_ms_max: int = 0
    bytes_max: int = 0


@message(Opcode.RANGE_SCAN_CANCEL)
class RangeScanCancel(Request):
    layouts = (Layout(_SCAN_ID),)

    scan_id: bytes


# --- what was scanned ---------------------------------------------------------------------------------------------

_DOCUMENT = Layout(u32("flags"), u32("expiry"), u64("seqno", Seqno), u64("cas", Cas), u8("datatype", Datatype))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedDocument:
    """A document as a scan returns it."""

    flags: int
    expiry: int
    seqno: Seqno
    cas: Cas
    datatype: Datatype
    key: bytes
    value: bytes


@message(Opcode.RANGE_SCAN_CONTINUE)
class RangeScanContinueResponse(Response):
    """Keys, or documents. The status says whether more follow, in another answer or with the next request."""

    statuses = frozenset({Status.SUCCESS, Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE})
    layouts = (Layout(u32("has_documents")),)

    opcode: Opcode = Opcode.RANGE_SCAN_CONTINUE
    has_documents: int
    """0 for keys, 1 for documents."""
    keys: tuple[bytes, ...] = ()
    documents: tuple[ScannedDocument, ...] = ()

    def encode_value(self) -> bytes:
        if not self.has_documents:
            return b"".join(_with_length(key) for key in self.keys)
        return b"".join(
            _DOCUMENT.pack(document) + _with_length(document.key) + _with_length(document.value)
            for document in self.documents
        )

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        found: list[Any] = []
        at = 0
        while at < len(value):
            if not known["has_documents"]:
                key, at = _after_length(value, at)
                found.append(key)
                continue
            meta, at = _DOCUMENT.take(value, at)
            key, at = _after_length(value, at)
            body, at = _after_length(value, at)
            found.append(ScannedDocument(**meta, key=key, value=body))
        return {"documents" if known["has_documents"] else "keys": tuple(found)}


def _with_length(data: bytes) -> bytes:
    return encode_leb128(len(data)) + data


def _after_length(value: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes that follow the length at `at`, and where they end."""
    length, at = decode_leb128(value, at, "the length of a key or value")
    return take(value, at, length)
