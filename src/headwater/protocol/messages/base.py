"""What messages are made of: layouts of fixed-width fields, and the classes that all messages inherit from.

A layout reads like the tables of the specification, and serves encoding, decoding and the annotated print alike.

A message is a frozen dataclass. Its fields say what it may carry: a field `key` that has no default means the message
must have a key, a `key` with a default that it may have one, and no such field that it must not; the same holds for
`value`. A field `collection_id` says that the key is a document's, so that on a collection-aware connection it starts
with a LEB128 collection id. Integers of the extras come from a `Layout`; where versions differ in length, a class
lists all layouts and picks one in `layout()`.

`WireMessage` holds that for both wire formats: memcached's (`Message`, with its requests and responses in the modules
of this package) and that of the UPR draft (`headwater.protocol.upr`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

from headwater.errors import LocalProtocolError, MalformedMessage, RemoteProtocolError
from headwater.protocol.features import NOTHING_NEGOTIATED, Magic, Negotiated, Opcode
from headwater.protocol.frames import (
    HEADER_BYTES,
    Frame,
    FrameInfo,
    decode_frame_infos,
    decode_stream_id,
    encode_frame_infos,
)
from headwater.protocol.numbers import KEY_BYTES_MAX, Cas, VBucketId, decode_collection_id, encode_collection_id
from headwater.protocol.status import SUCCESSFUL, Status
from headwater.protocol.values import Datatype


@dataclass(frozen=True, slots=True)
class LayoutField:
    """One integer of a layout, or bytes: its name, its width and the type it is given."""

    name: str
    code: str
    convert: Callable[[int], int] = int

    @property
    def width_bytes(self) -> int:
        return struct.Struct(">" + self.code).size


def u8(name: str, convert: Callable[[int], int] = int) -> LayoutField:
    return LayoutField(name, "B", convert)


def u16(name: str, convert: Callable[[int], int] = int) -> LayoutField:
    return LayoutField(name, "H", convert)


def u32(name: str, convert: Callable[[int], int] = int) -> LayoutField:
    return LayoutField(name, "I", convert)


def u64(name: str, convert: Callable[[int], int] = int) -> LayoutField:
    return LayoutField(name, "Q", convert)


def octets(name: str, count: int) -> LayoutField:
    """Bytes that are no number."""
    return LayoutField(name, f"{count}s")


class Layout:
    """A sequence of fields."""

    __slots__ = ("_converted", "_names", "_struct", "fields", "size_bytes")

    def __init__(self, *fields: LayoutField) -> None:
        self.fields = fields
        self._struct = struct.Struct(">" + "".join(field.code for field in fields))
        self.size_bytes = self._struct.size
        self._names = tuple(field.name for field in fields)
        self._converted = tuple((field.name, field.convert) for field in fields if field.convert is not int)

    def pack(self, message: object) -> bytes:
        """The message's attributes of these names, in this order."""
        try:
            return self._struct.pack(*[getattr(message, field.name) for field in self.fields])
        except struct.error as error:
            names = ", ".join(field.name for field in self.fields)
            raise LocalProtocolError(f"{type(message).__name__}: {error} (fields: {names})") from error

    def unpack(self, data: bytes, offset: int = 0) -> dict[str, int]:
        unpacked = dict(zip(self._names, self._struct.unpack_from(data, offset), strict=True))
        for name, convert in self._converted:
            unpacked[name] = convert(unpacked[name])
        return unpacked

    def unpack_whole(self, data: bytes, what: str) -> dict[str, int]:
        """The fields of a value that must be this layout and nothing else."""
        if len(data) != self.size_bytes:
            raise MalformedMessage(f"{what} of {len(data)} bytes, not {self.size_bytes}", offset=HEADER_BYTES)
        return self.unpack(data)

    def repeat(self, data: bytes) -> Iterator[tuple[int, ...]]:
        """The layout over and over, as plain numbers; the caller has checked that the length is a multiple."""
        return self._struct.iter_unpack(data)


NO_FIELDS = Layout()


