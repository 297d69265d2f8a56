"""Messages that set a connection up: HELLO, SASL, bucket, error map, cluster config; and the small change.

The layouts are those of kv_engine's docs/BinaryProtocol.md.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

from headwater.errors import MalformedMessage
from headwater.protocol.features import Feature, Magic, Opcode, ServerOpcode
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.base import NO_FIELDS, Layout, Request, Response, message, u16, u32, u64

_U16 = Struct(">H")


def _encode_features(features: tuple[Feature, ...]) -> bytes:
    return b"".join(_U16.pack(feature) for feature in features)


def _decode_features(value: bytes) -> tuple[Feature, ...]:
    if len(value) % _U16.size:
        raise MalformedMessage("HELLO features are 16 bits each", offset=HEADER_BYTES)
    return tuple(Feature(number) for (number,) in _U16.iter_unpack(value))


@message
class Hello(Request):
    opcode = Opcode.HELLO

    key: bytes = b""
    """The agent's name, often JSON."""
    features: tuple[Feature, ...] = ()

    def encode_value(self) -> bytes:
        return _encode_features(self.features)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return {"features": _decode_features(value)}


@message
class HelloResponse(Response):
    """The features the server agrees to, out of those asked for."""

    opcodes = (Opcode.HELLO,)

    opcode: Opcode = Opcode.HELLO
    features: tuple[Feature, ...] = ()

    def encode_value(self) -> bytes:
        return _encode_features(self.features)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return {"features": _decode_features(value)}


@message
class SaslListMechanisms(Request):
    opcode = Opcode.SASL_LIST_MECHS


@message
class SaslAuth(Request):
    opcode = Opcode.SASL_AUTH

    key: bytes
    """The mechanism."""
    value: bytes = b""


@message
class SaslStep(SaslAuth):
    opcode = Opcode.SASL_STEP


@message
class SelectBucket(Request):
    opcode = Opcode.SELECT_BUCKET

    key: bytes = b""
    """An empty name lets go of the bucket."""


_ERROR_MAP_VERSION = Layout(u16("version"))


@message
class GetErrorMap(Request):
    opcode = Opcode.GET_ERROR_MAP

    version: int

    def encode_value(self) -> bytes:
        return _ERROR_MAP_VERSION.pack(self)

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        return dict(_ERROR_MAP_VERSION.unpack_whole(value, "an error map version"))


_CONFIG_VERSION = Layout(u64("epoch"), u64("revision"))


@message
class GetClusterConfig(Request):
    """The cluster config, or nothing where the server has none newer than the version given."""

    opcode = Opcode.GET_CLUSTER_CONFIG
    layouts = (NO_FIELDS, _CONFIG_VERSION)

    epoch: int | None = None
    revision: int | None = None

    def layout(self) -> Layout:
        return self.layouts[0 if self.epoch is None else 1]


@message
class SetClusterConfig(Request):
    opcode = Opcode.SET_CLUSTER_CONFIG
    layouts = (_CONFIG_VERSION,)

    epoch: int
    revision: int
    key: bytes = b""
    """The bucket, or nothing for the cluster's own config."""
    value: bytes


@message
class ClustermapChangeNotification(Request):
    """Server-initiated: the cluster map has changed. Before epochs the version was one 32-bit revision."""

    opcode = ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION
    magic = Magic.SERVER_REQUEST
    layouts = (_CONFIG_VERSION, Layout(u32("revision")))

    epoch: int | None = None
    revision: int
    key: bytes = b""
    value: bytes = b""

    def layout(self) -> Layout:
        return self.layouts[1 if self.epoch is None else 0]


# --- small change -------------------------------------------------------------------------------------------------


@message
class Noop(Request):
    opcode = Opcode.NOOP


@message
class Version(Request):
    opcode = Opcode.VERSION


@message
class Quit(Request):
    opcode = Opcode.QUIT


@message
class QuitQuiet(Quit):
    opcode = Opcode.QUITQ


@message
class Flush(Request):
    """Drop all documents of the bucket. The delay is memcached's; 0 or absent."""

    opcode = Opcode.FLUSH
    layouts = (NO_FIELDS, Layout(u32("delay_s")))

    delay_s: int | None = None

    def layout(self) -> Layout:
        return self.layouts[0 if self.delay_s is None else 1]


@message
class FlushQuiet(Flush):
    opcode = Opcode.FLUSHQ


@message
class Stat(Request):
    """Statistics of a group, as one response a statistic and an empty one at the end."""

    opcode = Opcode.STAT

    key: bytes = b""
    value: bytes = b""


@message
class Verbosity(Request):
    opcode = Opcode.VERBOSITY
    layouts = (Layout(u32("level")),)

    level: int
