"""What messages are made of: layouts of fixed-width fields, and the classes that all messages inherit from.

A layout reads like the tables of the specification. Encoding, decoding and the annotated output all use it.

A message is a frozen dataclass. Its fields say what it may carry: a message with a field `key` without a default must
have a key, one with a default may have one, and one without the field must not; the same holds for `value`. A field
`collection_id` says that the key is a document's, so that on a collection-aware connection it starts with a LEB128
collection id. Integers of the extras come from a `Layout`; if versions differ in length, a class lists all layouts,
and a message has the one with the optional fields that are given. A value with its own structure has a `value_layout`,
or a `value_codec` if things repeat.

`WireMessage` implements this for both wire formats: memcached's (`Message`, with its requests and responses in the
modules of this package) and that of the UPR draft (`headwater.protocol.upr`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast, dataclass_transform

from headwater.errors import LocalProtocolError, MalformedMessage, RemoteProtocolError
from headwater.protocol import frames
from headwater.protocol.features import NOTHING_NEGOTIATED, Magic, Negotiated, Opcode
from headwater.protocol.numbers import KEY_BYTES_MAX, VALUE_BYTES_MAX, Cas, VBucketId
from headwater.protocol.status import SUCCESSFUL, Status
from headwater.protocol.values import Datatype


@dataclass(frozen=True, slots=True)
class LayoutField:
    """One integer of a layout, or bytes: its name, its width and the type of its values."""

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

    __slots__ = ("_converted", "_struct", "fields", "names", "size_bytes")

    def __init__(self, *fields: LayoutField) -> None:
        self.fields = fields
        self._struct = struct.Struct(">" + "".join(field.code for field in fields))
        self.size_bytes = self._struct.size
        self.names = tuple(field.name for field in fields)
        self._converted = tuple((field.name, field.convert) for field in fields if field.convert is not int)

    def pack(self, message: object) -> bytes:
        """Pack the message's attributes with these names, in this order."""
        try:
            return self._struct.pack(*[getattr(message, name) for name in self.names])
        except struct.error as error:
            raise LocalProtocolError(f"{type(message).__name__}: {error} (fields: {', '.join(self.names)})") from error

    def unpack(self, data: bytes, offset: int = 0) -> dict[str, int]:
        unpacked = dict(zip(self.names, self._struct.unpack_from(data, offset), strict=True))
        for name, convert in self._converted:
            unpacked[name] = convert(unpacked[name])
        return unpacked

    def take(self, data: bytes, at: int) -> tuple[dict[str, Any], int]:
        """Return the fields that start at `at`, and where they end."""
        head, end = take(data, at, self.size_bytes)
        return self.unpack(head), end

    def repeat(self, data: bytes) -> Iterator[tuple[int, ...]]:
        """Yield the repeated layout as plain numbers; the caller has checked that the length is a multiple."""
        return self._struct.iter_unpack(data)


NO_FIELDS = Layout()


def take(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    """Return the bytes of a value that start at `at`, and where they end. Raises `MalformedMessage` if cut off."""
    if at + length > len(data):
        raise MalformedMessage(
            f"the value is cut off: it has {len(data) - at} of {length} bytes", offset=frames.HEADER_BYTES + at
        )
    return data[at : at + length], at + length


class ValueCodec(NamedTuple):
    """How one field of a message, such as a list, makes up its whole value."""

    field: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def list_codec(
    field: str,
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes, int], tuple[Any, int]],
    *,
    count_min: int = 0,
    count_max: int = VALUE_BYTES_MAX,
) -> ValueCodec:
    """Return the codec of a list. `decode` gets the value and where an item starts; it returns the item and its end."""

    def encode_list(items: tuple[Any, ...]) -> bytes:
        if not count_min <= len(items) <= count_max:
            raise LocalProtocolError(f"{len(items)} {field}, not {count_min} to {count_max}")
        return b"".join(map(encode, items))

    def decode_list(value: bytes) -> tuple[Any, ...]:
        items: list[Any] = []
        at = 0
        while at < len(value) and len(items) < count_max:
            item, at = decode(value, at)
            items.append(item)
        if at < len(value) or len(items) < count_min:
            wrong = f"fewer than {count_min}" if len(items) < count_min else f"more than {count_max}"
            raise MalformedMessage(f"{wrong} {field}", offset=frames.HEADER_BYTES + at)
        return tuple(items)

    return ValueCodec(field, encode_list, decode_list)


