"""Sub-document messages: look up and change parts of a JSON document by path.

The value of a single-path request is the path followed by the new value. A multi-path request lists specs, and its
response one result per spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from struct import Struct
from typing import Any

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.features import Opcode
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.base import (
    NO_FIELDS,
    Layout,
    Request,
    Response,
    list_codec,
    message,
    take,
    u8,
    u16,
    u32,
    u64,
)
from headwater.protocol.numbers import CollectionId, Seqno, Vbuuid
from headwater.protocol.status import Status

SPECS_MAX = 16
"""The most paths in one multi-path request."""


class PathFlags(IntFlag):
    MKDIR_P = 0x01
    XATTR = 0x04
    EXPAND_MACROS = 0x10
    BINARY_VALUE = 0x20


class DocFlags(IntFlag):
    MKDOC = 0x01
    ADD = 0x02
    ACCESS_DELETED = 0x04
    CREATE_AS_DELETED = 0x08
    REVIVE_DOCUMENT = 0x10
    REPLICA_READ = 0x20


# --- single path --------------------------------------------------------------------------------------------------

_PATH = (u16("path_bytes"), u8("flags", PathFlags))
_PATH_LAYOUTS = (
    Layout(*_PATH),
    Layout(*_PATH, u8("doc_flags", DocFlags)),
    Layout(*_PATH, u32("expiry")),
    Layout(*_PATH, u32("expiry"), u8("doc_flags", DocFlags)),
)


@message(Opcode.SUBDOC_GET)
class SubdocGet(Request):
    layouts = _PATH_LAYOUTS

    flags: PathFlags = PathFlags(0)
    expiry: int | None = None
    doc_flags: DocFlags | None = None
    collection_id: CollectionId | None = None
    key: bytes
    path: bytes
    new_value: bytes = b""

    @property
    def path_bytes(self) -> int:
        return len(self.path)

    def encode_value(self) -> bytes:
        return self.path + self.new_value

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        path_bytes = known.pop("path_bytes")
        if path_bytes > len(value):
            raise MalformedMessage(f"a path of {path_bytes} bytes in a value of {len(value)}", offset=HEADER_BYTES)
        return {"path": value[:path_bytes], "new_value": value[path_bytes:]}


@message(Opcode.SUBDOC_EXISTS)
class SubdocExists(SubdocGet): ...


@message(Opcode.SUBDOC_GET_COUNT)
class SubdocGetCount(SubdocGet): ...


@message(Opcode.SUBDOC_DICT_ADD)
class SubdocDictAdd(SubdocGet): ...


@message(Opcode.SUBDOC_DICT_UPSERT)
class SubdocDictUpsert(SubdocGet): ...


@message(Opcode.SUBDOC_DELETE)
class SubdocDelete(SubdocGet): ...


@message(Opcode.SUBDOC_REPLACE)
class SubdocReplace(SubdocGet): ...


@message(Opcode.SUBDOC_ARRAY_PUSH_LAST)
class SubdocArrayPushLast(SubdocGet): ...


@message(Opcode.SUBDOC_ARRAY_PUSH_FIRST)
class SubdocArrayPushFirst(SubdocGet): ...


@message(Opcode.SUBDOC_ARRAY_INSERT)
class SubdocArrayInsert(SubdocGet): ...


@message(Opcode.SUBDOC_ARRAY_ADD_UNIQUE)
class SubdocArrayAddUnique(SubdocGet): ...


@message(Opcode.SUBDOC_COUNTER)
class SubdocCounter(SubdocGet): ...


@message(*range(Opcode.SUBDOC_GET, Opcode.SUBDOC_COUNTER + 1), Opcode.SUBDOC_GET_COUNT)
class SubdocResponse(Response):
    layouts = (NO_FIELDS, Layout(u64("vbuuid"), u64("seqno")))

    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None
    value: bytes = b""


# --- many paths ---------------------------------------------------------------------------------------------------

_LOOKUP_SPEC = Struct(">BBH")
_MUTATION_SPEC = Struct(">BBHI")
_LOOKUP_RESULT = Struct(">HI")
_MUTATION_STATUS = Struct(">BH")
_LENGTH = Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSpec:
    opcode: Opcode
    flags: PathFlags = PathFlags(0)
    path: bytes = b""

    def encode(self) -> bytes:
        return _LOOKUP_SPEC.pack(self.opcode, self.flags, len(self.path)) + self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationSpec:
    opcode: Opcode
    flags: PathFlags = PathFlags(0)
    path: bytes = b""
    value: bytes = b""

    def encode(self) -> bytes:
        lengths = _MUTATION_SPEC.pack(self.opcode, self.flags, len(self.path), len(self.value))
        return lengths + self.path + self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    status: Status
    value: bytes = b""

    def encode(self) -> bytes:
        return _LOOKUP_RESULT.pack(self.status, len(self.value)) + self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationResult:
    """Only specs that failed, or that return a value, have a result; `index` says which spec it is."""

    index: int
    status: Status
    value: bytes | None = None

    def encode(self) -> bytes:
        if (self.status == Status.SUCCESS) != (self.value is not None):
            raise LocalProtocolError("the result of a sub-document mutation has a value where it succeeded only")
        head = _MUTATION_STATUS.pack(self.index, self.status)
        return head if self.value is None else head + _LENGTH.pack(len(self.value)) + self.value


def _decode_lookup_spec(data: bytes, at: int) -> tuple[LookupSpec, int]:
    (opcode, flags, path_bytes), at = _unpack(_LOOKUP_SPEC, data, at)
    path, at = take(data, at, path_bytes)
    return LookupSpec(opcode=Opcode(opcode), flags=PathFlags(flags), path=path), at


def _decode_mutation_spec(data: bytes, at: int) -> tuple[MutationSpec, int]:
    (opcode, flags, path_bytes, value_bytes), at = _unpack(_MUTATION_SPEC, data, at)
    path, at = take(data, at, path_bytes)
    value, at = take(data, at, value_bytes)
    return MutationSpec(opcode=Opcode(opcode), flags=PathFlags(flags), path=path, value=value), at


def _decode_lookup_result(data: bytes, at: int) -> tuple[LookupResult, int]:
    (status, value_bytes), at = _unpack(_LOOKUP_RESULT, data, at)
    value, at = take(data, at, value_bytes)
    return LookupResult(status=Status(status), value=value), at


def _decode_mutation_result(data: bytes, at: int) -> tuple[MutationResult, int]:
    (index, status), at = _unpack(_MUTATION_STATUS, data, at)
    value = None
    if status == Status.SUCCESS:
        (value_bytes,), at = _unpack(_LENGTH, data, at)
        value, at = take(data, at, value_bytes)
    return MutationResult(index=index, status=Status(status), value=value), at


def _unpack(head: Struct, data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    taken, end = take(data, at, head.size)
    return head.unpack(taken), end


@message(Opcode.SUBDOC_MULTI_LOOKUP)
class MultiLookup(Request):
    layouts = (NO_FIELDS, Layout(u8("doc_flags", DocFlags)))
    value_codec = list_codec("specs", LookupSpec.encode, _decode_lookup_spec, count_max=SPECS_MAX)

    doc_flags: DocFlags | None = None
    collection_id: CollectionId | None = None
    key: bytes
    specs: tuple[LookupSpec, ...]


@message(Opcode.SUBDOC_MULTI_MUTATION)
class MultiMutation(Request):
    layouts = (
        NO_FIELDS,
        Layout(u8("doc_flags", DocFlags)),
        Layout(u32("expiry")),
        Layout(u32("expiry"), u8("doc_flags", DocFlags)),
        Layout(u32("expiry"), u32("user_flags")),
        Layout(u32("expiry"), u32("user_flags"), u8("doc_flags", DocFlags)),
    )
    value_codec = list_codec("specs", MutationSpec.encode, _decode_mutation_spec, count_max=SPECS_MAX)

    expiry: int | None = None
    user_flags: int | None = None
    """The flags that the document gets; None keeps its flags. They come with an expiry, and from clients that have
    agreed on binary attributes: the body that replaces another may be of another kind."""
    doc_flags: DocFlags | None = None
    collection_id: CollectionId | None = None
    key: bytes
    specs: tuple[MutationSpec, ...]


@message(Opcode.SUBDOC_MULTI_LOOKUP)
class MultiLookupResponse(Response):
    value_codec = list_codec("results", LookupResult.encode, _decode_lookup_result, count_max=SPECS_MAX)

    opcode: Opcode = Opcode.SUBDOC_MULTI_LOOKUP
    results: tuple[LookupResult, ...]


@message(Opcode.SUBDOC_MULTI_MUTATION)
class MultiMutationResponse(Response):
    layouts = (NO_FIELDS, Layout(u64("vbuuid"), u64("seqno")))
    value_codec = list_codec("results", MutationResult.encode, _decode_mutation_result, count_max=SPECS_MAX)

    opcode: Opcode = Opcode.SUBDOC_MULTI_MUTATION
    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None
    results: tuple[MutationResult, ...] = ()
