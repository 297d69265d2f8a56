"""Key-value messages about one document: get, store, delete, counters, append, touch, lock, metadata.

A quiet request is the same message under another opcode: the server answers it only where it has something to say
(a miss for stores, a hit for gets). The layouts are those of kv_engine's docs/BinaryProtocol.md.
"""

from __future__ import annotations

from typing import Any

from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import NO_FIELDS, Layout, Request, Response, message, u8, u32, u64
from headwater.protocol.numbers import CollectionId, Seqno, Vbuuid

_FLAGS = Layout(u32("flags"))
_STORE = Layout(u32("flags"), u32("expiry"))
_EXPIRY = Layout(u32("expiry"))
_COUNTER = Layout(u64("delta"), u64("initial"), u32("expiry"))
_MUTATION_TOKEN = Layout(u64("vbuuid"), u64("seqno"))
_COUNT = Layout(u64("count"))

COUNTER_MUST_EXIST = 0xFFFFFFFF
"""As the expiry of a counter request: fail where the document does not exist."""


@message
class Get(Request):
    opcode = Opcode.GET

    collection_id: CollectionId | None = None
    key: bytes


@message
class GetQuiet(Get):
    opcode = Opcode.GETQ


@message
class GetWithKey(Get):
    opcode = Opcode.GETK


@message
class GetWithKeyQuiet(Get):
    opcode = Opcode.GETKQ


@message
class GetReplica(Get):
    opcode = Opcode.GET_REPLICA


@message
class GetEx(Get):
    """A document with its extended attributes in one value. The peer has agreed to take all datatypes."""

    opcode = Opcode.GET_EX


@message
class GetExReplica(GetEx):
    opcode = Opcode.GET_EX_REPLICA


@message
class Set(Request):
    opcode = Opcode.SET
    layouts = (_STORE,)

    flags: int = 0
    expiry: int = 0
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message
class SetQuiet(Set):
    opcode = Opcode.SETQ


@message
class Add(Set):
    opcode = Opcode.ADD


@message
class AddQuiet(Set):
    opcode = Opcode.ADDQ


@message
class Replace(Set):
    opcode = Opcode.REPLACE


@message
class ReplaceQuiet(Set):
    opcode = Opcode.REPLACEQ


@message
class Delete(Request):
    opcode = Opcode.DELETE

    collection_id: CollectionId | None = None
    key: bytes


@message
class DeleteQuiet(Delete):
    opcode = Opcode.DELETEQ


@message
class Increment(Request):
    opcode = Opcode.INCREMENT
    layouts = (_COUNTER,)

    delta: int = 1
    initial: int = 0
    expiry: int = 0
    collection_id: CollectionId | None = None
    key: bytes


@message
class IncrementQuiet(Increment):
    opcode = Opcode.INCREMENTQ


@message
class Decrement(Increment):
    opcode = Opcode.DECREMENT


@message
class DecrementQuiet(Increment):
    opcode = Opcode.DECREMENTQ


@message
class Append(Request):
    opcode = Opcode.APPEND

    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message
class AppendQuiet(Append):
    opcode = Opcode.APPENDQ


@message
class Prepend(Append):
    opcode = Opcode.PREPEND


@message
class PrependQuiet(Append):
    opcode = Opcode.PREPENDQ


@message
class Touch(Request):
    opcode = Opcode.TOUCH
    layouts = (_EXPIRY,)

    expiry: int = 0
    collection_id: CollectionId | None = None
    key: bytes


@message
class GetAndTouch(Touch):
    opcode = Opcode.GAT


@message
class GetAndTouchQuiet(Touch):
    opcode = Opcode.GATQ


@message
class GetLocked(Request):
    """Get and lock. With no lock time the server takes its default."""

    opcode = Opcode.GET_LOCKED
    layouts = (NO_FIELDS, Layout(u32("lock_time_s")))

    lock_time_s: int | None = None
    collection_id: CollectionId | None = None
    key: bytes

    def layout(self) -> Layout:
        return self.layouts[0 if self.lock_time_s is None else 1]


@message
class Unlock(Request):
    opcode = Opcode.UNLOCK_KEY

    collection_id: CollectionId | None = None
    key: bytes


@message
class GetMeta(Request):
    """The metadata of a document, deleted ones included. Version 2 adds the datatype to the answer."""

    opcode = Opcode.GET_META
    layouts = (NO_FIELDS, Layout(u8("version")))

    version: int | None = None
    collection_id: CollectionId | None = None
    key: bytes

    def layout(self) -> Layout:
        return self.layouts[0 if self.version is None else 1]


@message
class GetMetaQuiet(GetMeta):
    opcode = Opcode.GETQ_META


@message
class GetRandomKey(Request):
    """Any document of a collection; of the default one where none is named. The answer has its key."""

    opcode = Opcode.GET_RANDOM_KEY
    layouts = (NO_FIELDS, Layout(u32("collection")), Layout(u32("collection"), u8("include_xattrs")))

    collection: CollectionId | None = None
    include_xattrs: int | None = None
    """Whether the answer has the extended attributes, where HELLO has negotiated that it may."""

    def layout(self) -> Layout:
        return self.layouts[0 if self.collection is None else 1 if self.include_xattrs is None else 2]


# --- responses ----------------------------------------------------------------------------------------------------


@message
class GetResponse(Response):
    """A document. The key is there only where the request asked for it (`GETK`), or did not say it (a random one)."""

    opcodes = (
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
    layouts = (_FLAGS,)

    flags: int = 0
    collection_id: CollectionId | None = None
    key: bytes = b""
    value: bytes = b""

    @classmethod
    def decode_key(cls, key: bytes, negotiated: Any) -> dict[str, Any]:
        return super(GetResponse, cls).decode_key(key, negotiated) if key else {}


@message
class StoreResponse(Response):
    """A write has been taken. With MUTATION_SEQNO negotiated it says where it stands in the vbucket's history."""

    opcodes = (
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
    layouts = (NO_FIELDS, _MUTATION_TOKEN)

    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None

    def layout(self) -> Layout:
        return self.layouts[0 if self.vbuuid is None else 1]


@message
class CounterResponse(Response):
    opcodes = (Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ)
    layouts = (NO_FIELDS, _MUTATION_TOKEN)

    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None
    count: int

    def layout(self) -> Layout:
        return self.layouts[0 if self.vbuuid is None else 1]

    def encode_value(self) -> bytes:
        return _COUNT.pack(self)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return dict(_COUNT.unpack_whole(value, "a counter"))


_META = (u32("deleted"), u32("flags"), u32("expiry"), u64("rev_seqno"))


@message
class GetMetaResponse(Response):
    opcodes = (Opcode.GET_META, Opcode.GETQ_META)
    layouts = (Layout(*_META), Layout(*_META, u8("document_datatype")))

    deleted: int = 0
    flags: int = 0
    expiry: int = 0
    rev_seqno: int = 0
    document_datatype: int | None = None

    def layout(self) -> Layout:
        return self.layouts[0 if self.document_datatype is None else 1]
