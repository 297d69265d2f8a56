"""Sub-document messages: look up and change parts of a JSON document by path.

The value of a single-path request is the path followed by the new value. A multi-path request lists specs, and its
response one result a spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from struct import Struct
from typing import Any, TypeVar

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.features import Opcode
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.base import NO_FIELDS, Layout, Request, Response, message, u8, u16, u32, u64
from headwater.protocol.numbers import CollectionId, Seqno, Vbuuid
from headwater.protocol.status import Status

SPECS_MAX = 16
"""Paths in one multi-path request."""

T = TypeVar("T")


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


@message
class SubdocGet(Request):
    opcode = Opcode.SUBDOC_GET
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

    def layout(self) -> Layout:
        return self.layouts[(self.expiry is not None) * 2 + (self.doc_flags is not None)]

    def encode_value(self) -> bytes:
        return self.path + self.new_value

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        path_bytes = known.pop("path_bytes")
        if path_bytes > len(value):
            raise MalformedMessage(f"a path of {path_bytes} bytes in a value of {len(value)}", offset=HEADER_BYTES)
        return {"path": value[:path_bytes], "new_value": value[path_bytes:]}


@message
class SubdocExists(SubdocGet):
    opcode = Opcode.SUBDOC_EXISTS


@message
class SubdocGetCount(SubdocGet):
    opcode = Opcode.SUBDOC_GET_COUNT


@message
class SubdocDictAdd(SubdocGet):
    opcode = Opcode.SUBDOC_DICT_ADD


@message
class SubdocDictUpsert(SubdocGet):
    opcode = Opcode.SUBDOC_DICT_UPSERT


@message
class SubdocDelete(SubdocGet):
    opcode = Opcode.SUBDOC_DELETE


@message
class SubdocReplace(SubdocGet):
    opcode = Opcode.SUBDOC_REPLACE


@message
class SubdocArrayPushLast(SubdocGet):
    opcode = Opcode.SUBDOC_ARRAY_PUSH_LAST


@message
class SubdocArrayPushFirst(SubdocGet):
    opcode = Opcode.SUBDOC_ARRAY_PUSH_FIRST


@message
class SubdocArrayInsert(SubdocGet):
    opcode = Opcode.SUBDOC_ARRAY_INSERT


@message
class SubdocArrayAddUnique(SubdocGet):
    opcode = Opcode.SUBDOC_ARRAY_ADD_UNIQUE


@message
class SubdocCounter(SubdocGet):
    opcode = Opcode.SUBDOC_COUNTER


@message
class SubdocResponse(Response):
    opcodes = tuple(Opcode(number) for number in (*range(0xC5, 0xD0), 0xD2))
    layouts = (NO_FIELDS, Layout(u64("vbuuid"), u64("seqno")))

    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None
    value: bytes = b""

    def layout(self) -> Layout:
        return self.layouts[0 if self.vbuuid is None else 1]


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
    """Only specs that failed, or that give a value back, have a result; `index` says which spec it is."""

    index: int
    status: Status
    value: bytes | None = None

    def encode(self) -> bytes:
        if (self.status == Status.SUCCESS) != (self.value is not None):
            raise LocalProtocolError("the result of a sub-document mutation has a value where it succeeded only")
        head = _MUTATION_STATUS.pack(self.index, self.status)
        return head if self.value is None else head + _LENGTH.pack(len(self.value)) + self.value


def _take(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    if at + length > len(data):
        raise MalformedMessage("a sub-document spec or result is cut off", offset=HEADER_BYTES + at)
    return data[at : at + length], at + length


def _decode_lookup_spec(data: bytes, at: int) -> tuple[LookupSpec, int]:
    head, at = _take(data, at, _LOOKUP_SPEC.size)
    opcode, flags, path_bytes = _LOOKUP_SPEC.unpack(head)
    path, at = _take(data, at, path_bytes)
    return LookupSpec(opcode=Opcode(opcode), flags=PathFlags(flags), path=path), at


def _decode_mutation_spec(data: bytes, at: int) -> tuple[MutationSpec, int]:
    head, at = _take(data, at, _MUTATION_SPEC.size)
    opcode, flags, path_bytes, value_bytes = _MUTATION_SPEC.unpack(head)
    path, at = _take(data, at, path_bytes)
    value, at = _take(data, at, value_bytes)
    return MutationSpec(opcode=Opcode(opcode), flags=PathFlags(flags), path=path, value=value), at


def _decode_lookup_result(data: bytes, at: int) -> tuple[LookupResult, int]:
    head, at = _take(data, at, _LOOKUP_RESULT.size)
    status, value_bytes = _LOOKUP_RESULT.unpack(head)
    value, at = _take(data, at, value_bytes)
    return LookupResult(status=Status(status), value=value), at


def _decode_mutation_result(data: bytes, at: int) -> tuple[MutationResult, int]:
    head, at = _take(data, at, _MUTATION_STATUS.size)
    index, number = _MUTATION_STATUS.unpack(head)
    status = Status(number)
    if status != Status.SUCCESS:
        return MutationResult(index=index, status=status), at
    length, at = _take(data, at, _LENGTH.size)
    value, at = _take(data, at, _LENGTH.unpack(length)[0])
    return MutationResult(index=index, status=status, value=value), at


def _decode_all(data: bytes, decode: Callable[[bytes, int], tuple[T, int]]) -> tuple[T, ...]:
    items: list[T] = []
    at = 0
    while at < len(data):
        if len(items) == SPECS_MAX:
            raise MalformedMessage(f"more than {SPECS_MAX} sub-document paths", offset=HEADER_BYTES + at)
        item, at = decode(data, at)
        items.append(item)
    return tuple(items)


@message
class MultiLookup(Request):
    opcode = Opcode.SUBDOC_MULTI_LOOKUP
    layouts = (NO_FIELDS, Layout(u8("doc_flags", DocFlags)))

    doc_flags: DocFlags | None = None
    collection_id: CollectionId | None = None
    key: bytes
    specs: tuple[LookupSpec, ...]

    def layout(self) -> Layout:
        return self.layouts[0 if self.doc_flags is None else 1]

    def encode_value(self) -> bytes:
        return _encode_specs(self.specs)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return {"specs": _decode_all(value, _decode_lookup_spec)}


@message
class MultiMutation(Request):
    opcode = Opcode.SUBDOC_MULTI_MUTATION
    layouts = (
        NO_FIELDS,
        Layout(u8("doc_flags", DocFlags)),
        Layout(u32("expiry")),
        Layout(u32("expiry"), u8("doc_flags", DocFlags)),
        Layout(u32("expiry"), u32("user_flags")),
        Layout(u32("expiry"), u32("user_flags"), u8("doc_flags", DocFlags)),
    )

    expiry: int | None = None
    user_flags: int | None = None
    """The flags that the document gets; those it has where this is None. They come with an expiry, and from clients
    that have agreed on binary attributes: the body that takes the place of another may be of another kind."""
    doc_flags: DocFlags | None = None
    collection_id: CollectionId | None = None
    key: bytes
    specs: tuple[MutationSpec, ...]

    def layout(self) -> Layout:
        fields_before = (self.expiry is not None) + (self.user_flags is not None)
        return self.layouts[fields_before * 2 + (self.doc_flags is not None)]

    def encode_value(self) -> bytes:
        return _encode_specs(self.specs)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return {"specs": _decode_all(value, _decode_mutation_spec)}


@message
class MultiLookupResponse(Response):
    opcodes = (Opcode.SUBDOC_MULTI_LOOKUP,)

    opcode: Opcode = Opcode.SUBDOC_MULTI_LOOKUP
    results: tuple[LookupResult, ...]

    def encode_value(self) -> bytes:
        return b"".join(result.encode() for result in self.results)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return {"results": _decode_all(value, _decode_lookup_result)}


@message
class MultiMutationResponse(Response):
    opcodes = (Opcode.SUBDOC_MULTI_MUTATION,)
    layouts = (NO_FIELDS, Layout(u64("vbuuid"), u64("seqno")))

    opcode: Opcode = Opcode.SUBDOC_MULTI_MUTATION
    vbuuid: Vbuuid | None = None
    seqno: Seqno | None = None
    results: tuple[MutationResult, ...] = ()

    def layout(self) -> Layout:
        return self.layouts[0 if self.vbuuid is None else 1]

    def encode_value(self) -> bytes:
        return b"".join(result.encode() for result in self.results)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return {"results": _decode_all(value, _decode_mutation_result)}


def _encode_specs(specs: tuple[LookupSpec, ...] | tuple[MutationSpec, ...]) -> bytes:
    if len(specs) > SPECS_MAX:
        raise LocalProtocolError(f"{len(specs)} sub-document paths exceed {SPECS_MAX}")
    return b"".join(spec.encode() for spec in specs)