# --- what the messages of both wire formats share ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class WireMessage:
    """A header, which subclasses define, and a body: extras, key and value. Converts to and from frames."""

    layouts: ClassVar[tuple[Layout, ...]] = (NO_FIELDS,)
    value_layout: ClassVar[Layout] = NO_FIELDS
    value_codec: ClassVar[ValueCodec | None] = None
    key_field: ClassVar[str | None] = None
    """The field that is sent as the key: `key` if a message has a field of that name."""
    key_bytes_max: ClassVar[int | None] = None
    _may_have: ClassVar[frozenset[str]] = frozenset()
    _must_have: ClassVar[frozenset[str]] = frozenset()
    _optional: ClassVar[tuple[str, ...]] = ()
    """The names of extras that may be None."""
    _layouts_by_given: ClassVar[dict[tuple[str, ...], Layout]] = {}

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
        """Learn from the fields which parts the body may have, and which it must have."""
        names = {field.name for field in fields(cls)}
        cls.key_field = "key" if "key" in names else cls.key_field
        parts = [field for field in fields(cls) if field.name in (cls.key_field, "value", "collection_id")]
        cls._may_have = frozenset(field.name for field in parts)
        cls._must_have = frozenset(field.name for field in parts if field.default is MISSING)
        if "collection_id" in cls._may_have:
            cls.key_bytes_max = KEY_BYTES_MAX
        always_given = {field.name for field in fields(cls) if field.default is not None}
        numbers = dict.fromkeys(number.name for layout in cls.layouts for number in layout.fields)
        cls._optional = tuple(name for name in numbers if name not in always_given)
        cls._layouts_by_given = {
            tuple(name for name in cls._optional if name in layout.names): layout for layout in cls.layouts
        }

    @classmethod
    def malformed(cls, part: str, reason: str) -> RemoteProtocolError:
        """Return the error for a part of the body (`extras`, `key` or `value`) that does not fit the message."""
        return MalformedMessage(reason, offset=frames.HEADER_BYTES)

    def layout(self) -> Layout:
        """Return the layout of this message's extras: the one with those optional numbers that are not None."""
        if not self._optional:
            return self.layouts[0]
        given = tuple([name for name in self._optional if getattr(self, name) is not None])
        layout = self._layouts_by_given.get(given)
        if layout is None:
            raise LocalProtocolError(f"{type(self).__name__} has no form with just {', '.join(given)}")
        return layout

    def encode_extras(self) -> bytes:
        return self.layout().pack(self)

    def encode_key(self) -> bytes:
        key: bytes = getattr(self, self.key_field) if self.key_field else b""
        collection_id: int | None = getattr(self, "collection_id", None)
        return key if collection_id is None else frames.encode_collection_id(collection_id) + key

    def encode_value(self) -> bytes:
        if "value" in self._may_have:
            value: bytes = getattr(self, "value")  # noqa: B009  (a field of subclasses)
            return value
        if self.value_codec is not None:
            return self.value_codec.encode(getattr(self, self.value_codec.field))
        return self.value_layout.pack(self) if self.value_layout.fields else b""

    def to_frame(self) -> frames.Frame:
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
        # Collections, "Key": if collections were negotiated, a document's key starts with the collection id.
        if negotiated.collections and "collection_id" in cls._may_have:
            decoded["collection_id"], at = frames.decode_collection_id(key)
            key = key[at:]
        if cls.key_bytes_max is not None and len(key) > cls.key_bytes_max:
            raise cls.malformed("key", f"a {cls.key_field} of {len(key)} bytes exceeds {cls.key_bytes_max}")
        if not key and cls.key_field in cls._must_have:
            raise cls.malformed("key", f"{cls.__name__} must have a {cls.key_field}")
        return {**decoded, cls.key_field: key}

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the value holds. `known` are those decoded before it."""
        if "value" in cls._may_have:
            if not value and "value" in cls._must_have:
                raise cls.malformed("value", f"{cls.__name__} must have a value")
            return {"value": value}
        if cls.value_codec is not None:
            return {cls.value_codec.field: cls.value_codec.decode(value)}
        size_bytes = cls.value_layout.size_bytes
        if size_bytes:
            if len(value) != size_bytes:
                reason = f"{cls.__name__} must have a value of {size_bytes} bytes, not {len(value)}"
                raise cls.malformed("value", reason)
            return dict(cls.value_layout.unpack(value))
        if value:
            reason = f"{cls.__name__} must not have a value, but {len(value)} bytes are left of its body"
            raise cls.malformed("value", reason)
        return {}

    @classmethod
    def decode_body(cls, frame: frames.Frame, negotiated: Negotiated, header: dict[str, Any]) -> dict[str, Any]:
        """Return all fields of the message, given those of its header."""
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
def message(*opcodes: int) -> Callable[[type[M]], type[M]]:
    """Make a class a message and enter it under its opcode; a response may answer several."""

    def make(cls: type[M]) -> type[M]:
        # `WireMessage` already has what dataclass would write for each class, a class without a docstring would get
        # its signature as one, and a class without fields of its own needs nothing new: avoiding these saves most of
        # the time that importing all messages takes.
        cls.__doc__ = cls.__doc__ or f"{cls.__name__}(…)"
        if "__annotations__" in cls.__dict__:
            made: type[M] = dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)(cls)
        else:
            own = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
            made = cast("type[M]", type(cls.__name__, cls.__bases__, {"__slots__": (), **own}))
        made.learn_shape()
        if issubclass(made, Request):
            (made.opcode,) = opcodes
            registry = SERVER_REQUESTS if made.magic is Magic.SERVER_REQUEST else REQUESTS
            registry[made.opcode] = made
        elif issubclass(made, Response):
            made.opcodes = tuple(Opcode(opcode) for opcode in opcodes)
            RESPONSES.update(dict.fromkeys(opcodes, made))
        return made

    return make


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Message(WireMessage):
    """A request or a response."""

    opaque: int = 0
    cas: Cas = Cas(0)
    datatype: Datatype = Datatype.RAW
    frame_infos: tuple[frames.FrameInfo, ...] = ()

    def _frame(self, magic: Magic, opcode: int, specific: int) -> frames.Frame:
        self.check_parts()
        return frames.Frame(
            magic=magic,
            opcode=opcode,
            specific=specific,
            opaque=self.opaque,
            cas=self.cas,
            datatype=self.datatype,
            framing_extras=frames.encode_frame_infos(self.frame_infos),
            extras=self.encode_extras(),
            key=self.encode_key(),
            value=self.encode_value(),
        )

    @classmethod
    def _decoded(cls, frame: frames.Frame, negotiated: Negotiated, **header: Any) -> Self:
        header |= {
            "opaque": frame.opaque,
            "cas": Cas(frame.cas),
            "datatype": Datatype(frame.datatype),
            "frame_infos": frames.decode_frame_infos(frame.framing_extras),
        }
        return cls(**cls.decode_body(frame, negotiated, header))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Request(Message):
    """A message that asks, or that reports a change. DCP's data messages are requests that get no response."""

    opcode: ClassVar[int]
    magic: ClassVar[Magic] = Magic.REQUEST

    vbucket: VBucketId = VBucketId(0)

    @property
    def stream_id(self) -> int | None:
        """The `sid` of the stream that the message belongs to, if streams have ids."""
        return frames.decode_stream_id(self.frame_infos)

    def to_frame(self) -> frames.Frame:
        if self.frame_infos and self.magic is not Magic.REQUEST:
            raise LocalProtocolError(f"{type(self).__name__}: server-initiated frames have no frame infos")
        return self._frame(Magic.FLEXIBLE_REQUEST if self.frame_infos else self.magic, self.opcode, self.vbucket)

    @classmethod
    def from_frame(cls, frame: frames.Frame, negotiated: Negotiated = NOTHING_NEGOTIATED) -> Self:
        return cls._decoded(frame, negotiated, vbucket=VBucketId(frame.specific))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Response(Message):
    """The answer to a request, in the form it has when the request succeeded."""

    opcodes: ClassVar[tuple[Opcode, ...]]
    statuses: ClassVar[frozenset[Status]] = SUCCESSFUL
    """The statuses with which the response has this form; with any other it is an `ErrorResponse`."""

    opcode: Opcode
    status: Status = Status.SUCCESS

    def to_frame(self) -> frames.Frame:
        return self._frame(Magic.FLEXIBLE_RESPONSE if self.frame_infos else Magic.RESPONSE, self.opcode, self.status)

    @classmethod
    def from_frame(cls, frame: frames.Frame, negotiated: Negotiated = NOTHING_NEGOTIATED) -> Self:
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
    """A success without details, or with a body that the caller decodes."""


class ErrorResponse(OpaqueResponse):
    """A response with an error status."""

    @property
    def context(self) -> str:
        """The server's message: `error.context` of a JSON body, else the body as text."""
        try:
            return str(json.loads(self.value)["error"]["context"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.value.decode(errors="replace")


for _class in (PlainResponse, ErrorResponse):
    _class.learn_shape()