# --- what the messages of both wire formats share ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class WireMessage:
    """A header, which subclasses say, and a body: extras, key and value, and the way to and from a frame."""

    layouts: ClassVar[tuple[Layout, ...]] = (NO_FIELDS,)
    key_field: ClassVar[str | None] = None
    """The field that is sent as the key: `key` where a message has a field of that name."""
    key_bytes_max: ClassVar[int | None] = None
    _may_have: ClassVar[frozenset[str]] = frozenset()
    _must_have: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def learn_shape(cls) -> None:
        """Read off the fields which parts the body may have, and which it must have."""
        names = {field.name for field in fields(cls)}
        cls.key_field = "key" if "key" in names else cls.key_field
        parts = [field for field in fields(cls) if field.name in (cls.key_field, "value", "collection_id")]
        cls._may_have = frozenset(field.name for field in parts)
        cls._must_have = frozenset(field.name for field in parts if field.default is MISSING)
        if "collection_id" in cls._may_have:
            cls.key_bytes_max = KEY_BYTES_MAX

    @classmethod
    def malformed(cls, part: str, reason: str) -> RemoteProtocolError:
        """The error for a part of the body (`extras`, `key` or `value`) that does not fit the message."""
        return MalformedMessage(reason, offset=HEADER_BYTES)

    def layout(self) -> Layout:
        """The layout of this message's extras, by the version its fields ask for."""
        return self.layouts[0]

    def encode_extras(self) -> bytes:
        return self.layout().pack(self)

    def encode_key(self) -> bytes:
        key: bytes = getattr(self, self.key_field) if self.key_field else b""
        collection_id: int | None = getattr(self, "collection_id", None)
        return key if collection_id is None else encode_collection_id(collection_id) + key

    def encode_value(self) -> bytes:
        value: bytes = getattr(self, "value", b"")
        return value

    def to_frame(self) -> Frame:
        raise NotImplementedError  # pragma: no cover  (the subclass knows the header)

    def encode(self) -> bytes:
        return self.to_frame().encode()

    def check_parts(self) -> None:
        for part in self._must_have - {"collection_id"}:
            if not getattr(self, part):
                raise LocalProtocolError(f"{type(self).__name__} must have a {part}")

    @classmethod
    def decode_extras(cls, extras: bytes) -> dict[str, Any]:
        for layout in cls.layouts:
            if layout.size_bytes == len(extras):
                return layout.unpack(extras)
        expected = " or ".join(str(layout.size_bytes) for layout in cls.layouts)
        raise cls.malformed("extras", f"{cls.__name__} must have extras of {expected} bytes, not {len(extras)}")

    @classmethod
    def decode_key(cls, key: bytes, negotiated: Negotiated) -> dict[str, Any]:
        if cls.key_field is None:
            if key:
                raise cls.malformed("key", f"{cls.__name__} must not have a key")
            return {}
        decoded: dict[str, Any] = {}
        # Collections, "Key": where collections were negotiated, a document's key starts with the collection id.
        if negotiated.collections and "collection_id" in cls._may_have:
            decoded["collection_id"], at = decode_collection_id(key)
            key = key[at:]
        if cls.key_bytes_max is not None and len(key) > cls.key_bytes_max:
            raise cls.malformed("key", f"a {cls.key_field} of {len(key)} bytes exceeds {cls.key_bytes_max}")
        if not key and cls.key_field in cls._must_have:
            raise cls.malformed("key", f"{cls.__name__} must have a {cls.key_field}")
        return {**decoded, cls.key_field: key}

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        """The fields that the value holds. `known` are those decoded before it."""
        if "value" in cls._may_have:
            if not value and "value" in cls._must_have:
                raise cls.malformed("value", f"{cls.__name__} must have a value")
            return {"value": value}
        if value:
            reason = f"{cls.__name__} must not have a value, but {len(value)} bytes are left of its body"
            raise cls.malformed("value", reason)
        return {}

    @classmethod
    def decode_body(cls, frame: Frame, negotiated: Negotiated, header: dict[str, Any]) -> dict[str, Any]:
        """All fields of the message, given those of its header."""
        known = header | cls.decode_extras(frame.extras)
        known |= cls.decode_key(frame.key, negotiated)
        known |= cls.decode_value(frame.value, known)
        return known


# --- messages of memcached's binary protocol, DCP's among them --------------------------------------------------------

REQUESTS: dict[int, type[Request]] = {}
RESPONSES: dict[int, type[Response]] = {}
SERVER_REQUESTS: dict[int, type[Request]] = {}

M = TypeVar("M", bound="Message")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def message(cls: type[M]) -> type[M]:
    """Make a class a message and enter it under its opcode."""
    # `WireMessage` has what dataclass would write for each class again, a class without a docstring would get its
    # signature for one, and one with no fields of its own needs nothing new: these take most of the time to import all
    # messages.
    cls.__doc__ = cls.__doc__ or f"{cls.__name__}(…)"
    if "__annotations__" in cls.__dict__:
        made: type[M] = dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)(cls)
    else:
        own = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
        made = cast("type[M]", type(cls.__name__, cls.__bases__, {"__slots__": (), **own}))
    made.learn_shape()
    if issubclass(made, Request):
        registry = SERVER_REQUESTS if made.magic is Magic.SERVER_REQUEST else REQUESTS
        registry[made.opcode] = made
    elif issubclass(made, Response):
        for opcode in made.opcodes:
            RESPONSES[opcode] = made
    return made


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Message(WireMessage):
    """A request or a response."""

    opaque: int = 0
    cas: Cas = Cas(0)
    datatype: Datatype = Datatype.RAW
    frame_infos: tuple[FrameInfo, ...] = ()

    def _frame(self, magic: Magic, opcode: int, specific: int) -> Frame:
        self.check_parts()
        return Frame(
            magic=magic,
            opcode=opcode,
            specific=specific,
            opaque=self.opaque,
            cas=self.cas,
            datatype=self.datatype,
            framing_extras=encode_frame_infos(self.frame_infos),
            extras=self.encode_extras(),
            key=self.encode_key(),
            value=self.encode_value(),
        )

    @classmethod
    def _decoded(cls, frame: Frame, negotiated: Negotiated, **header: Any) -> Self:
        header |= {
            "opaque": frame.opaque,
            "cas": Cas(frame.cas),
            "datatype": Datatype(frame.datatype),
            "frame_infos": decode_frame_infos(frame.framing_extras),
        }
        return cls(**cls.decode_body(frame, negotiated, header))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Request(Message):
    """A message that asks, or that reports a change. DCP's own data messages are requests that get no response."""

    opcode: ClassVar[int]
    magic: ClassVar[Magic] = Magic.REQUEST

    vbucket: VBucketId = VBucketId(0)

    @property
    def stream_id(self) -> int | None:
        """The `sid` of the stream the message belongs to, where streams have ids."""
        return decode_stream_id(self.frame_infos)

    def to_frame(self) -> Frame:
        if self.frame_infos and self.magic is not Magic.REQUEST:
            raise LocalProtocolError(f"{type(self).__name__}: server-initiated frames have no frame infos")
        return self._frame(Magic.FLEXIBLE_REQUEST if self.frame_infos else self.magic, self.opcode, self.vbucket)

    @classmethod
    def from_frame(cls, frame: Frame, negotiated: Negotiated = NOTHING_NEGOTIATED) -> Self:
        return cls._decoded(frame, negotiated, vbucket=VBucketId(frame.specific))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Response(Message):
    """The answer to a request, in the form it has when the request succeeded."""

    opcodes: ClassVar[tuple[Opcode, ...]]
    statuses: ClassVar[frozenset[Status]] = SUCCESSFUL
    """The statuses under which the response has this form; with any other it is an `ErrorResponse`."""

    opcode: Opcode
    status: Status = Status.SUCCESS

    def to_frame(self) -> Frame:
        return self._frame(Magic.FLEXIBLE_RESPONSE if self.frame_infos else Magic.RESPONSE, self.opcode, self.status)

    @classmethod
    def from_frame(cls, frame: Frame, negotiated: Negotiated = NOTHING_NEGOTIATED) -> Self:
        return cls._decoded(frame, negotiated, opcode=Opcode(frame.opcode), status=Status(frame.specific))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class OpaqueResponse(Response):
    """A response whose extras, key and value are kept as bytes."""

    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""

    def encode_extras(self) -> bytes:
        return self.extras

    @classmethod
    def decode_extras(cls, extras: bytes) -> dict[str, Any]:
        return {"extras": extras}


class PlainResponse(OpaqueResponse):
    """A success that says no more than that, or whose body is the caller's own business."""


class ErrorResponse(OpaqueResponse):
    """A response with an error status."""

    @property
    def context(self) -> str:
        """The server's own words: `error.context` of a JSON body, else the body as text."""
        try:
            return str(json.loads(self.value)["error"]["context"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.value.decode(errors="replace")


for _class in (PlainResponse, ErrorResponse):
    _class.learn_shape()
